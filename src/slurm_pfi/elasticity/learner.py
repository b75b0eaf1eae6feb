"""Learning the elasticity curves of runs from a library, from PFI values and from what limits really cost.

Per run j on GPU model g: loss_j(x) = K_k(x) + delta_g(x) + eps_j(x), with K_k one of the library's curves, stretched
or squeezed, delta_g a discrepancy that all runs of a GPU model share, and eps_j one of its own, both Gaussian
processes. What is measured carries noise, and an error of its baseline that is common to all points of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from .curve import FloatArray, IntArray
from .evidence import Batch, EvidenceError, RunEvidence, pack
from .mixture import Mixture, Moments
from .posterior import Posterior
from .prior import GRID, Prior, interpolate
from .process import KNOTS, SHARING, Discrepancy, knot_covariance, knot_weights, matern

_PASSES: Final = 3

_SURPRISE: Final = 9.0
"""Square of the standard deviations by which one point may miss what was expected of it: three."""

_MOST_WIDENED: Final = 4.0
"""A run's own spread is widened to so much at most: a curve is uncertain by all there is, and the site's certificate
should not hang on one broken counter."""


def learn(
    prior: Prior,
    runs: Sequence[RunEvidence],
    *,
    log_weight: FloatArray | None = None,
    spreads: Discrepancy = SHARING,
) -> Posterior:
    """The posterior of all runs' curves. ``log_weight`` (runs, candidates) replaces the prior's own weights.

    Candidates and the GPU models' discrepancies explain the same residuals, so each is fitted in turn, three times.
    Before the last time, runs that lie outside what was expected of them get a wider discrepancy of their own.
    Linear in runs, and in library curves. Raises EvidenceError on weights that are none.
    """
    batch = pack(runs)
    base = _weights(prior, log_weight, batch.runs)
    mean_loss = _mean_loss(prior, base)
    shown = _Shown(batch, mean_loss, spreads)
    mixture = Mixture(prior, batch, base, shown.expected)
    mixture.tell_pfi(runs)
    mixture.whiten(shown.whiten)
    cov = prior_cov = _prior_covariances(batch, mean_loss, spreads)
    mean: FloatArray = np.zeros(prior_cov.shape[:2])
    for _ in range(_PASSES - 1):
        mean, cov = _fit_shared(batch, shown, mixture.moments(shown.off(mean)), prior_cov)
    beyond, factor = _surprised(batch, shown, mixture.moments(None), mean, cov)
    if beyond.size:
        shown.widen(beyond, factor)
        mixture.whiten(shown.whiten, beyond)
    candidate = np.zeros((batch.runs, prior.size), dtype=np.float32)
    moments = mixture.moments(shown.off(mean), candidate)
    mean, cov = _fit_shared(batch, shown, moments, prior_cov)
    return Posterior(
        prior=prior,
        batch=batch,
        candidate=candidate,
        mean_loss=mean_loss,
        known=np.asarray(np.isfinite(base[:, prior.real]).any(axis=1), dtype=np.bool_),
        spreads=spreads,
        widening=shown.widening,
        precision=np.swapaxes(shown.whiten, 1, 2) @ shown.whiten,
        unexplained=_times(shown.root, shown.surprise - moments.mean),
        shared_mean=mean,
        shared_cov=cov,
    )


class _Shown:
    """What runs have shown beyond the library's mean, whitened; arrays (runs, points, ...).

    ``root``: root of the covariance of noise, baselines and own discrepancies; ``whiten``: its inverse. ``surprise``:
    measured less the library's mean; ``knots``: weights of the GPU model's discrepancy in it.
    """

    def __init__(self, batch: Batch, mean_loss: FloatArray, spreads: Discrepancy) -> None:
        self._batch = batch
        self.expected = interpolate(mean_loss, batch.reduction)
        sd = np.where(batch.real, spreads.run.sd(batch.reduction, self.expected), 0.0)
        distance = batch.reduction[:, :, None] - batch.reduction[:, None, :]
        self._own = sd[:, :, None] * sd[:, None, :] * matern(distance, spreads.run.length)
        self._plain_knots = knot_weights(batch.reduction)
        self.widening = np.ones(batch.runs)
        self.root: FloatArray = np.asarray(np.linalg.cholesky(self._own + batch.noise_cov), dtype=np.float64)
        # A handful of points each: the inverse is as good as solving, and is needed for every candidate.
        self.whiten: FloatArray = np.asarray(np.linalg.inv(self.root), dtype=np.float64)
        self.surprise = _times(self.whiten, batch.loss - self.expected)
        self.knots = self.whiten @ self._plain_knots

    def off(self, shared: FloatArray) -> FloatArray:
        """Surprise less the GPU models' mean discrepancies, (groups, knots)."""
        return self.surprise - _times(self.knots, shared[self._batch.group])

    def widen(self, runs: IntArray, factor: FloatArray) -> None:
        """Multiply the spread of some runs' own discrepancies."""
        self.widening[runs] = factor
        own = self._own[runs] * (factor**2)[:, None, None]
        self.root[runs] = np.linalg.cholesky(own + self._batch.noise_cov[runs])
        self.whiten[runs] = np.linalg.inv(self.root[runs])
        self.surprise[runs] = _times(self.whiten[runs], (self._batch.loss - self.expected)[runs])
        self.knots[runs] = self.whiten[runs] @ self._plain_knots[runs]


