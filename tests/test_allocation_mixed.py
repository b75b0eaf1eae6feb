"""Runs of several GPU models: as deep as the slowest group allows, within floors and budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.allocation.mixed import Group, MixedRun, combine, split
from slurm_pfi.allocation.policies import allocate
from slurm_pfi.allocation.problem import Problem, RunDemand
from slurm_pfi.allocation.rounding import lowest_cap_mw
from slurm_pfi.allocation.solve import ProblemError
from slurm_pfi.elasticity.curve import ElasticityCurve
from slurm_pfi.model import Run

WATT = 1000
RUN = Run("c", 1)


def curve(*points: tuple[float, float]) -> ElasticityCurve:
    return ElasticityCurve(np.array([0.0, *(x for x, _ in points)]), np.array([0.0, *(y for _, y in points)]))


CURVES = (
    curve((0.1, 0.03), (0.3, 0.12), (0.5, 0.35)),
    curve((0.2, 0.02), (0.4, 0.1), (0.6, 0.5)),
    curve((0.3, 0.3)),
    curve((0.1, 0.08), (0.3, 0.08), (0.4, 0.4)),  # level in between
    curve((0.25, 0.0), (0.5, 0.6)),
    curve((0.5, 0.9), (1.0, 1.0)),
)


@st.composite
def group_lists(draw: st.DrawFn, *, least: int = 1) -> tuple[Group, ...]:
    """Groups that draw gigawatts, so that whole watts are no restriction."""
    groups = []
    for number in range(draw(st.integers(least, 4))):
        lowest, low, drawn, high = sorted(draw(st.lists(st.integers(10**8, 10**9), min_size=4, max_size=4)))
        floor = draw(st.sampled_from([low, low, drawn]))  # sometimes no flex at all
        groups.append(
            Group(
                model=f"m{number}",
                gpus=draw(st.integers(1, 16)),
                ceiling_mw=high * WATT,
                draw_mw=(low if floor == drawn else drawn) * WATT,
                floor_mw=floor * WATT,
                device_min_mw=lowest * WATT,
                curve=draw(st.sampled_from(CURVES)),
            )
        )
    return tuple(groups)


def total_mw(mixed: MixedRun, caps_mw: tuple[int, ...]) -> int:
    return sum(group.gpus * cap for group, cap in zip(mixed.groups, caps_mw, strict=True))


def loss_of(mixed: MixedRun, caps_mw: tuple[int, ...]) -> float:
    pairs = zip(mixed.groups, caps_mw, strict=True)
    return max(float(group.curve.loss_at(1 - cap / group.draw_mw)) for group, cap in pairs)


def lowest_mw(group: Group) -> int:
    return min(-(-group.floor_mw // WATT) * WATT, group.ceiling_mw)


def mean_cap(mixed: MixedRun, share: float, *, lowest: int) -> int:
    return round((lowest + share * (mixed.demand.ceiling_mw - lowest)) / WATT) * WATT


@given(groups=group_lists(), share=st.floats(0, 1))
def test_the_parts_hold_no_more_than_the_run_and_keep_their_floors(
    groups: tuple[Group, ...], share: float
) -> None:
    mixed = combine(RUN, groups)
    lowest = lowest_cap_mw(mixed.demand)
    cap = min(max(mean_cap(mixed, share, lowest=lowest), lowest), mixed.demand.ceiling_mw)
    caps = split(mixed, cap)
    assert total_mw(mixed, caps) <= cap * mixed.demand.gpus
    for group, part in zip(groups, caps, strict=True):
        assert lowest_mw(group) <= part <= group.ceiling_mw
        assert part % WATT == 0 or part == group.ceiling_mw
    # No more is held back than rounding takes.
    assert total_mw(mixed, caps) >= min(
        cap * mixed.demand.gpus, sum(g.gpus * g.ceiling_mw for g in groups)
    ) - WATT * (mixed.demand.gpus + 1)


@given(groups=group_lists(), share=st.floats(0, 1))
def test_the_runs_own_curve_is_the_loss_of_its_slowest_group(groups: tuple[Group, ...], share: float) -> None:
    mixed = combine(RUN, groups)
    lowest = -(-mixed.demand.device_min_mw // WATT) * WATT
    cap = min(max(mean_cap(mixed, share, lowest=lowest), lowest), mixed.demand.ceiling_mw)
    expected = float(mixed.demand.curve.loss_at(1 - cap / mixed.demand.draw_mw))
    steep = max(g.curve.tail_slope for g in groups)
    if len(groups) == 1:
        assert loss_of(mixed, split(mixed, cap)) == pytest.approx(expected, abs=1e-9)
    else:
        # A watt is 1e-8 of a draw here; a curve that is steep, and a small group, make more of it.
        assert loss_of(mixed, split(mixed, cap)) == pytest.approx(expected, abs=1e-5 * steep)


@given(groups=group_lists(least=2), share=st.floats(0, 1), data=st.data())
def test_no_other_split_of_these_watts_loses_less(
    groups: tuple[Group, ...], share: float, data: st.DataObject
) -> None:
    """Whatever caps within the floors hold no more in sum, some group of theirs is at least as slow."""
    mixed = combine(RUN, groups)
    lowest = lowest_cap_mw(mixed.demand)
    cap = min(max(mean_cap(mixed, share, lowest=lowest), lowest), mixed.demand.ceiling_mw)
    parts = data.draw(st.lists(st.floats(0, 1), min_size=len(groups), max_size=len(groups)))
    other = [
        int(lowest_mw(group) + part * (group.ceiling_mw - lowest_mw(group)))
        for group, part in zip(groups, parts, strict=True)
    ]
    ours = split(mixed, cap)
    for place in data.draw(st.permutations(range(len(groups)))):  # lower them until they fit
        over = total_mw(mixed, tuple(other)) - total_mw(mixed, ours)
        other[place] = max(lowest_mw(groups[place]), other[place] - max(0, -(-over // groups[place].gpus)))
    assert total_mw(mixed, tuple(other)) <= total_mw(mixed, ours)
    steep = max(g.curve.tail_slope for g in groups)
    assert loss_of(mixed, tuple(other)) >= loss_of(mixed, ours) - 1e-7 * steep


@given(groups=group_lists(), first=st.floats(0, 1), second=st.floats(0, 1))
def test_a_lower_mean_cap_raises_no_group(groups: tuple[Group, ...], first: float, second: float) -> None:
    mixed = combine(RUN, groups)
    low, high = (
        split(mixed, mean_cap(mixed, share, lowest=mixed.demand.device_min_mw) // WATT * WATT)
        for share in sorted((first * 0.999, second * 0.999))
    )
    assert all(a <= b for a, b in zip(low, high, strict=True))


@given(groups=group_lists(), share=st.floats(0, 1))
def test_one_group_is_an_ordinary_run(groups: tuple[Group, ...], share: float) -> None:
    one = groups[0]
    mixed = combine(RUN, [one], weight=2.0, flex_none=True, pfi=1.5)
    plain = RunDemand(
        RUN, one.gpus, one.ceiling_mw, one.draw_mw, one.floor_mw, one.device_min_mw, one.curve, 2.0, True, 1.5
    )
    assert replace(mixed.demand, common_curve=None) == plain
    cap = round(share * one.ceiling_mw)
    assert split(mixed, cap) == (cap,)
    # The path that several groups would follow says the same.
    reduction = 1 - mixed.caps_mw[:, 0] / one.draw_mw
    reached = reduction <= 1
    assert one.curve.loss_at(reduction[reached]) == pytest.approx(mixed.loss[reached], abs=1e-9)


@given(one=group_lists(), times=st.integers(2, 3), share=st.floats(0, 1))
def test_groups_alike_move_together(one: tuple[Group, ...], times: int, share: float) -> None:
    mixed = combine(RUN, [replace(one[0], model=str(i)) for i in range(times)])
    lowest = lowest_cap_mw(mixed.demand)
    cap = min(max(mean_cap(mixed, share, lowest=lowest), lowest), mixed.demand.ceiling_mw)
    assert max(split(mixed, cap)) - min(split(mixed, cap)) <= WATT


def group(model: str, gpus: int, some: ElasticityCurve, *, draw: int = 700, floor: int = 200) -> Group:
    return Group(model, gpus, 700 * WATT, draw * WATT, floor * WATT, 100 * WATT, some)


def test_by_hand() -> None:
    """A loss of 10 % lets the first give 280 W a GPU and the second 70 W."""
    mixed = combine(RUN, [group("soft", 2, CURVES[1]), group("hard", 2, curve((0.5, 0.5)))])
    demand = mixed.demand
    assert (demand.gpus, demand.ceiling_mw, demand.draw_mw, demand.floor_mw) == (4, 700_000, 700_000, 200_000)
    assert split(mixed, 525 * WATT) == (420 * WATT, 630 * WATT)
    assert float(demand.curve.loss_at(0.25)) == pytest.approx(0.1)
    # Half as much loss on the way there: 2.5 % of the first group at 0.2125, 5 % ... of the second at 0.025.
    assert float(demand.curve.loss_at((0.2 + 0.02) / 2)) == pytest.approx(0.02)
    assert split(mixed, 700 * WATT) == (700 * WATT, 700 * WATT)


def test_the_group_that_does_not_set_the_pace_gives_for_nothing() -> None:
    """The first stands at its floor with a loss of 25 %: the second goes on to what costs as much."""
    some = curve((0.4, 0.0), (0.8, 0.5))
    mixed = combine(RUN, [group("slow", 1, curve((0.5, 0.5)), floor=525), group("fast", 1, some)])
    assert split(mixed, 560 * WATT) == (700 * WATT, 420 * WATT)  # the second's 40 % cost nothing
    assert split(mixed, 402_500) == (525 * WATT, 280 * WATT)
    assert float(mixed.demand.curve.loss_at(1 - 402.5 / 700)) == pytest.approx(0.25)
    # On from there only the second can give; under its own floor nobody goes but by an emergency.
    assert split(mixed, 370 * WATT) == (525 * WATT, 215 * WATT)
    assert split(mixed, 100 * WATT) == (100 * WATT, 100 * WATT)


@given(groups=group_lists(least=2), share=st.floats(0.2, 1))
def test_where_nothing_tells_runs_apart_marginal_is_equal(groups: tuple[Group, ...], share: float) -> None:
    alike = [replace(g, curve=CURVES[0]) for g in groups]
    plain = RunDemand(Run("c", 2), 4, 700_000_000, 650_000_000, 300_000_000, 100_000_000, CURVES[0])
    mixed = combine(RUN, alike)
    runs = (mixed.demand, plain)
    problem = Problem(runs, round(share * sum(r.gpus * r.ceiling_mw for r in runs)))
    assert allocate(problem, "marginal").caps_mw == allocate(problem, "equal").caps_mw


@given(groups=group_lists(least=2), share=st.floats(0, 1))
def test_what_is_allocated_can_be_split(groups: tuple[Group, ...], share: float) -> None:
    plain = RunDemand(Run("c", 2), 4, 700_000_000, 650_000_000, 300_000_000, 100_000_000, CURVES[0])
    mixed = combine(RUN, groups)
    runs = (mixed.demand, plain)
    budget = round(share * sum(r.gpus * r.ceiling_mw for r in runs))
    answer = allocate(Problem(runs, budget, budget), "marginal")
    held = total_mw(mixed, split(mixed, answer.caps_mw[0])) + 4 * answer.caps_mw[1]
    assert held <= budget + answer.shortfall_total_mw


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"gpus": 0}, "0 GPUs of model a"),
        ({"floor_mw": 800_000}, "out of order"),
        ({"device_min_mw": -1}, "out of order"),
        ({"draw_mw": 0}, "a draw of 0 mW"),
        ({"draw_mw": 700_001}, "a draw of 700001 mW under a ceiling of 700000"),
    ],
)
def test_groups_that_contradict_themselves_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        combine(RUN, [replace(group("a", 1, CURVES[0]), **wrong)])


def test_no_groups_and_caps_above_the_ceiling_are_refused() -> None:
    with pytest.raises(ProblemError, match="has no GPUs"):
        combine(RUN, [])
    with pytest.raises(ProblemError, match="above the ceiling"):
        split(combine(RUN, [group("a", 1, CURVES[0])]), 700_001)
