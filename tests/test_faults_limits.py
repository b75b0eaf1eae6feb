"""Faults 6 to 18 and 43 (docs/faults.md): a limit that is refused, lost, bent, late, or written by others."""

from __future__ import annotations

import asyncio
import time

import pytest

from testbed import gpus
from testbed.gpu_faults import plant
from tests.fault_site import (
    ALL,
    NO_PERMISSION,
    NOT_SUPPORTED,
    PARK_MW,
    PARKED,
    SET,
    TIMEOUT,
    FaultKind,
    LoneNode,
    agent_on,
    changed_by_us,
    ends,
    gpu,
    journal_rests,
    limit_of,
    nvml_children,
    others,
    site,
    until,
    window_on,
    window_step,
)

__all__ = ["site"]


def test_fault_06_not_privileged(site: LoneNode) -> None:
    """No right to set: known before the first plan, said, counted at what stands, and not tried over and over."""

    async def story() -> None:
        async with agent_on(site, PFI_STANDIN_EUID="1000") as (commander, _):
            await commander.plan(window_step(PARK_MW))
            report = await commander.until(lambda r: all(one.fault for one in r.gpus), "said of each GPU")
            assert [one.ceiling_mw for one in report.gpus] == ALL
            assert all("set" in one.fault for one in report.gpus)
            await asyncio.sleep(2)  # a storm would show in the number of tries
            assert len(site.audit("set")) <= len(ALL)
            await ends(commander)

    asyncio.run(story())
    assert site.limits() == ALL and changed_by_us(site) == []


def test_fault_07_set_unsupported(site: LoneNode) -> None:
    """One board has no settable limit: it counts at what it has, the others are capped."""
    fixed = site.devices[1].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            await commander.until(lambda r: len(r.gpus) == 4, "all listed")
            node.fault(SET, code=NOT_SUPPORTED, gpu=fixed)
            await commander.plan(window_step(PARK_MW))
            report = await commander.until(
                lambda r: gpu(r, fixed).fault and others(r, fixed) == [PARK_MW] * 3,
                "said and the others capped",
            )
            assert gpu(report, fixed).ceiling_mw == 700_000
            assert len([said for said in site.audit("set") if said["uuid"] == fixed]) == 1
            await ends(commander)

    asyncio.run(story())
    assert site.limits() == ALL


def test_fault_08_range_shrank(site: LoneNode) -> None:
    """The least limit rose after it was read: the new range is read, the cap brought within it and that is counted."""
    narrow = site.devices[2].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            await commander.until(lambda r: len(r.gpus) == 4, "all listed")
            node.poke("min_mw", 300_000, gpu=narrow)
            await commander.plan(window_step(PARK_MW))
            report = await commander.until(
                lambda r: gpu(r, narrow).ceiling_mw == 300_000 and others(r, narrow) == [PARK_MW] * 3,
                "clamped",
            )
            assert gpu(report, narrow).min_mw == 300_000 and gpu(report, narrow).fault == ""
            assert "300000" in site.audit("set_failed")[0]["error"], "the range is said"
            await ends(commander)

    asyncio.run(story())


def test_fault_09_v2_hides_the_error(site: LoneNode) -> None:
    """The setter whose binding drops its return code is not used: the driver's own refusal is what is told."""
    refusing = site.devices[0].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            await commander.until(lambda r: len(r.gpus) == 4, "all listed")
            for function in (SET, SET + "_v2"):
                node.fault(function, code=NO_PERMISSION, gpu=refusing)
            await commander.plan(window_step(PARK_MW))
            report = await commander.until(lambda r: gpu(r, refusing).fault, "said")
            assert f"code {NO_PERMISSION}" in gpu(report, refusing).fault
            assert gpu(report, refusing).ceiling_mw == 700_000

    asyncio.run(story())


