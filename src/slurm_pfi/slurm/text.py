"""Slurm's words for numbers, times and nodes, read strictly: what is not surely understood is an error."""

from __future__ import annotations

import re
from typing import Final

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from .backend import Span, Special

MAX_JOB_ID: Final = 2**32 - 1

_ABSENT: Final = frozenset({"", "N/A", "(null)", "NOT_SET", "Unknown"})
_NO_LIMIT: Final = frozenset({"UNLIMITED", "INFINITE", "NONE"})
# D-HH[:MM[:SS]], HH:MM:SS, MM:SS or MM (squeue(1), sbatch(1) --time), with a fraction of seconds from sacct.
_DURATION: Final = re.compile(
    r"(?:(?P<days>\d{1,6})-(?P<d_hours>\d{1,2})(?::(?P<d_minutes>\d{1,2})(?::(?P<d_seconds>\d{1,2}))?)?"
    r"|(?P<hours>\d{1,6}):(?P<h_minutes>\d{1,2}):(?P<h_seconds>\d{1,2})"
    r"|(?P<minutes>\d{1,8})(?::(?P<m_seconds>\d{1,2}))?)(?:\.\d{1,6})?",
    re.ASCII,
)


class SlurmTextError(ValueError):
    """Text from Slurm that is not understood."""


def parse_count(text: str, *, most: int = MAX_JOB_ID) -> int:
    """A whole number from 0 to ``most``, digits only. Raises SlurmTextError."""
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) > most:
        raise SlurmTextError(f"{text[:64]!r} is not a number up to {most}")
    return int(text)


def parse_job_id(text: str) -> int:
    """A job id, 1 to 2^32 - 1 (federated ids carry their origin in the upper bits). Never 0 for "not read"."""
    job_id = parse_count(text)
    if job_id == 0:
        raise SlurmTextError("0 is not a job id")
    return job_id


def parse_limit_s(text: str) -> Span:
    """A time limit in seconds, unlimited, or not set (the partition's word holds). Raises SlurmTextError."""
    if text in _ABSENT or text in {"INVALID", "Partition_Limit"}:
        return Special.NOT_SET
    if text in _NO_LIMIT:
        return Special.UNLIMITED
    match = _DURATION.fullmatch(text)
    if match is None:
        raise SlurmTextError(f"{text[:64]!r} is not a time limit")
    part = {name: int(digits or 0) for name, digits in match.groupdict().items()}
    hours = part["days"] * 24 + part["d_hours"] + part["hours"]
    minutes = part["d_minutes"] + part["h_minutes"] + part["minutes"]
    return hours * 3600 + minutes * 60 + part["d_seconds"] + part["h_seconds"] + part["m_seconds"]


def parse_unix_s(text: str) -> Span:
    """A point in time as Unix seconds (SLURM_TIME_FORMAT=%s), unlimited, or not set. Raises SlurmTextError."""
    if text in _ABSENT:
        return Special.NOT_SET
    if text in _NO_LIMIT:
        return Special.UNLIMITED
    return parse_count(text, most=2**53)


def expand_nodes(text: str) -> tuple[str, ...]:
    """A host list such as ``n[1-2],m007`` as node names, each once. Raises SlurmTextError."""
    if text in {"", "(null)", "None assigned"}:
        return ()
    if re.fullmatch(r"[A-Za-z0-9_.,\[\]-]+", text, re.ASCII) is None:
        raise SlurmTextError(f"{text[:64]!r} is not a list of nodes")
    try:
        return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise SlurmTextError(f"{text[:64]!r} is not a list of nodes: {error}") from error
