"""``slurm-pfi status``: the site, its limit and its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import click

from ..units import format_duration, format_power
from .common import SIMULATED, Screen, ask_controller, print_json
from .tables import Column, names_text, plain, show_table

MOST_NODES: Final = 40
"""Nodes that are listed one by one; more are shown by state, unless all are asked for."""

_STATES: Final = ("silent", "never heard", "released", "faulty", "ok")
"""The worst first."""

_Node = Mapping[str, Any]


@click.command()
@click.option(
    "--all",
    "all_nodes",
    is_flag=True,
    help=f"each node by itself, also where there are more than {MOST_NODES}",
)
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, powers in mW")
@click.pass_context
def status(context: click.Context, all_nodes: bool, as_json: bool) -> None:
    """Show the site: limit, budget, draw, nodes, faults."""
    data = ask_controller(context, "status").data
    if as_json:
        print_json(data)
        return
    out = Screen()
    for line in headline(data):
        out.print(plain(line), markup=False)
    nodes = data["nodes"]
    out.print()
    out.print(nodes_in_short(nodes), markup=False)
    grouped = len(nodes) > MOST_NODES and not all_nodes
    if nodes:
        show_table(out, NODE_COLUMNS, in_groups(nodes) if grouped else nodes)
    told = [f"{node['name']}: {trouble}" for node in nodes for trouble in _troubles(node)]
    most = MOST_NODES if grouped else len(told)
    for line in told[:most]:
        out.print(plain(line), markup=False)
    if len(told) > most:
        out.print(f"and {len(told) - most:,} more such lines")
    if grouped:
        out.print("nodes in the same state are shown together; --all lists each", style="dim")


def headline(data: Mapping[str, Any]) -> list[str]:
    """The site in a few lines, each short enough for a terminal where no list of names is in it."""
    draw = data["draw"]
    lines = [
        f"cluster {data['cluster']}   policy {data['policy']}   epoch {data['epoch']}",
        f"site draw {format_power(draw['site_mw'])}: GPUs {format_power(draw['gpus_mw'])}, "
        f"declared beside them {format_power(draw['overhead_mw'])}",
        f"without caps at most {format_power(draw['uncapped_worst_mw'])}",
    ]
    if data["simulated"]:
        lines.append(SIMULATED)
    if data["off"]:
        lines.append("OFF: no limit is enforced ('slurm-pfi on' ends this)")
    if not data["limits_known"]:
        lines.append("LIMITS UNREADABLE: the last plans stay in force; see the controller's log")
    lines += tag_lines(data.get("tags"))
    window = data["window"]
    if window is None:
        lines.append("no window: no limit binds")
        return lines
    lines += [
        *limit_lines(window),
        f"for GPU caps {format_power(window['budget_mw'])}, planned {format_power(window['committed_mw'])}",
    ]
    if window["shortfall_mw"]:
        lines.append(
            f"INFEASIBLE: {format_power(window['shortfall_mw'])} short, with every run as low as it may go"
        )
    if window["silent"]:
        lines.append(
            f"counted at their worst, as they do not answer or take no plan: {names_text(window['silent'])}"
        )
    return lines


def tag_lines(tags: Mapping[str, Any] | None) -> list[str]:
    """What became of the tags in AdminComment; nothing while every one was written."""
    if not tags:
        return []
    words = {
        "raced": "overwritten by others at once",
        "not_rewritable": "left out beside text that cannot be kept whole",
        "unavailable": "tries failed",
    }
    odd = [f"{tags[name]:,} {said}" for name, said in words.items() if tags[name]]
    lines = [f"tags: {tags['written']:,} written, {', '.join(odd)}"] if odd else []
    if tags["trouble"]:
        again = "" if tags["retry_in_s"] is None else f", next try in {format_duration(tags['retry_in_s'])}"
        lines.append(f"tags cannot be written: {tags['waiting']:,} wait{again}: {tags['trouble']}")
    return lines


def limit_lines(window: Mapping[str, Any]) -> list[str]:
    """What holds the site down, since when, and until when as far as that is known."""
    opened, ends_in_s = format_duration(window["open_s"]), window.get("ends_in_s")
    if window.get("rebound"):
        done = [] if ends_in_s is None else [f"done in {format_duration(max(0.0, ends_in_s))} at the latest"]
        before_mw = window.get("rebound_mw")
        of = "" if before_mw is None else f" of at most {format_power(max(before_mw, window['limit_mw']))}"
        return [f"after a window, caps rise slowly: {format_power(window['limit_mw'])} now{of}", *done]
    class_ = f"{window['class']}, " if window.get("class") else ""
    limit = f"limit {format_power(window['limit_mw'])} ({class_}{names_text(window['limit_ids'])})"
    ends = "no end is set" if ends_in_s is None else f"ends in {format_duration(max(0.0, ends_in_s))}"
    return [limit, f"window open for {opened}, {ends}"]


# ------------------------------------------------------------------------------------------------ nodes


def node_state(node: _Node) -> str:
    """A node's state in one word; a node that is heard and has something wrong is faulty."""
    state = str(node["state"])
    return "faulty" if state == "ok" and _troubles(node) else state


