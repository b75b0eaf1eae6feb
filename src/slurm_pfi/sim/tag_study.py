"""Whether the PFI of a tag can be believed after two windows: ``python -m slurm_pfi.sim.tag_study``.

Simulated sites of 40 runs of the 25 model jobs (H200, a model of ``physics``, not a measurement); the library has no
curve of an H200. Each run is seen uncapped, then capped in two windows at different site limits, as the controller
would do it: floors from each user's flex and from what was learned, the certified cut, caps in whole watts, losses from
a counter that is read each second, clipped to what can be, runs of one job name pooled. Then its PFI is read off on
the caps 200 to 700 W and compared with that of the model on the same caps by the same rules.

Below the caps that were measured the PFI rests on how library curves go on, and it stays on 200 to 700 W all the
same: near full reduction, reduction / loss is near 1 whatever the curve does, and one grid for all runs is what makes
them comparable. On 500 to 700 W, about what was measured, intervals are half as wide and values err half as much again,
for at small cuts the error of the baseline is a large share of the loss; 93 % of those intervals held.
Nothing was fitted to the model jobs or to seeds: the spreads are those by which reductions are shared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ..allocation.guard import guarded
from ..allocation.solve import Shares
from ..elasticity.curve import FloatArray
from ..elasticity.evidence import Measurement, RunEvidence, loss_from_samples, pool_kin
from ..elasticity.floors import greatest_reductions
from ..elasticity.index import Pfi, pfi
from ..elasticity.learned import learned_pfi, loss_at
from ..elasticity.learner import learn
from ..elasticity.library import Library
from ..elasticity.names import same_gpu
from ..elasticity.plausible import plausible
from ..elasticity.posterior import Posterior
from ..elasticity.prior import Prior
from ..elasticity.process import FLOORS
from ..flex import parse_flex
from .jobs import ModelJob, model_jobs
from .physics import REFERENCE_CAP_W

GPU_MODEL: Final = "H200"
GRID_W: Final = (200.0, 300.0, 400.0, 500.0, 600.0, 700.0)
CAP_MIN_W: Final = 200.0
FLEX: Final = ("low", "medium", "medium", "high")
SEEDS: Final = range(20)

_STRANGER: Final = RunEvidence(GPU_MODEL)
_TRUTH_SAMPLES: Final = 2  # of an interval that is not used: the model has no noise


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a site sees. Noise and errors are relative standard deviations.

    ``steady_s``: seconds that a baseline, and a cap, is watched. ``jitter``: of the throughput in one second, which
    keeps ``memory`` (0..1) of the deviation of the second before. ``drift``: of T_max between baseline and windows,
    which no sample shows. ``draw_noise``: of a mean draw. ``windows``: from and to what share of the site's draw is
    cut. ``pool``: runs of one job name learn from each other. ``grid_w``: caps of the PFI;
    the lowest has to cost every model job 1 % or more.
    """

    runs: int = 40
    steady_s: int = 180
    jitter: float = 0.03
    memory: float = 0.6
    drift: float = 0.005
    draw_noise: float = 0.002
    windows: tuple[tuple[float, float], ...] = ((0.08, 0.12), (0.18, 0.25))
    pool: bool = True
    grid_w: tuple[float, ...] = GRID_W


@dataclass(frozen=True, slots=True)
class Row:
    """One run: what its tag shows (None: nothing that was measured), and the model's PFI on the same caps.

    ``deepest``: the deepest reduction that it was measured at. ``clipped``: losses that were not believed.
    """

    job: str
    shown: Pfi | None
    true: float
    deepest: float
    clipped: int

    @property
    def covered(self) -> bool:
        return self.shown is not None and self.shown.low <= self.true <= self.shown.high


@dataclass(frozen=True, slots=True)
class Result:
    """All runs of one site. A run that shows nothing covers nothing."""

    rows: tuple[Row, ...]

    @property
    def coverage(self) -> float:
        """Share of all runs whose interval holds the true value."""
        return sum(row.covered for row in self.rows) / len(self.rows)

    @property
    def half_widths(self) -> FloatArray:
        """Half of each interval shown."""
        return np.array([(row.shown.high - row.shown.low) / 2 for row in self.rows if row.shown is not None])

    @property
    def errors(self) -> FloatArray:
        """Value shown less true value, of each run that shows one."""
        return np.array([row.shown.value - row.true for row in self.rows if row.shown is not None])


def prior() -> Prior:
    """Of the library that is shipped, less all curves of the GPU model that is to be unknown."""
    curves = Library.load_default().curves
    return Prior(Library([one for one in curves if not same_gpu(one.gpu_model, GPU_MODEL)]))


def true_pfi(job: ModelJob, grid_w: Sequence[float]) -> float:
    """The model's PFI by the rules of ``index.pfi``, without noise."""
    work = job.workload
    return pfi(
        grid_w,
        [work.draw_w(cap) for cap in grid_w],
        [work.relative_throughput(cap) for cap in grid_w],
        samples=_TRUTH_SAMPLES,
    ).value


def study(known: Prior, seed: int, conditions: Conditions | None = None) -> Result:
    """One simulated site, seen, capped twice and learned."""
    site = _Site(known, np.random.default_rng(seed), conditions or Conditions())
    for between in site.conditions.windows:
        site.window(between)
    return site.result()


