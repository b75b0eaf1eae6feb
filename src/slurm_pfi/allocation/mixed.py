"""Runs with GPUs of several models: one demand for the allocation, and its answer split into a cap for each model.

The GPUs of a synchronous run wait for each other, so its loss is the greatest loss of any of its groups, and a group
that loses less than that gives its watts for nothing. The cheapest caps for a loss L are therefore every group at
its greatest reduction with loss <= L. As L grows these caps trace one path, straight between corners of the groups'
curves; the run's own curve is loss against draw along this path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..elasticity.curve import ElasticityCurve, FloatArray
from ..model import Run
from ..units import MW_PER_W
from .problem import RunDemand
from .solve import ProblemError

_SAME_REDUCTION: Final = 1e-9
_SNAP_MW: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Group:
    """The GPUs of one model in a run. Powers per GPU and curve as in RunDemand; the draw is at most the ceiling."""

    model: str
    gpus: int
    ceiling_mw: int
    draw_mw: int
    floor_mw: int
    device_min_mw: int
    curve: ElasticityCurve


@dataclass(frozen=True, slots=True, eq=False)
class MixedRun:
    """A run of several groups as one demand, with the path that its caps follow.

    ``demand`` counts all GPUs, with the mean over them of each power. ``caps_mw``, shape (corners, groups): caps per
    GPU, first the ceilings, last the device minima, never rising. ``loss``, shape (corners,): loss of the run there.
    """

    groups: tuple[Group, ...]
    demand: RunDemand
    caps_mw: FloatArray
    loss: FloatArray


def combine(
    run: Run,
    groups: Sequence[Group],
    *,
    weight: float = 1.0,
    flex_none: bool = False,
    pfi: float | None = None,
) -> MixedRun:
    """The demand of a run with these groups. Means are rounded so that budget and floors hold when they are split.

    One group alone gives its own figures and curve unchanged. Raises ProblemError without groups and on a group
    without GPUs, with bounds out of order or a draw above its ceiling.
    """
    if not groups:
        raise ProblemError(f"run {run} has no GPUs")
    for group in groups:
        _check(run, group)
    top, drawn, floor, least = _levels(groups)
    path = [(0.0, top), (0.0, drawn)]
    for high, low in ((drawn, floor), (floor, least)):
        path += _path(groups, high, low)
    loss = np.maximum.accumulate(np.array([at for at, _ in path]))
    caps = np.minimum.accumulate(np.array([row for _, row in path]), axis=0)
    count = np.array([group.gpus for group in groups])
    total = caps @ count
    base_mw = float(drawn @ count)
    if len(groups) == 1:
        one = groups[0]
        bounds = one.ceiling_mw, one.draw_mw, one.floor_mw, one.device_min_mw
        curve = one.curve
    else:
        gpus = int(count.sum())
        ceiling_mw, floor_mw, device_min_mw = (
            -(-int(level.astype(np.int64) @ count) // gpus) for level in (top, floor, least)
        )
        bounds = ceiling_mw, max(1, round(base_mw / gpus)), floor_mw, device_min_mw
        curve = _curve(1.0 - total / base_mw, loss)
    demand = RunDemand(
        run,
        int(count.sum()),
        *bounds,
        curve=curve,
        weight=weight,
        flex_none=flex_none,
        pfi=pfi,
        common_curve=_common_curve(groups),
    )
    return MixedRun(groups=tuple(groups), demand=demand, caps_mw=caps, loss=loss)


def split(mixed: MixedRun, cap_mw: int) -> tuple[int, ...]:
    """The cap of each group's GPUs, in mW, when the run's mean cap is ``cap_mw``; all of them hold no more in sum.

    Whole watts, rounded down, or a group's ceiling where it is not cut. A mean cap below the device minima gives
    these; one above the ceiling raises ProblemError.
    """
    if cap_mw > mixed.demand.ceiling_mw:
        raise ProblemError(f"run {mixed.demand.run}: a cap of {cap_mw} mW is above the ceiling")
    if len(mixed.groups) == 1:
        return (cap_mw,)
    count = np.array([group.gpus for group in mixed.groups])
    total = mixed.caps_mw @ count
    wanted_mw = float(min(cap_mw * int(count.sum()), total[0]))
    # Along the path the total falls; where it stands still the later corner is the same caps.
    share = np.interp(-wanted_mw, -total, np.arange(total.size, dtype=np.float64))
    corner = min(int(share), total.size - 2)
    caps = mixed.caps_mw[corner] + (share - corner) * (mixed.caps_mw[corner + 1] - mixed.caps_mw[corner])
    top, _, _, least = _levels(mixed.groups)
    whole = np.floor((caps + _SNAP_MW) / MW_PER_W) * MW_PER_W
    caps = np.where(caps >= top - _SNAP_MW, top, np.clip(whole, least, top))
    return tuple(int(cap) for cap in caps)


def _check(run: Run, group: Group) -> None:
    if group.gpus < 1:
        raise ProblemError(f"run {run} has {group.gpus} GPUs of model {group.model}")
    if not 0 <= group.device_min_mw <= group.floor_mw <= group.ceiling_mw:
        raise ProblemError(
            f"run {run}, GPU model {group.model}: device minimum {group.device_min_mw}, floor {group.floor_mw} and"
            f" ceiling {group.ceiling_mw} mW are out of order"
        )
    if not 1 <= group.draw_mw <= group.ceiling_mw:
        raise ProblemError(
            f"run {run}, GPU model {group.model}: a draw of {group.draw_mw} mW under a ceiling of {group.ceiling_mw}"
        )


def _levels(groups: Sequence[Group]) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Ceiling, the cap that costs nothing, floor and device minimum in whole watts; each of shape (groups,)."""
    top = np.array([group.ceiling_mw for group in groups], dtype=np.float64)
    floor = np.minimum(np.ceil(np.array([g.floor_mw for g in groups]) / MW_PER_W) * MW_PER_W, top)
    least = np.minimum(np.ceil(np.array([g.device_min_mw for g in groups]) / MW_PER_W) * MW_PER_W, floor)
    drawn = np.maximum(np.array([group.draw_mw for group in groups], dtype=np.float64), floor)
    return top, drawn, floor, least


