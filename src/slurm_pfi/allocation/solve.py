"""Sharing a reduction over many runs at once: plain arrays in, reductions out.

A reduction is a share of a run's own baseline draw. ``need`` is what must be reached in all, ``sum(watts x
reduction)``, in the unit of ``watts``, reductions already taken included. If there is less, everyone ends at the
greatest reduction and the caller sees the shortfall; if less is needed than was taken, everyone stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..elasticity.curve import CurveStack, FloatArray, IntArray
from .water import fill_level

_SAME_PRICE: Final = 1e-12
"""Prices that agree to such a share are one price: two ways to compute the same number differ by less."""
_COARSE_BITS: Final = 46
"""Prices are first counted in bins by the leading bits of the number: 11 of the exponent, 6 of the fraction."""
_NEGLIGIBLE: Final = 1e-12
_LEAST_WATTS: Final = 1e-300  # as a share of the greatest: not so small that a division by it has no answer


class ProblemError(ValueError):
    """A problem that contradicts itself; the message names the run."""


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """What there is to share, all of shape (runs,).

    ``watts``: baseline draw of all GPUs of a run, in any unit of power, above 0. ``value``: worth of its whole
    throughput, 0 or more. ``start``: reductions already taken. ``end``: greatest reductions; 0 <= start <= end <= 1.
    Raises ProblemError, naming the place of the first run that is wrong.
    """

    watts: FloatArray
    value: FloatArray
    start: FloatArray
    end: FloatArray

    def __post_init__(self) -> None:
        arrays = {name: np.asarray(getattr(self, name), dtype=np.float64) for name in self.__slots__}
        shapes = {array.shape for array in arrays.values()}
        if len(shapes) != 1 or arrays["watts"].ndim != 1:
            raise ProblemError(f"shares need arrays of one shape (runs,), got {sorted(shapes)}")
        for name, array in arrays.items():
            object.__setattr__(self, name, array)
            _refuse(~np.isfinite(array), array, f"{name} {{}} is no finite number")
        _refuse(~(self.watts > 0), self.watts, "a draw of {}: it must be above 0")
        _refuse(~(self.value >= 0), self.value, "a value of {}: it must be 0 or more")
        _refuse(self.start < 0, self.start, "a start of {}: no reduction is below 0")
        _refuse(self.end > 1, self.end, "an end of {}: no reduction is above 1")
        _refuse(self.end < self.start, self.end, "an end of {} lies below the start")
        with np.errstate(over="ignore"):
            for name in ("watts", "value"):
                if not math.isfinite(float(arrays[name].sum())):
                    raise ProblemError(f"the sum of all {name} is too great for a number")

    @property
    def most(self) -> float:
        """The greatest ``need`` that can be met: everyone at the end."""
        return float((self.watts * self.end).sum())


def _refuse(wrong: NDArray[np.bool_], values: FloatArray, says: str) -> None:
    if wrong.any():
        place = int(np.argmax(wrong))
        raise ProblemError(f"run at place {place}: " + says.format(f"{values[place]:g}"))


def equal(shares: Shares, need: float) -> FloatArray:
    """The same reduction for all, as far as start and end let them; shape (runs,). Raises ProblemError on NaN."""
    watts, extra = _scaled(shares, need)
    return _level(shares.start, shares.end, watts, extra)


def by_index(shares: Shares, pfi: FloatArray, need: float) -> FloatArray:
    """Eq. 2 of arXiv 2609.11542: watts given up in proportion to P/T x PFI, where T is ``value``; shape (runs,).

    Who would pass start or end stays there and the others make up for it. A run of value 0 gives first, one whose
    PFI is 0 or less last; among such runs the reduction is the same for all. Not scale-free: two halves of a run
    give twice what the whole would. Raises ProblemError on a PFI or need that is no number.
    """
    pfi = np.asarray(pfi, dtype=np.float64)
    if pfi.shape != shares.watts.shape:
        raise ProblemError(f"{pfi.shape} values of PFI for {shares.watts.shape} runs")
    _refuse(~np.isfinite(pfi), pfi, "a PFI of {} is no finite number")
    watts, extra = _scaled(shares, need)
    if extra >= _left(shares, watts):
        return shares.end.copy()
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        rate = np.where(pfi > 0, pfi / shares.value, 0.0)  # reduction = level x rate
    first = np.isinf(rate)
    rate = rate / np.max(rate, where=~first, initial=np.finfo(float).tiny)
    last = rate < _NEGLIGIBLE
    result = shares.start.copy()
    for group, per_level in ((first, None), (~first & ~last, rate), (last & ~first, None)):
        start, end, scale = shares.start[group], shares.end[group], watts[group]
        if per_level is None:
            result[group] = _level(start, end, scale, extra)
        else:
            k = per_level[group]
            level = fill_level(start / k, end / k, scale * k, extra) if k.size else 0.0
            result[group] = np.clip(level * k, start, end)
        extra -= float((scale * (result[group] - start)).sum())
        if extra <= 0:
            break
    return result


def marginal(shares: Shares, curves: CurveStack, need: float) -> FloatArray:
    """The reductions of least total ``value x loss`` on the curves' convex minorants, exactly; shape (runs,).

    All straight pieces of all curves in order of loss per watt are taken until the need is met. The curves are
    convex, so no run's later piece is cheaper than an earlier one. Pieces of one price are filled to one level of
    reduction, so that runs which nothing tells apart are treated as ``equal`` treats them.
    Raises ProblemError on a need that is no number or another number of curves than runs.
    """
    _check_number(shares, curves)
    watts, extra = _scaled(shares, need)
    if extra <= 0 or not watts.size:
        return shares.start.copy()
    if extra >= _left(shares, watts):
        return shares.end.copy()
    run, first, last, slope = pieces_of_runs(shares, curves)
    value = shares.value / max(float(shares.value.max()), np.finfo(float).tiny)
    with np.errstate(over="ignore"):
        price = (value / watts)[run] * slope
    gives = watts[run] * (last - first)
    at = _marginal_price(price, gives, extra)
    low, high = at * (1 - _SAME_PRICE), at * (1 + _SAME_PRICE)
    taken = price < low
    tied = np.flatnonzero((price >= low) & (price <= high))
    still = extra - float(gives[taken].sum())
    level = fill_level(first[tied], last[tied], watts[run[tied]], still)
    length = np.where(taken, last - first, 0.0)
    length[tied] = np.clip(level, first[tied], last[tied]) - first[tied]
    result = shares.start + np.bincount(run, weights=length, minlength=watts.size)
    within: FloatArray = np.minimum(result, shares.end)
    return within


def pieces_of_runs(shares: Shares, curves: CurveStack) -> tuple[IntArray, FloatArray, FloatArray, FloatArray]:
    """Every run's own copy of its curve's convex pieces between its start and end, in the order of the runs.

    Run, first reduction, last reduction and slope (loss per reduction), each of shape (pieces,). Raises ProblemError
    on another number of curves than runs.
    """
    _check_number(shares, curves)
    pieces = curves.pieces()
    count = np.bincount(pieces.owner, minlength=curves.distinct)
    offset = np.cumsum(count) - count
    per_run = count[curves.which]
    run = np.repeat(np.arange(shares.watts.size), per_run)
    nth = np.arange(run.size) - np.repeat(np.cumsum(per_run) - per_run, per_run)
    piece = offset[curves.which][run] + nth
    first = np.maximum(pieces.start[piece], shares.start[run])
    last = np.minimum(pieces.end[piece], shares.end[run])
    real = last > first
    return run[real], first[real], last[real], pieces.slope[piece][real]


def _check_number(shares: Shares, curves: CurveStack) -> None:
    if curves.which.size != shares.watts.size:
        raise ProblemError(f"{curves.which.size} curves for {shares.watts.size} runs")


def _scaled(shares: Shares, need: float) -> tuple[FloatArray, float]:
    """Watts as shares of the greatest, and what must be given beyond the starts in that unit: no sum overflows."""
    if math.isnan(need):
        raise ProblemError("the needed reduction is no number")
    unit = float(shares.watts.max(initial=0.0)) or 1.0
    watts = np.maximum(shares.watts / unit, _LEAST_WATTS)
    return watts, float(need) / unit - float((watts * shares.start).sum())


def _left(shares: Shares, watts: FloatArray) -> float:
    """What all together can give beyond their starts."""
    return float((watts * (shares.end - shares.start)).sum())


def _level(start: FloatArray, end: FloatArray, watts: FloatArray, extra: float) -> FloatArray:
    if extra <= 0 or not start.size:
        return start.copy()
    level = fill_level(start, end, watts, extra)
    return np.minimum(np.maximum(start, level), end)


def _marginal_price(price: FloatArray, gives: FloatArray, need: float) -> float:
    """The price at which the pieces of that price and less first give ``need``.

    Only a bin of the pieces is sorted: the bins of the leading bits of a number >= 0 are in the order of the numbers.
    """
    bits = np.ascontiguousarray(price).view(np.int64) >> _COARSE_BITS
    low = int(bits.min())
    given = np.cumsum(np.bincount(bits - low, weights=gives))
    place = min(int(np.searchsorted(given, need)), given.size - 1)
    inside = np.flatnonzero(bits == low + place)
    order = inside[np.argsort(price[inside], kind="stable")]
    below = float(given[place - 1]) if place else 0.0
    nth = int(np.searchsorted(below + np.cumsum(gives[order]), need))
    return float(price[order[min(nth, order.size - 1)]])
