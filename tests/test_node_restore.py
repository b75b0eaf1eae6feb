"""Restoring without an agent: each GPU on its own, and only what is still ours when its turn comes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from slurm_pfi.gpu.device import DeviceFailure, DeviceInfo, DeviceLimits, LibraryGoneError, LostError
from slurm_pfi.gpu.identity import HostIdentity
from slurm_pfi.gpu.journal import Journal, JournalEntry, JournalError
from slurm_pfi.gpu.memory import MemoryGpu, MemoryGpuDevices
from slurm_pfi.model import GpuId
from slurm_pfi.node.hardware import Hardware
from slurm_pfi.node.restore import Restored, restore_all
from slurm_pfi.store.audit import AuditLog

IDENTITY = HostIdentity(boot_id="boot-1", driver_start="d1")


def boards(count: int = 4) -> list[MemoryGpu]:
    """GPUs with a cap of ours on each."""
    return [
        MemoryGpu(uuid=f"GPU-{n}", minor=n, index=n, requested_mw=300_000, enforced_mw=300_000)
        for n in range(count)
    ]


def entry(uuid: GpuId) -> JournalEntry:
    return JournalEntry(
        uuid=uuid,
        prior_mw=650_000,
        issued_mw=(300_000,),
        current_mw=300_000,
        run="",
        boot_id=IDENTITY.boot_id,
        driver_start=IDENTITY.driver_start,
        how="controller",
    )


class Rig:
    """GPUs, their journal, and one pass over them."""

    def __init__(self, folder: Path, devices: MemoryGpuDevices) -> None:
        self.devices = devices
        self.folder = folder
        self.journal = Journal(folder / "journal", IDENTITY.boot_id, IDENTITY.driver_start)
        for uuid in devices.gpus:
            self.journal.write(entry(uuid))

    def restore(self, identity: HostIdentity = IDENTITY) -> Restored:
        hardware = Hardware(
            devices=self.devices,
            journal_folder=self.folder / "journal",
            identity=lambda: identity,
            gres_files=dict,
        )
        audit = AuditLog(self.folder / "audit.jsonl", actor="node:n1")
        try:
            return asyncio.run(restore_all(hardware, audit, "window over"))
        finally:
            audit.close()

    def told(self) -> list[tuple[str, str]]:
        """What the audit says, in order: event and GPU."""
        lines = (self.folder / "audit.jsonl").read_text().splitlines()
        return [(record["event"], record["uuid"]) for record in map(json.loads, lines)]

    def requested(self) -> list[int]:
        return [gpu.requested_mw for gpu in self.devices.gpus.values()]

    def current(self) -> list[int | None]:
        entries = (self.journal.read(uuid) for uuid in self.devices.gpus)
        return [entry.current_mw for entry in entries if isinstance(entry, JournalEntry)]


def test_a_cap_that_outlived_another_start_of_the_driver_goes_too(tmp_path: Path) -> None:
    """The sign of a driver's start may mislead; a cap that stands is ours, and nobody else would take it away."""
    rig = Rig(tmp_path, MemoryGpuDevices(boards()))
    rig.devices.write_foreign("GPU-1", 333_000)
    rig.devices.reset("GPU-2")
    restored = rig.restore(HostIdentity(boot_id=IDENTITY.boot_id, driver_start="d2"))
    assert restored.done == ["GPU-0", "GPU-3"]
    assert rig.requested() == [650_000, 333_000, 700_000, 650_000]


def test_a_driver_that_is_gone_took_the_caps_of_its_time_along(tmp_path: Path) -> None:
    rig = Rig(tmp_path, MemoryGpuDevices(boards()))
    rig.devices.fail("list", LibraryGoneError("no driver"))
    assert rig.restore(HostIdentity(boot_id=IDENTITY.boot_id, driver_start="unknown")) == Restored()
    with pytest.raises(LibraryGoneError):
        rig.restore()


class WrittenMeanwhile(MemoryGpuDevices):
    """Somebody sets a new limit between our last look and our set."""

    async def set_limit(self, uuid: GpuId, cap_mw: int) -> DeviceLimits:
        if not self.sets:
            self.write_foreign(uuid, 500_000)
        return await super().set_limit(uuid, cap_mw)


def test_a_limit_written_just_before_the_restore_is_put_back_and_told(tmp_path: Path) -> None:
    rig = Rig(tmp_path, WrittenMeanwhile(boards(1)))
    restored = rig.restore()
    assert (restored.done, restored.conflicts, restored.failed) == ([], ["GPU-0"], {})
    assert rig.devices.sets == [("GPU-0", 650_000), ("GPU-0", 500_000)]
    assert rig.requested() == [500_000]
    assert [event for event, _ in rig.told()] == ["set", "conflict", "set", "readback"]
    left = rig.journal.read("GPU-0")
    assert isinstance(left, JournalEntry) and (left.prior_mw, left.current_mw) == (500_000, None)


