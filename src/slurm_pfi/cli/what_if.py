"""``slurm-pfi what-if``: what a limit would cost, without setting it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import click

from ..bus.asking import NO, WRONG_USE
from ..units import UnitError, format_power, parse_power_mw
from .common import Screen, ask_controller, fail, percent, print_json
from .forecast_words import counted, estimate, job_ids, standing_lines, uncapped_lines, wrapped
from .tables import Column, show_table

_PERCENT: Final = re.compile(r"-?(\d{1,6}(?:\.\d{1,6})?)\s?%", re.ASCII)
_MINUS: Final = re.compile(r"-[0-9.].*")
MOST_ROWS: Final = 20
_ALLOWED: Final = "write 20% or -2kW for so much less, or 18.5kW for a limit"


class _WithTarget(click.Command):
    """Takes ``-2kW`` for the target that it is, not for an unknown option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" not in args:
            targets = [word for word in args if _MINUS.fullmatch(word)]
            if targets:
                args = [*(word for word in args if word not in targets), "--", *targets]
        return super().parse_args(ctx, args)


@click.command("what-if", cls=_WithTarget)
@click.argument("target")
@click.option("--emergency", is_flag=True, help="as an emergency limit, which may pass floors")
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, powers in mW")
@click.pass_context
def what_if(context: click.Context, target: str, emergency: bool, as_json: bool) -> None:
    """Show what a limit would cost whom. Nothing is changed.

    \b
    TARGET  20%      use 20 % less than the site draws without caps
            -2kW     use 2 kW less than that
            18.5kW   a limit of 18.5 kW

    The answer is for this limit alone, in force now. Exit code 1: it cannot be held.
    """
    data = ask_controller(context, "what_if", {**parse_target(target), "emergency": emergency}).data
    if as_json:
        print_json(data)
    else:
        _show(data)
    if not data["feasible"]:
        sys.exit(NO)


def parse_target(text: str) -> dict[str, Any]:
    """The target as the controller reads it; ends the command when it is none."""
    word = text.strip()
    if word.startswith("+"):
        fail(f"target {text!r}: {_ALLOWED}", WRONG_USE)
    if share := _PERCENT.fullmatch(word):
        if float(share[1]) == 0:
            fail(f"target {text!r} asks for nothing: {_ALLOWED}", WRONG_USE)
        return {"share": float(share[1]) / 100}
    try:
        power_mw = parse_power_mw(word.removeprefix("-"))
    except UnitError as error:
        reason = str(error).partition(":")[0].replace("power", "target", 1)
        fail(f"{reason}: {_ALLOWED}", WRONG_USE)
    if not word.startswith("-"):
        return {"limit_mw": power_mw}
    if power_mw == 0:
        fail(f"target {text!r} asks for nothing: {_ALLOWED}", WRONG_USE)
    return {"less_mw": power_mw}


def _show(data: dict[str, Any]) -> None:
    out = Screen()
    width = min(out.width, 100)

    def tell(*lines: str) -> None:
        for line in lines:
            for part in wrapped(line, width):
                out.print(part, markup=False)

    tell(*_headline(data), *standing_lines(data["standing"]))
    out.print()
    tell(*_verdict(data))
    if data["runs"] or data["runs_hidden"]:
        tell(*_cost(data))
        out.print()
        _show_runs(out, data["runs"], tell)
        tell(*_notes(data))
    elif data["binds"]:
        tell("There is no run whose GPUs a plan can reach: nothing to cut.")
    if data["uncapped_mw"]:
        out.print()
        tell(*uncapped_lines(data["uncapped"], data["uncapped_mw"]))


def _show_runs(out: Screen, runs: list[dict[str, Any]], tell: Callable[..., None]) -> None:
    cut = sorted((run for run in runs if run["reduction"] > 0), key=lambda run: -run["reduction"])
    if not cut:
        return
    show_table(out, _COLUMNS, cut[:MOST_ROWS])
    if len(cut) > MOST_ROWS:
        tell(f"and {len(cut) - MOST_ROWS} more, cut less (--json has all)")
    if any(run["baseline"] == "bounded" for run in cut):
        tell("<  never seen uncapped: it draws at most that, so CUT and LOSS are upper bounds")
    out.print()


def _headline(data: dict[str, Any]) -> Iterator[str]:
    kind = "an emergency limit" if data["target"]["emergency"] else "a limit"
    less_mw, total_mw = data["asked_less_mw"], data["uncapped_mw"]
    if less_mw > total_mw:
        yield (
            f"What if the site drew {format_power(less_mw)} less? That is more than it draws:"
            f" {format_power(total_mw)} without caps."
        )
        return
    share = f" ({percent(less_mw / total_mw)})" if total_mw and less_mw >= 0 else ""
    way = f"{format_power(abs(less_mw))}{share} {'above' if less_mw < 0 else 'below'}"
    yield f"What if {kind} of {format_power(data['limit_mw'])} were in force now? That is {way} the uncapped draw."


