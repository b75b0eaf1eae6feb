"""Measured elasticity curves, and what they say of a job that nobody has measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final

import numpy as np

from .curve import CurveError, ElasticityCurve, FloatArray
from .curvefile import Basis, CurveFileError, FileCurve, Skipped, read_curves
from .index import Pfi
from .names import family_key, gpu_key, same_gpu
from .prior_quantile import default_index, mean_curve, quantile_curve
from .sweep import Repairs

MIN_POINTS: Final = 3
MIN_POINT_REDUCTION: Final = 0.01
MIN_DEEPEST_REDUCTION: Final = 0.2
"""A curve is usable if it has so many points that cut the draw by more than 1 %, the deepest by a fifth. A job that
hardly draws power shows noise where others show a slope, and continued to deep cuts that noise is a cliff."""

FLOOR_QUANTILE: Final = 0.977
"""Two standard deviations, one-sided: what it takes to keep the promised 95 % on GPU models left out of the library."""

MEASURED_FILE: Final = "curves.csv"
MODEL_FILE: Final = "h200_model_curves.csv"


class LibraryError(ValueError):
    """A file of curves that cannot be used, or a library without curves; the message names file, line or curve."""


@dataclass(frozen=True, slots=True, eq=False)
class LibraryCurve:
    """One curve with where it comes from. ``family`` is a family key; ``basis`` tells measured from model curves."""

    curve_id: str
    gpu_model: str
    family: str
    workload: str
    curve: ElasticityCurve
    repairs: Repairs
    source: str
    licence: str
    task: str = ""
    basis: Basis = "measured"


class Library:
    """Curves, weighted so that GPU models count alike, and within each the families of workloads.

    ``left_out`` names the curves of files that were not usable, with the reason. A library may be empty: it has no
    weights then, and whatever needs a curve raises LibraryError.
    """

    def __init__(self, curves: Sequence[LibraryCurve], left_out: Sequence[tuple[str, str]] = ()) -> None:
        self.curves: tuple[LibraryCurve, ...] = tuple(curves)
        self.left_out: tuple[tuple[str, str], ...] = tuple(left_out)
        self._means: dict[str, ElasticityCurve] = {}
        self._quantiles: dict[float, ElasticityCurve] = {}

    @classmethod
    def load_default(cls, *, model_curves: bool = False) -> Library:
        """The curves shipped with the package: the measured ones, with ``model_curves`` also the 25 H200 model jobs."""
        library = cls.from_csv(_shipped(MEASURED_FILE), origin=MEASURED_FILE)
        return library.extended(_shipped(MODEL_FILE), origin=MODEL_FILE) if model_curves else library

    @classmethod
    def from_csv(cls, text: str, *, origin: str) -> Library:
        """Curves of a curve file (see ``curvefile``). What cannot be used is in ``left_out``.

        A curve is left out when the file reader skips it, when its draw was not measured, and when it shows too
        little (MIN_POINTS, MIN_DEEPEST_REDUCTION). Raises LibraryError when the file cannot be read, or when no
        usable curve is left.
        """
        try:
            file = read_curves(text, origin=origin)
        except CurveFileError as error:
            raise LibraryError(str(error)) from error
        curves: list[LibraryCurve] = []
        left_out = [(one.curve_id, _where(one)) for one in file.skipped]
        for entry in file.curves:
            made = library_curve(entry)
            if isinstance(made, str):
                left_out.append((entry.curve_id, made))
            else:
                curves.append(made)
        if not curves:
            raise LibraryError(f"{origin} adds nothing: no usable curve ({_first(left_out)})")
        return cls(curves, left_out)

    def extended(self, text: str, *, origin: str) -> Library:
        """This library and those of a site's own file. Raises LibraryError as ``from_csv``, and on a curve_id taken."""
        more = Library.from_csv(text, origin=origin)
        taken = {curve.curve_id for curve in self.curves}
        twice = [curve.curve_id for curve in more.curves if curve.curve_id in taken]
        if twice:
            raise LibraryError(
                f"{origin}: curve {', '.join(twice[:3])} is in the library already: give it another curve_id"
            )
        return Library(self.curves + more.curves, self.left_out + more.left_out)

    @property
    def gpu_models(self) -> tuple[str, ...]:
        """One name for each GPU model, in the spelling of its first curve, sorted."""
        names: dict[str, str] = {}
        for curve in self.curves:
            names.setdefault(gpu_key(curve.gpu_model), curve.gpu_model)
        return tuple(sorted(names.values()))

    def without(
        self, gpu_models: Iterable[str] = (), families: Iterable[str] = (), curve_ids: Iterable[str] = ()
    ) -> Library:
        """This library less some curves, to see what it says of what it does not hold; it may be empty.

        GPU models and families are compared as ``gpu_key`` and ``family_key`` spell them.
        """
        gone_models = {gpu_key(name) for name in _names(gpu_models)}
        gone_families = {family_key(name) for name in _names(families)}
        gone_ids = set(_names(curve_ids))
        return Library(
            [
                curve
                for curve in self.curves
                if gpu_key(curve.gpu_model) not in gone_models
                and family_key(curve.family) not in gone_families
                and curve.curve_id not in gone_ids
            ],
            self.left_out,
        )

    def weights(self) -> FloatArray:
        """Weight of each curve, shape (curves,), summing to 1; of shape (0,) when there is none."""
        kinds = [(gpu_key(curve.gpu_model), family_key(curve.family)) for curve in self.curves]
        families: dict[str, dict[str, int]] = {}
        for model, family in kinds:
            of_model = families.setdefault(model, {})
            of_model[family] = of_model.get(family, 0) + 1
        return np.array(
            [1 / len(families) / len(families[model]) / families[model][family] for model, family in kinds]
        )

    def mean(self, gpu_model: str | None = None) -> ElasticityCurve:
        """The mean loss of the curves as a convex curve; of one GPU model's alone if the library holds it.

        ``gpu_model`` is the name that the driver gives. The curve ends where less than half of the weight was
        measured, and is continued pessimistically from there. Raises LibraryError when the library is empty.
        """
        curves = self._some_curves()
        known = gpu_key(gpu_model or "")
        if known not in {gpu_key(curve.gpu_model) for curve in self.curves}:
            known = ""
        if known not in self._means:
            if known:
                of_model = Library([c for c in self.curves if same_gpu(c.gpu_model, known)])
                self._means[known] = mean_curve(of_model._some_curves(), of_model.weights())
            else:
                self._means[known] = mean_curve(curves, self.weights())
        return self._means[known]

    def quantile(self, q: float = FLOOR_QUANTILE) -> ElasticityCurve:
        """Loss that a job of an unknown kind on an unknown GPU model stays below with probability ``q``, (0, 1).

        At each reduction: the quantile of the curves, weighted, each widened by a normal spread for an unseen GPU
        model and an unseen job. Not convex in general; meant for floors, not for sharing. Raises ValueError on
        another ``q`` and LibraryError when the library is empty.
        """
        if not 0 < q < 1:
            raise ValueError(f"a quantile lies between 0 and 1, got {q}")
        if q not in self._quantiles:
            self._quantiles[q] = quantile_curve(self._some_curves(), self.weights(), q)
        return self._quantiles[q]

    def default_pfi(self, grid_w: Sequence[float]) -> Pfi:
        """The PFI of a job of which nothing is known, on a grid of caps (W) whose highest is the uncapped one.

        The job is taken to draw its cap. Value and interval are the median and the 2.5 % and 97.5 % quantiles of
        the library's curves read on that grid, each widened by the spread of unseen GPU models and jobs.
        Raises CurveError when the grid has fewer than two caps, or none that costs a loss, and LibraryError when the
        library is empty.
        """
        return default_index(self._some_curves(), self.weights(), grid_w)

    def _some_curves(self) -> list[ElasticityCurve]:
        if not self.curves:
            raise LibraryError("the library holds no curve: nothing is known of a job's loss")
        return [curve.curve for curve in self.curves]


