"""Quantiles of Student's t distribution for whole degrees of freedom, exact but for rounding.

The probability of |T| < t is a finite sum in the angle atan(t / sqrt(dof)): Abramowitz and Stegun, 26.7.3 and 26.7.4.
"""

from __future__ import annotations

import math


def t_quantile(probability: float, dof: int) -> float:
    """The t that a fraction ``probability``, (0, 1), of the distribution does not exceed; ``dof`` 1 or more."""
    if not 0 < probability < 1:
        raise ValueError(f"a probability lies between 0 and 1, got {probability}")
    if dof < 1:
        raise ValueError(f"degrees of freedom are 1 or more, got {dof}")
    within = abs(2.0 * probability - 1.0)
    low, high = 0.0, math.pi / 2
    for _ in range(200):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (middle, high) if _within(middle, dof) < within else (low, middle)
    t = math.sqrt(dof) * math.tan(low)
    return t if probability >= 0.5 else -t


def _within(angle: float, dof: int) -> float:
    """The probability of |T| < sqrt(dof) tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = dof % 2 == 1
    term = cosine if odd else 1.0
    total = term if dof > 1 else 0.0
    for place in range(3 if odd else 2, dof - 1, 2):
        term *= cosine * cosine * (place - 1) / place
        if term < 1e-18 * total:
            break
        total += term
    return 2.0 / math.pi * (angle + sine * total) if odd else sine * total