def _verdict(data: dict[str, Any]) -> Iterator[str]:
    if not data["worst_mw"]:
        yield "There is NOTHING to limit: the config names no node and no load."
        return
    if not data["binds"]:
        yield (
            f"It binds nothing: without caps the site draws at most {format_power(data['worst_mw'])},"
            " with every GPU at its prior limit."
        )
        return
    if data["feasible"]:
        yield "It can be held."
        return
    emergency = data["target"]["emergency"]
    lowest = "as low as it goes" if emergency else "at its floor"
    how = (
        f"with every run {lowest}"
        if data["runs"] or data["runs_hidden"]
        else "with every GPU that a plan can reach at its lowest cap"
    )
    yield f"It CANNOT be held: {format_power(data['shortfall_mw'])} short {how}."
    least_mw, total_mw = data["least_limit_mw"], data["uncapped_mw"]
    if least_mw < total_mw:
        most_mw = total_mw - least_mw
        yield (
            f"The lowest limit that can be: {format_power(least_mw)}, {format_power(most_mw)}"
            f" ({percent(most_mw / total_mw)}) below the uncapped draw."
        )
    else:
        yield (
            f"The lowest limit that can be, {format_power(least_mw)}, is no reduction: caps go no lower, and a GPU"
            " without a run counts at its lowest cap, whatever it draws."
        )
    if not emergency and data["emergency_shortfall_mw"] == 0:
        yield "As an emergency limit, which passes floors, it could be held: see --emergency."
    elif not emergency:
        yield f"An emergency limit, which passes floors, would miss {format_power(data['emergency_shortfall_mw'])}."


def _cost(data: dict[str, Any]) -> Iterator[str]:
    loss = data["loss"]
    where = "Expected loss" if data["feasible"] else "With every run that low, the expected loss is"
    colon = ":" if data["feasible"] else ""
    yield (
        f"{where}{colon} {estimate(loss)} of the throughput of "
        f"{counted(len(data['runs']) + data['runs_hidden'], 'run')} on"
        f" {counted(data['gpus'], 'GPU')}, while it lasts."
    )


def _notes(data: dict[str, Any]) -> Iterator[str]:
    runs = data["runs"]
    uncut = sum(1 for run in runs if run["reduction"] == 0)
    if data["runs_hidden"] or data["waiting_hidden"]:
        hidden = counted(data["runs_hidden"] + data["waiting_hidden"], "run")
        yield f"In the sums and not told one by one: {hidden} of others (PrivateData in slurm.conf)."
    if not runs:
        pass
    elif uncut == len(runs):
        yield "No run is slowed: their caps come down to what they draw."
    elif uncut:
        yield f"Not slowed: {uncut} of {counted(len(runs), 'run')}."
    if floors := [
        run for run in runs if run["at_floor"] and not run["floor_passed"] and run["reduction"] > 0
    ]:
        yield f"At their floor, they give no more: {_jobs(floors)}."
    if passed := [run for run in runs if run["floor_passed"]]:
        yield f"Past their floor, below what their users were promised: {_jobs(passed)}."
    if data["waiting"]:
        yield f"Would wait for power at the park cap: {job_ids(data['waiting'], data['names'])}."
    if data["parked_gpus"]:
        yield (
            f"GPUs without a run: {data['parked_gpus']}. They count at the park cap,"
            f" {format_power(data['parked_mw'])} in all, whatever they draw; uncapped that is"
            f" {format_power(data['parked_draw_mw'])}."
        )
    yield from _policy(data)
    if uncut < len(runs) and data["certificate"]["informed"]:
        measured = sum(1 for run in runs if run["measured"])
        others = "" if measured == len(runs) else "; of the others: as published curves of other jobs have it"
        yield f"Curves measured here: {measured} of {counted(len(runs), 'run')}{others}."


def _jobs(runs: Sequence[dict[str, Any]]) -> str:
    return job_ids([run["run"] for run in runs], {run["run"]: run["spec"] for run in runs})


def _policy(data: dict[str, Any]) -> Iterator[str]:
    policy, certificate = data["standing"]["policy"], data["certificate"]
    gain, step = certificate["gain"], certificate["step"]
    if gain is None:
        return
    if not certificate["informed"]:
        yield (
            f"Policy {policy}: nothing is measured yet. Everyone is cut alike as far as floors allow, and losses are"
            " what published curves of other jobs say."
        )
        return
    saves = f"it saves {estimate(gain)} of all throughput against cutting everyone alike"
    if policy == "equal":
        yield "Policy equal: everyone is cut alike as far as floors allow."
    elif gain["expected"] == 0 and gain["high"] == 0:
        yield f"Policy {policy}: here it cuts everyone alike, as far as floors allow."
    elif step:
        yield f"Policy {policy}: {percent(step, 0)} of the way to its best plan is certified; {saves}."
    else:
        yield f"Policy {policy}: {saves}."


def _draw(run: dict[str, Any]) -> str:
    return f"{'<' if run['baseline'] == 'bounded' else ''}{format_power(run['draw_mw'])}"


def _loss(run: dict[str, Any]) -> str:
    return percent(run["loss"]["expected"])


def _interval(run: dict[str, Any]) -> str:
    return f"{100 * run['loss']['low']:.1f} to {100 * run['loss']['high']:.1f} %"


def _note(run: dict[str, Any]) -> str:
    return "past floor" if run["floor_passed"] else "at floor" if run["at_floor"] else ""


_COLUMNS: Final = (
    Column("JOB", lambda run: _jobs([run]), side="right"),
    Column("USER", lambda run: run["user"] or "?", clip=5, drop=4),
    Column("FLEX", lambda run: run["flex"] or "?", side="right", drop=3),
    Column("GPUS", lambda run: str(run["gpus"]), side="right", drop=2),
    Column("DRAW", _draw, side="right"),
    Column("CAP", lambda run: format_power(run["cap_mw"]), side="right"),
    Column("CUT", lambda run: percent(run["reduction"]), side="right"),
    Column("LOSS", _loss, side="right"),
    Column("95 %", _interval, side="right"),
    Column("CURVE", lambda run: "measured" if run["measured"] else "library", drop=1),
    Column("", _note),
)
