"""Caps in whole watts that neither break a floor nor pass a ceiling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..units import MW_PER_W
from .problem import RunDemand

_SNAP_MW = 1e-3  # a cap this close below a whole watt is that watt: rounding errors are far smaller


def lowest_cap_mw(demand: RunDemand) -> int:
    """The lowest cap of a run that keeps its floor: the next whole watt, or the ceiling if that comes first."""
    return min(-(-demand.floor_mw // MW_PER_W) * MW_PER_W, demand.ceiling_mw)


def whole_watts(
    caps_mw: NDArray[np.float64],
    gpus: NDArray[np.int64],
    top_mw: NDArray[np.int64],
    bottom_mw: NDArray[np.int64],
    budget_total_mw: int,
) -> NDArray[np.int64]:
    """Round caps down to whole watts within bottom..top, all of shape (runs,), keeping the budget to the milliwatt.

    An uncut cap stays what it was, so that a ceiling which is no whole watt is not touched without need.
    The caller's caps meet the budget up to rounding errors, and the bottoms meet it exactly.
    """
    watts = np.floor((caps_mw + _SNAP_MW) / MW_PER_W).astype(np.int64) * MW_PER_W
    caps = np.where(caps_mw >= top_mw - _SNAP_MW, top_mw, np.clip(watts, bottom_mw, top_mw))
    while int((gpus * caps).sum()) > budget_total_mw:
        most = int(np.argmax(caps - bottom_mw))
        if caps[most] <= bottom_mw[most]:
            raise AssertionError("the bottoms exceed the budget")
        caps[most] = max(int(bottom_mw[most]), (int(caps[most]) - 1) // MW_PER_W * MW_PER_W)
    return caps
