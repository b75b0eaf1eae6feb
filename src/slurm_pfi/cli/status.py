"""``slurm-pfi status``: the site, its limit and its nodes."""

from __future__ import annotations

from typing import Any

import click

from ..units import format_duration, format_power
from .common import ask_controller, console, print_json, table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, powers in mW")
@click.pass_context
def status(context: click.Context, as_json: bool) -> None:
    """Show the site: limit, budget, draw, nodes, faults."""
    data = ask_controller(context, "status").data
    if as_json:
        print_json(data)
        return
    out = console()
    for line in headline(data):
        out.print(line, markup=False)
    out.print()
    out.print(table("", _COLUMNS, (_row(node) for node in data["nodes"])))
    for node in data["nodes"]:
        for fault in _troubles(node):
            out.print(f"{node['name']}: {fault}", markup=False)


_COLUMNS = (
    ("NODE", "left"),
    ("STATE", "left"),
    ("MODE", "left"),
    ("HEARD", "right"),
    ("GPUS", "right"),
    ("CAPPED", "right"),
    ("CAPS", "right"),
    ("DRAW", "right"),
)


def headline(data: dict[str, Any]) -> list[str]:
    """The site in a few lines."""
    draw = data["draw"]
    lines = [
        f"cluster {data['cluster']}   policy {data['policy']}   epoch {data['epoch']}",
        f"site draw {format_power(draw['site_mw'])} "
        f"(GPUs {format_power(draw['gpus_mw'])}, declared beside them {format_power(draw['overhead_mw'])}); "
        f"at most {format_power(draw['uncapped_worst_mw'])} without caps",
    ]
    if data["off"]:
        lines.append("OFF: no limit is enforced ('slurm-pfi on' ends this)")
    if not data["limits_known"]:
        lines.append("LIMITS UNREADABLE: the last plans stay in force; see the controller's log")
    window = data["window"]
    if window is None:
        lines.append("no window: no limit binds")
        return lines
    lines.append(
        f"window open for {format_duration(window['open_s'])}: limit {format_power(window['limit_mw'])} "
        f"({', '.join(window['limit_ids'])}), for GPU caps {format_power(window['budget_mw'])}, "
        f"planned {format_power(window['committed_mw'])}"
    )
    if window["shortfall_mw"]:
        lines.append(f"INFEASIBLE: {format_power(window['shortfall_mw'])} short; every run is at its floor")
    if window["silent"]:
        lines.append(f"counted at their worst because they do not answer: {', '.join(window['silent'])}")
    return lines


def _row(node: dict[str, Any]) -> list[str]:
    age_s = node["age_s"]
    return [
        node["name"],
        node["state"],
        node["mode"],
        "never" if age_s is None else f"{age_s:.1f} s",
        str(node["gpus"])
        if node["gpus"] == node["gpus_declared"]
        else f"{node['gpus']}/{node['gpus_declared']}",
        str(node["capped"]),
        format_power(node["enforced_mw"]),
        format_power(node["draw_mw"]),
    ]


def _troubles(node: dict[str, Any]) -> list[str]:
    told = list(node["faults"])
    if node["prior_unknown"]:
        told.append(f"prior limit unknown, left alone: {', '.join(node['prior_unknown'])}")
    if node["refused"]:
        told.append(f"refused the last plan: {node['refused']}")
    return told
