"""What the throughput of a run is worth: the weights of the sum that an allocation keeps small."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from ..elasticity.curve import FloatArray
from .solve import ProblemError

Objective: TypeAlias = Literal["progress", "tokens"]
"""``progress``: every GPU-hour of work counts the same, times the priority of its run. ``tokens``: every token does."""


def values(
    objective: Objective, *, gpus: ArrayLike, priority: ArrayLike, throughput: ArrayLike | None = None
) -> FloatArray:
    """Worth of each run's whole uncapped throughput, shape (runs,): ``Shares.value``.

    ``progress``: GPUs x priority, which is a weight of GPUs x priority / T_max on each unit of throughput.
    ``tokens``: T_max itself, whatever the priority. Raises ProblemError on a number of GPUs or a throughput that is
    not above 0, a priority below 0, and ``tokens`` without throughput.
    """
    count = _checked("GPUs", gpus, above=0.0)
    weight = _checked("priority", priority)
    if objective == "progress":
        return count * weight
    if throughput is None:
        raise ProblemError("the objective tokens needs the uncapped throughput of every run")
    tokens = _checked("throughput", throughput, above=0.0)
    if tokens.shape != count.shape:
        raise ProblemError(f"{tokens.shape} throughputs for {count.shape} runs")
    return tokens


def _checked(name: str, values: ArrayLike, above: float | None = None) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    right = np.isfinite(array) & (array >= 0 if above is None else array > above)
    if not right.all():
        place = int(np.argmin(right))
        least = "0 or more" if above is None else f"above {above:g}"
        raise ProblemError(f"run at place {place}: {name} {array.flat[place]:g}, it must be {least}")
    return array
