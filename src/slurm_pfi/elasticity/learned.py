"""Figures of single runs read off what was learned: the loss at a reduction, and the PFI with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np

from .curve import FloatArray
from .index import SMALLEST_LOSS, Pfi, PfiSource, descending_caps, draws_under
from .posterior import Posterior
from .prior import interpolate

Tables: TypeAlias = tuple[FloatArray, FloatArray]
"""What ``Posterior.mean_and_sd`` gave: expected loss and its standard deviation, each (runs, grid)."""

SAMPLES: Final = 1_000
_SEED: Final = 0
"""The same random numbers each time: the same knowledge gives the same figure, and a tag does not change by itself."""

_FEWEST: Final = SAMPLES // 4
"""So many samples decide at least, those that fall least, should hardly any of them not fall."""

_NO_FALL: Final = 1e-6

_OUTER: Final = 2.5
"""Per cent of the samples below, and above, a 95 % interval."""


def loss_at(learned: Posterior | Tables, reduction: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Expected loss of each run at its own reduction (0..1), and its standard deviation: both (runs,).

    The loss lies within 0..1. Between the points of GRID both are linear; who asks often computes the tables once.
    """
    mean, sd = learned.mean_and_sd() if isinstance(learned, Posterior) else learned
    x = np.asarray(reduction, dtype=np.float64)[:, None]
    return np.clip(interpolate(mean, x)[:, 0], 0.0, 1.0), interpolate(sd, x)[:, 0]


def learned_pfi(
    posterior: Posterior,
    row: int,
    grid_w: Sequence[float],
    draw_w: float,
    *,
    gpu_model: str,
    source: PfiSource,
) -> Pfi | None:
    """The PFI (Eq. 1) of one run on a grid of caps (W), with a 95 % interval from all that is not known of its curve.

    ``draw_w``: the uncapped draw per GPU. Points as in ``index.pfi_on_grid``: the highest cap is the uncapped point,
    caps that do not lower the draw and points that lose less than 1 % are left out, here in each of many curves that
    could be the run's, lose no less at a deeper cut, and stay within 0..1; the value is their median. None where no
    cap lowers the draw, and where more than a few of the curves lose too little to tell from nothing. Raises
    CurveError on a grid or a draw that is none.
    """
    cap_w = descending_caps(grid_w)
    power_w = draws_under(cap_w, draw_w)
    reduction = 1.0 - power_w[1:] / power_w[0]
    if not (reduction > 0).any():
        return None
    joint = posterior.joint(row, 1.0 - power_w / draw_w)
    left = 1.0 - _not_falling(np.clip(joint.samples(*_random(cap_w.size)), 0.0, 1.0))
    expected = 1.0 - np.clip(joint.weight @ joint.mean, 0.0, 1.0)
    used = int((_loss_below_top(expected) >= SMALLEST_LOSS).sum())
    low, middle, high = np.percentile(
        _index(reduction, _loss_below_top(left)), (_OUTER, 50.0, 100.0 - _OUTER), method="nearest"
    )
    if used == 0 or not np.isfinite(high):
        return None
    return Pfi(
        value=float(middle),
        low=float(low),
        high=float(high),
        grid_w=tuple(cap_w[::-1].tolist()),
        used=used,
        left_out=reduction.size - used,
        source=source,
        gpu_model=gpu_model,
    )


@lru_cache(maxsize=16)
def _random(points: int) -> tuple[FloatArray, FloatArray]:
    """Uniform numbers (SAMPLES,), ascending, one in each of equal steps; standard normal ones (SAMPLES, points)."""
    rng = np.random.default_rng(_SEED)
    place = (np.arange(SAMPLES) + rng.random(SAMPLES)) / SAMPLES
    normal = rng.standard_normal((SAMPLES, points))
    place.flags.writeable = normal.flags.writeable = False
    return place, normal


def _not_falling(loss: FloatArray) -> FloatArray:
    """Those of the curves (curves, points), given at ascending reductions, that can be: no loss falls with the draw."""
    fall = np.maximum(-np.diff(loss, axis=1), 0.0).sum(axis=1)
    result: FloatArray = loss[fall <= max(_NO_FALL, float(np.partition(fall, _FEWEST)[_FEWEST]))]
    return result


def _loss_below_top(left: FloatArray) -> FloatArray:
    """Losses (..., caps - 1) against the highest cap, which comes first in ``left`` (..., caps)."""
    top = left[..., :1]
    result: FloatArray = 1.0 - np.divide(left[..., 1:], top, out=np.ones_like(left[..., 1:]), where=top > 0)
    return result


def _index(reduction: FloatArray, loss: FloatArray) -> FloatArray:
    """Eq. 1, (curves,), of losses (curves, points) at reductions (points,); infinite where no point counts."""
    counts = loss >= SMALLEST_LOSS
    ratio = np.divide(reduction, loss, out=np.zeros_like(loss), where=counts)
    number = counts.sum(axis=1)
    result: FloatArray = np.divide(
        ratio.sum(axis=1), number, out=np.full(number.size, np.inf), where=number > 0
    )
    return result
