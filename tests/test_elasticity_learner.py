"""The learner against dense formulas, and what its evidence must and must not do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pfi.elasticity import learner
from slurm_pfi.elasticity.curve import FloatArray
from slurm_pfi.elasticity.evidence import EvidenceError, Measurement, PfiEvidence, RunEvidence
from slurm_pfi.elasticity.learner import learn
from slurm_pfi.elasticity.library import Library
from slurm_pfi.elasticity.posterior import Posterior
from slurm_pfi.elasticity.prior import GRID, Prior
from slurm_pfi.elasticity.process import FLOORS, SHARING, Discrepancy

from .elasticity_reference import reference, small_library, some_runs

PRIOR = Prior(small_library())
EMPTY = Prior(Library([]))
PRECISE = 2e-5


def at(posterior: Posterior, reduction: float, run: int = 0) -> tuple[float, float]:
    mean, sd = posterior.mean_and_sd()
    return float(np.interp(reduction, GRID, mean[run])), float(np.interp(reduction, GRID, sd[run]))


def measured(*points: tuple[float, float]) -> tuple[Measurement, ...]:
    return tuple(Measurement(x, y, 0.004) for x, y in points)


# --------------------------------------------------------------------------------------------- dense formulas


@pytest.mark.parametrize("spreads", [SHARING, FLOORS])
@pytest.mark.parametrize(("number", "seed"), [(1, 1), (5, 2), (24, 3)])
def test_mean_sd_and_gain_are_those_of_the_dense_formulas(
    number: int, seed: int, spreads: Discrepancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "_SURPRISE", np.inf)
    runs = some_runs(number + 4, seed)[4:]  # the first kept has four measurements
    dense, posterior = reference(PRIOR, runs, spreads), learn(PRIOR, runs, spreads=spreads)
    mean, sd = posterior.mean_and_sd()
    expected, expected_sd = dense.mean_and_sd()
    np.testing.assert_allclose(mean, expected, atol=PRECISE)
    np.testing.assert_allclose(posterior.mean(), expected, atol=PRECISE)
    np.testing.assert_allclose(sd, expected_sd, atol=PRECISE)
    rng = np.random.default_rng(seed)
    before, after, value = (rng.uniform(0, 0.6, number) for _ in range(3))
    after[: number // 3] = before[: number // 3]
    np.testing.assert_allclose(
        posterior.gain(before, after, value), dense.gain(before, after, value), rtol=1e-4, atol=PRECISE
    )


def test_runs_in_many_parts_are_learned_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = some_runs(40, 5, gpu_models=3)
    whole = learn(PRIOR, runs)
    for module in ("mixture", "posterior", "prior"):
        monkeypatch.setattr(f"slurm_pfi.elasticity.{module}.BLOCK", 400)
    split = learn(Prior(small_library()), runs)
    for one, other in zip(whole.mean_and_sd(), split.mean_and_sd(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_plan_that_leaves_all_where_they_are_gains_exactly_nothing() -> None:
    runs = some_runs(20, 7)
    x = np.random.default_rng(1).uniform(0, 0.6, 20)
    assert learn(PRIOR, runs).gain(x, x, np.ones(20)) == (0.0, 0.0)


def test_what_a_gpu_model_has_in_common_does_not_average_out() -> None:
    point = measured((0.2, 0.1))
    runs = [RunEvidence("new", measurements=point, baseline="seen") for _ in range(100)]
    ones, x = np.ones(100), np.full(100, 0.4)
    together = learn(PRIOR, runs).gain(0 * x, x, ones)[1]
    apart = learn(PRIOR, [replace(run, gpu_model=f"new {i}") for i, run in enumerate(runs)])
    assert (
        together / 100 > 0.3 * apart.gain(0 * x, x, ones)[1] / 10
    )  # a tenth of that if all were independent
    shared = learn(PRIOR, runs)
    alone = replace(shared, shared_cov=0 * shared.shared_cov)
    assert together > 1.5 * alone.gain(0 * x, x, ones)[1]


def test_kin_err_together() -> None:
    runs = [RunEvidence("one", measurements=measured((0.2, 0.1)), baseline="seen")] * 40
    kin = [replace(run, kin="same") for run in runs]
    ones, x = np.ones(40), np.full(40, 0.4)
    assert learn(PRIOR, kin).gain(0 * x, x, ones)[1] > 1.4 * learn(PRIOR, runs).gain(0 * x, x, ones)[1]


# ---------------------------------------------------------------------------------------------------- baselines


def test_ratios_count_and_levels_do_not_while_the_baseline_is_unknown() -> None:
    true = np.array([[0.1, 0.05], [0.2, 0.12], [0.4, 0.35]])
    error = 0.2  # T_hat = 1.2 T_max
    wrong = true.copy()
    wrong[:, 1] = 1 - (1 - true[:, 1]) / (1 + error)
    one_moved = true.copy()
    one_moved[2, 1] = wrong[2, 1]

    def mean(points: FloatArray, tau: float) -> FloatArray:
        pairs = [(float(x), float(y)) for x, y in points]
        run = RunEvidence("new", measurements=measured(*pairs), baseline="seen", baseline_sd=tau)
        result: FloatArray = learn(PRIOR, [run]).mean()[0][:45]
        return result

    moved_all = np.abs(mean(wrong, 10.0) - mean(true, 10.0)).max()
    moved_one = np.abs(mean(one_moved, 10.0) - mean(true, 10.0)).max()
    assert moved_all < 0.01
    assert moved_one > 0.04
    assert np.abs(mean(wrong, 0.0) - mean(true, 0.0)).max() > 0.08  # a baseline that is sure is believed


def test_the_less_is_known_of_a_baseline_the_wider_the_curve() -> None:
    run = RunEvidence("new", measurements=measured((0.2, 0.08), (0.4, 0.3)))
    sd = [at(learn(PRIOR, [replace(run, baseline=kind)]), 0.3)[1] for kind in ("seen", "recalled", "bounded")]
    assert sd[0] < 0.9 * sd[1] < 0.81 * sd[2]


def test_older_points_and_older_segments_count_less() -> None:
    def sd(age_s: float, segment: int) -> float:
        points = (
            Measurement(0.3, 0.15, 0.004, age_s=age_s, segment=segment),
            Measurement(0.01, 0.0, 0.1, segment=1),  # says nothing but that segment 1 has begun
        )
        return at(learn(PRIOR, [RunEvidence("new", measurements=points, baseline="seen")]), 0.3)[1]

    assert sd(0, 1) < 0.9 * sd(8 * 3600, 1)
    assert sd(0, 1) < 0.9 * sd(0, 0)


# --------------------------------------------------------------------------------------- outside the interval


def test_a_run_that_leaves_its_interval_gets_a_wider_curve_and_no_other_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside = RunEvidence("new", measurements=measured((0.2, 0.08)), baseline="seen")
    outside = replace(inside, measurements=measured((0.2, 0.75)))
    calm, upset = learn(PRIOR, [inside] * 8), learn(PRIOR, [outside] + [inside] * 7)
    assert (calm.widening == 1).all()
    assert 1.5 < upset.widening[0] <= 4
    assert (upset.widening[1:] == 1).all()
    for x in (0.3, 0.45):
        assert at(upset, x)[1] > 1.3 * at(calm, x)[1]
    monkeypatch.setattr(learner, "_SURPRISE", np.inf)
    as_before = learn(PRIOR, [outside] + [inside] * 7)
    for x in (0.1, 0.3, 0.45):
        assert at(upset, x)[1] > 1.2 * at(as_before, x)[1]
        assert at(upset, x, run=5)[1] == pytest.approx(at(as_before, x, run=5)[1], rel=0.25)


def test_the_widening_grows_from_nothing_at_three_sd() -> None:
    others = [RunEvidence("new", measurements=measured((0.2, 0.1)), baseline="seen")] * 20
    losses = np.linspace(0.1, 0.9, 33)
    factors = []
    for loss in losses:
        run = RunEvidence("new", measurements=measured((0.2, float(loss))), baseline="seen")
        factors.append(float(learn(PRIOR, [run, *others]).widening[0]))
    assert factors[0] == 1
    assert factors[-1] > 1.2
    assert (np.diff(factors) >= 0).all()
    assert np.diff(factors).max() < 0.3


# -------------------------------------------------------------------------------------------------- properties

points_of_runs = st.builds(
    Measurement,
    reduction=st.floats(0, 1),
    loss=st.floats(-5, 1),
    sd=st.floats(0, 10),
    age_s=st.floats(0, 1e9),
    segment=st.integers(-3, 3),
    baseline_sd=st.none() | st.floats(0, 1e6),
)
pfis = st.builds(
    PfiEvidence,
    value=st.floats(-1000, 1000),
    sd=st.floats(0, 1e300),
    reductions=st.lists(st.floats(0, 1), min_size=1, max_size=5).map(tuple),
)
runs_of_all_kinds = st.builds(
    RunEvidence,
    gpu_model=st.sampled_from(["A", "B"]),
    kin=st.sampled_from(["", "k", "l"]),
    pfi=st.none() | pfis,
    measurements=st.lists(points_of_runs, max_size=6).map(tuple),
    baseline=st.sampled_from(["seen", "recalled", "bounded"]),
    baseline_sd=st.sampled_from([0.0, 0.02, 10.0, 1e200]),
)


@settings(max_examples=60, deadline=None)
@given(runs=st.lists(runs_of_all_kinds, max_size=7), empty=st.booleans())
def test_no_nan_from_any_finite_input(runs: list[RunEvidence], *, empty: bool) -> None:
    posterior = learn(EMPTY if empty else PRIOR, runs)
    mean, sd = posterior.mean_and_sd()
    assert mean.shape == sd.shape == (len(runs), GRID.size)
    assert np.isfinite(mean).all()
    assert np.isfinite(sd).all()
    x = np.linspace(0, 1, len(runs))
    assert np.isfinite(posterior.gain(x, x[::-1], np.ones(len(runs)))).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), number=st.integers(2, 12))
def test_the_order_of_runs_changes_nothing(seed: int, number: int) -> None:
    runs = some_runs(number, seed)
    order = np.random.default_rng(seed).permutation(number)
    one, other = learn(PRIOR, runs), learn(PRIOR, [runs[i] for i in order])
    for straight, mixed in zip(one.mean_and_sd(), other.mean_and_sd(), strict=True):
        np.testing.assert_allclose(straight[order], mixed, atol=PRECISE)


def test_a_run_that_has_shown_nothing_changes_no_other() -> None:
    runs = some_runs(12, 4)
    more = [*runs, RunEvidence("another GPU model")]
    for one, other in zip(learn(PRIOR, runs).mean_and_sd(), learn(PRIOR, more).mean_and_sd(), strict=True):
        np.testing.assert_allclose(one, other[:-1], atol=1e-6)


def test_an_empty_library_learns_from_measurements_alone() -> None:
    told = RunEvidence("g", pfi=PfiEvidence(2.0, 0.1, (0.2, 0.4)))
    shown = RunEvidence("h", measurements=measured((0.2, 0.05), (0.4, 0.2)), baseline="seen")
    posterior = learn(EMPTY, [told, shown])
    assert posterior.mean()[0][20] == pytest.approx(0.2, abs=0.08)  # the line, stretched or squeezed
    assert at(posterior, 0.4, run=1)[0] == pytest.approx(0.2, abs=0.02)
    assert at(posterior, 0.4, run=1)[1] < 0.5 * at(posterior, 0.4, run=0)[1]


def test_weights_that_are_none_are_refused() -> None:
    runs = some_runs(3, 1)
    weight = np.tile(PRIOR.log_weight, (3, 1))
    with pytest.raises(EvidenceError, match="3 runs and 45 candidates"):
        learn(PRIOR, runs, log_weight=weight[:2])
    for wrong in (-np.inf, np.nan, np.inf):
        bad = weight.copy()
        bad[1] = wrong
        with pytest.raises(EvidenceError, match="run at place 1"):
            learn(PRIOR, runs, log_weight=bad)


def test_candidates_without_weight_get_none() -> None:
    weight = np.tile(PRIOR.only(lambda one: one.gpu_model != "B"), (6, 1))
    weight[3:] = PRIOR.only(lambda one: one.gpu_model != "A")
    posterior = learn(PRIOR, some_runs(6, 2, gpu_models=1), log_weight=weight)
    assert (posterior.candidate[np.isneginf(weight)] == 0).all()
    np.testing.assert_allclose(posterior.candidate.sum(axis=1), 1, rtol=1e-5)
