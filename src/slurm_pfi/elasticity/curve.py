"""Elasticity curves: the loss of throughput of a job as a function of its reduction of power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.intp]
BoolArray: TypeAlias = NDArray[np.bool_]

_SAME_SLOPE: Final = 1e-12
"""Slopes closer than this are one straight piece: far below what anyone measures."""

_BLOCK_POINTS: Final = 50_000
"""Hulls of so many points at once are found a quarter faster than of millions: the work stays in a core's cache."""


TAIL_REACH: Final = 0.45
"""Pessimistic, as it has to be: of the curves here, cut off before their deepest points in all ways, so much of the way
is half a point too low in 0.2 % of the points, at worst by 0.056; a straight line to no draw in 28 %, by 0.23."""


class CurveError(ValueError):
    """Figures that make no elasticity curve; the message says which and why."""


@dataclass(frozen=True, slots=True, eq=False)
class ElasticityCurve:
    """Loss (0..1) at ascending reductions (0..1), both of shape (n,), starting at (0, 0); linear between points.

    Needs n >= 2. Beyond the last point the loss is continued pessimistically, see ``tail_slope``.
    Raises CurveError on anything else.
    """

    reduction: FloatArray
    loss: FloatArray

    def __post_init__(self) -> None:
        x = np.array(self.reduction, dtype=np.float64)
        y = np.array(self.loss, dtype=np.float64)
        if x.ndim != 1 or x.shape != y.shape or x.size < 2:
            raise CurveError(f"a curve needs two or more points, got shapes {x.shape} and {y.shape}")
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise CurveError("a curve may hold finite numbers only")
        if x[0] != 0 or y[0] != 0:
            raise CurveError(f"a curve starts at reduction 0, loss 0, not at ({x[0]:g}, {y[0]:g})")
        if (np.diff(x) <= 0).any() or x[-1] > 1:
            raise CurveError("reductions must ascend and stay within 0..1")
        if (np.diff(y) < 0).any() or y[-1] > 1:
            raise CurveError("losses may not fall and must stay within 0..1")
        if x[-1] == 1 and y[-1] < 1:
            raise CurveError("a GPU that draws nothing does nothing: the loss at reduction 1 is 1")
        x.flags.writeable = False
        y.flags.writeable = False
        object.__setattr__(self, "reduction", x)
        object.__setattr__(self, "loss", y)

    @property
    def tail_slope(self) -> float:
        """Slope beyond the last point: the steepest of all measured ones, and at least what loses all in TAIL_REACH.

        That is a share of what is left of the draw. Below the lowest measured cap the clock nears its minimum,
        where each watt costs more than any before.
        """
        return self._slope_to(TAIL_REACH)

    def _slope_to(self, reach: float) -> float:
        steepest = float((np.diff(self.loss) / np.diff(self.reduction)).max())
        left = reach * (1.0 - float(self.reduction[-1]))
        return max(steepest, (1.0 - float(self.loss[-1])) / left) if left > 0 else steepest

    def loss_at(self, reduction: ArrayLike) -> FloatArray:
        """Loss at the given reductions, same shape. 0 at or below reduction 0 (a cap above the draw)."""
        return self._continued(reduction, self.tail_slope)

    def expected_at(self, reduction: ArrayLike) -> FloatArray:
        """As ``loss_at``, but beyond the last point towards (1, 1): for candidates of a mixture, no promise."""
        return self._continued(reduction, self._slope_to(1.0))

    def _continued(self, reduction: ArrayLike, slope: float) -> FloatArray:
        x = np.asarray(reduction, dtype=np.float64)
        beyond = self.loss[-1] + slope * (x - self.reduction[-1])
        inside = np.interp(x, self.reduction, self.loss)
        result: FloatArray = np.where(x > self.reduction[-1], np.minimum(beyond, 1.0), inside)
        return result

    def greatest_reduction(self, max_loss: float) -> float:
        """The largest reduction whose loss is at most ``max_loss``. Raises CurveError if that is below 0 or NaN."""
        if not max_loss >= 0:
            raise CurveError(f"the greatest loss must be 0 or more, got {max_loss}")
        if max_loss >= 1:
            return 1.0
        last = int(np.searchsorted(self.loss, max_loss, side="right")) - 1
        if last == self.loss.size - 1:
            return float(min(1.0, self.reduction[-1] + (max_loss - self.loss[-1]) / self.tail_slope))
        share = (max_loss - self.loss[last]) / (self.loss[last + 1] - self.loss[last])
        step = self.reduction[last + 1] - self.reduction[last]
        return float(self.reduction[last] + share * step)

    def convex_minorant(self) -> ElasticityCurve:
        """The greatest convex curve nowhere above this one, over the measured reductions."""
        owner = np.zeros(self.reduction.size, dtype=np.intp)
        keep = lower_hulls(owner, self.reduction, self.loss)
        return ElasticityCurve(self.reduction[keep], self.loss[keep])


