"""PFI predicted from two counters of a job that runs uncapped, by a line that a site fits on its own sweeps.

The feature is the DRAM copy product of arXiv 2609.11542: DRAM activity x memory-copy utilisation, both 0..1. The paper
publishes neither slope nor intercept, so nothing is predicted before a site has measured: ``predict`` without a
calibration answers ``NoCalibration``, and the library's prior stands.

The interval is that of one new job at the 95 % level. Outside the feature values of the fit it is widened by what the
line may be wrong there, and the prediction says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import numpy as np

from .curve import FloatArray
from .index import GridMismatchError, Pfi
from .names import same_gpu
from .student import t_quantile

VERSION: Final = 1
MIN_JOBS: Final = 4
LEVEL: Final = 0.95


class PredictorError(ValueError):
    """Sweeps, counters or a calibration that cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class SweptJob:
    """A job with its measured PFI and the counters of its uncapped point; ``cluster`` groups jobs that are alike."""

    name: str
    cluster: str
    feature: float
    pfi: Pfi


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted line with all that an interval needs.

    ``residual_sd`` has n - 2 degrees of freedom; ``sxx`` is the sum of squares of the feature about ``x_mean``,
    ``x_low``..``x_high`` its range. ``warnings`` say in words why the line should not be trusted.
    """

    grid_w: tuple[float, ...]
    gpu_model: str
    n: int
    slope: float
    intercept: float
    residual_sd: float
    x_mean: float
    sxx: float
    x_low: float
    x_high: float
    source_sha256: str
    warnings: tuple[str, ...] = ()

    def line(self, feature: float) -> float:
        return self.intercept + self.slope * feature


@dataclass(frozen=True, slots=True)
class Prediction:
    """``pfi`` has the source ``predicted`` and its 95 % interval; ``sd`` is its standard error for one new job.

    ``outside``: how far the feature lies beyond those of the fit, 0 within.
    """

    pfi: Pfi
    sd: float
    outside: float


@dataclass(frozen=True, slots=True)
class NoCalibration:
    """No line was fitted for this site, so nothing is predicted."""

    reason: str = "no calibration: fit one with 'slurm-pfi fit-predictor'; the library's prior stands"


@dataclass(frozen=True, slots=True)
class Score:
    """How well predictions meet measured PFI; None where a figure is not defined. ``n``: jobs predicted."""

    n: int
    r2: float | None
    rmse: float
    spearman: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The predictor judged in the paper's form. Predictions are of shape (jobs,).

    ``by_cluster`` leaves out the whole cluster of a job; None, with ``why_not``, where a rest cannot be fitted.
    """

    in_sample: Score
    leave_one_out: Score
    leave_cluster_out: Score | None
    why_not: str
    clusters: int
    by_job: FloatArray
    by_cluster: FloatArray | None


def copy_product(dram_activity: float, memory_copy_utilisation: float) -> float:
    """The feature. Raises PredictorError unless both lie within 0..1."""
    for name, value in (
        ("DRAM activity", dram_activity),
        ("memory-copy utilisation", memory_copy_utilisation),
    ):
        if not 0 <= value <= 1:  # NaN fails too
            raise PredictorError(f"{name} {value:g} must lie within 0..1 (a share, not per cent)")
    return dram_activity * memory_copy_utilisation


def fit(jobs: Sequence[SweptJob], *, source_sha256: str = "") -> Calibration:
    """Least squares of PFI on the copy product. ``source_sha256`` names the file that the sweeps came from.

    Raises PredictorError on fewer than four jobs and on a feature that does not vary, GridMismatchError on jobs
    of different cap grids or GPU models.
    """
    x, y = _checked(jobs)
    slope, intercept = _line(x, y)
    residual = y - intercept - slope * x
    evaluation = evaluate(jobs)
    warnings = []
    if slope < 0:
        warnings.append(
            f"the slope is negative ({slope:.3g}): these jobs lose more the more they use memory, against what caps do"
        )
    if evaluation.leave_one_out.r2 is not None and evaluation.leave_one_out.r2 < 0:
        warnings.append(
            f"R2 of jobs left out is {evaluation.leave_one_out.r2:.2f}: the mean of the sweeps predicts better"
        )
    return Calibration(
        grid_w=jobs[0].pfi.grid_w,
        gpu_model=jobs[0].pfi.gpu_model,
        n=len(jobs),
        slope=slope,
        intercept=intercept,
        residual_sd=math.sqrt(float(residual @ residual) / (len(jobs) - 2)),
        x_mean=float(x.mean()),
        sxx=float(((x - x.mean()) ** 2).sum()),
        x_low=float(x.min()),
        x_high=float(x.max()),
        source_sha256=source_sha256,
        warnings=tuple(warnings),
    )


