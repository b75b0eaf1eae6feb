"""Axes: round figures for powers, round clock times for time. Pure arithmetic."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from typing import Final

_TIME_STEPS_S: Final = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps ``low..high`` of the data to ``start..end`` on paper; a value outside is held at the edge."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        width = self.high - self.low
        share = 0.0 if width <= 0 else min(1.0, max(0.0, (value - self.low) / width))
        return round(self.start + share * (self.end - self.start), 1)


def round_axis(low: float, high: float, most: int) -> list[float]:
    """Round figures from at or below ``low`` to at or above ``high``, some ``most`` of them: ends and marks of an axis.

    It begins at zero unless all values lie in the upper half of it.
    """
    low = 0.0 if low < high / 2 else low
    step = _round_step((high - low) / most if high > low else max(1.0, high))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 9) for number in range(first, max(last, first + 1) + 1)]


def _round_step(least: float) -> float:
    """The least of 1, 2, 2.5 or 5 times a power of ten that is not below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((base * power for base in (1.0, 2.0, 2.5, 5.0) if base * power >= least - 1e-9), 10.0 * power)


def time_ticks(start_s: float, end_s: float, most: int) -> list[tuple[float, str]]:
    """Round UTC clock times within the span, with their text; days are told where the span has several."""
    step = next((step for step in _TIME_STEPS_S if (end_s - start_s) / step <= most), None)
    if step is None:
        step = 86_400 * math.ceil((end_s - start_s) / 86_400 / most)
    pattern = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86_400 else "%d %b"
    first = math.ceil(start_s / step) * step
    count = int((end_s - first) // step) + 1 if first <= end_s else 0
    found = [first + number * step for number in range(count)]
    return [(at_s, dt.datetime.fromtimestamp(at_s, dt.UTC).strftime(pattern)) for at_s in found]
