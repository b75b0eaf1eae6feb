"""What is known of a run: its PFI, and what it lost at which reduction. Each figure comes with its own noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from .curve import FloatArray, IntArray

BaselineSource: TypeAlias = Literal["seen", "recalled", "bounded"]

LEAST_BASELINE_SD: Final[dict[BaselineSource, float]] = {"seen": 0.005, "recalled": 0.03, "bounded": 0.10}
"""Relative standard deviation of T_max that is assumed at least, whatever samples say."""

LEAST_NOISE_SD: Final = 0.002
"""No measurement of throughput is believed to be better than this."""

NEW_SEGMENT_SD: Final = 0.05
"""How far T_max may have moved between two segments of a run."""

DRIFT_PER_HOUR: Final = 0.005
"""How much a measured loss may have drifted in an hour: what is old counts less."""


_FEWEST_SAMPLES: Final = 4


class EvidenceError(ValueError):
    """Figures that cannot be evidence; the message says which and why."""


@dataclass(frozen=True, slots=True)
class PfiEvidence:
    """A PFI told or predicted, its standard deviation, and the reductions (0..1) of the cap grid it belongs to."""

    value: float
    sd: float
    reductions: tuple[float, ...]

    def __post_init__(self) -> None:
        if not (np.isfinite(self.value) and np.isfinite(self.sd) and self.sd >= 0):
            raise EvidenceError(f"a PFI of {self.value} with a standard deviation of {self.sd} says nothing")
        if not self.reductions or not all(0 <= x <= 1 for x in self.reductions):
            raise EvidenceError(f"the grid of a PFI is one of reductions within 0..1, not {self.reductions}")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Loss of throughput at a reduction, against the baseline of its segment; ``sd`` is that of the mean.

    A segment is a stretch of a run in which its T_max did not change; the newest has the highest number. What was
    measured on a run of its kin is a segment too, and brings the relative ``baseline_sd`` of that run.
    """

    reduction: float
    loss: float
    sd: float
    age_s: float = 0.0
    segment: int = 0
    baseline_sd: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.reduction <= 1:
            raise EvidenceError(f"a reduction lies within 0..1, got {self.reduction}")
        if not (np.isfinite(self.loss) and self.loss <= 1):
            raise EvidenceError(f"a loss is a number up to 1, got {self.loss}")
        if not (np.isfinite(self.sd) and self.sd >= 0 and np.isfinite(self.age_s) and self.age_s >= 0):
            raise EvidenceError(f"noise {self.sd} or age {self.age_s} is no number of 0 or more")


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """All that is known of one run. ``baseline_sd``: relative standard deviation of T_max, not below its source's.

    ``kin``: what runs of the same work share (account and job name), empty where unknown. Kin deviate from every
    curve in the same way, so twenty of them tell no more of their GPU model than one does, and err together.
    """

    gpu_model: str
    kin: str = ""
    pfi: PfiEvidence | None = None
    measurements: tuple[Measurement, ...] = ()
    baseline: BaselineSource = "bounded"
    baseline_sd: float = 0.0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.baseline_sd) and self.baseline_sd >= 0):
            raise EvidenceError(
                f"a baseline's standard deviation is a number of 0 or more, got {self.baseline_sd}"
            )

    @property
    def tau(self) -> float:
        """The relative standard deviation of T_max that counts."""
        return max(self.baseline_sd, LEAST_BASELINE_SD[self.baseline])

    @property
    def deepest(self) -> float:
        """The deepest reduction measured, 0 if none."""
        return max((point.reduction for point in self.measurements), default=0.0)


