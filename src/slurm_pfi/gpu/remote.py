"""The GPUs of this node through NVML in a supervised process: a library that hangs or crashes costs one device.

Every call goes to one device with its own deadline. When a call hangs or brings the process down, that device is
held back for a while and a new process serves the others at once. While the library itself does not start, each try
waits longer than the one before, and calls in between fail at once with what went wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Hashable, Mapping
from typing import Final

from ..model import GpuId
from .device import (
    DeviceError,
    DeviceFailure,
    DeviceInfo,
    DeviceLimits,
    DeviceSample,
    LibraryGoneError,
    LostError,
)
from .process import NvmlProcess
from .wire import Call, Count, Describe, Reply, SetLimit, TakeSample, to_error

FIRST_BACK_OFF_S: Final = 1.0
MOST_BACK_OFF_S: Final = 60.0
_MOST_STUCK: Final = 3


class _BackOff:
    """After the n-th failure in a row nothing is tried for ``first_s`` x 2^(n-1), at most a minute."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._failures = 0
        self._until_s = 0.0
        self.error: DeviceError | None = None

    def fail(self, error: DeviceError) -> None:
        self._until_s = time.monotonic() + min(self._first_s * 2 ** min(self._failures, 16), MOST_BACK_OFF_S)
        self._failures += 1
        self.error = error

    def held(self) -> str:
        """What went wrong and how long it is too early for another try; empty when one may be made."""
        left_s = self._until_s - time.monotonic()
        return f"{self.error} (next try in {left_s:.1f} s)" if self.error is not None and left_s > 0 else ""


