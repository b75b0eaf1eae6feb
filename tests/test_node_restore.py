"""Restoring without an agent: each GPU on its own, and only what is still ours when its turn comes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from slurm_pfi.gpu.device import DeviceLimits
from slurm_pfi.gpu.identity import HostIdentity
from slurm_pfi.gpu.journal import Journal, JournalEntry
from slurm_pfi.gpu.memory import MemoryGpu, MemoryGpuDevices
from slurm_pfi.model import GpuId
from slurm_pfi.node.hardware import Hardware
from slurm_pfi.node.restore import restore_all
from slurm_pfi.store.audit import AuditLog

IDENTITY = HostIdentity(boot_id="boot-1", driver_start="d1")


class SomebodyWrites(MemoryGpuDevices):
    """While the first GPU is being restored, somebody sets the limit of another."""

    async def set_limit(self, uuid: GpuId, cap_mw: int) -> DeviceLimits:
        limits = await super().set_limit(uuid, cap_mw)
        if uuid == "GPU-0":
            self.write_foreign("GPU-1", 310_000)
        return limits


def test_a_limit_written_while_others_are_restored_is_left_alone(tmp_path: Path) -> None:
    gpus = [
        MemoryGpu(uuid=f"GPU-{n}", minor=n, index=n, requested_mw=300_000, enforced_mw=300_000)
        for n in range(3)
    ]
    devices = SomebodyWrites(gpus)
    journal = Journal(tmp_path / "journal", IDENTITY.boot_id, IDENTITY.driver_start)
    for gpu in gpus:
        journal.write(
            JournalEntry(
                uuid=gpu.uuid,
                prior_mw=650_000,
                issued_mw=(300_000,),
                current_mw=300_000,
                run="",
                boot_id=IDENTITY.boot_id,
                driver_start=IDENTITY.driver_start,
                how="read",
            )
        )
    hardware = Hardware(
        devices=devices, journal_folder=tmp_path / "journal", identity=lambda: IDENTITY, gres_files=dict
    )
    audit = AuditLog(tmp_path / "audit.jsonl", actor="node:n1")
    restored = asyncio.run(restore_all(hardware, audit, "window over"))
    audit.close()
    assert (restored.done, restored.conflicts, restored.failed) == (["GPU-0", "GPU-2"], ["GPU-1"], {})
    assert [gpu.requested_mw for gpu in gpus] == [650_000, 310_000, 650_000]
    told = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    (conflict,) = [record for record in told if record["event"] == "conflict"]
    assert (conflict["uuid"], conflict["ours_mw"], conflict["found_mw"]) == ("GPU-1", 300_000, 310_000)
    entries = [journal.read(gpu.uuid) for gpu in gpus]
    assert [entry.current_mw for entry in entries if isinstance(entry, JournalEntry)] == [None, None, None]
