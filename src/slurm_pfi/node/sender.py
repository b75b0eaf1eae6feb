"""Whose process sent a datagram: told by the kernel, never by the text.

The kernel puts the sender's pid and uid on each datagram (SCM_CREDENTIALS). From there two ways lead to a job, and a
user can forge neither:

- its cgroup, where Slurm made one. Only root writes below slurmstepd's scope, so a daemonised child stays in its job;
- its parents, up to slurmstepd. Anyone can take that process's name and title, and a set-uid program with a title of
  the user's choice has root's effective uid. So the real uid counts, and the file that it runs.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from .progress import RunKey

MAX_PARENTS: Final = 32
MAX_REMEMBERED: Final = 2048
FORGET_STRANGERS_S: Final = 5.0

GONE: Final = "sender has ended"
NO_JOB: Final = "sender is in no job of this node"
OLD_RUN: Final = "sender belongs to a run that has ended"
CROWDED: Final = "more senders than can be looked up"

# The paths that Slurm's cgroup plugins make. Users get subtrees of their own elsewhere (user@UID.service), not here.
_CGROUP: Final = re.compile(
    rb"^(?:0::/system\.slice/slurmstepd\.scope/job_([1-9][0-9]{0,9})"
    rb"|[0-9]+:(?:freezer|memory|cpuset|devices|cpu,cpuacct|cpuacct,cpu)"
    rb":/slurm/uid_[0-9]+/job_([1-9][0-9]{0,9}))(?:/|$)",
    re.MULTILINE,
)
_STEP_TITLE: Final = re.compile(rb"slurmstepd: \[([1-9][0-9]{0,9})\.")
# Debian's is slurmstepd-wlm; after an update the file of a step that still runs is deleted.
_STEP_FILE: Final = re.compile(r"slurmstepd(?:-[a-z0-9.]+)?(?: \(deleted\))?")


class Dropped(Exception):  # noqa: N818 - what happens to the datagram, no error of ours
    """A datagram that does not count; the message is one of a few fixed texts."""


class _Process(NamedTuple):
    name: str
    parent: int
    uids: frozenset[int]  # real, effective, saved and of the file system
    real_uid: int


class JobFinder:
    """From a pid to its job, by /proc. Nothing is remembered."""

    def __init__(self, trusted_uids: frozenset[int], proc: Path = Path("/proc")) -> None:
        self._trusted = trusted_uids
        self._proc = proc

    def started(self, pid: int) -> int:
        """When a process started, in clock ticks since boot: with the pid, its identity. Raises OSError, ValueError."""
        text = (self._proc / str(pid) / "stat").read_bytes()
        return int(text[text.rindex(b")") :].split(None, 21)[20])

    def job_of(self, pid: int, uid: int) -> int | None:
        """The job id; None when the sender is gone, is another user's by now, or belongs to no job."""
        if pid <= 0:  # it is in no process namespace that we see
            return None
        try:
            process = self._read(pid)
            if process.real_uid != uid:
                return None
            return self._by_cgroup(pid) or self._by_parents(pid, process)
        except (OSError, ValueError, LookupError):
            return None

    def _by_cgroup(self, pid: int) -> int | None:
        try:
            match = _CGROUP.search((self._proc / str(pid) / "cgroup").read_bytes())
        except FileNotFoundError:  # a kernel without cgroups; a process that is gone is seen again below
            return None
        return int(match[1] or match[2]) if match else None

    def _by_parents(self, pid: int, process: _Process) -> int | None:
        for _ in range(MAX_PARENTS):
            if process.name == "slurmstepd" and (job_id := self._step_job(pid, process)) is not None:
                return job_id
            if process.parent <= 1:
                return None
            pid = process.parent
            process = self._read(pid)
        return None

    def _read(self, pid: int) -> _Process:
        found: dict[bytes, bytes] = {}
        for line in (self._proc / str(pid) / "status").read_bytes().splitlines():
            key, _, value = line.partition(b":\t")
            found[key] = value
            if key == b"Uid":
                break
        uids = [int(word) for word in found[b"Uid"].split()]
        name = found[b"Name"].decode("utf-8", errors="replace")
        return _Process(name=name, parent=int(found[b"PPid"]), uids=frozenset(uids), real_uid=uids[0])

    def _step_job(self, pid: int, process: _Process) -> int | None:
        """The job in the title of a slurmstepd; None unless it is one."""
        if not process.uids <= self._trusted:
            return None
        folder = self._proc / str(pid)
        if _STEP_FILE.fullmatch((folder / "exe").readlink().name) is None:
            return None
        program = (folder / "exe").stat()
        if program.st_uid not in self._trusted or program.st_mode & (
            stat.S_ISUID | stat.S_IWGRP | stat.S_IWOTH
        ):
            return None
        match = _STEP_TITLE.match((folder / "cmdline").read_bytes())
        return int(match[1]) if match else None


@dataclass
class _Known:
    """A process that has sent. ``run`` is that of its job when it was first looked up, and stays; None: a stranger."""

    started: int
    run: RunKey | None
    found_s: float
    seen_s: float


class Turn:
    """One turn of reading: its time, and how many processes may still be looked up in it."""

    def __init__(self, now_s: float, lookups: int) -> None:
        self.now_s = now_s
        self.lookups = lookups


class Senders:
    """Remembers which run a process belongs to, so that only its first datagram costs a walk through /proc.

    A pid counts as the same process while its start time is the same.
    """

    def __init__(self, finder: JobFinder, run_of: Callable[[int], RunKey | None]) -> None:
        self._finder = finder
        self._run_of = run_of
        self._known: dict[tuple[int, int], _Known] = {}

    def run_of(self, pid: int, uid: int, turn: Turn) -> RunKey:
        """The run that a process belongs to. Raises Dropped."""
        known = self._known.get((pid, uid))
        if known is None or known.seen_s != turn.now_s:
            known = self._recognised(pid, uid, known, turn)
        if known.run is None:
            raise Dropped(NO_JOB)
        if known.run != self._run_of(known.run.job_id):
            raise Dropped(OLD_RUN)
        return known.run

    def _recognised(self, pid: int, uid: int, known: _Known | None, turn: Turn) -> _Known:
        try:
            started = self._finder.started(pid) if pid > 0 else 0
        except (OSError, ValueError, IndexError):
            self._known.pop((pid, uid), None)
            raise Dropped(GONE) from None
        fresh = known is not None and (known.run or turn.now_s - known.found_s < FORGET_STRANGERS_S)
        if known is not None and known.started == started and fresh:
            known.seen_s = turn.now_s
            return known
        if turn.lookups <= 0:
            raise Dropped(CROWDED)
        turn.lookups -= 1
        job_id = self._finder.job_of(pid, uid)
        run = None if job_id is None else self._run_of(job_id)
        found = _Known(started=started, run=run, found_s=turn.now_s, seen_s=turn.now_s)
        if job_id is not None and run is None:
            # Its job file may come in a moment: it is looked up again then.
            self._known.pop((pid, uid), None)
            return found
        if len(self._known) >= MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[pid, uid] = found
        return found