def lower_hulls(owner: IntArray, x: FloatArray, y: FloatArray) -> IntArray:
    """Indices of the lower convex hulls of many curves laid end to end, all of shape (n,), in their order.

    ``owner`` numbers each point's curve from 0 up; the points of a curve lie together and ascend in x. A point above
    the chord of its neighbours is on no hull, whatever else goes, so all such points go at once. Curves that lost
    a point are looked at again, until none is left.
    """
    on_hull = np.ones(x.size, dtype=bool)
    place: IntArray = np.arange(x.size, dtype=np.intp)
    while place.size > 2:
        with np.errstate(divide="ignore", invalid="ignore"):  # steps between two curves are never looked at
            slope = np.diff(y) / np.diff(x)
            above = slope[:-1] >= slope[1:] - _SAME_SLOPE
        above &= owner[2:] == owner[:-2]
        gone = np.flatnonzero(above) + 1
        if not gone.size:
            break
        on_hull[place[gone]] = False
        again = np.zeros(int(owner[-1]) + 1, dtype=bool)
        again[owner[gone]] = True
        left = again[owner]
        left[gone] = False
        rest = np.flatnonzero(left)
        place, owner, x, y = place[rest], owner[rest], x[rest], y[rest]
    return np.flatnonzero(on_hull)


