"""Faults 31 to 34 and 37 to 40 (docs/faults.md): readings that are missing, stuck or absurd never become figures."""

from __future__ import annotations

import asyncio

import pytest

from slurm_pfi.model import GpuReport
from testbed.gpu_faults import FAULTS, plant
from tests.fault_site import (
    PARK_MW,
    PARKED,
    LoneNode,
    busy,
    ends,
    gpu,
    others,
    site,
    window_on,
    window_step,
)
from tests.node_world import S, World

__all__ = ["site"]
IDLE_MW = 75_000


def test_fault_31_garbage_power(site: LoneNode) -> None:
    """3 kW with SUCCESS is no draw: unknown, never a figure; the cap stands and counts as it did."""
    mad = site.devices[0].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            plant(node, 31, mad)
            report = await commander.until(lambda r: gpu(r, mad).draw_mw is None, "unknown")
            assert gpu(report, mad).ceiling_mw == PARK_MW and others(report, mad) == [PARK_MW] * 3
            assert all(_believed(one.draw_mw) for one in report.gpus if one.uuid != mad)
            node.clear_faults()
            await commander.until(lambda r: _believed(gpu(r, mad).draw_mw), "believed again")
            assert all((one.draw_mw or 0) < 1_000_000 for r in commander.reports for one in r.gpus)
            await ends(commander)

    asyncio.run(story())


def test_fault_31_garbage_of_any_vendor() -> None:
    """The agent believes no device layer: what no board of that range can draw is unknown, and said."""
    world = World(2).start()
    board = world.devices.gpus["GPU-0"]
    board.demand_mw, board.enforced_mw = 2_500_000, 2_600_000
    world.advance(6 * S)
    assert [one.draw_mw for one in world.reports[-1].gpus] == [None, 600_000]
    assert any("2500000 mW is not believed" in fault for fault in world.reports[-1].faults)


def _believed(draw_mw: int | None) -> bool:
    return draw_mw is not None and abs(draw_mw - IDLE_MW) < 5_000


@pytest.mark.parametrize("variant", ["backwards", "missing"])
def test_fault_32_energy_missing_or_backwards(site: LoneNode, variant: str) -> None:
    """Without a counter that can be believed the mean draw is unknown; never negative, and never nothing."""
    odd = site.devices[1].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            await commander.until(lambda r: _believed(gpu(r, odd).mean_mw), "a mean by the counter")
            # Half of the counter is lost: more than what is used until the next reading.
            await commander.until(
                lambda _: all(state.energy_mj > 4 * IDLE_MW for state in node.snapshot()), "a counter to lose"
            )
            told = len(commander.reports)
            plant(node, 32, odd, variant=variant)
            await commander.until(
                lambda _: any(gpu(one, odd).mean_mw is None for one in commander.reports[told:]), "unknown"
            )
            means = [gpu(report, odd).mean_mw for report in commander.reports[told:]]
            assert all(mean is None or _believed(mean) for mean in means)
            assert gpu(commander.reports[-1], odd).ceiling_mw == PARK_MW
            node.clear_faults()
            await commander.until(lambda r: _believed(gpu(r, odd).mean_mw), "counted again")
            await ends(commander)

    asyncio.run(story())


def test_fault_33_utilisation_stuck(site: LoneNode) -> None:
    """100 % with no process at idle draw is no activity: it is told as unknown; beside a busy GPU it is believed."""
    stuck, at_work = site.devices[2].uuid, site.devices[0].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            run = site.job(7, "0")
            await commander.until(lambda r: r.runs, "the run")
            await commander.plan(window_step(PARK_MW, {run: None}))
            with busy(site, at_work):
                plant(node, 33, stuck)
                plant(node, 33, at_work)
                await commander.until(lambda r: _busy(gpu(r, at_work)) == 1.0, "at work")
                told = len(commander.reports)
                await commander.until(lambda _: len(commander.reports) > told + 4, "looked at some times")
                assert {_busy(gpu(one, stuck)) for one in commander.reports[told + 2 :]} == {None}
                assert gpu(commander.reports[-1], stuck).ceiling_mw == PARK_MW
            await ends(commander)

    asyncio.run(story())


def _busy(one: GpuReport) -> float | None:
    return None if one.activity is None else one.activity.busy


