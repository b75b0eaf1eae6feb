"""Jobs as ``squeue --Format`` writes them: every field followed by a word that nobody can know beforehand.

Users choose texts such as the job's name, comment and, without an accounting database, account. No text can pose as a
field or a job, whatever bytes and newlines are in it, and nothing is cut to a width (squeue(1), --Format, suffix).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

from .backend import JobInfo, Unavailable
from .damage import SlurmTextError
from .text import expand_nodes, named, parse_count, parse_job_id, parse_limit_s, parse_state, parse_unix_s

FIELDS: Final = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "HetJobOffset",
    "RestartCnt",
    "UserID",
    "UserName",
    "Account",
    "Partition",
    "QOS",
    "State",
    "NodeList",
    "StartTime",
    "EndTime",
    "TimeLimit",
    "Name",
    "Comment",
)
UNSET: Final = "(null)"
"""squeue's word for a comment that was never set; nobody writes it as a comment."""

NO_SUCH_JOB: Final = "Invalid job id specified"
"""What Slurm's commands write to standard error of a job that slurmctld does not know."""


def new_end() -> str:
    """A word that ends a field, and that nobody could put into one beforehand."""
    return f"<{secrets.token_hex(8)}>"


def squeue_line(which: Iterable[str], end: str, fields: Iterable[str]) -> list[str]:
    """The command line that asks for these fields with ``end`` after each. No SQUEUE_* may be set.

    ``which``: squeue's options that choose jobs.
    """
    shown = ",".join(f"{field}:{end}" for field in fields)
    return ["squeue", "--noheader", "--local", "--all", *which, "--Format", shown]


def squeue_words(job_id: int | None, end: str, fields: tuple[str, ...] = FIELDS) -> list[str]:
    """The same for one job in whatever state, or for all that slurmctld remembers."""
    one = () if job_id is None else ("--jobs", str(job_id))
    return squeue_line(("--states=all", *one), end, fields)


def split_rows(out: bytes, fields: tuple[str, ...], end: bytes) -> list[dict[str, bytes]]:
    """Cut squeue's output, in which ``end`` follows every field and a newline every job.

    Whatever a field holds, newlines too, stays inside it. Raises SlurmTextError when fields are missing.
    """
    *cells, rest = out.split(end)
    if rest.strip(b"\n") or len(cells) % len(fields):
        raise SlurmTextError(f"{len(cells)} fields and {rest[:64]!r} instead of {len(fields)} for each job")
    rows = []
    for start in range(0, len(cells), len(fields)):
        row = cells[start : start + len(fields)]
        row[0] = row[0].removeprefix(b"\n")
        rows.append(dict(zip(fields, row, strict=True)))
    return rows


def read_jobs(rows: list[dict[str, bytes]]) -> tuple[JobInfo, ...] | Unavailable:
    """All rows as jobs; one that cannot be read makes the answer unknown, for a job left out is a job lost."""
    jobs = []
    for row in rows:
        try:
            jobs.append(
                _read_job({name: cell.decode("utf-8", "backslashreplace") for name, cell in row.items()})
            )
        except SlurmTextError as error:
            return Unavailable(f"squeue's line on job {row['JobID'][:20]!r} is not understood: {error}")
    return tuple(jobs)


def _read_job(cell: dict[str, str]) -> JobInfo:
    task = cell["ArrayTaskID"]
    het = cell["HetJobID"]
    return JobInfo(
        job_id=parse_job_id(cell["JobID"]),
        array_job_id=None if task == "N/A" else parse_job_id(cell["ArrayJobID"]),
        # Waiting tasks come as one group such as 5-9%1, which is no task.
        array_task_id=parse_count(task) if task.isdigit() else None,
        het_job_id=None if het == "N/A" else parse_job_id(het),
        het_offset=None if het == "N/A" else parse_count(cell["HetJobOffset"]),
        restart=parse_count(cell["RestartCnt"]),
        user_id=parse_count(cell["UserID"]),
        user_name=cell["UserName"],
        account=named(cell["Account"]),
        partition=named(cell["Partition"]),
        qos=named(cell["QOS"]),
        state=parse_state(cell["State"]),
        nodes=expand_nodes(cell["NodeList"]),
        start_unix_s=parse_unix_s(cell["StartTime"]),
        end_unix_s=parse_unix_s(cell["EndTime"]),
        limit_s=parse_limit_s(cell["TimeLimit"]),
        name=named(cell["Name"]),
        comment="" if cell["Comment"] == UNSET else cell["Comment"],
    )