class RemoteGpuDevices:
    """Implements GpuDevices. Starts its process at the first call; ``close`` it in the end.

    ``deadline_s`` is for one call on one device, ``start_deadline_s`` for a new process to load its code.
    ``environment`` is that of the process, by default our own.
    """

    def __init__(
        self,
        *,
        deadline_s: float = 5.0,
        start_deadline_s: float = 10.0,
        environment: Mapping[str, str] | None = None,
        first_back_off_s: float = FIRST_BACK_OFF_S,
    ) -> None:
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._environment = environment
        self._first_back_off_s = first_back_off_s
        self._lock = asyncio.Lock()
        self._process: NvmlProcess | None = None
        self._stuck: list[NvmlProcess] = []
        self._back_off = _BackOff(first_back_off_s)
        self._held_back: dict[Hashable, _BackOff] = {}
        self._uuid_at: dict[tuple[int, int], GpuId] = {}
        self._known: dict[GpuId, None] = {}
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process that serves now; None when there is none."""
        return None if self._process is None else self._process.pid

    async def list_devices(self) -> tuple[tuple[DeviceInfo, ...], tuple[DeviceFailure, ...]]:
        """As the protocol says. A device seen before and missing now is reported by its UUID, once.

        Raises LibraryGoneError or DeadlineError when nothing at all can be said.
        """
        count = (await self._ask(Count())).count or 0
        infos: list[DeviceInfo] = []
        failures: list[DeviceFailure] = []
        error: DeviceError | None = None
        for index in range(count):
            try:
                infos.append(await self._describe(count, index))
            except DeviceError as failed:
                error = failed
                failures.append(_failure(failed, where=f"device {index} of {count}: "))
        if isinstance(error, LibraryGoneError) and not infos:
            raise error
        self._known.update(dict.fromkeys(info.uuid for info in infos))
        return tuple(infos), tuple(self._name_the_missing(infos, failures))

    async def set_limit(self, uuid: GpuId, cap_mw: int) -> DeviceLimits:
        """As the protocol says. After DeadlineError or LibraryGoneError the limit may or may not be in force.

        Raises UnknownDeviceError when the set was accepted but is not what is then requested (within 1 W).
        """
        reply = await self._ask(SetLimit(uuid=uuid, cap_mw=cap_mw), uuid)
        if reply.limits is None:
            raise LibraryGoneError(f"{uuid}: the NVML process gave no limits", uuid=uuid)
        return reply.limits

    async def sample(
        self, uuids: tuple[GpuId, ...], *, activity: bool = False
    ) -> tuple[DeviceSample | DeviceFailure, ...]:
        """As the protocol says; it never raises a DeviceError."""
        return tuple([await self._sample(uuid) for uuid in uuids])

    async def release(self) -> None:
        """End the process: that lets go of every handle. The next call starts a new one."""
        async with self._lock:
            await self._end_process()

    async def close(self) -> None:
        """Release for good. A process that is stuck in the driver is left to the kernel."""
        async with self._lock:
            self._closed = True
            await self._end_process()

    async def _describe(self, count: int, index: int) -> DeviceInfo:
        # A device that hangs cannot say who it is; then the one that was there last time is held back.
        place = (count, index)
        reply = await self._ask(Describe(index=index), key=self._uuid_at.get(place, place))
        if reply.info is None:
            raise LibraryGoneError("the NVML process gave no description")
        self._uuid_at[place] = reply.info.uuid
        return reply.info

    async def _sample(self, uuid: GpuId) -> DeviceSample | DeviceFailure:
        try:
            reply = await self._ask(TakeSample(uuid=uuid), uuid)
        except DeviceError as error:
            return _failure(error, uuid=uuid)
        if reply.sample is None:
            return _failure(LibraryGoneError("the NVML process gave no sample"), uuid=uuid)
        return reply.sample

    async def _ask(self, call: Call, uuid: GpuId = "", key: Hashable = None) -> Reply:
        """One request at a time, with all precautions. ``key`` names the device, by default its UUID."""
        key = key or uuid
        async with self._lock:
            self._check_held_back(key, uuid)
            if self._process is not None and self._process.has_ended:
                await self._lose(self._process)  # it died between two requests, which is no device's fault
            process = self._process or await self._start()
            try:
                reply = await process.ask(call, self._deadline_s, uuid)
            except DeviceError as error:  # it hangs or it died: this device is to blame, if one was asked
                await self._lose(process)
                if key and key not in self._held_back:
                    self._held_back[key] = _BackOff(self._first_back_off_s)
                (self._held_back[key] if key else self._back_off).fail(error)
                raise
            except BaseException:  # cancelled half-way: the next request would get the answer to this one
                await self._lose(process)
                raise
            if reply.failed is None:
                self._succeeded(key)
                return reply
            answer = to_error(reply.failed)
            if isinstance(answer, LibraryGoneError):
                await self._lose(process)  # it ends now, and a new one would soon hear the same
                self._back_off.fail(answer)
            else:
                self._succeeded(key)
            raise answer

    def _check_held_back(self, key: Hashable, uuid: GpuId) -> None:
        back_off = self._held_back.get(key)
        if back_off is not None and back_off.error is not None and (why := back_off.held()):
            raise type(back_off.error)(why, uuid=uuid)

    async def _start(self) -> NvmlProcess:
        if self._closed:
            raise LibraryGoneError("the GPUs were closed")
        if why := self._back_off.held():
            raise LibraryGoneError(why, code=self._back_off.error.code if self._back_off.error else None)
        self._stuck = [process for process in self._stuck if not process.has_ended]
        if len(self._stuck) >= _MOST_STUCK:
            pids = ", ".join(str(process.pid) for process in self._stuck)
            raise LibraryGoneError(
                f"earlier NVML processes are stuck in the driver (pids {pids}); reboot this node"
            )
        try:
            self._process = await NvmlProcess.start(self._start_deadline_s, self._environment)
        except LibraryGoneError as error:
            self._back_off.fail(error)
            raise
        return self._process

    def _succeeded(self, key: Hashable) -> None:
        self._back_off = _BackOff(self._first_back_off_s)
        self._held_back.pop(key, None)

    async def _lose(self, process: NvmlProcess) -> None:
        self._process = None
        with contextlib.suppress(asyncio.CancelledError):
            if not await asyncio.shield(process.kill()):
                self._stuck.append(process)

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()

    def _name_the_missing(
        self, infos: list[DeviceInfo], failures: list[DeviceFailure]
    ) -> list[DeviceFailure]:
        """Known devices that are not there stand for as many failures without a name: each is counted once."""
        named = [failure for failure in failures if failure.uuid]
        nameless = [failure for failure in failures if not failure.uuid]
        there = {info.uuid for info in infos} | {failure.uuid for failure in named}
        missing = [uuid for uuid in self._known if uuid not in there]
        if len(missing) == len(nameless) == 1:
            old = nameless[0]
            return [*named, DeviceFailure(uuid=missing[0], kind=old.kind, message=old.message)]
        lost = [
            DeviceFailure(uuid=uuid, kind=LostError.__name__, message=f"{uuid}: no longer listed")
            for uuid in missing
        ]
        return [*named, *lost, *nameless[len(missing) :]]


def _failure(error: DeviceError, *, uuid: GpuId = "", where: str = "") -> DeviceFailure:
    return DeviceFailure(uuid=uuid or error.uuid, kind=type(error).__name__, message=where + str(error))
