"""Slurm's words for numbers, times and nodes, read strictly: what is not surely understood is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from .backend import Span, Special
from .damage import SlurmTextError, damaged
from .hosts import HostListError, count_list

MAX_JOB_ID: Final = 2**32 - 1
MAX_NODES: Final = 65_536
"""More than one slurmctld can have (slurm.conf(5), NodeName)."""

_ABSENT: Final = frozenset({"", "N/A", "(null)", "NOT_SET", "Unknown"})
_NO_LIMIT: Final = frozenset({"UNLIMITED", "INFINITE", "NONE"})
# D-HH[:MM[:SS]], HH:MM:SS, MM:SS or MM (squeue(1), sbatch(1) --time), with a fraction of seconds from sacct.
_DURATION: Final = re.compile(
    r"(?P<days>\d{1,6})-(?P<d_hours>\d{1,2})"
    r"(?::(?P<d_minutes>\d{1,2})(?::(?P<d_seconds>\d{1,2})(?:\.\d{1,6})?)?)?"
    r"|(?P<hours>\d{1,6}):(?P<h_minutes>\d{1,2}):(?P<h_seconds>\d{1,2})(?:\.\d{1,6})?"
    r"|(?P<minutes>\d{1,8})(?::(?P<m_seconds>\d{1,2})(?:\.\d{1,6})?)?",
    re.ASCII,
)

# What sbatch prints (sbatch(1)), with --parsable and without, and squeue's heading for one cluster (squeue(1), -M).
_SUBMITTED: Final = re.compile(r"Submitted batch job (?P<id>\S+)(?: on cluster (?P<cluster>\S+))?")
_PARSABLE: Final = re.compile(r"(?P<id>[0-9]+)(?:;(?P<cluster>\S+))?", re.ASCII)
_CLUSTER: Final = re.compile(r"CLUSTER: (?P<cluster>\S+)")
_NODE_LETTER: Final = re.compile(r"[A-Za-z0-9_.,\[\]-]", re.ASCII)


@dataclass(frozen=True, slots=True)
class JobRef:
    """A job by its id, and the cluster that it is on where the text names one."""

    job_id: int
    cluster: str | None


def parse_count(text: str, *, most: int = MAX_JOB_ID) -> int:
    """A whole number from 0 to ``most``, digits only. Raises SlurmTextError."""
    if not (text.isascii() and text.isdigit()):
        raise damaged(text, _first_not_in(text, "0123456789"), f"a number up to {most}")
    if len(text) > 20 or int(text) > most:
        raise damaged(text, 0, f"a number up to {most}")
    return int(text)


def parse_job_id(text: str) -> int:
    """A job id, 1 to 2^32 - 1 (federated ids carry their origin in the upper bits). Never 0 for "not read"."""
    job_id = parse_count(text)
    if job_id == 0:
        raise damaged(text, 0, "a job id")
    return job_id


def read_submission(text: str) -> JobRef:
    """The one job that ``sbatch``, or ``squeue -M CLUSTER -o %A`` for one job, tells of. Raises SlurmTextError.

    Words of plugins and warnings around it are passed over; two different jobs are an error, and so is none.
    """
    found: list[JobRef] = []
    heading: str | None = None
    place = 0
    for line in text.splitlines(keepends=True):
        word = line.strip()
        if match := _CLUSTER.fullmatch(word):
            heading = match["cluster"]
        elif match := _SUBMITTED.fullmatch(word) or _PARSABLE.fullmatch(word):
            try:
                found.append(JobRef(parse_job_id(match["id"]), match["cluster"] or heading))
            except SlurmTextError as error:
                raise damaged(text, place, f"a job's id: {error}") from error
        place += len(line)
    if not found:
        raise damaged(text, place, "an answer of sbatch: it names no job")
    if len(set(found)) > 1:
        raise damaged(text, 0, f"an answer about one job: it names {found[0].job_id} and {found[-1].job_id}")
    return found[0]


def is_state(text: str) -> bool:
    """Whether the text can be one of Slurm's words for a job's state or flag (squeue(1), JOB STATE CODES)."""
    return text.isascii() and text.replace("_", "").isalpha() and text.isupper()


def parse_state(text: str) -> str:
    """A job's state or flag. Raises SlurmTextError."""
    if not is_state(text):
        raise SlurmTextError(f"{text[:64]!r} is not a job state")
    return text


def named(text: str) -> str:
    """A name; empty for Slurm's words for none."""
    return "" if text in {"(null)", "N/A"} else text


def parse_limit_s(text: str) -> Span:
    """A time limit in seconds, unlimited, or not set (the partition's word holds). Raises SlurmTextError."""
    if text in _ABSENT or text in {"INVALID", "Partition_Limit"}:
        return Special.NOT_SET
    if text in _NO_LIMIT:
        return Special.UNLIMITED
    match = _DURATION.fullmatch(text)
    if match is None:
        raise damaged(text, _first_not_in(text, "0123456789-:."), "a time limit")
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
    for place, letter in enumerate(text):
        if _NODE_LETTER.fullmatch(letter) is None:
            raise damaged(text, place, "a list of nodes")
    try:
        # ClusterShell would begin to write out n[1-999999999].
        if count_list(text) > MAX_NODES:
            raise damaged(text, 0, f"a list of at most {MAX_NODES} nodes")
        return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except (HostListError, NodeSetException) as error:
        raise SlurmTextError(f"not a list of nodes: {error}") from error


def _first_not_in(text: str, letters: str) -> int:
    return next((place for place, letter in enumerate(text) if letter not in letters), len(text))
