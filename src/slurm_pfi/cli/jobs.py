"""``slurm-pfi jobs``: every run that the controller knows, with flex, cap, draw and throughput."""

from __future__ import annotations

from typing import Any, Final

import click
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

from ..units import format_power
from .common import ask_controller, console, percent, print_json
from .tables import Column, show_table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, powers in mW")
@click.pass_context
def jobs(context: click.Context, as_json: bool) -> None:
    """Show the runs on GPU nodes: flex, cap, draw, throughput against their own baseline."""
    data = ask_controller(context, "jobs").data
    if as_json:
        print_json(data)
        return
    out = console()
    if not data:
        out.print("no run with a GPU is known")
        return
    show_table(out, COLUMNS, data)
    for run in data:
        if run["note"]:
            out.print(f"{_job(run)}: {run['note']}", markup=False)
    if any(run["floor_passed"] for run in data):
        out.print("past floor: an emergency limit holds the run below what its user was promised")


def _job(run: dict[str, Any]) -> str:
    return f"{run['job_id']}.{run['restart']}" if run["restart"] else str(run["job_id"])


def _state(run: dict[str, Any]) -> str:
    return f"{run['state']}, past floor" if run["floor_passed"] else str(run["state"])


def _short_state(run: dict[str, Any]) -> str:
    return "past floor" if run["floor_passed"] else str(run["state"]).split()[0]


def _nodes(run: dict[str, Any]) -> str:
    return str(NodeSet.fromlist(run["nodes"], resolver=RESOLVER_NOGROUP))


def _flex(run: dict[str, Any]) -> str:
    flex = run["flex"] or "?"
    return f"{run['user_flex']} -> {flex}" if run["user_flex"] and run["user_flex"] != flex else flex


def _floor(run: dict[str, Any]) -> str:
    return format_power(run["floor_mw"]) if run["target_cap_mw"] is not None else "-"


def _draw(run: dict[str, Any]) -> str:
    gpus, draw_mw = run["gpus"], run["draw_mw"]
    return format_power(draw_mw // gpus if gpus and draw_mw is not None else None)


def _rate(run: dict[str, Any]) -> str:
    rate = run["rate_per_s"]
    return "?" if rate is None else f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"


COLUMNS: Final = (
    Column("JOB", _job, side="right"),
    Column("USER", lambda run: run["user"] or "?", clip=5, drop=1),
    Column("STATE", _state, short=_short_state),
    Column("NODES", _nodes, clip=6, drop=4),
    Column("GPUS", lambda run: str(run["gpus"]), side="right", drop=5),
    Column("FLEX", _flex, side="right", short=lambda run: run["flex"] or "?"),
    Column("CAP", lambda run: format_power(run["cap_mw"]), side="right"),
    Column("FLOOR", _floor, side="right", drop=2),
    Column("DRAW", _draw, side="right"),
    Column("RATE", _rate, side="right", drop=3),
    Column("LOSS", lambda run: percent(run["loss"]), side="right"),
)