def predict(
    calibration: Calibration | None, dram_activity: float, memory_copy_utilisation: float, *, gpu_model: str
) -> Prediction | NoCalibration:
    """The PFI of a job from its counters while uncapped, on the calibration's cap grid.

    Raises PredictorError on counters outside 0..1, GridMismatchError on another GPU model than was calibrated.
    """
    x = copy_product(dram_activity, memory_copy_utilisation)
    if calibration is None:
        return NoCalibration()
    known = calibration
    if not same_gpu(gpu_model, known.gpu_model):
        raise GridMismatchError(
            f"the calibration is for {known.gpu_model}, the job runs on {gpu_model or 'no known GPU model'}: "
            "sweep some jobs there and fit again"
        )
    outside = max(known.x_low - x, x - known.x_high, 0.0)
    spread = known.residual_sd * math.sqrt(1.0 + 1.0 / known.n + (x - known.x_mean) ** 2 / known.sxx)
    # Nobody saw the line go on: it may as well end where the sweeps end.
    sd = math.hypot(spread, known.slope * outside)
    half = t_quantile(0.5 + LEVEL / 2, known.n - 2) * sd
    value = known.line(x)
    return Prediction(
        pfi=Pfi(
            value=value,
            low=value - half,
            high=value + half,
            grid_w=known.grid_w,
            used=0,
            left_out=0,
            source="predicted",
            gpu_model=known.gpu_model,
        ),
        sd=sd,
        outside=outside,
    )


# ------------------------------------------------------------------------------------------------- evaluation


def evaluate(jobs: Sequence[SweptJob]) -> Evaluation:
    """R2 (about the mean of all), RMSE and Spearman's rho: in-sample, each job left out, each cluster left out.

    Raises as ``fit``.
    """
    x, y = _checked(jobs)
    slope, intercept = _line(x, y)
    groups = np.unique([job.cluster for job in jobs], return_inverse=True)[1]
    by_job, why_job = _held_out(x, y, np.arange(y.size))
    by_cluster, why_cluster = _held_out(x, y, groups)
    if by_job is None:
        raise PredictorError(f"{why_job}: sweep jobs that use memory differently")
    return Evaluation(
        in_sample=_score(y, intercept + slope * x),
        leave_one_out=_score(y, by_job),
        leave_cluster_out=None if by_cluster is None else _score(y, by_cluster),
        why_not=why_cluster,
        clusters=int(groups.max()) + 1,
        by_job=by_job,
        by_cluster=by_cluster,
    )


def _held_out(
    x: FloatArray, y: FloatArray, groups: np.ndarray[tuple[int], np.dtype[np.intp]]
) -> tuple[FloatArray | None, str]:
    """Predictions, (jobs,), each by a line fitted without the job's group; None and why if some rest has no line."""
    made = np.empty(y.size)
    for group in np.unique(groups):
        out = groups == group
        rest_x, rest_y = x[~out], y[~out]
        if rest_x.size < 2 or _constant(rest_x):
            return None, "with one group left out the feature of the rest does not vary"
        slope, intercept = _line(rest_x, rest_y)
        made[out] = intercept + slope * x[out]
    return made, ""


