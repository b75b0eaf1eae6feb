"""Curve files: the one reader of measured sweeps, for the commands, the library and the studies.

CSV text, UTF-8 with or without byte order mark, any line ends, a header, one row for each cap of each curve:

    curve_id, gpu, cap_w, power_w_per_gpu, throughput           needed
    workload, family, task, source, licence                     text, may be missing
    basis          measured (default) or model
    power_basis    what the draw is; text that does not begin with "measured" says that nobody measured it
    default_cap_w  the GPU's default limit; ``tdp_w`` means the same

Other columns are ignored. The uncapped point is that of the highest cap. Whether that is the default limit is known
from ``default_cap_w``, from the caller, or from a GPU name such as 'A100-SXM(400W)'; a curve that does not reach it is
refused. Where none of them says so, the highest cap is taken, and named as a doubt when other curves of the
same GPU in the file go higher.

A bad row takes its curve out, never another: the curve is listed in ``skipped`` with file, line and reason. Unsorted
rows are sorted and rows of one cap averaged; both are counted in the repairs.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from .curve import CurveError, ElasticityCurve, FloatArray
from .names import family_key, family_of, gpu_key, same_gpu
from .sweep import Repairs, Sweep, curve_from_measurements, read_sweep

__all__ = [
    "MAX_BYTES", "REQUIRED", "Basis", "CurveFile", "CurveFileError", "FileCurve", "Skipped", "family_key", "gpu_key",
    "load_curves", "read_curves", "same_gpu", "text_of",
]  # fmt: skip

Basis: TypeAlias = Literal["measured", "model"]

REQUIRED: Final = ("curve_id", "gpu", "cap_w", "power_w_per_gpu", "throughput")
MAX_BYTES: Final = 32 * 2**20
MIN_GPU_W: Final = 0.1
MAX_GPU_W: Final = 10_000.0
"""No GPU draws less or more; such a figure is in another unit."""
MAX_RATE: Final = 1e18
"""Throughput in any unit lies between this and its inverse, so that no ratio of two leaves the range of numbers."""

_DEFAULT_CAP: Final = ("default_cap_w", "tdp_w")
_IN_NAME: Final = re.compile(r"\((\d{2,4}) ?W\)")


class CurveFileError(ValueError):
    """A file that cannot be read as a whole; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A curve that was left out, with the line of the row that is to blame (0: none alone) and why."""

    curve_id: str
    line: int
    reason: str

    def __str__(self) -> str:
        where = f", line {self.line}" if self.line else ""
        return f"curve {self.curve_id or '(without a name)'}{where}: {self.reason}"


@dataclass(frozen=True, slots=True, eq=False)
class FileCurve:
    """One curve as the file has it; ``sweep`` is checked and ordered, W per GPU and the file's unit of throughput.

    ``family`` is a family key. ``uncapped_known``: whether anything says that the highest cap is the default limit.
    ``doubts``: what a reader of the figures should know. ``kept``: text of further columns asked for, at the
    uncapped point.
    """

    curve_id: str
    gpu: str
    workload: str
    family: str
    task: str
    source: str
    licence: str
    basis: Basis
    draw_measured: bool
    uncapped_known: bool
    sweep: Sweep
    line: int
    doubts: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)

    @property
    def uncapped_w(self) -> float:
        """The cap of the uncapped point, W."""
        return float(self.sweep.cap_w[0])

    @property
    def draw_w(self) -> float:
        """The uncapped draw of one GPU, W."""
        return float(self.sweep.power_w[0])

    def points(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Caps (W), draws (W per GPU) and throughputs, each (n,), caps descending."""
        return self.sweep.cap_w, self.sweep.power_w, self.sweep.throughput

    def curve(self) -> tuple[ElasticityCurve, Repairs]:
        """Loss over reduction, and all that was repaired. Raises CurveError when no cap lowered the draw."""
        curve, repairs = curve_from_measurements(*self.points())
        duplicates = self.sweep.duplicates + repairs.duplicates
        return curve, replace(repairs, unsorted=self.sweep.unsorted, duplicates=duplicates)

    def repairs(self) -> Repairs:
        """What was repaired; without the curve's part when no cap lowered the draw."""
        try:
            return self.curve()[1]
        except CurveError:
            return Repairs(unsorted=self.sweep.unsorted, duplicates=self.sweep.duplicates)


