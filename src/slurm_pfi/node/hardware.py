"""The node's GPUs as the core wants to hear of them: list, journal entries and gres positions in one event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from ..gpu.device import DeviceError, DeviceFailure, DeviceInfo, DeviceLimits, GpuDevices, LostError
from ..gpu.identity import HostIdentity, IdentityError
from ..gpu.journal import Journal, JournalEntry, JournalError, Missing, Stale, Unreadable
from ..gpu.mapping import Unresolved, resolve
from ..model import GpuId
from .messages import DevicesFreed, DevicesListed, DevicesUnavailable, Sampled, SetDone, SetFailed
from .state import near

IN_DOUBT = frozenset({"DeadlineError", "LibraryGoneError", "UnknownDeviceError"})
LASTING = frozenset({"PermissionDeniedError", "UnsupportedError"})
_FILES_S: Final = 8.0  # slurmd is given 5 s of these
_LATE_FILES_S: Final = 2.0  # the same where the file system was slow to answer already
_SIGN_S: Final = 0.1
_NO_ANSWER: Final = "slurm.conf and gres.conf cannot be read: no answer; look at the file system they lie on"
T = TypeVar("T")


class FilesUnreadError(Exception):
    """Slurm's files cannot be read now. What they said last may still hold."""


@dataclass(frozen=True)
class _Understood:
    """Slurm's files as last understood, and where they have led since, in one start of the driver."""

    files: dict[int, str]
    sign: object
    host: HostIdentity
    minors: dict[GpuId, int]
    positions: dict[int, GpuId]


