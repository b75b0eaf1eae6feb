"""The Power Flexibility Index (PFI): how cheaply a job sheds power. Eq. 1 of arXiv 2609.11542."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from .curve import CurveError, ElasticityCurve, FloatArray
from .names import same_gpu
from .sweep import Sweep, read_sweep

PfiSource: TypeAlias = Literal["measured", "predicted", "declared", "default"]

SMALLEST_LOSS: Final = 0.01
"""A point with less loss is noise over noise: repeats differ by half a per cent."""

POWER_COV: Final = 0.004
THROUGHPUT_COV: Final = 0.005
"""Coefficients of variation between repeated runs, as the paper measured them."""

SAMPLES: Final = 10_000


class GridMismatchError(ValueError):
    """Two PFI values that may not be compared: other caps give another index, and so does another GPU model."""


@dataclass(frozen=True, slots=True)
class Pfi:
    """A PFI and what it rests on. Above 1 a job loses less throughput than power; higher is more flexible.

    ``low``..``high`` is the 95 % interval. ``grid_w``: all caps of the sweep, ascending, the uncapped one included.
    ``used`` and ``left_out`` count the capped points. ``gpu_model`` is empty when it belongs to no single model.
    """

    value: float
    low: float
    high: float
    grid_w: tuple[float, ...]
    used: int
    left_out: int
    source: PfiSource
    gpu_model: str

    def difference(self, other: Pfi) -> float:
        """This value minus the other. Raises GridMismatchError on another grid or GPU model."""
        if self.grid_w != other.grid_w:
            raise GridMismatchError(
                f"PFI on the caps {_caps(self)} W and on {_caps(other)} W: go from one grid to the other by a curve"
            )
        if self.gpu_model != other.gpu_model and not same_gpu(self.gpu_model, other.gpu_model):
            raise GridMismatchError(
                f"PFI of {self.gpu_model or 'no'} and {other.gpu_model or 'no'} GPU model"
            )
        return self.value - other.value

    def __lt__(self, other: Pfi) -> bool:
        """Order by value. Raises GridMismatchError as ``difference`` does."""
        return self.difference(other) < 0


def pfi(
    cap_w: ArrayLike,
    power_w: ArrayLike,
    throughput: ArrayLike,
    *,
    gpu_model: str = "",
    all_points: bool = False,
    source: PfiSource = "measured",
    power_cov: float = POWER_COV,
    throughput_cov: float = THROUGHPUT_COV,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Pfi:
    """Eq. 1: the mean over capped points of reduction / loss, with a 95 % Monte Carlo interval.

    Caps and draws (W per GPU) and throughputs (any unit), each of shape (n,); the highest cap is the uncapped point.
    Points with a loss under 1 % are left out and counted; with ``all_points``, as in the paper, only those whose
    throughput is that of the uncapped point. The interval resamples all draws and throughputs with the noise given.
    Raises CurveError as ``read_sweep`` does, when no point is left, and when none of those left drew less.
    """
    sweep = read_sweep(cap_w, power_w, throughput)
    reduction, loss = _reduction_and_loss(sweep.power_w, sweep.throughput)
    used = loss != 0 if all_points else loss >= SMALLEST_LOSS
    if not used.any():
        least = "" if all_points else f" of {100 * SMALLEST_LOSS:.0f} % or more"
        raise CurveError(
            f"no capped point lost throughput{least}: the PFI is not defined: measure lower caps"
        )
    if not (reduction[used] > 0).any():
        raise CurveError(
            "no cap that lost throughput lowered the draw: the PFI is not defined: measure lower caps"
        )
    low, high = _interval(
        sweep, used, np.random.default_rng(seed), samples, power_cov=power_cov, throughput_cov=throughput_cov
    )
    return Pfi(
        value=float((reduction[used] / loss[used]).mean()),
        low=low,
        high=high,
        grid_w=tuple(sorted(sweep.cap_w.tolist())),
        used=int(used.sum()),
        left_out=int((~used).sum()),
        source=source,
        gpu_model=gpu_model,
    )


def pfi_on_grid(
    curve: ElasticityCurve,
    grid_w: Sequence[float],
    draw_w: float,
    *,
    source: PfiSource = "measured",
    gpu_model: str = "",
    all_points: bool = False,
    extrapolate: bool = False,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Pfi:
    """The PFI of a curve on another grid of caps (W): the only way from one grid to another.

    ``draw_w``: the job's uncapped draw per GPU. At each cap the job draws the lesser of cap and draw, and loses what
    the curve says; the highest cap of the grid is the uncapped point, whether or not it binds. Points and interval
    as in ``pfi``. Raises CurveError as ``pfi`` does, and when the grid goes deeper than the curve was measured, unless
    ``extrapolate`` allows the pessimistic continuation.
    """
    cap_w = descending_caps(grid_w)
    power_w = draws_under(cap_w, draw_w)
    reduction = 1.0 - power_w / draw_w
    deepest = float(curve.reduction[-1])
    if not extrapolate and reduction[-1] > deepest + 1e-6:
        raise CurveError(
            f"a cap of {cap_w[-1]:g} W is a reduction of {100 * reduction[-1]:.1f} %, "
            f"the curve was measured to {100 * deepest:.1f} %"
        )
    return pfi(
        cap_w,
        power_w,
        1.0 - curve.loss_at(reduction),
        gpu_model=gpu_model,
        all_points=all_points,
        source=source,
        samples=samples,
        seed=seed,
    )


def descending_caps(grid_w: Sequence[float]) -> FloatArray:
    """A grid's caps (W), the uncapped point first. Raises CurveError on fewer than two, and on what is no cap."""
    cap_w: FloatArray = np.array(sorted({float(cap) for cap in grid_w}, reverse=True))
    if cap_w.size < 2 or not (np.isfinite(cap_w).all() and cap_w[-1] > 0):
        raise CurveError("a grid needs two or more different caps above zero")
    return cap_w


def draws_under(cap_w: FloatArray, draw_w: float) -> FloatArray:
    """What a job of this uncapped draw (W) draws under each cap. Raises CurveError on a draw that is none."""
    if not (np.isfinite(draw_w) and draw_w > 0):
        raise CurveError(f"the uncapped draw must be a number above zero, got {draw_w:g}")
    power_w: FloatArray = np.minimum(cap_w, draw_w)
    return power_w


def _reduction_and_loss(power_w: FloatArray, throughput: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Both of shape (..., n - 1); the uncapped point comes first along the last axis."""
    return 1.0 - power_w[..., 1:] / power_w[..., :1], 1.0 - throughput[..., 1:] / throughput[..., :1]


def _interval(
    sweep: Sweep,
    used: np.ndarray[tuple[int], np.dtype[np.bool_]],
    rng: np.random.Generator,
    samples: int,
    *,
    power_cov: float,
    throughput_cov: float,
) -> tuple[float, float]:
    taken = np.concatenate(([True], used))
    power_w, throughput = sweep.power_w[taken], sweep.throughput[taken]
    shape = (samples, power_w.size)
    reduction, loss = _reduction_and_loss(
        power_w * (1.0 + power_cov * rng.standard_normal(shape)),
        throughput * (1.0 + throughput_cov * rng.standard_normal(shape)),
    )
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # a sample without a loss lies at the end of the order
        values = (reduction / loss).mean(axis=1)
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def _caps(value: Pfi) -> str:
    return "/".join(f"{cap:g}" for cap in value.grid_w)
