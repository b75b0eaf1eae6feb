"""Elasticity curves: the loss of throughput of a job as a function of its reduction of power."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ElasticityCurve:
    """Loss (0..1) at ascending reductions (0..1), both of shape (n,), starting at (0, 0); linear between points."""

    reduction: FloatArray
    loss: FloatArray
