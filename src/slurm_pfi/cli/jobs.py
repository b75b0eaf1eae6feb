"""``slurm-pfi jobs``: every run that the controller knows, with flex, cap, draw and throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click

from ..units import format_duration, format_power
from .common import SIMULATED, Screen, percent, print_json, site_config
from .reach import SOURCES, NoControllerError, ask_or_leave
from .status import folded
from .tables import Column, plain, show_table

MOST_NOTES: Final = 20
DISPUTED: Final = "its counter and its GPUs disagree"

_RunRow = Mapping[str, Any]


@click.command(short_help="Show the runs on GPU nodes: flex, cap, draw, throughput.")
@click.option("--me", "mine", is_flag=True, help="only your own")
@click.option("--ended", is_flag=True, help="also those that ended within the last day")
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, powers in mW")
@click.pass_context
def jobs(context: click.Context, mine: bool, ended: bool, as_json: bool) -> None:
    """Show the runs on GPU nodes: flex, cap, draw, throughput against their own baseline.

    'slurm-pfi job ID' tells all about one of them. Where no controller can be asked, as on a login node, Slurm is: then
    all that is known stands in the jobs' tags.
    """
    try:
        reply = ask_or_leave(context, "jobs", {"mine": mine, "ended": ended})
    except NoControllerError as away:
        _show_by_tags(away, as_json=as_json, mine=mine, ended=ended)
        return
    data = [{**run, "source": "controller"} for run in reply.data]
    if as_json:
        print_json(data)
        return
    out = Screen()
    if not data:
        of = " of yours" if mine else ""
        out.print(
            f"no run{of} with a GPU is known{', nor one that ended within the last day' if ended else ''}"
        )
        out.print(SOURCES["controller"])
        return
    show_table(out, _columns(COLUMNS, mine=mine), data)
    notes = [f"{job_text(run)}: {run['note']}" for run in data if run["note"]]
    notes += [f"{job_text(run)}: {DISPUTED}: {run['disputed']}" for run in data if run.get("disputed")]
    for note in notes[:MOST_NOTES]:
        out.print(plain(note), markup=False)
    if len(notes) > MOST_NOTES:
        out.print(f"and {len(notes) - MOST_NOTES:,} more such notes (--json has all)")
    if site_config(context).simulated:
        out.print(SIMULATED)
    if any(run["floor_passed"] for run in data):
        out.print("past floor: an emergency limit holds the run below what its user was promised")
    out.print(SOURCES["controller"])


def _columns(columns: Sequence[Column], *, mine: bool) -> list[Column]:
    """Of one user's runs nobody need be told whose they are."""
    return [column for column in columns if not (mine and column.heading == "USER")]


def _show_by_tags(away: NoControllerError, *, as_json: bool, mine: bool, ended: bool) -> None:
    """The same from Slurm alone."""
    from .login import jobs_from_slurm, source_text
    from .login_words import COLUMNS as TAG_COLUMNS

    data, trouble = jobs_from_slurm(away, mine=mine, ended=ended)
    if as_json:
        if trouble:
            click.echo(f"slurm-pfi: {trouble}", err=True)
        print_json(data)
        return
    out = Screen()
    if data:
        show_table(out, _columns(TAG_COLUMNS, mine=mine), data)
    else:
        out.print(f"Slurm shows no {'job of yours' if mine else 'job'} with a GPU or a tag")
    if trouble:
        out.print(plain(trouble))
    out.print(plain(f"more is told where the controller can be asked; here: {away}"))
    if any(run["simulated"] for run in data):
        out.print(SIMULATED)
    if data:
        out.print(source_text(data))


def job_text(run: _RunRow) -> str:
    """As ``slurm-pfi job`` takes it: ``1234``, ``77_3``, ``1234.1`` for a restart."""
    spec = str(run.get("spec") or run["job_id"])
    return f"{spec}.{run['restart']}" if run["restart"] else spec


def state_text(run: _RunRow) -> str:
    """The state in words."""
    if _ended(run):
        return f"ended {format_duration(max(0.0, time.time() - run['ended_unix_s']))} ago"
    state = "running" if run["state"] == "admitted" else str(run["state"])
    return f"{state}, past floor" if run["floor_passed"] else state


def short_state(run: _RunRow) -> str:
    """The same in a word or two."""
    if _ended(run):
        return "ended"
    return "past floor" if run["floor_passed"] else state_text(run).split()[0]


def flex_text(run: _RunRow) -> str:
    """What was asked and what the site made of it, where that differs."""
    flex = run["flex"] or "?"
    return f"{run['user_flex']} -> {flex}" if run["user_flex"] and run["user_flex"] != flex else flex


def loss_text(run: _RunRow) -> str:
    """The loss of throughput now; of a run that ended, over all its time."""
    return percent(run["cost"]["loss"] if _ended(run) and "cost" in run else run["loss"])


def _ended(run: _RunRow) -> bool:
    return run.get("ended_unix_s") is not None


def _while_running(cell: Callable[[Any], str]) -> Callable[[Any], str]:
    """What only a run that is there has."""
    return lambda run: "-" if _ended(run) else cell(run)


def draw_text(run: _RunRow) -> str:
    """The draw of one of its GPUs."""
    gpus, draw_mw = run["gpus"], run["draw_mw"]
    return format_power(draw_mw // gpus if gpus and draw_mw is not None else None)


def _floor(run: _RunRow) -> str:
    return format_power(run["floor_mw"]) if run["target_cap_mw"] is not None else "-"


def _rate(run: _RunRow) -> str:
    rate = run["rate_per_s"]
    return "?" if rate is None else f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"


COLUMNS: Final = (
    Column("JOB", job_text, side="right"),
    Column("USER", lambda run: run["user"] or "?", clip=5, drop=1),
    Column("STATE", state_text, short=short_state),
    Column("NODES", lambda run: folded(run["nodes"]), clip=6, drop=4),
    Column("GPUS", lambda run: str(run["gpus"]), side="right", drop=5),
    Column("FLEX", flex_text, side="right", short=lambda run: run["flex"] or "?"),
    Column("CAP", _while_running(lambda run: format_power(run["cap_mw"])), side="right"),
    Column("FLOOR", _while_running(_floor), side="right", drop=2),
    Column("DRAW", _while_running(draw_text), side="right"),
    Column("RATE", _while_running(_rate), side="right", drop=3),
    Column("LOSS", loss_text, side="right"),
)
