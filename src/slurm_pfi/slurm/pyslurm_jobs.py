"""Jobs as pyslurm's class ``job`` gives them, and what goes between us and the process that loads it.

That class tells an unlimited job from one whose limit is not set, and array task 0 from no task. pyslurm's newer
``Job`` does neither, so a pyslurm without ``job`` (25.11 and later) is not used.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..model import Frozen
from .backend import JobInfo, Special
from .damage import SlurmTextError
from .jsonjobs import without_false_end
from .numbers import MINUTE_S
from .text import expand_nodes, parse_limit_s, parse_state

LENGTH_BYTES: Final = 8
"""Each message is its length, big-endian, and JSON."""
INVALID_JOB_ID: Final = 2017
"""ESLURM_INVALID_JOB_ID of slurm_errno.h."""
_LOST: Final = "\N{REPLACEMENT CHARACTER}"  # what pyslurm puts for bytes that are no UTF-8


class Hello(Frozen, frozen=True, kw_only=True):
    """The process's first message: pyslurm's version, or why it cannot be used."""

    version: str = ""
    why: str = ""


class Question(Frozen, frozen=True, kw_only=True):
    """One job by its id (of an array's leader all tasks too), or all."""

    job_id: int | None


class Record(Frozen, frozen=True, kw_only=True):
    """What we read of pyslurm's dictionary of one job, by its names. ``time_limit`` is in minutes or a word."""

    job_id: int
    array_job_id: int | None
    array_task_id: int | None
    het_job_id: int | None
    het_job_offset: int | None
    restart_cnt: int
    user_id: int
    user_name: str
    account: str | None
    partition: str | None
    qos: str | None
    job_state: str
    nodes: str | None
    start_time: int
    end_time: int
    time_limit: int | str
    name: str | None
    comment: str | None


class Answer(Frozen, frozen=True, kw_only=True):
    """Records, or what libslurm said with its error number (0: not from libslurm).

    ``unable``: this pyslurm cannot do it at all. The ``find_id`` of 24.05 to 25.05 takes no id.
    """

    records: tuple[Record, ...] | None = None
    why: str = ""
    errno: int = 0
    unable: bool = False


def packed(message: Hello | Question | Answer) -> bytes:
    """A message as it goes through a pipe."""
    data = msgspec.json.encode(message)
    return len(data).to_bytes(LENGTH_BYTES) + data


def is_lossy(record: Record) -> bool:
    """Whether pyslurm may have put something else for bytes that are no UTF-8, so that the commands must be asked."""
    return any(text and _LOST in text for text in (record.account, record.name, record.comment))


def read_record(record: Record) -> JobInfo:
    """The job. Raises SlurmTextError."""
    if record.job_id == 0:
        raise SlurmTextError("0 is not a job id")
    state = parse_state(record.job_state)
    limit = record.time_limit
    limit_s = limit * MINUTE_S if isinstance(limit, int) else parse_limit_s(limit)
    return JobInfo(
        job_id=record.job_id,
        array_job_id=record.array_job_id or None,
        array_task_id=record.array_task_id,
        het_job_id=record.het_job_id or None,
        het_offset=record.het_job_offset if record.het_job_id else None,
        restart=record.restart_cnt,
        user_id=record.user_id,
        user_name=record.user_name,
        account=record.account or "",
        partition=record.partition or "",
        qos=record.qos or "",
        state=state,
        nodes=expand_nodes(record.nodes or ""),
        start_unix_s=record.start_time or Special.NOT_SET,
        end_unix_s=without_false_end(state, limit_s, record.end_time or Special.NOT_SET),
        limit_s=limit_s,
        name=record.name or "",
        comment=record.comment or "",
    )
