"""What the controller asks of the elasticity room, prepared once: curves, greatest reductions, the default PFI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..config import Config
from ..elasticity.curve import ElasticityCurve
from ..elasticity.curvefile import CurveFileError, load_text
from ..elasticity.index import Pfi
from ..elasticity.library import Library, LibraryError
from ..elasticity.prior import Prior
from ..model import GpuReport
from .knowledge import Knowledge, learn_runs
from .state import State

GRID_W = (200.0, 300.0, 400.0, 500.0, 600.0, 700.0)
"""The cap grid of a PFI that nobody measured: the six caps of arXiv 2609.11542 on H200."""

MOST_STEPS: Final = 8


def grid_of(gpus: Sequence[GpuReport]) -> tuple[float, ...]:
    """The caps (W, ascending, evenly apart) that a run's PFI is told on: what its GPUs accept, highest first counted.

    Steps of 100 W where the range has three or more of them, else of 50 or 25 W; GRID_W while no GPU is known.
    """
    if not gpus:
        return GRID_W
    low_w = max(gpu.min_mw for gpu in gpus) / 1000
    high_w = float(max(gpu.max_mw for gpu in gpus) // 1000)
    step_w = next((step for step in (100, 50) if (high_w - low_w) / step >= 3), 25)
    while (high_w - low_w) / step_w > MOST_STEPS:
        step_w += 100
    steps = int((high_w - low_w) // step_w)
    return tuple(high_w - place * step_w for place in range(steps, -1, -1)) if steps >= 1 else GRID_W


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
    """A library and what is derived from it, prepared once; ``ignorance`` is what is known before any run was seen."""

    library: Library
    prior: Prior = field(init=False)
    mean: ElasticityCurve = field(init=False)
    default_pfi: Pfi = field(init=False)
    ignorance: Knowledge = field(init=False)

    def __post_init__(self) -> None:
        prior = Prior(self.library)
        object.__setattr__(self, "prior", prior)
        object.__setattr__(self, "mean", self.library.mean())
        object.__setattr__(self, "default_pfi", self.library.default_pfi(GRID_W))
        object.__setattr__(self, "ignorance", learn_runs(prior, (), 0))

    def knowledge(self, state: State) -> Knowledge:
        """What was learned last, or what was known from the start."""
        return self.ignorance if state.knowledge is None else state.knowledge