def test_fault_10_success_without_effect(site: LoneNode) -> None:
    """A set that is accepted and changes nothing is not believed, and is tried again."""
    deaf = site.devices[3].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            node.fault(SET, FaultKind.SILENT, gpu=deaf, count=3)
            await commander.plan(window_step(PARK_MW))
            report = await commander.until(
                lambda r: gpu(r, deaf).fault and others(r, deaf) == [PARK_MW] * 3, "said, the others in force"
            )
            assert gpu(report, deaf).ceiling_mw == 700_000 and "was accepted but" in gpu(report, deaf).fault
            assert not [said for said in site.audit("readback") if said["uuid"] == deaf]
            await commander.ceilings(*PARKED)
            await ends(commander)

    asyncio.run(story())


@pytest.mark.parametrize("code", [TIMEOUT, 999])
def test_fault_11_applied_then_error(site: LoneNode, code: int) -> None:
    """Done and answered with an error: counted at the higher of both until it is sure, and never left behind."""
    lying = site.devices[1].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            node.fault(SET, FaultKind.APPLIED, code=code, gpu=lying, count=1)
            await commander.plan(window_step(PARK_MW))
            await until(lambda: site.audit("set_failed"), "the error told")
            assert [said["uuid"] for said in site.audit("set_failed")] == [lying]
            await commander.ceilings(*PARKED)
            assert gpu(commander.reports[-1], lying).prior_mw == 700_000, "its own cap is no prior limit"
            node.fault(SET, FaultKind.APPLIED, code=code, gpu=lying, count=1)
            await ends(commander)

    asyncio.run(story())
    assert site.audit("conflict") == [], "nobody else wrote"
    assert site.limits() == ALL


def test_fault_11_applied_after_the_deadline(site: LoneNode) -> None:
    """A raise that nobody waits for any more may still be made: it counts from the plan on, whatever is read."""
    slow = site.devices[1].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            run = site.job(7, "1")
            await commander.until(lambda r: r.runs, "the run")
            await commander.plan(window_step(PARK_MW, {run: 300_000}))
            await commander.ceilings(PARK_MW, 300_000, PARK_MW, PARK_MW)
            node.fault(SET, FaultKind.DELAY, gpu=slow, delay_s=3.0, count=1)
            report = await commander.plan(window_step(PARK_MW, {run: 600_000}))
            told = commander.reports.index(report)
            await until(lambda: limit_of(site, slow) == 600_000, "made late")
            await commander.ceilings(PARK_MW, 600_000, PARK_MW, PARK_MW)
            ceilings_since = [gpu(one, slow).ceiling_mw for one in commander.reports[told:]]
            assert all(mw is None or mw >= 600_000 for mw in ceilings_since)
            assert site.audit("set_failed"), "it was given up in between"
            await ends(commander)

    asyncio.run(story())


@pytest.mark.parametrize(("granularity_mw", "cap_mw"), [(1000, 400_700), (25_000, 412_000)])
def test_fault_12_rounded(site: LoneNode, granularity_mw: int, cap_mw: int) -> None:
    """What the board makes of a cap is what counts, and what is taken back, however coarse it is."""
    coarse, made_mw = site.devices[0].uuid, 400_000

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            run = site.job(7, "0")
            await commander.until(lambda r: r.runs, "the run")
            node.poke("granularity_mw", granularity_mw, gpu=coarse)
            await commander.plan(window_step(PARK_MW, {run: cap_mw}))
            await commander.until(
                lambda r: (
                    gpu(r, coarse).requested_mw == made_mw
                    and made_mw <= (gpu(r, coarse).ceiling_mw or 0) <= cap_mw
                    and others(r, coarse) == [PARK_MW] * 3
                ),
                "made",
            )
            await commander.until(lambda r: gpu(r, coarse).ceiling_mw == made_mw, "the doubt is over")
            tries = len(site.audit("set"))
            await asyncio.sleep(2.0)
            assert len(site.audit("set")) == tries, (
                "the board has no nearer value: that is said by the read-back"
            )
            assert gpu(commander.reports[-1], coarse).fault == ""
            await ends(commander)

    asyncio.run(story())
    assert site.limits() == ALL and site.audit("conflict") == []


