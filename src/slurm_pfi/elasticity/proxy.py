"""Relative throughput by what a GPU does, beside what a job says of itself.

The cycles in which the tensor pipes work for a token do not depend on the clock, nor on what they wait for. So tensor
activity (a share of cycles) times SM clock is work per time, and its ratio to that without a cap is the throughput
that is left. SM activity is no such measure: a multiprocessor that waits for memory counts as active, and at a lower
clock it waits for fewer cycles; times the clock it would say of every memory-bound job that it lost all the clock did.
So where the tensor pipes do not work, only what holds for any work is left: throughput falls no further than the clock.

How well cycles per token keep over the clock was measured by nobody whom we know of; simulated GPUs keep them exactly.
TOLERANCE is what we allow for it: four times the repeatability of a run's tokens per second (0.5 %, arXiv
2609.11542), and less than half of a lie of 5 %. Noise of the measurement comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, isfinite
from typing import Final

TOLERANCE: Final = 0.02
"""How far told and shown may differ beyond noise, as a share of throughput."""

MODEL_SD: Final = TOLERANCE / 2
CLOCK_SD: Final = 0.005
SURE_SD: Final = 3.0
LEAST_TENSOR: Final = 0.01
"""Below this share of cycles the tensor pipes do not do the work."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A mean under a cap as a share of that without, and its relative standard deviation by noise."""

    value: float
    sd: float

    def __post_init__(self) -> None:
        if not (isfinite(self.value) and self.value >= 0 and isfinite(self.sd) and self.sd >= 0):
            raise ValueError(f"a ratio of {self.value} with a relative error of {self.sd} says nothing")


@dataclass(frozen=True, slots=True)
class Judged:
    """``share`` of the baseline throughput to go by, its relative ``sd``, and ``why`` the told one is not believed.

    ``why`` is empty where it is. ``sd`` of a told share is its noise; of one by activity the model's error is in it.
    """

    share: float
    sd: float
    why: str = ""


def estimate(tensor: Ratio | None, clock: Ratio | None) -> Ratio | None:
    """The throughput that is left under a cap by activity alone; None where that does not tell it.

    ``tensor``: of tensor activity times clock; ``clock``: of the SM clock of the slowest GPU. Work that seems to have
    been lost beyond the clock, or gained, is other work than without the cap, and then nothing is told.
    """
    if tensor is None or clock is None:
        return None
    least = clock.value * (1 - _reach(tensor.sd, CLOCK_SD))
    if not least <= tensor.value <= 1 + _reach(tensor.sd):
        return None
    return Ratio(min(max(tensor.value, min(clock.value, 1.0)), 1.0), hypot(tensor.sd, MODEL_SD))


def judge(told: Ratio, tensor: Ratio | None, clock: Ratio | None) -> Judged:
    """What to go by: what is told as far as activity agrees, else what activity says.

    What is told within the tolerance is not disputed, but followed only within MODEL_SD of what activity says: else
    every job would do well to lie up to the tolerance. Where tensor pipes, too, surely lost more than the clock did,
    the job waited for something else than its GPUs: no lie, but no cap's loss either.
    """
    shown = estimate(tensor, clock)
    if tensor is not None and clock is not None and _agree(told, tensor):
        least = min(clock.value, 1.0)
        if tensor.value * (1 + _reach(tensor.sd)) < least:
            return Judged(min(max(told.value, least), least * (1 + MODEL_SD)), hypot(told.sd, CLOCK_SD))
    if tensor is not None and shown is not None:
        if _agree(told, Ratio(shown.value, tensor.sd)):
            near = min(max(told.value, shown.value * (1 - MODEL_SD)), shown.value * (1 + MODEL_SD))
            return Judged(near, told.sd)
        why = f"{_percent(told.value)} by its counter, {_percent(shown.value)} by its activity"
        return Judged(shown.value, shown.sd, why)
    if clock is not None and told.value < clock.value * (1 - _reach(told.sd, CLOCK_SD)):
        why = f"{_percent(told.value)} by its counter, with {_percent(clock.value)} of its clock"
        return Judged(min(clock.value, 1.0), hypot(CLOCK_SD, MODEL_SD), why)
    return Judged(told.value, told.sd)


def _agree(told: Ratio, shown: Ratio) -> bool:
    return abs(told.value - shown.value) <= shown.value * _reach(told.sd, shown.sd)


def _reach(*sds: float) -> float:
    return TOLERANCE + SURE_SD * hypot(*sds)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 10 else f"{100 * share:.3g} %"
