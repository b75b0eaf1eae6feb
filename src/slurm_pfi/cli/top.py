"""``slurm-pfi top``: site, nodes and runs as they are now, on one screen."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click
from rich.console import Group, RenderableType
from rich.text import Text

from ..units import format_power
from .clock import local_text
from .common import SIMULATED, ask_controller, console, control_path, percent, print_json, site_config
from .jobs import draw_text, flex_text, job_text, short_state
from .status import NODE_COLUMNS, in_groups, limit_lines, node_rank, nodes_in_short
from .tables import Column, fit, names_text, plain

LEAST_NODE_LINES: Final = 3
_BAR: Final = 20
_EVERYTHING: Final = 1_000_000
"""Lines where there is no screen to fill."""


@click.command(short_help="Watch the site: limit, draw, nodes, who gives most.")
@click.option(
    "--interval-s",
    type=click.FloatRange(0.5, 3600),
    default=2.0,
    show_default=True,
    help="seconds between two looks at the site",
)
@click.option("--once", is_flag=True, help="print it once and end; so too where there is no terminal")
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, once, powers in mW")
@click.pass_context
def top(context: click.Context, interval_s: float, once: bool, as_json: bool) -> None:
    """Watch the site: limit, draw, nodes, and the runs that give most. Ends with q or Ctrl-C."""
    status = ask_controller(context, "status").data
    jobs = ask_controller(context, "jobs").data
    if as_json:
        print_json({"status": status, "jobs": jobs})
        return
    out = console()
    if once or not out.is_terminal or out.is_dumb_terminal:
        height = out.height - 1 if out.is_terminal else _EVERYTHING
        out.print(render(status, jobs, out.width, height, now_unix_s=time.time()))
        return
    from .top_live import watch

    watch(out, control_path(site_config(context)), interval_s, status, jobs)


# ------------------------------------------------------------------------------------------------ the picture


def render(
    status: Mapping[str, Any],
    jobs: Sequence[Mapping[str, Any]],
    width: int,
    height: int,
    *,
    now_unix_s: float,
    away: str = "",
) -> RenderableType:
    """The whole picture in ``width`` columns and ``height`` lines at most: the site, then nodes, then runs.

    ``away`` says that the figures are old and why, and stands above everything else.
    """
    head = [_line(text, style) for text, style in _site(status, now_unix_s, away)]
    room = max(0, height - len(head) - 1)  # the last line says what is left out and how it ends
    nodes, runs = _rooms(len(status["nodes"]), len(jobs), room)
    parts: list[RenderableType] = [*head]
    left_out: list[str] = []
    parts += _nodes(status["nodes"], width, nodes, left_out)
    parts += _runs(jobs, width, runs, left_out)
    note = f"{'; '.join(left_out)}   " if left_out else ""
    if height < _EVERYTHING or left_out:
        parts.append(_line(f"{note}q or Ctrl-C ends", "dim"))
    for part in parts:
        if isinstance(part, Text) and "\n" not in part.plain:
            part.truncate(width, overflow="ellipsis")
    return Group(*parts[:height])


def _rooms(nodes: int, runs: int, room: int) -> tuple[int, int]:
    """Lines for nodes and for runs, each with its two lines of headings; runs get what nodes leave."""
    wanted_nodes, wanted_runs = nodes + 2, max(runs, 1) + 2
    for_nodes = min(room, wanted_nodes, max(LEAST_NODE_LINES + 2, room // 3, room - wanted_runs))
    return for_nodes, max(0, min(wanted_runs, room - for_nodes))


def _line(text: str, style: str = "") -> Text:
    return Text(plain(text), style=style, no_wrap=True, overflow="ellipsis", end="\n")


def _site(status: Mapping[str, Any], now_unix_s: float, away: str) -> list[tuple[str, str]]:
    """The lines about the whole site, each with its style."""
    draw, window = status["draw"], status["window"]
    modes = sorted({node["mode"] for node in status["nodes"]})
    mode = modes[0] if len(modes) == 1 else "mixed modes" if modes else "no nodes"
    lines = [
        (
            f"{status['cluster']}   policy {status['policy']}   {mode}   {local_text(now_unix_s)}",
            "bold",
        )
    ]
    if away:
        lines.append((away, "reverse"))
    if status["simulated"]:
        lines.append((SIMULATED, "yellow"))
    if status["off"]:
        lines.append(("OFF: no limit is enforced ('slurm-pfi on' ends this)", "bold red"))
    if not status["limits_known"]:
        lines.append(
            ("LIMITS UNREADABLE: the last plans stay in force; see the controller's log", "bold red")
        )
    lines += [(line, "") for line in _limit(status)]
    lines.append((_draw(draw, window), _over(draw, window)))
    if window is None:
        lines.append(
            (f"caps   none; without any the site draws {format_power(draw['uncapped_worst_mw'])} at most", "")
        )
    else:
        lines.append(
            (
                f"caps   {format_power(window['committed_mw'])} planned of "
                f"{format_power(window['budget_mw'])} there is for GPUs",
                "",
            )
        )
        if window["shortfall_mw"]:
            lines.append(
                (
                    f"INFEASIBLE: {format_power(window['shortfall_mw'])} short, every run as low as it may go",
                    "bold red",
                )
            )
        if window["silent"]:
            names = names_text(window["silent"])
            lines.append(
                (f"counted at their worst, as they do not answer or take no plan: {names}", "yellow")
            )
    lines.append(("", ""))
    return lines


def _limit(status: Mapping[str, Any]) -> list[str]:
    window = status["window"]
    if window is None:
        return ["limit  none binds"]
    first, *more = limit_lines(window)
    return [f"limit  {first.removeprefix('limit ')}", *(f"       {line}" for line in more)]


def _draw(draw: Mapping[str, Any], window: Mapping[str, Any] | None) -> str:
    site_mw = draw["site_mw"]
    of_mw = draw["uncapped_worst_mw"] if window is None else window["limit_mw"]
    if site_mw is None:
        return "draw   not known: not every GPU's draw is reported"
    if not of_mw:
        return f"draw   {format_power(site_mw)}"
    share = site_mw / of_mw
    full = min(_BAR, round(share * _BAR))
    of = "the limit" if window is not None else "the most without caps"
    return f"draw   {format_power(site_mw):<9} [{'#' * full}{'-' * (_BAR - full)}] {percent(share)} of {of}"


def _over(draw: Mapping[str, Any], window: Mapping[str, Any] | None) -> str:
    site_mw = draw["site_mw"]
    return "bold red" if window is not None and site_mw is not None and site_mw > window["limit_mw"] else ""


# ------------------------------------------------------------------------------------------------ nodes, runs


def _nodes(
    nodes: Sequence[Mapping[str, Any]], width: int, lines: int, left_out: list[str]
) -> Sequence[RenderableType]:
    """A heading and a table: each node where they fit, the worst first, else nodes in the same state together."""
    if lines < 3 or not nodes:
        return [_line(nodes_in_short(nodes), "bold")][:lines]
    shown: Sequence[Mapping[str, Any]] = sorted(nodes, key=node_rank)
    if len(shown) > lines - 2:
        shown = in_groups(nodes)
        if len(shown) > lines - 2:
            left_out.append(f"+{len(shown) - lines + 2} more kinds of nodes")
    return _table(nodes_in_short(nodes), NODE_COLUMNS, shown[: lines - 2], width)


def _runs(
    jobs: Sequence[Mapping[str, Any]], width: int, lines: int, left_out: list[str]
) -> Sequence[RenderableType]:
    """A heading and a table: the runs that give most first."""
    states: dict[str, int] = {}
    for job in jobs:
        state = "running" if job["state"] == "admitted" else job["state"]
        states[state] = states.get(state, 0) + 1
    told = ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))
    heading = f"RUNS {len(jobs):,}: {told}; CAP and DRAW are of one GPU" if jobs else "RUNS: no GPU has any"
    if lines < 3 or not jobs:
        if jobs:
            left_out.append(f"+{len(jobs):,} more runs")
        return [_line(heading, "bold")][:lines]
    shown = sorted(jobs, key=_run_rank)[: lines - 2]
    if len(jobs) > len(shown):
        left_out.append(f"+{len(jobs) - len(shown):,} more runs")
    return _table(heading, RUN_COLUMNS, shown, width)


def _table(
    heading: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], width: int
) -> Sequence[RenderableType]:
    (headings, *lines), _ = fit(columns, rows, width)
    return [_line(heading, "bold"), _line(headings, "bold"), *(_line(line) for line in lines)]


def gives_mw(run: Mapping[str, Any]) -> int | None:
    """How much less a run draws under its cap than without; 0 without a cap, None while that is not known."""
    if run["target_cap_mw"] is None:
        return 0
    draw_mw, uncapped_mw = run["draw_mw"], run["baseline_draw_mw"]
    if draw_mw is None or uncapped_mw is None:
        return None
    return max(0, int(uncapped_mw * run["gpus"] - draw_mw))


def _run_rank(run: Mapping[str, Any]) -> tuple[bool, int, int, int]:
    given_mw = gives_mw(run)
    return given_mw is None, -(given_mw or 0), -(run["draw_mw"] or 0), run["job_id"]


def _gives(run: Mapping[str, Any]) -> str:
    given_mw = gives_mw(run)
    return "-" if given_mw == 0 else format_power(given_mw)


RUN_COLUMNS: Final = (
    Column("JOB", job_text, side="right"),
    Column("USER", lambda run: run["user"] or "?", clip=6, drop=2),
    Column("STATE", short_state, clip=7),
    Column("GPUS", lambda run: str(run["gpus"]), side="right", drop=1),
    Column("FLEX", flex_text, side="right", clip=6, short=lambda run: run["flex"] or "?"),
    Column("CAP", lambda run: format_power(run["cap_mw"]), side="right"),
    Column("DRAW", draw_text, side="right"),
    Column("GIVES", _gives, side="right"),
    Column("LOSS", lambda run: percent(run["loss"]), side="right"),
)