def test_fault_13_takes_effect_late(site: LoneNode) -> None:
    """Accepted at once and in force later: the old limit counts until the new one is enforced."""
    late = site.devices[2].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            await commander.until(lambda r: len(r.gpus) == 4, "all listed")
            node.poke("effect_us", 1_500_000, gpu=late)
            await commander.plan(window_step(PARK_MW))
            await commander.ceilings(*PARKED)
            waited = [one for one in commander.reports if others(one, late) == [PARK_MW] * 3]
            assert gpu(waited[0], late).ceiling_mw == 700_000, "the others were there first"

    asyncio.run(story())
    in_force = next(line.mono_ns for line in changed_by_us(site) if line.uuid == late)
    told = next(said["mono_ns"] for said in site.audit("readback") if said["uuid"] == late)
    assert in_force < told


def test_fault_14_bmc_cap_lower(site: LoneNode) -> None:
    """The management controller holds the board lower: ours is requested, its is enforced, the higher counts."""
    held = site.devices[1].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            node.poke("bmc_mw", 250_000, gpu=held)
            run = site.job(7, "1")
            await commander.until(lambda r: r.runs, "the run")
            await commander.plan(window_step(PARK_MW, {run: 400_000}))
            report = await commander.until(lambda r: gpu(r, held).ceiling_mw == 400_000, "ours counts")
            assert (gpu(report, held).requested_mw, gpu(report, held).enforced_mw) == (400_000, 250_000)
            assert gpu(report, held).fault == ""

    asyncio.run(story())
    assert site.audit("conflict") == []


def test_fault_15_bmc_cap_lifted(site: LoneNode) -> None:
    """It is lifted while a job runs: the board goes to our cap and no further, and the budget had counted that."""
    held = site.devices[1].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            node.poke("bmc_mw", 250_000, gpu=held)
            run = site.job(7, "1")
            await commander.until(lambda r: r.runs, "the run")
            await commander.plan(window_step(PARK_MW, {run: 400_000}))
            await commander.until(lambda r: gpu(r, held).enforced_mw == 250_000, "held lower")
            await commander.until(lambda r: gpu(r, held).ceiling_mw == 400_000, "ours counts")
            node.poke("bmc_mw", 0, gpu=held)
            report = await commander.until(lambda r: gpu(r, held).enforced_mw == 400_000, "seen")
            assert gpu(report, held).ceiling_mw == 400_000 and limit_of(site, held) == 400_000

    asyncio.run(story())


def test_fault_16_another_agent_sets(site: LoneNode) -> None:
    """Another writer raises it: taken back once at once, then later and later; told once for each value."""
    fought = site.devices[0].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            node.poke("requested_mw", 650_000, gpu=fought)
            await until(lambda: limit_of(site, fought) == PARK_MW, "taken back", 5.0)
            for _ in range(30):
                node.poke("requested_mw", 650_000, gpu=fought)
                await asyncio.sleep(0.1)
            report = await commander.until(
                lambda r: gpu(r, fought).ceiling_mw == 650_000, "counted as it stands"
            )
            assert others(report, fought) == [PARK_MW] * 3
            assert len([said for said in site.audit("conflict") if said["uuid"] == fought]) <= 2
            ours = [line for line in changed_by_us(site) if line.uuid == fought]
            assert len(ours) <= 3, "not fought in a loop"

    asyncio.run(story())