def _path(groups: Sequence[Group], high: FloatArray, low: FloatArray) -> list[tuple[float, FloatArray]]:
    """Corners (loss, caps) from the caps ``high`` to ``low``, each group between its two, as the loss grows.

    At a loss at which some curve is level there are two corners: just before it is spent, and all that it gives.
    """
    begin, end = _greatest_loss(groups, high), _greatest_loss(groups, low)
    corners = np.concatenate([group.curve.loss for group in groups])
    bounds = [_losses(groups, caps) for caps in (high, low)]
    corners = np.unique(np.concatenate((corners, *bounds, [begin, end, 1.0])))
    path: list[tuple[float, FloatArray]] = []
    for loss in corners[(corners >= begin) & (corners <= end)].tolist():
        for most in (False, True):
            reduction = np.array([_reduction(group.curve, loss, most=most) for group in groups])
            caps = (1.0 - reduction) * np.array([group.draw_mw for group in groups])
            path.append((loss, np.clip(caps, low, high)))
    path.append((end, low))
    return path


def _losses(groups: Sequence[Group], caps_mw: FloatArray) -> FloatArray:
    pairs = zip(groups, caps_mw.tolist(), strict=True)
    return np.array([float(group.curve.loss_at(1.0 - cap / group.draw_mw)) for group, cap in pairs])


def _greatest_loss(groups: Sequence[Group], caps_mw: FloatArray) -> float:
    return float(_losses(groups, caps_mw).max())


def _reduction(curve: ElasticityCurve, loss: float, *, most: bool) -> float:
    """The greatest reduction that costs at most ``loss``, or the least that costs so much."""
    if most:
        return curve.greatest_reduction(loss)
    if loss > curve.loss[-1]:
        return float(min(1.0, curve.reduction[-1] + (loss - curve.loss[-1]) / curve.tail_slope))
    place = int(np.searchsorted(curve.loss, loss, side="left"))
    if place == 0:
        return 0.0
    x, y = curve.reduction[place - 1 : place + 1], curve.loss[place - 1 : place + 1]
    return float(x[0] + (x[1] - x[0]) * (loss - y[0]) / (y[1] - y[0]))


def _common_curve(groups: Sequence[Group]) -> ElasticityCurve | None:
    """The curve that all groups have, if they do."""
    first = groups[0].curve
    same = all(
        np.array_equal(first.reduction, g.curve.reduction) and np.array_equal(first.loss, g.curve.loss)
        for g in groups
    )
    return first if same else None


def _curve(reduction: FloatArray, loss: FloatArray) -> ElasticityCurve:
    """The curve through the corners of a path; what lies above the draw, and corners twice, are left out."""
    x, y = [0.0], [0.0]
    for at, lost in zip(reduction.tolist(), loss.tolist(), strict=True):
        if at > x[-1] + _SAME_REDUCTION:
            x.append(at)
            y.append(lost)
    if len(x) == 1 or x[-1] > 1.0 - _SAME_REDUCTION:
        x, y = [*x[: max(1, len(x) - 1)], 1.0], [*y[: max(1, len(y) - 1)], 1.0]
    return ElasticityCurve(np.array(x), np.array(y))
