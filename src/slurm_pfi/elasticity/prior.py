"""What a library says of a run before anything is known of it: its curves, each also stretched and squeezed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .curve import BoolArray, ElasticityCurve, FloatArray, IntArray
from .index import SMALLEST_LOSS
from .library import Library, LibraryCurve, LibraryError
from .sweep import Repairs

Table: TypeAlias = NDArray[np.float32]
"""Figures of many candidates: seven digits are more than any curve was measured to, and take half the time."""

_Float = TypeVar("_Float", np.float32, np.float64)

STEPS: Final = 100
GRID: Final = np.linspace(0.0, 1.0, STEPS + 1)
"""Reductions at which everything learned is kept; linear between."""

SCALES: Final = np.array([0.6, 0.8, 1.0, 1.25, 1.5])
STRETCHES: Final = np.array([0.85, 1.0, 1.15])
"""Factors on the loss, and on the reduction, of a library curve: an unseen job has the shape of a known one sooner
than its size, and an unseen GPU model reaches the same clock by another share of its draw."""

_SCALE_LOG_SD: Final = 0.25
_STRETCH_LOG_SD: Final = 0.05

FORMS: Final = SCALES.size * STRETCHES.size

NO_LIBRARY: Final = LibraryCurve(
    curve_id="",
    gpu_model="",
    family="",
    workload="no library",
    curve=ElasticityCurve(np.array([0.0, 1.0]), np.array([0.0, 1.0])),
    repairs=Repairs(),
    source="",
    licence="",
)
"""A straight line, loss = reduction, where there is no library. No curve of a file has an empty name."""


_KEPT_GRIDS: Final = 8192
"""So many grids of PFI values are remembered from one learning to the next: 5 kB each with the default library."""

BLOCK: Final = 1 << 18
"""Figures that are worked on at once: they stay in a core's cache."""

PFI_MODEL_SD: Final = 0.25
"""How far a PFI strays from that of the candidate that describes the run best."""


