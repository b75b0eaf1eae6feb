"""``job`` and ``jobs`` on a host where no controller can be asked, such as a login node: Slurm's own commands are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from ..bus.asking import NO, UNREACHABLE
from ..slurm.backend import JobGone, Unavailable
from ..slurm.sacct import ended_in_accounting, job_in_accounting
from ..slurm.tagged import JobName, TaggedRun, UserCommands, job_in_queue, queue
from .common import fail
from .login_words import row_of, view_of
from .reach import SOURCES, NoControllerError

ENDED_S: Final = 86_400.0
_MOST_NAMED: Final = 8

Answer: TypeAlias = Sequence[TaggedRun] | JobGone | Unavailable


def commands_of(away: NoControllerError) -> UserCommands:
    """Slurm's commands as they are found on this host."""
    if away.config is None:
        return UserCommands()
    section, timeout_s = away.config.slurm, away.config.times.slurm_timeout_s
    conf = section.conf if Path(section.conf).exists() else None
    return UserCommands(bin_dir=section.bin_dir, conf=conf, timeout_s=timeout_s)


def job_from_slurm(away: NoControllerError, name: JobName) -> dict[str, Any]:
    """The run of this name, as `view_of` has it; ends the command where Slurm knows none or does not say."""
    commands = commands_of(away)
    queued = job_in_queue(commands, name)
    chosen = _chosen(queued, name)
    if chosen is None or (chosen.has_ended and not chosen.admin_comment):
        accounted = job_in_accounting(commands, name)
        # sacct learns of an AdminComment at the end alone, squeue forgets a job some minutes after it.
        chosen = _chosen(accounted, name) or chosen
        if chosen is None:
            _fail_unknown(away, name, queued, accounted)
    return view_of(chosen)


def _runs(answer: Answer) -> Sequence[TaggedRun]:
    return () if isinstance(answer, JobGone | Unavailable) else answer


def _chosen(answer: Answer, name: JobName) -> TaggedRun | None:
    """The run that is meant, the newest where none is named; ends the command when several jobs are meant."""
    found = _runs(answer)
    specs = sorted({run.spec for run in found})
    if len(specs) > 1:
        more = f" and {len(specs) - _MOST_NAMED} more" if len(specs) > _MOST_NAMED else ""
        fail(
            f"job {name.spec} has several parts: {', '.join(specs[:_MOST_NAMED])}{more}; ask for one of them: "
            f"'slurm-pfi job {specs[0]}'",
            NO,
        )
    if name.restart is not None:
        return next((run for run in found if run.restart == name.restart), None)
    return max(found, key=lambda run: run.restart or 0, default=None)


def _fail_unknown(away: NoControllerError, name: JobName, *answers: Answer) -> NoReturn:
    troubles = [answer.why for answer in answers if isinstance(answer, Unavailable)]
    if troubles:
        fail(
            f"job {name.spec} cannot be told: the controller cannot be reached ({away}), and {'; '.join(troubles)}",
            UNREACHABLE,
        )
    known = sorted({run.restart for answer in answers for run in _runs(answer) if run.restart is not None})
    if known and name.restart is not None:
        named = ", ".join(f"{name.spec}.{restart}" for restart in known)
        fail(f"job {name.spec} has no known restart {name.restart}; known: {named}", NO)
    whys = "; ".join(answer.why for answer in answers if isinstance(answer, JobGone))
    fail(f"job {name.spec} is not known to Slurm, or you may not see it: {whys}", NO)


def jobs_from_slurm(away: NoControllerError, *, mine: bool, ended: bool) -> tuple[list[dict[str, Any]], str]:
    """Rows as `row_of` has them: jobs with GPUs or a tag as far as known, that run or ran; and what was not read."""
    commands = commands_of(away)
    queued = queue(commands, mine=mine)
    if isinstance(queued, Unavailable):
        fail(f"the controller cannot be reached ({away}), and {queued.why}", UNREACHABLE)
    over: tuple[TaggedRun, ...] | Unavailable = ()
    if ended:
        over = ended_in_accounting(commands, ENDED_S, user=str(os.getuid()) if mine else None)
    trouble = f"jobs that ended are not known: {over.why}" if isinstance(over, Unavailable) else ""
    rows = [row_of(run) for run in (*_runs(over), *queued)]
    # AccountingStorageTRES tracks gres/gpu for all jobs or for none: where one has a count, no count is no GPU.
    counted = any(row["gpus"] for row in rows)
    shown = (row for row in rows if row["slurm_state"] != "PENDING")
    kept = [row for row in shown if row["tag"] or row["gpus"] or (row["gpus"] is None and not counted)]
    return kept, trouble


def source_text(rows: Sequence[dict[str, Any]]) -> str:
    """Where these answers came from."""
    used = dict.fromkeys(str(row["source"]) for row in rows)
    return " and ".join(SOURCES[name] for name in used)
