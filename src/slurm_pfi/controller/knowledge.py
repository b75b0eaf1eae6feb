"""What was learned of all runs at one time: their curves, how surely, and which cut that certifies. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np

from ..allocation.guard import Certified, InForce, guarded, renewed
from ..allocation.solve import Shares
from ..elasticity.curve import BoolArray, CurveError, FloatArray, IntArray
from ..elasticity.evidence import RunEvidence, pool_kin
from ..elasticity.floors import reach_of_one, upper_losses
from ..elasticity.index import SMALLEST_LOSS, Pfi
from ..elasticity.learned import learned_pfi, loss_at
from ..elasticity.learner import learn
from ..elasticity.names import gpu_key
from ..elasticity.posterior import Posterior
from ..elasticity.prior import GRID, Prior
from ..elasticity.process import FLOORS
from ..model import Run

Asked: TypeAlias = tuple[Run, str]
"""A run and its GPU model as the driver names it. A run that was not yet learned stands for its GPU model."""

KEPT_CUTS: Final = 64
"""Cuts that are remembered: a limit with many steps ahead is planned anew in every cycle."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldCut:
    """The cut that is in force, and whose it is, in its own order."""

    runs: tuple[Run, ...]
    cut: InForce

    def of(self, runs: tuple[Run, ...]) -> InForce:
        """The same for these runs: some have ended since, others have come."""
        if runs == self.runs:
            return self.cut
        was = dict(zip(self.runs, self.cut.cut.reduction.tolist(), strict=True))
        reduction = np.array([was.get(run, np.nan) for run in runs])
        return InForce(self.cut.need, replace(self.cut.cut, reduction=reduction))


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Made by ``learn_runs``; the same for everyone until the next learning.

    ``sharing`` decides who gives how much, ``upper`` (rows, grid) what may be promised: losses that are passed only
    with the error that a floor allows. ``rows``: where a run stands; ``strangers``: where a GPU model's unknown run
    stands, "" any other model's. ``unlikely``: where what it was learned from is hardly true.
    """

    number: int
    sharing: Posterior
    mean: FloatArray
    sd: FloatArray
    upper: FloatArray
    deepest: FloatArray
    unlikely: BoolArray
    rows: Mapping[Run, int]
    strangers: Mapping[str, int]
    _cuts: OrderedDict[tuple[bytes, ...], Certified] = field(init=False, default_factory=OrderedDict)
    _pfis: dict[tuple[Run, str, int, tuple[float, ...]], Pfi | None] = field(init=False, default_factory=dict)

    def row(self, run: Run, gpu_model: str) -> int:
        """Where to look for this run."""
        found = self.rows.get(run)
        if found is not None:
            return found
        return self.strangers.get(gpu_key(gpu_model), self.strangers[""])

    def is_learned(self, run: Run) -> bool:
        """Whether anything measured of this run, or of its kin, went into its curve and is believed."""
        row = self.rows.get(run)
        return row is not None and bool(self.sharing.batch.real[row].any()) and not self.unlikely[row]

    def is_unlikely(self, run: Run) -> bool:
        """Whether this run told more loss than can be believed, so that nothing is decided by it."""
        row = self.rows.get(run)
        return row is not None and bool(self.unlikely[row])

    def losses(self, asked: Sequence[Asked], reductions: Sequence[float]) -> tuple[FloatArray, FloatArray]:
        """Expected loss of each run at its reduction (0..1), and its standard deviation; shapes (runs,)."""
        return self._losses(self._rows(asked), reductions)

    def expected(self, gpu_model: str, reduction: float) -> tuple[float, float]:
        """The same of a run on this GPU model that was never measured."""
        row = self.strangers.get(gpu_key(gpu_model), self.strangers[""])
        mean, sd = self._losses(np.array([row]), [reduction])
        return float(mean[0]), float(sd[0])

    def _losses(self, rows: IntArray, reductions: Sequence[float]) -> tuple[FloatArray, FloatArray]:
        x = np.asarray(reductions, dtype=np.float64)
        mean, sd = loss_at((self.mean[rows], self.sd[rows]), np.clip(x, 0.0, 1.0))
        return np.where(x > 0, mean, 0.0), np.where(x > 0, sd, 0.0)

    def greatest_reduction(self, run: Run, gpu_model: str, max_loss: float) -> float:
        """The largest reduction (0..1) whose loss stays within ``max_loss`` (0..1) as a floor promises it."""
        return reach_of_one(self.upper[self.row(run, gpu_model)], max_loss)

    def pfi(self, run: Run, gpu_model: str, draw_mw: int, grid_w: tuple[float, ...]) -> Pfi | None:
        """The run's PFI on a grid of caps (W), with its interval; None where the grid costs it nothing."""
        key = (run, gpu_model, draw_mw, grid_w)
        if key not in self._pfis:
            measured = self.is_learned(run)
            try:
                self._pfis[key] = learned_pfi(
                    self.sharing,
                    self.row(run, gpu_model),
                    grid_w,
                    draw_mw / 1000,
                    gpu_model=gpu_model if measured else "",
                    source="measured" if measured else "default",
                )
            except CurveError:
                self._pfis[key] = None
        return self._pfis[key]

    def indices(
        self, asked: Sequence[Asked], draw_mw: Sequence[int], grid_w: Sequence[float]
    ) -> list[float | None]:
        """PFI of many runs on one grid of caps (W), from their expected losses alone; None where none is defined."""
        if not asked:
            return []
        draw_w = np.asarray(draw_mw, dtype=np.float64)[:, None] / 1000
        x = np.clip(1.0 - np.asarray(grid_w, dtype=np.float64)[None, :] / draw_w, 0.0, 1.0)
        loss = np.array(
            [np.interp(at, GRID, row) for at, row in zip(x, self.mean[self._rows(asked)], strict=True)]
        )
        used = (loss >= SMALLEST_LOSS) & (x > 0)
        ratio = np.divide(x, loss, out=np.zeros_like(x), where=used)
        count = used.sum(axis=1)
        return [float(total / n) if n else None for total, n in zip(ratio.sum(axis=1), count, strict=True)]

    def cut(
        self, asked: Sequence[Asked], shares: Shares, need: float, before: InForce | None = None
    ) -> Certified:
        """The certified cut of these runs (``allocation.guard``); equal while nothing tells them apart.

        ``before``: the cut of the same runs that is in force. It stays as long as another one is not worth the move.
        """
        rows = self._rows(asked)
        key = (
            rows.tobytes(),
            *(array.tobytes() for array in (shares.watts, shares.value, shares.start, shares.end)),
            np.float64(need).tobytes(),
            *(() if before is None else (before.cut.reduction.tobytes(), np.float64(before.need).tobytes())),
        )
        known = self._cuts.get(key)
        if known is None:
            # A run that is no row of its own was not measured: it may stand in several places at once.
            curves = self.sharing.take(rows)
            # Who tells what can hardly be is cut as if it had told nothing, and as everybody: neither more nor less.
            curves = replace(curves, known=curves.known & ~self.unlikely[rows])
            deepest = np.where(self.unlikely[rows], 0.0, self.deepest[rows])
            known = (
                guarded(shares, curves, deepest, need)
                if before is None
                else renewed(shares, curves, deepest, need, self.cut(asked, shares, need), before)
            )
            self._cuts[key] = known
            if len(self._cuts) > KEPT_CUTS:
                self._cuts.popitem(last=False)
        return known

    def _rows(self, asked: Sequence[Asked]) -> IntArray:
        return np.array([self.row(run, model) for run, model in asked], dtype=np.intp)


