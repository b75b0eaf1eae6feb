"""``slurm-pfi`` as an ordinary user runs it, on the controller's host or on one with nothing but Slurm's commands."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.cluster import Cluster
from testbed.processes import submitter


def run_as(user: str | None, command: Sequence[str]) -> list[str]:
    """The command as this user's, who may read what is its owner's alone: the project may lie below /root."""
    account = submitter(user)
    if account.pw_uid == os.getuid():
        return list(command)
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    who = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
    return ["setpriv", *who, *rights, "env", *command]


def slurm_pfi(
    cluster: Cluster,
    *arguments: str,
    user: str | None = None,
    config: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """What ``user`` (default: who submits) is told. Without ``config`` this is a host that has none."""
    named = {} if config is None else {"SLURM_PFI_CONF": str(config)}
    return subprocess.run(
        run_as(user, [sys.executable, "-m", "slurm_pfi", *arguments]),
        env={**cluster.client_env, **named, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        timeout=90,
        cwd=cluster.folder,
    )


def other_user() -> str:
    """Somebody who is neither root nor who submits."""
    mine = submitter(None).pw_name
    return next(name for name in ("daemon", "games", "nobody") if name != mine and _is_user(name))


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
