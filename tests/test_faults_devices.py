"""Faults 19 to 24, 30 and 35 (docs/faults.md): a GPU that is gone, hangs, is another one, or is divided."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from testbed import gpus
from testbed.gpu_faults import plant
from tests.fault_site import (
    ALL,
    PARK_MW,
    PARKED,
    LoneNode,
    agent_on,
    ends,
    gpu,
    journal,
    limit_of,
    nvml_children,
    others,
    site,
    until,
    window_on,
    window_step,
)

__all__ = ["site"]


def test_fault_19_off_the_bus(site: LoneNode) -> None:
    _lost_in_the_middle(site, 19)


def test_fault_20_the_count_drops(site: LoneNode) -> None:
    _lost_in_the_middle(site, 20)


def test_fault_21_reset_required(site: LoneNode) -> None:
    _lost_in_the_middle(site, 21)


def _lost_in_the_middle(site: LoneNode, number: int) -> None:
    """Unknown and counted at its maximum, told once, its cap on record; the others go on, found by UUID."""
    lost = site.devices[1].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            told = len(commander.reports)
            plant(node, number, lost)
            await commander.until(
                lambda r: gpu(r, lost).ceiling_mw is None, "unknown, so counted at its maximum"
            )
            await commander.plan(window_step(300_000))
            report = await commander.until(lambda r: others(r, lost) == [300_000] * 3, "the others follow")
            unread = [gpu(r, lost) for r in commander.reports[told:] if gpu(r, lost).draw_mw is None]
            assert unread and all(one.ceiling_mw is None for one in unread), "unknown at once"
            assert [one.uuid for one in report.gpus].count(lost) == 1 and len(report.gpus) == 4
            assert gpu(report, lost).requested_mw is None and gpu(report, lost).draw_mw is None
            assert gpu(report, lost).fault and journal(site)[lost].current_mw == PARK_MW
            assert limit_of(site, lost) == PARK_MW
            node.clear_faults()
            await commander.ceilings(*[300_000] * 4)
            await ends(commander)

    asyncio.run(story())
    assert site.limits() == ALL


def test_fault_22_indices_shift(site: LoneNode) -> None:
    """The library counts its devices otherwise from its next start on: caps go by UUID, and no other GPU gets one."""

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            run = site.job(7, "2")
            await commander.until(lambda r: r.runs, "the run")
            await commander.plan(window_step(PARK_MW, {run: 450_000}))
            await commander.ceilings(PARK_MW, PARK_MW, 450_000, PARK_MW)
            plant(node, 22)
            site.started[-1].kill()
            site.started[-1].wait()
            commander.reports.clear()
            await asyncio.to_thread(site.start)
            await commander.ceilings(PARK_MW, PARK_MW, 450_000, PARK_MW)
            await commander.plan(window_step(300_000, {run: 500_000}))
            await commander.ceilings(300_000, 300_000, 500_000, 300_000)
            await until(lambda: site.limits() == [300_000, 300_000, 500_000, 300_000], "by UUID")
            plant(node, 22)
            for child in nvml_children(site):
                child.kill()  # a new process counts them anew and is told no order at all
            await commander.plan(window_step(PARK_MW, {run: 450_000}))
            await commander.ceilings(PARK_MW, PARK_MW, 450_000, PARK_MW)
            assert site.audit("set_failed") == []
            await ends(commander)

    asyncio.run(story())


def test_fault_23_minor_differs_from_index(site: LoneNode) -> None:
    """Position in gres.conf, device file and NVML's order all differ: the run's own GPUs get the run's cap."""
    assert all(len({d.position, d.minor, d.index}) == 3 for d in site.devices)

    async def story() -> None:
        async with agent_on(site) as (commander, _):
            run = site.job(7, "0,3")
            report = await commander.until(lambda r: r.runs, "the run")
            assert set(report.runs[0].gpus) == {site.devices[0].uuid, site.devices[3].uuid}
            await commander.plan(window_step(PARK_MW, {run: 450_000}))
            await commander.ceilings(450_000, PARK_MW, PARK_MW, 450_000)
            assert site.limits() == [450_000, PARK_MW, PARK_MW, 450_000]
            await ends(commander)

    asyncio.run(story())


