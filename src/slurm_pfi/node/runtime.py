"""The shell around the core: one event loop that feeds it and carries out what it decides, in order."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from ..bus.local import LocalClient
from ..files import write_atomically
from ..gpu.journal import JournalError
from ..model import GpuId, Report, RunReport
from ..store.audit import AuditLog
from .core import initial_state, next_deadline_ns, step
from .faultlines import FaultLines
from .hardware import Hardware
from .jobfile import remove_job_file
from .log import Log
from .messages import (
    Action,
    Audit,
    Connected,
    DevicesFreed,
    DevicesUnavailable,
    Event,
    Exit,
    FaultChanged,
    FreeDevices,
    LeaveRestorer,
    ListDevices,
    RemoveJobFile,
    Sample,
    Sampled,
    SavePlan,
    SendReport,
    SetFailed,
    SetLimit,
    Tick,
    WriteJournal,
)
from .paths import NodePaths
from .progress import ProgressTable, RunKey
from .report import caps_are_current
from .state import Settings, State

_LEAST_PAUSE_S: Final = 0.001
_AFTER_ERROR_S: Final = 1.0
_RESEND_S: Final = 0.05
_AUDIT_BYTES: Final = 32 * 1024 * 1024  # it lies in memory (/run), and counts towards the unit's MemoryMax
_LATE_S: Final = 10.0
_FAILING_S: Final = 30.0
_UNANSWERED_S: Final = 120.0  # deadlines end every question far earlier


class Runtime:
    """Owns the state. ``feed`` may be called from anywhere in the loop; events are taken one at a time.

    ``leave_restorer(at_ns)`` starts the process that outlives this one. ``ended`` is set when the core says so.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        paths: NodePaths,
        hardware: Hardware,
        log: Log,
        leave_restorer: Callable[[int], None],
    ) -> None:
        self.state: State = initial_state(settings, time.monotonic_ns())
        self.ended = asyncio.Event()
        self.changed = asyncio.Condition()
        self.progress = ProgressTable()
        self.client: LocalClient | None = None
        self._paths = paths
        self._hardware = hardware
        hardware.may_replace = lambda: caps_are_current(self.state)
        self._log = log
        self._leave_restorer = leave_restorer
        self._audit = AuditLog(
            paths.audit,
            f"node:{settings.node}",
            on_fault=lambda text: log.error("audit", fault=text),
            max_bytes=_AUDIT_BYTES,
        )
        self._events: deque[Event] = deque()
        self._feeding = False
        self._timer: asyncio.TimerHandle | None = None
        self._resend: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.counted: Counter[str] = Counter()
        """Audit records of each event since the start, written or lost."""
        self._unsaved: SavePlan | None = None
        self._unwritten: dict[GpuId, WriteJournal] = {}
        self._asked_s: dict[int, float] = {}
        self._failing_s: float | None = None
        self._not_journaled: dict[GpuId, str] = {}
        self._fault_lines = FaultLines(log)

    def feed(self, event: Event) -> None:
        """Take an event in, carry out what follows, and set the clock for what comes next."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        pause_s = _LEAST_PAUSE_S
        try:
            while self._events:
                next_event = self._events.popleft()
                try:
                    self.state, actions = step(self.state, next_event, time.monotonic_ns())
                    self._carry_out(actions)
                    self._failing_s = None
                except Exception:
                    self._failing_s = self._failing_s or time.monotonic()
                    # A fault of ours must not end the only process that can restore limits.
                    self._log.error(
                        "internal error", during=type(next_event).__name__, trace=traceback.format_exc()
                    )
                    pause_s = _AFTER_ERROR_S
        finally:
            self._feeding = False
        self._fault_lines.say(self.state)
        self._arm(pause_s)
        self._start(self._tell_changed())

    def stalled(self) -> str:
        """Why the core does not follow the world any more; empty while it does. For the watchdog."""
        now_s = asyncio.get_running_loop().time()
        if self._timer is None or self._timer.cancelled() or now_s > self._timer.when() + _LATE_S:
            return "the core has missed its own deadline"
        if self._failing_s is not None and now_s > self._failing_s + _FAILING_S:
            return f"every event has failed for {now_s - self._failing_s:.0f} s, see the internal errors"
        oldest_s = min(self._asked_s.values(), default=now_s)
        if now_s > oldest_s + _UNANSWERED_S:
            return f"the GPUs have left a question without an answer for {now_s - oldest_s:.0f} s"
        return ""

    @property
    def audit_lost(self) -> int:
        """Audit records that could not be written."""
        return self._audit.lost

    def save_again(self) -> None:
        """The plan and journal entries that could not be written when they came: the disk may have room by now."""
        if self._unsaved is None and not self._unwritten:
            return
        if self._unsaved is not None:
            self._save_plan(self._unsaved)
        for uuid, action in tuple(self._unwritten.items()):
            if action.entry.driver_start == self.state.driver_start:
                self._write_journal(action)
            else:  # what it tells of is gone
                del self._unwritten[uuid]
        self.feed(Tick())

    def reopen_audit(self) -> None:
        """After the file was renamed by logrotate."""
        self._audit.reopen()

    async def close(self) -> None:
        """End what is under way. Limits are left as they are."""
        for timer in (self._timer, self._resend):
            if timer is not None:
                timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._audit.close()

    # --------------------------------------------------------------------------------------------- actions

    def _carry_out(self, actions: tuple[Action, ...]) -> None:
        self._not_journaled.clear()
        for action in actions:
            match action:
                case Audit():
                    self.counted[action.event] += 1
                    self._audit.write(action.event, action.fields)
                    self._log.audited(action.event, action.fields)
                case WriteJournal():
                    self._write_journal(action)
                case SetLimit():
                    self._set_limit(action)
                case SendReport():
                    self._send(action.report)
                case ListDevices():
                    lost: Event = DevicesUnavailable(
                        error="GPUs cannot be listed: internal error, see the log"
                    )
                    self._start(self._answer(self._hardware.look(), lost))
                case Sample():
                    lost = Sampled(samples=(), quick=action.quick)
                    sampling = self._hardware.sample(
                        action.uuids, quick=action.quick, activity=action.activity
                    )
                    self._start(self._answer(sampling, lost))
                case FreeDevices():
                    self._start(self._answer(self._hardware.free(), DevicesFreed()))
                case _:
                    self._carry_out_file(action)

    def _carry_out_file(self, action: Action) -> None:
        match action:
            case SavePlan():
                self._save_plan(action)
            case RemoveJobFile():
                run = action.run
                try:
                    remove_job_file(self._paths.jobs, run.job_id, run.restart)
                except OSError as error:
                    self._log.error("job file cannot be removed", run=run, fault=error)
            case LeaveRestorer():
                self._leave_restorer(action.at_ns)
            case Exit():
                self.ended.set()

    def _send(self, report: Report) -> None:
        if self.client is None or self.client.send(self._with_progress(report)) or not self.client.connected:
            return
        # The other end has not read the last one yet; what this one acknowledges must not wait a whole period.
        if self._resend is None:  # one at a time, however many could not be sent meanwhile
            self._resend = asyncio.get_running_loop().call_later(_RESEND_S, self._send_again)

    def _send_again(self) -> None:
        self._resend = None
        self.feed(Connected(up=True))

    def _write_journal(self, action: WriteJournal) -> None:
        try:
            self._hardware.write(action.entry)
        except JournalError as error:
            self._not_journaled[action.entry.uuid] = str(error)
            self._unwritten[action.entry.uuid] = action
            self._events.append(FaultChanged(what="journal", text=f"journal: {error}"))
        else:
            self._unwritten.pop(action.entry.uuid, None)
            if "journal" in self.state.faults and not self._unwritten:
                self._events.append(FaultChanged(what="journal", text=""))

    def _set_limit(self, action: SetLimit) -> None:
        fault = self._not_journaled.get(action.uuid)
        if fault is not None:
            self._events.append(SetFailed(uuid=action.uuid, error=f"not tried: {fault}", not_tried=True))
            return
        lost = SetFailed(uuid=action.uuid, error="internal error, see the log", in_doubt=True)
        self._start(self._answer(self._hardware.set_limit(action.uuid, action.cap_mw), lost))

    def _save_plan(self, action: SavePlan) -> None:
        try:
            if action.held is None:
                self._paths.plan.unlink(missing_ok=True)
            else:
                write_atomically(self._paths.plan, msgspec.json.encode(action.held), 0o600)
        except OSError as error:
            self._unsaved = action
            fault = f"{self._paths.plan} cannot be written: {error}; after a restart this plan is not known"
            self._events.append(FaultChanged(what="plan", text=fault))
        else:
            self._unsaved = None
            if "plan" in self.state.faults:
                self._events.append(FaultChanged(what="plan", text=""))

    async def _answer(self, question: Coroutine[Any, Any, Event], lost: Event) -> None:
        """Every question gets its answer, or the core would wait for it for ever."""
        self._asked_s[id(question)] = asyncio.get_running_loop().time()
        try:
            answer = await question
        except Exception:
            self._log.error("internal error", during=type(lost).__name__, trace=traceback.format_exc())
            answer = lost
        finally:
            del self._asked_s[id(question)]
        self.feed(answer)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_changed(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _with_progress(self, report: Report) -> Report:
        now_s = time.monotonic()

        def fill(run: RunReport) -> RunReport:
            progress = self.progress.progress(RunKey(run.run.job_id, run.run.restart), now_s)
            return run if progress is None else msgspec.structs.replace(run, progress=progress)

        return msgspec.structs.replace(report, runs=tuple(map(fill, report.runs)))

    # ------------------------------------------------------------------------------------------------ time

    def _arm(self, pause_s: float) -> None:
        """Wake the core when it next has something to do, and not before."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        # loop.time() is CLOCK_MONOTONIC, as the core's nanoseconds are.
        due_s = next_deadline_ns(self.state, time.monotonic_ns()) / 1e9
        self._timer = loop.call_at(max(due_s, loop.time() + pause_s), self.feed, Tick())


async def wait_until(runtime: Runtime, reached: Callable[[State], bool], deadline_s: float) -> bool:
    """Wait for the state to be so; False if it is not within ``deadline_s``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s), runtime.changed:
            await runtime.changed.wait_for(lambda: reached(runtime.state))
    return reached(runtime.state)
