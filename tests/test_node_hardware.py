"""What the core is told of GPUs when files do not answer, or tell of another start of the driver."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from slurm_pfi.gpu.device import DeviceSample
from slurm_pfi.gpu.identity import HostIdentity
from slurm_pfi.gpu.journal import Journal, JournalEntry
from slurm_pfi.gpu.memory import MemoryGpu, MemoryGpuDevices
from slurm_pfi.node import hardware as hardware_module
from slurm_pfi.node import messages as m
from slurm_pfi.node.hardware import Hardware

LONG_S = 10.0


class _Server:
    """One that answers until it is gone, and to nobody until it is back."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.there.set()
        self.asked = 0

    def sign(self) -> int:
        self.asked += 1
        self.there.wait(LONG_S)
        return 1

    def files(self) -> dict[int, str]:
        self.sign()
        return {}


def _hardware(folder: Path, server: _Server) -> Hardware:
    return Hardware(
        devices=MemoryGpuDevices([MemoryGpu(uuid="GPU-0", minor=0, index=0)]),
        journal_folder=folder / "journal",
        identity=lambda: HostIdentity(boot_id="b", driver_start="1"),
        gres_files=server.files,
        map_sign=server.sign,
    )


def test_readings_go_on_while_slurms_files_do_not_answer(tmp_path: Path) -> None:
    server = _Server()
    hardware = _hardware(tmp_path, server)

    async def story() -> None:
        await hardware.look()
        server.there.clear()
        before = server.asked
        try:
            async with asyncio.timeout(LONG_S / 2):
                for _ in range(3):
                    told = await hardware.sample(("GPU-0",), quick=False)
                    assert isinstance(told.samples[0], DeviceSample)
                    assert not told.map_changed, "unknown is not changed"
            assert server.asked == before + 1, "one thread waits, not one more for each reading"
        finally:
            server.there.set()

    asyncio.run(story())


def test_gpus_are_listed_while_slurms_files_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an agent started now would never restore what the one before left."""
    monkeypatch.setattr(hardware_module, "_FILES_S", 0.2)
    server = _Server()
    hardware = _hardware(tmp_path, server)
    server.there.clear()

    async def story() -> None:
        try:
            async with asyncio.timeout(LONG_S / 2):
                listed = await hardware.look()
        finally:
            server.there.set()
        assert isinstance(listed, m.DevicesListed)
        assert [info.uuid for info in listed.devices] == ["GPU-0"]
        assert listed.positions == {}
        assert "no answer" in listed.map_fault

    asyncio.run(story())


@pytest.mark.parametrize(
    ("found_mw", "boot_id", "ours"),
    [(200_000, "b", True), (700_000, "b", False), (333_000, "b", False), (200_000, "earlier", False)],
)
def test_a_cap_that_stands_after_another_start_of_the_driver_is_still_ours(
    tmp_path: Path, found_mw: int, boot_id: str, ours: bool
) -> None:
    """The agent set it again before it knew of the restart: with its record gone, nobody would take it away."""
    entry = JournalEntry(
        uuid="GPU-0",
        prior_mw=650_000,
        issued_mw=(200_000,),
        current_mw=200_000,
        run="",
        boot_id=boot_id,
        driver_start="1",
        how="read",
    )
    Journal(tmp_path / "journal", boot_id, "1").write(entry)
    hardware = Hardware(
        devices=MemoryGpuDevices([MemoryGpu(uuid="GPU-0", minor=0, index=0, requested_mw=found_mw)]),
        journal_folder=tmp_path / "journal",
        identity=lambda: HostIdentity(boot_id="b", driver_start="2"),
        gres_files=dict,
    )
    listed = asyncio.run(hardware.look())
    assert isinstance(listed, m.DevicesListed)
    known = listed.journal["GPU-0"]
    assert known == (msgspec.structs.replace(entry, driver_start="2") if ours else None)
