"""What a predictor's errors would cost: cuts shared, and floors promised, by predicted instead of measured PFI.

A job is planned for with the curve of the job whose measured PFI is nearest, from another cluster where there is one,
because a site never holds the job's own curve. The same with the job's own measured PFI shows what that choice of a
curve costs by itself; the rest is the harm of the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..allocation.solve import Shares, equal, marginal
from ..elasticity.curve import CurveStack, ElasticityCurve, FloatArray
from ..elasticity.predictor import SweptJob

CUTS: Final = (0.2, 0.3)
LIMITS: Final = (0.05, 0.10, 0.20)


@dataclass(frozen=True, slots=True, eq=False)
class HarmJob:
    """A swept job with its measured curve, the uncapped draw of one GPU (W), and its GPUs."""

    job: SweptJob
    curve: ElasticityCurve
    draw_w: float
    lowest_cap_w: float
    gpus: int


@dataclass(frozen=True, slots=True)
class CutHarm:
    """Throughput lost, as a share of all, when the jobs' draw is cut by ``cut``; GPU hours count alike.

    ``equal``: the same reduction for all. ``predicted``, ``measured``: by that PFI. ``oracle``: every curve known.
    ``through_prediction`` is predicted less measured. ``shortfall``: the lowest caps do not reach the cut.
    """

    cut: float
    equal: float
    predicted: float
    measured: float
    oracle: float
    shortfall: bool

    @property
    def through_prediction(self) -> float:
        return self.predicted - self.measured


@dataclass(frozen=True, slots=True)
class FloorHarm:
    """Floors promised by the lower end of a PFI's 95 % interval, for a greatest loss of ``limit``.

    ``broken``: of ``jobs``, those that lose more at the reduction promised. ``used``: that reduction as a share of
    the greatest that the job's own curve allows, at most 1, in the mean.
    """

    limit: float
    jobs: int
    broken_by_predicted: int
    used_by_predicted: float
    broken_by_measured: int
    used_by_measured: float


ALLOWED_BROKEN: Final = 0.05
"""Floors rest on the lower end of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a site should use its line: to share cuts, to promise floors. ``use`` is both, ``text`` says why."""

    use: bool
    sharing: bool
    floors: bool
    text: str


def verdict(cuts: Sequence[CutHarm], floors: Sequence[FloorHarm], *, warned: bool) -> Verdict:
    """The line is of use for sharing where it loses less than equal cuts at every cut that the caps reach.

    Differences that a tenth of a per cent does not show count as none. A line with a warning (``warned``) is of no use.
    """
    told, gains = [], []
    for cut in cuts:
        if cut.shortfall:
            told.append(f"cannot be judged at {100 * cut.cut:.0f} % (the lowest caps do not reach it)")
            continue
        predicted, plain = round(cut.predicted, 3), round(cut.equal, 3)
        gains.append(predicted < plain)
        word = "less than" if predicted < plain else "more than" if predicted > plain else "as much as"
        figures = f"{100 * predicted:.1f} against {100 * plain:.1f} %"
        told.append(f"loses {word} equal at {100 * cut.cut:.0f} % ({figures})")
    broken, promised = sum(floor.broken_by_predicted for floor in floors), sum(floor.jobs for floor in floors)
    sharing = bool(gains) and all(gains) and not warned
    kept = promised > 0 and broken <= ALLOWED_BROKEN * promised and not warned
    if sharing and kept:
        so = "use it"
    elif sharing:
        so = "use it to share cuts, do not use it for floors"
    else:
        so = "do not use it"
    share = f" ({100 * broken / promised:.0f} %)" if promised else ""
    text = (
        f"sharing by the predicted PFI {', '.join(told)}; floors broken {broken} of {promised}{share} against "
        f"{100 * ALLOWED_BROKEN:.0f} % allowed{'; the line has a warning' if warned else ''}; so: {so}"
    )
    return Verdict(sharing and kept, sharing, kept, text)


def harm(
    jobs: Sequence[HarmJob], predicted: FloatArray, half_width: float
) -> tuple[list[CutHarm], list[FloorHarm]]:
    """Both tables, for predictions of shape (jobs,) that each were made without the job, +- ``half_width``."""
    true = [entry.curve for entry in jobs]
    measured = np.array([entry.job.pfi.value for entry in jobs])
    measured_low = np.array([entry.job.pfi.low for entry in jobs])
    by_predicted, by_measured = _nearest(jobs, predicted), _nearest(jobs, measured)
    low_predicted, low_measured = _nearest(jobs, predicted - half_width), _nearest(jobs, measured_low)
    return (
        [_cut(jobs, true, by_predicted, by_measured, cut) for cut in CUTS],
        [_floor(true, low_predicted, low_measured, limit) for limit in LIMITS],
    )


def _nearest(jobs: Sequence[HarmJob], wanted: FloatArray) -> list[ElasticityCurve]:
    measured = np.array([entry.job.pfi.value for entry in jobs])
    cluster = np.array([entry.job.cluster for entry in jobs])
    chosen = []
    for place, value in enumerate(wanted):
        others = cluster != cluster[place]
        if not others.any():
            others = np.arange(len(jobs)) != place
        away = np.where(others, np.abs(measured - value), np.inf)
        chosen.append(jobs[int(away.argmin())].curve)
    return chosen


def _cut(
    jobs: Sequence[HarmJob],
    true: list[ElasticityCurve],
    by_predicted: list[ElasticityCurve],
    by_measured: list[ElasticityCurve],
    cut: float,
) -> CutHarm:
    gpus = np.array([float(entry.gpus) for entry in jobs])
    draw_w = np.array([entry.draw_w for entry in jobs])
    lowest_w = np.array([entry.lowest_cap_w for entry in jobs])
    shares = Shares(
        watts=gpus * draw_w,
        value=gpus,
        start=np.zeros(gpus.size),
        end=np.clip(1.0 - lowest_w / draw_w, 0.0, 1.0),
    )
    need = cut * float(shares.watts.sum())
    truth = CurveStack(true)

    def lost(reduction: FloatArray) -> float:
        return float((gpus * truth.loss_at(reduction)).sum() / gpus.sum())

    return CutHarm(
        cut=cut,
        equal=lost(equal(shares, need)),
        predicted=lost(marginal(shares, CurveStack(by_predicted), need)),
        measured=lost(marginal(shares, CurveStack(by_measured), need)),
        oracle=lost(marginal(shares, truth, need)),
        shortfall=need > shares.most * (1 + 1e-9),
    )


def _floor(
    true: list[ElasticityCurve],
    by_predicted: list[ElasticityCurve],
    by_measured: list[ElasticityCurve],
    limit: float,
) -> FloorHarm:
    best = np.array([own.greatest_reduction(limit) for own in true])

    def kept(chosen: list[ElasticityCurve]) -> tuple[int, float]:
        promised = np.array([guess.greatest_reduction(limit) for guess in chosen])
        broken = promised > best + 1e-9
        used = np.divide(promised, best, out=np.ones_like(best), where=best > 0)
        return int(broken.sum()), float(np.minimum(used, 1.0).mean())

    return FloorHarm(limit, len(true), *kept(by_predicted), *kept(by_measured))
