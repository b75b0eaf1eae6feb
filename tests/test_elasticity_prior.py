"""The candidates that a library gives, their weights, and what PFI each of them has."""

from __future__ import annotations

import numpy as np
import pytest

from slurm_pfi.elasticity import prior as module
from slurm_pfi.elasticity.library import Library, LibraryError
from slurm_pfi.elasticity.prior import (
    FORMS,
    GRID,
    SCALES,
    STRETCHES,
    Prior,
    combined,
    grid_place,
    interpolate,
)

from .elasticity_reference import small_library

LIBRARY = small_library()


def test_candidates_are_the_curves_scaled_and_stretched() -> None:
    prior = Prior(LIBRARY)
    assert prior.losses.shape == (GRID.size, 3 * FORMS)
    number = 0
    for one in LIBRARY.curves:
        for scale in SCALES:
            for stretch in STRETCHES:
                expected = np.minimum(scale * one.curve.expected_at(GRID / stretch), 1.0)
                np.testing.assert_allclose(prior.losses[:, number], expected, atol=1e-7)
                number += 1


def test_gpu_models_count_alike_and_the_plain_form_most() -> None:
    weight = np.exp(Prior(LIBRARY).log_weight).reshape(3, SCALES.size, STRETCHES.size)
    assert weight.sum() == pytest.approx(1)
    np.testing.assert_allclose(weight.sum(axis=(1, 2)), [0.25, 0.25, 0.5])
    assert np.unravel_index(weight[0].argmax(), weight[0].shape) == (2, 1)


def test_curves_left_out_weigh_nothing_and_the_others_as_in_a_library_without_them() -> None:
    weight = np.exp(Prior(LIBRARY).only(lambda one: one.family != "line"))
    assert (weight[FORMS : 2 * FORMS] == 0).all()
    np.testing.assert_allclose(weight.reshape(3, FORMS).sum(axis=1), [0.5, 0, 0.5])
    with pytest.raises(LibraryError):
        Prior(LIBRARY).only(lambda one: False)


def test_an_empty_library_is_one_straight_line() -> None:
    prior = Prior(Library([]))
    assert prior.size == FORMS
    np.testing.assert_allclose(prior.losses[:, 7], GRID, atol=1e-7)


def test_the_pfi_of_a_candidate_is_that_of_eq_1() -> None:
    prior = Prior(LIBRARY)
    grids = [(0.1, 0.25, 0.5), (0.0, 0.3), (0.005,), (0.0,), (0.1, 0.25, 0.5)]
    found = prior.pfi(grids)
    assert found.shape == (5, prior.size)
    for row, grid in zip(found, grids, strict=True):
        for k in range(prior.size):
            loss = np.interp(grid, GRID, prior.losses[:, k])
            ratios = [x / y for x, y in zip(grid, loss, strict=True) if x > 0 and y >= 0.01]
            assert row[k] == pytest.approx(np.mean(ratios) if ratios else max(grid) / 0.01, rel=1e-5)


def test_pfi_are_remembered_and_grids_forgotten_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_KEPT_GRIDS", 5)
    monkeypatch.setattr(module, "BLOCK", 100)
    prior, plain = Prior(LIBRARY), Prior(LIBRARY)
    rng = np.random.default_rng(1)
    grids = [tuple(np.sort(rng.uniform(0, 0.6, 1 + i % 5)).tolist()) for i in range(12)]
    for begin in (0, 3, 6, 2, 0):
        some = grids[begin : begin + 4]
        np.testing.assert_array_equal(prior.pfi(some), np.concatenate([plain.pfi([one]) for one in some]))
        assert len(prior._pfi) <= 5
    assert prior.pfi([]).shape == (0, prior.size)


def test_combinations_are_sums_of_losses_between_the_grid_points() -> None:
    prior = Prior(LIBRARY)
    rng = np.random.default_rng(3)
    x, factors = rng.uniform(0, 1, (6, 4)), rng.normal(0, 1, (6, 2, 4))
    x[0, :3] = 0.0, 1.0, 0.5
    found = combined(prior.losses, factors, x)
    for run in range(6):
        for k in range(prior.size):
            loss = np.interp(x[run], GRID, prior.losses[:, k])
            np.testing.assert_allclose(found[run, :, k], factors[run] @ loss, atol=2e-6)
    assert found.dtype == np.float32
    assert combined(prior.losses.astype(np.float64), factors, x).dtype == np.float64


def test_reductions_outside_the_grid_count_as_its_ends() -> None:
    place, share = grid_place(np.array([-1.0, 0.0, 1.0, 2.0]))
    np.testing.assert_allclose(place + share, [0, 0, 100, 100])
    table = np.array([GRID**2, GRID])
    np.testing.assert_allclose(
        interpolate(table, np.array([[0.5, 2.0], [0.123, -1.0]])), [[0.25, 1], [0.123, 0]]
    )