def loss_from_samples(samples: ArrayLike, baseline: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Loss against a baseline throughput, and its standard deviation, from samples of throughput (any unit).

    ``samples`` (..., n), n >= 4, and ``baseline`` (...): losses and deviations (...). The noise is estimated from
    the samples themselves by the means of batches, so that samples which follow each other closely do not count as
    many. Raises EvidenceError on fewer samples, on figures that are no numbers of 0 or more, and on a baseline that
    is not above zero.
    """
    rate, base = np.asarray(samples, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if rate.ndim < 1 or rate.shape[-1] < _FEWEST_SAMPLES:
        raise EvidenceError(f"a mean needs {_FEWEST_SAMPLES} samples or more, got shape {rate.shape}")
    if not (np.isfinite(rate).all() and (rate >= 0).all()):
        raise EvidenceError("throughputs are numbers of 0 or more")
    if not (np.isfinite(base).all() and (base > 0).all()):
        raise EvidenceError("a baseline throughput is a number above zero")
    batches = max(_FEWEST_SAMPLES, int(np.sqrt(rate.shape[-1])))
    edges = np.linspace(0, rate.shape[-1], batches + 1).astype(np.intp)
    means = np.add.reduceat(rate, edges[:-1], axis=-1) / np.diff(edges)
    sd = means.std(axis=-1, ddof=1) / np.sqrt(batches) / base
    return 1.0 - rate.mean(axis=-1) / base, np.maximum(sd, LEAST_NOISE_SD)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Evidence of many runs as arrays (runs, points), filled up with points that weigh nothing.

    ``noise_cov`` (runs, points, points): noise of the points and the errors of their baselines. ``group``: number
    of each run's GPU model in ``groups``; ``kin``: of its kin, and ``kin_size`` how many runs that has; ``told``:
    whether a PFI is known.
    """

    reduction: FloatArray
    loss: FloatArray
    real: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    noise_cov: FloatArray
    group: IntArray
    groups: tuple[str, ...]
    kin: IntArray
    kin_size: IntArray
    told: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

    @property
    def runs(self) -> int:
        return int(self.group.size)


_NOTHING: Final = 1e3
"""Standard deviation of a point that is only there to fill a row."""


def pack(runs: Sequence[RunEvidence]) -> Batch:
    """Lay the measurements of many runs side by side; runs of one GPU model form a group."""
    groups = tuple(sorted({run.gpu_model for run in runs}))
    number = {name: i for i, name in enumerate(groups)}
    width = max((len(run.measurements) for run in runs), default=0)
    shape = (len(runs), width)
    x, y, tau, sd = np.zeros(shape), np.zeros(shape), np.zeros(shape), np.full(shape, _NOTHING)
    real = np.zeros(shape, dtype=bool)
    segment = np.zeros(shape, dtype=np.intp)
    for i, run in enumerate(runs):
        newest = max((point.segment for point in run.measurements), default=0)
        for j, point in enumerate(run.measurements):
            x[i, j], y[i, j], segment[i, j], real[i, j] = point.reduction, point.loss, point.segment, True
            drift = DRIFT_PER_HOUR * point.age_s / 3600
            sd[i, j] = np.hypot(max(point.sd, LEAST_NOISE_SD), drift)
            tau[i, j] = run.tau if point.segment == newest else np.hypot(run.tau, NEW_SEGMENT_SD)
            if point.baseline_sd is not None:
                tau[i, j] = point.baseline_sd
    # T_hat = T_max (1 + e) turns a true loss l into y = l + e (1 - y), exactly: the error scales with what is left.
    error = tau * (1.0 - y)
    common = (segment[:, :, None] == segment[:, None, :]) * error[:, :, None] * error[:, None, :]
    noise = common + np.eye(width) * (sd**2)[:, :, None]
    kin, kin_size = _kin(runs)
    group = np.array([number[run.gpu_model] for run in runs], dtype=np.intp)
    told = np.array([run.pfi is not None for run in runs], dtype=bool)
    return Batch(x, y, real, noise, group, groups, kin, kin_size, told)


def _kin(runs: Sequence[RunEvidence]) -> tuple[IntArray, IntArray]:
    """A number for each run's kin, and how many runs that kin has; a run of unknown kin has none but itself."""
    names = [(run.gpu_model, run.kin) if run.kin else ("", i) for i, run in enumerate(runs)]
    place: dict[tuple[str, str | int], int] = {}
    kin = np.array([place.setdefault(name, len(place)) for name in names], dtype=np.intp)
    return kin, np.bincount(kin)[kin] if kin.size else kin


def pool_kin(runs: Sequence[RunEvidence]) -> list[RunEvidence]:
    """Give each run the measurements of its kin too: the same work on the same GPU model has the same curve.

    What was measured against another run's baseline is a segment of its own, with that baseline's error. Runs of
    unknown kin keep to themselves.
    """
    by_kin: dict[tuple[str, str], list[int]] = {}
    for i, run in enumerate(runs):
        if run.kin:
            by_kin.setdefault((run.gpu_model, run.kin), []).append(i)
    pooled = list(runs)
    for members in by_kin.values():
        for i in members if len(members) > 1 else ():
            oldest = min((point.segment for point in runs[i].measurements), default=0)
            lent = [
                replace(point, segment=oldest - 1 - place, baseline_sd=runs[j].tau)
                for place, j in enumerate(members)
                if j != i
                for point in _newest(runs[j])
            ]
            pooled[i] = replace(runs[i], measurements=(*lent, *runs[i].measurements))
    return pooled


def _newest(run: RunEvidence) -> list[Measurement]:
    newest = max((point.segment for point in run.measurements), default=0)
    return [point for point in run.measurements if point.segment == newest]
