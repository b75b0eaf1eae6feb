"""The node's GPUs as the core wants to hear of them: list, journal entries and gres positions in one event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..gpu.device import DeviceError, DeviceFailure, DeviceInfo, GpuDevices
from ..gpu.identity import HostIdentity, IdentityError
from ..gpu.journal import Journal, JournalEntry, JournalError, Missing, Stale, Unreadable
from ..gpu.mapping import Unresolved, resolve
from ..model import GpuId
from .messages import DevicesFreed, DevicesListed, DevicesUnavailable, Sampled, SetDone, SetFailed

IN_DOUBT = frozenset({"DeadlineError", "LibraryGoneError", "UnknownDeviceError"})
LASTING = frozenset({"PermissionDeniedError", "UnsupportedError"})


@dataclass
class Hardware:
    """GPUs and the record of their limits. ``identity`` and ``gres_files`` are read anew at each listing.

    ``gres_files`` gives the device file of each position in gres.conf, or a text that says why it cannot.
    ``may_replace``, set by who knows, says whether a process that serves GPUs may be replaced for one that hangs.
    """

    devices: GpuDevices
    journal_folder: Path
    identity: Callable[[], HostIdentity]
    gres_files: Callable[[], dict[int, str] | str]
    journal: Journal | None = None
    may_replace: Callable[[], bool] = lambda: True

    async def look(self) -> DevicesListed | DevicesUnavailable:
        """Enumerate. Never raises for what a device, a driver or a file may do."""
        try:
            infos, failures = await self.devices.list_devices()
            identity = self.identity()
        except (DeviceError, IdentityError) as error:
            return DevicesUnavailable(error=f"GPUs cannot be listed: {error}")
        entries = self._entries(infos, identity)
        # In a thread: slurmd may have to be asked, and caps must not wait for it.
        positions, map_fault = await asyncio.to_thread(self._positions, infos)
        return DevicesListed(
            devices=infos,
            failures=failures,
            journal=entries,
            positions=positions,
            driver_start=identity.driver_start,
            map_fault=map_fault,
        )

    def write(self, entry: JournalEntry) -> None:
        """Make an entry durable. Raises JournalError."""
        if self.journal is None:
            raise JournalError("the journal has not been opened")
        self.journal.write(entry)

    async def sample(self, uuids: tuple[GpuId, ...], *, quick: bool, activity: bool = False) -> Sampled:
        """Read limits and draw, with ``activity`` what they do too; a library that is gone is a failure of each."""
        try:
            samples = await self.devices.sample(uuids, activity=activity, quick=quick)
            return Sampled(samples=samples, quick=quick, activity=activity)
        except DeviceError as error:
            kind, message = type(error).__name__, str(error)
            failures = tuple(DeviceFailure(uuid=uuid, kind=kind, message=message) for uuid in uuids)
            return Sampled(samples=failures, quick=quick)

    async def set_limit(self, uuid: GpuId, cap_mw: int) -> SetDone | SetFailed:
        """Ask for a limit and read it back."""
        try:
            return SetDone(uuid=uuid, limits=await self.devices.set_limit(uuid, cap_mw))
        except DeviceError as error:
            kind = type(error).__name__
            return SetFailed(
                uuid=uuid,
                error=f"{kind}: {error}",
                in_doubt=error.asked and kind in IN_DOUBT,
                lasting=kind in LASTING,
            )

    async def free(self) -> DevicesFreed:
        """Let go of every GPU; the next question takes them up again."""
        await self.devices.release()
        return DevicesFreed()

    def _entries(
        self, infos: tuple[DeviceInfo, ...], identity: HostIdentity
    ) -> dict[GpuId, JournalEntry | str | None]:
        try:
            self.journal = Journal(self.journal_folder, identity.boot_id, identity.driver_start)
            return {info.uuid: _entry(self.journal, info.uuid) for info in infos}
        except JournalError as error:
            return {info.uuid: str(error) for info in infos}

    def _positions(self, infos: tuple[DeviceInfo, ...]) -> tuple[dict[int, GpuId], str]:
        files = self.gres_files()
        if isinstance(files, str):
            return {}, files
        found = resolve(files, infos)
        lost = [f"position {p}: {to.reason}" for p, to in found.items() if isinstance(to, Unresolved)]
        positions = {p: to for p, to in found.items() if not isinstance(to, Unresolved)}
        return positions, f"gres.conf does not lead to every GPU: {'; '.join(lost)}" if lost else ""


def _entry(journal: Journal, uuid: GpuId) -> JournalEntry | str | None:
    match journal.read(uuid):
        case JournalEntry() as entry:
            return entry
        case Unreadable() as unreadable:
            return unreadable.reason
        case Missing() | Stale():
            return None  # limits of another boot or driver start died with it
