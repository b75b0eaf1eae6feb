"""How much of the distance between the equal policy and the oracle a policy closes, over many sets of runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..elasticity.curve import FloatArray

NO_GAP: Final = 0.002
"""A gap under this share of the throughput is none: a share of it would be noise over noise."""

_Z95: Final = 1.959964
SAME: Final = 1e-9
"""Losses that differ by less than this share of the throughput are the same."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A policy against equal and oracle, over sets. All are shares (1 = 100 %).

    ``closed``: of the gap, with ``low`` and ``high`` (95 %); None where there is no gap. ``of_throughput``: the gap
    itself. ``below_equal``: sets in which the policy lost more than equal. ``worst``: the worst set's gain over
    equal, in throughput. ``lost``: mean throughput lost, ``lost_low`` and ``lost_high`` the 2.5 % and 97.5 %
    quantiles of the sets.
    """

    closed: float | None
    low: float | None
    high: float | None
    of_throughput: float
    below_equal: float
    worst: float
    lost: float
    lost_low: float
    lost_high: float


def gap_closed(lost: FloatArray, equal: FloatArray, oracle: FloatArray, total: FloatArray) -> Gap:
    """Throughput lost under a policy, under equal and under the oracle, and the total uncapped, each (sets,).

    The share is that of sums over the sets, (sum of gains) / (sum of gaps), so that no set with hardly a gap
    decides; its interval is that of a ratio of two means (delta method). One set has no interval: NaN never comes out,
    ``low`` and ``high`` are None then. Raises ValueError on arrays of other shapes, none, or a total of 0.
    """
    if not lost.shape == equal.shape == oracle.shape == total.shape or lost.ndim != 1 or not lost.size:
        raise ValueError(f"losses of shape {lost.shape}, {equal.shape}, {oracle.shape}, {total.shape}")
    if not (total > 0).all():
        raise ValueError("a set of runs without throughput")
    gain, gap = equal - lost, equal - oracle
    of_throughput = float(gap.sum() / total.sum())
    share = lost / total
    low_share, high_share = np.quantile(share, (0.025, 0.975))
    closed = low = high = None
    if of_throughput >= NO_GAP:
        closed = float(gain.sum() / gap.sum())
        if lost.size > 1:
            spread = (gain - closed * gap).std(ddof=1) / np.sqrt(lost.size) / gap.mean()
            low, high = closed - _Z95 * float(spread), closed + _Z95 * float(spread)
    return Gap(
        closed=closed,
        low=low,
        high=high,
        of_throughput=of_throughput,
        below_equal=float((gain < -SAME * total).mean()),
        worst=float((gain / total).min()),
        lost=float(share.mean()),
        lost_low=float(low_share),
        lost_high=float(high_share),
    )
