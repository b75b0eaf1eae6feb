"""How a reduction is shared among runs: the same for all, or where it costs least.

All policies first take what costs nothing, the room between a run's ceiling and its draw, and only then reduce.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..elasticity.curve import CurveStack, FloatArray, IntArray
from ..units import MW_PER_W
from .problem import Allocation, Policy, Problem, RunDemand
from .rounding import lowest_cap_mw, whole_watts
from .solve import ProblemError, Shares, by_index, equal, marginal

Cut: TypeAlias = Callable[[Shares, float, IntArray], FloatArray]
"""How ``marginal`` shares a need among runs: shares, need, and each share's place in ``Problem.runs``."""


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """A problem as arrays of shape (runs,), in the order of their names so that no answer depends on theirs."""

    gpus: NDArray[np.int64]
    ceiling_mw: NDArray[np.int64]
    floor_mw: NDArray[np.int64]
    lowest_mw: NDArray[np.int64]
    draw_mw: NDArray[np.float64]
    weight: NDArray[np.float64]
    flex_none: NDArray[np.bool_]
    curves: CurveStack
    known: CurveStack
    pfi: NDArray[np.float64] | None
    place: IntArray

    def total_mw(self, caps_mw: NDArray[np.int64]) -> int:
        return int((self.gpus * caps_mw).sum())


def allocate(problem: Problem, policy: Policy, cut: Cut | None = None) -> Allocation:
    """Caps for all runs that keep the budget, or the shortfall if their floors do not fit it.

    ``equal`` reduces every run by the same share of its draw; what a floor holds back is spread over the others.
    ``marginal`` minimises the sum over runs of gpus x weight x loss on the curves' convex minorants, exactly. When
    neither curves nor weights tell the runs apart it is ``equal``: an average curve is no ground to cut one run
    deeper than another. ``oracle`` is for studies: the same on curves that are the truth. ``pfi`` takes watts in
    proportion to draw / weight x PFI (Eq. 2 of arXiv 2609.11542); where a PFI is unknown it takes the median of the
    others, and when none is known it is ``equal``. With a ``cut`` that decides for ``marginal``: what a posterior
    certifies stands there in place of the curves' own optimum.

    If the floors do not fit, every run goes to its floor. If an emergency limit needs more, floors are passed by
    the same policy, runs with flex ``none`` last. Caps are whole watts, or the ceiling itself where uncut.
    Raises ProblemError on a run without GPUs, bounds out of order or a weight that is no number >= 0.
    """
    for demand in problem.runs:
        _check(demand)
    order = sorted(range(len(problem.runs)), key=lambda i: _name(problem.runs[i]))
    runs = _as_arrays(problem.runs, order)
    if problem.parked_total_mw < 0:
        raise ProblemError(f"parked GPUs hold {problem.parked_total_mw} mW")
    budget_mw = problem.budget_total_mw - problem.parked_total_mw
    hard_mw = problem.hard_budget_total_mw
    if hard_mw is not None:
        hard_mw -= problem.parked_total_mw
        budget_mw = min(budget_mw, hard_mw)
    everyone = np.ones(runs.gpus.size, dtype=bool)
    caps = _share(runs, policy, cut, everyone, runs.ceiling_mw, runs.floor_mw, budget_mw=budget_mw)
    if hard_mw is not None and runs.total_mw(caps) > hard_mw:
        for group in (~runs.flex_none, runs.flex_none):
            caps = _share(runs, policy, cut, group, caps, runs.lowest_mw, budget_mw=hard_mw)
    loss = runs.curves.loss_at(1.0 - caps / runs.draw_mw)
    back = np.empty(len(order), dtype=np.intp)
    back[order] = np.arange(len(order))
    caps_mw = tuple(caps[back].tolist())
    return Allocation(
        policy=policy,
        caps_mw=caps_mw,
        expected_loss=tuple(loss[back].tolist()),
        shortfall_total_mw=max(0, runs.total_mw(caps) - budget_mw),
        floor_passed=tuple(
            demand.run
            for demand, cap_mw in zip(problem.runs, caps_mw, strict=True)
            if cap_mw < demand.floor_mw
        ),
    )


def _name(demand: RunDemand) -> tuple[str, int, int]:
    return demand.run.cluster, demand.run.job_id, demand.run.restart