def _checked(jobs: Sequence[SweptJob]) -> tuple[FloatArray, FloatArray]:
    if len(jobs) < MIN_JOBS:
        raise PredictorError(
            f"{len(jobs)} usable jobs: a line with an interval needs {MIN_JOBS} or more; sweep more jobs"
        )
    for job in jobs[1:]:
        try:
            job.pfi.difference(jobs[0].pfi)
        except GridMismatchError as error:
            raise GridMismatchError(
                f"{job.name} and {jobs[0].name}: {error}; fit one file for each GPU model and grid of caps"
            ) from error
    x = np.array([job.feature for job in jobs])
    y = np.array([job.pfi.value for job in jobs])
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise PredictorError("a feature or a PFI is no finite number")
    if _constant(x):
        raise PredictorError(
            "all jobs have the same DRAM copy product: sweep jobs that use memory differently"
        )
    return x, y


def _constant(x: FloatArray) -> bool:
    return float(np.ptp(x)) <= 1e-9


def _line(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    away = x - x.mean()
    slope = float(away @ (y - y.mean()) / (away @ away))
    return slope, float(y.mean() - slope * x.mean())


def _score(y: FloatArray, predicted: FloatArray) -> Score:
    error = float(((y - predicted) ** 2).sum())
    total = float(((y - y.mean()) ** 2).sum())
    return Score(
        n=y.size,
        r2=1.0 - error / total if total > 0 else None,
        rmse=math.sqrt(error / y.size),
        spearman=_spearman(y, predicted),
    )


def _spearman(one: FloatArray, other: FloatArray) -> float | None:
    first, second = _ranks(one), _ranks(other)
    first, second = first - first.mean(), second - second.mean()
    size = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / size if size > 0 else None


def _ranks(values: FloatArray) -> FloatArray:
    """Ranks from 1, equal values share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    result: FloatArray = (last - 0.5 * (count - 1))[place]
    return result


# ---------------------------------------------------------------------------------------------- calibration file


def to_json(calibration: Calibration) -> str:
    """The calibration file: one JSON object."""
    body = {"version": VERSION, "feature": "dram_copy_product", **asdict(calibration)}
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


def from_json(text: str, *, origin: str) -> Calibration:
    """Read a calibration file. Raises PredictorError, naming ``origin``, on anything that ``to_json`` did not write."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise PredictorError(f"{origin}: no JSON: {error}") from error
    if not isinstance(body, dict) or body.get("version") != VERSION:
        raise PredictorError(f"{origin}: no calibration of version {VERSION}: fit it again")
    wanted = {field.name for field in fields(Calibration)} | {"version", "feature"}
    if body.keys() != wanted:
        raise PredictorError(f"{origin}: fields {', '.join(sorted(body.keys() ^ wanted))}: fit it again")
    made = Calibration(
        grid_w=tuple(_numbers(body["grid_w"], "grid_w", origin)),
        gpu_model=_text(body["gpu_model"], "gpu_model", origin),
        n=int(_number(body["n"], "n", origin)),
        **{
            name: _number(body[name], name, origin)
            for name in ("slope", "intercept", "residual_sd", "x_mean", "sxx", "x_low", "x_high")
        },
        source_sha256=_text(body["source_sha256"], "source_sha256", origin),
        warnings=tuple(_text(one, "warnings", origin) for one in _list(body["warnings"], "warnings", origin)),
    )
    if made.n < MIN_JOBS or made.n != body["n"] or made.residual_sd < 0 or made.sxx <= 0:
        raise PredictorError(f"{origin}: figures that no fit gives: fit it again")
    if len(made.grid_w) < 2 or made.x_low > made.x_high:
        raise PredictorError(f"{origin}: a grid or a range that no fit gives: fit it again")
    return made


def _number(value: Any, name: str, origin: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PredictorError(f"{origin}: {name} is no finite number")
    return float(value)


def _numbers(value: Any, name: str, origin: str) -> list[float]:
    return [_number(one, name, origin) for one in _list(value, name, origin)]


def _list(value: Any, name: str, origin: str) -> list[Any]:
    if not isinstance(value, list):
        raise PredictorError(f"{origin}: {name} is no list")
    return value


def _text(value: Any, name: str, origin: str) -> str:
    if not isinstance(value, str):
        raise PredictorError(f"{origin}: {name} is no text")
    return value