class _Site:
    """Runs and what has been seen of them."""

    def __init__(self, known: Prior, rng: np.random.Generator, conditions: Conditions) -> None:
        runs, jobs = conditions.runs, tuple(model_jobs().values())
        self.conditions = conditions
        self._prior, self._rng = known, rng
        self._jobs = [jobs[i] for i in rng.integers(len(jobs), size=runs)]
        self._max_loss = np.array([parse_flex(FLEX[i]).max_loss for i in rng.integers(len(FLEX), size=runs)])
        self._draw_w = self._drawn(REFERENCE_CAP_W * np.ones(runs))
        uncapped = self._counted(1.0 + conditions.drift * rng.standard_normal(runs))
        self._baseline = uncapped.mean(axis=1)
        _, baseline_sd = loss_from_samples(uncapped, self._baseline)
        self._clipped = [0] * runs
        self._evidence = [
            RunEvidence(GPU_MODEL, kin=job.name, baseline="seen", baseline_sd=sd)
            for job, sd in zip(self._jobs, baseline_sd.tolist(), strict=True)
        ]

    def window(self, between: tuple[float, float]) -> None:
        """Cut the site by a share drawn from ``between``, or as deep as floors let it, and measure every run."""
        posterior = self._learned()
        shares = self._shares()
        need = self._rng.uniform(*between) * float(shares.watts.sum())
        deepest = np.array([one.deepest for one in self._evidence])
        runs = posterior.take(np.arange(deepest.size))
        planned = guarded(shares, runs, deepest, need).reduction
        cap_w = np.floor(self._draw_w * (1.0 - planned))
        reduction = np.clip(1.0 - self._drawn(cap_w) / self._draw_w, 0.0, 1.0)
        pairs = zip(self._jobs, cap_w.tolist(), strict=True)
        left = np.array([job.workload.relative_throughput(min(cap, REFERENCE_CAP_W)) for job, cap in pairs])
        loss, sd = loss_from_samples(self._counted(left), self._baseline)
        # What is to be expected of a run that has shown nothing: a stranger's curve, the last one learned.
        stranger = posterior.take(np.full(deepest.size, deepest.size))
        expected, expected_sd = loss_at(stranger, reduction)
        for i in np.flatnonzero((planned > 0) & (reduction > 0)).tolist():
            run = self._evidence[i]
            found = plausible(expected[i], expected_sd[i], loss[i], sd[i], run.tau)
            self._clipped[i] += bool(found.why)
            point = Measurement(float(reduction[i]), found.loss, float(sd[i]))
            self._evidence[i] = replace(run, measurements=(*run.measurements, point))

    def result(self) -> Result:
        posterior, grid_w = self._learned(), self.conditions.grid_w
        rows = []
        for i, (job, run) in enumerate(zip(self._jobs, self._evidence, strict=True)):
            shown = None
            if run.measurements:
                shown = learned_pfi(
                    posterior, i, grid_w, float(self._draw_w[i]), gpu_model=GPU_MODEL, source="measured"
                )
            rows.append(Row(job.name, shown, true_pfi(job, grid_w), run.deepest, self._clipped[i]))
        return Result(tuple(rows))

    def _learned(self) -> Posterior:
        """Of all runs, and of a stranger in the last place."""
        return learn(self._prior, [*self._pooled(), _STRANGER])

    def _pooled(self) -> list[RunEvidence]:
        return pool_kin(self._evidence) if self.conditions.pool else self._evidence

    def _shares(self) -> Shares:
        """Every GPU-hour of work counts the same; no run goes below the lowest cap of its GPUs."""
        gpus = np.array([job.gpus for job in self._jobs], dtype=np.float64)
        floors = greatest_reductions(learn(self._prior, self._pooled(), spreads=FLOORS), self._max_loss)
        end = np.clip(np.minimum(floors, 1.0 - CAP_MIN_W / self._draw_w), 0.0, 1.0)
        return Shares(watts=self._draw_w * gpus, value=gpus, start=np.zeros(gpus.size), end=end)

    def _drawn(self, cap_w: FloatArray) -> FloatArray:
        """Mean draw per GPU (W) under caps, as measured."""
        pairs = zip(self._jobs, cap_w.tolist(), strict=True)
        draw_w = np.array([job.workload.draw_w(min(cap, REFERENCE_CAP_W)) for job, cap in pairs])
        return draw_w * (1.0 + self.conditions.draw_noise * self._rng.standard_normal(draw_w.size))

    def _counted(self, rate: FloatArray) -> FloatArray:
        """What counters say each second (runs, seconds) of steady throughputs (runs,)."""
        memory = self.conditions.memory
        noise = self._rng.standard_normal((rate.size, self.conditions.steady_s))
        for second in range(1, noise.shape[1]):
            fresh = np.sqrt(1.0 - memory**2) * noise[:, second]
            noise[:, second] = memory * noise[:, second - 1] + fresh
        return np.maximum(rate[:, None] * (1.0 + self.conditions.jitter * noise), 0.0)


def main() -> int:
    """Print one line for each seed, and all together."""
    known = prior()
    write = sys.stdout.write
    write(f"Model data, simulated: PFI on {GRID_W[0]:g}-{GRID_W[-1]:g} W after two windows, 40 runs a seed\n")
    write("seed  shown  in interval  half-width median  90 %  mean error  clipped\n")
    results = []
    for seed in SEEDS:
        results.append(study(known, seed))
        write(f"{seed:4d}  {_line(results[-1])}\n")
    write(f" all  {_line(Result(tuple(row for one in results for row in one.rows)))}\n")
    return 0


def _line(result: Result) -> str:
    middle, most = np.percentile(result.half_widths, (50, 90))
    return (
        f"{result.half_widths.size:5d}  {100 * result.coverage:9.1f} %  {middle:17.2f}  {most:4.2f}"
        f"  {np.abs(result.errors).mean():10.3f}  {sum(row.clipped for row in result.rows):7d}"
    )


if __name__ == "__main__":
    sys.exit(main())
