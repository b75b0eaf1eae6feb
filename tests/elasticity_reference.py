"""The learner once more, plain and slow: one run at a time, one candidate at a time, dense covariances.

Shares nothing with the learner but the constants and the table of candidates: here the GPU model's discrepancy is
conditioned on as a Gaussian process at the measured points, and every prediction is read from one joint covariance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_pfi.elasticity.curve import BoolArray, ElasticityCurve, FloatArray
from slurm_pfi.elasticity.evidence import (
    DRIFT_PER_HOUR,
    LEAST_NOISE_SD,
    NEW_SEGMENT_SD,
    Measurement,
    PfiEvidence,
    RunEvidence,
)
from slurm_pfi.elasticity.library import Library, LibraryCurve
from slurm_pfi.elasticity.prior import GRID, PFI_MODEL_SD, Prior
from slurm_pfi.elasticity.process import KNOTS, SHARING, Discrepancy, Spread
from slurm_pfi.elasticity.sweep import Repairs


def small_library() -> Library:
    """Three curves of two GPU models: a cliff, a straight line, a hollow."""
    shapes = {
        ("A", "cliff"): ([0.0, 0.2, 0.4, 0.6], [0.0, 0.01, 0.08, 0.5]),
        ("A", "line"): ([0.0, 0.2, 0.4, 0.6], [0.0, 0.15, 0.32, 0.6]),
        ("B", "hollow"): ([0.0, 0.1, 0.3, 0.55], [0.0, 0.02, 0.17, 0.42]),
    }
    return Library(
        [
            LibraryCurve(
                curve_id=f"{gpu}-{family}",
                gpu_model=gpu,
                family=family,
                workload=family,
                curve=ElasticityCurve(np.array(x), np.array(y)),
                repairs=Repairs(),
                source="made up",
                licence="",
            )
            for (gpu, family), (x, y) in shapes.items()
        ]
    )


def some_runs(number: int, seed: int, *, gpu_models: int = 2) -> list[RunEvidence]:
    """Runs with 0 to 4 measurements in up to two segments, some with a PFI, some of one kin."""
    rng = np.random.default_rng(seed)
    runs = []
    for i in range(number):
        bend = rng.uniform(0.5, 1.3)
        points = tuple(
            Measurement(
                reduction=float(x),
                loss=float(bend * x**1.3 + 0.006 * rng.standard_normal()),
                sd=0.006,
                age_s=float(rng.uniform(0, 7200)),
                segment=int(j > 2),
            )
            for j, x in enumerate(rng.uniform(0.05, 0.5, i % 5))
        )
        pfi = PfiEvidence(float(rng.uniform(0.8, 2.5)), 0.3, (0.1, 0.25, 0.5)) if i % 3 else None
        runs.append(
            RunEvidence(
                f"gpu {i % gpu_models}",
                kin=f"kin {i % 7}" if i % 2 else "",
                pfi=pfi,
                measurements=points,
                baseline=("seen", "recalled", "bounded")[i % 3],
            )
        )
    return runs


def _rho(a: FloatArray, b: FloatArray, length: float) -> FloatArray:
    scaled = np.sqrt(3) * np.abs(a[:, None] - b[None, :]) / length
    result: FloatArray = (1 + scaled) * np.exp(-scaled)
    return result


def _sd(spread: Spread, x: FloatArray, mean_loss: FloatArray) -> FloatArray:
    return spread.share * np.interp(x, GRID, mean_loss) + spread.rest * (1 - np.exp(-x / 0.03))


def _hats(x: FloatArray) -> FloatArray:
    """Value at x of the piecewise linear functions that are 1 at one knot and 0 at the others: (x, knots)."""
    return np.column_stack([np.interp(x, KNOTS, unit) for unit in np.eye(KNOTS.size)])


class DenseRun:
    """What one run has shown, with covariances written out."""

    def __init__(self, run: RunEvidence, mean_loss: FloatArray, spreads: Discrepancy) -> None:
        points = run.measurements
        self.run, self.mean_loss, self.spread = run, mean_loss, spreads.run
        self.x = np.array([p.reduction for p in points])
        self.y = np.array([p.loss for p in points])
        newest = max((p.segment for p in points), default=0)
        noise = np.zeros((len(points), len(points)))
        for i, p in enumerate(points):
            for j, q in enumerate(points):
                if p.segment == q.segment:
                    tau = [
                        one.baseline_sd
                        if one.baseline_sd is not None
                        else (run.tau if one.segment == newest else float(np.hypot(run.tau, NEW_SEGMENT_SD)))
                        for one in (p, q)
                    ]
                    noise[i, j] = tau[0] * (1 - p.loss) * tau[1] * (1 - q.loss)
            noise[i, i] += max(p.sd, LEAST_NOISE_SD) ** 2 + (DRIFT_PER_HOUR * p.age_s / 3600) ** 2
        self.noise = noise
        self.cov = self.own(self.x, self.x) + noise

    def own(self, a: FloatArray, b: FloatArray) -> FloatArray:
        sd_a, sd_b = _sd(self.spread, a, self.mean_loss), _sd(self.spread, b, self.mean_loss)
        return sd_a[:, None] * sd_b[None, :] * _rho(a, b, self.spread.length)


@dataclass
class Reference:
    """Posterior of the dense learner; the attributes that the guard asks for, too."""

    prior: Prior
    runs: list[DenseRun]
    kin: list[object]
    weight: list[FloatArray]
    shared: dict[str, tuple[FloatArray, FloatArray]]
    informed: bool = True

    @property
    def known(self) -> BoolArray:
        return np.ones(len(self.runs), dtype=bool)

    @property
    def kinds(self) -> int:
        return len(set(self.kin))

    def joint(self, i: int, x: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Of run i at x: mean, covariance within a candidate, covariance between candidates, slope in the knots."""
        dense, weight = self.runs[i], self.weight[i]
        pull = np.linalg.solve(dense.cov, dense.own(dense.x, x)).T if dense.x.size else np.zeros((x.size, 0))
        m = self.shared[dense.run.gpu_model][0]
        each = []
        for k in range(self.prior.size):
            curve = self.prior.losses[:, k].astype(np.float64)
            there = np.interp(dense.x, GRID, curve) + _hats(dense.x) @ m
            each.append(np.interp(x, GRID, curve) + _hats(x) @ m + pull @ (dense.y - there))
        table = np.array(each)
        mean = weight @ table
        between = (table - mean).T @ (weight[:, None] * (table - mean))
        within = dense.own(x, x) - pull @ dense.own(dense.x, x)
        return mean, within, between, _hats(x) - pull @ _hats(dense.x)

    def mean_and_sd(self) -> tuple[FloatArray, FloatArray]:
        means, sds = [], []
        for i, dense in enumerate(self.runs):
            mean, within, between, slope = self.joint(i, GRID)
            cov = within + between + slope @ self.shared[dense.run.gpu_model][1] @ slope.T
            means.append(mean)
            sds.append(np.sqrt(np.maximum(np.diag(cov), 0)))
        return np.array(means), np.array(sds)

    def mean(self) -> FloatArray:
        return self.mean_and_sd()[0]

    def gain(self, before: FloatArray, after: FloatArray, value: FloatArray) -> tuple[float, float]:
        saved, by_kin, by_gpu = 0.0, {}, {}  # type: ignore[var-annotated]
        for i, dense in enumerate(self.runs):
            mean, within, between, slope = self.joint(i, np.array([before[i], after[i]]))
            step = np.array([1.0, -1.0])
            saved += value[i] * (step @ mean)
            sd = value[i] * np.sqrt(max(step @ (within + between) @ step, 0.0))
            by_kin[self.kin[i]] = by_kin.get(self.kin[i], 0.0) + sd
            gpu = dense.run.gpu_model
            by_gpu[gpu] = by_gpu.get(gpu, 0.0) + value[i] * (step @ slope)
        variance = sum(sd**2 for sd in by_kin.values())
        variance += sum(common @ self.shared[gpu][1] @ common for gpu, common in by_gpu.items())
        return saved, float(np.sqrt(variance))


