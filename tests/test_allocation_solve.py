"""The array core of the policies: what each promises of any numbers, and the optimum by another's hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import block_diag, csr_matrix, vstack

from slurm_pfi.allocation.objective import values
from slurm_pfi.allocation.solve import ProblemError, Shares, by_index, equal, marginal
from slurm_pfi.allocation.supply import supply
from slurm_pfi.elasticity.curve import TAIL_REACH, CurveError, CurveStack, ElasticityCurve, FloatArray

CLOSE = 1e-9


def shares_of(
    watts: list[float], value: list[float], end: list[float], start: list[float] | None = None
) -> Shares:
    return Shares(
        np.array(watts),
        np.array(value),
        np.zeros(len(watts)) if start is None else np.array(start),
        np.array(end),
    )


@st.composite
def losses(draw: st.DrawFn, runs: int, points: int) -> FloatArray:
    """Loss of each run at ``points`` reductions, from 0 at the first, never falling, not convex as a rule."""
    steps = draw(
        st.lists(
            st.lists(
                st.sampled_from([0.0, 0.01, 0.05, 0.2, 1.0]) | st.floats(0, 1),
                min_size=points,
                max_size=points,
            ),
            min_size=runs,
            max_size=runs,
        )
    )
    table = np.cumsum(np.array(steps).reshape(runs, points), axis=1)
    table -= table[:, :1]
    return np.asarray(table / np.maximum(table[:, -1:] * draw(st.sampled_from([1.0, 1.5, 4.0])), 1.0))


Case = tuple[Shares, CurveStack, float]


@st.composite
def cases(draw: st.DrawFn, *, some: int = 1, started: bool = True) -> Case:
    """Runs, their curves, and a need within or somewhat beyond what there is."""
    runs = draw(st.integers(some, 7))
    points = draw(st.integers(2, 6))

    def each(what: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(what, min_size=runs, max_size=runs))

    start = each(st.sampled_from([0.0, 0.1]) | st.floats(0, 0.4)) if started else [0.0] * runs
    end = [min(1.0, a + b) for a, b in zip(start, each(st.floats(0, 0.7)), strict=True)]
    shares = shares_of(
        each(st.floats(1, 1e5)), each(st.sampled_from([0.0, 1.0, 8.0]) | st.floats(1e-3, 1e3)), end, start
    )
    grid = np.linspace(0, draw(st.floats(0.2, 0.9)), points)
    stack = CurveStack.from_arrays(grid, draw(losses(runs, points)))
    return shares, stack, draw(st.floats(-0.1, 1.2)) * shares.most


def some_pfi(runs: int) -> FloatArray:
    return np.array([1.0 + i % 3 for i in range(runs)])


def solve(policy: str, case: Case, need: float | None = None) -> FloatArray:
    shares, stack, given_need = case
    need = given_need if need is None else need
    if policy == "equal":
        return equal(shares, need)
    if policy == "pfi":
        return by_index(shares, some_pfi(shares.watts.size), need)
    return marginal(shares, stack, need)


every_policy = pytest.mark.parametrize("policy", ["equal", "pfi", "marginal"])


def taken(shares: Shares, reduction: FloatArray) -> float:
    return float((shares.watts * reduction).sum())


# ------------------------------------------------------------------------------------------- what always holds


@every_policy
@given(case=cases())
def test_the_need_is_met_exactly_or_everyone_gives_all(policy: str, case: Case) -> None:
    shares, _, need = case
    reduction = solve(policy, case)
    got, least = taken(shares, reduction), taken(shares, shares.start)
    assert got == pytest.approx(min(max(need, least), shares.most), rel=1e-9, abs=1e-9)
    if need > shares.most * (1 + CLOSE):
        assert (reduction == shares.end).all()
    if need <= least:
        assert (reduction == shares.start).all()


@every_policy
@given(case=cases())
def test_greatest_reductions_and_those_taken_are_kept(policy: str, case: Case) -> None:
    shares, _, _ = case
    reduction = solve(policy, case)
    assert (reduction >= shares.start).all()
    assert (reduction <= shares.end).all()


@every_policy
@given(case=cases(), more=st.floats(0, 0.5))
def test_a_greater_need_raises_nobody(policy: str, case: Case, more: float) -> None:
    shares, _, need = case
    less = solve(policy, case)
    assert (solve(policy, case, need + more * shares.most) >= less - CLOSE).all()


@every_policy
@given(case=cases(some=2), data=st.data())
def test_order_changes_nothing(policy: str, case: Case, data: st.DataObject) -> None:
    shares, stack, need = case
    order = np.array(data.draw(st.permutations(range(shares.watts.size))))
    turned = Shares(shares.watts[order], shares.value[order], shares.start[order], shares.end[order])
    curves = CurveStack([stack.curves[i] for i in order])
    pfi = some_pfi(order.size)
    here, there = {
        "equal": lambda: (equal(shares, need), equal(turned, need)),
        "pfi": lambda: (by_index(shares, pfi, need), by_index(turned, pfi[order], need)),
        "marginal": lambda: (marginal(shares, stack, need), marginal(turned, curves, need)),
    }[policy]()
    assert there == pytest.approx(here[order], abs=1e-8)


def halved(shares: Shares, who: int) -> tuple[Shares, FloatArray]:
    """The same runs with one of them as two halves; and for each run of these whom it is part of."""
    part = np.append(np.arange(shares.watts.size), who)
    size = np.ones(part.size)
    size[[who, -1]] = 0.5
    return (
        Shares(shares.watts[part] * size, shares.value[part] * size, shares.start[part], shares.end[part]),
        part,
    )


@given(case=cases(), who=st.integers(0, 6))
def test_two_halves_of_a_run_are_treated_like_the_whole(case: Case, who: int) -> None:
    shares, stack, need = case
    assume(who < shares.watts.size)
    parts, part = halved(shares, who)
    assert equal(parts, need) == pytest.approx(equal(shares, need)[part], abs=1e-8)
    curves = CurveStack([stack.curves[i] for i in part])
    assert marginal(parts, curves, need) == pytest.approx(marginal(shares, stack, need)[part], abs=1e-8)


def test_eq_2_is_not_scale_free() -> None:
    """Two halves have the same draw per throughput as the whole, so each gives as many watts as the whole would."""
    shares = shares_of([400, 400], [4, 4], [1, 1])
    pfi = np.array([1.5, 1.5])
    assert by_index(shares, pfi, 120) * shares.watts == pytest.approx([60, 60])
    parts, part = halved(shares, 0)
    assert by_index(parts, pfi[part], 120) * parts.watts == pytest.approx([40, 40, 40])


@given(case=cases(), data=st.data())
def test_equal_curves_give_the_equal_policy(case: Case, data: st.DataObject) -> None:
    shares, stack, need = case
    alike = CurveStack([stack.curves[data.draw(st.integers(0, shares.watts.size - 1))]] * shares.watts.size)
    # Worth what it draws: watts cost every run the same.
    same = Shares(shares.watts, shares.watts * 0.7, shares.start, shares.end)
    assert marginal(same, alike, need) == pytest.approx(equal(same, need), abs=1e-8)


@every_policy
@given(
    numbers=st.lists(
        st.tuples(
            st.floats(5e-324, 1e300),
            st.floats(0, 1e300),
            st.floats(0, 1),
            st.floats(0, 1),
            st.floats(0, 1e300),
        ),
        min_size=1,
        max_size=6,
    ),
    need=st.floats(allow_nan=False),
    data=st.data(),
)
def test_no_finite_input_gives_nan(
    policy: str, numbers: list[tuple[float, ...]], need: float, data: st.DataObject
) -> None:
    watts, value, a, b, pfi = (np.array(column) for column in zip(*numbers, strict=True))
    shares = Shares(watts, value, np.minimum(a, b), np.maximum(a, b))
    stack = CurveStack.from_arrays(np.array([0.0, 1e-9, 0.3, 0.9]), data.draw(losses(len(numbers), 4)))
    answers = {
        "equal": lambda: equal(shares, need),
        "pfi": lambda: by_index(shares, pfi, need),
        "marginal": lambda: marginal(shares, stack, need),
    }
    reduction = answers[policy]()
    assert (reduction >= shares.start).all()
    assert (reduction <= shares.end).all()


@every_policy
def test_zero_runs(policy: str) -> None:
    nobody = shares_of([], [], [])
    stack = CurveStack.from_arrays(np.array([0.0, 0.5]), np.empty((0, 2)))
    pfi = np.empty(0)
    for need in (-1.0, 0.0, 5.0):
        answer = {
            "equal": lambda need=need: equal(nobody, need),
            "pfi": lambda need=need: by_index(nobody, pfi, need),
            "marginal": lambda need=need: marginal(nobody, stack, need),
        }[policy]()
        assert answer.shape == (0,)
    assert nobody.most == 0
    assert supply(nobody, stack).next_step(0) is None


# ------------------------------------------------------------------------------------------------------- Eq. 2


def test_eq_2_by_hand() -> None:
    shares = shares_of([100, 200, 100], [1, 4, 1], [0.5, 0.5, 0.5])
    # P/T x PFI: 100 x 1, 50 x 2, 100 x 2.
    pfi = np.array([1.0, 2.0, 2.0])
    assert by_index(shares, pfi, 40) * shares.watts == pytest.approx([10, 10, 20])
    # The third stands at its greatest reduction, 50 W; the others share the rest in the same proportion.
    assert by_index(shares, pfi, 130) * shares.watts == pytest.approx([40, 40, 50])
    assert by_index(shares, pfi, 160) * shares.watts == pytest.approx([50, 60, 50])


def test_what_is_worth_nothing_gives_first_and_what_is_inflexible_last() -> None:
    shares = shares_of([100, 100, 100, 100], [0, 1, 1, 1], [0.5] * 4)
    pfi = np.array([1.0, 1.0, 0.0, -0.4])
    assert by_index(shares, pfi, 30) == pytest.approx([0.3, 0, 0, 0])
    assert by_index(shares, pfi, 70) == pytest.approx([0.5, 0.2, 0, 0])
    assert by_index(shares, pfi, 120) == pytest.approx([0.5, 0.5, 0.1, 0.1])


# ------------------------------------------------------------------------------------------------- the optimum


Instance = tuple[Shares, FloatArray, FloatArray, float]


def optima(instances: list[Instance]) -> list[float]:
    """Least value x loss of each on its curves' convex minorants, by HiGHS, from raw points (runs, points) alone.

    A point on or above a minorant is a mixture of the curve's points, so the mixtures are what HiGHS chooses; it
    knows neither hulls nor prices nor an order. The instances are blocks of one program that share nothing.
    """
    costs, mixtures, limits, bounds, worths = [], [], [], [], []
    for shares, measured, lost, need in instances:
        runs, points = measured.shape
        slope = (np.diff(lost, axis=1) / np.diff(measured, axis=1)).max(axis=1)
        tail = lost[:, -1] + np.maximum(slope * (1 - measured[:, -1]), (1 - lost[:, -1]) / TAIL_REACH)
        x, y = np.column_stack((measured, np.ones(runs))), np.column_stack((lost, tail))
        row, column = np.repeat(np.arange(runs), points + 1), np.arange(runs * (points + 1))
        scale, worth = shares.watts.max(), float(shares.value.max())
        reduction = csr_matrix((x.ravel(), (row, column)))
        given_up = csr_matrix(-shares.watts / scale) @ reduction
        costs.append((shares.value[:, None] / worth * y).ravel())
        mixtures.append(csr_matrix((np.ones(column.size), (row, column))))
        limits.append(vstack((reduction, -reduction, given_up)))
        bounds.append(np.concatenate((shares.end, -shares.start, [-need / scale])))
        worths.append(worth)
    equals = block_diag(mixtures, format="csr")
    answer = linprog(
        np.concatenate(costs),
        A_eq=equals,
        b_eq=np.ones(equals.shape[0]),
        A_ub=block_diag(limits, format="csr"),
        b_ub=np.concatenate(bounds),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert answer.status == 0, answer.message
    parts = np.split(answer.x, np.cumsum([cost.size for cost in costs])[:-1])
    return [float(cost @ part) * worth for cost, part, worth in zip(costs, parts, worths, strict=True)]


def minorant_loss(shares: Shares, stack: CurveStack, reduction: FloatArray) -> float:
    """Total value x loss on the convex minorants, piece by piece."""
    pieces = stack.pieces()
    length = np.clip(reduction[pieces.owner], pieces.start, pieces.end) - pieces.start
    return float((shares.value[pieces.owner] * pieces.slope * length).sum())


def random_instance(rng: np.random.Generator) -> Instance:
    runs, points = int(rng.integers(2, 13)), int(rng.integers(2, 9))
    x = np.cumsum(rng.uniform(0.02, 1.0, (runs, points)), axis=1)
    x = (x - x[:, :1]) / x[:, -1:] * rng.uniform(0.3, 1.0, (runs, 1))
    y = np.cumsum(rng.exponential(1.0, (runs, points)) ** 2, axis=1)
    y = (y - y[:, :1]) / y[:, -1:] * rng.uniform(0.01, 1.0, (runs, 1))
    start = rng.choice([0.0, 0.1], runs)
    shares = Shares(
        rng.uniform(200, 700, runs) * rng.choice([1, 8, 64], runs),
        rng.uniform(0.5, 2, runs) * rng.choice([1, 8, 64], runs),
        start,
        np.minimum(start + rng.uniform(0, 0.9, runs), 1.0),
    )
    least = taken(shares, shares.start)
    return shares, x, y, least + rng.uniform(0.02, 0.98) * (shares.most - least)


def test_a_thousand_instances_reach_the_optimum_of_highs() -> None:
    rng = np.random.default_rng(20260911)
    worst = 0.0
    for _ in range(40):
        instances = [random_instance(rng) for _ in range(25)]
        for (shares, x, y, need), best in zip(instances, optima(instances), strict=True):
            stack = CurveStack.from_arrays(x, y)
            reduction = marginal(shares, stack, need)
            assert taken(shares, reduction) >= need * (1 - CLOSE)
            worst = max(worst, abs(minorant_loss(shares, stack, reduction) - best) / best)
    assert worst <= 1e-6


# -------------------------------------------------------------------------------------------- the supply curve


@given(case=cases())
def test_the_supply_curve_read_at_a_need_is_the_loss_of_marginals_answer(case: Case) -> None:
    shares, stack, need = case
    need = min(need, shares.most)
    curve = supply(shares, stack)
    assert (np.diff(curve.watts) >= 0).all()
    assert (np.diff(curve.price) >= 0).all()
    assert curve.most == pytest.approx(shares.most)
    loss = minorant_loss(shares, stack, marginal(shares, stack, need))
    assert curve.loss_at(need) == pytest.approx(loss, rel=1e-6, abs=1e-6 * shares.value.sum())
    for step in range(curve.run.size):
        assert curve.loss[step + 1] - curve.loss[step] == pytest.approx(
            curve.price[step] * (curve.watts[step + 1] - curve.watts[step]), abs=1e-6 * shares.value.sum()
        )


@given(case=cases())
def test_who_is_next_is_who_marginal_takes_next(case: Case) -> None:
    shares, stack, need = case
    curve = supply(shares, stack)
    need = min(max(need, curve.least), curve.most)
    step = curve.next_step(need)
    if step is None:
        assert need == pytest.approx(shares.most)
        return
    assume(
        not np.isclose(np.delete(curve.price, step), curve.price[step], rtol=1e-9, atol=0).any()
    )  # ties give together
    a_bit = 0.5 * (curve.watts[step + 1] - need)
    assume(a_bit > 1e-6 * shares.most)
    more = marginal(shares, stack, need + a_bit) - marginal(shares, stack, need)
    assert int(np.argmax(more * shares.watts)) == curve.run[step]


def test_more_than_there_is_has_no_price() -> None:
    shares = shares_of([100, 300], [1, 1], [0.5, 0.5])
    curve = supply(shares, CurveStack.from_arrays([0.0, 0.5], [[0.0, 0.1], [0.0, 0.1]]))
    assert (curve.least, curve.most) == (0, 200)
    assert curve.run.tolist() == [1, 0]
    assert [curve.next_step(need) for need in (-5, 0, 149, 150, 200)] == [0, 0, 0, 1, None]
    assert curve.loss_at(150) == pytest.approx(0.1)
    assert curve.loss_at(200) == pytest.approx(0.2)
    for wrong in (200.1, float("nan"), float("inf")):
        with pytest.raises(ProblemError, match="200 is all there is"):
            curve.loss_at(wrong)


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"watts": [1.0, -3.0]}, "run at place 1: a draw of -3"),
        ({"watts": [0.0, 1.0]}, "run at place 0: a draw of 0"),
        ({"watts": [1.0, float("nan")]}, "run at place 1: watts nan is no finite number"),
        ({"watts": [1.0, float("inf")]}, "watts inf"),
        ({"watts": [1e308, 1e308]}, "sum of all watts"),
        ({"value": [1.0, -1.0]}, "run at place 1: a value of -1"),
        ({"value": [float("nan"), 1.0]}, "value nan"),
        ({"end": [0.5, 1.1]}, "an end of 1.1"),
        ({"start": [-0.1, 0.0]}, "a start of -0.1"),
        ({"start": [0.0, 0.7]}, "run at place 1: an end of 0.5 lies below the start"),
        ({"end": [0.5]}, "one shape"),
        ({"watts": [[1.0, 1.0]]}, "one shape"),
    ],
)
def test_shares_that_contradict_themselves_are_refused(wrong: dict[str, list[float]], says: str) -> None:
    right = {"watts": [1.0, 1.0], "value": [1.0, 1.0], "start": [0.0, 0.0], "end": [0.5, 0.5]}
    with pytest.raises(ProblemError, match=says):
        Shares(**{name: np.array(array) for name, array in (right | wrong).items()})


@every_policy
def test_a_need_that_is_no_number_is_refused(policy: str) -> None:
    case = shares_of([1], [1], [1]), CurveStack.from_arrays([0.0, 1.0], [[0.0, 1.0]]), float("nan")
    with pytest.raises(ProblemError, match="no number"):
        solve(policy, case)


def test_arrays_that_do_not_fit_are_refused() -> None:
    shares = shares_of([1, 1], [1, 1], [1, 1])
    with pytest.raises(ProblemError, match="1 curves for 2 runs"):
        marginal(shares, CurveStack.from_arrays([0.0, 1.0], [[0.0, 1.0]]), 1)
    with pytest.raises(ProblemError, match="PFI"):
        by_index(shares, np.ones(3), 1)
    with pytest.raises(ProblemError, match="run at place 1: a PFI of nan"):
        by_index(shares, np.array([1.0, float("nan")]), 1)


@pytest.mark.parametrize(
    ("reduction", "loss", "says"),
    [
        ([0.0, 0.5], [[0.0, 0.1], [0.0, float("nan")]], "row 1: a curve may hold finite numbers only"),
        ([0.0, float("nan")], [[0.0, 0.1]], "row 0: a curve may hold finite"),
        ([0.0, 0.5, 0.5], [[0.0, 0.1, 0.2]], "row 0: reductions must ascend"),
        ([[0.0, 0.5], [0.1, 0.5]], [[0.0, 0.1], [0.0, 0.1]], "row 1: a curve starts at"),
        ([0.0, 0.5, 0.6], [[0.0, 0.2, 0.3], [0.0, 0.2, 0.1]], "row 1: losses may not fall"),
        ([0.0, 0.5], [[0.0, -0.1]], "row 0: losses may not fall"),
        ([0.0, 0.5], [[0.0, 1.1]], "row 0: losses may not fall and must stay within"),
        ([0.0, 1.0], [[0.0, 0.9]], "the loss at reduction 1 is 1"),
        ([0.0, 1.1], [[0.0, 0.9]], "stay within 0..1"),
        ([0.0], [[0.0]], "2 or more points"),
        ([0.0, 0.5], [0.0, 0.5], "2 or more points"),
        ([0.0, 0.5, 0.6], [[0.0, 0.5]], "2 or more points"),
    ],
)
def test_arrays_that_are_no_curves_are_refused(reduction: list[float], loss: list[float], says: str) -> None:
    with pytest.raises(CurveError, match=says):
        CurveStack.from_arrays(reduction, loss)


@given(data=st.data(), runs=st.integers(1, 5), points=st.integers(2, 6))
def test_a_stack_of_arrays_is_a_stack_of_curves(data: st.DataObject, runs: int, points: int) -> None:
    table = data.draw(losses(runs, points))
    grid = np.linspace(0, 0.8, points)
    stack = CurveStack.from_arrays(grid, table)
    curves = CurveStack([ElasticityCurve(grid, row) for row in table])
    x = np.array(data.draw(st.lists(st.floats(-0.1, 1), min_size=runs, max_size=runs)))
    assert (stack.loss_at(x) == curves.loss_at(x)).all()
    assert stack.all_same() == (table == table[0]).all() == curves.all_same()
    for name in ("owner", "start", "end", "slope"):
        assert (getattr(stack.pieces(), name) == getattr(curves.pieces(), name)).all()


# -------------------------------------------------------------------------------------------------- objectives


def test_progress_counts_gpu_hours_and_tokens_counts_tokens() -> None:
    gpus, priority, tokens = [1, 8, 64], [1.0, 2.0, 0.0], [900.0, 1e4, 5e5]
    assert values("progress", gpus=gpus, priority=priority).tolist() == [1, 16, 0]
    assert values("progress", gpus=gpus, priority=1.0).tolist() == [1, 8, 64]
    assert values("tokens", gpus=gpus, priority=priority, throughput=tokens).tolist() == tokens


def test_priority_moves_the_cut_to_who_counts_less() -> None:
    stack = CurveStack.from_arrays([0.0, 0.5], [[0.0, 0.2], [0.0, 0.2]])
    for priority, expected in (([1.0, 1.0], [0.2, 0.2]), ([3.0, 1.0], [0.0, 0.4]), ([1.0, 3.0], [0.4, 0.0])):
        value = values("progress", gpus=[4, 4], priority=priority)
        shares = Shares(np.full(2, 2800.0), value, np.zeros(2), np.full(2, 0.5))
        assert marginal(shares, stack, 0.2 * 5600) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"gpus": [1, 0]}, "run at place 1: GPUs 0"),
        ({"priority": [-1.0, 1.0]}, "run at place 0: priority -1"),
        ({"priority": [float("nan"), 1.0]}, "priority nan"),
        ({"throughput": [5.0, 0.0]}, "run at place 1: throughput 0"),
        ({"throughput": None}, "needs the uncapped throughput"),
        ({"throughput": [5.0]}, "throughputs for"),
    ],
)
def test_objectives_refuse_what_is_no_worth(wrong: dict[str, Any], says: str) -> None:
    right: dict[str, Any] = {"gpus": [1, 8], "priority": [1.0, 1.0], "throughput": [5.0, 6.0]}
    with pytest.raises(ProblemError, match=says):
        values("tokens", **{**right, **wrong})
