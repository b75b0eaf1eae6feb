"""Measured sweeps of caps: checked, ordered, and made into elasticity curves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .curve import CurveError, ElasticityCurve, FloatArray


@dataclass(frozen=True, slots=True)
class Repairs:
    """What was done to measured points to make a curve of them; counts of points.

    ``unsorted``: points not in the order of their caps, sorted. ``duplicates``: points of a cap measured before,
    averaged into it. ``not_binding``: capped points that draw no less than the uncapped one, left out.
    ``below_zero``: points faster than the uncapped one, taken as no loss. ``raised``: points whose loss lay below
    that of a smaller reduction, raised to it.
    """

    unsorted: int = 0
    duplicates: int = 0
    not_binding: int = 0
    below_zero: int = 0
    raised: int = 0

    @property
    def total(self) -> int:
        return self.unsorted + self.duplicates + self.not_binding + self.below_zero + self.raised


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Checked measurements of one job at several caps, all of shape (n,), caps descending from the uncapped one."""

    cap_w: FloatArray
    power_w: FloatArray
    throughput: FloatArray
    unsorted: int
    duplicates: int


def read_sweep(
    cap_w: ArrayLike, power_w: ArrayLike, throughput: ArrayLike, *, uncapped_w: float | None = None
) -> Sweep:
    """Check and order measurements of one job: caps (W), draw (W, not the cap) and throughput (any unit), each (n,).

    The point of the highest cap is the uncapped one; with ``uncapped_w`` (the GPU's default limit) it must not lie
    below that. Raises CurveError on NaN, infinities, caps or draws not above zero, throughput not above zero,
    unequal lengths, fewer than two different caps, and no uncapped point.
    """
    cap, power, rate = (np.atleast_1d(np.asarray(a, dtype=np.float64)) for a in (cap_w, power_w, throughput))
    if cap.ndim != 1 or not cap.shape == power.shape == rate.shape:
        raise CurveError(
            f"caps, draws and throughputs differ in shape: {cap.shape} {power.shape} {rate.shape}"
        )
    for name, values in (("cap", cap), ("draw", power), ("throughput", rate)):
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            raise CurveError(f"{name} {values[bad[0]]:g} at point {bad[0] + 1}: must be a number above zero")
    distinct, group = np.unique(-cap, return_inverse=True)
    if distinct.size < 2:
        raise CurveError(f"a curve needs two or more different caps, got {distinct.size}")
    if uncapped_w is not None and -distinct[0] < uncapped_w:
        raise CurveError(
            f"no uncapped point: the highest cap is {-distinct[0]:g} W, the default limit {uncapped_w:g} W"
        )
    step = np.diff(cap)
    unsorted = int(min((step < 0).sum(), (step > 0).sum()))  # ascending and descending are both in order
    count = np.bincount(group)
    return Sweep(
        cap_w=-distinct,
        power_w=np.bincount(group, power) / count,
        throughput=np.bincount(group, rate) / count,
        unsorted=unsorted,
        duplicates=int(cap.size - distinct.size),
    )


def curve_from_measurements(
    cap_w: ArrayLike, power_w: ArrayLike, throughput: ArrayLike, *, uncapped_w: float | None = None
) -> tuple[ElasticityCurve, Repairs]:
    """The curve of one job from its measurements, and what had to be repaired. Arguments and errors: ``read_sweep``.

    Raises CurveError too when no cap lowered the draw.
    """
    sweep = read_sweep(cap_w, power_w, throughput, uncapped_w=uncapped_w)
    # No meter tells draws a millionth apart, and a slope between such points would be nothing but noise.
    x = np.round(1.0 - sweep.power_w[1:] / sweep.power_w[0], 6)
    y = 1.0 - sweep.throughput[1:] / sweep.throughput[0]
    binding = x > 0
    if not binding.any():
        raise CurveError("no cap lowered the draw: nothing is known about the loss")
    order = np.argsort(x[binding], kind="stable")
    x, y = x[binding][order], y[binding][order]
    x, group = np.unique(x, return_inverse=True)
    same = int(group.size - x.size)
    y = np.bincount(group, y) / np.bincount(group)
    below_zero = int((y < 0).sum())
    clipped = np.maximum(y, 0.0)
    monotone = np.maximum.accumulate(clipped)
    repairs = Repairs(
        unsorted=sweep.unsorted,
        duplicates=sweep.duplicates + same,
        not_binding=int((~binding).sum()),
        below_zero=below_zero,
        raised=int((monotone > clipped).sum()),
    )
    return ElasticityCurve(np.concatenate(([0.0], x)), np.concatenate(([0.0], monotone))), repairs
