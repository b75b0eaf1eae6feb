"""Greatest reductions: within the promise, larger for a looser one, nothing where nothing is allowed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pfi.elasticity.evidence import Measurement, PfiEvidence, RunEvidence
from slurm_pfi.elasticity.floors import FLOOR_SDS, greatest_reductions, reach, reach_of_one
from slurm_pfi.elasticity.learner import learn
from slurm_pfi.elasticity.library import Library
from slurm_pfi.elasticity.posterior import Posterior
from slurm_pfi.elasticity.prior import GRID, Prior
from slurm_pfi.elasticity.process import FLOORS

PRIOR = Prior(Library.load_default())
GRID_OF_CAPS = (0.15, 0.3, 0.45, 0.6)


def posterior(*runs: RunEvidence) -> Posterior:
    return learn(PRIOR, runs, spreads=FLOORS)


def told(pfi: float, *points: tuple[float, float]) -> RunEvidence:
    measured = tuple(Measurement(x, y, 0.003) for x, y in points)
    return RunEvidence(
        "B300", pfi=PfiEvidence(pfi, 0.3, GRID_OF_CAPS), measurements=measured, baseline="seen"
    )


def test_no_loss_allowed_is_no_reduction() -> None:
    assert greatest_reductions(posterior(told(2.0)), 0.0).tolist() == [0.0]


def test_the_upper_loss_at_a_greatest_reduction_is_the_limit() -> None:
    learned = posterior(told(1.2), told(2.0), told(4.0, (0.2, 0.02)))
    reached = greatest_reductions(learned, 0.1)
    mean, sd = learned.mean_and_sd()
    for x, upper in zip(reached, np.maximum.accumulate(mean + FLOOR_SDS * sd, axis=1), strict=True):
        assert np.interp(x, GRID, upper) == pytest.approx(0.1, abs=1e-9)


def test_each_run_may_be_promised_something_else() -> None:
    learned = posterior(told(2.0), told(2.0))
    both = greatest_reductions(learned, [0.05, 0.2])
    assert both[0] == greatest_reductions(learned, 0.05)[0]
    assert both[1] == greatest_reductions(learned, 0.2)[1]
    assert both[0] < both[1]


def test_a_measurement_that_bears_out_the_promise_allows_more() -> None:
    before = greatest_reductions(posterior(told(3.0)), 0.1)[0]
    after = greatest_reductions(posterior(told(3.0, (before, 0.3 * 0.1))), 0.1)[0]
    assert after > before + 0.02


def test_fewer_standard_deviations_promise_more_than_is_safe() -> None:
    learned = posterior(told(2.0))
    assert greatest_reductions(learned, 0.1, sds=1.0)[0] > greatest_reductions(learned, 0.1)[0]


@pytest.mark.parametrize("limit", [-0.1, 1.5, float("nan")])
def test_a_limit_that_is_no_share_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        greatest_reductions(posterior(told(2.0)), limit)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.5, 8), st.floats(0, 1), st.floats(0, 0.7), st.floats(-0.1, 0.9))
def test_more_loss_allowed_is_never_less_reduction(pfi: float, limit: float, x: float, y: float) -> None:
    learned = posterior(told(pfi, (x, y)))
    low, high = (
        greatest_reductions(learned, limit)[0],
        greatest_reductions(learned, min(1.0, limit + 0.05))[0],
    )
    assert 0 <= low <= high <= 1


@given(
    losses=st.lists(st.floats(0, 1), min_size=GRID.size, max_size=GRID.size),
    limit=st.one_of(st.floats(0, 1), st.integers(0, 100).map(lambda place: place / 100)),
)
def test_one_run_is_looked_up_as_all_are(losses: list[float], limit: float) -> None:
    upper = np.maximum.accumulate(np.array(losses))
    assert reach_of_one(upper, limit) == pytest.approx(reach(upper[None, :], np.array([limit]))[0], abs=1e-12)
