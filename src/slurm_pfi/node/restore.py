"""Restoring prior limits without an agent: from the journal alone, each GPU on its own, only what is still ours."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ..gpu.device import DeviceError, DeviceInfo, DeviceLimits, DeviceSample
from ..gpu.journal import Journal, JournalEntry, JournalError, Stale, Unreadable
from ..model import GpuId
from ..store.audit import AuditLog
from .hardware import Hardware, still_standing
from .limits import Rest, Set, Wanted, decide, first_sight
from .state import near

_SETTLE_S: Final = 2.0
_SETTLE_STEP_S: Final = 0.05
_EACH_S: Final = 30.0  # every call has its deadline; this is for what is not a call


@dataclass
class Restored:
    """What became of the GPUs that held a limit of ours, by UUID.

    ``failed``: what can be tried again. ``unreadable``: journal entries of no use; nothing on these GPUs was touched,
    and trying again is none either.
    """

    done: list[GpuId] = field(default_factory=list)
    conflicts: list[GpuId] = field(default_factory=list)
    failed: dict[GpuId, str] = field(default_factory=dict)
    unreadable: dict[GpuId, str] = field(default_factory=dict)


async def restore_all(hardware: Hardware, audit: AuditLog, why: str) -> Restored:
    """Bring every GPU whose journal entry says that a limit of ours stands back to its prior limit.

    All at once, each on its own: none waits for another, whatever that one does. Raises JournalError when the journal
    as a whole cannot be read, DeviceError when no GPU can be listed.
    """
    identity = hardware.identity()
    journal = Journal(hardware.journal_folder, identity.boot_id, identity.driver_start)
    result = Restored()
    entries: list[JournalEntry] = []
    stale: dict[GpuId, Stale] = {}
    for uuid, read in journal.read_all().items():
        if isinstance(read, Unreadable):
            result.unreadable[uuid] = f"journal entry unreadable: {read.reason}"
        elif isinstance(read, JournalEntry) and read.current_mw is not None:
            entries.append(read)
        elif isinstance(read, Stale):
            stale[uuid] = read
    if not entries and not stale:
        return result
    try:
        infos, failures = await hardware.devices.list_devices()
    except DeviceError:
        if entries:
            raise
        return result  # the driver that held these limits is gone
    for found in infos:
        if found.uuid in stale and (entry := still_standing(stale[found.uuid], found.limits, identity)):
            entries.append(entry)
    ours = {entry.uuid for entry in entries}
    result.failed.update({failure.uuid: failure.message for failure in failures if failure.uuid in ours})
    work = _Work(hardware, journal, audit, result, why)
    listed = {info.uuid: info for info in infos}
    tasks = []
    for entry in entries:
        info = listed.get(entry.uuid)
        if info is None:
            result.failed.setdefault(entry.uuid, "the GPU is not listed")
        else:
            tasks.append(work.restore(entry, info))
    await asyncio.gather(*tasks)
    return result


@dataclass(frozen=True)
class _Work:
    """What the restores of one pass share."""

    hardware: Hardware
    journal: Journal
    audit: AuditLog
    result: Restored
    why: str

    async def restore(self, entry: JournalEntry, info: DeviceInfo) -> None:
        """One GPU, bounded in time; whatever goes wrong with it is its own."""
        uuid = entry.uuid
        try:
            async with asyncio.timeout(_EACH_S):
                await self._restore(entry, info)
            return
        except TimeoutError:
            fault = f"not done within {_EACH_S:g} s"
        except (DeviceError, JournalError) as error:
            fault = str(error)
        except Exception as error:  # a fault of ours at one GPU must not leave the others capped
            fault = f"internal error: {error!r}"
        self.result.failed[uuid] = fault
        self.audit.write("set_failed", {"uuid": uuid, "cap_mw": entry.prior_mw, "error": fault})

    async def _restore(self, entry: JournalEntry, info: DeviceInfo) -> None:
        """The same judgement as the agent's, carried out here."""
        gpu = first_sight(await _now(self.hardware, info), None, entry, time.monotonic_ns())
        want = Wanted(cap_mw=entry.prior_mw, reason=f"restore: {self.why}")
        match decide(gpu, want, time.monotonic_ns()):
            case Set() as decision:
                await self._set(entry, decision, gpu.requested_mw)
            case Rest(conflict_mw=int() as found_mw):
                found = {"ours_mw": entry.current_mw, "found_mw": found_mw}
                self.audit.write("conflict", {"uuid": entry.uuid, **found})
                self._rest(entry)
                self.result.conflicts.append(entry.uuid)
            case _:
                self._rest(entry)
                self.result.done.append(entry.uuid)

    async def _set(self, entry: JournalEntry, decision: Set, seen_mw: int | None) -> None:
        """``seen_mw``: the limit that was judged, which may have been written anew since."""
        uuid, cap_mw = entry.uuid, decision.cap_mw
        limits = await self._ask(entry, cap_mw, decision.reason)
        found_mw = limits.replaced_mw
        known = (seen_mw, entry.prior_mw, *entry.issued_mw, *entry.lost_mw)
        if found_mw is None or any(near(found_mw, mw) for mw in known if mw is not None):
            self.result.done.append(uuid)
        else:  # somebody's new limit: it goes back, once, and is the limit before us from now on
            self.audit.write("conflict", {"uuid": uuid, "ours_mw": entry.current_mw, "found_mw": found_mw})
            self.result.conflicts.append(uuid)
            entry, cap_mw = msgspec.structs.replace(entry, prior_mw=found_mw, how="read"), found_mw
            limits = await self._ask(entry, cap_mw, "restore: somebody's new limit put back")
        self._rest(entry)
        limits = await _settled(self.hardware, uuid, limits)
        read = {"requested_mw": limits.requested_mw, "enforced_mw": limits.enforced_mw}
        self.audit.write("readback", {"uuid": uuid, **read, "cap_mw": cap_mw})

    async def _ask(self, entry: JournalEntry, cap_mw: int, reason: str) -> DeviceLimits:
        """Say it, then set it and see that it was taken."""
        fields = {
            "uuid": entry.uuid,
            "cap_mw": cap_mw,
            "reason": reason,
            "run": "",
            "prior_mw": entry.prior_mw,
        }
        self.audit.write("set", fields)
        limits = await self.hardware.devices.set_limit(entry.uuid, cap_mw)
        if not near(limits.requested_mw, cap_mw):
            raise DeviceError(f"accepted, but {limits.requested_mw} mW is read back", uuid=entry.uuid)
        return limits

    def _rest(self, entry: JournalEntry) -> None:
        try:
            self.journal.write(msgspec.structs.replace(entry, current_mw=None, run=""))
        except JournalError as error:
            raise JournalError(f"no limit of ours stands, but the journal still says so: {error}") from error


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
