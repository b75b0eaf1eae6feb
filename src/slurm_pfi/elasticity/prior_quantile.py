"""What weighted curves say together of a job that none of them measured: the mean, and an upper quantile."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np

from .curve import CurveError, ElasticityCurve, FloatArray
from .index import SMALLEST_LOSS, Pfi

_GRID: Final = np.linspace(0.0, 1.0, 101)
_ATOMS: Final = np.array([NormalDist().inv_cdf((i + 0.5) / 40) for i in range(40)])

# How far an unseen GPU model, and an unseen job on it, may lie from the mean loss: one standard deviation as a share
# of that loss, and a rest that is there from small reductions on. Wider than what the curves here show of each other:
# they come from three GPU models only.
_MODEL_SPREAD: Final = (0.40, 0.004)
_JOB_SPREAD: Final = (0.25, 0.006)
_SPREAD_RISE: Final = 0.03


def mean_curve(curves: Sequence[ElasticityCurve], weight: FloatArray) -> ElasticityCurve:
    """The weighted mean loss as a convex curve; ``weight`` (curves,) sums to 1.

    It ends where less than half of the weight was measured, and is continued pessimistically from there.
    """
    deepest = np.array([curve.reduction[-1] for curve in curves])
    measured = (weight[:, None] * (deepest[:, None] >= _GRID)).sum(axis=0) >= 0.5
    loss = np.maximum.accumulate(weight @ _losses(curves))[measured]
    return ElasticityCurve(_GRID[measured], np.clip(loss, 0.0, 1.0)).convex_minorant()


def quantile_curve(curves: Sequence[ElasticityCurve], weight: FloatArray, q: float) -> ElasticityCurve:
    """At each reduction the ``q`` quantile of the curves' losses, each widened for an unseen GPU model and job."""
    losses = _losses(curves)
    mean = weight @ losses
    rise = 1.0 - np.exp(-_GRID / _SPREAD_RISE)
    spread = np.hypot(*(share * mean + rest * rise for share, rest in (_MODEL_SPREAD, _JOB_SPREAD)))
    atoms = losses[:, :, None] + spread[None, :, None] * _ATOMS[None, None, :]
    by_reduction = atoms.transpose(1, 0, 2).reshape(_GRID.size, -1)
    upper = _weighted_quantile(by_reduction, np.repeat(weight / _ATOMS.size, _ATOMS.size), q)
    upper[0], upper[-1] = 0.0, 1.0
    return ElasticityCurve(_GRID, np.clip(np.maximum.accumulate(upper), 0.0, 1.0))


def default_index(curves: Sequence[ElasticityCurve], weight: FloatArray, grid_w: Sequence[float]) -> Pfi:
    """The PFI of a job of which nothing is known, see ``Library.default_pfi``."""
    grid = sorted({float(cap) for cap in grid_w})
    if len(grid) < 2 or not (np.isfinite(grid).all() and grid[0] > 0):
        raise CurveError("a grid needs two or more different caps above zero")
    reduction = 1.0 - np.array(grid[:-1]) / grid[-1]
    loss = np.array([curve.loss_at(reduction) for curve in curves])
    counted = loss >= SMALLEST_LOSS
    ratio = np.divide(reduction, loss, out=np.zeros_like(loss), where=counted)
    some = counted.any(axis=1)
    if not some.any():
        raise CurveError(f"no curve loses 1 % at {grid[0]:g} of {grid[-1]:g} W: the PFI is not defined")
    values = ratio[some].sum(axis=1) / counted[some].sum(axis=1)
    spread = np.exp(np.hypot(_MODEL_SPREAD[0], _JOB_SPREAD[0]) * _ATOMS)
    atoms = np.outer(values, spread).reshape(1, -1)
    repeated = np.repeat(weight[some], _ATOMS.size)
    low, middle, high = (_weighted_quantile(atoms, repeated, q)[0] for q in (0.025, 0.5, 0.975))
    used = int(counted[some].any(axis=0).sum())
    return Pfi(
        value=float(middle),
        low=float(low),
        high=float(high),
        grid_w=tuple(grid),
        used=used,
        left_out=len(grid) - 1 - used,
        source="default",
        gpu_model="",
    )


def _losses(curves: Sequence[ElasticityCurve]) -> FloatArray:
    return np.array([curve.loss_at(_GRID) for curve in curves])


def _weighted_quantile(values: FloatArray, weight: FloatArray, q: float) -> FloatArray:
    """The smallest value of each row, (rows, n), that at least ``q`` of the weight, (n,), does not exceed."""
    order = np.argsort(values, axis=1, kind="stable")
    below = np.cumsum(weight[order], axis=1)
    place = np.minimum((below < q * below[:, -1:] - 1e-12).sum(axis=1), values.shape[1] - 1)
    rows = np.arange(values.shape[0])
    result: FloatArray = values[rows, order[rows, place]]
    return result
