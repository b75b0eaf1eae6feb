"""What is known of a run: its PFI, and what it lost at which reduction. Each figure comes with its own noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .curve import FloatArray, IntArray

BoolArray: TypeAlias = NDArray[np.bool_]

BaselineSource: TypeAlias = Literal["seen", "recalled", "bounded"]

LEAST_BASELINE_SD: Final[dict[BaselineSource, float]] = {"seen": 0.005, "recalled": 0.03, "bounded": 0.10}
"""Relative standard deviation of T_max that is assumed at least, whatever samples say."""

LEAST_NOISE_SD: Final = 0.002
"""No measurement of throughput is believed to be better than this."""

NEW_SEGMENT_SD: Final = 0.05
"""How far T_max may have moved between two segments of a run."""

DRIFT_PER_HOUR: Final = 0.005
"""How much a measured loss may have drifted in an hour: what is old counts less."""

LEAST_LOSS: Final = -10.0
"""Eleven times its baseline: who runs that fast has a wrong baseline, and no loss can be told from it."""

GREATEST_PFI: Final = 1000.0
"""Ten times what the least loss that counts gives at full reduction: beyond it a PFI is an error of a division."""

MOST_LENDERS: Final = 8
"""Kin whose measurements a run is lent at most: more baselines say little that these do not."""

MOST_LENT: Final = 16
"""Measurements a run is lent at most, of all its lenders together: work grows with the cube of a run's points."""

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
        if abs(self.value) > GREATEST_PFI:
            raise EvidenceError(f"a PFI lies within -{GREATEST_PFI:g}..{GREATEST_PFI:g}, got {self.value}")
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
        if not LEAST_LOSS <= self.loss <= 1:
            raise EvidenceError(f"a loss lies within {LEAST_LOSS:g}..1, got {self.loss}")
        if not (np.isfinite(self.sd) and self.sd >= 0 and np.isfinite(self.age_s) and self.age_s >= 0):
            raise EvidenceError(f"noise {self.sd} or age {self.age_s} is no number of 0 or more")
        if self.baseline_sd is not None and not (np.isfinite(self.baseline_sd) and self.baseline_sd >= 0):
            raise EvidenceError(f"a baseline_sd is a number of 0 or more, got {self.baseline_sd}")


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """All that is known of one run. ``baseline_sd``: relative standard deviation of T_max, not below its source's.

    ``kin``: what runs of the same work share (account and job name), empty where unknown. Kin deviate from every
    curve in the same way, so twenty of them tell no more of their GPU model than one does, and err together.
    ``unlikely``: it told more loss than can be believed. What stands here was cut down to what can; but it is not
    spared for it, and lends its kin nothing.
    """

    gpu_model: str
    kin: str = ""
    pfi: PfiEvidence | None = None
    measurements: tuple[Measurement, ...] = ()
    baseline: BaselineSource = "bounded"
    baseline_sd: float = 0.0
    unlikely: bool = False

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
    real: BoolArray
    noise_cov: FloatArray
    group: IntArray
    groups: tuple[str, ...]
    kin: IntArray
    kin_size: IntArray
    told: BoolArray

    @property
    def runs(self) -> int:
        return int(self.group.size)

    def take(self, rows: IntArray) -> Batch:
        """The same of chosen runs, ``rows`` (n,); ``groups`` and the numbers of groups and kin stay."""
        return replace(
            self,
            reduction=self.reduction[rows],
            loss=self.loss[rows],
            real=self.real[rows],
            noise_cov=self.noise_cov[rows],
            group=self.group[rows],
            kin=self.kin[rows],
            kin_size=self.kin_size[rows],
            told=self.told[rows],
        )


_NOTHING: Final = 1e3
"""Standard deviation of a point that is only there to fill a row; greater ones say no less."""


