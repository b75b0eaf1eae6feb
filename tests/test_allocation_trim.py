"""Watts that a run holds and does not draw: lent to who is reduced, and back before they are needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.allocation.policies import allocate
from slurm_pfi.allocation.problem import Policy, Problem, RunDemand
from slurm_pfi.allocation.rounding import lowest_cap_mw
from slurm_pfi.allocation.solve import ProblemError
from slurm_pfi.allocation.trim import lend, recall
from slurm_pfi.elasticity.curve import ElasticityCurve
from slurm_pfi.model import Run

WATT = 1000
POLICIES: tuple[Policy, ...] = ("equal", "pfi", "marginal")
SOFT = ElasticityCurve(np.array([0.0, 0.2, 0.4, 0.6]), np.array([0.0, 0.02, 0.1, 0.5]))
HARD = ElasticityCurve(np.array([0.0, 0.3]), np.array([0.0, 0.3]))


def demand(
    job_id: int, gpus: int = 1, *, some: ElasticityCurve = SOFT, floor_w: int = 200, flex_none: bool = False
) -> RunDemand:
    floor_mw = floor_w * WATT
    return RunDemand(
        Run("c", job_id),
        gpus,
        700_000,
        700_000,
        floor_mw,
        200_000,
        some,
        flex_none=flex_none,
        pfi=1.0 + job_id % 2,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, tuple[int | None, ...]]:
    runs = []
    for job_id in range(draw(st.integers(1, 6))):
        least, low, drawn, high = sorted(draw(st.lists(st.integers(50_000, 700_000), min_size=4, max_size=4)))
        runs.append(
            RunDemand(
                run=Run("c", job_id),
                gpus=draw(st.integers(1, 8)),
                ceiling_mw=high,
                draw_mw=drawn,
                floor_mw=low,
                device_min_mw=least,
                curve=draw(st.sampled_from([SOFT, HARD])),
                flex_none=draw(st.booleans()),
                pfi=draw(st.none() | st.floats(0.5, 4)),
            )
        )
    p99 = tuple(draw(st.none() | st.integers(0, 700_000)) for _ in runs)
    full = sum(run.gpus * run.ceiling_mw for run in runs)
    budget = draw(st.integers(full // 4, full))
    hard = draw(st.none() | st.integers(full // 4, full))
    return Problem(tuple(runs), budget, hard), p99


def enough_mw(run: RunDemand, p99_mw: int | None) -> int:
    """The lowest cap that trimming may leave."""
    if p99_mw is None or run.flex_none:
        return run.ceiling_mw
    return min(run.ceiling_mw, max(-(-p99_mw * 102 // 100_000) * WATT, lowest_cap_mw(run)))


@given(cases(), st.sampled_from(POLICIES))
def test_lending_keeps_the_budget_and_helps_who_does_not_lend(
    case: tuple[Problem, tuple[int | None, ...]], policy: Policy
) -> None:
    problem, p99 = case
    answer = lend(problem, policy, p99)
    plain = allocate(problem, policy)
    assert answer.plain_mw == plain.caps_mw
    assert answer.allocation.shortfall_total_mw <= plain.shortfall_total_mw
    used = sum(run.gpus * cap for run, cap in zip(problem.runs, answer.allocation.caps_mw, strict=True))
    limits = (problem.budget_total_mw, problem.hard_budget_total_mw)
    assert used <= min(limit for limit in limits if limit is not None) + answer.allocation.shortfall_total_mw
    assert sum(answer.borrowed_total_mw) - sum(answer.lent_total_mw) <= WATT * sum(
        r.gpus for r in problem.runs
    )
    borrowers = any(answer.borrowed_total_mw)
    for run, draw, before, cap, lent, borrowed in zip(
        problem.runs,
        p99,
        plain.caps_mw,
        answer.allocation.caps_mw,
        answer.lent_total_mw,
        answer.borrowed_total_mw,
        strict=True,
    ):
        assert cap >= min(before, enough_mw(run, draw)) - WATT
        assert cap >= before or borrowers, "watts were taken that nobody has"
        assert borrowed - lent == run.gpus * (cap - before)
        if draw is None or run.flex_none:
            assert lent <= run.gpus * WATT  # what another's whole watts may take
        assert run.device_min_mw <= cap <= run.ceiling_mw


@given(cases(), st.sampled_from(POLICIES))
def test_a_recall_lowers_borrowers_first_and_then_gives_back(
    case: tuple[Problem, tuple[int | None, ...]], policy: Policy
) -> None:
    problem, p99 = case
    held = lend(problem, policy, p99).allocation.caps_mw
    binding = [run.run for run, cap in zip(problem.runs, held, strict=True) if cap < run.ceiling_mw][:2]
    answer = recall(problem, policy, p99, held_mw=held, binding=binding)
    after = answer.then.allocation.caps_mw
    assert answer.first_mw == tuple(min(a, b) for a, b in zip(held, after, strict=True))
    # Between the steps nobody can draw more than in one of the two plans.
    for run, before, cap in zip(problem.runs, answer.then.plain_mw, after, strict=True):
        if run.run in binding:
            assert cap >= before - WATT


def caps_w(caps_mw: tuple[int, ...]) -> list[int]:
    return [cap // WATT for cap in caps_mw]


def test_by_hand() -> None:
    """The first draws 400 W under a cap of 600 W: 408 W are enough for it, and the second needs 100 W."""
    problem = Problem((demand(1), demand(2)), 1200 * WATT)
    answer = lend(problem, "equal", (400 * WATT, None))
    assert caps_w(answer.plain_mw) == [600, 600]
    assert caps_w(answer.allocation.caps_mw) == [500, 700]
    assert answer.lent_total_mw == (100 * WATT, 0)
    assert answer.borrowed_total_mw == (0, 100 * WATT)
    tight = lend(Problem(problem.runs, 1000 * WATT), "equal", (400 * WATT, None))
    assert caps_w(tight.plain_mw) == [500, 500]
    assert caps_w(tight.allocation.caps_mw) == [408, 592]
    # It binds: the second goes down at once, the first up when that is acknowledged.
    back = recall(
        problem, "equal", (400 * WATT, None), held_mw=answer.allocation.caps_mw, binding=[Run("c", 1)]
    )
    assert caps_w(back.first_mw) == [500, 600]
    assert caps_w(back.then.allocation.caps_mw) == [600, 600]
    assert back.then.lent_total_mw == (0, 0)


def test_who_does_not_lend() -> None:
    runs = (demand(1, flex_none=True, floor_w=500), demand(2, floor_w=500), demand(3), demand(4))
    problem = Problem(runs, 2400 * WATT)
    answer = lend(problem, "equal", (100 * WATT, 100 * WATT, None, 650 * WATT))
    # Flex none keeps its cap, a floor is kept, an unknown draw lends nothing.
    assert caps_w(answer.plain_mw) == [600, 600, 600, 600]
    assert caps_w(answer.allocation.caps_mw) == [633, 501, 633, 633]  # the odd watt stays with the lender


def test_nothing_is_lent_when_nobody_is_reduced() -> None:
    problem = Problem((demand(1), demand(2)), 1400 * WATT)
    answer = lend(problem, "marginal", (100 * WATT, 100 * WATT))
    assert answer.allocation.caps_mw == (700 * WATT, 700 * WATT)
    assert answer.lent_total_mw == (0, 0)


def test_bad_input() -> None:
    problem = Problem((demand(1), demand(2)), 1200 * WATT)
    with pytest.raises(ProblemError, match="1 draws for 2 runs"):
        lend(problem, "equal", (None,))
    with pytest.raises(ProblemError, match="99 % draw of -1 mW"):
        lend(problem, "equal", (None, -1))
    assert lend(Problem((), 5), "equal", ()).allocation.caps_mw == ()