# ------------------------------------------------------------------------------------------------ many at once


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Straight pieces of convex curves, all of shape (n,): from ``start`` to ``end`` (reduction) at ``slope``.

    In the order of their curves and within a curve ascending; ``owner`` is the place of the distinct curve.
    """

    owner: IntArray
    start: FloatArray
    end: FloatArray
    slope: FloatArray


class CurveStack:
    """Many curves laid end to end, so that thousands of runs are handled without a Python loop.

    ``which`` (shape (runs,)) maps each of the curves given to its place among the ``distinct`` ones.
    """

    def __init__(self, curves: Sequence[ElasticityCurve]) -> None:
        place: dict[int, int] = {}
        distinct: list[ElasticityCurve] = []
        which = np.empty(len(curves), dtype=np.intp)
        for number, curve in enumerate(curves):
            key = id(curve)
            if key not in place:
                place[key] = len(distinct)
                distinct.append(curve)
            which[number] = place[key]
        sizes = np.array([curve.reduction.size for curve in distinct], dtype=np.intp)
        empty = [np.empty(0)]
        x = np.concatenate([curve.reduction for curve in distinct] or empty)
        y = np.concatenate([curve.loss for curve in distinct] or empty)
        self._lay_out(which, sizes, x, y, distinct)

    @classmethod
    def from_arrays(cls, reduction: ArrayLike, loss: ArrayLike) -> CurveStack:
        """One curve a run: losses of shape (runs, points) at reductions of that shape, or (points,) for all.

        What a single curve must keep holds here too. Raises CurveError, naming the row of the first curve that
        does not.
        """
        y = np.asarray(loss, dtype=np.float64)
        x = np.asarray(reduction, dtype=np.float64)
        if y.ndim != 2 or y.shape[1] < 2 or x.shape not in (y.shape, y.shape[1:]):
            raise CurveError(f"curves need shape (runs, 2 or more points), got {x.shape} and {y.shape}")
        _check_rows(np.atleast_2d(x), y)
        runs, points = y.shape
        x = np.broadcast_to(x, y.shape)
        stack = cls.__new__(cls)
        stack._lay_out(np.arange(runs), np.full(runs, points), x.ravel(), y.ravel(), None)
        return stack

    def _lay_out(
        self,
        which: IntArray,
        sizes: IntArray,
        x: FloatArray,
        y: FloatArray,
        curves: list[ElasticityCurve] | None,
    ) -> None:
        self.which = which
        self.distinct: int = sizes.size
        self._x, self._y = x, y
        self._owner: IntArray = np.repeat(np.arange(sizes.size, dtype=np.intp), sizes)
        self._end: IntArray = np.cumsum(sizes)
        self._first: IntArray = self._end - sizes
        self._curves = curves
        self._pieces: Pieces | None = None
        self._tail: FloatArray = self._tail_slopes()

    @property
    def curves(self) -> list[ElasticityCurve]:
        """The distinct curves one by one."""
        if self._curves is None:
            rows = zip(self._first.tolist(), self._end.tolist(), strict=True)
            self._curves = [ElasticityCurve(self._x[i:j], self._y[i:j]) for i, j in rows]
        return self._curves

    def all_same(self) -> bool:
        """Whether the curves given do not tell any two runs apart."""
        if self.distinct < 2:
            return True
        size = int(self._end[0])
        if (self._end - self._first != size).any():
            return False
        x, y = self._x.reshape(-1, size), self._y.reshape(-1, size)
        return bool((x == x[0]).all() and (y == y[0]).all())

    def loss_at(self, reduction: FloatArray) -> FloatArray:
        """Loss of each of the curves given at its own reduction, shape (runs,); as ElasticityCurve.loss_at."""
        if self.which.size == 0:
            return np.empty(0)
        # One search for all: curve k's points lie at 2k + x, and no reduction looked for lies outside 0..1.
        wanted = 2.0 * self.which + np.clip(reduction, 0.0, 1.0)
        right = np.searchsorted(2.0 * self._owner + self._x, wanted, side="left")
        last = self._end[self.which] - 1
        right = np.clip(right, self._first[self.which] + 1, last)
        x0, x1, y0, y1 = self._x[right - 1], self._x[right], self._y[right - 1], self._y[right]
        inside = y0 + (y1 - y0) * (np.clip(reduction, x0, x1) - x0) / (x1 - x0)
        beyond = self._y[last] + self._tail[self.which] * (reduction - self._x[last])
        result: FloatArray = np.where(reduction > self._x[last], np.minimum(beyond, 1.0), inside)
        return result

    def pieces(self) -> Pieces:
        """The convex minorants of the distinct curves, continued at the tail slope to reduction 1.

        The tail goes on past loss 1: there a loss is a price, and without it a run that has lost all looks free.
        """
        if self._pieces is None:
            self._pieces = self._cut()
        return self._pieces

    def _on_hulls(self) -> IntArray:
        """The points on the hulls, block by block of whole curves."""
        last_of_block = np.append(np.diff(self._end // _BLOCK_POINTS) != 0, True)[: self.distinct]
        found = [np.empty(0, dtype=np.intp)]
        for begin, end in pairwise([0, *self._end[last_of_block].tolist()]):
            owner = self._owner[begin:end] - self._owner[begin]
            found.append(lower_hulls(owner, self._x[begin:end], self._y[begin:end]) + begin)
        return np.concatenate(found)

    def _cut(self) -> Pieces:
        keep = self._on_hulls()
        owner, start, loss = self._owner[keep], self._x[keep], self._y[keep]
        last = np.append(owner[1:] != owner[:-1], np.ones(min(owner.size, 1), dtype=bool))
        end, slope = np.ones(owner.size), np.empty(owner.size)
        inner = np.flatnonzero(~last)
        end[inner] = start[inner + 1]
        slope[inner] = (loss[inner + 1] - loss[inner]) / (end[inner] - start[inner])
        slope[last] = self._tail
        real = start < 1.0
        if not real.all():  # a curve measured down to no draw at all has no tail
            owner, start, end, slope = owner[real], start[real], end[real], slope[real]
        return Pieces(owner=owner, start=start, end=end, slope=slope)

    def _tail_slopes(self) -> FloatArray:
        if not self.distinct:
            return np.empty(0)
        slope = np.full(self._x.size, -np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):  # steps between two curves are overwritten
            np.divide(np.diff(self._y), np.diff(self._x), out=slope[:-1])
        slope[self._end - 1] = -np.inf
        steepest = np.maximum.reduceat(slope, self._first)
        left = TAIL_REACH * (1.0 - self._x[self._end - 1])
        to_corner = np.divide(1.0 - self._y[self._end - 1], left, out=np.zeros_like(left), where=left > 0)
        result: FloatArray = np.maximum(steepest, to_corner)
        return result


def _check_rows(x: FloatArray, y: FloatArray) -> None:
    """Raise CurveError unless every row is a curve; y of shape (runs, points), x too or (1, points).

    Each check says what must hold, so that NaN fails it.
    """
    checks = (
        ((x[:, :1] == 0) & (y[:, :1] == 0), "a curve starts at reduction 0, loss 0"),
        (x[:, 1:] > x[:, :-1], "reductions must ascend and stay within 0..1"),
        (x[:, -1:] <= 1, "reductions must ascend and stay within 0..1"),
        (y[:, 1:] >= y[:, :-1], "losses may not fall and must stay within 0..1"),
        (y[:, -1:] <= 1, "losses may not fall and must stay within 0..1"),
        (
            (x[:, -1:] < 1) | (y[:, -1:] >= 1),
            "a GPU that draws nothing does nothing: the loss at reduction 1 is 1",
        ),
    )
    for right, says in checks:
        if not right.all():
            row = int(np.argmin(right.all(axis=1)))
            some = np.append(x[min(row, x.shape[0] - 1)], y[row : row + 1])
            reason = says if np.isfinite(some).all() else "a curve may hold finite numbers only"
            raise CurveError(f"curve in row {row}: {reason}")
