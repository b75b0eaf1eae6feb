"""Faults 27, 29 and 44 (docs/faults.md): the agent killed at the worst moment, a reboot, files that cannot be used."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_pfi.gpu.journal import JournalEntry
from testbed.gpu_faults import SETTER
from tests.fault_site import (
    ALL,
    PARK_MW,
    PARKED,
    FaultKind,
    LoneNode,
    agent_on,
    ceilings,
    changed_by_us,
    ends,
    gpu,
    journal,
    limit_of,
    others,
    site,
    until,
    window_on,
    window_step,
)
from tests.node_world import S, World

__all__ = ["site"]


def kill(site: LoneNode) -> None:
    site.started[-1].kill()
    site.started[-1].wait()


@pytest.mark.parametrize("moment", ["record and set", "set and answer"])
def test_fault_27_killed_between_record_and_set(site: LoneNode, moment: str) -> None:
    """The record is there before the set, so that whatever the device did, the next agent knows it for ours."""
    caught = site.devices[1].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            await commander.until(lambda r: len(r.gpus) == 4, "all listed")
            where = SETTER if moment == "record and set" else "nvmlDeviceGetFieldValues"
            await until(lambda: len(journal(site)) == 4, "prior limits recorded")
            if moment == "record and set":
                node.fault(where, FaultKind.DELAY, gpu=caught, delay_s=5.0, count=1)
            else:
                node.fault(SETTER, FaultKind.APPLIED, code=10, gpu=caught)
            fired = node.faults_fired()
            plan = asyncio.create_task(commander.plan(window_step(PARK_MW), window_step(None, {}, 3600.0)))
            await until(lambda: node.faults_fired() > fired, "in the middle of the set")
            kill(site)
            plan.cancel()
            await asyncio.gather(plan, return_exceptions=True)
            entry = journal(site)[caught]
            assert (entry.current_mw, entry.prior_mw) == (PARK_MW, 700_000), "recorded ahead of the set"
            await until(
                lambda: limit_of(site, caught) == (PARK_MW if moment != "record and set" else 700_000),
                "as is",
            )
            node.clear_faults()
            commander.reports.clear()
            await asyncio.to_thread(site.start)
            report = await commander.ceilings(*PARKED)
            assert {one.prior_mw for one in report.gpus} == {700_000}, (
                "no value of ours is taken for a prior limit"
            )
            await ends(commander)

    asyncio.run(story())
    assert site.audit("conflict") == [] and site.limits() == ALL


def test_fault_29_reboot_with_a_stale_record(site: LoneNode) -> None:
    """A record of another boot restores nothing: limits died with that boot, and these are somebody's own."""

    async def story() -> None:
        async with window_on(site) as (commander, node):
            kill(site)
            for device in site.devices:
                node.poke("reset", 1, gpu=device.uuid)
            (site.folder / "id" / "n1" / "boot_id").write_text("boot-2\n")
            sets = len(site.audit("set"))
            node.poke("requested_mw", 650_000, gpu=site.devices[3].uuid)  # set by the site at boot
            commander.reports.clear()
            await asyncio.to_thread(site.start)
            report = await commander.until(
                lambda r: len(r.gpus) == 4 and r.held is None, "no plan of that boot"
            )
            assert ceilings(report) == [*ALL[:3], 650_000]
            assert gpu(report, site.devices[3].uuid).prior_mw is None, "not invented"
            await asyncio.sleep(1.5)
            assert len(site.audit("set")) == sets
            await commander.plan(window_step(PARK_MW), priors={site.devices[3].uuid: 650_000})
            await commander.ceilings(*PARKED)
            await ends(commander, *ALL[:3], 650_000)

    asyncio.run(story())


def _nul_filled(path: Path) -> None:
    path.write_bytes(b"\0" * 512)


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def _changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"700000", b"200000"))


def _unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _foreign(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize("spoil", [_nul_filled, _truncated, _changed, _unreadable, _foreign])
def test_fault_44_state_file_unreadable(site: LoneNode, spoil: Callable[[Path], None]) -> None:
    """A record that cannot be trusted: that GPU is not touched, it is said, and the others go on and come back."""
    spoiled = site.devices[2].uuid

    async def story() -> None:
        async with window_on(site) as (commander, _):
            kill(site)
            path = site.paths.journal / f"{spoiled}.json"
            spoil(path)
            commander.reports.clear()
            await asyncio.to_thread(site.start)
            report = await commander.until(lambda r: len(r.gpus) == 4 and gpu(r, spoiled).fault, "said")
            assert (
                "journal entry unreadable" in gpu(report, spoiled).fault
                and gpu(report, spoiled).prior_mw is None
            )
            await commander.plan(window_step(300_000))
            await commander.until(lambda r: others(r, spoiled) == [300_000] * 3, "the others follow")
            assert limit_of(site, spoiled) == PARK_MW, "not touched"
            await commander.plan(window_step(None))
            await commander.until(lambda r: others(r, spoiled) == ALL[:3], "the others are back")
            assert limit_of(site, spoiled) == PARK_MW
            assert any(line.startswith("partly enforceable") for line in commander.reports[-1].faults)

    asyncio.run(story())
    assert len([line for line in changed_by_us(site) if line.uuid == spoiled]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which needs root")
def test_fault_44_disk_full(site: LoneNode) -> None:
    """No record, no cap: what cannot be written down is not set, and once there is room it is."""
    small = site.paths.folder
    small.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "pfi-test", str(small)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this sandbox mounts nothing")
    try:
        _disk_full(site, small)
    finally:
        site.close()
        subprocess.run(["umount", str(small)], check=True)


def _disk_full(site: LoneNode, small: Path) -> None:
    async def story() -> None:
        async with agent_on(site) as (commander, _):
            await until(lambda: len(journal(site)) == 4, "prior limits recorded")
            filler = small / "filler"
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
                while True:
                    file.write(b"x" * 256)
            await commander.plan(window_step(PARK_MW))
            report = await commander.until(lambda r: any("journal" in fault for fault in r.faults), "said")
            assert ceilings(report) == ALL
            await asyncio.sleep(1.0)  # time for a set that should not be
            assert changed_by_us(site) == []
            assert all(entry.current_mw is None for entry in journal(site).values()), (
                "the old records are whole"
            )
            filler.unlink()
            await commander.ceilings(*PARKED)
            await commander.until(lambda r: not any("journal" in fault for fault in r.faults), "over")
            await ends(commander)

    asyncio.run(story())
    assert shutil.disk_usage(small).total == 64 * 1024


def test_fault_27_every_moment_of_a_set() -> None:
    """In memory: killed after each single action of a step, the next agent leaves nothing behind at the end."""
    for cut in range(12):
        world = World(2).start()
        plan = world.make_plan(window_step(PARK_MW), window_step(None, {}, 60.0))
        world.stop_after = cut
        world.send(plan)
        world.stop_after = None
        world.start()
        assert all(gpu_.prior_mw == 700_000 for gpu_ in world.reports[-1].gpus)
        world.advance(70 * S)
        world.send(world.make_plan(window_step(None)))
        world.advance(10 * S)
        assert world.requested() == [700_000] * 2, cut
        assert all(isinstance(e, JournalEntry) and e.current_mw is None for e in world.journal.values())
