"""F3: a full disk, a restart on it, and space back: nothing is lost in silence, and it goes on without a restart."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pfi.node.lock import Lock, LockedError
from testbed.lone_node import Commander, LoneNode, wait_for
from tests.node_world import window_step

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LoneNode]:
    made = LoneNode(tmp_path)
    state = tmp_path / "state"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0755", "tmpfs", str(state)], check=True)
    made.config.write_text(made.config.read_text() + "[times]\nrescan_s = 0.5\n")
    try:
        yield made
    finally:
        made.close()
        subprocess.run(["umount", "--lazy", str(state)], check=True)


def _fill(folder: Path) -> Path:
    """A file that leaves no page free."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
    return filler


def _contents(site: LoneNode) -> dict[str, bytes]:
    files = [site.paths.plan, *sorted(site.paths.journal.glob("*.json"))]
    return {path.name: path.read_bytes() for path in files}


def test_f3_a_full_disk_and_space_back(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.plan(window_step(400_000), window_step(None, {}, 600.0))
            await controller.ceilings(*[400_000] * 4)
            before = _contents(site)
            filler = _fill(site.paths.folder)
            # A line of the audit file may still fit in its last page.
            with site.paths.audit.open("ab", buffering=0) as audit:
                pad = -audit.tell() % 4096
                audit.write(b" " * pad)
            report = await controller.plan(window_step(200_000), window_step(None, {}, 600.0))
            report = await controller.until(
                lambda report: (
                    any(fault.startswith("journal: ") for fault in report.faults)
                    and any("plan.json cannot be written" in fault for fault in report.faults)
                ),
                "the controller is told that neither journal nor plan can be written",
            )
            assert [gpu.enforced_mw for gpu in report.gpus] == [400_000] * 4, (
                "nothing that could not be taken back"
            )
            assert _contents(site) == before, "what was there is whole"
            wait_for(lambda: "the audit log" in site.log.read_text(), "the log says that records are lost")
            agent.kill()
            agent.wait()
            controller.reports.clear()
            agent = site.start()
            report = await controller.until(lambda report: len(report.gpus) == 4, "it starts on a full disk")
            assert site.limits() == [400_000] * 4 and _contents(site) == before
            await controller.plan(window_step(200_000), window_step(None, {}, 600.0))
            await controller.until(lambda report: len(report.faults) >= 2, "the faults")
            filler.unlink()
            await controller.ceilings(*[200_000] * 4)
            await controller.until(lambda report: not report.faults, "no fault is left")
            assert agent.poll() is None

    asyncio.run(story())
    held = wait_for(lambda: json.loads(site.paths.plan.read_text()), "the plan saved")
    assert held["plan"]["steps"][0]["park_cap_mw"] == 200_000, (
        "also the plan that came while there was no room"
    )
    gaps = [json.loads(line) for line in site.paths.audit.read_text().splitlines() if '"audit_gap"' in line]
    assert sum(gap["lost"] for gap in gaps) > 0, "and the file says how many are missing"
    assert "audit log" in site.log.read_text() and "is written again" in site.log.read_text()


def test_f3_a_full_disk_at_the_stop_leaves_the_timer_all_the_same(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.plan(window_step(400_000), window_step(None, {}, 5.0))
            await controller.ceilings(*[400_000] * 4)
            _fill(site.paths.folder)
            agent.terminate()
            assert agent.wait(10) == 0

    asyncio.run(story())
    wait_for(lambda: site.limits() == [700_000] * 4, "the restore", 30.0)


def test_f3_a_lock_is_had_without_room_for_its_pid(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    heeded = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        held = Lock(path)
        with pytest.raises(LockedError, match="is held by another process"):
            Lock(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, heeded)
    held.release()
