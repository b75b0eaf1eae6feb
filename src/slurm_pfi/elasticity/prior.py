"""What a library says of a run before anything is known of it: its curves, each also stretched and squeezed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from .curve import ElasticityCurve, FloatArray
from .index import SMALLEST_LOSS
from .library import Library, LibraryCurve, LibraryError

STEPS: Final = 100
GRID: Final = np.linspace(0.0, 1.0, STEPS + 1)
"""Reductions at which everything learned is kept; linear between."""

SCALES: Final = np.array([0.6, 0.8, 1.0, 1.25, 1.5])
STRETCHES: Final = np.array([0.85, 1.0, 1.15])
"""Factors on the loss, and on the reduction, of a library curve: an unseen job has the shape of a known one sooner
than its size, and an unseen GPU model reaches the same clock by another share of its draw."""

_SCALE_LOG_SD: Final = 0.25
_STRETCH_LOG_SD: Final = 0.08

FORMS: Final = SCALES.size * STRETCHES.size

_LINE: Final = ElasticityCurve(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
_KEPT_GRIDS: Final = 4096

PFI_MODEL_SD: Final = 0.25
"""How far a PFI strays from that of the candidate that describes the run best."""


class Prior:
    """Candidate curves of a library as a table, with their weights.

    ``losses`` (grid, candidates) on GRID; ``log_weight`` (candidates,), normalised. Beyond their last points the
    candidates go on as is likely, not as is safe: a mixture that is pessimistic there calls every run flexible
    elsewhere. An empty library is one straight line, loss = reduction, which tells no two runs apart.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        curves = [one.curve for one in library.curves] or [_LINE]
        weight = library.weights() if library.curves else np.ones(1)
        forms = np.outer(_bell(SCALES, _SCALE_LOG_SD), _bell(STRETCHES, _STRETCH_LOG_SD)).ravel()
        table = np.array([[one.expected_at(GRID / stretch) for stretch in STRETCHES] for one in curves])
        scaled = np.minimum(table[:, None] * SCALES[:, None, None], 1.0)
        self.losses: FloatArray = np.ascontiguousarray(scaled.reshape(-1, GRID.size).T)
        self.log_weight: FloatArray = np.log(np.outer(weight, forms).ravel())
        self._pfi: dict[tuple[float, ...], FloatArray] = {}

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

    def at(self, reduction: FloatArray) -> FloatArray:
        """Loss of every candidate at the reductions (0..1) given: shape (..., candidates)."""
        place, share = grid_place(reduction)
        low, high = self.losses[place], self.losses[place + 1]
        result: FloatArray = low + (high - low) * share[..., None]
        return result

    def pfi(self, reductions: tuple[float, ...]) -> FloatArray:
        """PFI of every candidate on a grid of reductions: shape (candidates,).

        Points at reduction 0 (caps that do not bind) do not count, nor those with a loss under 1 %. Where none
        counts the candidate is as flexible as can be told apart from noise.
        """
        known = self._pfi.get(reductions)
        if known is None:
            if len(self._pfi) >= _KEPT_GRIDS:
                self._pfi.clear()
            x = np.array(reductions)
            loss = self.at(x)
            counts = (loss >= SMALLEST_LOSS) & (x > 0)[:, None]
            ratio = np.divide(x[:, None], loss, out=np.zeros_like(loss), where=counts)
            number = counts.sum(axis=0)
            flat = float(x.max(initial=0.0)) / SMALLEST_LOSS
            known = np.where(number > 0, ratio.sum(axis=0) / np.maximum(number, 1), flat)
            self._pfi[reductions] = known
        return known


def _bell(factors: FloatArray, log_sd: float) -> FloatArray:
    """Weights of factors, summing to 1: the further from 1, the less."""
    weight = np.exp(-0.5 * (np.log(factors) / log_sd) ** 2)
    result: FloatArray = weight / weight.sum()
    return result


def grid_place(reduction: FloatArray) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.intp]], FloatArray]:
    """Where reductions (0..1) lie on GRID: the point at or below each, and the share of the way to the next."""
    scaled = np.clip(reduction, 0.0, 1.0) * STEPS
    place = np.minimum(scaled.astype(np.intp), STEPS - 1)
    return place, scaled - place


def interpolate(table: FloatArray, reduction: FloatArray) -> FloatArray:
    """Each row of a table (runs, grid) at its own reductions (runs, points): shape (runs, points)."""
    place, share = grid_place(reduction)
    low = np.take_along_axis(table, place, axis=1)
    high = np.take_along_axis(table, place + 1, axis=1)
    result: FloatArray = low + (high - low) * share
    return result
