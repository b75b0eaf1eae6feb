"""After a window caps rise slowly and the site makes no new peak: both cores, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_pfi.bus.asking import ask
from slurm_pfi.controller.core import Core
from slurm_pfi.controller.dispatch import late_s
from slurm_pfi.controller.remembered import RememberedDraws
from slurm_pfi.controller.state import OffChanged, State
from slurm_pfi.gpu.device import DeviceSample
from slurm_pfi.node import messages as nm

from .forecast_site import ForecastSite, served
from .world import NS, SEEDS, Fate, SimNode, World

W = 1000
HOLD_S = 120.0
RAMP_S = 60.0
SLACK_S = 3.0


@dataclass(frozen=True)
class Look:
    """The site at one instant: seconds since the look-out began, what it draws, what its caps allow."""

    at_s: float
    draw_mw: int
    caps_mw: int


def draw_mw(world: World) -> int:
    gpus = (device for node in world.nodes.values() for device in node.devices.values())
    return 1_500 * W + sum(min(device.demand_mw, device.enforced_mw) for device in gpus)


def watch(world: World, seconds: float, step_s: float = 0.1) -> list[Look]:
    """Let the time pass and look ten times a second."""
    looks = []
    for number in range(1, round(seconds / step_s) + 1):
        world.run(step_s)
        looks.append(Look(number * step_s, draw_mw(world), world.site_mw()))
    return looks


def busy(seed: int, *, rebound_s: float = HOLD_S, fate: Fate | None = None, **policy: Any) -> World:
    """Ten of twelve GPUs train at 600 W; all has been seen for longer than the record of draws is."""
    world = World(seed, rebound_s=rebound_s, fate=fate, **policy)
    world.run(2)
    world.start_job(1, {"n1": [0, 1]}, flex="10%", watts=600)
    world.start_job(2, {"n1": [2, 3], "n2": [0, 1]}, flex="medium", watts=600)
    world.start_job(3, {"n2": [2, 3]}, flex="high", watts=600)
    world.start_job(4, {"n3": [0, 1]}, flex="medium", watts=600)
    world.run(75)
    return world


def capped(world: World) -> Iterator[str]:
    """Nodes with a GPU that is not back yet."""
    return (
        name
        for name, node in world.nodes.items()
        if any(device.enforced_mw != 700 * W for device in node.devices.values())
    )


def rebounds(world: World) -> list[dict[str, Any]]:
    return [fields for _, _, event, fields in world.audit if event == "rebound"]


def test_the_site_makes_no_new_peak_and_comes_back_to_its_draw() -> None:
    world = busy(1)
    before_mw = draw_mw(world)
    limit_mw = round(before_mw * 0.93)
    world.set_limit(limit_mw, ends_in_s=30)
    world.run(29.5)
    assert draw_mw(world) <= limit_mw
    looks = watch(world, 0.5 + HOLD_S)
    assert max(look.draw_mw for look in looks) <= before_mw * 1.01
    assert max(look.caps_mw for look in looks) <= before_mw, "the caps bound it, whatever starts"
    # The ramp: never ahead of it, and at its end as high as it may be.
    for look in looks:
        risen = max(0.0, look.at_s - 0.5) / RAMP_S
        assert look.caps_mw <= limit_mw + (before_mw - limit_mw) * min(1.0, risen + SLACK_S / RAMP_S)
    held = [look.caps_mw for look in looks if look.at_s > RAMP_S + SLACK_S]
    assert min(held) > before_mw - 12 * W
    world.run(RAMP_S + SLACK_S)
    assert world.all_restored()
    assert world.controller.window is None
    assert not world.violations
    assert [fields["open"] for fields in rebounds(world)] == [True, False]
    said = rebounds(world)[0]
    assert abs(said["limit_mw"] - before_mw) <= 1
    assert said["until_s"] == HOLD_S


def test_a_job_that_starts_and_one_that_draws_more_do_not_pass_the_draw_before() -> None:
    world = busy(2)
    before_mw = draw_mw(world)
    world.set_limit(round(before_mw * 0.92))
    world.run(20)
    world.set_limit(None)
    looks = watch(world, 20)
    late = world.start_job(5, {"n3": [2, 3]}, flex="high", watts=690)
    looks += watch(world, 30)
    for device in world.nodes["n1"].devices.values():
        device.demand_mw = 700 * W
    looks += watch(world, HOLD_S - 51)
    assert max(look.draw_mw for look in looks) <= before_mw * 1.01
    assert min(world.cap_of(late)) > 300 * W, "it waits for power no longer than the ramp takes"
    world.run(RAMP_S + SLACK_S)
    assert world.all_restored()
    assert not world.violations


def test_no_run_is_cut_deeper_than_the_window_left_it() -> None:
    world = busy(3)
    world.set_limit(round(draw_mw(world) * 0.92))
    world.run(20)
    runs = {run.job_id: run for run in world.slurm}
    left = {job: max(world.cap_of(run)) for job, run in runs.items()}
    world.set_limit(None)
    for number in range(6, 8):
        world.start_job(number, {"n3": [number - 4]}, flex="none", partition="urgent", watts=690)
        for _ in range(30):
            world.run(1)
            for job, run in runs.items():
                assert min(world.cap_of(run)) >= left[job]


def test_the_floor_that_was_promised_stays_the_one_that_is_shown() -> None:
    world = busy(3)
    world.set_limit(round(draw_mw(world) * 0.97))
    world.run(20)
    promised = {run: view.floor_mw for run, view in world.controller.runs.items()}
    world.set_limit(None)
    world.run(20)
    assert world.controller.rebound is not None
    above = 0
    for run, view in world.controller.runs.items():
        floor_mw = promised[run]
        assert floor_mw is not None
        assert view.floor_mw == pytest.approx(floor_mw, rel=0.02)
        above += (view.target_cap_mw or 0) > floor_mw + 20 * W
    assert above, "caps above a floor were held, and could have been taken for it"


def test_nobody_gains_from_a_node_that_falls_silent() -> None:
    world = busy(16)
    before_mw = draw_mw(world)
    world.set_limit(round(before_mw * 0.92))
    world.run(20)
    world.set_limit(None)
    world.run(20)
    for number in (6, 7):
        world.start_job(number, {"n3": [number - 4]}, flex="none", partition="urgent", watts=690)
    world.nodes["n1"].frozen = True
    looks = watch(world, 20)
    assert world.controller.window is not None and world.controller.window.silent == ("n1",)
    world.restart_agent(world.nodes["n1"])
    looks += watch(world, 20)
    assert max(look.caps_mw for look in looks) <= before_mw
    assert max(look.draw_mw for look in looks) <= before_mw


def test_a_ramp_of_the_sites_own() -> None:
    world = busy(4, ramp_up_w_per_s=10)
    limit_mw = round(draw_mw(world) * 0.92)
    world.set_limit(limit_mw)
    world.run(20)
    world.set_limit(None)
    looks = watch(world, 60)
    assert all(look.caps_mw <= limit_mw + (look.at_s + SLACK_S) * 10 * W for look in looks)
    assert looks[-1].caps_mw >= limit_mw + 500 * W
    world.run(2 * HOLD_S - 60 + SLACK_S)
    assert world.all_restored(), "slow as the ramp is, the rebound ends"


def test_the_contract_is_the_limit_where_the_site_names_one() -> None:
    world = busy(5, contract_w=8_200)
    world.set_limit(round(draw_mw(world) * 0.92))
    world.run(20)
    world.set_limit(None)
    looks = watch(world, RAMP_S + SLACK_S)
    assert 8_188 * W < looks[-1].caps_mw <= 8_200 * W
    assert max(look.caps_mw for look in looks) == looks[-1].caps_mw


def test_off_in_the_rebound_gives_everything_back_at_once() -> None:
    world = busy(6)
    world.set_limit(round(draw_mw(world) * 0.92))
    world.run(20)
    world.set_limit(None)
    world.run(10)
    assert world.controller.rebound is not None
    world.tell(OffChanged(off=True))
    world.run(1.5)
    assert world.all_restored()
    world.tell(OffChanged(off=False))
    world.run(5)
    assert world.all_restored()
    assert world.controller.rebound is None
    assert [fields["open"] for fields in rebounds(world)] == [True, False]


def test_a_site_that_takes_the_rebound_out_of_its_config_ends_it() -> None:
    world = busy(17)
    world.set_limit(round(draw_mw(world) * 0.92))
    world.run(20)
    world.set_limit(None)
    world.run(10)
    assert not world.all_restored()
    world.config = replace(world.config, times=replace(world.config.times, rebound_s=0.0))
    world.core = Core(world.config, world.core.science)
    world.run(1.5)
    assert world.all_restored()
    assert [fields["open"] for fields in rebounds(world)] == [True, False]


def test_a_new_limit_in_the_rebound_is_a_window_and_the_first_draw_counts_after_it() -> None:
    world = busy(7)
    before_mw = draw_mw(world)
    world.set_limit(round(before_mw * 0.92))
    world.run(20)
    world.set_limit(None)
    world.run(20)
    limit_mw = round(before_mw * 0.91)
    world.set_limit(limit_mw, ends_in_s=20)
    world.run(2)
    assert world.site_mw() <= limit_mw
    assert world.controller.window is not None and not world.controller.window.rebound
    looks = watch(world, 18 + HOLD_S)
    assert max(look.draw_mw for look in looks) <= before_mw * 1.01
    assert looks[-1].caps_mw > before_mw - 12 * W
    world.run(RAMP_S + SLACK_S)
    assert world.all_restored()
    assert not world.violations
    assert [fields["open"] for fields in rebounds(world)] == [True, False, True, False]


def test_a_limit_that_does_not_lower_what_the_rebound_holds_changes_nothing() -> None:
    world = busy(8)
    before_mw = draw_mw(world)
    world.set_limit(round(before_mw * 0.92))
    world.run(20)
    world.set_limit(None)
    world.run(5)
    world.set_limit(before_mw + 500 * W, ends_in_s=20)
    looks = watch(world, HOLD_S - 6)
    assert max(look.draw_mw for look in looks) <= before_mw * 1.01
    assert looks[-1].caps_mw > before_mw - 12 * W


def test_nodes_without_a_commander_follow_what_they_hold_and_not_all_at_once() -> None:
    world = busy(9)
    world.set_limit(round(draw_mw(world) * 0.92))
    world.run(20)
    world.set_limit(None)
    world.run(30)
    held_mw = world.site_mw()
    world.kill_controller()
    ends_s = HOLD_S + RAMP_S - 30
    world.run(ends_s)
    assert world.site_mw() == held_mw
    back: dict[str, float] = {}
    for number in range(1, round((2 * 10 + RAMP_S + 1) / 0.1)):
        world.run(0.1)
        for name in world.nodes.keys() - set(capped(world)):
            back.setdefault(name, number / 10)
    assert back.keys() == world.nodes.keys()
    for name, at_s in back.items():
        assert abs(at_s - late_s(name, world.config)) < 1.0
    times = sorted(back.values())
    assert min(b - a for a, b in pairwise(times)) > 1.0
    assert world.all_restored()


def test_cut_off_before_the_end_of_the_window_nodes_give_back_one_after_the_other() -> None:
    world = busy(10)
    limit_mw = round(draw_mw(world) * 0.92)
    world.set_limit(limit_mw, ends_in_s=30)
    world.run(10)
    world.kill_controller()
    world.run(20 + 2 * 10)
    assert world.site_mw() <= limit_mw
    looks = watch(world, RAMP_S + 1)
    assert world.all_restored()
    assert len({look.caps_mw for look in looks}) > len(world.nodes)


@pytest.mark.parametrize("when_s", [10, 100])
def test_a_successor_goes_on_with_the_rebound(when_s: float) -> None:
    world = busy(11)
    before_mw = draw_mw(world)
    world.set_limit(round(before_mw * 0.92))
    world.run(20)
    world.set_limit(None)
    world.run(when_s)
    world.kill_controller()
    world.run(5)
    world.start_controller()
    world.start_job(9, {"n3": [2]}, flex="high")
    looks = watch(world, HOLD_S - when_s - 6)
    assert max(look.draw_mw for look in looks) <= before_mw * 1.01
    assert max(look.caps_mw for look in looks) <= before_mw
    world.run(RAMP_S + SLACK_S)
    assert world.all_restored()
    assert not world.violations


def test_a_successor_inside_the_window_knows_the_draw_before_it() -> None:
    world = busy(14)
    before_mw = draw_mw(world)
    world.set_limit(round(before_mw * 0.92))
    world.run(20)
    world.kill_controller()
    world.run(5)
    world.start_controller()
    world.run(15)
    world.set_limit(None)
    looks = watch(world, HOLD_S - 1)
    assert max(look.draw_mw for look in looks) <= before_mw * 1.01
    assert looks[-1].caps_mw > before_mw - 12 * W
    assert abs(rebounds(world)[0]["limit_mw"] - before_mw) <= 1


@pytest.mark.parametrize("when_s", [10, 100])
def test_a_successor_who_finds_nothing_ends_the_rebound_by_a_ramp(when_s: float) -> None:
    world = busy(11)
    world.set_limit(round(draw_mw(world) * 0.92))
    world.run(20)
    world.set_limit(None)
    world.run(when_s)
    held_mw = world.site_mw()
    world.kill_controller()
    world.draws_kept = (None, None)
    world.run(5)
    world.start_controller()
    world.run(2)
    assert world.site_mw() <= held_mw + 4 / RAMP_S * (9_900 * W - held_mw)
    world.run(RAMP_S + SLACK_S)
    assert world.all_restored()
    assert world.controller.window is None
    assert not world.violations


def test_what_a_successor_needs_is_kept_on_disk_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "draw_before.json"
    world = busy(15)
    first = RememberedDraws(path)
    first.keep(world.controller, world.now_ns, world.unix_s)
    world.set_limit(round(draw_mw(world) * 0.92))
    world.run(20)
    first.keep(world.controller, world.now_ns, world.unix_s)
    blank = State(epoch=0, started_ns=0)
    opened = RememberedDraws(path).recall(blank, 7 * NS, world.unix_s + 60)
    assert opened.draw_before == world.controller.draw_before is not None
    assert opened.held_until_ns is None
    world.set_limit(None)
    world.run(5)
    first.keep(world.controller, world.now_ns, world.unix_s)
    held = RememberedDraws(path).recall(blank, 7 * NS, world.unix_s + 60)
    assert held.held_until_ns is not None
    assert abs(held.held_until_ns - (7 + HOLD_S - 5 - 60) * NS) < NS
    world.run(HOLD_S + RAMP_S + 10)
    first.keep(world.controller, world.now_ns, world.unix_s)
    assert RememberedDraws(path).recall(blank, 7 * NS, world.unix_s).draw_before is None
    path.write_text("torn")
    assert RememberedDraws(path).recall(blank, 7 * NS, world.unix_s).draw_before is None


class BlindWorld(World):
    """A world whose devices do not tell what they draw."""

    def _sampled(self, node: SimNode, asked: nm.Sample) -> nm.Sampled:
        seen = super()._sampled(node, asked)
        blind = tuple(
            replace(sample, draw_mw=None) for sample in seen.samples if isinstance(sample, DeviceSample)
        )
        return nm.Sampled(samples=blind, quick=asked.quick)


def test_without_a_known_draw_there_is_a_ramp_and_no_limit() -> None:
    world = BlindWorld(12, rebound_s=HOLD_S)
    world.run(2)
    for number in (1, 2, 3):
        world.start_job(number, {f"n{number}": [0, 1, 2, 3]}, flex="high")
    world.run(20)
    limit_mw = 8_700 * W
    world.set_limit(limit_mw)
    world.run(10)
    world.set_limit(None)
    looks = watch(world, RAMP_S + SLACK_S)
    for look in looks:
        assert look.caps_mw <= limit_mw + (look.at_s + SLACK_S) / RAMP_S * (9_900 * W - limit_mw)
    assert len({look.caps_mw for look in looks}) > 8
    assert world.all_restored()
    assert rebounds(world)[0]["limit_mw"] is None


def test_a_limit_that_lowered_nothing_keeps_no_job_from_its_power_after_it() -> None:
    world = World(13, rebound_s=HOLD_S)
    world.run(70)
    world.set_limit(7_000 * W)
    world.run(10)
    world.set_limit(None)
    world.run(5)
    late = world.start_job(1, {"n1": [0, 1, 2, 3]}, flex="low")
    world.run(5)
    assert min(world.cap_of(late)) > 660 * W
    assert world.site_mw() <= 7_000 * W


@settings(SEEDS, max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_no_draw_passes_the_draw_before_in_any_order_of_things(seed: int) -> None:
    """Random fates after a window: jobs, draws, agents, the controller, Slurm and the bus."""
    choose = random.Random(seed)
    fate = Fate(
        bus_delay_s=choose.choice([0.01, 0.3, 1.5]),
        loss=choose.choice([0.0, 0.1, 0.3]),
        set_delay_s=choose.choice([0.01, 0.5]),
        effect_delay_s=choose.choice([0.02, 0.8]),
    )
    world = busy(seed, fate=fate)
    before_mw = draw_mw(world)
    share = choose.uniform(0.85, 0.97)
    world.set_limit(round(before_mw * share), ends_in_s=choose.choice([None, 25.0]))
    world.run(20)
    if choose.random() < 0.5:
        world.set_limit(None)
    else:
        world.run(6)
        world.set_limit(None)
    looks: list[Look] = []
    next_id = 10
    while len(looks) < (HOLD_S - 25) * 10:
        deed = choose.randrange(8)
        node = world.nodes[choose.choice(list(world.nodes))]
        running = list(world.slurm)
        if deed == 0 and running:
            world.end_job(choose.choice(running))
        elif deed == 1:
            free = [place for place in range(4) if not any(place in job.gpus for job in node.jobs.values())]
            if free:
                world.start_job(next_id, {node.name: free[:2]}, flex=choose.choice(["", "low", "high"]))
                next_id += 1
        elif deed == 2:
            world.restart_agent(node)
        elif deed == 3:
            next(iter(node.devices.values())).demand_mw = choose.choice([75, 500, 700]) * W
        elif deed == 4:
            world.slurm_up = not world.slurm_up
        elif deed == 5:
            node.frozen = not node.frozen
        elif deed == 6:
            world.kill_controller()
            looks += watch(world, choose.uniform(0.2, 5))
            world.start_controller()
        looks += watch(world, choose.uniform(0.2, 8))
    assert max(look.draw_mw for look in looks) <= before_mw * 1.01
    assert not world.violations, world.violations[0]
    for node in world.nodes.values():
        node.frozen = False
        world.restart_agent(node)
    world.fate.loss = 0.0
    world.slurm_up = True
    assert world.run_until_restored(HOLD_S + RAMP_S + 30)


def test_who_clears_a_limit_is_told_how_long_giving_back_takes(tmp_path: Path) -> None:
    site = ForecastSite(nodes=1, rebound_s=1800.0)
    site.limit(1000)
    site.cycle()
    assert site.state.window is not None
    with served(site, tmp_path):
        reply = ask(tmp_path / "run/control.sock", "limit_clear", {"id": None})
    assert "no new peak for 30 min (times.rebound_s)" in reply.message
    assert "then the rest within 60 s;" in reply.message
