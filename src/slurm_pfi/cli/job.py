"""``slurm-pfi job``: one run in plain words: asked, known, done, cost, saved, promised."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any, Final

import click

from ..bus.asking import WRONG_USE
from .common import Screen, fail, print_json
from .job_words import HEADINGS, sections, title
from .reach import SOURCES, NoControllerError, ask_or_leave

_NAME: Final = re.compile(r"([0-9]{1,10})(?:_([0-9]{1,10})|\+([0-9]{1,10}))?(?:\.([0-9]{1,10}))?", re.ASCII)
_PARTS: Final = ("job_id", "task", "component", "restart")
_MOST: Final = 2**32 - 1
_WITH_UNIT: Final = re.compile(r"(?<=[0-9]) (?=(?:%|[kM]?Wh?|s|min|h)(?![A-Za-z]))")
_CLOCK: Final = re.compile(r"[0-9]{2}:[0-9]{2}:[0-9]{2}  ")
_TIED: Final = "\N{NO-BREAK SPACE}"
WIDEST: Final = 100
"""Longer lines are hard to read, however wide the terminal."""


@click.command(short_help="Tell all about one job: caps, cost, saving, promises.")
@click.argument("job_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, powers in mW")
@click.pass_context
def job(context: click.Context, job_id: str, as_json: bool) -> None:
    """Tell all about one job: asked, known, done, what it cost and saved, whether promises held.

    ID is a job id (1234), a task of an array (77_3) or a component (80+1); 1234.1 is the run after its first requeue.
    Jobs that ended are told from the history. Where no controller can be asked, as on a login node, Slurm is: then all
    that is known stands in the job's tag.
    """
    question = parse_job(job_id)
    width = min(Screen().width, WIDEST)
    try:
        told = {**ask_or_leave(context, "job", question).data, "source": "controller"}
        lines = [] if as_json else told_lines(told, width)
    except NoControllerError as away:
        from ..slurm.tagged import JobName
        from .login import job_from_slurm

        told = job_from_slurm(away, JobName(**question))
        lines = [] if as_json else tag_lines(told, width)
        lines += _wrapped(f"more is told where the controller can be asked; here: {away}", width, "")
    if as_json:
        print_json(told)
        return
    for line in [*lines, SOURCES[told["source"]]]:
        click.secho(line, bold=line in HEADINGS)


def tag_lines(told: Mapping[str, Any], width: int) -> list[str]:
    """All that a tag tells of a run, likewise."""
    from .login_words import head_lines, tag_sections

    lines = [part for line in head_lines(told) for part in _wrapped(line, width, "")]
    for heading, told_there in tag_sections(told):
        lines += ["", heading]
        lines += [part for line in told_there for part in _wrapped(line, width, "  ")]
    return [*lines, ""]


def told_lines(told: Mapping[str, Any], width: int) -> list[str]:
    """All that is said of a run, in lines of ``width`` columns; a longer word stays whole."""
    lines = [part for line in title(told) for part in _wrapped(line, width, "")]
    for section in sections(told):
        lines += ["", section.name]
        lines += [part for line in section.lines for part in _wrapped(line, width, "  ")]
    return [*lines, ""]


def parse_job(text: str) -> dict[str, int]:
    """``1234``, ``77_3``, ``80+1``, each with ``.R``, as a question; ends the command with 2 on anything else."""
    match = _NAME.fullmatch(text.strip())
    found = (
        {}
        if match is None
        else {
            part: int(value) for part, value in zip(_PARTS, match.groups(), strict=True) if value is not None
        }
    )
    if not found or found["job_id"] == 0 or max(found.values()) > _MOST:
        fail(
            f"{text[:64]!r} is no job: write 1234, 77_3 for a task of an array, 80+1 for a component, "
            "or 1234.1 for the run after its first requeue",
            WRONG_USE,
        )
    return found


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    """One line, broken where it is too long, but never between a figure and its unit."""
    parts = textwrap.wrap(
        _WITH_UNIT.sub(_TIED, line),
        width,
        initial_indent=indent,
        subsequent_indent=indent + " " * (10 if _CLOCK.match(line) else 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace(_TIED, " ") for part in parts]