def reference(prior: Prior, runs: Sequence[RunEvidence], spreads: Discrepancy = SHARING) -> Reference:
    """Learn, without the widening of runs outside their interval."""
    weights = np.exp(prior.log_weight) / np.exp(prior.log_weight).sum()
    mean_loss = prior.losses.astype(np.float64) @ weights
    dense = [DenseRun(run, mean_loss, spreads) for run in runs]
    kin: list[object] = [(run.gpu_model, run.kin) if run.kin else i for i, run in enumerate(runs)]
    gpus = sorted({run.gpu_model for run in runs})
    sd = _sd(spreads.gpu_model, KNOTS, mean_loss)
    gap = (KNOTS[:, None] - KNOTS[None, :]) / spreads.gpu_model.length
    start = np.outer(sd, sd) * np.exp(-0.5 * gap**2)
    shared = {gpu: (np.zeros(KNOTS.size), start) for gpu in gpus}
    found: list[FloatArray] = []
    for _ in range(3):
        found = [_weights(prior, one, shared[one.run.gpu_model][0]) for one in dense]
        for gpu in gpus:
            members = [i for i, run in enumerate(runs) if run.gpu_model == gpu]
            shared[gpu] = _condition(prior, [dense[i] for i in members], [found[i] for i in members], start, [
                kin.count(kin[i]) for i in members
            ])  # fmt: skip
    return Reference(prior, dense, kin, found, shared)


