"""Figures of single runs read off a learned posterior, and which measured losses can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slurm_pfi.elasticity.curve import CurveError, ElasticityCurve, FloatArray, IntArray
from slurm_pfi.elasticity.evidence import Measurement, RunEvidence
from slurm_pfi.elasticity.floors import greatest_reductions
from slurm_pfi.elasticity.index import Pfi, pfi_on_grid
from slurm_pfi.elasticity.learned import learned_pfi, loss_at
from slurm_pfi.elasticity.learner import learn
from slurm_pfi.elasticity.plausible import PLAUSIBLE_SDS, plausible
from slurm_pfi.elasticity.posterior import Posterior
from slurm_pfi.elasticity.prior import GRID, Prior

from .elasticity_reference import small_library, some_runs

PRIOR = Prior(small_library())
RUNS = 12
WHOLE = learn(PRIOR, some_runs(RUNS, 5, gpu_models=3))
PRECISE = 1e-6
GRID_W = (200, 300, 400, 500, 600, 700)
REDUCTION = st.floats(0, 1)


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


# -------------------------------------------------------------------------------------------- loss at a reduction


@given(st.lists(REDUCTION, min_size=RUNS, max_size=RUNS))
def test_the_loss_at_a_reduction_is_that_of_the_grid_within_bounds(reductions: list[float]) -> None:
    x = np.array(reductions)
    tables = WHOLE.mean_and_sd()
    mean, sd = loss_at(tables, x)
    expected = [np.interp(one, GRID, row) for one, row in zip(x, tables[0], strict=True)]
    np.testing.assert_allclose(mean, np.clip(expected, 0, 1), atol=PRECISE)
    np.testing.assert_allclose(
        sd, [np.interp(one, GRID, row) for one, row in zip(x, tables[1], strict=True)], atol=PRECISE
    )
    assert ((mean >= 0) & (mean <= 1)).all()


def test_the_loss_is_the_same_from_the_posterior_and_from_its_tables() -> None:
    x = np.linspace(0, 1, RUNS)
    for one, other in zip(loss_at(WHOLE, x), loss_at(WHOLE.mean_and_sd(), x), strict=True):
        assert (one == other).all()


# ------------------------------------------------------------------------------------- losses of one run together


def covariance(posterior: Posterior, row: int, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean and covariance of the mixture: within candidates and between them."""
    joint = posterior.joint(row, x)
    middle = joint.weight @ joint.mean
    off = joint.mean - middle
    return middle, joint.cov + (joint.weight[:, None] * off).T @ off


@pytest.mark.parametrize("row", range(RUNS))
def test_each_loss_alone_is_as_the_grid_says(row: int) -> None:
    mean, sd = WHOLE.mean_and_sd()
    middle, cov = covariance(WHOLE, row, GRID)
    np.testing.assert_allclose(middle, mean[row], atol=2e-5)
    np.testing.assert_allclose(np.sqrt(np.maximum(np.diag(cov), 0)), sd[row], atol=2e-5)


@settings(deadline=None)
@given(st.integers(0, RUNS - 1), REDUCTION, REDUCTION)
def test_two_losses_differ_as_the_certificate_says(row: int, one: float, other: float) -> None:
    assume(one != other)
    middle, cov = covariance(WHOLE, row, np.array([one, other]))
    alone = WHOLE.take(places(row))
    gain, sd = alone.gain(np.array([one]), np.array([other]), np.ones(1))
    assert middle[0] - middle[1] == pytest.approx(gain, abs=2e-5)
    spread = cov[0, 0] + cov[1, 1] - 2 * cov[0, 1]
    assert np.sqrt(max(spread, 0)) == pytest.approx(sd, abs=1e-4)


def test_samples_have_the_moments_of_the_mixture() -> None:
    x = np.array([0.0, 0.1, 0.3, 0.3, 0.6])
    rng = np.random.default_rng(1)
    samples = WHOLE.joint(4, x).samples(rng.random(40_000), rng.standard_normal((40_000, x.size)))
    middle, cov = covariance(WHOLE, 4, x)
    np.testing.assert_allclose(samples.mean(axis=0), middle, atol=0.003)
    np.testing.assert_allclose(np.cov(samples.T), cov, atol=0.03 * cov.max())
    np.testing.assert_allclose(samples[:, 0], 0, atol=PRECISE)  # nothing is lost where nothing is cut
    np.testing.assert_allclose(samples[:, 2], samples[:, 3], atol=PRECISE)


