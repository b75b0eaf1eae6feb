"""What the controller asks of Slurm, and the answers. "Unknown" is an answer of its own, never an empty one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypeAlias

# States in which a job holds its nodes (slurm.h, job_states and job state flags).
HOLDS_NODES: Final = frozenset(
    {
        "RUNNING",
        "SUSPENDED",
        "COMPLETING",
        "CONFIGURING",
        "STOPPED",
        "SIGNALING",
        "STAGE_OUT",
        "RESIZING",
    }
)


class Special(Enum):
    """Times that are no number."""

    UNLIMITED = "unlimited"
    NOT_SET = "not set"


Span: TypeAlias = int | Special
"""Seconds (a duration, or Unix time where the name says so), unlimited, or not set. Zero is a number."""


@dataclass(frozen=True, slots=True)
class JobInfo:
    """One job as slurmctld knows it.

    ``array_task_id`` is None for a job that is no array task, and for the group of an array's waiting tasks.
    ``account`` is text of the user's where the site has no accounting database. ``nodes`` is empty while the job
    holds none. ``name`` and ``comment`` are the user's, who may change them at any time, and empty when not given;
    bytes in them that are no UTF-8 stand as ``\\xNN``, so the text can be encoded again anywhere.
    """

    job_id: int
    array_job_id: int | None
    array_task_id: int | None
    het_job_id: int | None
    het_offset: int | None
    restart: int
    user_id: int
    user_name: str
    account: str
    partition: str
    qos: str
    state: str
    nodes: tuple[str, ...]
    start_unix_s: Span
    end_unix_s: Span
    limit_s: Span
    name: str = ""
    comment: str = ""

    @property
    def holds_nodes(self) -> bool:
        return self.state in HOLDS_NODES

    @property
    def spec(self) -> str:
        """How ``scontrol update`` must name this job, and it alone.

        The bare id of an array's or a heterogeneous job's leader means all its tasks or components.
        """
        if self.array_job_id is not None and self.array_task_id is not None:
            return f"{self.array_job_id}_{self.array_task_id}"
        if self.het_job_id is not None and self.het_offset is not None:
            return f"{self.het_job_id}+{self.het_offset}"
        return str(self.job_id)


@dataclass(frozen=True, slots=True)
class JobGone:
    """slurmctld answered: it does not know the job, or the job has finished. ``why`` is its word."""

    why: str


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No answer, or none that can be believed. ``why`` says what happened and what to do."""

    why: str


@dataclass(frozen=True, slots=True)
class AdminComment:
    """The field as it stands, byte for byte; bytes that are no UTF-8 are kept as surrogates (PEP 383).

    ``restart`` is the job's restart count at the same instant; None where that way of reading does not tell it.
    """

    text: str
    restart: int | None = None


@dataclass(frozen=True, slots=True)
class Updated:
    """slurmctld took the change."""


class SlurmBackend(Protocol):
    """One way of talking to slurmctld. Nothing here raises for what Slurm does or fails to do."""

    async def job(self, job_id: int) -> JobInfo | JobGone | Unavailable:
        """One job by its own id (of an array task: the task's)."""

    async def jobs(self) -> tuple[JobInfo, ...] | Unavailable:
        """All jobs that slurmctld remembers. Empty means that it said so."""

    async def admin_comment(self, job_id: int) -> AdminComment | JobGone | Unavailable:
        """The AdminComment of one job by its own id."""

    async def confirms_comment(self, job_spec: str, text: str) -> bool | JobGone | Unavailable:
        """Whether another way of reading shows this very AdminComment: if not, one of them does not tell all of it."""

    async def set_admin_comment(self, job_spec: str, text: str) -> Updated | JobGone | Unavailable:
        """Replace the AdminComment of the job that ``JobInfo.spec`` names. Refused by Slurm after the job's end."""

    async def private_data(self) -> frozenset[str] | Unavailable:
        """The words of PrivateData in slurm.conf(5), as slurmctld has it in force; empty where nothing is private."""