def test_fault_17_persistence_off(site: LoneNode) -> None:
    """Where the last program that lets go takes the limit along, the default counts, and the cap is set again."""
    loose = site.devices[2].uuid

    async def story() -> None:
        with_default = [PARK_MW if device.uuid != loose else 700_000 for device in site.devices]
        async with agent_on(site) as (commander, node):
            node.poke("persistence", 0, gpu=loose)
            site.started[-1].kill()
            site.started[-1].wait()
            await asyncio.to_thread(site.start)
            await commander.plan(window_step(PARK_MW))
            report = await commander.ceilings(*with_default)
            assert any("persistence mode is off on 1 GPUs" in fault for fault in report.faults)
            await until(lambda: limit_of(site, loose) == PARK_MW, "capped all the same")
            for child in nvml_children(site):
                child.kill()  # the last program that held it
            began_s = time.monotonic()
            await until(
                lambda: [line.effective_mw for line in _after_ours(site, loose)][:1] == [700_000], "fallen"
            )
            await until(lambda: limit_of(site, loose) == PARK_MW, "set again")
            assert time.monotonic() - began_s < 5.0
            await until(lambda: site.audit("reverted"), "told")
            assert [(said["uuid"], said["cause"]) for said in site.audit("reverted")] == [
                (loose, "default value")
            ]
            assert all(
                one.ceiling_mw == 700_000 for r in commander.reports for one in r.gpus if one.uuid == loose
            )
            await ends(commander)

    asyncio.run(story())
    assert site.audit("conflict") == []


def _after_ours(site: LoneNode, uuid: str) -> list[gpus.TraceLine]:
    """What became of this GPU's limit after our first set of it."""
    first = next(line for line in changed_by_us(site) if line.uuid == uuid)
    trace = gpus.read_trace(site.sim)
    return [line for line in trace if line.uuid == uuid and line.mono_ns > first.mono_ns]


def test_fault_18_gpu_reset(site: LoneNode) -> None:
    """A reset takes the cap along: it is set again within seconds and counted, and nobody is blamed."""
    reset = site.devices[1].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            node.poke("sticky_code", 16, gpu=reset)
            await commander.until(
                lambda r: gpu(r, reset).ceiling_mw is None, "unknown while it must be reset"
            )
            assert others(commander.reports[-1], reset) == [PARK_MW] * 3
            node.poke("reset", 1, gpu=reset)
            began_s = time.monotonic()
            await commander.ceilings(*PARKED)
            assert time.monotonic() - began_s < 5.0 and limit_of(site, reset) == PARK_MW
            assert [(said["uuid"], said["cause"]) for said in site.audit("reverted")] == [(reset, "reset")]
            await ends(commander)

    asyncio.run(story())
    assert site.audit("conflict") == [] and journal_rests(site)


def test_fault_43_module_cap_binds(site: LoneNode) -> None:
    """A module's limit holds the GPU lower than ours: known as such, no fault, and our cap is what counts."""
    bound = site.devices[1].uuid

    async def story() -> None:
        with gpus.Node(site.sim) as node:
            plant(node, 43, bound)
        async with agent_on(site) as (commander, node):
            run = site.job(7, "1")
            await commander.until(lambda r: r.runs, "the run")
            await commander.plan(window_step(PARK_MW, {run: 600_000}))
            report = await commander.until(lambda r: gpu(r, bound).ceiling_mw == 600_000, "ours counts")
            assert (gpu(report, bound).requested_mw, gpu(report, bound).enforced_mw) == (600_000, 450_000)
            assert gpu(report, bound).fault == "" and site.audit("conflict") == []
            await commander.plan(window_step(PARK_MW, {run: 300_000}))
            report = await commander.until(
                lambda r: gpu(r, bound).ceiling_mw == 300_000, "lower than the module's"
            )
            assert gpu(report, bound).enforced_mw == 300_000
            node.poke("module_mw", 0, gpu=bound)
            await ends(commander)

    asyncio.run(story())


def test_fault_08_the_greatest_limit_fell(site: LoneNode) -> None:
    """The limit before us lies outside the range by now: the GPU goes back as far as it can, and nothing is left."""
    narrow = site.devices[0].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            plant(node, 8, narrow, variant="maximum")
            await commander.plan(window_step(None))
            await commander.ceilings(500_000, *ALL[1:])
            await until(lambda: journal_rests(site), "nothing left in the journal")
            report = await commander.until(
                lambda r: gpu(r, narrow).prior_mw == 500_000, "what it can be is its own"
            )
            assert gpu(report, narrow).fault == "" and gpu(report, narrow).max_mw == 500_000

    asyncio.run(story())
