"""Filling intervals to one common level, exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fill_level(
    start: NDArray[np.float64], end: NDArray[np.float64], rate: NDArray[np.float64], need: float
) -> float:
    """The lowest level L at which sum(rate x (clip(L, start, end) - start)) reaches ``need``.

    ``start <= end`` and ``rate >= 0``, all of shape (n,), n >= 1. If all of it is less than ``need``: the highest
    end. The sum is piecewise linear in L with corners at starts and ends, so the level follows from one sort.
    """
    corner = np.concatenate((start, end))
    turn = np.concatenate((rate, -rate))
    order = np.argsort(corner, kind="stable")
    corner, turn = corner[order], turn[order]
    slope = np.maximum(np.cumsum(turn), 0.0)  # below zero is rounding: nothing drains
    filled = np.concatenate(([0.0], np.cumsum(slope[:-1] * np.diff(corner))))
    place = int(np.searchsorted(filled, need, side="left"))
    if place == 0:
        return float(corner[0])
    if place == filled.size:
        return float(corner[-1])
    return float(corner[place - 1] + (need - filled[place - 1]) / slope[place - 1])
