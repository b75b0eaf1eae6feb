"""Power, clock and throughput of one GPU under a training job: the formulas of the stand-in library, in Python.

    f     SM clock as a share of 1980 MHz, 0.106..1
    v(f)  relative voltage             1 + 1.345 max(0, f - 0.521)^2.135
    t(f)  relative step time           a / f + (1 - a)
    P(f)  draw of one GPU, W           74.4 + kappa f v^2 [0.35 + 0.65 (a / f) / t] + M / t

A cap sets f by P(f) = min(cap, P(1)). The model is fitted to the published figures of arXiv 2609.11542 (Power
Flexibility Index per job on H200); it is not a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CLOCK_MIN: Final = 0.106
SM_CLOCK_MAX_MHZ: Final = 1980.0
REFERENCE_CAP_W: Final = 700.0
"""T_max and P_max are those at this cap, the board power of an H200."""


def relative_voltage(clock: float) -> float:
    """Voltage at a clock share, relative to that below the knee."""
    above_knee = clock - 0.521
    return 1.0 if above_knee <= 0 else 1.0 + 1.345 * above_knee**2.135


@dataclass(frozen=True, slots=True)
class Workload:
    """What a job asks of each of its GPUs: a (0..1), kappa and M (both W)."""

    compute_share: float
    kappa_w: float
    memory_w: float

    def step_time(self, clock: float) -> float:
        """Step time relative to full clock."""
        return self.compute_share / clock + (1.0 - self.compute_share)

    def power_w(self, clock: float) -> float:
        """Draw of one GPU at a clock share, W."""
        time = self.step_time(clock)
        busy = 0.35 + 0.65 * (self.compute_share / clock) / time
        voltage = relative_voltage(clock)
        return 74.4 + self.kappa_w * clock * voltage * voltage * busy + self.memory_w / time

    def clock_for_cap(self, cap_w: float, highest: float = 1.0) -> float:
        """The clock share at which the draw meets the cap. At the lowest clock the draw may exceed the cap."""
        low, high = CLOCK_MIN, highest
        if self.power_w(high) <= cap_w:
            return high
        if self.power_w(low) >= cap_w:
            return low
        for _ in range(60):
            middle = 0.5 * (low + high)
            if self.power_w(middle) <= cap_w:
                low = middle
            else:
                high = middle
        return low

    def draw_w(self, cap_w: float) -> float:
        """Settled draw of one GPU under a cap, W."""
        return self.power_w(self.clock_for_cap(cap_w))

    def relative_throughput(self, cap_w: float, reference_cap_w: float = REFERENCE_CAP_W) -> float:
        """Throughput under a cap as a share of that at the reference cap."""
        reference = self.step_time(self.clock_for_cap(reference_cap_w))
        return reference / self.step_time(self.clock_for_cap(cap_w))
