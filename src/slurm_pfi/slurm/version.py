"""Which Slurm is installed, by its commands' own word. What is not known is a value, never a guess."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

_SAID: Final = re.compile(r"slurm(?:-wlm)? ([0-9]{2})\.([0-9]{1,2})(?:\.[0-9]{1,3})?(?:-\S+)?", re.ASCII)
_OF_PYSLURM: Final = re.compile(r"([0-9]{2})\.([0-9]{1,2})(?:\.\S*)?", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A major release: year and month, as in 24.11. Slurm's own patches change nothing that is read."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major:02}.{self.minor:02}"


@dataclass(frozen=True, slots=True)
class UnknownVersion:
    """The release is not known; ``why`` says what was seen instead."""

    why: str


Probed: TypeAlias = Version | UnknownVersion


def read_version(said: str) -> Probed:
    """Read ``slurm-wlm 24.11.5``, what ``squeue -V`` and the daemons print."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    matches = [match for line in lines if (match := _SAID.fullmatch(line))]
    if len(matches) != 1:
        return UnknownVersion(f"{said.strip()[:80]!r} names no release of Slurm")
    return Version(int(matches[0][1]), int(matches[0][2]))


def read_pyslurm_version(said: str) -> Probed:
    """Read ``24.11.0`` of ``pyslurm.__version__``: its first two numbers are the release of Slurm it was built for."""
    match = _OF_PYSLURM.fullmatch(said)
    if match is None:
        return UnknownVersion(f"{said[:80]!r} is no version of pyslurm")
    return Version(int(match[1]), int(match[2]))
