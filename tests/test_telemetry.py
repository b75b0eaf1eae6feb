"""What readings say of a GPU's draw and work: absurd is unknown, never 0, and the other quantities stay."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_pfi.gpu.device import DeviceSample
from slurm_pfi.model import Activity
from slurm_pfi.node import messages as m
from slurm_pfi.node.telemetry import (
    LEAST_ENERGY_S,
    MOST_DRAW,
    NOTHING_READ,
    Bounds,
    Taken,
    Telemetry,
    over_cap,
    slowed,
    taken,
)

from .node_world import World

S = 1_000_000_000
MAX_MW = 700_000
BOUNDS = Bounds(max_mw=MAX_MW, sm_clock_max_mhz=1980)


def reading(at_s: float, **changes: Any) -> DeviceSample:
    """600 W, by the instant draw and by the energy counter alike."""
    made = DeviceSample(
        uuid="GPU-0",
        monotonic_ns=round(at_s * S),
        requested_mw=700_000,
        enforced_mw=700_000,
        draw_mw=600_000,
        energy_mj=round(600_000 * at_s),
        utilisation=1.0,
        sm_clock_mhz=1500,
        event_reasons=0,
        sm_active=0.9,
        tensor_active=0.4,
        dram_active=0.5,
        copy_utilisation=0.3,
    )
    return replace(made, **changes)


def after(*readings: DeviceSample, asked: bool = True, bounds: Bounds = BOUNDS) -> Taken:
    found = Taken(NOTHING_READ, None, "", "")
    for sample in readings:
        found = taken(found.telemetry, sample, bounds, asked=asked)
    return found


# ------------------------------------------------------------------------------------------------ draw, energy


def test_the_mean_draw_is_the_difference_of_the_energy_counter() -> None:
    found = after(reading(10), reading(15, draw_mw=100_000, energy_mj=600_000 * 10 + 5 * 480_000))
    assert found.telemetry.mean_mw == 480_000
    assert found.draw_mw == 100_000
    assert found.telemetry.mean_from_ns == 10 * S
    assert (found.draw_fault, found.energy_fault) == ("", "")


@pytest.mark.parametrize("draw_mw", [-5, 0, 2_000_000])
def test_fault_31_a_draw_that_cannot_be_is_unknown_or_the_devices_own_average(draw_mw: int) -> None:
    alone = after(reading(10, draw_mw=draw_mw))
    assert alone.draw_mw is None
    assert f"a draw of {draw_mw} mW is not believed" in alone.draw_fault
    beside = after(reading(10, draw_mw=draw_mw, average_mw=590_000))
    assert beside.draw_mw == 590_000
    assert "not believed" in beside.draw_fault
    assert after(reading(10, draw_mw=draw_mw, average_mw=draw_mw)).draw_mw is None


def test_fault_32_an_energy_counter_that_is_missing_runs_backwards_or_stands_still_tells_no_mean() -> None:
    missing = after(reading(10), reading(15, energy_mj=None))
    assert (missing.telemetry.mean_mw, missing.energy_fault) == (None, "")
    assert missing.draw_mw == 600_000, "the other quantities stay"
    backwards = after(reading(10), reading(15, energy_mj=5))
    assert backwards.telemetry.mean_mw is None
    assert "ran backwards" in backwards.energy_fault
    still = after(reading(10), reading(15, energy_mj=6_000_000))
    assert still.telemetry.mean_mw is None
    assert "stands still at a draw of 600000 mW" in still.energy_fault
    leaps = after(reading(10), reading(15, energy_mj=10**12))
    assert leaps.telemetry.mean_mw is None
    assert "is not believed" in leaps.energy_fault
    again = taken(backwards.telemetry, reading(20, energy_mj=5 + 5 * 600_000), BOUNDS)
    assert (again.telemetry.mean_mw, again.energy_fault) == (600_000, ""), "it begins anew at once"


def test_readings_that_follow_each_other_at_once_are_no_mean_draw() -> None:
    first = after(reading(10))
    soon = taken(first.telemetry, reading(10 + LEAST_ENERGY_S / 2, energy_mj=10**9), BOUNDS)
    assert soon.telemetry.mean_mw is None
    quick = taken(first.telemetry, reading(12, draw_mw=300_000, energy_mj=0), BOUNDS, quick=True)
    assert quick.draw_mw == 300_000
    assert quick.energy_fault == ""
    later = taken(quick.telemetry, reading(15), BOUNDS)
    assert later.telemetry.mean_mw == 600_000


@given(
    st.lists(
        st.tuples(
            st.floats(-1, 30),
            st.none() | st.integers(-(10**13), 10**13),
            st.none() | st.integers(-(10**9), 10**9),
            st.none() | st.floats(allow_nan=True),
            st.none() | st.integers(-100, 10**6),
            st.booleans(),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_whatever_a_device_says_nothing_impossible_comes_of_it(
    rows: list[tuple[float, int | None, int | None, float | None, int | None, bool, bool]],
) -> None:
    telemetry, at_s = NOTHING_READ, 100.0
    for step_s, energy_mj, draw_mw, share, clock_mhz, quick, asked in rows:
        at_s = max(0.0, at_s + step_s)
        sample = reading(
            at_s,
            energy_mj=energy_mj,
            draw_mw=draw_mw,
            tensor_active=share,
            sm_active=share,
            utilisation=share,
            sm_clock_mhz=clock_mhz,
        )
        found = taken(telemetry, sample, BOUNDS, quick=quick, asked=asked and not quick)
        telemetry = found.telemetry
        assert found.draw_mw is None or 0 < found.draw_mw <= MOST_DRAW * MAX_MW
        assert telemetry.mean_mw is None or 0 < telemetry.mean_mw <= MOST_DRAW * MAX_MW + 1
        activity = telemetry.activity_now(round(at_s * S))
        if activity is not None:
            assert activity.over_s > 0
            for value in (activity.sm, activity.tensor, activity.dram, activity.copy, activity.busy):
                assert value is None or 0 <= value <= 1
            assert activity.sm_clock_mhz is None or 0 < activity.sm_clock_mhz <= 1.1 * 1980


# ------------------------------------------------------------------------------------------------ activity


def test_activity_is_of_the_time_since_it_was_last_asked_for_with_the_mean_clock() -> None:
    telemetry = after(reading(10)).telemetry
    assert telemetry.activity is None, "the first reading has no time before it"
    for at_s, clock_mhz in ((11, 1000), (12, 1200)):
        telemetry = taken(
            telemetry, reading(at_s, sm_clock_mhz=clock_mhz, tensor_active=None), BOUNDS
        ).telemetry
        assert telemetry.activity is None
    telemetry = taken(telemetry, reading(13, sm_clock_mhz=1400), BOUNDS, asked=True).telemetry
    assert telemetry.activity_now(14 * S) == Activity(
        over_s=3.0,
        age_s=1.0,
        sm=0.9,
        tensor=0.4,
        dram=0.5,
        copy=0.3,
        busy=1.0,
        sm_clock_mhz=1200.0,
        sm_clock_max_mhz=1980,
    )
    assert telemetry.activity_now(60 * S) is None, "too old to say what is"


def test_fault_40_without_activity_counters_the_clock_and_the_rest_are_told() -> None:
    bare = {"sm_active": None, "tensor_active": None, "dram_active": None}
    activity = after(reading(10, **bare), reading(15, **bare)).telemetry.activity
    assert activity is not None
    assert (activity.tensor, activity.sm, activity.sm_clock_mhz, activity.copy) == (None, None, 1500.0, 0.3)


@pytest.mark.parametrize(
    ("utilisation", "draw_mw", "busy"),
    [(1.0, 600_000, 1.0), (1.0, 90_000, None), (1.0, None, None), (0.7, 90_000, 0.7), (None, 600_000, None)],
)
def test_fault_33_utilisation_stuck_at_100_percent_without_a_draw_is_not_believed(
    utilisation: float | None, draw_mw: int | None, busy: float | None
) -> None:
    stuck = {"utilisation": utilisation, "draw_mw": draw_mw}
    activity = after(reading(10, **stuck), reading(15, **stuck)).telemetry.activity
    assert activity is not None
    assert activity.busy == busy


@pytest.mark.parametrize(
    ("reasons", "word"),
    [
        (None, ""),
        (0x0, ""),
        (0x1, ""),
        (0x2, ""),
        (0x4, "power cap"),
        (0x8, "other"),
        (0x10, "other"),
        (0x24, "thermal"),
        (0x48, "thermal"),
        (0xCC, "power brake"),
        (0x100, ""),
        (1 << 40, ""),
    ],
)
def test_fault_37_what_holds_the_clock_down_is_a_word(reasons: int | None, word: str) -> None:
    assert slowed(reasons) == word
    assert after(reading(10, event_reasons=reasons)).telemetry.slowed == word


def test_fault_38_a_draw_above_the_cap_is_told_once_the_cap_has_been_in_force_all_the_while() -> None:
    telemetry = Telemetry(mean_mw=240_000, mean_from_ns=10 * S, energy_ns=15 * S)
    assert "draws 240 W under a cap of 200 W" in over_cap(telemetry, 200_000, 9 * S)
    assert over_cap(telemetry, 200_000, 11 * S) == "", "the cap is younger than the mean"
    assert over_cap(telemetry, 235_000, 9 * S) == "", "sensors are no better"
    assert over_cap(telemetry, None, 9 * S) == ""
    assert over_cap(replace(telemetry, mean_mw=None), 200_000, 9 * S) == ""


# ------------------------------------------------------------------------------------------------ in the agent


def test_activity_is_asked_for_every_five_seconds_in_a_window() -> None:
    asked: list[tuple[int, bool]] = []

    class Watched(World):
        def ask(self, question: Any, follow: list[m.Event]) -> None:
            if isinstance(question, m.Sample) and not question.quick:
                asked.append((self.devices.now_ns, question.activity))
            super().ask(question, follow)

    world = Watched(2).start()
    world.window(300_000)
    del asked[:]
    for _ in range(20):
        world.advance(S)
    inside = [at_ns for at_ns, activity in asked if activity]
    assert len(asked) >= 19
    assert 4 <= len(inside) <= 5
    assert all(4 * S < later - at_ns <= 6 * S for at_ns, later in pairwise(inside))


def test_a_gpu_that_is_lost_tells_no_mean_and_no_activity_of_before() -> None:
    world = World(2).start()
    world.window(500_000)
    for _ in range(12):
        world.advance(S)
    before, other = world.reports[-1].gpus
    assert before.mean_mw == 500_000
    assert before.activity is not None
    world.devices.gpus["GPU-0"].lost = True
    for _ in range(3):
        world.advance(S)
    lost, other = world.reports[-1].gpus
    assert (lost.draw_mw, lost.mean_mw, lost.activity, lost.slowed) == (None, None, None, "")
    assert other.mean_mw == 500_000
    assert other.activity is not None
