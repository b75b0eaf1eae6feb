"""``slurm-pfi offer``: what the site can give, at what loss, how soon and for how long."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ..bus.asking import NO, WRONG_USE
from ..units import format_duration, format_power
from .clock import local_text
from .common import ask_controller, console, fail, percent, print_json
from .forecast_words import counted, standing_lines, uncapped_lines, wrapped
from .tables import Column, show_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS: Final = (".svg", ".png")


@click.command(short_help="Show what the site can give: watts, loss, notice, time.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="machine-readable output with the whole supply curve; powers in mW",
)
@click.option(
    "--plot",
    "plot",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="draw loss against watts into FILE, .svg or .png",
)
@click.pass_context
def offer(context: click.Context, as_json: bool, plot: Path | None) -> None:
    """Show what the site can give: watts, expected loss, notice, duration. Nothing is changed.

    Exit code 1: floors allow no reduction at all.
    """
    if plot is not None:
        _check_plot(plot)
    data = ask_controller(context, "offer").data
    if as_json:
        print_json(data)
    else:
        _show(data)
    if plot is not None and data["levels"]:
        _draw(data, plot)
        click.echo(f"drawn: {plot}", err=as_json)
    if not data["levels"]:
        sys.exit(NO)


def _show(data: dict[str, Any]) -> None:
    out = console()
    width = min(out.width, 100)

    def tell(*lines: str) -> None:
        for line in lines:
            for part in wrapped(line, width):
                out.print(part, markup=False)

    tell(f"What cluster {data['standing']['cluster']} can give as it is now, with every floor kept.")
    tell(*standing_lines(data["standing"]))
    out.print()
    if data["uncapped_mw"]:
        tell(*uncapped_lines(data["uncapped"], data["uncapped_mw"]))
        out.print()
    if not data["levels"]:
        tell(*_nothing(data))
        return
    show_table(out, _COLUMNS, data["levels"])
    out.print()
    tell(*_explained(data))


def _nothing(data: dict[str, Any]) -> Iterator[str]:
    if not data["runs"]:
        yield "It can give NOTHING: there is no run whose GPUs a plan can reach."
        return
    yield "It can give NOTHING: every run would be at its floor before the site draws less than it does."
    yield (
        f"The lowest limit that can be held is {format_power(data['least_limit_mw'])}: caps go no lower, and a GPU"
        " without a run counts at its lowest cap, whatever it draws."
    )


def _explained(data: dict[str, Any]) -> Iterator[str]:
    most = data["levels"][-1]
    yield (
        f"Most: {format_power(most['less_mw'])} ({percent(most['share'])} of the uncapped draw), all that the floors of"
        f" {counted(data['runs'], 'run')} on {counted(data['gpus'], 'GPU')} allow."
    )
    yield (
        "LOSS: of the throughput of these runs while it lasts, every GPU-hour alike. NEXT kW: what one kW more costs,"
        " at the cheapest run by merit order."
    )
    yield (
        "SURE: drawn less with 95 % confidence, by the baselines of the runs that have one. It may pass GIVES, for a"
        " limit is kept by caps, and a GPU without a run counts at its park cap, whatever it draws."
    )
    total_mw = sum(most[part] for part in ("seen_mw", "bounded_mw"))
    if most["bounded_mw"]:
        yield (
            f"Of the most, {percent(most['bounded_mw'] / total_mw, 0)} comes from runs never seen uncapped: they may"
            " draw less than is counted, and then give less."
        )
    measured = most["measured_mw"] / total_mw if total_mw else 0.0
    if measured:
        yield f"{percent(measured, 0)} of the most comes from runs whose baseline and curve were measured here."
    else:
        yield "No run's curve was measured here yet: losses are what published curves of other jobs say."
    yield (
        f"Notice: none for a limit whose start is announced {format_duration(data['notice_s'])} ahead; else"
        f" {format_duration(data['notice_s'])} from the order. Ramp: all caps are lowered within"
        f" {format_duration(data['ramp_s'])}, as configured (times.response_s)."
    )
    yield from _lasting(data)


def _lasting(data: dict[str, Any]) -> Iterator[str]:
    text = "LASTS: for how long the runs that run now can give it, by their time limits in Slurm."
    if data["endless_runs"]:
        text += f" {data['endless_runs']} have none."
    if data["unknown_end_runs"]:
        text += f" {data['unknown_end_runs']} whose end is not known are not counted on."
    yield (
        f"{text} A limit in watts holds longer: when a run ends, the next one starts parked and is raised only out of"
        " budget."
    )


def _lasts(level: dict[str, Any]) -> str:
    if level["lasts"] == "until":
        left_s = max(0.0, level["until_unix_s"] - time.time())
        return format_duration(left_s)
    return {"unlimited": "no end", "unknown": "?"}[level["lasts"]]


def _interval(level: dict[str, Any]) -> str:
    loss = level["loss"]
    return "?" if loss is None else f"{100 * loss['low']:.1f} to {100 * loss['high']:.1f} %"


_COLUMNS: Final = (
    Column("GIVES", lambda level: format_power(level["less_mw"]), side="right"),
    Column("SHARE", lambda level: percent(level["share"]), side="right"),
    Column("LIMIT", lambda level: format_power(level["limit_mw"]), side="right", drop=1),
    Column("LOSS", lambda level: percent(level["loss"] and level["loss"]["expected"]), side="right"),
    Column("95 %", _interval, side="right"),
    Column(
        "NEXT kW",
        lambda level: "-" if level["price_per_kw"] is None else f"{100 * level['price_per_kw']:.2g} %",
        side="right",
    ),
    Column("SURE", lambda level: format_power(level["sure_mw"]), side="right"),
    Column("LASTS", _lasts, side="right"),
)


# ------------------------------------------------------------------------------------------------ picture


def _check_plot(path: Path) -> None:
    """End the command before anything is asked if no picture can come of it."""
    if path.suffix.lower() not in _FORMATS:
        fail(f"--plot {path}: the name must end in .svg or .png", WRONG_USE)
    if not path.absolute().parent.is_dir():
        fail(f"--plot {path}: there is no folder {path.parent}", WRONG_USE)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        fail("--plot needs matplotlib: pip install 'slurm-pfi[plot]'", WRONG_USE)


def _draw(data: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    _curve(figure.add_subplot(), data)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        fail(f"--plot {path}: cannot be written: {error.strerror}", NO)


def _curve(axes: Axes, data: dict[str, Any]) -> None:
    levels = data["levels"]
    unit, scale = ("kW", 1e6) if data["uncapped_mw"] < 1e10 else ("MW", 1e9)
    watts = [level["less_mw"] / scale for level in levels]
    loss, low, high = (
        [100 * (level["loss"] or {}).get(part, 0.0) for level in levels]
        for part in ("expected", "low", "high")
    )
    axes.fill_between(watts, low, high, color="tab:blue", alpha=0.2, linewidth=0, label="95 % interval")
    axes.plot(watts, loss, color="tab:blue", marker="o", markersize=4, label="expected loss")
    axes.axvline(watts[-1], color="tab:red", linestyle="--", linewidth=1, label="all that floors allow")
    axes.set_xlabel(f"power given up, {unit} below the uncapped draw of {format_power(data['uncapped_mw'])}")
    axes.set_ylabel("loss of all throughput, %")
    axes.set_xlim(0, watts[-1] * 1.05)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    share = axes.twiny()
    share.set_xlim(0, 100 * levels[-1]["share"] * 1.05)
    share.set_xlabel("% of the uncapped draw")
    label = "SIMULATED GPUs: " if data["standing"]["simulated"] else ""
    axes.set_title(f"{label}what {data['standing']['cluster']} can give, {local_text(time.time())}")
