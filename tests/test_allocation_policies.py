"""Sharing a reduction: the budget, floors, and that marginal loses the least there is to lose."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.allocation.policies import allocate
from slurm_pfi.allocation.problem import Allocation, Policy, Problem, RunDemand
from slurm_pfi.allocation.rounding import lowest_cap_mw, whole_watts
from slurm_pfi.allocation.solve import ProblemError
from slurm_pfi.elasticity.curve import ElasticityCurve
from slurm_pfi.model import Run

WATT = 1000
POLICIES: tuple[Policy, ...] = ("equal", "pfi", "marginal", "oracle")
policies = st.sampled_from(POLICIES)


def curve(*points: tuple[float, float]) -> ElasticityCurve:
    return ElasticityCurve(np.array([0.0, *(x for x, _ in points)]), np.array([0.0, *(y for _, y in points)]))


CURVES = (
    curve((0.1, 0.03), (0.3, 0.12), (0.5, 0.35)),
    curve((0.2, 0.02), (0.4, 0.1), (0.6, 0.5)),
    curve((0.3, 0.3)),
    curve((0.1, 0.08), (0.3, 0.1), (0.4, 0.4)),  # not convex
    curve((0.25, 0.0), (0.5, 0.6)),
)
SOFT, HARD = CURVES[1], CURVES[2]


def demand(
    job_id: int,
    gpus: int = 1,
    *,
    ceiling_w: float = 700,
    draw_w: float = 700,
    floor_w: float = 200,
    device_min_w: float = 200,
    some: ElasticityCurve = SOFT,
    weight: float = 1.0,
    flex_none: bool = False,
) -> RunDemand:
    mw = [round(watts * WATT) for watts in (ceiling_w, draw_w, floor_w, device_min_w)]
    return RunDemand(Run("c", job_id), gpus, mw[0], mw[1], mw[2], mw[3], some, weight, flex_none)


def caps_w(answer: Allocation) -> list[float]:
    return [cap / WATT for cap in answer.caps_mw]


def total(runs: tuple[RunDemand, ...], caps_mw: tuple[int, ...]) -> int:
    return sum(run.gpus * cap for run, cap in zip(runs, caps_mw, strict=True))


@st.composite
def demands(draw: st.DrawFn, *, one_curve: bool = False) -> tuple[RunDemand, ...]:
    made = []
    for job_id in range(draw(st.integers(1, 7))):
        lowest, low, high = sorted(draw(st.lists(st.integers(100_000, 700_000), min_size=3, max_size=3)))
        made.append(
            RunDemand(
                run=Run("c", job_id),
                gpus=draw(st.integers(1, 16)),
                ceiling_mw=high,
                draw_mw=draw(st.integers(60_000, 760_000)),
                floor_mw=low,
                device_min_mw=lowest,
                curve=CURVES[0] if one_curve else draw(st.sampled_from(CURVES)),
                weight=1.0 if one_curve else draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
                flex_none=draw(st.booleans()),
                pfi=draw(st.none() | st.floats(-1, 10)),
            )
        )
    return tuple(made)


@st.composite
def problems(draw: st.DrawFn, *, emergency: bool = False) -> Problem:
    runs = draw(demands())
    lowest, highest = sum(r.gpus * r.device_min_mw for r in runs), sum(r.gpus * r.ceiling_mw for r in runs)
    budget = draw(st.integers(lowest // 2, highest + WATT))
    hard = draw(st.integers(lowest // 2, highest + WATT)) if emergency else None
    return Problem(runs, budget, hard)


# ------------------------------------------------------------------------------------------- what always holds


@given(problems(), policies)
def test_the_budget_is_met_or_the_shortfall_is_exact(problem: Problem, policy: Policy) -> None:
    answer = allocate(problem, policy)
    used = total(problem.runs, answer.caps_mw)
    floors = tuple(lowest_cap_mw(run) for run in problem.runs)
    if total(problem.runs, floors) > problem.budget_total_mw:
        assert answer.caps_mw == floors
        assert answer.shortfall_total_mw == used - problem.budget_total_mw > 0
        assert not answer.feasible
    else:
        assert used <= problem.budget_total_mw
        assert answer.shortfall_total_mw == 0
        assert answer.feasible
    assert answer.floor_passed == ()


@given(problems(emergency=True), policies)
def test_bounds_hold_and_losses_are_numbers(problem: Problem, policy: Policy) -> None:
    answer = allocate(problem, policy)
    for run, cap, loss in zip(problem.runs, answer.caps_mw, answer.expected_loss, strict=True):
        assert run.device_min_mw <= cap <= run.ceiling_mw
        assert cap % WATT == 0 or cap == run.ceiling_mw
        assert 0 <= loss <= 1
        assert loss == pytest.approx(float(run.curve.loss_at(1 - cap / run.draw_mw)), abs=1e-9)


@given(problems(), policies)
def test_no_more_is_taken_than_rounding_needs(problem: Problem, policy: Policy) -> None:
    answer = allocate(problem, policy)
    left = problem.budget_total_mw - total(problem.runs, answer.caps_mw)
    cut = sum(r.gpus for r, c in zip(problem.runs, answer.caps_mw, strict=True) if c < r.ceiling_mw)
    assert cut == 0 or left <= cut * WATT


@given(problems(), policies)
def test_nobody_loses_while_there_is_room_above_a_draw(problem: Problem, policy: Policy) -> None:
    answer = allocate(problem, policy)
    pairs = list(zip(problem.runs, answer.caps_mw, strict=True))
    reduced = any(cap < min(run.draw_mw, run.ceiling_mw) - WATT for run, cap in pairs)
    idle = any(cap > max(run.draw_mw, lowest_cap_mw(run)) + WATT for run, cap in pairs)
    assert not (reduced and idle)


@given(problems(), policies, st.integers(0, 3_000_000))
def test_more_budget_lowers_no_cap(problem: Problem, policy: Policy, more_mw: int) -> None:
    before = allocate(problem, policy)
    after = allocate(replace(problem, budget_total_mw=problem.budget_total_mw + more_mw), policy)
    assert all(b <= a for b, a in zip(before.caps_mw, after.caps_mw, strict=True))


@given(problems(emergency=True), policies, st.randoms(use_true_random=False))
def test_the_order_of_runs_changes_nothing(problem: Problem, policy: Policy, random: object) -> None:
    order = list(range(len(problem.runs)))
    getattr(random, "shuffle")(order)  # noqa: B009
    answer = allocate(problem, policy)
    mixed = allocate(replace(problem, runs=tuple(problem.runs[i] for i in order)), policy)
    assert mixed.caps_mw == tuple(answer.caps_mw[i] for i in order)
    assert set(mixed.floor_passed) == set(answer.floor_passed)


@given(problems(emergency=True), policies)
def test_splitting_runs_changes_nothing(problem: Problem, policy: Policy) -> None:
    whole = replace(problem, runs=tuple(replace(run, gpus=2 * run.gpus) for run in problem.runs))
    halves = replace(
        problem,
        runs=tuple(replace(r, run=replace_restart(r.run, part)) for r in problem.runs for part in (0, 1)),
    )
    one = allocate(whole, policy).caps_mw
    two = allocate(halves, policy).caps_mw
    assert np.abs(np.repeat(one, 2) - np.array(two)).max() <= WATT


def replace_restart(run: Run, restart: int) -> Run:
    return Run(run.cluster, run.job_id, restart)


# ------------------------------------------------------------------------------------------------- the policies


@given(problems())
def test_equal_is_one_share_for_all_that_no_bound_holds_back(problem: Problem) -> None:
    answer = allocate(problem, "equal")
    share, slack = [], []
    for run, cap in zip(problem.runs, answer.caps_mw, strict=True):
        x = 1 - cap / run.draw_mw
        if cap < min(run.draw_mw, run.ceiling_mw) and cap > lowest_cap_mw(run):
            share.append((x - WATT / run.draw_mw, x))
        if cap == lowest_cap_mw(run) < min(run.ceiling_mw, run.draw_mw):
            slack.append(x)
    if share:
        low, high = max(s[0] for s in share), min(s[1] for s in share)
        assert low <= high + 1e-9
        assert all(x <= high + 1e-9 for x in slack)  # whom the floor holds back gives no more than the others


@given(demands(one_curve=True), st.floats(0.3, 1.0))
def test_without_information_marginal_is_equal(runs: tuple[RunDemand, ...], share: float) -> None:
    copies = tuple(replace(run, curve=curve((0.1, 0.03), (0.3, 0.12), (0.5, 0.35))) for run in runs)
    problem = Problem(copies, round(share * sum(r.gpus * r.ceiling_mw for r in runs)))
    assert allocate(problem, "marginal").caps_mw == allocate(problem, "equal").caps_mw


def test_equal_prices_are_filled_to_one_share() -> None:
    """Eight runs alike beside one that is not: merit order, and the eight stay level."""
    runs = (*(demand(i, i + 1) for i in range(8)), demand(9, 4, some=HARD))
    for share in (0.95, 0.85, 0.7, 0.55, 0.4):
        caps = allocate(
            Problem(runs, int(share * sum(r.gpus * r.ceiling_mw for r in runs))), "marginal"
        ).caps_mw
        assert max(caps[:8]) - min(caps[:8]) <= WATT


def test_by_hand() -> None:
    runs = (demand(1, 2, some=SOFT), demand(2, 2, some=HARD), demand(3, 4, draw_w=500, floor_w=500))
    full = 8 * 700 * WATT
    assert caps_w(allocate(Problem(runs, full), "equal")) == [700, 700, 700]
    # 800 W lie between the ceilings of the third run and its draw: they cost nobody anything.
    assert caps_w(allocate(Problem(runs, full - 800 * WATT), "marginal")) == [700, 700, 500]
    # The third stands at its floor, so the others give what is missing.
    assert caps_w(allocate(Problem(runs, full - 1080 * WATT), "equal")) == [630, 630, 500]
    marginal = allocate(Problem(runs, full - 1080 * WATT), "marginal")
    assert caps_w(marginal) == [560, 700, 500]
    assert marginal.expected_loss == pytest.approx((0.02, 0, 0))


def test_weight_is_the_value_of_a_gpu_hour() -> None:
    runs = (demand(1, 2, weight=100), demand(2, 2, some=HARD))
    assert caps_w(allocate(Problem(runs, 2600 * WATT), "marginal")) == [700, 600]


def test_pfi_by_hand() -> None:
    """Eq. 2: watts in proportion to draw / weight x PFI; an unknown PFI is the median of the others."""
    runs = tuple(replace(demand(i, 2), pfi=pfi) for i, pfi in enumerate([1.0, 2.0, 3.0, None]))
    full = 8 * 700 * WATT
    assert caps_w(allocate(Problem(runs, full - 320 * WATT), "pfi")) == [680, 660, 640, 660]
    # The third stands at its floor, 500 W down; the others share what is missing in the same proportion.
    assert caps_w(allocate(Problem(runs, full - 2800 * WATT), "pfi")) == [520, 340, 200, 340]
    heavy = (runs[0], replace(runs[1], weight=4.0))
    assert caps_w(allocate(Problem(heavy, 2740 * WATT), "pfi")) == [680, 690]
    emergency = tuple(replace(run, floor_mw=650 * WATT) for run in runs)
    short = allocate(Problem(emergency, full - 1200 * WATT, full - 1200 * WATT), "pfi")
    assert caps_w(short) == [625, 550, 475, 550]
    assert len(short.floor_passed) == 4


@given(demands(), st.floats(0.3, 1.0))
def test_with_no_pfi_known_pfi_is_equal(runs: tuple[RunDemand, ...], share: float) -> None:
    unknown = tuple(replace(run, pfi=None) for run in runs)
    problem = Problem(unknown, round(share * sum(r.gpus * r.ceiling_mw for r in runs)))
    assert allocate(problem, "pfi").caps_mw == allocate(problem, "equal").caps_mw


def test_the_oracle_cuts_who_draws_most_where_the_curves_are_the_same() -> None:
    """One average curve is no ground to do so; one true curve is."""
    runs = (demand(1, draw_w=700), demand(2, draw_w=350, ceiling_w=350))
    assert caps_w(allocate(Problem(runs, 950 * WATT), "oracle")) == [600, 350]
    assert caps_w(allocate(Problem(runs, 945 * WATT), "marginal")) == [630, 315]


@given(problems(emergency=True), policies, st.integers(0, 2_000_000))
def test_what_is_parked_is_taken_from_both_budgets(problem: Problem, policy: Policy, parked_mw: int) -> None:
    hard = problem.hard_budget_total_mw
    assert hard is not None
    more = Problem(problem.runs, problem.budget_total_mw + parked_mw, hard + parked_mw, parked_mw)
    assert allocate(more, policy) == allocate(problem, policy)


def test_parked_gpus_cannot_hold_less_than_nothing() -> None:
    with pytest.raises(ProblemError, match="parked GPUs hold -1 mW"):
        allocate(Problem((demand(1),), 1000, parked_total_mw=-1), "equal")


def chords(some: ElasticityCurve, x: float) -> float:
    """Convex minorant on the measured part, straight on at the tail slope; by definition, in plain Python."""
    xs, ys = some.reduction.tolist(), some.loss.tolist()
    if x >= xs[-1]:
        return float(ys[-1] + some.tail_slope * (x - xs[-1]))
    return min(
        float(ys[i] + (ys[j] - ys[i]) * (x - xs[i]) / (xs[j] - xs[i]))
        for i in range(len(xs))
        for j in range(i + 1, len(xs))
        if xs[i] <= x <= xs[j]
    )


def random_runs(rng: np.random.Generator) -> tuple[RunDemand, ...]:
    """Runs whose floors leave room to reduce, drawing gigawatts, so that whole watts are no restriction."""
    runs = []
    for job_id in range(rng.integers(2, 7)):
        draw_w = rng.uniform(0.3e9, 0.8e9)
        floor_w = rng.uniform(0.2, 0.9) * draw_w
        runs.append(
            demand(
                job_id,
                int(rng.integers(1, 17)),
                ceiling_w=max(floor_w, rng.uniform(0.9, 1.2) * draw_w),
                draw_w=draw_w,
                floor_w=floor_w,
                device_min_w=floor_w,
                some=CURVES[rng.integers(len(CURVES))],
                weight=float(rng.choice([0.5, 1.0, 3.0])),
            )
        )
    return tuple(runs)


def corner_losses(run: RunDemand) -> list[tuple[float, float]]:
    """Reductions between ceiling and floor where the convex loss bends, with that loss."""
    start = max(0.0, 1 - run.ceiling_mw / run.draw_mw)
    end = max(start, 1 - run.floor_mw / run.draw_mw)
    corners = {start, end, *(x for x in run.curve.reduction.tolist() if start < x < end)}
    return [(x, chords(run.curve, x)) for x in sorted(corners)]


def least_loss(runs: tuple[RunDemand, ...], budget_mw: int) -> float:
    """What no allocation can beat, by weak duality: at any price of power each run chooses freely, at a corner.

    The best such bound is found among the prices at which some run changes its mind.
    """
    corners = [corner_losses(run) for run in runs]
    need = sum(run.gpus * min(run.ceiling_mw, run.draw_mw) for run in runs) - budget_mw
    prices = {0.0}
    for run, mine in zip(runs, corners, strict=True):
        prices |= {run.weight * (y1 - y0) / (x1 - x0) / run.draw_mw for (x0, y0), (x1, y1) in pairwise(mine)}
    bounds = []
    for price in prices:
        choices = (
            run.gpus * min(run.weight * y - price * run.draw_mw * (x - mine[0][0]) for x, y in mine)
            for run, mine in zip(runs, corners, strict=True)
        )
        bounds.append(price * need + sum(choices))
    return max(bounds)


def test_marginal_loses_the_least_that_can_be_lost() -> None:
    rng = np.random.default_rng(7)
    reduced = 0
    for _ in range(400):
        runs = random_runs(rng)
        floors, ceilings = (
            sum(r.gpus * getattr(r, name) for r in runs) for name in ("floor_mw", "ceiling_mw")
        )
        budget = int(floors + rng.uniform(0.01, 0.9) * (ceilings - floors))
        if len({(r.weight, id(r.curve)) for r in runs}) == 1:
            continue  # then it is equal, on purpose
        answer = allocate(Problem(runs, budget), "marginal")
        assert answer.feasible
        loss = sum(
            run.gpus * run.weight * chords(run.curve, max(0.0, 1 - cap / run.draw_mw))
            for run, cap in zip(runs, answer.caps_mw, strict=True)
        )
        least = least_loss(runs, budget)
        assert least - 1e-6 <= loss <= least + 1e-6
        reduced += loss > 0
    assert reduced > 300


# ------------------------------------------------------------------------------------------------- emergencies


@given(problems(emergency=True), policies)
def test_an_emergency_passes_floors_as_far_as_it_must(problem: Problem, policy: Policy) -> None:
    answer = allocate(problem, policy)
    runs, hard = problem.runs, problem.hard_budget_total_mw
    assert hard is not None
    used = total(runs, answer.caps_mw)
    floors = total(runs, tuple(lowest_cap_mw(run) for run in runs))
    passed = {run.run for run, cap in zip(runs, answer.caps_mw, strict=True) if cap < run.floor_mw}
    assert set(answer.floor_passed) == passed
    assert answer.shortfall_total_mw == max(0, used - min(hard, problem.budget_total_mw))
    if floors <= hard:
        assert not passed
    elif used > hard:
        assert all(c - r.device_min_mw < WATT for r, c in zip(runs, answer.caps_mw, strict=True))
    else:
        assert hard - used <= WATT * sum(run.gpus for run in runs)
    spared = [
        c - r.device_min_mw >= WATT for r, c in zip(runs, answer.caps_mw, strict=True) if not r.flex_none
    ]
    if any(spared):
        assert not any(run.run in passed for run in runs if run.flex_none)


def test_an_emergency_by_hand() -> None:
    runs = (
        demand(1, floor_w=600, some=SOFT),
        demand(2, floor_w=600, some=HARD),
        demand(3, floor_w=700, flex_none=True),
    )
    floors = 1900 * WATT
    answer = allocate(Problem(runs, 1800 * WATT), "marginal")
    assert (caps_w(answer), answer.shortfall_total_mw) == ([600, 600, 700], 100 * WATT)
    answer = allocate(Problem(runs, 1800 * WATT, hard_budget_total_mw=floors), "marginal")
    assert (caps_w(answer), answer.shortfall_total_mw) == ([600, 600, 700], 100 * WATT)
    answer = allocate(Problem(runs, 1800 * WATT, 1800 * WATT), "marginal")
    assert (caps_w(answer), answer.floor_passed) == ([500, 600, 700], (Run("c", 1),))
    answer = allocate(Problem(runs, 1000 * WATT, 1000 * WATT), "marginal")
    assert (caps_w(answer), answer.shortfall_total_mw) == ([200, 200, 600], 0)
    answer = allocate(Problem(runs, 500 * WATT, 500 * WATT), "marginal")
    assert (caps_w(answer), answer.shortfall_total_mw) == ([200, 200, 200], 100 * WATT)


# ------------------------------------------------------------------------------------------------ whole watts


def test_a_floor_that_is_no_whole_watt_is_kept() -> None:
    answer = allocate(Problem((demand(1, floor_w=300.2),), 0), "equal")
    assert answer.caps_mw == (301 * WATT,)


def test_a_ceiling_is_never_passed_and_kept_when_uncut() -> None:
    odd = demand(1, ceiling_w=650.5, draw_w=600, floor_w=650.2)
    assert allocate(Problem((odd,), 0), "equal").caps_mw == (650_500,)
    assert allocate(Problem((odd,), 10**9), "equal").caps_mw == (650_500,)


def test_a_budget_of_whole_watts_is_used_up() -> None:
    runs = tuple(demand(i) for i in range(3))
    for watts in range(201, 700, 7):
        assert caps_w(allocate(Problem(runs, 3 * watts * WATT), "equal")) == [watts] * 3


def test_rounding_gives_a_watt_back_rather_than_pass_the_budget_by_a_milliwatt() -> None:
    gpus, top, bottom = np.array([1, 1]), np.array([700_000, 700_000]), np.array([200_000, 300_000])
    caps = whole_watts(np.array([299_999.9995, 300_000.0]), gpus, top, bottom, 599_999)
    assert caps.tolist() == [299_000, 300_000]


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_to_share(policy: Policy) -> None:
    answer = allocate(Problem((), -5, hard_budget_total_mw=-7), policy)
    assert answer == Allocation(policy, (), (), 7, ())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (demand(1, 0), "c:1.0 has 0 GPUs"),
        (demand(1, floor_w=800), "out of order"),
        (demand(1, device_min_w=300), "out of order"),
        (demand(1, draw_w=0), "draw of 0 mW"),
        (demand(1, weight=float("nan")), "weight nan"),
        (demand(1, weight=-1.0), "weight -1"),
        (replace(demand(1), pfi=float("nan")), "a PFI of nan"),
    ],
)
def test_contradictions_are_refused(wrong: RunDemand, says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        allocate(Problem((wrong,), 1000), "equal")


@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_runs_take_no_time(policy: Policy) -> None:
    runs = tuple(demand(i, 1 + i % 16, draw_w=400 + i % 300, some=CURVES[i % 5]) for i in range(10_000))
    problem = Problem(runs, int(0.7 * sum(run.gpus * run.ceiling_mw for run in runs)))
    took_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        answer = allocate(problem, policy)
        took_s.append(time.perf_counter() - began_s)
    assert answer.feasible
    assert min(took_s) < 0.2  # about 0.04 s on an idle core