def _weights(prior: Prior, dense: DenseRun, m: FloatArray) -> FloatArray:
    log = prior.log_weight.copy()
    for k in range(prior.size):
        curve = prior.losses[:, k].astype(np.float64)
        if dense.x.size:
            off = dense.y - np.interp(dense.x, GRID, curve) - _hats(dense.x) @ m
            log[k] -= 0.5 * off @ np.linalg.solve(dense.cov, off)
        if dense.run.pfi is not None:
            x = np.array(dense.run.pfi.reductions)
            loss = np.interp(x, GRID, curve)
            ratios = [a / b for a, b in zip(x, loss, strict=True) if b >= 0.01]
            pfi = float(np.mean(ratios)) if ratios else float(x.max()) / 0.01
            log[k] -= 0.5 * ((dense.run.pfi.value - pfi) / np.hypot(dense.run.pfi.sd, PFI_MODEL_SD)) ** 2
    weight: FloatArray = np.exp(log - log.max())
    weight /= weight.sum()
    return weight


def _condition(
    prior: Prior, dense: list[DenseRun], weight: list[FloatArray], start: FloatArray, kin_size: list[int]
) -> tuple[FloatArray, FloatArray]:
    """The GPU model's discrepancy at the knots, given all points of all its runs in one covariance."""
    x = np.concatenate([one.x for one in dense])
    if not x.size:
        return np.zeros(KNOTS.size), start
    left, noise, begin = np.empty(x.size), np.zeros((x.size, x.size)), 0
    for one, p, kin in zip(dense, weight, kin_size, strict=True):
        at = slice(begin, begin + one.x.size)
        begin += one.x.size
        table = np.array([np.interp(one.x, GRID, prior.losses[:, k]) for k in range(prior.size)])
        middle = p @ table
        left[at] = one.y - middle
        noise[at, at] = kin * (one.cov + (table - middle).T @ (p[:, None] * (table - middle)))
    hats = _hats(x)
    gain = np.linalg.solve(hats @ start @ hats.T + noise, hats @ start).T
    return gain @ left, start - gain @ hats @ start
