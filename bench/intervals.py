"""Medians with a 95 % interval, by the bootstrap over whole pairs or rounds."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

DRAWS: Final = 4000


def interval(values: Sequence[T], of: Callable[[Sequence[T]], float]) -> tuple[float, float]:
    """The middle 95 % of ``of`` over samples drawn with replacement; the same values give the same interval."""
    draw = random.Random(7)
    found = sorted(of(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    return found[round(0.025 * (DRAWS - 1))], found[round(0.975 * (DRAWS - 1))]


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least this share does not exceed: p99 of 200 is the 198th, no value between two."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def told(values: Sequence[float], digits: int = 1) -> dict[str, float | list[float]]:
    """Median with interval, p99, greatest."""
    return {
        "median": round(statistics.median(values), digits),
        "interval_95": [round(bound, digits) for bound in interval(values, statistics.median)],
        "p99": round(quantile(values, 0.99), digits),
        "max": round(max(values), digits),
    }
