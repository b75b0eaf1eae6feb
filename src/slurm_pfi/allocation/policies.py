"""How a reduction is shared among runs: the same for all, or where it costs least.

Both policies first take what costs nothing, the room between a run's ceiling and its draw, and only then reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..elasticity.curve import CurveStack
from ..units import MW_PER_W
from .problem import Allocation, Policy, Problem, RunDemand
from .rounding import lowest_cap_mw, whole_watts
from .water import fill_level

_PRICE_DIGITS: Final = 12
"""Prices that agree in so many digits are one price: two ways to compute the same number differ by less."""


class ProblemError(ValueError):
    """A problem that contradicts itself; the message names the run."""


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

    def total_mw(self, caps_mw: NDArray[np.int64]) -> int:
        return int((self.gpus * caps_mw).sum())


def allocate(problem: Problem, policy: Policy) -> Allocation:
    """Caps for all runs that keep the budget, or the shortfall if their floors do not fit it.

    ``equal`` reduces every run by the same share of its draw; what a floor holds back is spread over the others.
    ``marginal`` minimises the sum over runs of gpus x weight x loss on the curves' convex minorants, exactly. When
    neither curves nor weights tell the runs apart it is ``equal``: an average curve is no ground to cut one run
    deeper than another.

    If the floors do not fit, every run goes to its floor. If an emergency limit needs more, floors are passed by
    the same policy, runs with flex ``none`` last. Caps are whole watts, or the ceiling itself where uncut.
    Raises ProblemError on a run without GPUs, bounds out of order or a weight that is no number >= 0.
    """
    for demand in problem.runs:
        _check(demand)
    order = sorted(range(len(problem.runs)), key=lambda i: _name(problem.runs[i]))
    runs = _as_arrays([problem.runs[i] for i in order])
    hard_mw = problem.hard_budget_total_mw
    budget_mw = problem.budget_total_mw if hard_mw is None else min(problem.budget_total_mw, hard_mw)
    everyone = np.ones(runs.gpus.size, dtype=bool)
    caps = _share(runs, policy, everyone, runs.ceiling_mw, runs.floor_mw, budget_mw=budget_mw)
    if hard_mw is not None and runs.total_mw(caps) > hard_mw:
        for group in (~runs.flex_none, runs.flex_none):
            caps = _share(runs, policy, group, caps, runs.lowest_mw, budget_mw=hard_mw)
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
    if not (math.isfinite(demand.weight) and demand.weight >= 0):
        raise ProblemError(f"run {demand.run}: weight {demand.weight} is no number >= 0")


def _as_arrays(demands: list[RunDemand]) -> _Runs:
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
    )


def _share(
    runs: _Runs,
    policy: Policy,
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
        if policy == "equal" or _indistinct(runs):
            level = fill_level(start, end, runs.gpus * runs.draw_mw, need_mw - free_mw)
            reduction = np.clip(level, start, end)
        else:
            reduction = _merit_order(runs, start, end, need_mw - free_mw)
        # Where nothing is reduced the cap is the start itself, not what is left of it after dividing and multiplying.
        caps = np.where(reduction > start, (1.0 - reduction) * runs.draw_mw, top_mw - room_mw)
    return whole_watts(caps, runs.gpus, top_mw, bottom_mw, budget_mw)


def _indistinct(runs: _Runs) -> bool:
    return bool((runs.weight == runs.weight[0]).all()) and runs.curves.all_same()


def _merit_order(
    runs: _Runs, start: NDArray[np.float64], end: NDArray[np.float64], need_mw: float
) -> NDArray[np.float64]:
    """The reductions of least total loss that free ``need_mw``; each run between its start and end, shape (runs,).

    All straight pieces of all curves, sorted by loss per watt, are taken until the need is met. The curves are
    convex, so no run's later piece is cheaper than an earlier one. Pieces of one price are filled to one level.
    """
    run, first, last, slope = _pieces_of_runs(runs, start, end)
    price = runs.weight[run] * slope / runs.draw_mw[run]
    price = _rounded(price)
    watts_mw = (runs.gpus * runs.draw_mw)[run]
    order = np.argsort(price, kind="stable")
    price = price[order]
    gives_mw = np.cumsum(((last - first) * watts_mw)[order])
    place = min(int(np.searchsorted(gives_mw, need_mw)), order.size - 1)
    tie_from = int(np.searchsorted(price, price[place], side="left"))
    tie_to = int(np.searchsorted(price, price[place], side="right"))
    taken, tied = order[:tie_from], order[tie_from:tie_to]
    length = np.zeros(run.size)
    length[taken] = (last - first)[taken]
    still_mw = need_mw - (float(gives_mw[tie_from - 1]) if tie_from else 0.0)
    level = fill_level(first[tied], last[tied], watts_mw[tied], still_mw)
    length[tied] = np.clip(level, first[tied], last[tied]) - first[tied]
    return start + np.bincount(run, weights=length, minlength=start.size)


def _pieces_of_runs(
    runs: _Runs, start: NDArray[np.float64], end: NDArray[np.float64]
) -> tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Every run's own copy of its curve's pieces, clipped to start..end: run, first, last, slope, each (pieces,)."""
    pieces = runs.curves.pieces()
    by_curve = np.argsort(pieces.owner, kind="stable")
    count = np.bincount(pieces.owner, minlength=len(runs.curves.curves))
    offset = np.cumsum(count) - count
    per_run = count[runs.curves.which]
    run = np.repeat(np.arange(start.size), per_run)
    nth = np.arange(run.size) - np.repeat(np.cumsum(per_run) - per_run, per_run)
    piece = by_curve[offset[runs.curves.which][run] + nth]
    first = np.maximum(pieces.start[piece], start[run])
    last = np.minimum(pieces.end[piece], end[run])
    real = last > first
    return run[real], first[real], last[real], pieces.slope[piece][real]


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to a number of significant digits, so that equal prices compare equal."""
    size = np.where(values > 0, values, 1.0)
    unit = 10.0 ** (np.floor(np.log10(size)) - _PRICE_DIGITS)
    result: NDArray[np.float64] = np.round(values / unit) * unit
    return result
