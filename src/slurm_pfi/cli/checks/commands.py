"""One Slurm command with a time limit, for reading only."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Final

from ...config import SlurmSection

PATIENCE_S: Final = 5.0
"""A command without a slurmctld takes 9 s to give up by itself (squeue 22.05)."""


@dataclass(frozen=True, slots=True)
class Ran:
    """``error``: what the command wrote to stderr, on one line."""

    exit_code: int
    out: str
    error: str


def path_of(slurm: SlurmSection, command: str) -> str | None:
    """Where the command is; None when it is not there."""
    return shutil.which(command, path=slurm.bin_dir or os.environ.get("PATH", os.defpath))


def run(slurm: SlurmSection, command: str, *arguments: str, patience_s: float = PATIENCE_S) -> Ran | str:
    """What the command said, or why there is no answer."""
    path = path_of(slurm, command)
    if path is None:
        return f"{command} is not found in {slurm.bin_dir or 'PATH'}"
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "SLURM_CONF": slurm.conf}
    try:
        done = subprocess.run(
            [path, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{command} {arguments[0] if arguments else ''} gave no answer within {patience_s:g} s"
    except OSError as error:
        return f"{path} cannot be run: {error.strerror}"
    return Ran(done.returncode, done.stdout.decode("utf-8", "replace"), one_line(done.stderr))


def one_line(raw: bytes) -> str:
    """Text of a command as one printable line of at most 300 characters."""
    words = " ".join(raw.decode("utf-8", "replace").split())
    return "".join(letter for letter in words if letter.isprintable())[:300]
