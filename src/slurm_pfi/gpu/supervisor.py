"""Keeps one NVML process serving: what hangs or crashes in the library costs its device, and the others go on.

A hang. The device is held back: its calls fail at once, the others go on in the same process, where its thread stays
stuck. When its time to wait is over it is tried in a second process, beside the one that serves. If it answers there,
that process takes over (so service has no gap, and a limit is never lost by the last client leaving while persistence
mode is off), but only when no set is under way and the agent agrees. If every device hangs, the library does: the
process is replaced at once.

A crash. Devices with calls under way are suspected: their next calls are made one at a time. The one in whose call it
crashes again is held back; the innocent are back with their next call. A device held back is tried again in a process
of its own, so that it harms no other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .backoff import BackOff
from .device import DeadlineError, DeviceError, LibraryGoneError
from .process import Ask, NvmlProcess, Outcome
from .wire import Count, Describe, TakeSample

_MOST_STUCK: Final = 3
_TAKE_OVER_S: Final = 30.0
"""How long a new process waits for its moment to take over before the device is held back again."""

_QUIET_POLL_S: Final = 0.02


@dataclass(slots=True)
class _Trouble:
    """What is held against a device since its last call of the same kind (set or read) that went well."""

    back_off: BackOff
    ask: Ask
    held: bool = False
    trial: asyncio.Task[None] | None = None

    def clears(self, ask: Ask) -> bool:
        return not self.held and ask.sets == self.ask.sets


class Supervisor:
    """Implements the Listener of its processes. One event loop uses it."""

    def __init__(
        self,
        *,
        deadline_s: float,
        start_deadline_s: float,
        environment: Mapping[str, str] | None,
        first_back_off_s: float,
        may_replace: Callable[[], bool],
    ) -> None:
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._environment = environment
        self._first_back_off_s = first_back_off_s
        self._may_replace = may_replace
        self._serving: NvmlProcess | None = None
        self._starting = asyncio.Lock()
        self._one_at_a_time = asyncio.Lock()
        self._library = BackOff(first_back_off_s)
        self._all_hung = False
        self._troubles: dict[str, _Trouble] = {}
        self._stuck: list[NvmlProcess] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process that serves now; None when there is none."""
        return None if self._serving is None else self._serving.pid

    async def ask(self, asks: Sequence[Ask]) -> list[Outcome]:
        """Make these calls, all at the same time but for suspects; one outcome each, in order. Never raises."""
        outcomes: dict[int, Outcome] = {}
        together, apart = [], []
        for place, ask in enumerate(asks):
            trouble = self._troubles.get(ask.lane)
            if trouble is not None and trouble.held:
                outcomes[place] = self._refuse(ask, trouble)
            elif trouble is not None and trouble.clears(ask):
                apart.append(place)
            else:
                together.append(place)
        outcomes |= zip(together, await self._send([asks[place] for place in together]), strict=True)
        for place in apart:
            async with self._one_at_a_time:
                trouble = self._troubles.get(asks[place].lane)
                if trouble is not None and trouble.held:
                    outcomes[place] = self._refuse(asks[place], trouble)
                else:
                    (outcomes[place],) = await self._send([asks[place]])
        return [outcomes[place] for place in range(len(asks))]

    async def release(self) -> None:
        """End every process: that lets go of all handles. The next call starts anew and blames nobody."""
        async with self._starting:
            for trouble in self._troubles.values():
                if trouble.trial is not None:
                    trouble.trial.cancel()
            self._troubles.clear()
            if self._serving is not None:
                serving, self._serving = self._serving, None
                self._run(self._end(serving, gently=True))
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Release for good. A process that is stuck in the driver is left to the kernel."""
        self._closed = True
        await self.release()

    # -------------------------------------------------------------------------------- what processes tell

    def answered(self, process: NvmlProcess, ask: Ask, outcome: Outcome) -> None:
        """Its thread is free, also if it comes late: what hung is over."""
        if isinstance(
            outcome, LibraryGoneError
        ):  # the process ends now, and a new one would soon hear the same
            self._library.fail(outcome)
            self._lose(process)
            return
        trouble = self._troubles.get(ask.lane)
        if (
            trouble is not None
            and trouble.held
            and trouble.trial is None
            and self._is_free(process, ask.lane)
        ):
            trouble.held = False
        if isinstance(outcome, DeadlineError):
            return
        self._library = BackOff(self._first_back_off_s)
        self._all_hung = False
        if trouble is not None and trouble.clears(ask):
            del self._troubles[ask.lane]

    def was_late(self, process: NvmlProcess, ask: Ask, error: DeadlineError) -> None:
        """Hold the device back. If no device is left, the library hangs as a whole."""
        trouble = self._blame(ask)
        if not trouble.held:
            trouble.held = True
            trouble.back_off.fail(error)
        hung = process.late_lanes
        if process is not self._serving or len(hung) < 2 or hung != process.lanes:
            return
        if self._all_hung:  # the second time in a row: no hurry any more
            self._library.fail(LibraryGoneError(f"every call to NVML hangs: {error}"))
        self._all_hung = True
        for lane in hung:
            self._troubles.pop(lane, None)
        self._lose(process)

    def died(
        self, process: NvmlProcess, asks: tuple[Ask, ...], error: LibraryGoneError, *, crash: bool
    ) -> None:
        """Suspect those whose calls were under way; hold back who is blamed again."""
        if process is self._serving:
            self._serving = None
        if not crash:
            return
        again = [ask for ask in asks if ask.lane in self._troubles and self._troubles[ask.lane].clears(ask)]
        for ask in again:
            trouble = self._troubles[ask.lane]
            trouble.held = True
            trouble.back_off.fail(LibraryGoneError(f"{ask.name}: {error}", uuid=ask.uuid))
        if not again:
            for ask in asks:
                self._blame(ask)

    def _is_free(self, process: NvmlProcess, lane: str) -> bool:
        return process is self._serving and lane in process.lanes and lane not in process.late_lanes

    def _blame(self, ask: Ask) -> _Trouble:
        trouble = self._troubles.setdefault(ask.lane, _Trouble(BackOff(self._first_back_off_s), ask))
        if ask.sets:
            trouble.ask = ask  # a set that fails is not forgiven for reads that go well
        return trouble

    # -------------------------------------------------------------------------------------- one call

    async def _send(self, asks: list[Ask]) -> list[Outcome]:
        if not asks:
            return []
        try:
            process = await self._server()
        except DeviceError as error:
            return [_as_of(error, ask) for ask in asks]
        return await asyncio.gather(*process.ask(asks, self._deadline_s))

    def _refuse(self, ask: Ask, trouble: _Trouble) -> DeviceError:
        """Why the call is not made; if its time has come, the device is tried again beside."""
        error = trouble.back_off.error
        why = trouble.back_off.held()
        if not why:
            if trouble.trial is None and self._may_replace():
                trouble.trial = self._run(self._try_again(ask.lane, trouble))
            why = f"{error} ({'being tried again' if trouble.trial else 'next try when other GPUs have their caps'})"
        return (type(error) if error is not None else DeadlineError)(why, uuid=ask.uuid, asked=False)

    async def _server(self) -> NvmlProcess:
        async with self._starting:
            serving = self._serving
            if serving is not None and serving.has_ended:  # between two calls, which is no device's fault
                serving = self._serving = None
            if serving is None:
                serving = self._serving = await self._start()
                serving.listener = self
            return serving

    async def _start(self) -> NvmlProcess:
        if self._closed:
            raise LibraryGoneError("the GPUs were closed", asked=False)
        if why := self._library.held():
            code = self._library.error.code if self._library.error else None
            raise LibraryGoneError(why, code=code, asked=False)
        self._stuck = [process for process in self._stuck if not process.has_ended]
        if len(self._stuck) >= _MOST_STUCK:
            pids = ", ".join(str(process.pid) for process in self._stuck)
            raise LibraryGoneError(
                f"earlier NVML processes are stuck in the driver (pids {pids}); reboot this node", asked=False
            )
        try:
            return await NvmlProcess.start(self._start_deadline_s, self._environment)
        except LibraryGoneError as error:
            self._library.fail(error)
            raise

    # ------------------------------------------------------------------------------------- second tries

    async def _try_again(self, lane: str, trouble: _Trouble) -> None:
        """Try a device that was held back in a process of its own, and let that take over where it must."""
        process: NvmlProcess | None = None
        try:
            process = await self._start()
            (outcome,) = await asyncio.gather(*process.ask([_probe(trouble.ask)], self._deadline_s))
            if isinstance(outcome, DeadlineError | LibraryGoneError):
                trouble.back_off.fail(outcome)
                return
            serving = self._serving
            if serving is not None and lane in serving.late_lanes and not await self._quiet():
                trouble.back_off.fail(DeadlineError(f"{trouble.back_off.error}, other GPUs had no caps yet"))
                return
            old = self._serving
            if old is None or lane in old.late_lanes:
                process.listener, self._serving = self, process
                process = None
                if old is not None:
                    await asyncio.shield(self._run(self._retire(old)))
            trouble.held = False
        except LibraryGoneError as error:
            trouble.back_off.fail(error)
        finally:
            trouble.trial = None
            if process is not None:
                await self._end(process)

    async def _quiet(self) -> bool:
        """Wait for a moment in which the serving process can be replaced; False if there is none."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TAKE_OVER_S):
                while (self._serving is not None and self._serving.setting) or not self._may_replace():
                    await asyncio.sleep(_QUIET_POLL_S)
                return True
        return False

    async def _retire(self, old: NvmlProcess) -> None:
        """It hangs for one device at least; readings of the others that are under way may end."""
        await old.drained(self._deadline_s)
        await self._end(old, gently=True)

    # --------------------------------------------------------------------------------------------- ends

    def _lose(self, process: NvmlProcess) -> None:
        if process is self._serving:
            self._serving = None
        self._run(self._end(process))

    async def _end(self, process: NvmlProcess, *, gently: bool = False) -> None:
        """End it, whatever happens to us meanwhile; remember it if even the kernel cannot."""

        async def end() -> None:
            if not await (process.end() if gently else process.kill()):
                self._stuck.append(process)

        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(end())

    def _run(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def run() -> None:
            await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _probe(ask: Ask) -> Ask:
    """A reading of the device, or of what is at its place, that tells whether it answers again."""
    if isinstance(ask.call, Count | Describe):
        return ask
    return Ask(TakeSample(uuid=ask.uuid), device=ask.device)


def _as_of(error: DeviceError, ask: Ask) -> DeviceError:
    """The same error for another call; each is raised on its own."""
    return type(error)(str(error), uuid=ask.uuid, code=error.code, asked=error.asked)
