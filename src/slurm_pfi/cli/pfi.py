"""``slurm-pfi pfi``: the Power Flexibility Index of each curve in a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from ..bus.control import NO, WRONG_USE
from ..elasticity.curve import CurveError
from ..elasticity.curvefile import CurveFile, CurveFileError, FileCurve, Skipped, load_curves
from ..elasticity.index import Pfi
from ..elasticity.index import pfi as index_of
from .common import console, fail, print_json
from .tables import Column, show_table

SAMPLES: Final = 10_000


@dataclass(frozen=True)
class Line:
    """A curve with its PFI, or why it has none. ``deviation``: without the points under 1 % minus with all points."""

    curve: FileCurve
    value: Pfi | None
    reason: str
    deviation: float | None


@click.command("pfi")
@click.argument("curves", type=click.Path(path_type=Path))
@click.option(
    "--all-points",
    is_flag=True,
    help="as in the paper: use every point with another throughput than the uncapped one, also those under 1 % of "
    "loss, and show what leaving these out changes",
)
@click.option("--json", "as_json", is_flag=True, help="machine-readable output")
def pfi(curves: Path, all_points: bool, as_json: bool) -> None:
    """Print the Power Flexibility Index of each curve in CURVES.

    CURVES is CSV text with the columns curve_id, gpu, cap_w, power_w_per_gpu (as measured, not the cap) and
    throughput (any unit), one row for each cap of each curve; the highest cap is the uncapped point. Other columns
    are optional or ignored. Values of different caps or GPU models are not comparable.

    A curve with bad rows is skipped and named on stderr. Exit codes: 0 done, 1 no curve has a value, 2 the file
    cannot be read.
    """
    file = read_file(curves)
    lines = [_line(curve, all_points=all_points) for curve in file.curves]
    if as_json:
        data = {
            "curves": [_as_json(line) for line in lines],
            "skipped": skipped_json(file.origin, file.skipped),
        }
        print_json({**data, "all_points": all_points})
    elif lines:
        _show(lines, all_points=all_points)
    tell_skipped(file.origin, file.skipped)
    if not any(line.value for line in lines):
        reason = next((f": {line.curve.curve_id}: {line.reason}" for line in lines), "")
        fail(f"{file.origin}: no curve has a PFI{reason}", NO)


def read_file(path: Path, *, need: tuple[str, ...] = (), keep: tuple[str, ...] = ()) -> CurveFile:
    """The curve file of a command line; ends the command if it cannot be read as a whole."""
    try:
        return load_curves(path, need=need, keep=keep)
    except CurveFileError as error:
        fail(str(error), WRONG_USE)


def tell_skipped(origin: str, skipped: Iterable[Skipped]) -> None:
    """One line on stderr for each curve left out."""
    for one in skipped:
        click.echo(f"slurm-pfi: skipped {origin}: {one}", err=True)


def skipped_json(origin: str, skipped: Iterable[Skipped]) -> list[dict[str, Any]]:
    return [{"file": origin, **asdict(one)} for one in skipped]


def _line(curve: FileCurve, *, all_points: bool) -> Line:
    try:
        value = index_of(*curve.points(), gpu_model=curve.gpu, all_points=all_points, samples=SAMPLES)
    except CurveError as error:
        return Line(curve, None, str(error), None)
    return Line(curve, value, "", _deviation(curve, value, all_points=all_points))


def _deviation(curve: FileCurve, value: Pfi, *, all_points: bool) -> float | None:
    """None where the PFI is not defined without the points under 1 %."""
    try:
        other = index_of(*curve.points(), gpu_model=curve.gpu, all_points=not all_points, samples=1)
    except CurveError:
        return None
    return other.difference(value) if all_points else value.difference(other)


def _as_json(line: Line) -> dict[str, Any]:
    curve, value = line.curve, line.value
    return {
        "curve_id": curve.curve_id,
        "gpu": curve.gpu,
        "pfi": value.value if value else None,
        "low": value.low if value else None,
        "high": value.high if value else None,
        "grid_w": sorted(curve.sweep.cap_w.tolist()),
        "used": value.used if value else 0,
        "left_out": value.left_out if value else curve.sweep.cap_w.size - 1,
        "deviation": line.deviation,
        "reason": line.reason,
        "uncapped_w": curve.uncapped_w,
        "uncapped_known": curve.uncapped_known,
        "basis": curve.basis,
        "draw_measured": curve.draw_measured,
        "repairs": asdict(curve.repairs()),
        "doubts": list(curve.doubts),
    }


def _show(lines: list[Line], *, all_points: bool) -> None:
    out = console()
    show_table(out, [*_COLUMNS[:3], _DEVIATION, *_COLUMNS[3:]] if all_points else _COLUMNS, lines)
    for line in lines:
        for note in (*line.curve.doubts, *((line.reason,) if line.reason else ())):
            out.print(f"{line.curve.curve_id}: {note}", markup=False, style="yellow", soft_wrap=True)
    if any(line.curve.repairs().total for line in lines):
        out.print(
            "REPAIRS counts points: s sorted, d of one cap averaged, n drew no less than uncapped, "
            "z faster than uncapped, r less loss than at a smaller reduction. s and d change what Eq. 1 is given, "
            "the others only the curve made of it.",
            style="dim",
            soft_wrap=True,
        )


def _short_id(line: Line) -> str:
    """Both ends of a long name: the beginnings of many are alike."""
    name = line.curve.curve_id
    return name if len(name) <= 30 else f"{name[:10]}…{name[-19:]}"


def _grid(line: Line) -> str:
    caps = [f"{cap:g}" for cap in line.curve.sweep.cap_w[::-1].tolist()]
    return "/".join(caps)


def _short_grid(line: Line) -> str:
    caps = line.curve.sweep.cap_w
    return f"{caps[-1]:g}..{caps[0]:g} ({caps.size})"


def _repairs(line: Line) -> str:
    made = line.curve.repairs()
    counts = (
        (made.unsorted, "s"),
        (made.duplicates, "d"),
        (made.not_binding, "n"),
        (made.below_zero, "z"),
        (made.raised, "r"),
    )
    return " ".join(f"{count}{letter}" for count, letter in counts if count)


_COLUMNS: Final = (
    Column("CURVE", lambda line: line.curve.curve_id, short=_short_id, clip=12),
    Column("GPU", lambda line: line.curve.gpu, clip=6, drop=2),
    Column("PFI", lambda line: f"{line.value.value:.2f}" if line.value else "-", side="right"),
    Column("95 %", lambda line: f"{line.value.low:.2f}..{line.value.high:.2f}" if line.value else "-"),
    Column("USED", lambda line: str(line.value.used) if line.value else "0", side="right"),
    Column("LEFT OUT", lambda line: str(line.value.left_out) if line.value else "-", side="right", drop=4),
    Column("CAPS (W)", _grid, short=_short_grid, drop=3),
    Column("REPAIRS", _repairs, drop=1),
)
_DEVIATION: Final = Column(
    "WITHOUT <1 %",
    lambda line: f"{line.deviation:+.2f}" if line.deviation is not None else "undefined",
    side="right",
)
