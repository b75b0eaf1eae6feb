"""One NVML process as the agent sees it: started, asked with deadlines, ended. It never blocks the event loop.

The process runs in Python's isolated mode (``-I``): a root daemon must not load code from PYTHONPATH, the user's
site folder or the working folder. Packages of the environment that the agent itself runs in are found all the same.
LD_LIBRARY_PATH and the rest of the environment are handed on, because the loader needs them to find the library.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import msgspec

from ..model import GpuId
from .device import DeadlineError, DeviceError, LibraryGoneError
from .wire import Call, Frames, Reply, Request, SetLimit, pack, to_error

_END_S: Final = 1.0
"""How long an ended process is waited for. One that is stuck in the driver outlives even SIGKILL."""

_POLL_S: Final = 0.1

_ENDED_BY_OTHERS: Final = (-signal.SIGKILL, -signal.SIGTERM, 0, 1)
"""Ends that say nothing against a call: killed from outside, ended by us, or by itself because the library is gone."""

_LEAST_GRACE_S: Final = 0.05
"""How much longer than the others a call may take at least, when its answer is not waited for."""


class PendingError(DeviceError):
    """The call is under way, and its answer was not waited for. It stays within this package."""


Outcome: TypeAlias = Reply | DeviceError
"""What became of a call. Errors are handed on as values, because nobody may be waiting for them any more."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A call and the device that it is about. While its UUID is not known, ``place`` stands for it."""

    call: Call
    device: GpuId = ""
    place: str = ""

    @property
    def lane(self) -> str:
        """What the call's device is known by: calls of one lane follow one another."""
        return self.device or self.place

    @property
    def sets(self) -> bool:
        return isinstance(self.call, SetLimit)

    @property
    def uuid(self) -> GpuId:
        """The device's UUID where the call names it; what is at an index today, only the answer says."""
        return getattr(self.call, "uuid", "")

    @property
    def name(self) -> str:
        name = type(self.call).__name__
        return f"{self.uuid}: {name}" if self.uuid else name


class Listener(Protocol):
    """Who is told what happens to a process, call by call, whether or not anybody still waits for the answer."""

    def answered(self, process: NvmlProcess, ask: Ask, outcome: Outcome) -> None: ...
    def was_late(self, process: NvmlProcess, ask: Ask, error: DeadlineError) -> None: ...
    def died(
        self, process: NvmlProcess, asks: tuple[Ask, ...], error: LibraryGoneError, *, crash: bool
    ) -> None: ...


@dataclass(slots=True)
class _InFlight:
    ask: Ask
    future: asyncio.Future[Outcome]
    timer: asyncio.TimerHandle
    late: bool = False