@pytest.mark.parametrize("variant", sorted(FAULTS[34].variants))
def test_fault_34_idle_job_or_foreign_pids(site: LoneNode, variant: str) -> None:
    """Whose job a GPU serves is told by its job file, not by processes: an idle job keeps its cap and its count."""

    async def story() -> None:
        async with window_on(site) as (commander, node):
            run = site.job(7, "1")
            await commander.until(lambda r: r.runs, "the run")
            await commander.plan(window_step(PARK_MW, {run: 450_000}))
            await commander.ceilings(PARK_MW, 450_000, PARK_MW, PARK_MW)
            plant(node, 34, site.devices[1].uuid, variant=variant)
            told = len(commander.reports)
            report = await commander.until(
                lambda _: len(commander.reports) > told + 4, "looked at some times"
            )
            assert gpu(report, site.devices[1].uuid).runs == (run,)
            assert gpu(report, site.devices[1].uuid).ceiling_mw == 450_000
            assert site.limits() == [PARK_MW, 450_000, PARK_MW, PARK_MW]
            await ends(commander)

    asyncio.run(story())


@pytest.mark.parametrize("variant", ["thermal", "hardware thermal", "power brake"])
def test_fault_37_slowdown(site: LoneNode, variant: str) -> None:
    """What else holds the clock down is told apart from our cap, and the cap is left as it is."""
    hot, word = site.devices[3].uuid, "power brake" if variant == "power brake" else "thermal"

    async def story() -> None:
        async with window_on(site) as (commander, node):
            run = site.job(7, "3")
            await commander.until(lambda r: r.runs, "the run")
            await commander.plan(window_step(PARK_MW, {run: 650_000}))
            await commander.ceilings(PARK_MW, PARK_MW, PARK_MW, 650_000)
            with busy(site, hot):
                sets = len(site.audit("set"))
                plant(node, 37, hot, variant=variant)
                await commander.until(lambda r: gpu(r, hot).slowed == word, "told")
                assert all(one.slowed != word for one in commander.reports[-1].gpus if one.uuid != hot)
                assert (
                    gpu(commander.reports[-1], hot).ceiling_mw == 650_000 and len(site.audit("set")) == sets
                )
                node.poke("clock_limit", 1.0, gpu=hot)
                await commander.until(lambda r: gpu(r, hot).slowed != word, "over")
            await ends(commander)

    asyncio.run(story())


def test_fault_38_draw_above_the_cap_at_the_clock_floor(site: LoneNode) -> None:
    """A cap that has no hold on the draw is said, in watts, and counts as set: what exceeds it is the reserve's."""
    greedy = site.devices[1].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            plant(node, 38, greedy)
            with busy(site, greedy):
                report = await commander.until(lambda r: any("lowest clock" in f for f in r.faults), "said")
                (said,) = [fault for fault in report.faults if "lowest clock" in fault]
                assert greedy in said and "cap of 200 W" in said
                assert (gpu(report, greedy).draw_mw or 0) > 220_000
                assert gpu(report, greedy).ceiling_mw == PARK_MW and others(report, greedy) == [PARK_MW] * 3
            await commander.until(lambda r: not any("lowest clock" in f for f in r.faults), "over")
            await ends(commander)

    asyncio.run(story())


@pytest.mark.parametrize("variant", sorted(FAULTS[39].variants))
def test_fault_39_an_entrys_own_error(site: LoneNode, variant: str) -> None:
    """A call that succeeds with errors inside: the function of the same quantity is asked, and nothing reads as 0."""
    odd = site.devices[0].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            plant(node, 39, odd, variant=variant)
            fired = node.faults_fired()
            told = len(commander.reports)
            await commander.until(lambda _: node.faults_fired() > fired, "met")
            report = await commander.until(lambda r: _believed(gpu(r, odd).draw_mw), "the average instead")
            assert gpu(report, odd).ceiling_mw == PARK_MW
            assert all(
                gpu(r, odd).draw_mw != 0 and gpu(r, odd).requested_mw != 0 for r in commander.reports[told:]
            )
            await commander.plan(window_step(300_000))
            await commander.ceilings(*[300_000] * 4)
            await ends(commander)

    asyncio.run(story())


@pytest.mark.parametrize("variant", sorted(FAULTS[40].variants))
def test_fault_40_no_gpm(site: LoneNode, variant: str) -> None:
    """No activity counters, or none for so short a time: unknown, never zero; caps and draw are as ever."""
    at_work = site.devices[2].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            with busy(site, at_work):
                plant(node, 40, at_work, variant=variant)
                told = len(commander.reports)
                await commander.until(lambda _: len(commander.reports) > told + 12, "looked at some times")
                report = commander.reports[-1]
                activity = gpu(report, at_work).activity
                assert activity is None or (activity.sm, activity.tensor) == (None, None)
                assert (gpu(report, at_work).draw_mw or 0) > 2 * IDLE_MW
            await commander.ceilings(*PARKED)
            await ends(commander)

    asyncio.run(story())
