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
from .evidence import Batch, RunEvidence, pack
from .posterior import Posterior
from .prior import GRID, PFI_MODEL_SD, Prior, interpolate
from .process import KNOTS, SHARING, Discrepancy, knot_covariance, knot_weights, matern

_PASSES: Final = 3


def learn(
    prior: Prior,
    runs: Sequence[RunEvidence],
    *,
    log_weight: FloatArray | None = None,
    spreads: Discrepancy = SHARING,
) -> Posterior:
    """The posterior of all runs' curves. ``log_weight`` (runs, candidates) replaces the prior's own weights.

    Candidates and the GPU models' discrepancies explain the same residuals, so each is fitted in turn, three times.
    Linear in runs, and in library curves.
    """
    batch = pack(runs)
    base = np.broadcast_to(prior.log_weight if log_weight is None else log_weight, (batch.runs, prior.size))
    mean_loss = _softmax(base) @ prior.losses.T
    sd = spreads.run.sd(batch.reduction, interpolate(mean_loss, batch.reduction))
    # A handful of points each: the inverse is as good as solving, and is needed for every candidate.
    whiten = np.linalg.inv(np.linalg.cholesky(_own_covariance(batch, sd, spreads)))
    white = whiten @ (batch.loss[..., None] - prior.at(batch.reduction))
    white_knots = whiten @ knot_weights(batch.reduction)
    prior_cov = _prior_covariances(batch, mean_loss, spreads)
    weight = _with_pfi(prior, runs, base)
    mean, cov = np.zeros(prior_cov.shape[:2]), prior_cov
    for _ in range(_PASSES):
        shift = np.einsum("rnk,rk->rn", white_knots, mean[batch.group])
        misfit = ((white - shift[..., None]) ** 2).sum(axis=1)
        candidate = _softmax(weight - 0.5 * misfit)
        mean, cov = _fit_shared(batch, white, candidate, white_knots, prior_cov)
    return Posterior(
        prior=prior,
        batch=batch,
        candidate=candidate,
        mean_loss=mean_loss,
        spreads=spreads,
        sd=sd,
        precision=np.swapaxes(whiten, 1, 2) @ whiten,
        shared_mean=mean,
        shared_cov=cov,
    )


def _with_pfi(prior: Prior, runs: Sequence[RunEvidence], log_weight: FloatArray) -> FloatArray:
    """Log weights (runs, candidates) after what the PFI of each run says; one grid of reductions at a time."""
    weight = log_weight.copy()
    by_grid: dict[tuple[float, ...], list[int]] = {}
    for i, run in enumerate(runs):
        if run.pfi is not None:
            by_grid.setdefault(run.pfi.reductions, []).append(i)
    for reductions, members in by_grid.items():
        value = np.array([_told(runs[i]) for i in members])
        expected = prior.pfi(reductions)
        sd = np.hypot(value[:, 1], PFI_MODEL_SD)[:, None]
        weight[members] -= 0.5 * ((value[:, :1] - expected) / sd) ** 2
    return weight


def _told(run: RunEvidence) -> tuple[float, float]:
    assert run.pfi is not None
    return run.pfi.value, run.pfi.sd


def _own_covariance(batch: Batch, sd: FloatArray, spreads: Discrepancy) -> FloatArray:
    """Covariance of a run's points round its curve and its GPU model's discrepancy: (runs, points, points)."""
    distance = batch.reduction[:, :, None] - batch.reduction[:, None, :]
    own = sd[:, :, None] * sd[:, None, :] * matern(distance, spreads.run.length)
    real = batch.real[:, :, None] & batch.real[:, None, :]
    return np.where(real, own, 0.0) + batch.noise_cov


def _prior_covariances(batch: Batch, mean_loss: FloatArray, spreads: Discrepancy) -> FloatArray:
    """Covariance of each GPU model's discrepancy at the knots before anything is measured: (groups, knots, knots)."""
    found = np.empty((len(batch.groups), KNOTS.size, KNOTS.size))
    for number in range(len(batch.groups)):
        of_group = mean_loss[batch.group == number].mean(axis=0)
        found[number] = knot_covariance(spreads.gpu_model, np.interp(KNOTS, GRID, of_group))
    return found


def _fit_shared(
    batch: Batch, white: FloatArray, candidate: FloatArray, white_knots: FloatArray, prior_cov: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Ridge regression of each GPU model's discrepancy on what its runs' curves leave unexplained.

    Mean (groups, knots) and covariance (groups, knots, knots). Which candidate is right is itself uncertain: that
    spread is noise here. Kin deviate alike, so together they weigh as one.
    """
    middle = np.einsum("rnc,rc->rn", white, candidate)
    mean, cov = np.zeros(prior_cov.shape[:2]), prior_cov.copy()
    for number in range(len(batch.groups)):
        members = batch.group == number
        if not batch.real[members].any():
            continue
        centred = white[members] - middle[members][..., None]
        between = (centred * candidate[members][:, None, :]) @ np.swapaxes(centred, 1, 2)
        certainty = np.linalg.inv(np.eye(between.shape[-1]) + between)
        certainty /= batch.kin_size[members][:, None, None]
        basis = white_knots[members]
        information = np.einsum("rni,rnm,rmj->ij", basis, certainty, basis, optimize=True)
        told = np.einsum("rni,rnm,rm->i", basis, certainty, middle[members], optimize=True)
        # (P^-1 + I)^-1 without inverting P, which has a zero at reduction 0.
        cov[number] = np.linalg.solve(np.eye(KNOTS.size) + prior_cov[number] @ information, prior_cov[number])
        mean[number] = cov[number] @ told
    return mean, cov


def _softmax(log_weight: FloatArray) -> FloatArray:
    """Weights that sum to 1 along the last axis."""
    weight = np.exp(log_weight - log_weight.max(axis=-1, keepdims=True))
    result: FloatArray = weight / weight.sum(axis=-1, keepdims=True)
    return result
