"""Lending watts that a run has but does not draw, and calling them back before it needs them.

A cap well above what a run ever draws holds watts that another run could use. Such a cap is trimmed to just above
the run's own 99 % draw and the watts go to runs that are reduced. When the trimmed cap binds after all, whoever
borrowed is lowered first, and the cap returns once that is acknowledged: ``transition`` sees to the order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..model import Run
from ..units import MW_PER_W
from .policies import allocate
from .problem import Allocation, Policy, Problem, RunDemand
from .rounding import lowest_cap_mw
from .solve import ProblemError

_MARGIN_PERCENT: Final = 2  # a cap so far above a draw that is passed 1 % of the time does not bind


@dataclass(frozen=True, slots=True)
class Lending:
    """Caps with watts lent, in the order of the problem's runs.

    ``plain_mw``: the caps per GPU if nobody lent. ``lent_total_mw``: what each run gives of these, over its GPUs;
    ``borrowed_total_mw``: what it gets. The sum of the second is at most that of the first: caps are whole watts.
    """

    allocation: Allocation
    plain_mw: tuple[int, ...]
    lent_total_mw: tuple[int, ...]
    borrowed_total_mw: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """Caps per GPU in two steps: ``first`` lowers the borrowers, ``then`` holds once that is acknowledged."""

    first_mw: tuple[int, ...]
    then: Lending


def lend(
    problem: Problem, policy: Policy, p99_draw_mw: Sequence[int | None], binding: Collection[Run] = ()
) -> Lending:
    """Share the budget with caps trimmed to 2 % above each run's own 99 % draw per GPU.

    ``p99_draw_mw``: over ten minutes or more at a cap that did not bind; None when that is not known, and then the
    run lends nothing. Neither does one with flex ``none`` (it counts at its ceiling), nor one that is ``binding``:
    whose trimmed cap turned out to hold it back. No cap is trimmed below its floor, and none at all unless somebody
    is reduced; what no borrower takes stays with the lenders. Raises ProblemError as ``allocate``, on another number
    of draws than runs and on a draw below 0.
    """
    if len(p99_draw_mw) != len(problem.runs):
        raise ProblemError(f"{len(p99_draw_mw)} draws for {len(problem.runs)} runs")
    plain = allocate(problem, policy)
    nobody = (0,) * len(problem.runs)
    pairs = list(zip(problem.runs, plain.caps_mw, strict=True))
    if not any(cap < min(demand.draw_mw, demand.ceiling_mw) for demand, cap in pairs):
        return Lending(plain, plain.caps_mw, nobody, nobody)
    runs = tuple(
        replace(demand, ceiling_mw=_trimmed_mw(demand, None if demand.run in binding else p99_mw))
        for demand, p99_mw in zip(problem.runs, p99_draw_mw, strict=True)
    )
    allocation = _give_back(problem, allocate(replace(problem, runs=runs), policy), plain.caps_mw)
    change = [
        demand.gpus * (cap - before) for (demand, before), cap in zip(pairs, allocation.caps_mw, strict=True)
    ]
    return Lending(
        allocation=allocation,
        plain_mw=plain.caps_mw,
        lent_total_mw=tuple(max(0, -by) for by in change),
        borrowed_total_mw=tuple(max(0, by) for by in change),
    )


def recall(
    problem: Problem,
    policy: Policy,
    p99_draw_mw: Sequence[int | None],
    *,
    held_mw: Sequence[int],
    binding: Collection[Run],
) -> Recall:
    """What to send when trimmed caps bind: the runs of ``binding`` get their watts back, borrowers go down first.

    ``held_mw``: the caps per GPU in force, in the order of the problem. The first step raises nobody, so it fits
    any budget that the caps in force fit. Raises ProblemError as ``lend``.
    """
    then = lend(problem, policy, p99_draw_mw, binding)
    return Recall(
        first_mw=tuple(min(pair) for pair in zip(held_mw, then.allocation.caps_mw, strict=True)), then=then
    )


def _give_back(problem: Problem, lent: Allocation, plain_mw: tuple[int, ...]) -> Allocation:
    """Leave with the lenders what no borrower has taken, to each the same part of what it lends."""
    budgets = [problem.budget_total_mw, problem.hard_budget_total_mw]
    budget_mw = min(budget for budget in budgets if budget is not None) - problem.parked_total_mw
    rows = list(zip(problem.runs, lent.caps_mw, plain_mw, strict=True))
    left_mw = budget_mw - sum(demand.gpus * cap for demand, cap, _ in rows)
    lent_mw = sum(demand.gpus * max(0, plain - cap) for demand, cap, plain in rows)
    if left_mw <= 0 or lent_mw == 0:
        return lent
    caps = [
        max(cap, min(plain, cap + (plain - cap) * left_mw // lent_mw // MW_PER_W * MW_PER_W))
        for _, cap, plain in rows
    ]
    loss = [
        float(demand.curve.loss_at(1.0 - cap / demand.draw_mw))
        for (demand, _, _), cap in zip(rows, caps, strict=True)
    ]
    return replace(lent, caps_mw=tuple(caps), expected_loss=tuple(loss))


def _trimmed_mw(demand: RunDemand, p99_draw_mw: int | None) -> int:
    if p99_draw_mw is None or demand.flex_none:
        return demand.ceiling_mw
    if p99_draw_mw < 0:
        raise ProblemError(f"run {demand.run}: a 99 % draw of {p99_draw_mw} mW; an unknown one is None")
    enough_mw = -(-p99_draw_mw * (100 + _MARGIN_PERCENT) // (100 * MW_PER_W)) * MW_PER_W
    return min(demand.ceiling_mw, max(enough_mw, lowest_cap_mw(demand)))
