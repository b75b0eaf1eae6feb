"""Measured elasticity curves, and what they say of a job that nobody has measured."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from statistics import NormalDist
from typing import Final

import numpy as np

from .curve import CurveError, ElasticityCurve, FloatArray, Repairs, curve_from_measurements
from .index import SMALLEST_LOSS, Pfi

COLUMNS: Final = (
    "curve_id", "gpu", "family", "workload", "cap_w", "power_w_per_gpu", "throughput", "source", "licence",
)  # fmt: skip

MIN_POINTS: Final = 3
MIN_POINT_REDUCTION: Final = 0.01
MIN_DEEPEST_REDUCTION: Final = 0.2
"""A curve is usable if it has so many points that cut the draw by more than 1 %, the deepest by a fifth. A job that
hardly draws power shows noise where others show a slope, and continued to deep cuts that noise is a cliff."""

_GRID: Final = np.linspace(0.0, 1.0, 101)
_ATOMS: Final = np.array([NormalDist().inv_cdf((i + 0.5) / 40) for i in range(40)])

# How far an unseen GPU model, and an unseen job on it, may lie from the mean loss: one standard deviation as a share
# of that loss, and a rest that is there from small reductions on. Wider than what the curves here show of each other:
# they come from three GPU models only.
_MODEL_SPREAD: Final = (0.40, 0.004)
_JOB_SPREAD: Final = (0.25, 0.006)
_SPREAD_RISE: Final = 0.03

FLOOR_QUANTILE: Final = 0.977
"""Two standard deviations, one-sided: what it takes to keep the promised 95 % on GPU models left out of the library."""


class LibraryError(ValueError):
    """A file of curves that cannot be used; the message names file, line or curve."""


@dataclass(frozen=True, slots=True, eq=False)
class LibraryCurve:
    """One measured curve with where it comes from."""

    curve_id: str
    gpu_model: str
    family: str
    workload: str
    curve: ElasticityCurve
    repairs: Repairs
    source: str
    licence: str


class Library:
    """Measured curves, weighted so that GPU models count alike, and within each the families of workloads.

    ``left_out`` names the curves that were not usable, with the reason.
    """

    def __init__(self, curves: Sequence[LibraryCurve], left_out: Sequence[tuple[str, str]] = ()) -> None:
        if not curves:
            raise LibraryError("a library needs at least one usable curve")
        self.curves: tuple[LibraryCurve, ...] = tuple(curves)
        self.left_out: tuple[tuple[str, str], ...] = tuple(left_out)
        self._means: dict[str, ElasticityCurve] = {}
        self._quantiles: dict[float, ElasticityCurve] = {}

    @classmethod
    def load_default(cls) -> Library:
        """The curves shipped with the package."""
        place = resources.files(__package__).joinpath("data/curves.csv")
        return cls.from_csv(place.read_text(encoding="utf-8"), origin="curves.csv")

    @classmethod
    def from_csv(cls, text: str, *, origin: str) -> Library:
        """Read curves from CSV text with the columns of COLUMNS, one row a measured cap; others are ignored.

        Raises LibraryError on a missing column, a figure that is no number, a curve that makes no sense, or when
        no usable curve is left.
        """
        rows = csv.DictReader(io.StringIO(text))
        missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise LibraryError(f"{origin}: no column {', '.join(missing)}")
        groups: dict[str, list[dict[str, str]]] = {}
        for row in rows:
            groups.setdefault(row["curve_id"], []).append(row)
        curves: list[LibraryCurve] = []
        left_out: list[tuple[str, str]] = []
        for curve_id, points in groups.items():
            curve = _read_curve(curve_id, points, origin)
            reason = _not_usable(curve.curve)
            if reason:
                left_out.append((curve_id, reason))
            else:
                curves.append(curve)
        return cls(curves, left_out)

    @property
    def gpu_models(self) -> tuple[str, ...]:
        return tuple(sorted({curve.gpu_model for curve in self.curves}))

    def without(self, gpu_models: Iterable[str]) -> Library:
        """This library less some GPU models, to see what it says of a model that it does not hold."""
        gone = set(gpu_models)
        return Library([curve for curve in self.curves if curve.gpu_model not in gone], self.left_out)

    def weights(self) -> FloatArray:
        """Weight of each curve, shape (curves,), summing to 1."""
        families: dict[str, dict[str, int]] = {}
        for curve in self.curves:
            of_model = families.setdefault(curve.gpu_model, {})
            of_model[curve.family] = of_model.get(curve.family, 0) + 1
        return np.array(
            [
                1 / len(families) / len(families[c.gpu_model]) / families[c.gpu_model][c.family]
                for c in self.curves
            ]
        )

    def mean(self, gpu_model: str | None = None) -> ElasticityCurve:
        """The mean loss of the curves as a convex curve; of one GPU model's alone if the library holds it.

        ``gpu_model`` is the name that the driver gives. The curve ends where less than half of the weight was
        measured, and is continued pessimistically from there.
        """
        known = self._known_model(gpu_model)
        if known not in self._means:
            others = [model for model in self.gpu_models if known and model != known]
            self._means[known] = (self.without(others) if others else self)._mean()
        return self._means[known]

    def quantile(self, q: float = FLOOR_QUANTILE) -> ElasticityCurve:
        """Loss that a job of an unknown kind on an unknown GPU model stays below with probability ``q``, (0, 1).

        At each reduction: the quantile of the curves, weighted, each widened by a normal spread for an unseen GPU
        model and an unseen job. Not convex in general; meant for floors, not for sharing.
        """
        if not 0 < q < 1:
            raise ValueError(f"a quantile lies between 0 and 1, got {q}")
        if q not in self._quantiles:
            self._quantiles[q] = self._quantile(q)
        return self._quantiles[q]

    def default_pfi(self, grid_w: Sequence[float]) -> Pfi:
        """The PFI of a job of which nothing is known, on a grid of caps (W) whose highest is the uncapped one.

        The job is taken to draw its cap. Value and interval are the median and the 2.5 % and 97.5 % quantiles of
        the library's curves read on that grid, each widened by the spread of unseen GPU models and jobs.
        Raises CurveError when the grid has fewer than two caps, or none that costs a loss.
        """
        grid = sorted({float(cap) for cap in grid_w})
        if len(grid) < 2 or not (np.isfinite(grid).all() and grid[0] > 0):
            raise CurveError("a grid needs two or more different caps above zero")
        reduction = 1.0 - np.array(grid[:-1]) / grid[-1]
        loss = np.array([curve.curve.loss_at(reduction) for curve in self.curves])
        counted = loss >= SMALLEST_LOSS
        ratio = np.divide(reduction, loss, out=np.zeros_like(loss), where=counted)
        some = counted.any(axis=1)
        if not some.any():
            raise CurveError(f"no curve loses 1 % at {grid[0]:g} of {grid[-1]:g} W: the PFI is not defined")
        values = ratio[some].sum(axis=1) / counted[some].sum(axis=1)
        spread = np.exp(np.hypot(_MODEL_SPREAD[0], _JOB_SPREAD[0]) * _ATOMS)
        atoms = np.outer(values, spread).reshape(1, -1)
        weight = np.repeat(self.weights()[some], _ATOMS.size)
        low, middle, high = (_weighted_quantile(atoms, weight, q)[0] for q in (0.025, 0.5, 0.975))
        used = int(counted[some].any(axis=0).sum())
        return Pfi(
            value=float(middle),
            low=float(low),
            high=float(high),
            grid_w=tuple(grid),
            used=used,
            left_out=len(grid) - 1 - used,
            source="default",
            gpu_model="",
        )

    def _known_model(self, gpu_model: str | None) -> str:
        """The library's name of a GPU model, empty if it holds none: 'NVIDIA A100-SXM4-80GB' is its 'A100'."""
        given = _letters(gpu_model or "")
        return next((model for model in self.gpu_models if _letters(model) in given), "")

    def _losses(self) -> FloatArray:
        return np.array([curve.curve.loss_at(_GRID) for curve in self.curves])

    def _mean(self) -> ElasticityCurve:
        weight = self.weights()
        deepest = np.array([curve.curve.reduction[-1] for curve in self.curves])
        measured = (weight[:, None] * (deepest[:, None] >= _GRID)).sum(axis=0) >= 0.5
        loss = np.maximum.accumulate(weight @ self._losses())[measured]
        return ElasticityCurve(_GRID[measured], np.clip(loss, 0.0, 1.0)).convex_minorant()

    def _quantile(self, q: float) -> ElasticityCurve:
        weight = self.weights()
        losses = self._losses()
        mean = weight @ losses
        rise = 1.0 - np.exp(-_GRID / _SPREAD_RISE)
        spread = np.hypot(*(share * mean + rest * rise for share, rest in (_MODEL_SPREAD, _JOB_SPREAD)))
        atoms = losses[:, :, None] + spread[None, :, None] * _ATOMS[None, None, :]
        by_reduction = atoms.transpose(1, 0, 2).reshape(_GRID.size, -1)
        upper = _weighted_quantile(by_reduction, np.repeat(weight / _ATOMS.size, _ATOMS.size), q)
        upper[0], upper[-1] = 0.0, 1.0
        return ElasticityCurve(_GRID, np.clip(np.maximum.accumulate(upper), 0.0, 1.0))


