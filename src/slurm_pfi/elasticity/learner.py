"""Learning the elasticity curves of runs from a library, from PFI values and from what limits really cost.

Per run j on GPU model g: loss_j(x) = K_k(x) + delta_g(x) + eps_j(x), with K_k one of the library's curves, stretched
or squeezed, delta_g a discrepancy that all runs of a GPU model share, and eps_j one of its own, both Gaussian
processes. What is measured carries noise, and an error of its baseline that is common to all points of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from .curve import FloatArray
from .evidence import Batch, EvidenceError, RunEvidence, pack
from .mixture import Moments, Part, parts
from .posterior import Posterior
from .prior import GRID, Prior, Table
from .process import KNOTS, SHARING, Discrepancy, knot_covariance

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
    split = list(parts(prior, batch, mean_loss, base, spreads.run))
    for part in split:
        part.tell_pfi(prior, runs)
    cov = prior_cov = _prior_covariances(batch, mean_loss, spreads)
    mean: FloatArray = np.zeros(prior_cov.shape[:2])
    found = _Found(batch, prior.size)
    for number in range(_PASSES):
        last = number == _PASSES - 1
        information, told = np.zeros_like(prior_cov), np.zeros_like(mean)
        for part in split:
            if last:
                found.widening[part.members] = _widen(part, mean[part.group], cov[part.group])
            moments = part.moments(mean[part.group])
            _inform(part, moments, batch, information, told)
            if last:
                found.keep(part, moments)
        # (P^-1 + I)^-1 without inverting P, which has a zero at reduction 0.
        cov = np.asarray(np.linalg.solve(np.eye(KNOTS.size) + prior_cov @ information, prior_cov))
        mean = (cov @ told[..., None])[..., 0]
    return Posterior(
        prior=prior,
        batch=batch,
        candidate=found.candidate,
        mean_loss=mean_loss,
        spreads=spreads,
        widening=found.widening,
        precision=found.precision,
        unexplained=found.unexplained,
        shared_mean=mean,
        shared_cov=cov,
    )


class _Found:
    """What the last pass finds of each run; see Posterior."""

    def __init__(self, batch: Batch, candidates: int) -> None:
        runs, points = batch.real.shape
        self.candidate: Table = np.zeros((runs, candidates), dtype=np.float32)
        self.widening = np.ones(runs)
        self.precision = np.zeros((runs, points, points))
        self.unexplained = np.zeros((runs, points))

    def keep(self, part: Part, moments: Moments) -> None:
        at = part.members
        if isinstance(part.columns, slice):
            self.candidate[at] = moments.weight
        else:
            self.candidate[at[:, None], part.columns] = moments.weight
        self.precision[at, : part.points, : part.points] = np.swapaxes(part.whiten, 1, 2) @ part.whiten
        self.unexplained[at, : part.points] = (part.root @ moments.middle[..., None])[..., 0]


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


def _inform(part: Part, moments: Moments, batch: Batch, information: FloatArray, told: FloatArray) -> None:
    """Add what a part says of its GPU model to ``information`` (groups, knots, knots) and ``told`` (groups, knots).

    Ridge regression on what the runs' curves leave unexplained. Which candidate is right is itself uncertain: that
    spread is noise here. Kin deviate alike, so together they weigh as one.
    """
    if not part.points:
        return
    certainty = np.linalg.inv(np.eye(part.points) + moments.between)
    certainty /= batch.kin_size[part.members][:, None, None]
    weighed = (certainty @ part.knots).reshape(-1, KNOTS.size)
    information[part.group] += weighed.T @ part.knots.reshape(-1, KNOTS.size)
    told[part.group] += weighed.T @ moments.middle.ravel()


def _widen(part: Part, shared: FloatArray, shared_cov: FloatArray) -> FloatArray:
    """Widen the runs of a part whose measurements lie outside their interval; factors of all its runs, (runs,).

    The interval is what library, PFI and GPU model expect of a run that has shown nothing yet. Beyond it, what was
    measured says that nothing known describes this run, and its own discrepancy grows by as much.
    """
    factor = np.ones(part.members.size)
    if not part.points:
        return factor
    expected = part.moments(shared, measured=False)
    cov = np.eye(part.points) + expected.between + part.knots @ shared_cov @ np.swapaxes(part.knots, 1, 2)
    off = expected.middle - part.knots @ shared
    square = (off * np.linalg.solve(cov, off[..., None])[..., 0]).sum(axis=1)
    allowed = _SURPRISE + np.maximum(part.real.sum(axis=1) - 1, 0)
    rows = np.flatnonzero(square > allowed)
    factor[rows] = np.minimum(np.sqrt(square[rows] / allowed[rows]), _MOST_WIDENED)
    part.widen(rows, factor[rows])
    return factor


def _softmax(log_weight: FloatArray) -> FloatArray:
    """Weights that sum to 1 along the last axis."""
    weight = np.exp(log_weight - log_weight.max(axis=-1, keepdims=True))
    result: FloatArray = weight / weight.sum(axis=-1, keepdims=True)
    return result
