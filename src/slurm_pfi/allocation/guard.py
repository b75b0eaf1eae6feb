"""How far a plan may go from the equal cut: no further than what is known carries.

The equal cut needs no knowledge and is nobody's fault. A plan made from learned curves is taken as far towards its
end as the posterior certifies a gain, and no run goes much deeper than it has been seen to go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from ..elasticity.curve import BoolArray, CurveStack, FloatArray
from .solve import Shares, equal, marginal

STEPS: Final = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.08)
"""Shares of the way from equal to the plan that are tried, the longest first."""

SURE_SDS: Final = 0.5
"""The expected gain has to exceed so many of its standard deviations."""

LEAST_GAIN: Final = 0.002
"""And so much of the value of all throughput: where less is to be had, errors of the model decide, not the runs."""

LEAST_RENEWAL: Final = 0.0005
"""A new plan has to gain so much on the one in force, as a share of the value of all throughput: caps do not wander for
what nobody would see."""

SAME_NEED: Final = 0.02
"""A need that moved by a greater share is another limit: the plan for it begins anew."""

TRUST: Final = 0.1
TRUST_FEW: Final = 0.05
FEW_KINDS: Final = 20
"""No run goes more than so much (of its draw) beyond its deepest measured or equal reduction; less where few kinds of
work leave little for errors to average out over."""


class Curves(Protocol):
    """What the guard must know of learned curves: ``elasticity.posterior.Posterior`` is one."""

    @property
    def informed(self) -> bool: ...

    @property
    def known(self) -> BoolArray: ...

    @property
    def kinds(self) -> int: ...

    def mean(self) -> FloatArray: ...

    def gain(self, before: FloatArray, after: FloatArray, value: FloatArray) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Certified:
    """Reductions that may be applied, (runs,), and why.

    ``step``: the share of the way from equal to the plan that is certified, 0 for equal itself. ``gain`` and
    ``gain_sd``: the expected saving against equal in units of value, and its standard deviation.
    """

    reduction: FloatArray
    step: float
    gain: float
    gain_sd: float


def trusted(shares: Shares, even: FloatArray, deepest: FloatArray, curves: Curves) -> Shares:
    """The shares within what trust allows of each run.

    ``even``: the equal cut; ``deepest`` (runs,): the deepest reduction measured of each run, 0 where none. Without a
    library nothing says how a curve goes on: such a run is cut no deeper than it was measured, or than equally, and
    before it was measured neither less.
    """
    step = TRUST if curves.kinds >= FEW_KINDS else TRUST_FEW
    seen = np.maximum(even, deepest)
    return Shares(
        watts=shares.watts,
        value=shares.value,
        start=np.where(curves.known | (deepest > 0), shares.start, even),
        end=np.minimum(shares.end, seen + np.where(curves.known, step, 0.0)),
    )


def certify(curves: Curves, even: FloatArray, plan: FloatArray, value: FloatArray) -> Certified:
    """The longest step from the equal cut towards a plan whose gain is worth it, and sure enough by the posterior.

    Both cuts free the same power, so every step between them does too. Gain and doubt both shrink with the step,
    the doubt from unlike runs faster where the plan goes to extremes.
    """
    for step in STEPS:
        reduction = even + step * (plan - even)
        gain, sd = curves.gain(even, reduction, value)
        if gain - SURE_SDS * sd > 0 and gain >= LEAST_GAIN * float(value.sum()):
            return Certified(reduction, step, gain, sd)
    return Certified(even, 0.0, 0.0, 0.0)


def expected_curves(mean: FloatArray, end: FloatArray) -> CurveStack:
    """Expected losses (runs, grid), on reductions evenly from 0 to 1, as curves that stop at ``end`` (runs,).

    Not below zero, not above one, never falling. A loss cannot pass 1, so every curve is concave somewhere near its
    deep end; a convex hull may only span what a run may be given, else that end would look cheap.
    """
    steps = mean.shape[1] - 1
    loss = np.maximum.accumulate(np.clip(mean, 0.0, 1.0), axis=1)
    loss[:, 0] = 0.0
    points = np.maximum(end, 1.0 / steps)[:, None] * np.linspace(0.0, 1.0, steps + 1)
    place = np.minimum((points * steps).astype(np.intp), steps - 1)
    low = np.take_along_axis(loss, place, axis=1)
    high = np.take_along_axis(loss, place + 1, axis=1)
    return CurveStack.from_arrays(points, low + (high - low) * (points * steps - place))


def guarded(shares: Shares, curves: Curves, deepest: FloatArray, need: float) -> Certified:
    """The certified cut of a site: marginal on the expected losses within the trust limit, stepped back to safety.

    With nothing known of any run it is the equal cut.
    """
    even = equal(shares, need)
    if not curves.informed:
        return Certified(even, 0.0, 0.0, 0.0)
    within = trusted(shares, even, deepest, curves)
    plan = marginal(within, expected_curves(curves.mean(), within.end), need)
    return certify(curves, even, plan, shares.value)


def guarded_beyond(shares: Shares, curves: Curves, deepest: FloatArray, need: float) -> Certified:
    """As ``guarded``, for runs whose GPU models the library holds: there it has seen how deep one can go.

    The plan may then pass the trust limit, if the same certificate says so once more: against the plan within it.
    """
    within = guarded(shares, curves, deepest, need)
    if not (curves.informed and curves.known.all()):
        return within
    plan = marginal(shares, expected_curves(curves.mean(), shares.end), need)
    further = certify(curves, within.reduction, plan, shares.value)
    if further.step == 0:
        return within
    gain, sd = curves.gain(equal(shares, need), further.reduction, shares.value)
    return Certified(further.reduction, further.step, gain, sd)


@dataclass(frozen=True, slots=True, eq=False)
class InForce:
    """A cut that is being applied: what it freed (``need``, as in ``solve.equal``) and what ``certify`` said of it.

    The reduction of a run that was not in it is NaN: such a run begins where equal puts it.
    """

    need: float
    cut: Certified


def renewed(
    shares: Shares, curves: Curves, deepest: FloatArray, need: float, fresh: Certified, before: InForce
) -> Certified:
    """The fresh cut, or the one in force where that is expected to be no worse than equal, and moving not worth it.

    The one in force is fitted to what is needed and allowed now. Another limit takes the fresh one at once.
    """
    if before.cut.reduction is fresh.reduction or not curves.informed:
        return fresh
    if before.need <= 0 or abs(need - before.need) > SAME_NEED * before.need:
        return fresh
    even = equal(shares, need)
    was = np.where(np.isnan(before.cut.reduction), even, before.cut.reduction)
    held = _fitted(trusted(shares, even, deepest, curves), was, need)
    gain, sd = curves.gain(even, held, shares.value)
    more, more_sd = curves.gain(held, fresh.reduction, shares.value)
    if gain < 0 or (more > SURE_SDS * more_sd and more >= LEAST_RENEWAL * float(shares.value.sum())):
        return fresh
    return Certified(held, before.cut.step, gain, sd)


def _fitted(within: Shares, reduction: FloatArray, need: float) -> FloatArray:
    """These reductions as far as they are allowed, and what that leaves too much or too little shared equally."""
    held = np.clip(reduction, within.start, within.end)
    if float(within.watts @ held) < need:
        return equal(Shares(within.watts, within.value, held, within.end), need)
    return equal(Shares(within.watts, within.value, within.start, held), need)
