"""Restoring prior limits without an agent: from the journal alone, each GPU on its own, only what is still ours."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ..gpu.device import DeviceError, DeviceInfo, DeviceLimits, DeviceSample
from ..gpu.journal import Journal, JournalEntry, JournalError, Unreadable
from ..model import GpuId
from ..store.audit import AuditLog
from .hardware import Hardware
from .limits import Rest, Set, Wanted, decide, first_sight
from .state import near

_SETTLE_S: Final = 2.0
_SETTLE_STEP_S: Final = 0.05


@dataclass
class Restored:
    """What became of the GPUs that held a limit of ours. ``failed`` gives the reason by UUID."""

    done: list[GpuId] = field(default_factory=list)
    conflicts: list[GpuId] = field(default_factory=list)
    failed: dict[GpuId, str] = field(default_factory=dict)


async def restore_all(hardware: Hardware, audit: AuditLog, why: str) -> Restored:
    """Bring every GPU whose journal entry says that a limit of ours stands back to its prior limit.

    Raises JournalError when the journal as a whole cannot be read, DeviceError when no GPU can be listed.
    """
    identity = hardware.identity()
    journal = Journal(hardware.journal_folder, identity.boot_id, identity.driver_start)
    result = Restored()
    entries: list[JournalEntry] = []
    for uuid, read in journal.read_all().items():
        if isinstance(read, Unreadable):
            result.failed[uuid] = f"journal entry unreadable: {read.reason}"
        elif isinstance(read, JournalEntry) and read.current_mw is not None:
            entries.append(read)
    if not entries:
        return result
    infos, failures = await hardware.devices.list_devices()
    result.failed.update({failure.uuid: failure.message for failure in failures if failure.uuid})
    listed = {info.uuid: info for info in infos}
    for entry in entries:
        info = listed.get(entry.uuid)
        if info is None:
            result.failed.setdefault(entry.uuid, "the GPU is not listed")
            continue
        try:
            await _restore(hardware, journal, audit, entry, info, result, why)
        except (DeviceError, JournalError) as error:
            result.failed[entry.uuid] = str(error)
            audit.write("set_failed", {"uuid": entry.uuid, "cap_mw": entry.prior_mw, "error": str(error)})
    return result


async def _restore(
    hardware: Hardware,
    journal: Journal,
    audit: AuditLog,
    entry: JournalEntry,
    info: DeviceInfo,
    result: Restored,
    why: str,
) -> None:
    """The same judgement as the agent's, carried out here for one GPU."""
    gpu = first_sight(await _now(hardware, info), None, entry, time.monotonic_ns())
    decision = decide(gpu, Wanted(cap_mw=entry.prior_mw, reason=f"restore: {why}"), time.monotonic_ns())
    resting = msgspec.structs.replace(entry, current_mw=None, run="")
    match decision:
        case Set():
            fields = {"uuid": entry.uuid, "cap_mw": decision.cap_mw, "reason": decision.reason}
            audit.write("set", {**fields, "run": "", "prior_mw": entry.prior_mw})
            limits = await hardware.devices.set_limit(entry.uuid, decision.cap_mw)
            if not near(limits.requested_mw, decision.cap_mw):
                raise DeviceError(f"accepted, but {limits.requested_mw} mW is read back", uuid=entry.uuid)
            journal.write(resting)
            limits = await _settled(hardware, entry.uuid, limits)
            read = {"requested_mw": limits.requested_mw, "enforced_mw": limits.enforced_mw}
            audit.write("readback", {"uuid": entry.uuid, **read, "cap_mw": decision.cap_mw})
            result.done.append(entry.uuid)
        case Rest() if decision.conflict_mw is not None:
            found = {"ours_mw": entry.current_mw, "found_mw": decision.conflict_mw}
            audit.write("conflict", {"uuid": entry.uuid, **found})
            journal.write(resting)
            result.conflicts.append(entry.uuid)
        case _:
            journal.write(resting)
            result.done.append(entry.uuid)


async def _now(hardware: Hardware, info: DeviceInfo) -> DeviceInfo:
    """The limits as they are at this instant: since the listing, other GPUs may have taken seconds."""
    for sample in await hardware.devices.sample((info.uuid,)):
        if isinstance(sample, DeviceSample) and sample.requested_mw and sample.enforced_mw:
            read = {"requested_mw": sample.requested_mw, "enforced_mw": sample.enforced_mw}
            return msgspec.structs.replace(info, limits=msgspec.structs.replace(info.limits, **read))
    return info


async def _settled(hardware: Hardware, uuid: GpuId, limits: DeviceLimits) -> DeviceLimits:
    """The limits once the raised one is in force, or as they are when another limit keeps it down."""
    ends_s = time.monotonic() + _SETTLE_S
    while not near(limits.enforced_mw, limits.requested_mw) and time.monotonic() < ends_s:
        await asyncio.sleep(_SETTLE_STEP_S)  # the device tells of no change; it must be asked
        for sample in await hardware.devices.sample((uuid,)):
            if isinstance(sample, DeviceSample) and sample.enforced_mw is not None:
                limits = msgspec.structs.replace(limits, enforced_mw=sample.enforced_mw)
    return limits