class NvmlProcess(asyncio.Protocol):
    """Made by ``launch``."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.listener: Listener | None = None
        self.lanes: set[str] = set()
        """Every device that it was ever asked about, and what else it has not answered."""
        self._popen = popen
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()
        self._number = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._overdue: dict[str, _InFlight] = {}
        self._ready: asyncio.Future[Outcome] = self._loop.create_future()
        self._buried = asyncio.Event()
        self._burial: asyncio.Task[None] | None = None
        self._why = ""
        self._ended = ""

    @classmethod
    async def launch(cls, environment: Mapping[str, str] | None) -> NvmlProcess:
        """Start it; then wait until it is ``ready``. Raises LibraryGoneError when it cannot be started."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise LibraryGoneError(f"the NVML process cannot be started: {error}", asked=False) from error
        command = [sys.executable, "-I", "-m", "slurm_pfi.gpu.child", str(os.getpid())]
        end = theirs.fileno()
        whole = None if environment is None else dict(environment)
        try:
            popen = subprocess.Popen(command, stdin=end, stdout=end, env=whole, cwd="/")
        except OSError as error:
            ours.close()
            raise LibraryGoneError(f"the NVML process cannot be started: {error}", asked=False) from error
        finally:
            theirs.close()
        process = cls(popen)
        await process._loop.create_connection(lambda: process, sock=ours)
        return process

    async def ready(self, deadline_s: float) -> None:
        """Wait for the library. Raises LibraryGoneError when it fails or takes too long: then it has to be killed."""
        try:
            async with asyncio.timeout(deadline_s):
                first = await asyncio.shield(self._ready)
        except TimeoutError as error:
            why = f"the NVML process was not ready within {deadline_s:g} s"
            raise LibraryGoneError(why, asked=False) from error
        if isinstance(first, DeviceError):
            raise first

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone; asking also takes its exit status, so that no zombie stays."""
        return self._popen.poll() is not None

    @property
    def setting(self) -> bool:
        """Whether a set that is not given up is under way."""
        return any(call.ask.sets and not call.late for call in self._in_flight.values())

    @property
    def late_lanes(self) -> set[str]:
        """Lanes in which a call hangs."""
        return {call.ask.lane for call in self._in_flight.values() if call.late}

    @property
    def late_sets(self) -> set[str]:
        """Lanes in which a set hangs, which may still come into force."""
        return {call.ask.lane for call in self._in_flight.values() if call.ask.sets and call.late}

    def ask(self, asks: Iterable[Ask], deadline_s: float) -> list[asyncio.Future[Outcome]]:
        """Send these calls at once. Each future gets its outcome, at the deadline at the latest: DeadlineError."""
        until_ns = time.monotonic_ns() + round(deadline_s * 1e9)
        frames, futures = [], []
        for ask in asks:
            self._number += 1
            number, future = self._number, self._loop.create_future()
            timer = self._loop.call_later(deadline_s, self._late, number, deadline_s)
            self._in_flight[number] = _InFlight(ask, future, timer)
            self.lanes.add(ask.lane)
            request = Request(number=number, device=ask.device, until_ns=until_ns, call=ask.call)
            frames.append(pack(request))
            futures.append(future)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(frames))
        return futures

    async def ask_in_a_hurry(self, asks: Sequence[Ask], deadline_s: float) -> list[Outcome]:
        """As ``ask``, and wait for the outcomes, but for those that take much longer than the others: PendingError.

        The lane of such a call is not asked again in this way before it has answered, and that answer is then the
        outcome: else a device that is always slower than the others would never be heard.
        """
        futures = {ask: future for ask in asks if (future := self._earlier(ask)) is not None}
        fresh = [ask for ask in asks if ask not in futures]
        asked = self.ask(fresh, deadline_s)
        if asked:
            await _most(asked)
        futures.update(zip(fresh, asked, strict=True))
        waiting = {future for future in futures.values() if not future.done()}
        self._overdue.update(
            {call.ask.lane: call for call in self._in_flight.values() if call.future in waiting}
        )
        return [
            futures[ask].result()
            if futures[ask].done()
            else PendingError(f"{ask.name}: no answer yet", uuid=ask.uuid)
            for ask in asks
        ]

    def _earlier(self, ask: Ask) -> asyncio.Future[Outcome] | None:
        """What is still to come, or has come since, of the last call in this lane that was not waited for."""
        call = self._overdue.get(ask.lane)
        if call is None or not call.future.done():
            return None if call is None else call.future
        del self._overdue[ask.lane]
        too_little = getattr(call.ask.call, "quick", False) and not getattr(ask.call, "quick", False)
        return None if too_little or isinstance(call.future.result(), DeadlineError) else call.future

    async def drained(self) -> None:
        """Wait for the calls under way; each has its deadline."""
        waiting = [call.future for call in self._in_flight.values() if not call.late]
        if waiting:
            await asyncio.wait(waiting)

    async def comes_back(self, patience_s: float) -> bool:
        """Wait for the calls that hang; False if one does not come back, or the process ends."""
        until_s = self._loop.time() + patience_s
        while self.late_lanes and self._loop.time() < until_s:
            await asyncio.sleep(_POLL_S)
        return not self.late_lanes and not self._buried.is_set()

    async def end(self) -> bool:
        """Close its input, so that it ends by itself and lets go of every handle; then make sure. As ``kill``."""
        self._ended = "the NVML process was ended"
        if self._transport is not None:
            self._transport.close()
        await self._gone(_END_S)
        return await self.kill()

    async def kill(self, why: str = "the NVML process was ended") -> bool:
        """End it for good; False when it is stuck in the driver and still there. Calls under way are told why."""
        self._ended = self._ended or why
        if self._transport is not None:
            self._transport.abort()
        if not self.has_ended:
            self._popen.kill()
            await self._gone(_END_S)
        if self._transport is not None:
            await self._buried.wait()
        return self.has_ended

    # ------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._take(msgspec.msgpack.decode(body, type=Reply))
        except (ValueError, msgspec.DecodeError) as error:
            self._why = f"the NVML process sent nonsense: {error}"
            self._popen.kill()
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._burial = self._loop.create_task(self._bury())

    # ------------------------------------------------------------------------------------------------

    def _take(self, reply: Reply) -> None:
        if reply.number == 0 and not self._ready.done():
            self._ready.set_result(reply if reply.failed is None else to_error(reply.failed))
            return
        call = self._in_flight.pop(reply.number, None)
        if call is None:
            raise ValueError(f"an answer to {reply.number}, which was not asked")
        call.timer.cancel()
        if not call.ask.device:
            self.lanes.discard(call.ask.lane)
        outcome = reply if reply.failed is None else to_error(reply.failed)
        if self.listener is not None:
            self.listener.answered(self, call.ask, outcome)
        _settle(call.future, outcome)

    def _late(self, number: int, deadline_s: float) -> None:
        call = self._in_flight[number]
        call.late = True
        ask = call.ask
        error = DeadlineError(f"{ask.name}: no answer from NVML in {deadline_s:g} s", uuid=ask.uuid)
        if self.listener is not None:
            self.listener.was_late(self, ask, error)
        _settle(call.future, error)

    async def _bury(self) -> None:
        """Find out how it ended, and answer what is left."""
        await self._gone(_END_S)
        code = self._popen.poll()
        how = "" if code is None else f" of signal {-code}" if code < 0 else f" with exit code {code}"
        why = self._why or self._ended or f"the NVML process died{how}"
        crash = bool(self._why) or (code is not None and code not in _ENDED_BY_OTHERS)
        calls = tuple(self._in_flight.values())
        self._in_flight.clear()
        if self.listener is not None and not self._ended:
            asks = tuple(call.ask for call in calls if not call.late)
            self.listener.died(self, asks, LibraryGoneError(why), crash=crash)
        for call in calls:
            call.timer.cancel()
            _settle(call.future, LibraryGoneError(f"{call.ask.name}: {why}", uuid=call.ask.uuid))
        _settle(self._ready, LibraryGoneError(why))
        self._buried.set()

    async def _gone(self, patience_s: float) -> None:
        """Wait for the process to end; poll, because a process handle cannot be awaited on every kernel we run on."""
        until_s = self._loop.time() + patience_s
        while self._popen.poll() is None and self._loop.time() < until_s:
            await asyncio.sleep(0.005)


async def _most(futures: list[asyncio.Future[Outcome]]) -> None:
    """Wait for half of them, and then as long again, at least 50 ms, for the rest."""
    loop = asyncio.get_running_loop()
    began_s, enough = loop.time(), loop.create_future()
    missing = len(futures)

    def is_enough() -> None:
        if not enough.done():
            enough.set_result(None)

    def one_more(_: asyncio.Future[Outcome]) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            is_enough()
        elif missing == len(futures) // 2:
            loop.call_later(max(_LEAST_GRACE_S, loop.time() - began_s), is_enough)

    for future in futures:
        future.add_done_callback(one_more)
    await enough


def _settle(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():  # whoever asked may have been cancelled
        future.set_result(outcome)
