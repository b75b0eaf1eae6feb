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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..model import GpuId
from .backoff import BackOff
from .device import DeadlineError, DeviceError, LibraryGoneError
from .process import Ask, NvmlProcess, Outcome
from .wire import Count, Describe, TakeSample

_MOST_STUCK: Final = 3
_LINGER_S: Final = 60.0
"""How long a process in which a reading hangs is left to end by itself once another serves."""

_TAKE_OVER_S: Final = 30.0
"""How long a new process waits for its moment to take over before the device is held back again."""

_NO_MOMENT: Final = DeadlineError("it answers again, but other GPUs have waited for their caps too long")

_QUIET_POLL_S: Final = 0.02


@dataclass(slots=True)
class _Trouble:
    """What is held against a device. ``ask`` is the call that went wrong first.

    ``suspected``: the kinds of call (sets: True) in which the process crashed, until one of the kind goes well.
    ``held``: its calls are not made. ``trial``: it is being tried again.
    """

    back_off: BackOff
    ask: Ask
    suspected: set[bool] = field(default_factory=set)
    held: bool = False
    trial: asyncio.Task[None] | None = None

    def suspects(self, ask: Ask) -> bool:
        return ask.sets in self.suspected


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
        self._stuck_sets: dict[str, NvmlProcess] = {}
        self._others: set[NvmlProcess] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process that serves now; None when there is none."""
        return None if self._serving is None else self._serving.pid

    async def ask(self, asks: Sequence[Ask], *, hurry: bool = False) -> list[Outcome]:
        """Make these calls, all at the same time but for suspects; one outcome each, in order. Never raises.

        With ``hurry`` the outcome of a call that takes much longer than the others is a PendingError.
        """
        outcomes: dict[int, Outcome] = {}
        together, apart = [], []
        for place, ask in enumerate(asks):
            trouble = self._troubles.get(ask.lane)
            if stuck := self.stuck_set(ask.device):
                outcomes[place] = stuck
            elif trouble is not None and trouble.held:
                outcomes[place] = self._refuse(ask, trouble)
            elif trouble is not None and trouble.suspects(ask):
                apart.append(place)
            else:
                together.append(place)
        outcomes |= zip(
            together, await self._send([asks[place] for place in together], hurry=hurry), strict=True
        )
        for place in apart:
            async with self._one_at_a_time:
                trouble = self._troubles.get(asks[place].lane)
                if trouble is not None and trouble.held:
                    outcomes[place] = self._refuse(asks[place], trouble)
                else:
                    (outcomes[place],) = await self._send([asks[place]])
        return [outcomes[place] for place in range(len(asks))]

    def stuck_set(self, uuid: GpuId) -> DeadlineError | None:
        """Why nothing of a device counts: a set is stuck in the driver, and may be done after whatever is read now."""
        process = self._stuck_sets.get(uuid)
        if process is None or process.has_ended:
            self._stuck_sets.pop(uuid, None)
            return None
        why = f"a set is stuck in the driver (pid {process.pid}) and may still be done; reboot this node"
        return DeadlineError(f"{uuid}: {why}", uuid=uuid, asked=False)

    async def release(self) -> None:
        """End every process: that lets go of all handles. The next call starts anew and blames nobody."""
        async with self._starting:
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._troubles.clear()
            if self._serving is not None:
                self._others.add(self._serving)
                self._serving = None
            await asyncio.gather(*(self._end(process) for process in tuple(self._others)))

    async def close(self) -> None:
        """Release for good. A process that is stuck in the driver is left to the kernel."""
        self._closed = True
        await self.release()

    # -------------------------------------------------------------------------------- what processes tell

    def answered(self, process: NvmlProcess, ask: Ask, outcome: Outcome) -> None:
        """Its thread is free, also if it comes late: what hung is over."""
        if isinstance(outcome, LibraryGoneError):
            # The process ends now, and a new one would soon hear the same.
            gone = LibraryGoneError(f"the library is gone: {outcome}", code=outcome.code)
            self._library.fail(gone)
            self._lose(process, gone)
            return
        trouble = self._troubles.get(ask.lane)
        if trouble is not None and process is self._serving and not self._hangs(ask.lane):
            trouble.held = False
        if isinstance(outcome, DeadlineError):
            return
        self._library = BackOff(self._first_back_off_s)
        self._all_hung = False
        if trouble is not None and not trouble.held:
            trouble.suspected.discard(ask.sets)
            if not trouble.suspected and trouble.back_off.calm:
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
        gone = LibraryGoneError(f"every call to NVML hangs: {error}")
        if self._all_hung:  # the second time in a row: no hurry any more
            self._library.fail(gone)
        self._all_hung = True
        for lane in hung:
            self._troubles.pop(lane, None)
        self._lose(process, gone)

    def died(
        self, process: NvmlProcess, asks: tuple[Ask, ...], error: LibraryGoneError, *, crash: bool
    ) -> None:
        """Suspect those whose calls were under way; hold back who is blamed again."""
        if process is self._serving:
            self._serving = None
        if not crash:
            return
        again = [ask for ask in asks if ask.lane in self._troubles and self._troubles[ask.lane].suspects(ask)]
        for ask in again:
            trouble = self._troubles[ask.lane]
            trouble.held = True
            trouble.back_off.fail(LibraryGoneError(f"{ask.name}: {error}", uuid=ask.uuid))
        if not again:
            for ask in asks:
                self._blame(ask).suspected.add(ask.sets)

    def _blame(self, ask: Ask) -> _Trouble:
        return self._troubles.setdefault(ask.lane, _Trouble(BackOff(self._first_back_off_s), ask))

    # -------------------------------------------------------------------------------------- one call

    async def _send(self, asks: list[Ask], *, hurry: bool = False) -> list[Outcome]:
        if not asks:
            return []
        try:
            process = await self._server()
        except DeviceError as error:
            return [_as_of(error, ask) for ask in asks]
        if hurry:
            return await process.ask_in_a_hurry(asks, self._deadline_s)
        return await asyncio.gather(*process.ask(asks, self._deadline_s))

    def _refuse(self, ask: Ask, trouble: _Trouble) -> DeviceError:
        """Why the call is not made; if its time has come, the device is tried again beside."""
        error = trouble.back_off.error
        why = trouble.back_off.held()
        if not why:
            if trouble.trial is not None:
                when = "being tried again"
            elif len(self._others) + self._count_stuck() >= _MOST_STUCK:
                when = "next try when earlier NVML processes have ended"
            elif not self._may_replace():
                when = "next try when the other GPUs have their caps"
            else:
                trouble.trial = self._run(self._try_again(ask.lane, trouble))
                when = "being tried again"
            why = f"{error} ({when})"
        return (type(error) if error is not None else DeadlineError)(why, uuid=ask.uuid, asked=False)

    async def _server(self) -> NvmlProcess:
        async with self._starting:
            serving = self._serving
            if serving is not None and serving.has_ended:  # between two calls, which is no device's fault
                serving = self._serving = None
            if serving is None:
                serving = self._serving = await self._start()
                self._others.discard(serving)
                serving.listener = self
            return serving

    async def _start(self) -> NvmlProcess:
        if self._closed:
            raise LibraryGoneError("the GPUs were closed", asked=False)
        if why := self._library.held():
            code = self._library.error.code if self._library.error else None
            raise LibraryGoneError(why, code=code, asked=False)
        if self._count_stuck() >= _MOST_STUCK:
            pids = ", ".join(str(process.pid) for process in self._stuck)
            raise LibraryGoneError(
                f"earlier NVML processes are stuck in the driver (pids {pids}); reboot this node", asked=False
            )
        try:
            process = await NvmlProcess.launch(self._environment)
            self._others.add(process)
            try:
                await process.ready(self._start_deadline_s)
            except BaseException:
                await self._end(process, "the NVML process was given up")
                raise
        except LibraryGoneError as error:
            self._library.fail(error)
            raise
        return process

    # ------------------------------------------------------------------------------------- second tries

    async def _try_again(self, lane: str, trouble: _Trouble) -> None:
        """Try a device that was held back in a process of its own, and let that take over where it must."""
        try:
            process = await self._start()
            if await self._answers(process, trouble):
                if not self._hangs(lane):
                    trouble.held = False
                elif await self._quiet():
                    await self._take_over(process)
                    trouble.held = False
                else:
                    trouble.back_off.fail(_NO_MOMENT)
            if process is not self._serving:
                self._run(self._let_go(process, 0.0))
        except LibraryGoneError as error:
            trouble.back_off.fail(error)
        finally:
            trouble.trial = None

    async def _answers(self, process: NvmlProcess, trouble: _Trouble) -> bool:
        """Whether the device answers a reading there, if only before it would be tried again anyway."""
        (outcome,) = await asyncio.gather(*process.ask([_probe(trouble.ask)], self._deadline_s))
        if not isinstance(outcome, DeadlineError | LibraryGoneError):
            return True
        trouble.back_off.fail(outcome)
        return isinstance(outcome, DeadlineError) and await process.comes_back(trouble.back_off.left_s)

    def _hangs(self, lane: str) -> bool:
        """Whether the process that serves has a thread stuck there, or there is none at all."""
        return self._serving is None or lane in self._serving.late_lanes

    async def _quiet(self) -> bool:
        """Wait for a moment in which the serving process can be replaced; False if there is none."""
        until_s = asyncio.get_running_loop().time() + _TAKE_OVER_S
        while self._serving is not None and (self._serving.setting or not self._may_replace()):
            if asyncio.get_running_loop().time() > until_s:
                return False
            await asyncio.sleep(_QUIET_POLL_S)
        return True

    async def _take_over(self, process: NvmlProcess) -> None:
        """From now on this process serves."""
        old, self._serving = self._serving, process
        process.listener = self
        self._others.discard(process)
        if old is None:
            return
        self._others.add(old)
        letting_go = self._run(self._let_go(old, _LINGER_S))
        if old.late_sets:  # before it is gone, its set may come into force after a newer one
            await asyncio.wait([letting_go])

    async def _let_go(self, process: NvmlProcess, patience_s: float) -> None:
        """End a process that serves no more. One killed inside a call may leave the calls of others hanging."""
        await process.drained()
        if not process.late_sets:
            await process.comes_back(patience_s)
        await self._end(process)

    # --------------------------------------------------------------------------------------------- ends

    def _count_stuck(self) -> int:
        self._stuck = [process for process in self._stuck if not process.has_ended]
        return len(self._stuck)

    def _lose(self, process: NvmlProcess, why: LibraryGoneError) -> None:
        if process is self._serving:
            self._serving = None
        self._others.add(process)
        self._run(self._end(process, str(why)))

    async def _end(self, process: NvmlProcess, why: str = "") -> None:
        """End it; remember it if even the kernel cannot."""
        late_sets = process.late_sets
        gone = await (process.kill(why) if why else process.kill() if process.late_lanes else process.end())
        self._others.discard(process)
        if not gone:
            self._stuck.append(process)
            self._stuck_sets.update(dict.fromkeys(late_sets, process))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
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
