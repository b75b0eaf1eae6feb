"""Admission: a waiting run starts when its floor fits beside all others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.allocation.admission import admit
from slurm_pfi.allocation.policies import allocate
from slurm_pfi.allocation.problem import Problem, RunDemand
from tests.test_allocation_policies import WATT, demand, demands


def ids(chosen: tuple[RunDemand, ...]) -> list[int]:
    return [one.run.job_id for one in chosen]


def test_in_order_unless_it_does_not_fit() -> None:
    running = [demand(1, 2, floor_w=300)]
    waiting = [demand(2, 4, floor_w=300), demand(3, 1, floor_w=300), demand(4, 1, floor_w=200)]
    assert ids(admit(running, waiting, 2300 * WATT)) == [2, 3, 4]
    assert ids(admit(running, waiting, 2299 * WATT)) == [2, 3]
    assert ids(admit(running, waiting, 1799 * WATT)) == [3, 4]  # the bigger one is passed
    assert ids(admit(running, waiting, 850 * WATT)) == [4]
    assert ids(admit(running, waiting, 500 * WATT)) == []  # the admitted alone are too much already


def test_a_floor_counts_in_the_whole_watts_that_it_will_get() -> None:
    assert admit([], [demand(1, 10, floor_w=300.001)], 3000 * WATT + 10) == ()


@given(demands(), st.integers(0, 7), st.integers(0, 60_000_000))
def test_whoever_is_admitted_can_be_served(runs: tuple[RunDemand, ...], already: int, budget_mw: int) -> None:
    admitted, waiting = runs[:already], runs[already:]
    chosen = admit(admitted, waiting, budget_mw)
    assert [run for run in waiting if run in chosen] == list(chosen)
    if chosen:
        assert allocate(Problem((*admitted, *chosen), budget_mw), "marginal").feasible
    for run in waiting:
        if run not in chosen:
            assert not allocate(Problem((*admitted, *chosen, run), budget_mw), "equal").feasible
