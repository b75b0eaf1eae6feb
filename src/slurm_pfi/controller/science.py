"""What the controller asks of the elasticity room, prepared once: curves, greatest reductions, the default PFI."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..elasticity.curve import ElasticityCurve
from ..elasticity.index import Pfi
from ..elasticity.library import Library, greatest_reduction

GRID_W = (200.0, 300.0, 400.0, 500.0, 600.0, 700.0)
"""The cap grid of a PFI that nobody measured: the six caps of arXiv 2609.11542 on H200."""


@dataclass(frozen=True)
class Science:
    """A library and what is derived from it. The same for all runs until runs have measurements of their own."""

    library: Library
    mean: ElasticityCurve = field(init=False)
    default_pfi: Pfi = field(init=False)
    _reductions: dict[float, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", self.library.mean())
        object.__setattr__(self, "default_pfi", self.library.default_pfi(GRID_W))

    def greatest_reduction(self, max_loss: float) -> float:
        """The largest reduction whose loss stays within ``max_loss`` (0..1), judged by the upper loss quantile."""
        known = self._reductions.get(max_loss)
        if known is None:
            known = self._reductions[max_loss] = greatest_reduction(max_loss, self.library)
        return known
