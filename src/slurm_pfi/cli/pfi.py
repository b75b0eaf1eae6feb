"""``slurm-pfi pfi``: the Power Flexibility Index of each curve in a file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from ..bus.asking import NO, WRONG_USE
from ..elasticity.curve import CurveError
from ..elasticity.curvefile import CurveFile, CurveFileError, FileCurve, Skipped, load_curves
from ..elasticity.index import Pfi
from ..elasticity.index import pfi as index_of
from ..elasticity.library import Library, library_curve
from .common import console, fail, print_json
from .tables import Column, fit, show_table

SAMPLES: Final = 10_000
_MOST_NAMED: Final = 3


@dataclass(frozen=True)
class Line:
    """A curve with its PFI, or why it has none.

    ``deviation``: without the points under 1 % minus with all points. ``library_reason``: why the curve would not
    join the library, empty where it would.
    """

    curve: FileCurve
    value: Pfi | None
    reason: str
    deviation: float | None
    library_reason: str


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
    throughput (any unit), one row for each cap of each curve; the highest cap is the uncapped point. Values of
    different caps or GPU models are not comparable.

    \b
    Optional columns that matter:
      family         jobs of one model architecture, such as llama; guessed from
                     workload and curve_id without it
      workload       what ran
      default_cap_w  the GPU's default limit (tdp_w means the same); without it
                     the highest cap is taken for it
      power_basis    what the draw is; text that does not begin with "measured"
                     says that nobody measured it
    Also task, source, licence, basis (measured or model); others are ignored.

    LIBRARY says whether a curve would join the library if controller.curves in the config named this file.

    A curve with bad rows is skipped and named on stderr. Exit codes: 0 done, 1 no curve has a value, 2 the file
    cannot be read.
    """
    file = read_file(curves)
    shipped = {curve.curve_id for curve in Library.load_default().curves}
    lines = [_line(curve, shipped, all_points=all_points) for curve in file.curves]
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


def _line(curve: FileCurve, shipped: Collection[str], *, all_points: bool) -> Line:
    joins = _library_reason(curve, shipped)
    try:
        value = index_of(*curve.points(), gpu_model=curve.gpu, all_points=all_points, samples=SAMPLES)
    except CurveError as error:
        hint = "" if all_points or not _defined_on_all_points(curve) else ", or use --all-points"
        return Line(curve, None, f"{error}{hint}", None, joins)
    return Line(curve, value, "", _deviation(curve, value, all_points=all_points), joins)


def _library_reason(curve: FileCurve, shipped: Collection[str]) -> str:
    if curve.curve_id in shipped:
        return "the library has a curve of that curve_id and refuses the whole file: give it another"
    made = library_curve(curve)
    return made if isinstance(made, str) else ""


def _defined_on_all_points(curve: FileCurve) -> bool:
    try:
        index_of(*curve.points(), gpu_model=curve.gpu, all_points=True, samples=1)
    except CurveError:
        return False
    return True


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
        "left_out": _left_out(line),
        "deviation": line.deviation,
        "reason": line.reason,
        "uncapped_w": curve.uncapped_w,
        "uncapped_known": curve.uncapped_known,
        "basis": curve.basis,
        "draw_measured": curve.draw_measured,
        "repairs": asdict(curve.repairs()),
        "doubts": list(curve.doubts),
        "library": not line.library_reason,
        "library_reason": line.library_reason,
    }


def _left_out(line: Line) -> int:
    """Capped points that no value is made from; all of them where there is none."""
    return line.value.left_out if line.value else line.curve.sweep.cap_w.size - 1


def _show(lines: list[Line], *, all_points: bool) -> None:
    out = console()
    columns = [*_COLUMNS[:3], _DEVIATION, *_COLUMNS[3:]] if all_points else list(_COLUMNS)
    if not any(_repairs(line) for line in lines):
        columns.remove(_REPAIRS)
    _, hidden = fit(columns, lines, out.width)
    show_table(out, columns, lines)
    for note in _legend(lines, {column.heading for column in columns} - set(hidden)):
        out.print(note, style="dim")
    for name, note in _notes(lines, all_points=all_points):
        out.print(f"{name}: {note}", markup=False, style="yellow", soft_wrap=True)
    reasons: dict[str, list[str]] = {}
    for line in lines:
        if line.library_reason:
            reasons.setdefault(line.library_reason, []).append(line.curve.curve_id)
    for reason, names in reasons.items():
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        told = f"not in the library: {', '.join(names[:_MOST_NAMED])}{more}: {reason}"
        out.print(told, markup=False, style="yellow", soft_wrap=True)