# ---------------------------------------------------------------------------------------------------------- PFI


def known(*points: tuple[float, float], sd: float = 0.0) -> Posterior:
    """A run of a straight or hollow curve, exactly measured at some points."""
    run = RunEvidence("A", baseline="seen", measurements=tuple(Measurement(x, y, sd) for x, y in points))
    return learn(PRIOR, [run])


def read(posterior: Posterior, draw_w: float = 700, grid_w: tuple[float, ...] = GRID_W) -> Pfi | None:
    return learned_pfi(posterior, 0, grid_w, draw_w, gpu_model="A", source="measured")


def surely(posterior: Posterior, draw_w: float = 700, grid_w: tuple[float, ...] = GRID_W) -> Pfi:
    found = read(posterior, draw_w, grid_w)
    assert found is not None
    return found


def test_a_run_that_is_known_has_the_pfi_of_its_curve() -> None:
    x = np.linspace(0, 0.7, 15)
    y = 0.9 * x**1.2
    found = surely(known(*zip(x[1:].tolist(), y[1:].tolist(), strict=True)), draw_w=650)
    curve = ElasticityCurve(np.append(x, 1.0), np.append(y, 1.0))
    true = pfi_on_grid(curve, GRID_W, 650, gpu_model="A")
    assert found.value == pytest.approx(true.value, abs=0.06)
    assert found.low < true.value < found.high
    assert found.high - found.low < 0.5
    assert (found.used, found.left_out, found.grid_w) == (true.used, true.left_out, true.grid_w)
    assert found.difference(true) == pytest.approx(0, abs=0.06)  # comparable: same grid, same GPU model


def test_the_more_is_measured_the_narrower_the_interval() -> None:
    stages: tuple[list[tuple[float, float]], ...] = (
        [],
        [(0.2, 0.15)],
        [(0.2, 0.15), (0.4, 0.32)],
        [(0.2, 0.15), (0.4, 0.32), (0.6, 0.6)],
    )
    width = [one.high - one.low for one in (surely(known(*points, sd=0.004)) for points in stages)]
    assert width[0] > 1.3 * width[1]
    assert width[1] > width[2] > width[3]


def test_the_same_knowledge_gives_the_same_figure() -> None:
    posterior = known((0.2, 0.15))
    assert read(posterior) == read(posterior)


def test_caps_that_do_not_bind_count_as_left_out() -> None:
    found = surely(known((0.2, 0.15), (0.4, 0.32), (0.6, 0.6)), draw_w=480)
    assert (found.used, found.left_out) == (3, 2)  # 200, 300 and 400 W; not 500 and 600 W


def test_where_no_cap_binds_there_is_no_pfi() -> None:
    assert read(known((0.2, 0.15)), draw_w=200) is None
    assert read(known((0.2, 0.15)), draw_w=150) is None


def test_a_loss_that_cannot_be_told_from_nothing_has_no_pfi() -> None:
    assert read(known((0.1, 0.0), (0.2, 0.0)), draw_w=700, grid_w=(650, 700)) is None


def test_the_highest_cap_is_the_uncapped_point_also_where_it_binds() -> None:
    x = np.linspace(0, 0.75, 16)
    posterior = known(*zip(x[1:].tolist(), (0.8 * x[1:]).tolist(), strict=True))
    found = surely(posterior, draw_w=800, grid_w=(400, 600))
    # From 600 to 400 W of 800 W: a third less draw, and losses of 0.2 and 0.4 of the whole.
    assert found.value == pytest.approx((1 / 3) / (1 - 0.6 / 0.8), abs=0.08)


def test_caps_that_lie_close_together_change_little() -> None:
    posterior = known((0.2, 0.15), (0.4, 0.32), sd=0.004)
    coarse, fine = surely(posterior), surely(posterior, grid_w=tuple(range(200, 701, 10)))
    assert (fine.used, fine.left_out) == (49, 1)
    assert fine.value == pytest.approx(coarse.value, abs=0.15)
    # Somewhat wider, for small cuts are less sure; but not narrower for the number of caps.
    assert 0.8 * (coarse.high - coarse.low) < fine.high - fine.low < 1.6 * (coarse.high - coarse.low)


def test_a_run_whose_measured_losses_fall_still_has_an_interval() -> None:
    found = surely(known((0.14, 0.3), (0.29, 0.2), (0.43, 0.1)))
    assert 0 < found.low < found.value < found.high < 4


