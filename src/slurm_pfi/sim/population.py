"""A population of measured jobs to draw sites from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..elasticity.curve import CurveStack, ElasticityCurve, FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One measured job as the truth of a study.

    ``pfi``: Eq. 1 on its own cap grid, None where no point lost enough to count; ``pfi_reductions``: what those caps
    would take from its draw. Nothing is known below its lowest measured cap, so no run is cut deeper.
    """

    curve_id: str
    gpu_model: str
    family: str
    curve: ElasticityCurve
    draw_w: float
    pfi: float | None
    pfi_reductions: tuple[float, ...]
    value: float = 1.0

    @property
    def deepest(self) -> float:
        return float(self.curve.reduction[-1])


class Population:
    """Members, drawn so that families count alike, and within each its members."""

    def __init__(self, members: Sequence[Member]) -> None:
        if not members:
            raise ValueError("a population needs at least one member")
        self.members = tuple(members)
        self.families = tuple(sorted({one.family for one in members}))
        count = {name: sum(one.family == name for one in members) for name in self.families}
        self._chance = np.array([1 / len(count) / count[one.family] for one in members])
        self._curves = CurveStack([one.curve for one in members])
        self.gpu_models = tuple(sorted({one.gpu_model for one in members}))

    def draw(self, rng: np.random.Generator, runs: int) -> IntArray:
        """Places of ``runs`` members, drawn with replacement."""
        return np.asarray(rng.choice(len(self.members), size=runs, p=self._chance), dtype=np.intp)

    def curves(self, drawn: IntArray) -> CurveStack:
        """The true curves of the members drawn."""
        return CurveStack([self.members[i].curve for i in drawn])

    def column(self, name: str, drawn: IntArray) -> FloatArray:
        """A number of each member drawn, shape (runs,)."""
        return np.array([getattr(self.members[i], name) for i in drawn], dtype=np.float64)
