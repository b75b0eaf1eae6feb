"""The Gaussian processes by which a run, and a GPU model, may differ from every curve of the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .curve import FloatArray

_RISE: Final = 0.03
"""Reduction within which the rest of a spread grows from nothing: at no reduction there is no loss to differ in."""

KNOTS: Final = np.array([0.0, 0.03, 0.07, 0.12, 0.18, 0.25, 0.32, 0.4, 0.5, 0.6, 0.7])
"""Reductions between which the discrepancy of a GPU model is linear; beyond the last it stays what it is there."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviation of a discrepancy: a share of the mean loss, and a rest that is there from small cuts on.

    ``length`` is the reduction over which the discrepancy keeps its sign, roughly.
    """

    share: float
    rest: float
    length: float

    def sd(self, reduction: FloatArray, mean_loss: FloatArray) -> FloatArray:
        """At reductions and the mean losses there, any one shape."""
        result: FloatArray = self.share * mean_loss + self.rest * (1.0 - np.exp(-reduction / _RISE))
        return result


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """The two spreads of a learner: of a run from its GPU model, of a GPU model from the library."""

    run: Spread = Spread(share=0.15, rest=0.006, length=0.25)
    gpu_model: Spread = Spread(share=0.15, rest=0.004, length=0.12)


SHARING: Final = Discrepancy()
"""For the mean, by which reductions are shared."""

FLOORS: Final = Discrepancy(
    run=Spread(share=0.25, rest=0.006, length=0.25), gpu_model=Spread(share=0.40, rest=0.004, length=0.12)
)
"""Wider, for promises: how far a GPU model that nobody has seen yet may lie from those that the library holds."""


def matern(distance: FloatArray, length: float) -> FloatArray:
    """Matern-3/2 correlation: once differentiable, as the loss of a job is between the kinks of its clock table."""
    scaled = np.sqrt(3.0) * np.abs(distance) / length
    result: FloatArray = (1.0 + scaled) * np.exp(-scaled)
    return result


def knot_weights(reduction: FloatArray) -> FloatArray:
    """Weights of the knots in the value at each reduction: shape (..., knots), rows sum to 1."""
    x = np.clip(reduction, KNOTS[0], KNOTS[-1])
    right = np.clip(np.searchsorted(KNOTS, x, side="left"), 1, KNOTS.size - 1)
    share = (x - KNOTS[right - 1]) / (KNOTS[right] - KNOTS[right - 1])
    unit = np.eye(KNOTS.size)
    result: FloatArray = unit[right - 1] * (1.0 - share)[..., None] + unit[right] * share[..., None]
    return result


def knot_covariance(spread: Spread, mean_loss: FloatArray) -> FloatArray:
    """Prior covariance of a GPU model's discrepancy at the knots, (knots, knots), squared-exponential.

    ``mean_loss`` (knots,): the library's. At reduction 0 the variance is 0, and stays so.
    """
    sd = spread.sd(KNOTS, mean_loss)
    distance = KNOTS[:, None] - KNOTS[None, :]
    result: FloatArray = sd[:, None] * sd[None, :] * np.exp(-0.5 * (distance / spread.length) ** 2)
    return result