def test_the_pfi_of_a_run_does_not_hang_on_its_place() -> None:
    turned = WHOLE.take(places(*reversed(range(RUNS))))
    for row in range(RUNS):
        one = learned_pfi(WHOLE, row, GRID_W, 700, gpu_model="A", source="measured")
        other = learned_pfi(turned, RUNS - 1 - row, GRID_W, 700, gpu_model="A", source="measured")
        assert one == other


@pytest.mark.parametrize("grid_w", [(), (300,), (300, 300), (0, 300), (-1, 300), (float("nan"), 300)])
def test_a_grid_that_is_none_is_an_error(grid_w: tuple[float, ...]) -> None:
    with pytest.raises(CurveError, match="grid"):
        read(known((0.2, 0.15)), grid_w=grid_w)


@pytest.mark.parametrize("draw_w", [0.0, -1.0, float("nan"), float("inf")])
def test_a_draw_that_is_none_is_an_error(draw_w: float) -> None:
    with pytest.raises(CurveError, match="draw"):
        read(known((0.2, 0.15)), draw_w=draw_w)


# --------------------------------------------------------------------------------------------- what can be believed

LOSS = st.floats(-10, 1)
SD = st.floats(0, 0.5)


@given(LOSS, SD, LOSS, SD, SD)
def test_what_is_believed_can_be(
    mean: float, sd: float, measured: float, measured_sd: float, baseline_sd: float
) -> None:
    found = plausible(mean, sd, measured, measured_sd, baseline_sd)
    assert (found.why == "") == (found.loss == measured)
    assert found.loss <= 1
    assert found.loss >= -PLAUSIBLE_SDS * np.hypot(measured_sd, baseline_sd) - 1e-12
    expected = min(max(mean, 0.0), 1.0)
    assert abs(found.loss - expected) <= PLAUSIBLE_SDS * (sd + measured_sd + baseline_sd) + 1e-12
    # What has been believed once is believed again: the band does not move with what was measured.
    assert plausible(mean, sd, found.loss, measured_sd, baseline_sd).loss == found.loss


@given(st.floats(0, 1), st.floats(0.001, 0.3), st.floats(0, 0.1), st.floats(0, 0.1), st.floats(-1, 1))
def test_what_lies_within_two_deviations_is_believed_as_it_is(
    mean: float, sd: float, measured_sd: float, baseline_sd: float, way: float
) -> None:
    noise = np.hypot(measured_sd, baseline_sd * (1 - mean))
    measured = mean + 2 * way * float(np.hypot(sd, noise))
    assume(-2 * noise <= measured <= 1)
    assert plausible(mean, sd, measured, measured_sd, baseline_sd).loss == measured


@given(st.floats(0, 1), SD, LOSS, LOSS, SD, SD)
def test_who_shows_more_is_not_believed_less(
    mean: float, sd: float, one: float, other: float, measured_sd: float, baseline_sd: float
) -> None:
    low, high = sorted((one, other))
    believed = [plausible(mean, sd, loss, measured_sd, baseline_sd).loss for loss in (low, high)]
    assert believed[0] <= believed[1]


def test_a_counter_that_slows_itself_gains_three_deviations_and_no_more() -> None:
    found = plausible(mean=0.08, sd=0.02, measured=0.6, measured_sd=0.003, baseline_sd=0.005)
    assert found.loss == pytest.approx(0.08 + 3 * np.sqrt(0.02**2 + 0.003**2 + (0.005 * 0.92) ** 2))
    assert found.why == (
        "its counter shows 60.0 % lost, more than can be: 8.0 % was expected, 1.8 % to 14.2 % is possible;"
        " taken as 14.2 %"
    )


def test_a_counter_that_rises_tenfold_shows_no_gain_beyond_noise() -> None:
    found = plausible(mean=0.05, sd=0.1, measured=-9.0, measured_sd=0.003, baseline_sd=0.005)
    assert found.loss == pytest.approx(-3 * np.hypot(0.003, 0.005))
    assert "less than can be" in found.why


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean": float("nan")},
        {"sd": -0.1},
        {"measured": float("inf")},
        {"measured_sd": -1.0},
        {"baseline_sd": -1.0},
    ],
)
def test_figures_that_are_none_are_an_error(wrong: dict[str, float]) -> None:
    right = {"mean": 0.1, "sd": 0.1, "measured": 0.1, "measured_sd": 0.1, "baseline_sd": 0.1}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        plausible(**{**right, **wrong})