def pack(runs: Sequence[RunEvidence]) -> Batch:
    """Lay the measurements of many runs side by side; runs of one GPU model form a group."""
    groups = tuple(sorted({run.gpu_model for run in runs}))
    number = {name: i for i, name in enumerate(groups)}
    count = np.array([len(run.measurements) for run in runs], dtype=np.intp)
    width = int(count.max(initial=0))
    real = np.arange(width) < count[:, None]
    x, y, sd, age_s, segment, own = _laid_out(runs, real)
    newest = segment.max(axis=1, initial=-np.inf, where=real, keepdims=True)
    tau = np.array([run.tau for run in runs]).reshape(-1, 1)
    tau = np.where(segment == newest, tau, np.hypot(tau, NEW_SEGMENT_SD))
    tau = np.minimum(np.where(np.isnan(own), tau, own), _NOTHING)
    # T_hat = T_max (1 + e) turns a true loss l into y = l + e (1 - y), exactly: the error scales with what is left.
    error = np.where(real, tau * (1.0 - y), 0.0)
    common = (segment[:, :, None] == segment[:, None, :]) * error[:, :, None] * error[:, None, :]
    sd = np.minimum(np.hypot(np.maximum(sd, LEAST_NOISE_SD), DRIFT_PER_HOUR * age_s / 3600), _NOTHING)
    noise = common + np.eye(width) * np.where(real, sd, _NOTHING)[:, :, None] ** 2
    kin, kin_size = _kin(runs)
    group = np.array([number[run.gpu_model] for run in runs], dtype=np.intp)
    told = np.array([run.pfi is not None for run in runs], dtype=bool)
    return Batch(x, y, real, noise, group, groups, kin, kin_size, told)


def _laid_out(runs: Sequence[RunEvidence], real: BoolArray) -> FloatArray:
    """Columns of the measurements: reduction, loss, sd, age, segment, baseline_sd (NaN: the run's own).

    Shape (6, runs, points), 0 where no point is ``real``.
    """
    flat = [
        (one.reduction, one.loss, one.sd, one.age_s, one.segment, one.baseline_sd)
        for run in runs
        for one in run.measurements
    ]
    columns = np.zeros((6, *real.shape))
    if flat:
        columns[:, real] = np.array(flat, dtype=np.float64).T  # None becomes NaN
    return columns


def _kin(runs: Sequence[RunEvidence]) -> tuple[IntArray, IntArray]:
    """A number for each run's kin, and how many runs that kin has; a run of unknown kin has none but itself."""
    names = [(run.gpu_model, run.kin) if run.kin else ("", i) for i, run in enumerate(runs)]
    place: dict[tuple[str, str | int], int] = {}
    kin = np.array([place.setdefault(name, len(place)) for name in names], dtype=np.intp)
    return kin, np.bincount(kin)[kin] if kin.size else kin


def pool_kin(runs: Sequence[RunEvidence]) -> list[RunEvidence]:
    """Give each run the measurements of its kin too: the same work on the same GPU model has the same curve.

    What was measured against another run's baseline is a segment of its own, with that baseline's error. Only the
    newest segment is lent, and only by the MOST_LENDERS of the surest baselines and most measurements; each lends as
    many of its newest points as MOST_LENT divided by the number of lenders. Runs of unknown kin keep to themselves.
    """
    by_kin: dict[tuple[str, str], list[int]] = {}
    for i, run in enumerate(runs):
        if run.kin and run.measurements and not run.unlikely:
            by_kin.setdefault((run.gpu_model, run.kin), []).append(i)
    lent = {name: _loans(runs, members) for name, members in by_kin.items()}
    pooled = list(runs)
    for i, run in enumerate(runs):
        others = [loan for lender, loan in lent.get((run.gpu_model, run.kin), ()) if lender != i]
        others = others[:MOST_LENDERS]
        if others:
            each = max(1, MOST_LENT // len(others))
            oldest = min((point.segment for point in run.measurements), default=0)
            moved = [
                replace(point, segment=oldest - 1 - place)
                for place, loan in enumerate(others)
                for point in loan[:each]
            ]
            pooled[i] = replace(run, measurements=(*moved, *run.measurements))
    return pooled


def _loans(runs: Sequence[RunEvidence], members: Sequence[int]) -> list[tuple[int, list[Measurement]]]:
    """Who lends what, the best lender first, of each its newest point first.

    One lender more than any run has, for nobody borrows from itself.
    """
    found = []
    for i in members:
        newest = max(point.segment for point in runs[i].measurements)
        loan = [
            # What was itself lent or recalled keeps the error of the baseline it came with.
            replace(point, baseline_sd=runs[i].tau if point.baseline_sd is None else point.baseline_sd)
            for point in runs[i].measurements
            if point.segment == newest
        ]
        # Of points of one age the later one is newer: runs add their measurements at the end.
        loan.reverse()
        loan.sort(key=lambda point: point.age_s)
        found.append((i, loan))
    found.sort(
        key=lambda one: (runs[one[0]].tau, -len(one[1]), [(p.age_s, p.reduction, p.loss) for p in one[1]])
    )
    return found[: MOST_LENDERS + 1]
