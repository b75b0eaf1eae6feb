"""What the controller asks of the elasticity room, prepared once: curves, greatest reductions, the default PFI."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..config import Config
from ..elasticity.curve import ElasticityCurve
from ..elasticity.curvefile import CurveFileError, load_text
from ..elasticity.index import Pfi
from ..elasticity.library import Library, LibraryError, greatest_reduction

GRID_W = (200.0, 300.0, 400.0, 500.0, 600.0, 700.0)
"""The cap grid of a PFI that nobody measured: the six caps of arXiv 2609.11542 on H200."""


def site_library(config: Config) -> Library:
    """The package's curves and the site's own. Raises LibraryError when the site's file cannot be used."""
    library = Library.load_default()
    if config.controller.curves is None:
        return library
    path = Path(config.controller.curves)
    try:
        return library.extended(load_text(path), origin=str(path))
    except CurveFileError as error:
        raise LibraryError(str(error)) from error


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
