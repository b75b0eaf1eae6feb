"""What has been learned of runs: the mean loss, how sure it is, and the difference between two plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from .curve import BoolArray, FloatArray, IntArray
from .evidence import Batch
from .prior import BLOCK, GRID, Prior, Table, combined, interpolate
from .process import Discrepancy, knot_weights, matern

_KNOTS_ON_GRID: Final = knot_weights(GRID)


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """The losses of one run at a few reductions together: a mixture of normal distributions of one covariance.

    ``weight`` (candidates,), ``mean`` (candidates, points), ``cov`` (points, points); the losses are not clipped.
    """

    weight: FloatArray
    mean: FloatArray
    cov: FloatArray

    def samples(self, place: FloatArray, normal: FloatArray) -> FloatArray:
        """Losses (samples, points), from random numbers: ``place`` (samples,) uniform, ``normal`` (samples, points).

        ``place`` (0..1) says by the candidates' weights from which each sample comes.
        """
        total = np.cumsum(self.weight)
        which = np.minimum(np.searchsorted(total, place * total[-1]), total.size - 1)
        value, vector = np.linalg.eigh(
            self.cov
        )  # at reduction 0 there is no variance, so it has no Cholesky root
        root = vector * np.sqrt(np.maximum(value, 0.0))
        result: FloatArray = self.mean[which] + normal @ root.T
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """The learned curves of all runs; made by ``learner.learn``.

    ``candidate`` (runs, candidates): weights. ``mean_loss`` (runs, grid): what the library alone says. ``known``
    (runs,): whether the library has a curve for the run at all; without one its curve here is a guess. ``widening``
    (runs,): factors on the spread of the runs' own discrepancies. ``precision``: inverse covariance of what was
    measured round curves and GPU models. ``unexplained`` (runs, points): measured less what the candidates expect.
    ``shared_mean`` (groups, knots), ``shared_cov``: discrepancies of the GPU models.
    """

    prior: Prior
    batch: Batch
    candidate: Table
    mean_loss: FloatArray
    known: BoolArray
    spreads: Discrepancy
    widening: FloatArray
    precision: FloatArray
    unexplained: FloatArray
    shared_mean: FloatArray
    shared_cov: FloatArray

    @property
    def informed(self) -> bool:
        """Whether anything is known that could tell one run from another: a PFI or a measurement of any of them."""
        return bool(self.batch.told.any() or self.batch.real.any())

    @property
    def kinds(self) -> int:
        """How many different kinds of work there are: kin count as one."""
        return int(np.unique(self.batch.kin).size)

    def take(self, rows: IntArray) -> Posterior:
        """The same knowledge of chosen runs: ``rows`` (n,) are their places, in any order, also repeated.

        What the other runs have taught stays in it, for GPU models keep their discrepancies. A run taken twice is its
        own kin, so that in ``gain`` its errors add up. Raises IndexError on a place that is none.
        """
        return replace(
            self,
            batch=self.batch.take(rows),
            candidate=self.candidate[rows],
            mean_loss=self.mean_loss[rows],
            known=self.known[rows],
            widening=self.widening[rows],
            precision=self.precision[rows],
            unexplained=self.unexplained[rows],
        )

    def mean(self) -> FloatArray:
        """Expected loss of each run on GRID, shape (runs, grid); not clipped, not monotone in general."""
        shared = self.shared_mean @ _KNOTS_ON_GRID.T
        result = np.empty((self.batch.runs, GRID.size))
        for rows in self._blocks(GRID.size * (10 + self.batch.reduction.shape[1])):
            own = (self._on_grid(rows)[0] @ self._pulling(rows)[..., None])[..., 0]
            result[rows] = self.candidate[rows] @ self.prior.losses.T + own + shared[self.batch.group[rows]]
        return result

    def mean_and_sd(self) -> tuple[FloatArray, FloatArray]:
        """Expected loss on GRID and its standard deviation, each of shape (runs, grid)."""
        sd = np.empty((self.batch.runs, GRID.size))
        # Round the library's mean, for differences of great squares leave nothing of a small variance.
        table = self.prior.losses - self.prior.losses.mean(axis=1, keepdims=True, dtype=np.float64)
        for rows in self._blocks(self.prior.size * (1 + self.batch.reduction.shape[1])):
            own, own_sd = self._on_grid(rows)
            pull = own @ self.precision[rows]
            process = np.maximum(own_sd**2 - (pull * own).sum(axis=2), 0.0)
            slope = _KNOTS_ON_GRID - pull @ knot_weights(self.batch.reduction[rows])
            shared = ((slope @ self.shared_cov[self.batch.group[rows]]) * slope).sum(axis=2)
            sd[rows] = np.sqrt(process + self._between(rows, pull, table) + np.maximum(shared, 0.0))
        return self.mean(), sd

    def joint(self, row: int, reduction: FloatArray) -> Joint:
        """What is known of one run's losses at some reductions (points,), and how they err together."""
        rows, x = slice(row, row + 1), reduction[None]
        sd = self._own_sd(rows, x, interpolate(self.mean_loss[rows], x))
        own = self._own_covariance(rows, x, sd)[0]
        pull, points = own @ self.precision[row], self.batch.reduction[row]
        slope = knot_weights(reduction) - pull @ knot_weights(points)
        group = self.batch.group[row]
        distance = reduction[:, None] - reduction[None, :]
        cov = sd[0, :, None] * sd[0, None, :] * matern(distance, self.spreads.run.length) - pull @ own.T
        factors = np.concatenate((np.eye(reduction.size), -pull), axis=1)
        curves = combined(self.prior.losses, factors[None], np.concatenate((reduction, points))[None])[0]
        return Joint(
            weight=self.candidate[row].astype(np.float64),
            mean=curves.T + (pull @ self.batch.loss[row] + slope @ self.shared_mean[group]),
            cov=cov + slope @ self.shared_cov[group] @ slope.T,
        )

    def gain(self, before: FloatArray, after: FloatArray, value: FloatArray) -> tuple[float, float]:
        """What going from some reductions to others saves in sum(value x loss), and its standard deviation.

        ``before`` and ``after`` (runs,): reductions; ``value`` (runs,): worth of each run's whole throughput. What
        runs of a GPU model have in common is counted as common, and so is what kin have.
        """
        mean, variance = np.empty(self.batch.runs), np.empty(self.batch.runs)
        common = np.zeros_like(self.shared_mean)
        for rows in self._blocks(self.prior.size * (3 + 2 * self.batch.reduction.shape[1])):
            mean[rows], variance[rows], slope = self._saved(rows, before[rows], after[rows])
            np.add.at(common, self.batch.group[rows], value[rows, None] * slope)
        # Runs of one kin err together, so their deviations add up and do not average out.
        kin = np.bincount(self.batch.kin, weights=value * np.sqrt(variance))
        shared = (common[:, None, :] @ self.shared_cov @ common[:, :, None]).sum()
        saved = float(value @ mean + (common * self.shared_mean).sum())
        return saved, float(np.sqrt((kin**2).sum() + max(float(shared), 0.0)))

    def _saved(
        self, rows: slice, before: FloatArray, after: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Loss before less loss after of some runs: mean and variance (runs,) less what is the GPU model's.

        The third, (runs, knots), says how that depends on the GPU model's discrepancy.
        """
        ends, points = np.stack((before, after), axis=1), self.batch.reduction[rows]
        sd = self._own_sd(rows, ends, interpolate(self.mean_loss[rows], ends))
        own = self._own_covariance(rows, ends, sd)
        own_step = own[:, 0] - own[:, 1]
        pull = (own_step[:, None, :] @ self.precision[rows])[:, 0]
        moves = (before != after).astype(np.float64)  # who stays where it is gains nothing, to the last digit
        factors = np.column_stack((moves, -moves, -pull))[:, None, :]
        x = np.concatenate((ends, points), axis=1)
        curves = combined(self.prior.losses, factors, x)[:, 0]
        middle = np.einsum("rc,rc->r", curves, self.candidate[rows])
        curves -= middle[:, None]
        between = np.einsum("rc,rc,rc->r", curves, curves, self.candidate[rows])
        rho = matern(before - after, self.spreads.run.length)
        process = (
            sd[:, 0] ** 2 + sd[:, 1] ** 2 - 2 * sd[:, 0] * sd[:, 1] * rho - (pull * own_step).sum(axis=1)
        )
        mean = middle + (pull * self.batch.loss[rows]).sum(axis=1)
        return mean, np.maximum(process, 0.0) + between, (factors @ knot_weights(x))[:, 0]

    def _blocks(self, figures_a_run: int) -> Iterator[slice]:
        """The runs in blocks that stay in a core's cache."""
        length = max(1, BLOCK // figures_a_run)
        for begin in range(0, self.batch.runs, length):
            yield slice(begin, min(begin + length, self.batch.runs))

    def _own_sd(self, rows: slice, x: FloatArray, mean_loss: FloatArray) -> FloatArray:
        """Spread of runs' own discrepancies at x (runs, m), where the library's mean is ``mean_loss``."""
        result: FloatArray = self.widening[rows, None] * self.spreads.run.sd(x, mean_loss)
        return result

    def _own_covariance(self, rows: slice, x: FloatArray, sd: FloatArray) -> FloatArray:
        """Covariance of runs' own discrepancies at x (runs, m), of spread ``sd``, with those at their points.

        Shape (runs, m, points).
        """
        points = self.batch.reduction[rows]
        at_points = (
            self._own_sd(rows, points, interpolate(self.mean_loss[rows], points)) * self.batch.real[rows]
        )
        result = matern(x[:, :, None] - points[:, None, :], self.spreads.run.length)
        result *= sd[:, :, None]
        result *= at_points[:, None, :]
        return result

    def _on_grid(self, rows: slice) -> tuple[FloatArray, FloatArray]:
        """``_own_covariance`` on GRID, and the spread there, (runs, grid)."""
        x = np.broadcast_to(GRID, (rows.stop - rows.start, GRID.size))
        sd = self._own_sd(rows, x, self.mean_loss[rows])
        return self._own_covariance(rows, x, sd), sd

    def _pulling(self, rows: slice) -> FloatArray:
        """What the points of each run pull with, (runs, points): what neither candidates nor GPU model explain."""
        knots = knot_weights(self.batch.reduction[rows])
        left = self.unexplained[rows] - (knots @ self.shared_mean[self.batch.group[rows]][..., None])[..., 0]
        result: FloatArray = (self.precision[rows] @ left[..., None])[..., 0]
        return result

    def _between(self, rows: slice, pull: FloatArray, table: FloatArray) -> FloatArray:
        """Variance of K_k(x) - pull K_k(X) over the candidates k, (runs, grid), without a table for each run.

        ``table`` (grid, candidates): their losses, each row less any constant.
        """
        weight = self.candidate[rows].astype(np.float64)
        points = self.batch.reduction[rows]
        factors = np.broadcast_to(np.eye(points.shape[1]), (*points.shape, points.shape[1]))
        at_points = combined(table, factors, points)
        weighted = at_points * weight[:, None, :]
        middle = weight @ table.T - (pull @ weighted.sum(axis=2)[..., None])[..., 0]
        flat = weighted.reshape(points.size, table.shape[1])  # one product, not one a run
        cross = (flat @ table.T).reshape(*points.shape, table.shape[0])
        inner = weighted @ np.swapaxes(at_points, 1, 2)
        second = weight @ (table**2).T
        second -= 2 * (pull * np.swapaxes(cross, 1, 2)).sum(axis=2)
        second += ((pull @ inner) * pull).sum(axis=2)
        result: FloatArray = np.maximum(second - middle**2, 0.0)
        return result
