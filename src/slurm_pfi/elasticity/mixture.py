"""How well each candidate curve explains what some runs have shown, and how far the candidates differ there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .curve import FloatArray, IntArray
from .evidence import Batch, RunEvidence
from .prior import BLOCK, PFI_MODEL_SD, Prior, Table, combined, interpolate
from .process import Spread, knot_weights, matern


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """A mixture of candidates as seen at measured points, in whitened units.

    ``weight`` (runs, candidates) sums to 1; ``middle`` (runs, points): measured less what the mixture expects;
    ``between`` (runs, points, points): covariance of the candidates round that.
    """

    weight: Table
    middle: FloatArray
    between: FloatArray


class Part:
    """Some runs of one GPU model, few enough to stay in a core's cache, and all candidates at their points.

    Figures at the points are whitened: multiplied by an inverse root of the covariance that noise, errors of
    baselines and the runs' own discrepancies have there. ``members`` (runs,): places in the batch. ``columns``: the
    candidates that count for any of them. ``sd`` (runs, points): spread of their own discrepancies. ``knots`` (runs,
    points, knots): weights of the discrepancy of their GPU model. ``group``: that GPU model's number.
    """

    def __init__(
        self,
        prior: Prior,
        batch: Batch,
        members: IntArray,
        mean_loss: FloatArray,
        log_weight: FloatArray,
        spread: Spread,
    ) -> None:
        """``mean_loss`` (runs, grid), ``log_weight`` (runs, candidates): the library's, for the members."""
        counts = np.isfinite(log_weight).any(axis=0)
        self.columns: slice | IntArray = slice(None) if counts.all() else np.flatnonzero(counts)
        self.members = members
        self.group = int(batch.group[members[0]])
        self._losses: Table = prior.losses[:, self.columns]
        self._log_weight: Table = log_weight[:, self.columns].astype(np.float32)
        points = int(batch.real[members].sum(axis=1).max())
        self.real = batch.real[members, :points]
        self._reduction, self._loss = batch.reduction[members, :points], batch.loss[members, :points]
        self._noise = batch.noise_cov[members, :points, :points]
        self._expected = interpolate(mean_loss, self._reduction)
        self._length = spread.length
        self.sd = np.where(self.real, spread.sd(self._reduction, self._expected), 0.0)
        shape = self._log_weight.shape
        self.root = np.empty((shape[0], points, points))
        self.whiten = np.empty_like(self.root)
        self.knots = knot_weights(self._reduction)
        self._off = np.empty((shape[0], points))
        # The library's mean less each candidate; below it a row of ones, so that one product gives all moments.
        self._away: Table = np.ones((shape[0], points + 1, shape[1]), dtype=np.float32)
        self._misfit: Table = np.empty(shape, dtype=np.float32)
        self._lay(np.arange(members.size))

    @property
    def points(self) -> int:
        return int(self._reduction.shape[1])

    def tell_pfi(self, prior: Prior, runs: Sequence[RunEvidence]) -> None:
        """Weigh the candidates by the PFI of the members, where one is known; ``runs`` are those of the batch."""
        rows, told = [], []
        for row, place in enumerate(self.members.tolist()):
            pfi = runs[place].pfi
            if pfi is not None:
                rows.append(row)
                told.append(pfi)
        if not rows:
            return
        expected = prior.pfi([pfi.reductions for pfi in told])[:, self.columns]
        value = np.array([pfi.value for pfi in told], dtype=np.float32)[:, None]
        certainty = 1.0 / np.hypot([pfi.sd for pfi in told], PFI_MODEL_SD)
        expected -= value
        expected *= certainty.astype(np.float32)[:, None]
        self._log_weight[rows] -= 0.5 * expected**2

    def widen(self, rows: IntArray, factor: FloatArray) -> None:
        """Multiply the spread of some members' own discrepancies; ``rows`` (n,) count within the part."""
        self.sd[rows] *= factor[:, None]
        self.knots[rows] = knot_weights(self._reduction[rows])
        self._lay(rows)

    def moments(self, shared: FloatArray, *, measured: bool = True) -> Moments:
        """The mixture given the mean discrepancy of the GPU model, (knots,); without the measurements on demand."""
        if not self.points:
            return Moments(_softmax(self._log_weight.copy()), self._off, np.empty((*self._off.shape, 0)))
        away = self._away[:, : self.points]
        if measured:
            off = (self._off - self.knots @ shared).astype(np.float32)
            weight = self._log_weight - self._misfit
            weight -= (off[:, None, :] @ away)[:, 0]
        else:
            weight = self._log_weight.copy()
        weight = _softmax(weight)
        moment = (weight[:, None, :] * away) @ np.swapaxes(self._away, 1, 2)
        first = moment[..., -1].astype(np.float64)
        between = moment[..., :-1] - first[..., :, None] * first[..., None, :]
        return Moments(weight, self._off + first, between)

    def _lay(self, rows: IntArray) -> None:
        """Whiten what some members have shown."""
        if not self.points:
            return
        x, sd = self._reduction[rows], self.sd[rows]
        own = sd[:, :, None] * sd[:, None, :] * matern(x[:, :, None] - x[:, None, :], self._length)
        root = np.linalg.cholesky(own + self._noise[rows])
        # A handful of points each: the inverse is as good as solving, and is needed for every candidate.
        whiten = np.linalg.inv(root)
        self.root[rows], self.whiten[rows] = root, whiten
        self.knots[rows] = whiten @ self.knots[rows]
        self._off[rows] = (whiten @ (self._loss[rows] - self._expected[rows])[..., None])[..., 0]
        away = combined(self._losses, -whiten, x)
        away += (whiten @ self._expected[rows][..., None]).astype(np.float32)
        self._away[rows, : self.points] = away
        self._misfit[rows] = 0.5 * np.einsum("rnc,rnc->rc", away, away)


def _softmax(log_weight: Table) -> Table:
    """Weights that sum to 1 along each row, in place of their logarithms."""
    log_weight -= log_weight.max(axis=1, keepdims=True)
    np.exp(log_weight, out=log_weight)
    log_weight /= log_weight.sum(axis=1, keepdims=True)
    return log_weight


def parts(
    prior: Prior, batch: Batch, mean_loss: FloatArray, log_weight: FloatArray, spread: Spread
) -> Iterator[Part]:
    """The batch in parts, of one GPU model each; arguments as of Part, but of all runs.

    Runs with as many measurements go together, for all rows of a part are as long as its longest.
    """
    count = batch.real.sum(axis=1)
    order = np.lexsort((count, batch.group))
    while order.size:
        members = order[batch.group[order] == batch.group[order[0]]]
        for last in (
            0,
            -1,
        ):  # as many as there is room for, if they are as long as the first, then as the last
            room = BLOCK // (prior.size * (1 + int(count[members[last]])))
            members = members[: max(1, room)]
        yield Part(prior, batch, members, mean_loss[members], log_weight[members], spread)
        order = order[members.size :]
