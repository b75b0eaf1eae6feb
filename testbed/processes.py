"""Processes of a cluster: as whom they run, how to wait for what they do, and which of them are left."""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypedDict

from .cluster_files import ClusterError

POLL_S: Final = 0.05
_STEPD: Final = re.compile(r"slurmstepd: \[([0-9]+)\.")
_JOB_ID: Final = re.compile(r"(?:^|\0)SLURM_JOB_ID=([0-9]+)(?:\0|$)")


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Ask until true. Raises ClusterError naming ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(POLL_S)


def submitter(user: str | None) -> pwd.struct_passwd:
    """Who submits: the user named, else ``nobody`` where we are root, else ourselves."""
    if user is not None:
        return pwd.getpwnam(user)
    return pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())


class Become(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


def become(account: pwd.struct_passwd | None) -> Become:
    """Popen's arguments to become ``account``; none needed when we are it already."""
    if account is None or account.pw_uid == os.getuid():
        return {}
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def processes_naming(folder: Path, below: str = "") -> dict[int, str]:
    """Living processes with ``folder`` in command line or environment, ourselves and our parents left out.

    With ``below`` only those that are, or descend from, a process whose command line begins so.
    """
    needle = os.fsencode(folder)
    ours = _line_of(os.getpid())
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) in ours:
            continue
        pid = int(entry.name)
        try:
            command = _command(pid)
            environment = (entry / "environ").read_bytes()
            if not command or not (needle in command or needle in environment):
                continue
            if not any(_command(parent).startswith(below.encode()) for parent in _line_of(pid)):
                continue
        except OSError:  # gone meanwhile, or another user's
            continue
        found[pid] = os.fsdecode(command)
    return found


def processes_of_jobs(folder: Path) -> dict[int, tuple[int, str]]:
    """Living processes of this cluster's jobs, their hooks and their slurmstepds: pid to job id and command line."""
    found = {}
    for pid, command in processes_naming(folder).items():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # gone meanwhile
            continue
        match = _STEPD.match(command) or _JOB_ID.search(environment.decode(errors="replace"))
        if match is not None:
            found[pid] = int(match[1]), command
    return found


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()


def _line_of(pid: int) -> set[int]:
    """A process and its ancestors."""
    found = set[int]()
    while pid > 0 and pid not in found:
        found.add(pid)
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        pid = int(stat.rpartition(")")[2].split()[1])
    return found
