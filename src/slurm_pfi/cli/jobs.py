"""``slurm-pfi jobs``: every run that the controller knows, with flex, cap, draw and throughput."""

from __future__ import annotations

from typing import Any

import click

from ..units import format_power
from .common import ask_controller, console, percent, print_json, table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, powers in mW")
@click.pass_context
def jobs(context: click.Context, as_json: bool) -> None:
    """Show the runs on GPU nodes: flex, cap, draw, throughput against their own baseline."""
    data = ask_controller(context, "jobs").data
    if as_json:
        print_json(data)
        return
    console().print(jobs_table(data))
    for run in data:
        if run["note"]:
            console().print(f"{run['job_id']}: {run['note']}", markup=False)


_COLUMNS = (
    ("JOB", "right"),
    ("USER", "left"),
    ("STATE", "left"),
    ("NODES", "left"),
    ("GPUS", "right"),
    ("FLEX", "right"),
    ("CAP", "right"),
    ("FLOOR", "right"),
    ("DRAW/GPU", "right"),
    ("RATE", "right"),
    ("LOSS", "right"),
)


def jobs_table(runs: list[dict[str, Any]]) -> Any:
    """All runs as a table."""
    return table("", _COLUMNS, (_row(run) for run in runs))


def _row(run: dict[str, Any]) -> list[str]:
    gpus = run["gpus"]
    draw_mw = run["draw_mw"]
    rate = run["rate_per_s"]
    flex = run["flex"] or "?"
    if run["user_flex"] and run["user_flex"] != flex:
        flex = f"{run['user_flex']} -> {flex}"
    state = str(run["state"])
    if run["floor_passed"]:
        state += ", floor passed"
    return [
        str(run["job_id"]) if not run["restart"] else f"{run['job_id']}.{run['restart']}",
        run["user"] or "?",
        state,
        ",".join(run["nodes"]),
        str(gpus),
        flex,
        format_power(run["cap_mw"]),
        format_power(run["floor_mw"]) if run["target_cap_mw"] is not None else "-",
        format_power(draw_mw // gpus if gpus and draw_mw is not None else None),
        "?" if rate is None else f"{rate:,.0f}/s",
        percent(run["loss"]),
    ]
