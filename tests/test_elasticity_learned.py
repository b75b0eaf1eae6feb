"""Figures of single runs read off a learned posterior."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pfi.elasticity.curve import IntArray
from slurm_pfi.elasticity.floors import greatest_reductions
from slurm_pfi.elasticity.learner import learn
from slurm_pfi.elasticity.prior import Prior

from .elasticity_reference import small_library, some_runs

PRIOR = Prior(small_library())
RUNS = 12
WHOLE = learn(PRIOR, some_runs(RUNS, 5, gpu_models=3))
PRECISE = 1e-6


def places(*rows: int) -> IntArray:
    return np.array(rows, dtype=np.intp)


# ------------------------------------------------------------------------------------------------- chosen runs


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, RUNS - 1), max_size=2 * RUNS))
def test_chosen_runs_have_the_figures_that_they_have_among_all(chosen: list[int]) -> None:
    rows = places(*chosen)
    part = WHOLE.take(rows)
    assert part.batch.runs == rows.size
    np.testing.assert_allclose(part.mean(), WHOLE.mean()[rows], atol=PRECISE)
    for one, other in zip(part.mean_and_sd(), WHOLE.mean_and_sd(), strict=True):
        np.testing.assert_allclose(one, other[rows], atol=PRECISE)
    np.testing.assert_allclose(
        greatest_reductions(part, 0.1), greatest_reductions(WHOLE, 0.1)[rows], atol=1e-4
    )
    assert (part.known == WHOLE.known[rows]).all()
    assert part.kinds == np.unique(WHOLE.batch.kin[rows]).size


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, RUNS - 1), min_size=1, max_size=2 * RUNS), st.integers(0, 2**32 - 1))
def test_the_gain_of_runs_taken_often_is_that_of_their_worth_together(chosen: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = places(*chosen)
    before, after = rng.uniform(0, 0.6, (2, RUNS))
    value = rng.uniform(0.1, 3, rows.size)
    worth = np.zeros(RUNS)
    np.add.at(worth, rows, value)
    part = WHOLE.take(rows).gain(before[rows], after[rows], value)
    assert part == pytest.approx(WHOLE.gain(before, after, worth), rel=1e-4, abs=1e-5)


def test_a_place_that_is_none_is_an_error() -> None:
    with pytest.raises(IndexError):
        WHOLE.take(places(RUNS))
