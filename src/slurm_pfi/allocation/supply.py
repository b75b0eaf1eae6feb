"""The flexibility supply curve: how many watts a site can give, at what loss, and who gives the next one.

It is the list that ``marginal`` works off, kept whole: every straight piece of every run's convex curve, cheapest
first. ``marginal`` stops where the need is met; this curve answers for every need at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..elasticity.curve import CurveStack, FloatArray, IntArray
from .solve import ProblemError, Shares, pieces_of_runs


@dataclass(frozen=True, slots=True, eq=False)
class SupplyCurve:
    """Steps from the reductions already taken to the greatest ones, cheapest first.

    ``watts`` and ``loss``, shape (steps + 1,): given up in all, in the units of ``Shares.watts`` and
    ``Shares.value``, before the first step and after each. ``price``, shape (steps,): loss per watt of each step,
    never falling. ``run``: who gives it. ``first``, ``last``: from which reduction of that run to which.
    Runs whose steps have one price give together; ``marginal`` keeps them level.
    """

    watts: FloatArray
    loss: FloatArray
    price: FloatArray
    run: IntArray
    first: FloatArray
    last: FloatArray

    @property
    def least(self) -> float:
        """The watts given up already."""
        return float(self.watts[0])

    @property
    def most(self) -> float:
        """The watts given up when every run is at its greatest reduction."""
        return float(self.watts[-1])

    def loss_at(self, need: float) -> float:
        """The least total loss at which ``need`` watts are given up. Raises ProblemError if there are not so many."""
        return float(np.interp(self._within(need), self.watts, self.loss))

    def next_step(self, need: float) -> int | None:
        """The step that gives the next watt after ``need``; None at the end. Raises ProblemError beyond it."""
        step = int(np.searchsorted(self.watts, self._within(need), side="right")) - 1
        return step if step < self.run.size else None

    def _within(self, need: float) -> float:
        if math.isnan(need) or need > self.most * (1 + 1e-12):
            raise ProblemError(f"a reduction of {need:g} is asked for, {self.most:g} is all there is")
        return max(need, self.least)


def supply(shares: Shares, curves: CurveStack) -> SupplyCurve:
    """The supply curve of these runs: one sort of all pieces of their convex curves.

    Raises ProblemError on another number of curves than runs.
    """
    run, first, last, slope = pieces_of_runs(shares, curves)
    loss = shares.value[run] * slope * (last - first)
    watts = shares.watts[run] * (last - first)
    price = shares.value[run] * slope / shares.watts[run]
    order = np.argsort(price, kind="stable")
    return SupplyCurve(
        watts=_cumulated(float((shares.watts * shares.start).sum()), watts[order]),
        loss=_cumulated(_lost_already(shares, curves), loss[order]),
        price=price[order],
        run=run[order],
        first=first[order],
        last=last[order],
    )


def _lost_already(shares: Shares, curves: CurveStack) -> float:
    """Loss on the convex curves at the starts."""
    taken = Shares(shares.watts, shares.value, np.zeros_like(shares.start), shares.start)
    run, first, last, slope = pieces_of_runs(taken, curves)
    return float((shares.value[run] * slope * (last - first)).sum())


def _cumulated(before: float, steps: FloatArray) -> FloatArray:
    total: FloatArray = before + np.concatenate(([0.0], np.cumsum(steps)))
    return total