def _legend(lines: list[Line], headings: Collection[str]) -> list[str]:
    """What the columns shown mean, of the marks only those that occur."""
    told = [
        "PFI 1: as much throughput lost as power saved, in shares; 2: half as much; higher is more flexible."
    ]
    if _DEVIATION.heading in headings:
        told.append(
            f"{_DEVIATION.heading}: how the PFI changes if points under 1 % of loss are left out, "
            "as without --all-points."
        )
    seen = {name for line in lines for name, count in asdict(line.curve.repairs()).items() if count}
    marks = [f"{letter} {name} ({what})" for name, letter, what in _MARKS if name in seen]
    if marks and _REPAIRS.heading in headings:
        told.append(f"REPAIRS counts points: {'; '.join(marks)}.")
    return told


def _notes(lines: list[Line], *, all_points: bool) -> Iterator[tuple[str, str]]:
    """Curve and what a reader of its figures should know."""
    weak = "without measurable loss" if all_points else "of hardly more loss than the noise"
    for line in lines:
        name, value = line.curve.curve_id, line.value
        yield from ((name, doubt) for doubt in line.curve.doubts)
        if line.reason:
            yield name, line.reason
        if value is not None and value.used == 1:
            yield name, "its PFI rests on one point (*): measure more caps"
        if value is not None and value.low <= 0 <= value.high:
            yield name, f"its interval crosses 0: a point {weak} is in it"
        if all_points and value is not None and (same := _same_as_uncapped(line.curve)):
            caps = "/".join(f"{cap:g}" for cap in same)
            yield name, f"at {caps} W it draws and does exactly the same as uncapped: 0/0, left out"


def _same_as_uncapped(curve: FileCurve) -> list[float]:
    """Caps, W, ascending, at which draw and throughput are those of the uncapped point: Eq. 1 divides 0 by 0."""
    cap_w, power_w, rate = curve.points()
    same = (power_w[1:] == power_w[0]) & (rate[1:] == rate[0])
    return sorted(cap_w[1:][same].tolist())


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


_MARKS: Final = (
    ("unsorted", "s", "not in the order of the caps, sorted"),
    ("duplicates", "d", "of one cap, averaged"),
    ("not_binding", "n", "drew no less than uncapped, left out of the curve"),
    ("below_zero", "z", "faster than uncapped, loss 0 in the curve"),
    ("raised", "r", "less loss than at a smaller reduction, raised in the curve"),
)
"""Kind of repair, its letter, what it means. The first two change what the PFI is made from, the others the curve."""


def _repairs(line: Line) -> str:
    made = asdict(line.curve.repairs())
    return " ".join(f"{made[name]}{letter}" for name, letter, _ in _MARKS if made[name])


def _value(line: Line) -> str:
    if line.value is None:
        return "-"
    return f"{line.value.value:.2f}{'*' if line.value.used == 1 else ''}"


_REPAIRS: Final = Column("REPAIRS", _repairs, drop=1)
_COLUMNS: Final = (
    Column("CURVE", lambda line: line.curve.curve_id, short=_short_id, clip=12),
    Column("GPU", lambda line: line.curve.gpu, drop=6),
    Column("PFI", _value, side="right"),
    Column("95 %", lambda line: f"{line.value.low:.2f}..{line.value.high:.2f}" if line.value else "-"),
    Column("USED", lambda line: str(line.value.used) if line.value else "0", side="right", drop=5),
    Column("LEFT OUT", lambda line: str(_left_out(line)), side="right", drop=3),
    Column("LIBRARY", lambda line: "no" if line.library_reason else "yes", drop=4),
    Column("CAPS (W)", _grid, short=_short_grid, drop=2),
    _REPAIRS,
)
_DEVIATION: Final = Column(
    "IF <1 % OUT",
    lambda line: f"{line.deviation:+.2f}" if line.deviation is not None else "undefined",
    side="right",
)
