"""Slurm's accounting as an ordinary user reads it: the runs of a job that ended, each by itself, and their tags.

One row for each run (``--allocations --duplicates``). Every field ends with a word that nobody can know beforehand, so
no text of a user can pose as a field or a run. Releases before 24.11 do not store how often a job was restarted: there
the runs of a job are counted by their order (sacct(1): JobID, Restarts, State).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from .backend import JobGone, Span, Special, Unavailable
from .damage import SlurmTextError
from .squeue import new_end
from .tagged import JobName, TaggedRun, UserCommands, read_runs
from .text import expand_nodes, named, parse_count, parse_job_id, parse_state, parse_unix_s
from .tres import count_gpus

_FIELDS: Final = (
    "JobID",
    "JobIDRaw",
    "Cluster",
    "User",
    "Account",
    "Partition",
    "JobName",
    "State",
    "Submit",
    "Start",
    "End",
    "NodeList",
    "AllocTRES",
    "AdminComment",
)
_RESTARTS: Final = "Restarts"
_NO_FIELD: Final = "Invalid field requested"
_DISABLED: Final = "accounting storage is disabled"
_JOB: Final = re.compile(r"(?P<id>[0-9]+)(?:_(?P<task>[0-9]+)|\+(?P<component>[0-9]+))?", re.ASCII)
_WAITING_TASKS: Final = re.compile(r"[0-9]+_\[[^\]]*\]", re.ASCII)
# A run that ended so may be followed by another one of the same job; any other end is that of the job.
_AGAIN: Final = frozenset({"REQUEUED", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REQUEUE_HOLD", "SPECIAL_EXIT"})


def job_in_accounting(commands: UserCommands, name: JobName) -> tuple[TaggedRun, ...] | JobGone | Unavailable:
    """All runs of this name that started, in their order. Of an id that was used again, those of the last job."""
    found = _sacct(commands, "--jobs", name.spec)
    if isinstance(found, Unavailable):
        return JobGone(found.why) if _DISABLED in found.why else found
    runs = _last_kind([run for run in found if run.is_of(name)])
    jobs = [tuple(of_job) for _, of_job in groupby(runs, key=lambda run: run.job_id)]
    counted = tuple(run for of_job in jobs for run in _counted(_last_job(of_job)))
    return counted or JobGone(f"job {name.spec}: the accounting has no run of it that you may see")


def ended_in_accounting(
    commands: UserCommands, within_s: float, *, user: str | None
) -> tuple[TaggedRun, ...] | Unavailable:
    """The runs that ended within the last seconds, of this user or of all whom we may see.

    Where Slurm does not store a run's restart it is not known here: earlier runs may lie before that time.
    """
    who = ("--allusers",) if user is None else ("--user", user)
    found = _sacct(commands, *who, "--starttime", f"now-{int(within_s)}seconds", "--endtime", "now")
    if isinstance(found, Unavailable):
        return found
    return tuple(run for run in found if run.has_ended)


def _sacct(commands: UserCommands, *which: str) -> tuple[TaggedRun, ...] | Unavailable:
    found = _asked(commands, (*_FIELDS, _RESTARTS), which)
    if isinstance(found, Unavailable) and _NO_FIELD in found.why and _RESTARTS in found.why:
        found = _asked(commands, _FIELDS, which)
    return found


def _asked(
    commands: UserCommands, fields: Sequence[str], which: Sequence[str]
) -> tuple[TaggedRun, ...] | Unavailable:
    end = new_end()
    form = ("--noheader", "--parsable", f"--delimiter={end}", f"--format={','.join(fields)}")
    out = commands.run("sacct", "--allocations", "--duplicates", *which, *form)
    if isinstance(out, Unavailable):
        return out
    return read_accounting(out, fields, end)


def read_accounting(out: bytes, fields: Sequence[str], end: str) -> tuple[TaggedRun, ...] | Unavailable:
    """sacct's output, in which ``end`` follows every field and a newline every run, by job and time.

    What never started is no run. A row that is not understood makes the whole answer unknown.
    """
    found = read_runs(out, fields, end, _read_run, "sacct")
    if isinstance(found, Unavailable):
        return found
    return tuple(sorted(found, key=lambda run: (run.job_id, _s(run.submit_unix_s), _s(run.start_unix_s))))


def _last_kind(runs: Sequence[TaggedRun]) -> list[TaggedRun]:
    """Without the parts of an array or heterogeneous job whose id was used again for a job without parts, or back."""
    last = max(runs, key=lambda run: _s(run.submit_unix_s), default=None)
    return [run for run in runs if last is not None and (run.parent is None) == (last.parent is None)]


def _last_job(runs: Sequence[TaggedRun]) -> list[TaggedRun]:
    """Of all runs with one id, in their order, those of the last job: ids are used again after many million."""
    last: list[TaggedRun] = []
    for run in runs:
        if run.restart is not None:
            goes_on = run.restart > 0
        else:
            goes_on = bool(last) and last[-1].state in _AGAIN and last[-1].user == run.user
        last = [*last, run] if goes_on else [run]
    return last


def _counted(runs: Sequence[TaggedRun]) -> list[TaggedRun]:
    return [run if run.restart is not None else replace(run, restart=place) for place, run in enumerate(runs)]


def _s(at: Span) -> int:
    return at if isinstance(at, int) else 0


def _read_run(cell: dict[str, str]) -> TaggedRun | None:
    if _WAITING_TASKS.fullmatch(cell["JobID"]):
        return None
    match = _JOB.fullmatch(cell["JobID"])
    if match is None:
        raise SlurmTextError(f"{cell['JobID'][:64]!r} is not a job")
    part = match["task"] is not None or match["component"] is not None
    start = parse_unix_s(cell["Start"])
    if isinstance(start, Special) or cell["State"] == "PENDING":
        return None
    return TaggedRun(
        source="sacct",
        job_id=parse_job_id(cell["JobIDRaw"]),
        parent=parse_job_id(match["id"]) if part else None,
        spec=match.group(),
        restart=parse_count(cell[_RESTARTS]) if _RESTARTS in cell else None,
        cluster=named(cell["Cluster"]),
        user=named(cell["User"]),
        account=named(cell["Account"]),
        partition=named(cell["Partition"]),
        name=named(cell["JobName"]),
        state=parse_state(cell["State"].partition(" by ")[0]),  # CANCELLED by 1000
        submit_unix_s=parse_unix_s(cell["Submit"]),
        start_unix_s=start,
        end_unix_s=parse_unix_s(cell["End"]),
        nodes=expand_nodes(cell["NodeList"]),
        gpus=count_gpus(cell["AllocTRES"]) if cell["AllocTRES"] else None,
        admin_comment=cell["AdminComment"],
    )