class HangsOnceListed(MemoryGpuDevices):
    """The first GPU answers the listing and nothing after it."""

    async def list_devices(self) -> tuple[tuple[DeviceInfo, ...], tuple[DeviceFailure, ...]]:
        listed = await super().list_devices()
        self.hanging.add("GPU-0")
        return listed


def test_a_gpu_that_hangs_and_one_that_fails_hold_up_nobody(tmp_path: Path) -> None:
    devices = HangsOnceListed(boards())
    devices.fail("set", LostError("fell off", uuid="GPU-1"))
    rig = Rig(tmp_path, devices)
    restored = rig.restore()
    assert sorted(restored.done) == ["GPU-2", "GPU-3"]
    assert set(restored.failed) == {"GPU-0", "GPU-1"} and restored.failed["GPU-1"] == "fell off"
    assert rig.requested() == [300_000, 300_000, 650_000, 650_000]
    assert rig.current() == [300_000, 300_000, None, None]
    told = rig.told()
    assert told.index(("set_failed", "GPU-0")) > max(
        told.index(("readback", uuid)) for uuid in ("GPU-2", "GPU-3")
    ), "the others were done before the first gave up"
    rig.devices = MemoryGpuDevices(devices.gpus.values())
    assert sorted(rig.restore().done) == ["GPU-0", "GPU-1"]
    assert rig.requested() == [650_000] * 4


class Surprises(MemoryGpuDevices):
    """A binding without types can raise anything."""

    async def set_limit(self, uuid: GpuId, cap_mw: int) -> DeviceLimits:
        if uuid == "GPU-0":
            raise ZeroDivisionError
        return await super().set_limit(uuid, cap_mw)


def test_a_fault_of_ours_at_one_gpu_leaves_no_other_capped(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Surprises(boards(2)))
    restored = rig.restore()
    assert restored.failed == {"GPU-0": "internal error: ZeroDivisionError()"}
    assert rig.requested() == [300_000, 650_000]


def test_an_unreadable_entry_hides_no_other_and_its_gpu_is_not_touched(tmp_path: Path) -> None:
    rig = Rig(tmp_path, MemoryGpuDevices(boards(3)))
    (tmp_path / "journal" / "GPU-0.json").write_bytes(bytes(200))
    (tmp_path / "journal" / "notes.txt").write_text("an admin's")
    restored = rig.restore()
    assert set(restored.unreadable) == {"GPU-0", "notes.txt"} and restored.failed == {}
    assert rig.requested() == [300_000, 650_000, 650_000]


def test_a_gpu_that_is_not_there_is_told_and_one_that_never_was_ours_is_not(tmp_path: Path) -> None:
    devices = MemoryGpuDevices(boards(3))
    rig = Rig(tmp_path, devices)
    rig.journal.remove("GPU-2")
    devices.fail("list", LostError("fell off", uuid="GPU-2"))
    del devices.gpus["GPU-1"]
    restored = rig.restore()
    assert (restored.done, restored.failed) == (["GPU-0"], {"GPU-1": "the GPU is not listed"})


def test_a_restore_that_cannot_be_written_down_is_told_as_that_and_made_good_later(tmp_path: Path) -> None:
    rig = Rig(tmp_path, MemoryGpuDevices(boards(2)))
    disk = DiskFull(tmp_path / "journal", IDENTITY.boot_id, IDENTITY.driver_start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slurm_pfi.node.restore.Journal", lambda *_: disk)
        restored = rig.restore()
    assert all("no limit of ours stands, but the journal" in why for why in restored.failed.values())
    assert len(restored.failed) == 2 and rig.requested() == [650_000] * 2
    assert rig.current() == [300_000] * 2
    again = rig.restore()
    assert sorted(again.done) == ["GPU-0", "GPU-1"] and rig.current() == [None, None]
    kept = rig.journal.read("GPU-0")
    assert isinstance(kept, JournalEntry)
    assert (kept.prior_mw, kept.how, kept.issued_mw) == (650_000, "controller", (300_000,))


class DiskFull(Journal):
    """No room for another entry."""

    def write(self, entry: JournalEntry) -> None:
        raise JournalError("No space left on device")


class SomebodyWrites(MemoryGpuDevices):
    """While the first GPU is being restored, somebody sets the limit of another."""

    async def set_limit(self, uuid: GpuId, cap_mw: int) -> DeviceLimits:
        limits = await super().set_limit(uuid, cap_mw)
        if uuid == "GPU-0":
            self.write_foreign("GPU-1", 310_000)
        return limits


def test_a_limit_written_while_others_are_restored_is_left_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SomebodyWrites(boards(3)))
    restored = rig.restore()
    assert (sorted(restored.done), restored.conflicts, restored.failed) == (["GPU-0", "GPU-2"], ["GPU-1"], {})
    assert rig.requested() == [650_000, 310_000, 650_000]
    told = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    (conflict,) = [record for record in told if record["event"] == "conflict"]
    assert (conflict["uuid"], conflict["ours_mw"], conflict["found_mw"]) == ("GPU-1", 300_000, 310_000)
    assert rig.current() == [None, None, None]
