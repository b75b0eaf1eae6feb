"""What the core is told of GPUs when files do not answer, or tell of another start of the driver."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from slurm_pfi.gpu.device import DeviceSample, LostError
from slurm_pfi.gpu.identity import HostIdentity
from slurm_pfi.gpu.journal import Journal, JournalEntry
from slurm_pfi.gpu.memory import MemoryGpu, MemoryGpuDevices
from slurm_pfi.node import hardware as hardware_module
from slurm_pfi.node import messages as m
from slurm_pfi.node.hardware import FilesUnreadError, Hardware

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


class _Files:
    """Slurm's files for three GPUs behind links that stand for device files. ``stall`` keeps a call from answering."""

    def __init__(self, folder: Path) -> None:
        self.links = [folder / f"nvidia{minor}" for minor in range(4)]
        for link in self.links:
            link.symlink_to(os.devnull)
        self.written = 1
        self.fault: Exception | str = ""
        self.stall_sign = threading.Event()
        self.stall_files = threading.Event()
        for event in (self.stall_sign, self.stall_files):
            event.set()

    def sign(self) -> int:
        self.stall_sign.wait(LONG_S)
        return self.written

    def files(self) -> dict[int, str] | str:
        self.stall_files.wait(LONG_S)
        if isinstance(self.fault, Exception):
            raise self.fault
        return self.fault or {place: str(link) for place, link in enumerate(self.links[:3])}

    def free(self) -> None:
        self.stall_sign.set()
        self.stall_files.set()


@dataclass
class _Rig:
    files: _Files
    devices: MemoryGpuDevices
    hardware: Hardware
    driver_start: str = "1"

    async def look(self) -> m.DevicesListed:
        listed = await self.hardware.look()
        assert isinstance(listed, m.DevicesListed)
        return listed


ALL_THREE = {place: f"GPU-{place}" for place in range(3)}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Rig:
    monkeypatch.setattr(hardware_module, "_FILES_S", 0.3)
    files = _Files(tmp_path)
    devices = MemoryGpuDevices([MemoryGpu(uuid=f"GPU-{n}", minor=n, index=n) for n in range(3)])
    hardware = Hardware(
        devices=devices,
        journal_folder=tmp_path / "journal",
        identity=lambda: HostIdentity(boot_id="b", driver_start=made.driver_start),
        gres_files=files.files,
        map_sign=files.sign,
    )
    made = _Rig(files, devices, hardware)
    return made


def _tell(rig: _Rig, story: Callable[[], Coroutine[None, None, None]]) -> None:
    async def told() -> None:
        try:
            await story()
        finally:
            rig.files.free()

    asyncio.run(told())


def test_a_slow_stat_alone_costs_no_position(rig: _Rig) -> None:
    async def story() -> None:
        rig.files.stall_sign.clear()
        listed = await rig.look()
        assert (listed.positions, listed.map_fault) == (ALL_THREE, "")
        rig.files.stall_sign.set()
        assert (await rig.hardware.sample(("GPU-0",), quick=False)).map_changed, (
            "read again once that is known"
        )
        await rig.look()
        assert not (await rig.hardware.sample(("GPU-0",), quick=False)).map_changed
        rig.files.stall_sign.clear()
        await rig.look()
        rig.files.stall_sign.set()
        assert not (await rig.hardware.sample(("GPU-0",), quick=False)).map_changed, "it was only late"

    _tell(rig, story)


@pytest.mark.parametrize("what", ["both", "files", "error", "slurmd"])
def test_positions_stay_while_slurms_files_cannot_be_read(rig: _Rig, what: str) -> None:
    """A GPU that is lost meanwhile changes nothing for the others, and one more listing neither."""

    async def story() -> None:
        await rig.look()
        if what == "both":
            rig.files.stall_sign.clear()
        if what in ("both", "files"):
            rig.files.stall_files.clear()
        else:
            rig.files.fault = FilesUnreadError("stale handle") if what == "error" else "slurmd says nothing"
        rig.devices.fail("list", LostError("GPU-1: GPU is lost (code 15)", uuid="GPU-1", code=15))
        for _ in range(2):
            listed = await rig.look()
            assert listed.positions == {0: "GPU-0", 2: "GPU-2"}
            assert "stay as they were last read" in listed.map_fault and "position 1" not in listed.map_fault
        rig.devices.clear_faults()
        assert (await rig.look()).positions == ALL_THREE
        rig.files.free()
        rig.files.fault = ""
        listed = await rig.look()
        assert (listed.positions, listed.map_fault) == (ALL_THREE, "")

    _tell(rig, story)


@pytest.mark.parametrize("what", ["driver", "new GPU", "minor"])
def test_positions_of_other_hardware_do_not_stay(rig: _Rig, what: str) -> None:
    """Another start of the driver may count its devices anew, and so may a GPU that is new."""

    async def story() -> None:
        await rig.look()
        rig.files.fault = FilesUnreadError("stale handle")
        if what == "driver":
            rig.driver_start = "2"
        elif what == "minor":
            rig.devices.gpus["GPU-1"].minor = 3
        else:
            rig.devices.gpus["GPU-3"] = MemoryGpu(uuid="GPU-3", minor=3, index=3)
        listed = await rig.look()
        assert (listed.positions, listed.map_fault) == ({}, "stale handle")

    _tell(rig, story)


def test_files_that_now_say_what_is_not_understood_lead_nowhere(rig: _Rig) -> None:
    async def story() -> None:
        await rig.look()
        rig.files.written, rig.files.fault = 2, "line 3 is no gres.conf"
        listed = await rig.look()
        assert (listed.positions, listed.map_fault) == ({}, "line 3 is no gres.conf")

    _tell(rig, story)


def test_gres_conf_is_not_blamed_for_a_gpu_that_is_lost(rig: _Rig) -> None:
    """But for a position that never led anywhere, or now names another file, it is."""
    lost = LostError("GPU-1: GPU is lost (code 15)", uuid="GPU-1", code=15)

    async def story() -> None:
        await rig.look()
        rig.devices.fail("list", lost)
        listed = await rig.look()
        assert listed.map_fault == "" and [failure.uuid for failure in listed.failures] == ["GPU-1"]
        rig.files.links[1] = rig.files.links[3]
        assert "position 1: NVML lists no GPU with minor number 3" in (await rig.look()).map_fault

    _tell(rig, story)