def node_rank(node: _Node) -> int:
    """The worst first."""
    state = node_state(node)
    return _STATES.index(state) if state in _STATES else 0


def nodes_in_short(nodes: Sequence[_Node]) -> str:
    """``NODES 12: 1 silent, 11 ok``."""
    counts: dict[str, int] = {}
    for node in sorted(nodes, key=node_rank):
        counts[node_state(node)] = counts.get(node_state(node), 0) + 1
    told = ", ".join(f"{count:,} {state}" for state, count in counts.items())
    return f"NODES {len(nodes):,}: {told}" if nodes else "NODES: the config declares none"


def in_groups(nodes: Sequence[_Node]) -> list[dict[str, Any]]:
    """Nodes of the same state and mode as one row of `NODE_COLUMNS`, with their sums; the worst first."""
    groups: dict[tuple[str, str], list[_Node]] = {}
    for node in sorted(nodes, key=node_rank):
        groups.setdefault((node_state(node), str(node["mode"])), []).append(node)
    rows: list[dict[str, Any]] = []
    for (state, mode), members in groups.items():
        ages_s = [node["age_s"] for node in members]
        names = folded([node["name"] for node in members])
        rows.append(
            {
                "name": names if len(members) == 1 else f"{len(members):,}: {names}",
                "state": state,
                "mode": mode,
                "age_s": None if None in ages_s else max(ages_s),
                **{
                    key: _sum(members, key)
                    for key in ("gpus", "gpus_declared", "capped", "enforced_mw", "draw_mw")
                },
                "faults": [],
                "prior_unknown": [],
                "refused": "",
            }
        )
    return rows


def folded(names: Sequence[str]) -> str:
    """``gpu[01-04,07]``; as they are, where they are no ordinary names."""
    return plain(names[0]) if len(names) == 1 else _folded(tuple(names))


@lru_cache(maxsize=64)
def _folded(names: tuple[str, ...]) -> str:
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    try:
        return str(NodeSet.fromlist(names, resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        return ",".join(names)


def _sum(nodes: Sequence[_Node], key: str) -> int | None:
    """The sum, or None as soon as one is unknown."""
    values = [node[key] for node in nodes]
    return None if None in values else sum(values)


def _heard(node: _Node) -> str:
    age_s = node["age_s"]
    if age_s is None:
        return "never"
    return f"{age_s:.1f} s" if age_s < 120 else format_duration(age_s)


def _gpus(node: _Node) -> str:
    same = node["gpus"] == node["gpus_declared"]
    return str(node["gpus"]) if same else f"{node['gpus']}/{node['gpus_declared']}"


NODE_COLUMNS: Final = (
    Column("NODE", lambda node: node["name"], clip=8),
    Column("STATE", node_state),
    Column("MODE", lambda node: node["mode"], drop=2),
    Column("HEARD", _heard, side="right", drop=1),
    Column("GPUS", _gpus, side="right"),
    Column("CAPPED", lambda node: str(node["capped"]), side="right", drop=3),
    Column("CAPS", lambda node: format_power(node["enforced_mw"]), side="right"),
    Column("DRAW", lambda node: format_power(node["draw_mw"]), side="right"),
)


def _troubles(node: _Node) -> list[str]:
    told = list(node["faults"])
    if node["prior_unknown"]:
        told.append(f"prior limit unknown, left alone: {names_text(node['prior_unknown'])}")
    if node["refused"]:
        told.append(f"refused the last plan: {node['refused']}")
    return told