def greatest_reduction(
    max_loss: float, library: Library, *, is_none: bool = False, quantile: float = FLOOR_QUANTILE
) -> float:
    """x_max: the largest reduction at which a job of unknown kind loses at most ``max_loss`` with 95 % confidence.

    0 for flex ``none`` and wherever no loss is allowed. One-sided: only losing more breaks the promise.
    Raises LibraryError when the library is empty and a loss is allowed.
    """
    if is_none or max_loss <= 0:
        return 0.0
    return library.quantile(quantile).greatest_reduction(max_loss)


def library_curve(entry: FileCurve) -> LibraryCurve | str:
    """The curve as a library holds it, or why it is not usable and what to do."""
    if not entry.draw_measured:
        return f"{'; '.join(entry.doubts)}: measure the draw at each cap"
    try:
        curve, repairs = entry.curve()
    except CurveError as error:
        return f"{error}: measure lower caps"
    reason = _not_usable(curve)
    if reason:
        return reason
    return LibraryCurve(
        curve_id=entry.curve_id,
        gpu_model=entry.gpu,
        family=entry.family,
        workload=entry.workload,
        curve=curve,
        repairs=repairs,
        source=entry.source,
        licence=entry.licence,
        task=entry.task,
        basis=entry.basis,
    )


def _not_usable(curve: ElasticityCurve) -> str:
    points = int((curve.reduction > MIN_POINT_REDUCTION).sum())
    if points < MIN_POINTS:
        caps = {0: "no cap", 1: "1 cap"}.get(points, f"{points} caps")
        return (
            f"{caps} lowered the draw by more than {100 * MIN_POINT_REDUCTION:.0f} %, "
            f"{MIN_POINTS} are needed: measure lower caps"
        )
    deepest = float(curve.reduction[-1])
    if deepest < MIN_DEEPEST_REDUCTION:
        # Rounded down, so that a figure just below does not read as the one that is needed.
        return (
            f"its deepest reduction is {math.floor(100 * deepest)} %, {100 * MIN_DEEPEST_REDUCTION:.0f} % is needed: "
            "measure lower caps"
        )
    return ""


def _where(one: Skipped) -> str:
    return f"line {one.line}: {one.reason}" if one.line else one.reason


def _first(left_out: Sequence[tuple[str, str]]) -> str:
    """The first curve that a file does not give, and how many more."""
    if not left_out:
        return "it has no rows"
    curve_id, reason = left_out[0]
    mark = ", " if reason.startswith("line ") else ": "
    more = f"; {len(left_out) - 1} more: see 'slurm-pfi pfi FILE'" if len(left_out) > 1 else ""
    return f"{curve_id or '(without a name)'}{mark}{reason}{more}"


def _shipped(name: str) -> str:
    return resources.files(__package__).joinpath("data", name).read_text(encoding="utf-8")


def _names(given: Iterable[str]) -> Iterable[str]:
    """A single name given by itself is one name, not its letters."""
    return (given,) if isinstance(given, str) else given