@pytest.mark.parametrize("variant", ["every call", "set"])
def test_fault_24_a_call_hangs(site: LoneNode, variant: str) -> None:
    """One device hangs for 45 s: the others have their caps at once, it counts at the most it can be."""
    hung = site.devices[2].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            await commander.until(lambda r: len(r.gpus) == 4, "all listed")
            plant(node, 24, hung, variant=variant)
            began_s = time.monotonic()
            await commander.plan(window_step(PARK_MW))
            await until(
                lambda: [limit_of(site, d.uuid) for d in site.devices].count(PARK_MW) == 3, "the others"
            )
            assert time.monotonic() - began_s < 1.5, "sooner than the deadline of the one that hangs"
            report = await commander.until(lambda r: others(r, hung) == [PARK_MW] * 3, "acknowledged")
            assert gpu(report, hung).ceiling_mw in (700_000, None)
            await commander.until(lambda r: gpu(r, hung).fault, "said")
            node.clear_faults()
            await commander.ceilings(*PARKED)
            await ends(commander)

    asyncio.run(story())
    assert site.audit("conflict") == []


def test_fault_30_gpu_replaced(site: LoneNode) -> None:
    """Another board in the slot: its limit before us is its own, the old board's record touches nothing."""
    slot, old = site.devices[1], site.devices[1].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            await commander.until(lambda r: len(r.gpus) == 4, "listed")
            for device in site.devices:
                node.poke("requested_mw", 650_000, gpu=device.uuid)
            await commander.until(
                lambda r: {one.prior_mw for one in r.gpus} == {650_000}, "the site's own limits"
            )
            await commander.plan(window_step(PARK_MW))
            await commander.ceilings(*PARKED)
            site.started[-1].kill()
            site.started[-1].wait()
            plant(node, 30, old)
            new = gpus.read_devices(site.sim)[slot.position].uuid
            assert new != old
            commander.reports.clear()
            await asyncio.to_thread(site.start)
            report = await commander.until(lambda r: len(r.gpus) == 4, "listed")
            assert gpu(report, new).prior_mw == 700_000 and gpu(report, new).position == slot.position
            assert old not in [one.uuid for one in report.gpus]
            await commander.plan(window_step(300_000))
            await commander.ceilings(*[300_000] * 4)
            await commander.plan(window_step(None))
            await commander.ceilings(650_000, 700_000, 650_000, 650_000)
            await until(
                lambda: [u for u, entry in journal(site).items() if entry.current_mw is not None] == [old],
                "only the record of the board that is gone is left, as it was",
            )
            assert journal(site)[old].current_mw == PARK_MW

    asyncio.run(story())


def test_fault_35_mig_switched_mid_job(site: LoneNode) -> None:
    """A board is divided while a job runs: one cap, one count, of the whole board, as before."""
    divided = site.devices[0].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            run = site.job(7, "0")
            await commander.until(lambda r: r.runs, "the run")
            await commander.plan(window_step(PARK_MW, {run: 450_000}))
            await commander.ceilings(450_000, PARK_MW, PARK_MW, PARK_MW)
            plant(node, 35, divided)
            await commander.plan(window_step(PARK_MW, {run: 400_000}))
            report = await commander.ceilings(400_000, PARK_MW, PARK_MW, PARK_MW)
            assert len(report.gpus) == 4 and gpu(report, divided).uuid == divided
            site.started[-1].kill()
            site.started[-1].wait()
            commander.reports.clear()
            await asyncio.to_thread(site.start)  # and one that has only ever seen it divided
            report = await commander.ceilings(400_000, PARK_MW, PARK_MW, PARK_MW)
            assert len(report.gpus) == 4 and gpu(report, divided).runs == (run,)
            sets = [
                line for line in gpus.read_trace(site.sim) if line.uuid == divided and line.event == "limit"
            ]
            assert [line.effective_mw for line in sets if line.pid not in (0, os.getpid())] == [
                450_000,
                400_000,
            ]
            await ends(commander)

    asyncio.run(story())
