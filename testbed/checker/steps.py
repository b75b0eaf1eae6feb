"""A value that changes at instants: right-continuous step functions over CLOCK_MONOTONIC ns."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import Final

UNBOUNDED: Final = float("inf")


class Steps:
    """``value_at(t)`` is the value of the last step at or before t, ``before`` earlier than all of them."""

    def __init__(self, points: Iterable[tuple[int, float]], before: float = UNBOUNDED) -> None:
        self.before = before
        self.times: list[int] = []
        self.values: list[float] = []
        for time_ns, value in sorted(points, key=lambda point: point[0]):
            if self.times and self.times[-1] == time_ns:
                self.values[-1] = value
            elif (self.values[-1] if self.values else before) != value:
                self.times.append(time_ns)
                self.values.append(value)

    def value_at(self, time_ns: int) -> float:
        at = bisect_right(self.times, time_ns)
        return self.values[at - 1] if at else self.before

    def start_of(self, time_ns: int) -> int | None:
        """Since when the value at ``time_ns`` has been in force; None when it is older than all steps."""
        at = bisect_right(self.times, time_ns)
        return self.times[at - 1] if at else None

    def highest_with(self, other: Steps) -> Steps:
        """The higher of both at each instant."""
        times = {*self.times, *other.times}
        points = [(time_ns, max(self.value_at(time_ns), other.value_at(time_ns))) for time_ns in times]
        return Steps(points, max(self.before, other.before))

    def highest_over_past(self, length_ns: int) -> Steps:
        """The highest value over the past ``length_ns``: a raise counts at once, a lowering that much later.

        Monotone queue, linear in the number of steps.
        """
        starts: list[float] = [-UNBOUNDED, *self.times]
        ends: list[float] = [*self.times, UNBOUNDED]
        values = [self.before, *self.values]
        queue: deque[int] = deque()
        points: list[tuple[int, float]] = []
        fed = 0
        for change in sorted({*self.times, *(time_ns + length_ns for time_ns in self.times)}):
            while fed < len(values) and starts[fed] <= change:
                while queue and values[queue[-1]] <= values[fed]:
                    queue.pop()
                queue.append(fed)
                fed += 1
            while ends[queue[0]] + length_ns <= change:
                queue.popleft()
            points.append((change, values[queue[0]]))
        return Steps(points, self.before)
