"""``slurm-pfi status``: the site, its limit and its nodes."""

from __future__ import annotations

from typing import Any, Final

import click

from ..units import format_duration, format_power
from .common import ask_controller, console, print_json
from .tables import Column, show_table


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
    show_table(out, _COLUMNS, data["nodes"])
    for node in data["nodes"]:
        for fault in _troubles(node):
            out.print(f"{node['name']}: {fault}", markup=False)


def headline(data: dict[str, Any]) -> list[str]:
    """The site in a few lines, each short enough for a terminal where no list of names is in it."""
    draw = data["draw"]
    lines = [
        f"cluster {data['cluster']}   policy {data['policy']}   epoch {data['epoch']}",
        f"site draw {format_power(draw['site_mw'])}: GPUs {format_power(draw['gpus_mw'])}, "
        f"declared beside them {format_power(draw['overhead_mw'])}",
        f"without caps at most {format_power(draw['uncapped_worst_mw'])}",
    ]
    if data["off"]:
        lines.append("OFF: no limit is enforced ('slurm-pfi on' ends this)")
    if not data["limits_known"]:
        lines.append("LIMITS UNREADABLE: the last plans stay in force; see the controller's log")
    window = data["window"]
    if window is None:
        lines.append("no window: no limit binds")
        return lines
    lines += [
        f"limit {format_power(window['limit_mw'])} ({', '.join(window['limit_ids'])}), "
        f"window open for {format_duration(window['open_s'])}",
        f"for GPU caps {format_power(window['budget_mw'])}, planned {format_power(window['committed_mw'])}",
    ]
    if window["shortfall_mw"]:
        lines.append(
            f"INFEASIBLE: {format_power(window['shortfall_mw'])} short, with every run as low as it may go"
        )
    if window["silent"]:
        lines.append(f"counted at their worst because they do not answer: {', '.join(window['silent'])}")
    return lines


def _heard(node: dict[str, Any]) -> str:
    age_s = node["age_s"]
    if age_s is None:
        return "never"
    return f"{age_s:.1f} s" if age_s < 120 else format_duration(age_s)


def _gpus(node: dict[str, Any]) -> str:
    same = node["gpus"] == node["gpus_declared"]
    return str(node["gpus"]) if same else f"{node['gpus']}/{node['gpus_declared']}"


_COLUMNS: Final = (
    Column("NODE", lambda node: node["name"], clip=8),
    Column("STATE", lambda node: node["state"]),
    Column("MODE", lambda node: node["mode"], drop=2),
    Column("HEARD", _heard, side="right", drop=1),
    Column("GPUS", _gpus, side="right"),
    Column("CAPPED", lambda node: str(node["capped"]), side="right", drop=3),
    Column("CAPS", lambda node: format_power(node["enforced_mw"]), side="right"),
    Column("DRAW", lambda node: format_power(node["draw_mw"]), side="right"),
)


def _troubles(node: dict[str, Any]) -> list[str]:
    told = list(node["faults"])
    if node["prior_unknown"]:
        told.append(f"prior limit unknown, left alone: {', '.join(node['prior_unknown'])}")
    if node["refused"]:
        told.append(f"refused the last plan: {node['refused']}")
    return told
