"""Faults 1 to 5, 25, 26, 28, 36, 41 and 42 (docs/faults.md): the library or the driver as a whole."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import psutil
import pytest

from slurm_pfi.model import Report
from testbed import gpus
from testbed.gpu_faults import FAULTS, library, plant
from tests.fault_site import (
    PARK_MW,
    PARKED,
    FaultKind,
    LoneNode,
    agent_on,
    ceilings,
    ends,
    gpu,
    journal,
    nvml_children,
    others,
    site,
    until,
    window_on,
    window_step,
)

__all__ = ["site"]


def says(report: Report, text: str) -> bool:
    return any(text in fault for fault in report.faults)


@pytest.mark.parametrize("variant", sorted(FAULTS[1].libraries))
def test_fault_01_no_usable_library(site: LoneNode, tmp_path: Path, variant: str) -> None:
    """The agent is ready all the same, says what is missing, and begins once the library is there."""
    folder = library(1, tmp_path / "lib", variant=variant)

    async def story() -> None:
        async with agent_on(site, LD_LIBRARY_PATH=str(folder)) as (commander, _):
            report = await commander.until(lambda r: says(r, "NVML does not start"), "said")
            assert report.gpus == (), (
                "unknown is not a row of zeros: the controller counts what the site declares"
            )
            made = folder / "new"
            shutil.copy(gpus.library_path(), made)
            made.rename(folder / "libnvidia-ml.so.1")
            await commander.until(lambda r: len(r.gpus) == 4 and r.faults == (), "found")
            await commander.plan(window_step(PARK_MW))
            await commander.ceilings(*PARKED)
            await ends(commander)

    asyncio.run(story())


def test_fault_02_driver_not_loaded(site: LoneNode) -> None:
    """No driver: up, saying so; once it is loaded the GPUs are there."""

    async def story() -> None:
        with gpus.Node(site.sim) as node:
            node.poke("init_code", 9)
        async with agent_on(site) as (commander, node):
            report = await commander.until(lambda r: says(r, "code 9"), "said")
            assert report.gpus == ()
            node.poke("init_code", 0)
            await commander.plan(window_step(PARK_MW))
            await commander.ceilings(*PARKED)

    asyncio.run(story())


def test_fault_03_driver_upgraded_under_us(site: LoneNode) -> None:
    """Unknown, not lifted: the caps stand and stay in the journal; when it works again nothing has to be set."""

    async def story() -> None:
        async with window_on(site) as (commander, node):
            sets, (first,) = len(site.audit("set")), nvml_children(site)
            plant(node, 3)
            report = await commander.until(
                lambda r: set(ceilings(r)) == {None},
                "unknown",
            )
            assert all("18" in one.fault for one in report.gpus) and says(report, "code 18")
            assert _gone([first]), "only a new process can load the new library"
            assert site.limits() == PARKED and all(e.current_mw == PARK_MW for e in journal(site).values())
            node.clear_faults()
            await commander.ceilings(*PARKED)
            assert len(site.audit("set")) == sets
            await ends(commander)

    asyncio.run(story())


def test_fault_04_device_taken_from_our_cgroup(site: LoneNode) -> None:
    """One device answers 999 to everything: unknown and counted in full, its cap on record, the others go on."""
    taken = site.devices[3].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            node.poke("sticky_code", 999, gpu=taken)
            await commander.until(lambda r: gpu(r, taken).ceiling_mw is None, "unknown")
            assert others(commander.reports[-1], taken) == [PARK_MW] * 3
            assert "999" in gpu(commander.reports[-1], taken).fault
            assert journal(site)[taken].current_mw == PARK_MW
            await commander.plan(window_step(300_000))
            await commander.until(lambda r: others(r, taken) == [300_000] * 3, "the others follow")
            node.clear_faults()
            await commander.ceilings(*[300_000] * 4)
            await ends(commander)

    asyncio.run(story())


def test_fault_05_use_before_init_or_after_fork(site: LoneNode) -> None:
    """The library says it is not initialised: a new process, which never came of a fork, takes its place."""

    async def story() -> None:
        async with window_on(site) as (commander, node):
            (first,) = nvml_children(site)
            assert "-I" in first.cmdline(), "started, not forked"
            plant(node, 5)
            await until(lambda: _gone([first]), "the process given up")
            node.clear_faults()
            await commander.plan(window_step(300_000))
            await commander.ceilings(*[300_000] * 4)
            await ends(commander)

    asyncio.run(story())


def test_fault_25_init_hangs(site: LoneNode) -> None:
    """Nobody waits for a library that does not come up: ready at once, said, and tried anew."""

    async def story() -> None:
        with gpus.Node(site.sim) as node:
            plant(node, 25)
        began_s = time.monotonic()
        async with agent_on(site) as (commander, node):
            assert time.monotonic() - began_s < 8.0, "ready before NVML is"
            await commander.until(lambda r: says(r, "not ready within"), "said")
            node.clear_faults()
            await commander.plan(window_step(PARK_MW))
            await commander.ceilings(*PARKED)

    asyncio.run(story())


@pytest.mark.parametrize("variant", ["read", "every set"])
def test_fault_26_crash_inside_the_library(site: LoneNode, variant: str) -> None:
    """The process dies in a call on one device, once or always: the others keep their caps and follow the next plan."""
    fatal = site.devices[0].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            (child,) = nvml_children(site)
            plant(node, 26, fatal, variant=variant)
            if variant == "read":
                await until(lambda: _gone([child]), "the crash")
            await commander.plan(window_step(300_000))
            await commander.until(lambda r: others(r, fatal) == [300_000] * 3, "the others follow")
            assert site.started[-1].poll() is None
            if variant == "every set":
                await commander.until(lambda r: "next try" in gpu(r, fatal).fault, "held back")
                assert "signal 11" in site.audit("set_failed")[0]["error"]
                assert others(commander.reports[-1], fatal) == [300_000] * 3
            node.clear_faults()
            await commander.until(lambda r: ceilings(r) == [300_000] * 4, "tried again", deadline_s=40.0)
            await ends(commander)

    asyncio.run(story())
    assert site.audit("conflict") == []


def test_fault_28_a_killed_client_leaves_calls_hanging(site: LoneNode) -> None:
    """Killed in a call, and every later one of that GPU hangs: it becomes unknown, the others go on."""
    sick = site.devices[1].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            plant(node, 28, sick)
            fired = node.faults_fired()
            await until(lambda: node.faults_fired() > fired, "a call under way")
            for child in nvml_children(site):
                child.kill()
            await commander.plan(window_step(300_000))
            await commander.until(lambda r: others(r, sick) == [300_000] * 3, "the others follow")
            await commander.until(lambda r: gpu(r, sick).ceiling_mw is None, "unknown")
            assert journal(site)[sick].current_mw in (PARK_MW, 300_000)
            began_s = time.monotonic()
            assert (await asyncio.to_thread(site.ask, "status")).returncode == 0
            assert time.monotonic() - began_s < 5.0 and len(nvml_children(site)) <= 4
            node.clear_faults()
            await commander.ceilings(*[300_000] * 4)
            await ends(commander)

    asyncio.run(story())


def test_fault_36_missing_symbol(site: LoneNode) -> None:
    """An older library lacks a function, or pynvml raises what is no NVMLError: that quantity is unknown, no more."""

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            for function in ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetUtilizationRates"):
                node.fault(function, code=13)
            node.fault("nvmlDeviceGetFieldValues", code=13)
            await commander.plan(window_step(PARK_MW))
            report = await commander.ceilings(*PARKED)
            assert all(one.fault == "" for one in report.gpus)
            report = await commander.until(
                lambda r: all(one.draw_mw for one in r.gpus), "the average instead"
            )
            assert all(70_000 < (one.draw_mw or 0) < 80_000 for one in report.gpus)
            await ends(commander)

    asyncio.run(story())


def test_fault_41_our_handle_blocks_a_reset(site: LoneNode) -> None:
    """``slurm-pfi node release`` restores and lets go: no process of ours holds a GPU afterwards."""

    async def story() -> None:
        async with window_on(site) as (commander, node):
            held = nvml_children(site)
            with pytest.raises(OSError, match="reset GPU"):
                node.reset(site.devices[0].uuid)
            done = await asyncio.to_thread(site.ask, "release")
            assert done.returncode == 0, done.stderr
            assert "free for a reset" in done.stdout
            await until(lambda: _gone(held) and not nvml_children(site), "no handle held")
            await asyncio.sleep(2.5)
            assert nvml_children(site) == [], "nor taken up again"
            for device in site.devices:
                node.reset(device.uuid)
            assert (await asyncio.to_thread(site.ask, "resume")).returncode == 0
            await commander.until(lambda r: not r.released, "resumed")
            await commander.plan(window_step(300_000))
            await commander.ceilings(*[300_000] * 4)

    asyncio.run(story())


def _gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != "zombie" for process in processes)


def test_fault_42_unknown_new_code(site: LoneNode) -> None:
    """A code that no version of the binding names stays with its device: doubted, counted in full, tried again."""
    odd = site.devices[2].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            node.fault("nvmlDeviceSetPowerManagementLimit", FaultKind.APPLIED, code=77, gpu=odd, count=1)
            await commander.plan(window_step(300_000))
            await until(lambda: site.audit("set_failed"), "told")
            assert "code 77" in site.audit("set_failed")[0]["error"]
            await commander.ceilings(*[300_000] * 4)
            node.poke("sticky_code", 77, gpu=odd)
            await commander.until(lambda r: gpu(r, odd).ceiling_mw is None, "unknown")
            assert others(commander.reports[-1], odd) == [300_000] * 3
            node.clear_faults()
            await ends(commander)

    asyncio.run(story())
    assert site.audit("conflict") == []