def _check(demand: RunDemand) -> None:
    if demand.gpus < 1:
        raise ProblemError(f"run {demand.run} has {demand.gpus} GPUs")
    if not 0 <= demand.device_min_mw <= demand.floor_mw <= demand.ceiling_mw:
        raise ProblemError(
            f"run {demand.run}: device minimum {demand.device_min_mw}, floor {demand.floor_mw} and ceiling"
            f" {demand.ceiling_mw} mW are out of order"
        )
    if demand.draw_mw < 1:
        raise ProblemError(f"run {demand.run}: a draw of {demand.draw_mw} mW; an unknown draw is the ceiling")
    if demand.pfi is not None and not math.isfinite(demand.pfi):
        raise ProblemError(f"run {demand.run}: a PFI of {demand.pfi} is no number; an unknown one is None")
    if not (math.isfinite(demand.weight) and demand.weight >= 0):
        raise ProblemError(f"run {demand.run}: weight {demand.weight} is no number >= 0")


def _as_arrays(unsorted: Sequence[RunDemand], order: list[int]) -> _Runs:
    demands = [unsorted[i] for i in order]

    def whole(values: list[int]) -> NDArray[np.int64]:
        return np.array(values, dtype=np.int64)

    floor_mw = whole([lowest_cap_mw(d) for d in demands])
    device_min_mw = whole([-(-d.device_min_mw // MW_PER_W) * MW_PER_W for d in demands])
    return _Runs(
        gpus=whole([d.gpus for d in demands]),
        ceiling_mw=whole([d.ceiling_mw for d in demands]),
        floor_mw=floor_mw,
        lowest_mw=np.minimum(device_min_mw, floor_mw),
        draw_mw=np.array([d.draw_mw for d in demands], dtype=np.float64),
        weight=np.array([d.weight for d in demands], dtype=np.float64),
        flex_none=np.array([d.flex_none for d in demands], dtype=bool),
        curves=CurveStack([d.curve for d in demands]),
        known=CurveStack([d.common_curve or d.curve for d in demands]),
        pfi=_known_index(demands),
        place=np.array(order, dtype=np.intp),
    )


def _share(
    runs: _Runs,
    policy: Policy,
    cut: Cut | None,
    group: NDArray[np.bool_],
    top_mw: NDArray[np.int64],
    bottom_mw: NDArray[np.int64],
    *,
    budget_mw: int,
) -> NDArray[np.int64]:
    """Lower the caps of a group from top towards bottom until all runs together fit the budget."""
    bottom_mw = np.where(group, bottom_mw, top_mw)
    if runs.total_mw(top_mw) <= budget_mw:
        return top_mw
    if runs.total_mw(bottom_mw) >= budget_mw:
        return bottom_mw
    room_mw = np.maximum(top_mw - np.maximum(runs.draw_mw, bottom_mw), 0.0)
    need_mw = float(runs.total_mw(top_mw) - budget_mw)
    free_mw = float((runs.gpus * room_mw).sum())
    if need_mw <= free_mw:
        caps = top_mw - room_mw * (need_mw / free_mw)
    else:
        start = np.maximum(1.0 - top_mw / runs.draw_mw, 0.0)
        end = np.maximum(1.0 - bottom_mw / runs.draw_mw, start)
        shares = Shares(runs.gpus * runs.draw_mw, runs.gpus * runs.weight, start, end)
        reduction = _reductions(
            runs, policy, cut, shares, need_mw - free_mw + float((shares.watts * start).sum())
        )
        # Where nothing is reduced the cap is the start itself, not what is left of it after dividing and multiplying.
        caps = np.where(reduction > start, (1.0 - reduction) * runs.draw_mw, top_mw - room_mw)
    return whole_watts(caps, runs.gpus, top_mw, bottom_mw, budget_mw)


def _reductions(
    runs: _Runs, policy: Policy, cut: Cut | None, shares: Shares, need_mw: float
) -> NDArray[np.float64]:
    if policy == "marginal" and cut is not None:
        return cut(shares, need_mw, runs.place)
    if policy == "pfi" and runs.pfi is not None:
        return by_index(shares, runs.pfi, need_mw)
    if policy == "oracle" or (policy == "marginal" and not _indistinct(runs)):
        return marginal(shares, runs.curves, need_mw)
    return equal(shares, need_mw)


def _indistinct(runs: _Runs) -> bool:
    return bool((runs.weight == runs.weight[0]).all()) and runs.known.all_same()


def _known_index(demands: list[RunDemand]) -> NDArray[np.float64] | None:
    """Each run's PFI, where unknown the median of the others; None when nothing is known of anyone."""
    known = [d.pfi for d in demands if d.pfi is not None]
    if not known:
        return None
    middle = statistics.median(known)
    return np.array([middle if d.pfi is None else d.pfi for d in demands], dtype=np.float64)
