"""What has been learned of runs: the mean loss, how sure it is, and the difference between two plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .curve import FloatArray
from .evidence import Batch
from .prior import GRID, Prior, interpolate
from .process import Discrepancy, knot_weights, matern


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """The learned curves of all runs; made by ``learner.learn``.

    ``candidate`` (runs, candidates): weights. ``mean_loss`` (runs, grid): what the library alone says. ``sd``
    (runs, points): prior spread of the runs' own discrepancies at their measured points. ``precision``: inverse
    covariance of those points. ``shared_mean`` (groups, knots), ``shared_cov``: discrepancies of the GPU models.
    """

    prior: Prior
    batch: Batch
    candidate: FloatArray
    mean_loss: FloatArray
    spreads: Discrepancy
    sd: FloatArray
    precision: FloatArray
    shared_mean: FloatArray
    shared_cov: FloatArray

    @property
    def informed(self) -> bool:
        """Whether anything is known that could tell one run from another: a PFI or a measurement of any of them."""
        return bool(self.batch.told.any() or self.batch.real.any())

    def mean(self) -> FloatArray:
        """Expected loss of each run on GRID, shape (runs, grid); not clipped, not monotone in general."""
        return self._mean_and_variance(want_variance=False)[0]

    def mean_and_sd(self) -> tuple[FloatArray, FloatArray]:
        """Expected loss on GRID and its standard deviation, each of shape (runs, grid)."""
        mean, variance = self._mean_and_variance(want_variance=True)
        return mean, np.sqrt(np.maximum(variance, 0.0))

    def gain(self, before: FloatArray, after: FloatArray, value: FloatArray) -> tuple[float, float]:
        """What going from some reductions to others saves in sum(value x loss), and its standard deviation.

        ``before`` and ``after`` (runs,): reductions; ``value`` (runs,): worth of each run's whole throughput. What
        runs of a GPU model have in common is counted as common.
        """
        x = np.stack((before, after), axis=1)
        own = self._own_covariance(x)
        pull = own @ self.precision
        step = pull[:, 0] - pull[:, 1]
        at_points = self.prior.at(self.batch.reduction)
        at_ends = self.prior.at(x)
        curves = at_ends[:, 0] - at_ends[:, 1] - np.einsum("rn,rnc->rc", step, at_points)
        middle = np.einsum("rc,rc->r", curves, self.candidate)
        between = np.einsum("rc,rc->r", curves**2, self.candidate) - middle**2
        knots = knot_weights(x)
        slope = knots[:, 0] - knots[:, 1]
        slope -= np.einsum("rn,rnk->rk", step, knot_weights(self.batch.reduction))
        group = self.batch.group
        mean = (
            middle + np.einsum("rn,rn->r", step, self.batch.loss) + (slope * self.shared_mean[group]).sum(1)
        )
        sd = self.spreads.run.sd(x, interpolate(self.mean_loss, x))
        rho = matern(before - after, self.spreads.run.length)
        process = sd[:, 0] ** 2 + sd[:, 1] ** 2 - 2 * sd[:, 0] * sd[:, 1] * rho
        process -= np.einsum("rn,rn->r", step, own[:, 0] - own[:, 1])
        # Runs of one kin err together, so their deviations add up and do not average out.
        deviation = value * np.sqrt(np.maximum(process, 0.0) + np.maximum(between, 0.0))
        variance = float((np.bincount(self.batch.kin, weights=deviation) ** 2).sum())
        for number in range(self.shared_mean.shape[0]):
            members = group == number
            common = value[members] @ slope[members]
            variance += float(common @ self.shared_cov[number] @ common)
        return float(value @ mean), float(np.sqrt(max(variance, 0.0)))

    def _own_covariance(self, x: FloatArray) -> FloatArray:
        """Covariance of the runs' own discrepancies at x (runs, m) with those at their points: (runs, m, points)."""
        sd = self.spreads.run.sd(x, interpolate(self.mean_loss, x))
        distance = x[:, :, None] - self.batch.reduction[:, None, :]
        result: FloatArray = (
            sd[:, :, None]
            * (self.sd * self.batch.real)[:, None, :]
            * matern(distance, self.spreads.run.length)
        )
        return result

    def _mean_and_variance(self, *, want_variance: bool) -> tuple[FloatArray, FloatArray]:
        x = np.broadcast_to(GRID, (self.batch.runs, GRID.size))
        own = self._own_covariance(x)
        pull = own @ self.precision
        at_points = self.prior.at(self.batch.reduction)
        expected = np.einsum("rnc,rc->rn", at_points, self.candidate)
        table = self.prior.losses.T
        middle = self.candidate @ table - np.einsum("rgn,rn->rg", pull, expected)
        slope = knot_weights(x) - pull @ knot_weights(self.batch.reduction)
        group = self.batch.group
        mean = middle + np.einsum("rgn,rn->rg", pull, self.batch.loss)
        mean = mean + np.einsum("rgk,rk->rg", slope, self.shared_mean[group])
        if not want_variance:
            return mean, np.zeros_like(mean)
        sd = self.spreads.run.sd(GRID, self.mean_loss)
        process = np.maximum(sd**2 - np.einsum("rgn,rgn->rg", pull, own), 0.0)
        # Second moments of K_k(x) - pull K_k(X) over the candidates, without a table for each run.
        square = self.candidate @ table**2
        weighted = at_points * self.candidate[:, None, :]
        cross = weighted @ table
        points = weighted @ np.swapaxes(at_points, 1, 2)
        second = (
            square
            - 2 * np.einsum("rgn,rng->rg", pull, cross)
            + np.einsum("rgn,rnm,rgm->rg", pull, points, pull)
        )
        between = np.maximum(second - middle**2, 0.0)
        shared = np.einsum("rgi,rij,rgj->rg", slope, self.shared_cov[group], slope)
        return mean, process + between + shared
