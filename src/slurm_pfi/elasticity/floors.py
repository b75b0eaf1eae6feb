"""Greatest reductions: how deep a run may be cut so that it keeps what its user was promised."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from .curve import FloatArray
from .posterior import Posterior
from .prior import GRID

FLOOR_SDS: Final = 2.25
"""Standard deviations above the expected loss that still have to keep the promise: what whole GPU models need that are
left out of the library (docs/science.md). A factor fitted to known families does not carry over to others."""


def greatest_reductions(posterior: Posterior, max_loss: ArrayLike, *, sds: float = FLOOR_SDS) -> FloatArray:
    """The largest reduction of each run, (runs,), up to which its loss stays within ``max_loss`` (0..1, or (runs,)).

    0 where no loss is allowed. Raises ValueError on a loss that is no number of 0..1.
    """
    limit = np.broadcast_to(np.asarray(max_loss, dtype=np.float64), (posterior.batch.runs,))
    if not ((limit >= 0) & (limit <= 1)).all():
        raise ValueError("the greatest loss is a number of 0 to 1")
    return reach(upper_losses(posterior, sds=sds), limit)


def upper_losses(posterior: Posterior, *, sds: float = FLOOR_SDS) -> FloatArray:
    """Losses on GRID that a promise has to reckon with, never falling, shape (runs, grid).

    The expected loss plus ``sds`` standard deviations, so the posterior has to be learned with the wide spreads
    (``process.FLOORS``).
    """
    mean, sd = posterior.mean_and_sd()
    result: FloatArray = np.maximum.accumulate(np.clip(mean + sds * sd, 0.0, 1.0), axis=1)
    return result


def reach(upper: FloatArray, limit: FloatArray) -> FloatArray:
    """The reduction at which each row of ``upper_losses`` passes its limit, (rows,); 0 where no loss is allowed."""
    within = upper <= limit[:, None]
    last = np.maximum(within.sum(axis=1) - 1, 0)
    after = np.minimum(last + 1, GRID.size - 1)
    rows = np.arange(limit.size)
    low, high = upper[rows, last], upper[rows, after]
    step = np.divide(limit - low, high - low, out=np.zeros(limit.size), where=high > low)
    reached = GRID[last] + np.clip(step, 0.0, 1.0) * (GRID[after] - GRID[last])
    return np.where(limit > 0, np.where(within[:, 0], reached, 0.0), 0.0)


def reach_of_one(upper: FloatArray, limit: float) -> float:
    """``reach`` of one row, (grid,), in a fifth of the time: a controller asks it of every run in every cycle."""
    after = int(np.searchsorted(upper, limit, side="right"))
    if limit <= 0 or after == 0:
        return 0.0
    if after == GRID.size:
        return 1.0
    step = (limit - upper[after - 1]) / (upper[after] - upper[after - 1])
    return float(GRID[after - 1] + step * (GRID[after] - GRID[after - 1]))