class _Aside(Generic[T]):
    """A call that may never come back, for Slurm's files may lie on a server that is gone: made by a thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._made: asyncio.Task[T] | None = None

    async def result(self, wait_s: float) -> T:
        """Wait so long at most. Raises TimeoutError; then it is not made again before it has come back."""
        if self._made is None or self._made.done():
            self._made = asyncio.create_task(asyncio.to_thread(self._call))
        await asyncio.wait({self._made}, timeout=wait_s)
        if not self._made.done():
            raise TimeoutError
        return self._made.result()


@dataclass
class Hardware:
    """GPUs and the record of their limits. ``identity`` and ``gres_files`` are read anew at each listing.

    ``gres_files`` gives the device file of each position in gres.conf, or a text that says why it cannot; it raises
    FilesUnreadError where trying again may help.
    ``map_sign`` is cheap and differs when positions may lead elsewhere than at the last listing; it raises OSError
    where it cannot be told. Threads call both.
    ``may_set`` False: the driver will take no limit from this process, which is said without trying.
    ``may_replace``, set by who knows, says whether a process that serves GPUs may be replaced for one that hangs.
    """

    devices: GpuDevices
    journal_folder: Path
    identity: Callable[[], HostIdentity]
    gres_files: Callable[[], dict[int, str] | str]
    journal: Journal | None = None
    map_sign: Callable[[], object] = lambda: None
    may_set: bool = True
    may_replace: Callable[[], bool] = lambda: True
    _listed_with: object = None
    _understood: _Understood | None = None

    def __post_init__(self) -> None:
        self._files = _Aside(self.gres_files)
        self._sign = _Aside(self.map_sign)

    async def look(self) -> DevicesListed | DevicesUnavailable:
        """Enumerate. Never raises for what a device, a driver or a file may do."""
        # First, for slurmd may have to be asked: what GPUs say must not be old when it is told.
        files = await self._read_files()
        try:
            infos, failures = await self.devices.list_devices()
            identity = self.identity()
        except (DeviceError, IdentityError) as error:
            return DevicesUnavailable(error=f"GPUs cannot be listed: {error}")
        entries, lost = self._entries(infos, identity)
        positions, map_fault = self._positions(files, infos, failures, identity)
        return DevicesListed(
            devices=infos if self.may_set else tuple(map(_not_settable, infos)),
            failures=(*failures, *_unlisted(lost, failures)),
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
            samples = await self.devices.sample(uuids, activity=activity, quick=quick, hurry=True)
            changed = not quick and await self._map_changed()
            return Sampled(samples=samples, quick=quick, activity=activity, map_changed=changed)
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

    async def _map_changed(self) -> bool:
        try:
            return self._listed_with != await self._sign.result(_SIGN_S)
        except OSError:  # no answer in time, too
            return False

    async def _read_files(self) -> dict[int, str] | str | FilesUnreadError:
        wait_s = _FILES_S
        try:
            self._listed_with = await self._sign.result(_SIGN_S)
        except OSError:
            # The sign of the last listing stays: where it has changed since, one more listing follows.
            wait_s = min(_FILES_S, _LATE_FILES_S)
        try:
            return await self._files.result(wait_s)
        except TimeoutError:
            return FilesUnreadError(_NO_ANSWER)
        except FilesUnreadError as error:
            return error

    def _positions(
        self,
        read: dict[int, str] | str | FilesUnreadError,
        infos: tuple[DeviceInfo, ...],
        failures: tuple[DeviceFailure, ...],
        host: HostIdentity,
    ) -> tuple[dict[int, GpuId], str]:
        """The GPU of each position, and why not of all.

        Files that cannot be read lead where they led, as long as the driver and its GPUs are the same.
        """
        last = self._understood if self._understood and self._understood.host == host else None
        if isinstance(read, dict):
            files, sign, unread = read, self._listed_with, ""
        elif last is not None and self._still_hold(read, last, infos):
            files, sign, unread = last.files, last.sign, f"{read}; positions stay as they were last read"
        else:
            return {}, str(read)
        found = resolve(files, infos)
        positions = {place: to for place, to in found.items() if not isinstance(to, Unresolved)}
        led = {p: to for p, to in last.positions.items() if last.files[p] == files.get(p)} if last else {}
        named = {failure.uuid for failure in failures}  # a GPU that is lost is one fault, and not gres.conf's
        lost = "; ".join(
            f"position {place}: {to.reason}"
            for place, to in found.items()
            if isinstance(to, Unresolved) and led.get(place) not in named
        )
        self._understood = _Understood(
            files=files,
            sign=sign,
            host=host,
            minors=(last.minors if last else {}) | {info.uuid: info.minor for info in infos},
            positions=led | positions,
        )
        return positions, "; ".join(
            text for text in (unread, f"gres.conf does not lead to every GPU: {lost}" if lost else "") if text
        )

    def _still_hold(
        self, read: str | FilesUnreadError, last: _Understood, infos: tuple[DeviceInfo, ...]
    ) -> bool:
        """Whether the files last understood are the ones to go by: not where they now say what is not understood."""
        changed = isinstance(read, str) and self._listed_with != last.sign
        return not changed and all(last.minors.get(info.uuid) == info.minor for info in infos)

    async def free(self) -> DevicesFreed:
        """Let go of every GPU; the next question takes them up again."""
        await self.devices.release()
        return DevicesFreed()

    def _entries(
        self, infos: tuple[DeviceInfo, ...], identity: HostIdentity
    ) -> tuple[dict[GpuId, JournalEntry | str | None], tuple[JournalEntry, ...]]:
        """What the journal says of each GPU, and what it says of GPUs that are not listed."""
        try:
            self.journal = Journal(self.journal_folder, identity.boot_id, identity.driver_start)
            entries = {info.uuid: _entry(self.journal, info, identity) for info in infos}
            return entries, self.journal.sweep(entries)
        except JournalError as error:
            return {info.uuid: str(error) for info in infos}, ()


def _not_settable(info: DeviceInfo) -> DeviceInfo:
    capabilities = msgspec.structs.replace(info.capabilities, settable=False)
    return msgspec.structs.replace(info, capabilities=capabilities)


def _unlisted(
    lost: tuple[JournalEntry, ...], failures: tuple[DeviceFailure, ...]
) -> tuple[DeviceFailure, ...]:
    """A limit of ours on a GPU that is not there: an earlier agent's, for this one would miss the GPU by name."""
    named = {failure.uuid for failure in failures}
    return tuple(
        DeviceFailure(
            uuid=entry.uuid,
            kind=LostError.__name__,
            message=f"not listed, but the journal says that {entry.current_mw} mW of ours stands there",
        )
        for entry in lost
        if entry.uuid not in named
    )


def _entry(journal: Journal, info: DeviceInfo, identity: HostIdentity) -> JournalEntry | str | None:
    match journal.read(info.uuid):
        case JournalEntry() as entry:
            return entry
        case Unreadable() as unreadable:
            return unreadable.reason
        case Stale() as stale:
            return still_standing(stale, info.limits, identity)
        case Missing():
            return None


def still_standing(stale: Stale, limits: DeviceLimits, identity: HostIdentity) -> JournalEntry | None:
    """The entry, as one of now, where its cap is on the device though the driver has started anew; else None.

    It was set again before the restart was seen, or the sign of a restart misled us: without its record it would stay
    for ever. Else limits of another driver start died with it, and always those of another boot.
    """
    entry, found_mw = stale.entry, limits.requested_mw
    if entry.boot_id != identity.boot_id or entry.current_mw is None or found_mw == limits.default_mw:
        return None
    if not near(found_mw, entry.current_mw):
        return None
    return msgspec.structs.replace(entry, driver_start=identity.driver_start)