def learn_runs(prior: Prior, found: Sequence[tuple[Run, RunEvidence]], number: int) -> Knowledge:
    """Learn the curves of all runs together, and what is expected of a run that nobody knows yet.

    Runs of one kind of work lend each other their measurements. Linear in runs; some 0.2 ms a run, twice.
    """
    # One spelling of each GPU model: by another one a stranger would know nothing of what its like have shown.
    own = tuple(replace(evidence, gpu_model=gpu_key(evidence.gpu_model)) for _, evidence in found)
    models = sorted({evidence.gpu_model for evidence in own} | {""})
    known = tuple(pool_kin(own)) + tuple(RunEvidence(model) for model in models)
    sharing = learn(prior, known)
    mean, sd = sharing.mean_and_sd()
    return Knowledge(
        number=number,
        sharing=sharing,
        mean=np.maximum.accumulate(np.clip(mean, 0.0, 1.0), axis=1),
        sd=sd,
        upper=_promised(prior, known),
        deepest=np.array([evidence.deepest for evidence in known]),
        unlikely=np.array([evidence.unlikely for evidence in known], dtype=np.bool_),
        rows={run: row for row, (run, _) in enumerate(found)},
        strangers={model: len(own) + i for i, model in enumerate(models)},
    )


def _promised(prior: Prior, known: Sequence[RunEvidence]) -> FloatArray:
    """What a floor has to reckon with, (rows, grid).

    Others' measurements never put the floor of a run that has shown nothing lower: half a site of counters that run
    ahead would else cost it more than it allows.
    """
    upper = upper_losses(learn(prior, known, spreads=FLOORS))
    silent = np.array([not evidence.measurements for evidence in known])
    upper[silent] = np.maximum(upper[silent], upper_losses(learn(prior, [RunEvidence("")], spreads=FLOORS)))
    return upper