@dataclass(frozen=True, slots=True, eq=False)
class CurveFile:
    """The usable curves of a file in its order, those that were not, and the SHA-256 of the text."""

    origin: str
    curves: tuple[FileCurve, ...]
    skipped: tuple[Skipped, ...]
    sha256: str


def load_curves(
    path: Path, *, uncapped_w: float | None = None, need: Sequence[str] = (), keep: Sequence[str] = ()
) -> CurveFile:
    """Read a curve file. Arguments and errors: ``read_curves``; CurveFileError too for what is no readable text."""
    return read_curves(load_text(path), origin=str(path), uncapped_w=uncapped_w, need=need, keep=keep)


def load_text(path: Path) -> str:
    """The text of a curve file. Raises CurveFileError when it cannot be read, is too long or not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CurveFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    return text_of(data, origin=str(path))


def text_of(data: bytes, *, origin: str) -> str:
    """Bytes as text. Raises CurveFileError on more than MAX_BYTES and on what is not UTF-8."""
    if len(data) > MAX_BYTES:
        raise CurveFileError(f"{origin}: more than {MAX_BYTES // 2**20} MiB: split the file by curves")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CurveFileError(f"{origin}: line {line} is not UTF-8: save the file as UTF-8 text") from error


def read_curves(
    text: str,
    *,
    origin: str,
    uncapped_w: float | None = None,
    need: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> CurveFile:
    """Curves from CSV text as described above. ``origin`` names the file in messages.

    ``uncapped_w``: the default limit of all curves that do not say theirs, W. ``need`` and ``keep``: further columns
    whose text at the uncapped point is kept; the file must have those of ``need``.
    Raises CurveFileError on an empty or damaged file and on a missing column. A file whose curves are
    all bad is read: ``curves`` is empty then.
    """
    text = text.removeprefix("\ufeff")
    rows = _Rows(text, origin, (*REQUIRED, *need))
    groups: dict[str, list[tuple[int, dict[str, str]]]] = {}
    bad: dict[str, Skipped] = {}
    unnamed: list[Skipped] = []
    for line, row, fault in rows:
        curve_id = row.get("curve_id", "")
        if not curve_id:
            unnamed.append(Skipped("", line, fault or "no curve_id"))
        elif not curve_id.isprintable():
            unnamed.append(Skipped("", line, "the curve_id holds characters that cannot be printed"))
        elif fault:
            bad.setdefault(curve_id, Skipped(curve_id, line, fault))
        else:
            groups.setdefault(curve_id, []).append((line, row))
    curves: list[FileCurve] = []
    for curve_id, points in groups.items():
        if curve_id not in bad:
            made = _curve(curve_id, points, uncapped_w, (*need, *keep))
            if isinstance(made, Skipped):
                bad[curve_id] = made
            else:
                curves.append(made)
    skipped = sorted((*bad.values(), *unnamed), key=lambda some: some.line)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return CurveFile(origin, tuple(_doubted(curves)), tuple(skipped), digest)


class _Rows:
    """Rows with their line and what is wrong with their shape, blank lines left out."""

    def __init__(self, text: str, origin: str, needed: Sequence[str]) -> None:
        if "\0" in text:
            raise CurveFileError(f"{origin}: holds zero bytes: this is no CSV text")
        self._origin = origin
        self._reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = next((row for row in self._lines() if any(cell.strip() for cell in row)), None)
        if header is None:
            raise CurveFileError(f"{origin}: the file is empty: it needs a header and one row for each cap")
        self.names = [name.strip() for name in header]
        missing = [name for name in needed if name not in self.names]
        if missing:
            other = len(self.names) == 1 and any(mark in self.names[0] for mark in ";\t")
            hint = "; columns are separated by commas" if other else ""
            if not set(REQUIRED).isdisjoint(missing):
                hint += "; one row for each measured cap of each curve is needed"
            raise CurveFileError(f"{origin}: no column {', '.join(missing)}{hint}")
        twice = sorted({name for name in self.names if name and self.names.count(name) > 1})
        if twice:
            raise CurveFileError(f"{origin}: column {', '.join(twice)} is there twice")

    def _lines(self) -> Iterator[list[str]]:
        try:
            yield from self._reader
        except csv.Error as error:
            raise CurveFileError(f"{self._origin}: line {self._reader.line_num}: {error}") from error

    def __iter__(self) -> Iterator[tuple[int, dict[str, str], str]]:
        for cells in self._lines():
            if not any(cell.strip() for cell in cells):
                continue
            row = dict(zip(self.names, (cell.strip() for cell in cells), strict=False))
            fault = ""
            if len(cells) != len(self.names):
                fault = (
                    f"{len(cells)} fields where the header has {len(self.names)}: "
                    "a text with a comma needs quotes"
                )
            yield self._reader.line_num, row, fault


def _curve(
    curve_id: str, points: list[tuple[int, dict[str, str]]], uncapped_w: float | None, keep: Sequence[str]
) -> FileCurve | Skipped:
    first_line, first = points[0]
    for line, row in points[1:]:
        for name in ("gpu", "workload", "family", "task", "basis", "power_basis", *_DEFAULT_CAP):
            if row.get(name, "") != first.get(name, ""):
                was, now = first.get(name, ""), row[name]
                return Skipped(curve_id, line, f"{name} changes from {_shown(was)} to {_shown(now)}")
    line = first_line
    try:
        basis = _basis(first.get("basis", ""))
        columns: list[list[float]] = [[], [], []]
        for line, row in points:  # noqa: B007 - the line of a bad figure is told below
            for column, name in zip(columns, REQUIRED[2:], strict=True):
                column.append(_number(row[name], name, watts=name != "throughput"))
        line = first_line
        default_w = _default_cap(first, uncapped_w)
        sweep = read_sweep(*columns, uncapped_w=default_w)
    except ValueError as error:
        return Skipped(curve_id, line, str(error))
    if not gpu_key(first["gpu"]):
        return Skipped(curve_id, first_line, f"gpu {_shown(first['gpu'])} names no GPU model")
    highest = max(range(len(points)), key=lambda place: columns[0][place])
    power_basis = first.get("power_basis", "").lower()
    measured = not power_basis or power_basis.startswith("measured")
    return FileCurve(
        curve_id=curve_id,
        gpu=_plain(first["gpu"]),
        workload=_plain(first.get("workload", "")),
        family=family_of(
            family=first.get("family", ""), workload=first.get("workload", ""), curve_id=curve_id
        ),
        task=_plain(first.get("task", "")),
        source=_plain(first.get("source", "")),
        licence=_plain(first.get("licence", "")),
        basis=basis,
        draw_measured=measured,
        uncapped_known=default_w is not None,
        sweep=sweep,
        line=first_line,
        doubts=() if measured else (f"the draw was not measured: {_plain(first['power_basis'])}",),
        kept={name: points[highest][1].get(name, "") for name in keep},
    )


def _doubted(curves: list[FileCurve]) -> list[FileCurve]:
    """Mark curves whose highest cap lies below that of others of their GPU, where nothing says which is right."""
    highest: dict[str, float] = {}
    for curve in curves:
        key = curve.gpu.lower()
        highest[key] = max(highest.get(key, 0.0), curve.uncapped_w)
    made = []
    for curve in curves:
        top = highest[curve.gpu.lower()]
        if not curve.uncapped_known and curve.uncapped_w < top:
            doubt = (
                f"its highest cap, {curve.uncapped_w:g} W, is taken as the uncapped point, but other curves of "
                f"{curve.gpu} go to {top:g} W: say which is right in a column default_cap_w"
            )
            made.append(replace(curve, doubts=(*curve.doubts, doubt)))
        else:
            made.append(curve)
    return made


def _default_cap(row: dict[str, str], given_w: float | None) -> float | None:
    for name in _DEFAULT_CAP:
        if row.get(name):
            return _number(row[name], name, watts=True)
    in_name = _IN_NAME.search(row["gpu"])
    if in_name and given_w is None:
        return float(in_name.group(1))
    return given_w


def _basis(text: str) -> Basis:
    if text in {"", "measured"}:
        return "measured"
    if text == "model":
        return "model"
    raise ValueError(f"basis {_shown(text)} is none of measured, model")


def _number(text: str, name: str, *, watts: bool) -> float:
    """A figure above zero. Raises ValueError with the column's name."""
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} {_shown(text)} is no number above zero")
    if watts and not MIN_GPU_W <= value <= MAX_GPU_W:
        limits = f"{MIN_GPU_W:g}..{MAX_GPU_W:g} W"
        raise ValueError(f"{name} {_shown(text)} is outside {limits}: figures are watts of one GPU")
    if not watts and not 1 / MAX_RATE <= value <= MAX_RATE:
        raise ValueError(f"{name} {_shown(text)} is outside {1 / MAX_RATE:g}..{MAX_RATE:g}: use another unit")
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def _plain(text: str) -> str:
    """Text without what could steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