def _times(matrix: FloatArray, vector: FloatArray) -> FloatArray:
    """Product of a matrix (..., m, n) and a vector (..., n) for each run."""
    result: FloatArray = (matrix @ vector[..., None])[..., 0]
    return result


def _weights(prior: Prior, log_weight: FloatArray | None, runs: int) -> FloatArray:
    """Log weights (runs, candidates) before any evidence."""
    shape = (runs, prior.size)
    if log_weight is None:
        return np.broadcast_to(prior.log_weight, shape)
    base = np.asarray(log_weight, dtype=np.float64)
    if base.shape != shape:
        raise EvidenceError(f"log weights of {runs} runs and {prior.size} candidates, not {base.shape}")
    if base.size:
        best = base.max(axis=1)  # NaN where any is
        if not np.isfinite(best).all():
            place = int(np.argmin(np.isfinite(best)))
            raise EvidenceError(f"run at place {place}: of its log weights the greatest is {best[place]}")
    return base


def _mean_loss(prior: Prior, base: FloatArray) -> FloatArray:
    """What the library alone expects of each run, (runs, grid)."""
    if base.strides[0] == 0:  # one row for all
        return np.broadcast_to(
            _softmax(base[:1]) @ prior.losses.T.astype(np.float64), (base.shape[0], GRID.size)
        )
    return _softmax(base) @ prior.losses.T


def _prior_covariances(batch: Batch, mean_loss: FloatArray, spreads: Discrepancy) -> FloatArray:
    """Covariance of each GPU model's discrepancy at the knots before anything is measured: (groups, knots, knots)."""
    found = np.empty((len(batch.groups), KNOTS.size, KNOTS.size))
    for number in range(len(batch.groups)):
        of_group = mean_loss[batch.group == number].mean(axis=0)
        found[number] = knot_covariance(spreads.gpu_model, np.interp(KNOTS, GRID, of_group))
    return found


def _fit_shared(
    batch: Batch, shown: _Shown, moments: Moments, prior_cov: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Ridge regression of each GPU model's discrepancy on what its runs' curves leave unexplained.

    Mean (groups, knots) and covariance (groups, knots, knots). Which candidate is right is itself uncertain: that
    spread is noise here. Kin deviate alike, so together they weigh as one.
    """
    information, told = np.zeros_like(prior_cov), np.zeros(prior_cov.shape[:2])
    certainty = np.linalg.inv(np.eye(moments.mean.shape[1]) + moments.between)
    weighed = certainty @ shown.knots / batch.kin_size[:, None, None]
    left = shown.surprise - moments.mean
    for number in range(len(batch.groups)):
        members = batch.group == number
        flat = weighed[members].reshape(-1, KNOTS.size)
        information[number] = flat.T @ shown.knots[members].reshape(-1, KNOTS.size)
        told[number] = flat.T @ left[members].ravel()
    # (P^-1 + I)^-1 without inverting P, which has a zero at reduction 0.
    cov = np.asarray(np.linalg.solve(np.eye(KNOTS.size) + prior_cov @ information, prior_cov))
    return _times(cov, told), cov


def _surprised(
    batch: Batch, shown: _Shown, expected: Moments, shared: FloatArray, shared_cov: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Runs whose measurements lie outside their interval, and by what their own spread is to be multiplied.

    The interval is what library, PFI and GPU model say of a run that has shown nothing yet, with the noise. Where it
    does not hold, nothing known describes this run, and its own discrepancy grows by as much as it was missed by.
    """
    spread = shown.knots @ shared_cov[batch.group] @ np.swapaxes(shown.knots, 1, 2)
    cov = np.eye(batch.real.shape[1]) + expected.between + spread
    off = shown.off(shared) - expected.mean
    square = (off * np.linalg.solve(cov, off[..., None])[..., 0]).sum(axis=1)
    allowed = _SURPRISE + np.maximum(batch.real.sum(axis=1) - 1, 0)
    beyond = np.flatnonzero(square > allowed)
    return beyond, np.minimum(np.sqrt(square[beyond] / allowed[beyond]), _MOST_WIDENED)


def _softmax(log_weight: FloatArray) -> FloatArray:
    """Weights that sum to 1 along the last axis."""
    weight = np.exp(log_weight - log_weight.max(axis=-1, keepdims=True))
    result: FloatArray = weight / weight.sum(axis=-1, keepdims=True)
    return result