class Prior:
    """Candidate curves of a library as a table, with their weights.

    ``losses`` (grid, candidates) on GRID; ``log_weight`` (candidates,), normalised. Beyond their last points the
    candidates go on towards (1, 1), which is not safe: a mixture that is pessimistic there calls every run flexible
    elsewhere. NO_LIBRARY stands for an empty library: ``real`` (candidates,) is False for what is made of it, and a
    run with nothing else is one of which nothing is known.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        entries = library.curves or (NO_LIBRARY,)
        curves = [one.curve for one in entries]
        weight = library.weights() if library.curves else np.ones(1)
        forms = np.outer(_bell(SCALES, _SCALE_LOG_SD), _bell(STRETCHES, _STRETCH_LOG_SD)).ravel()
        table = np.array([[one.expected_at(GRID / stretch) for stretch in STRETCHES] for one in curves])
        scaled = np.minimum(table[:, None] * SCALES[:, None, None], 1.0)
        self.losses: Table = np.ascontiguousarray(scaled.reshape(-1, GRID.size).T, dtype=np.float32)
        self.real: BoolArray = np.repeat([one.curve_id != NO_LIBRARY.curve_id for one in entries], FORMS)
        self._rises: Table = np.diff(self.losses, axis=0)
        self.log_weight: FloatArray = np.log(np.outer(weight, forms).ravel())
        self._pfi: dict[tuple[float, ...], Table] = {}

    @property
    def size(self) -> int:
        return int(self.log_weight.size)

    def only(self, wanted: Callable[[LibraryCurve], bool]) -> FloatArray:
        """Log weights, (candidates,), when only some curves count: GPU models alike, within each its families.

        Raises LibraryError when none is wanted.
        """
        place = [i for i, one in enumerate(self.library.curves) if wanted(one)]
        if not place:
            raise LibraryError("no curve of the library is left")
        columns = (np.array(place)[:, None] * FORMS + np.arange(FORMS)).ravel()
        log_weight = np.full(self.size, -np.inf)
        log_weight[columns] = Prior(Library([self.library.curves[i] for i in place])).log_weight
        return log_weight

    def pfi(self, grids: Sequence[tuple[float, ...]]) -> Table:
        """PFI of every candidate on some grids of reductions: shape (grids, candidates).

        Points at reduction 0 (caps that do not bind) do not count, nor those with a loss under 1 %. Where none
        counts the candidate is as flexible as can be told apart from noise.
        """
        new = [grid for grid in dict.fromkeys(grids) if grid not in self._pfi]
        if len(self._pfi) + len(new) > _KEPT_GRIDS:
            new = list(dict.fromkeys(grids))
            self._pfi.clear()
        length = max(1, BLOCK // self.size)
        for begin in range(0, len(new), length):
            block = new[begin : begin + length]
            self._pfi.update(zip(block, self._pfi_on(block), strict=True))
        return np.array([self._pfi[grid] for grid in grids], dtype=np.float32).reshape(-1, self.size)

    def _pfi_on(self, grids: Sequence[tuple[float, ...]]) -> Table:
        """As ``pfi``, of grids that may differ in length: a point at reduction 0 fills one up."""
        x = np.zeros((len(grids), max(len(grid) for grid in grids)))
        for row, grid in zip(x, grids, strict=True):
            row[: len(grid)] = grid
        total = np.zeros((len(grids), self.size), dtype=np.float32)
        number = np.zeros_like(total)
        least = np.float32(SMALLEST_LOSS)
        place, share = grid_place(x)
        for column, points in enumerate(x.T.astype(np.float32)):
            loss = self._rises[place[:, column]]
            loss *= share[:, column, None].astype(np.float32)
            loss += self.losses[place[:, column]]
            counts = (loss >= least).astype(np.float32)  # never at reduction 0, where nothing is lost
            number += counts
            counts *= points[:, None]
            counts /= np.maximum(loss, least, out=loss)
            total += counts
        flat = (x.max(axis=1) / SMALLEST_LOSS).astype(np.float32)[:, None]
        result: Table = np.where(number > 0, total / np.maximum(number, 1), flat)
        return result


def _bell(factors: FloatArray, log_sd: float) -> FloatArray:
    """Weights of factors, summing to 1: the further from 1, the less."""
    weight = np.exp(-0.5 * (np.log(factors) / log_sd) ** 2)
    result: FloatArray = weight / weight.sum()
    return result


def grid_place(reduction: FloatArray) -> tuple[IntArray, FloatArray]:
    """Where reductions (0..1) lie on GRID: the point at or below each, and the share of the way to the next."""
    scaled = np.clip(reduction, 0.0, 1.0) * STEPS
    place = np.minimum(scaled.astype(np.intp), STEPS - 1)
    return place, scaled - place


def combined(losses: NDArray[_Float], factors: FloatArray, reduction: FloatArray) -> NDArray[_Float]:
    """Sums of candidates' losses: ``factors`` (runs, m, points) times those at ``reduction`` (runs, points).

    ``losses`` (grid, candidates) on GRID; the result, (runs, m, candidates), is as precise as they are.
    Of few points a run: each takes two rows of the table.
    """
    place, share = grid_place(reduction)
    rows = losses[np.concatenate((place, place + 1), axis=-1)]
    low, high = factors * (1.0 - share)[:, None, :], factors * share[:, None, :]
    result: NDArray[_Float] = np.concatenate((low, high), axis=-1, dtype=losses.dtype) @ rows
    return result


def interpolate(table: FloatArray, reduction: FloatArray) -> FloatArray:
    """Each row of a table (runs, grid) at its own reductions (runs, points): shape (runs, points)."""
    place, share = grid_place(reduction)
    low = np.take_along_axis(table, place, axis=1)
    high = np.take_along_axis(table, place + 1, axis=1)
    result: FloatArray = low + (high - low) * share
    return result
