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


def nice_top(value: float) -> float:
    """The least round figure (1, 1.2, 1.5, 2, ... times a power of ten) that is not below ``value``; 1 for none."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        (step * power for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if step * power >= value), 10 * power
    )


def ticks(top: float, most: int) -> list[float]:
    """Round figures from 0 to ``top``, at most ``most`` beside the zero."""
    power = 10.0 ** math.floor(math.log10(top))
    steps = [base * power * scale for scale in (0.1, 1.0) for base in (1, 2, 2.5, 5)]
    step = next((step for step in steps if top / step <= most + 1e-9), top)
    return [round(number * step, 9) for number in range(int(top / step + 1e-9) + 1)]


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