def greatest_reduction(
    max_loss: float, library: Library, *, is_none: bool = False, quantile: float = FLOOR_QUANTILE
) -> float:
    """x_max: the largest reduction at which a job of unknown kind loses at most ``max_loss`` with 95 % confidence.

    0 for flex ``none`` and wherever no loss is allowed. One-sided: only losing more breaks the promise.
    """
    if is_none or max_loss <= 0:
        return 0.0
    return library.quantile(quantile).greatest_reduction(max_loss)


def _read_curve(curve_id: str, points: list[dict[str, str]], origin: str) -> LibraryCurve:
    try:
        cap_w, power_w, throughput = (
            [float(point[name]) for point in points] for name in ("cap_w", "power_w_per_gpu", "throughput")
        )
        curve, repairs = curve_from_measurements(cap_w, power_w, throughput)
    except (TypeError, ValueError) as error:
        raise LibraryError(f"{origin}: curve {curve_id}: {error}") from error
    first = points[0]
    return LibraryCurve(
        curve_id=curve_id,
        gpu_model=first["gpu"],
        family=first["family"],
        workload=first["workload"],
        curve=curve,
        repairs=repairs,
        source=first["source"],
        licence=first["licence"],
    )


def _not_usable(curve: ElasticityCurve) -> str:
    points = int((curve.reduction > MIN_POINT_REDUCTION).sum())
    if points < MIN_POINTS:
        return (
            f"{points} caps lowered the draw by more than {MIN_POINT_REDUCTION:.0%}, {MIN_POINTS} are needed"
        )
    if curve.reduction[-1] < MIN_DEEPEST_REDUCTION:
        return f"its deepest reduction is {curve.reduction[-1]:.0%}, {MIN_DEEPEST_REDUCTION:.0%} is needed"
    return ""


def _weighted_quantile(values: FloatArray, weight: FloatArray, q: float) -> FloatArray:
    """The smallest value of each row, (rows, n), that at least ``q`` of the weight, (n,), does not exceed."""
    order = np.argsort(values, axis=1, kind="stable")
    below = np.cumsum(weight[order], axis=1)
    place = np.minimum((below < q * below[:, -1:] - 1e-12).sum(axis=1), values.shape[1] - 1)
    rows = np.arange(values.shape[0])
    result: FloatArray = values[rows, order[rows, place]]
    return result


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
