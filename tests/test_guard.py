"""How far a plan may go: certificate, trust limit, and what must change nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pfi.allocation.guard import (
    FEW_KINDS,
    LEAST_GAIN,
    LEAST_RENEWAL,
    SAME_NEED,
    STEPS,
    SURE_SDS,
    TRUST,
    TRUST_FEW,
    Certified,
    InForce,
    certify,
    expected_curves,
    guarded,
    guarded_beyond,
    renewed,
    trusted,
)
from slurm_pfi.allocation.solve import Shares, equal, marginal
from slurm_pfi.elasticity import learner
from slurm_pfi.elasticity.curve import BoolArray, FloatArray, IntArray
from slurm_pfi.elasticity.evidence import Measurement, RunEvidence
from slurm_pfi.elasticity.learner import learn
from slurm_pfi.elasticity.library import Library
from slurm_pfi.elasticity.prior import GRID, NO_LIBRARY, Prior

from .elasticity_reference import reference, small_library, some_runs

PRIOR = Prior(small_library())


def shares_of(number: int, seed: int, end: float = 0.6) -> Shares:
    rng = np.random.default_rng(seed)
    return Shares(
        watts=rng.uniform(200, 6000, number),
        value=rng.integers(1, 9, number).astype(float),
        start=np.zeros(number),
        end=np.minimum(rng.uniform(0.3, 0.7, number), end),
    )


def deepest_of(runs: list[RunEvidence]) -> FloatArray:
    return np.array([run.deepest for run in runs])


@dataclass
class Told:
    """Curves with a gain that is a function of how far the plan is from equal."""

    losses: FloatArray
    gains: dict[float, tuple[float, float]]
    informed: bool = True
    kinds: int = FEW_KINDS
    known: BoolArray = field(default_factory=lambda: np.ones(2, dtype=bool))

    def mean(self) -> FloatArray:
        return self.losses

    def gain(self, before: FloatArray, after: FloatArray, value: FloatArray) -> tuple[float, float]:
        moved = float(after[0] - before[0])
        return min(self.gains.items(), key=lambda one: abs(one[0] - moved))[1]


# ------------------------------------------------------------------------------------------------- certificate


def test_the_longest_certified_step_is_taken() -> None:
    even, plan, value = np.array([0.2, 0.2]), np.array([1.2, -0.8]), np.ones(2)
    for sure in range(len(STEPS) + 1):
        gains = {step: (1.0, 1.9) if i >= sure else (1.0, 2.1) for i, step in enumerate(STEPS)}
        found = certify(Told(np.zeros((2, 2)), gains), even, plan, value)
        if sure == len(STEPS):
            assert (found.step, found.gain, found.gain_sd) == (0.0, 0.0, 0.0)
            assert (found.reduction == even).all()
        else:
            assert found.step == STEPS[sure]
            np.testing.assert_allclose(found.reduction, even + STEPS[sure] * (plan - even))


def test_a_gain_of_nothing_is_no_gain() -> None:
    told = Told(np.zeros((1, 2)), dict.fromkeys(STEPS, (0.0, 0.0)))
    assert certify(told, np.array([0.1]), np.array([0.2]), np.ones(1)).step == 0


def test_a_gain_too_small_to_matter_is_left() -> None:
    for least, step in ((1.01, 1.0), (0.99, 0.0)):
        told = Told(np.zeros((2, 2)), dict.fromkeys(STEPS, (least * LEAST_GAIN * 8, 0.0)))
        assert certify(told, np.full(2, 0.1), np.full(2, 0.2), np.full(2, 4.0)).step == step


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), number=st.integers(2, 40), cut=st.floats(0.02, 0.45))
def test_every_plan_is_certified_within_trust_and_of_the_power_asked_for(
    seed: int, number: int, cut: float
) -> None:
    runs, shares = some_runs(number, seed), shares_of(number, seed)
    posterior, deepest = learn(PRIOR, runs), deepest_of(runs)
    need = cut * float(shares.watts.sum())
    even = equal(shares, need)
    limit = trusted(shares, even, deepest, posterior).end
    plan = marginal(replace(shares, end=limit), expected_curves(posterior.mean(), limit), need)
    found = guarded(shares, posterior, deepest, need)
    for step in STEPS:
        gain, sd = posterior.gain(even, even + step * (plan - even), shares.value)
        sure = gain - SURE_SDS * sd > 0 and gain >= LEAST_GAIN * shares.value.sum()
        if step > found.step:
            assert not sure
        if step == found.step:
            assert sure
            assert (found.gain, found.gain_sd) == (gain, sd)
    assert found.step in (*STEPS, 0.0)
    assert (found.reduction >= 0).all()
    assert (found.reduction <= limit + 1e-12).all()
    met = min(need, shares.most)
    assert float(shares.watts @ found.reduction) == pytest.approx(met, rel=1e-9)
    beyond = guarded_beyond(shares, posterior, deepest, need)
    assert (beyond.reduction <= shares.end + 1e-12).all()
    assert float(shares.watts @ beyond.reduction) == pytest.approx(met, rel=1e-9)


def test_trust_ends_a_step_beyond_what_was_seen_and_sooner_where_few_kinds_run() -> None:
    shares = Shares(np.ones(3), np.ones(3), np.zeros(3), np.full(3, 0.5))
    even, deepest = np.full(3, 0.2), np.array([0.0, 0.3, 0.48])
    for kinds, step in ((FEW_KINDS, TRUST), (FEW_KINDS - 1, TRUST_FEW)):
        told = Told(np.zeros((3, 2)), {}, kinds=kinds, known=np.ones(3, dtype=bool))
        limit = trusted(shares, even, deepest, told).end
        np.testing.assert_allclose(limit, [0.2 + step, 0.3 + step, 0.5])


def test_kin_count_as_one_kind() -> None:
    runs = [replace(run, kin=f"kin {i % 5}", gpu_model="one") for i, run in enumerate(some_runs(40, 1))]
    assert learn(PRIOR, runs).kinds == 5
    assert learn(PRIOR, [replace(run, kin="") for run in runs]).kinds == 40


def test_a_run_without_a_library_is_cut_no_deeper_than_it_was_measured() -> None:
    runs, shares = some_runs(40, 3), shares_of(40, 3)
    prior = Prior(Library((*small_library().curves, NO_LIBRARY)))
    has, lacks = prior.only(lambda one: one.curve_id != ""), prior.only(lambda one: one.curve_id == "")
    weights = np.array([lacks if i % 4 == 0 else has for i in range(40)])
    posterior, deepest = learn(prior, runs, log_weight=weights), deepest_of(runs)
    assert posterior.known.tolist() == [i % 4 != 0 for i in range(40)]
    need = 0.2 * float(shares.watts.sum())
    found, even = guarded(shares, posterior, deepest, need), equal(shares, need)
    assert found.step > 0
    lacking = np.arange(40) % 4 == 0
    assert (found.reduction <= np.maximum(even, deepest) + 1e-12)[lacking].all()
    never = lacking & (deepest == 0)
    assert never.any()
    assert (found.reduction == even)[never].all()
    assert float(shares.watts @ found.reduction) == pytest.approx(need, rel=1e-9)


def test_neither_library_nor_measurement_is_the_equal_cut_whatever_was_told() -> None:
    runs = [replace(run, measurements=()) for run in some_runs(40, 3)]
    shares, posterior = shares_of(40, 3), learn(Prior(Library([])), runs)
    need = 0.2 * float(shares.watts.sum())
    for plan in (guarded, guarded_beyond):
        found = plan(shares, posterior, deepest_of(runs), need)
        np.testing.assert_array_equal(found.reduction, equal(shares, need))


def test_beyond_the_trust_limit_only_what_is_certified_once_more() -> None:
    runs, shares = some_runs(40, 3), shares_of(40, 3)
    posterior, deepest = learn(PRIOR, runs), deepest_of(runs)
    need = 0.2 * float(shares.watts.sum())
    within, beyond = (plan(shares, posterior, deepest, need).reduction for plan in (guarded, guarded_beyond))
    gain, sd = posterior.gain(within, beyond, shares.value)
    assert gain - SURE_SDS * sd > 0
    assert (beyond > trusted(shares, equal(shares, need), deepest, posterior).end + 0.01).any()


# ------------------------------------------------------------------------------------------------------ curves


def test_a_hull_spans_what_a_run_may_be_given_and_no_more() -> None:
    """A loss ends at 1, so its far end looks cheap; within 0.3 this curve is convex, and the other one is cheaper."""
    steep = np.minimum(1.0, 20 * np.maximum(GRID - 0.1, 0))
    plain = 0.9 * GRID
    shares = Shares(np.ones(2), np.ones(2), np.zeros(2), np.array([0.3, 0.3]))
    plan = marginal(shares, expected_curves(np.array([steep, plain]), shares.end), 0.4)
    np.testing.assert_allclose(plan, [0.1, 0.3], atol=0.003)


def test_expected_curves_are_the_means_made_monotone_between_nothing_and_all() -> None:
    mean = np.array([0.5 * GRID + 0.05 * np.sin(40 * GRID) - 0.02, 1.5 * GRID**2])
    end = np.array([0.37, 0.9])
    stack = expected_curves(mean, end)
    expected = np.maximum.accumulate(np.clip(mean, 0, 1), axis=1)
    expected[:, 0] = 0
    for x in (0.0, 0.1, 0.25, 0.36):
        np.testing.assert_allclose(
            stack.loss_at(np.array([x, 2 * x])),
            [np.interp(x, GRID, expected[0]), np.interp(2 * x, GRID, expected[1])],
            atol=0.003,
        )


# ------------------------------------------------------------------------------------------------ changes nothing


def test_no_information_is_the_equal_cut_to_the_last_bit() -> None:
    for number in (1, 5, 50):
        shares = shares_of(number, number)
        posterior = learn(PRIOR, [RunEvidence(f"gpu {i % 3}") for i in range(number)])
        for cut in (0.0, 0.1, 0.3, 5.0):
            need = cut * float(shares.watts.sum())
            for plan in (guarded, guarded_beyond):
                found = plan(shares, posterior, np.zeros(number), need)
                assert (found.reduction == equal(shares, need)).all()
                assert found.step == 0


def test_runs_that_nothing_tells_apart_stay_equal() -> None:
    run = RunEvidence("new", measurements=(Measurement(0.2, 0.1, 0.01),), baseline="seen")
    shares = Shares(np.linspace(100, 900, 30), np.linspace(100, 900, 30), np.zeros(30), np.full(30, 0.6))
    found = guarded(shares, learn(PRIOR, [run] * 30), np.full(30, 0.2), 0.25 * float(shares.watts.sum()))
    np.testing.assert_allclose(found.reduction, 0.25, atol=1e-9)


def test_an_empty_library_plans_from_measurements_alone() -> None:
    cheap = RunEvidence("new", measurements=(Measurement(0.3, 0.02, 0.004),), baseline="seen")
    dear = replace(cheap, measurements=(Measurement(0.3, 0.5, 0.004),))
    shares = Shares(np.ones(40), np.ones(40), np.zeros(40), np.full(40, 0.6))
    posterior = learn(Prior(Library([])), [cheap, dear] * 20)
    found = guarded(shares, posterior, np.full(40, 0.3), 0.2 * 40)
    assert found.step > 0
    assert found.reduction[0] == pytest.approx(0.3)  # as deep as it was measured, and no deeper
    assert found.reduction[1] == pytest.approx(0.1)


@settings(
    max_examples=20, deadline=None, derandomize=True
)  # a step on the edge of its certificate may go either way
@given(seed=st.integers(0, 1000), number=st.integers(2, 30))
def test_the_order_of_runs_changes_no_plan(seed: int, number: int) -> None:
    runs, shares = some_runs(number, seed), shares_of(number, seed)
    order = np.random.default_rng(seed).permutation(number)
    mixed = Shares(*(getattr(shares, name)[order] for name in Shares.__slots__))
    need = 0.2 * float(shares.watts.sum())
    one = guarded(shares, learn(PRIOR, runs), deepest_of(runs), need)
    again = [runs[i] for i in order]
    other = guarded(mixed, learn(PRIOR, again), deepest_of(again), need)
    assert one.gain == pytest.approx(other.gain, abs=1e-3 * float(shares.value.sum()))
    same(one, other, shares, order)


def same(one: Certified, other: Certified, shares: Shares, order: IntArray) -> None:
    """Plans that differ by what a few runs at one price may give for each other."""
    assert one.step == other.step
    moved = shares.watts[order] * np.abs(one.reduction[order] - other.reduction)
    assert float(moved.sum()) < 0.002 * float(shares.watts.sum())


@pytest.mark.parametrize("seed", range(6))
def test_two_kin_halves_are_planned_as_the_whole(seed: int) -> None:
    runs = [replace(run, kin=f"kin {i}") for i, run in enumerate(some_runs(30, seed))]
    shares = shares_of(30, seed)
    split = [run for run in runs for _ in range(2)]
    halves = Shares(
        *(np.repeat(part, 2) for part in (shares.watts / 2, shares.value / 2, shares.start, shares.end))
    )
    need = 0.2 * float(shares.watts.sum())
    one = guarded(shares, learn(PRIOR, runs), deepest_of(runs), need)
    two = guarded(halves, learn(PRIOR, split), deepest_of(split), need)
    assert one.step == two.step
    assert one.gain_sd == pytest.approx(two.gain_sd, rel=1e-4)
    np.testing.assert_allclose(two.reduction[::2], two.reduction[1::2], atol=1e-9)
    moved = shares.watts * np.abs(one.reduction - two.reduction[::2])
    assert float(moved.sum()) < 0.002 * float(shares.watts.sum())


# ------------------------------------------------------------------------------------------------ dense formulas


@pytest.mark.parametrize("cut", [0.1, 0.2, 0.3])
def test_plans_are_those_of_the_dense_formulas(cut: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "_SURPRISE", np.inf)
    runs, shares = some_runs(24, 9), shares_of(24, 9)
    need, deepest = cut * float(shares.watts.sum()), deepest_of(runs)
    one = guarded(shares, learn(PRIOR, runs), deepest, need)
    other = guarded(shares, reference(PRIOR, runs), deepest, need)
    assert one.gain_sd == pytest.approx(other.gain_sd, rel=1e-3)
    same(one, other, shares, np.arange(24))


# ---------------------------------------------------------------------------------------------- the cut in force


def in_force(reduction: FloatArray, need: float) -> InForce:
    return InForce(need, Certified(reduction, 0.5, 0.0, 0.0))


PAIR = Shares(np.ones(2), np.ones(2), np.zeros(2), np.full(2, 0.6))


@dataclass
class Steps(Told):
    """Gains of two moves: from equal to the cut in force, and from that to the fresh one."""

    held: tuple[float, float] = (0.02, 0.0)
    more: tuple[float, float] = (0.0, 0.0)

    def gain(self, before: FloatArray, after: FloatArray, value: FloatArray) -> tuple[float, float]:
        return self.held if np.ptp(before) < 1e-9 else self.more


def renew(need: float = 0.4, shares: Shares = PAIR, **told: Any) -> tuple[Certified, bool]:
    """The cut in force, 0.3 and 0.1, before a fresh one of 0.4 and 0; and whether the fresh one was taken."""
    fresh = Certified(np.array([0.4, 0.0]), 1.0, 0.1, 0.01)
    before = in_force(np.array([0.3, 0.1]), 0.4)
    found = renewed(shares, Steps(np.zeros((2, 2)), {}, **told), np.full(2, 0.5), need, fresh, before)
    return found, found is fresh


@pytest.mark.parametrize(
    ("more", "moves"),
    [((0.01, 0.0), True), ((0.01, 0.1), False), ((1.6 * LEAST_RENEWAL, 0.0), False), ((-0.01, 0.0), False)],
)
def test_caps_move_only_for_a_gain_that_is_sure_and_can_be_seen(
    more: tuple[float, float], *, moves: bool
) -> None:
    found, moved = renew(more=more)
    assert moved == moves
    if not moved:
        np.testing.assert_allclose(found.reduction, [0.3, 0.1])
        assert (found.gain, found.step) == (0.02, 0.5)


def test_a_cut_in_force_that_is_expected_to_be_worse_than_equal_is_left() -> None:
    assert renew(held=(-0.001, 0.5))[1]


def test_another_limit_is_planned_anew_at_once() -> None:
    assert renew(need=0.4 * (1 + 2 * SAME_NEED))[1]
    assert not renew(need=0.4 * (1 + 0.5 * SAME_NEED))[1]


@pytest.mark.parametrize("need", [0.395, 0.4, 0.405])
def test_the_cut_in_force_is_fitted_to_what_is_needed_and_to_floors_that_moved(need: float) -> None:
    found, moved = renew(need, replace(PAIR, end=np.array([0.25, 0.6])))
    assert not moved
    assert float(found.reduction.sum()) == pytest.approx(need)
    assert found.reduction[0] <= 0.25


def test_what_is_not_known_of_a_run_leaves_it_where_equal_puts_it_whatever_is_in_force() -> None:
    fresh = Certified(np.full(2, 0.2), 0.0, 0.0, 0.0)
    curves = Steps(np.zeros((2, 2)), {}, known=np.zeros(2, dtype=bool))
    found = renewed(PAIR, curves, np.zeros(2), 0.4, fresh, in_force(np.array([0.3, 0.1]), 0.4))
    np.testing.assert_allclose(found.reduction, 0.2)


def test_a_run_that_came_begins_where_equal_puts_it_and_moves_nobody_else_far() -> None:
    three = Shares(np.ones(3), np.ones(3), np.zeros(3), np.full(3, 0.6))
    curves = Steps(np.zeros((3, 3)), {}, known=np.ones(3, dtype=bool))
    fresh = Certified(np.array([0.4, 0.0, 0.2]), 1.0, 0.1, 0.01)
    found = renewed(three, curves, np.full(3, 0.5), 0.6, fresh, in_force(np.array([0.3, 0.1, np.nan]), 0.6))
    np.testing.assert_allclose(found.reduction, [0.3, 0.1, 0.2])
