"""How well each candidate curve explains what runs have shown, and how far the candidates differ there.

The figures here are runs x points x candidates, so this is where the time goes: the runs are handled in parts that
stay in a core's cache, and what is small is done by the learner for all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .curve import FloatArray, IntArray
from .evidence import Batch, RunEvidence
from .prior import BLOCK, PFI_MODEL_SD, Prior, Table, combined


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """What a mixture of candidates expects at measured points, in whitened units, less the library's mean there.

    ``mean`` (runs, points), ``between`` (runs, points, points): covariance of the candidates round it.
    """

    mean: FloatArray
    between: FloatArray


class Mixture:
    """Weights of all candidates for the runs of a batch.

    Figures at measured points are whitened: multiplied by a root of the inverse of the covariance that noise, errors
    of baselines and the runs' own discrepancies have there. ``expected`` (runs, points): the library's mean.
    """

    def __init__(self, prior: Prior, batch: Batch, log_weight: FloatArray, expected: FloatArray) -> None:
        """``log_weight`` (runs, candidates): before any evidence."""
        self._prior = prior
        self._batch = batch
        self._expected = expected
        self._parts = [_Part(prior, batch, members, log_weight[members]) for members in _split(prior, batch)]

    def tell_pfi(self, runs: Sequence[RunEvidence]) -> None:
        """Weigh the candidates by the PFI of the runs, where one is known; ``runs`` are those of the batch."""
        for part in self._parts:
            part.tell_pfi(self._prior, [runs[place] for place in part.members])

    def whiten(self, whiten: FloatArray, changed: IntArray | None = None) -> None:
        """Take roots of the inverse covariances, (runs, points, points); only those of the runs ``changed``."""
        wanted = np.full(self._batch.runs, changed is None)
        if changed is not None:
            wanted[changed] = True
        for part in self._parts:
            rows = np.flatnonzero(wanted[part.members])
            if part.points and rows.size:
                at = np.s_[part.members[rows], : part.points]
                root = whiten[part.members[rows], : part.points, : part.points]
                part.lay(rows, root, self._batch.reduction[at], self._expected[at])

    def moments(self, off: FloatArray | None, weights: Table | None = None) -> Moments:
        """Weigh the candidates and say what they expect.

        ``off`` (runs, points): what was measured less the library's mean and the GPU model's discrepancy; None leaves
        the measurements out. ``weights`` (runs, candidates) is filled with the weights where it is given.
        """
        runs, points = self._batch.real.shape
        mean, between = np.zeros((runs, points)), np.zeros((runs, points, points))
        for part in self._parts:
            at, width = part.members, part.points
            weight = part.weights(None if off is None else off[at, :width])
            if weights is not None:
                weights[at if isinstance(part.columns, slice) else at[:, None], part.columns] = weight
            if width:
                mean[at, :width], between[at, :width, :width] = part.moments(weight)
        return Moments(mean, between)


class _Part:
    """Some runs of one GPU model. ``members`` (runs,): their places in the batch."""

    def __init__(self, prior: Prior, batch: Batch, members: IntArray, log_weight: FloatArray) -> None:
        counts = np.isfinite(log_weight).any(axis=0)
        self.columns: slice | IntArray = slice(None) if counts.all() else np.flatnonzero(counts)
        self.members = members
        self.points = int(batch.real[members].sum(axis=1).max())
        self._losses: Table = prior.losses[:, self.columns]
        self._log_weight: Table = log_weight[:, self.columns].astype(np.float32)
        shape = self._log_weight.shape
        self._away: Table = np.empty((shape[0], self.points, shape[1]), dtype=np.float32)
        """Candidates at the points of each run, less the library's mean."""
        self._misfit: Table = np.empty(shape if self.points else (0, 0), dtype=np.float32)

    def tell_pfi(self, prior: Prior, runs: Sequence[RunEvidence]) -> None:
        told = [(row, run.pfi) for row, run in enumerate(runs) if run.pfi is not None]
        if not told:
            return
        miss = prior.pfi([pfi.reductions for _, pfi in told])[:, self.columns]
        miss -= np.array([pfi.value for _, pfi in told], dtype=np.float32)[:, None]
        certainty = 1.0 / np.hypot([pfi.sd for _, pfi in told], PFI_MODEL_SD)
        miss *= certainty.astype(np.float32)[:, None]
        miss *= miss
        miss *= np.float32(0.5)
        self._log_weight[slice(None) if len(told) == len(runs) else [row for row, _ in told]] -= miss

    def lay(self, rows: IntArray, whiten: FloatArray, reduction: FloatArray, expected: FloatArray) -> None:
        """Whiten the candidates at the points of some of the runs; ``rows`` (n,) count within the part."""
        away = combined(self._losses, whiten, reduction)
        away -= (whiten @ expected[..., None]).astype(np.float32)
        self._away[rows] = away
        self._misfit[rows] = 0.5 * np.einsum("rnc,rnc->rc", away, away)

    def weights(self, off: FloatArray | None) -> Table:
        """Weights (runs, candidates) that sum to 1."""
        if off is None or not self.points:
            weight = self._log_weight.copy()
        else:  # of the squares of off - away, what is the same for all candidates is left out
            weight = (off[:, None, :].astype(np.float32) @ self._away)[:, 0]
            weight -= self._misfit
            weight += self._log_weight
        weight -= weight.max(axis=1, keepdims=True)
        np.exp(weight, out=weight)
        weight *= 1.0 / weight.sum(axis=1, keepdims=True)
        return weight

    def moments(self, weight: Table) -> tuple[FloatArray, FloatArray]:
        """Mean (runs, points) and covariance (runs, points, points) of the candidates, so weighed."""
        mean = (self._away @ weight[..., None])[..., 0].astype(np.float64)
        second = (weight[:, None, :] * self._away) @ np.swapaxes(self._away, 1, 2)
        return mean, second - mean[..., :, None] * mean[..., None, :]


def _split(prior: Prior, batch: Batch) -> Iterator[IntArray]:
    """The places of a batch's runs in parts, of one GPU model each.

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
        yield members
        order = order[members.size :]
