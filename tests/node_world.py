"""A world for the node agent's core: GPUs in memory, durable files as dictionaries, time that only a test moves.

It carries out actions as the shell does and checks on every one of them what must hold whatever happens.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from slurm_pfi.gpu.device import DeviceError
from slurm_pfi.gpu.journal import JournalEntry
from slurm_pfi.gpu.memory import MemoryGpu, MemoryGpuDevices
from slurm_pfi.model import GpuId, Plan, PlanId, PlanStep, Report, Run, RunCap
from slurm_pfi.node import messages as m
from slurm_pfi.node.core import initial_state, next_deadline_ns, step
from slurm_pfi.node.hardware import IN_DOUBT, LASTING
from slurm_pfi.node.jobfile import JobFile
from slurm_pfi.node.plan import HeldPlan
from slurm_pfi.node.state import Orphan, Settings, State

S = 1_000_000_000
MS = 1_000_000
BOOT = "boot-1"
T = TypeVar("T")


def settings(agent_id: str = "agent-1", on_orphan: Orphan = "hold") -> Settings:
    return Settings(
        cluster="c",
        node="n1",
        agent_id=agent_id,
        boot_id=BOOT,
        on_orphan=on_orphan,
        report_ns=5 * S,
        report_window_ns=S,
        report_age_ns=30 * S,
        response_ns=10 * S,
        deadline_ns=5 * S,
    )


def now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


def entry(uuid: str, **changes: object) -> JournalEntry:
    """A cap of ours of this boot, over a limit before us that is not the default."""
    made = JournalEntry(
        uuid=uuid,
        prior_mw=650_000,
        issued_mw=(300_000,),
        current_mw=300_000,
        run="",
        boot_id=BOOT,
        driver_start="d1",
        how="read",
    )
    return msgspec.structs.replace(made, **changes)


class World:
    """One node. ``instant``: questions to devices are answered at once, else when ``answer`` is called."""

    def __init__(self, gpus: int = 3, *, instant: bool = True, on_orphan: Orphan = "hold") -> None:
        self.devices = MemoryGpuDevices(
            [MemoryGpu(uuid=f"GPU-{number}", minor=number, index=number) for number in range(gpus)],
            now_ns=100 * S,
        )
        self.positions = {number: f"GPU-{number}" for number in range(gpus)}
        self.map_fault = ""
        self.on_orphan: Orphan = on_orphan
        self.instant = instant
        self.journal: dict[GpuId, JournalEntry | str] = {}
        self.journal_fails = False
        self.unwritten: dict[GpuId, JournalEntry] = {}  # what this agent knows and the disk would not take
        self.plan_file: HeldPlan | None = None
        self.jobs: dict[str, JobFile] = {}
        self.driver_start = "d1"
        self.audit: list[tuple[str, dict[str, Any]]] = []
        self.reports: list[Report] = []
        self.order: list[str] = []
        self.open_questions: list[m.SetLimit | m.Sample | m.ListDevices] = []
        self.issued: dict[GpuId, set[int]] = {uuid: set() for uuid in self.devices.gpus}
        self.restore_at_ns: int | None = None
        self.exited = False
        self.agents = 0
        self.fresh_plan = False
        self.stop_after: int | None = None  # the agent is killed once it has carried out so many actions
        self.seq = 0
        self.state: State = State(settings=settings(), started_ns=0)

    @property
    def now_ns(self) -> int:
        return self.devices.now_ns

    # --------------------------------------------------------------------------------------------- the agent

    def start(self, *, connected: bool = True) -> World:
        """A new agent process, knowing only what is durable."""
        self.agents += 1
        self.exited = self.fresh_plan = False
        self.restore_at_ns = None
        self.open_questions.clear()
        self.unwritten.clear()
        self.state = initial_state(settings(f"agent-{self.agents}", self.on_orphan), self.now_ns)
        self.event(m.PlanRead(held=self.plan_file))
        self.read_jobs()
        if connected:
            self.event(m.Connected(up=True))
        return self

    def event(self, event: m.Event) -> None:  # noqa: PLR0912 - one case for each action
        if self.exited:
            return
        before = self.state
        self.state, actions = step(self.state, event, self.now_ns)
        assert step(before, event, self.now_ns) == (self.state, actions), "not pure"
        unjournaled: set[GpuId] = set()
        follow: list[m.Event] = []
        for place, action in enumerate(actions):
            if self.stop_after is not None and self.stop_after <= place:
                self.exited = True
                return
            self.order.append(type(action).__name__)
            match action:
                case m.Audit():
                    self.audit.append((action.event, action.fields))
                    self.fresh_plan = self.fresh_plan or action.event == "plan_accepted"
                case m.WriteJournal():
                    self.check_entry(action.entry)
                    if self.journal_fails:
                        unjournaled.add(action.entry.uuid)
                        self.unwritten[action.entry.uuid] = action.entry
                        continue
                    self.unwritten.pop(action.entry.uuid, None)
                    self.journal[action.entry.uuid] = action.entry
                case m.SetLimit() if action.uuid in unjournaled:
                    follow.append(m.SetFailed(uuid=action.uuid, error="journal", not_tried=True))
                case m.SetLimit():
                    self.check_set(action, actions[:place])
                    self.ask(action, follow)
                case m.Sample() | m.ListDevices():
                    self.ask(action, follow)
                case m.SendReport():
                    self.reports.append(action.report)
                case m.SavePlan():
                    self.plan_file = action.held
                case m.RemoveJobFile():
                    self.jobs.pop(f"{action.run.job_id}.{action.run.restart}", None)
                case m.LeaveRestorer():
                    self.restore_at_ns = action.at_ns
                case m.FreeDevices():
                    follow.append(m.DevicesFreed())
                case m.Exit():
                    self.exited = True
        for event_ in follow:
            self.event(event_)

    def ask(self, question: m.SetLimit | m.Sample | m.ListDevices, follow: list[m.Event]) -> None:
        if self.instant:
            follow.append(self.result(question))
        else:
            self.open_questions.append(question)

    def answer(self, place: int = 0) -> None:
        question = self.open_questions.pop(place)
        self.event(self.result(question))

    def answer_all(self) -> None:
        while self.open_questions:
            self.answer()

    def result(self, question: m.SetLimit | m.Sample | m.ListDevices) -> m.Event:
        match question:
            case m.Sample():
                try:
                    asked = {"quick": question.quick, "activity": question.activity}
                    samples = now(self.devices.sample(question.uuids, **asked, hurry=True))
                    return m.Sampled(samples=samples, **asked)
                except DeviceError as error:
                    raise AssertionError("the shell turns it into failures") from error
            case m.SetLimit():
                try:
                    limits = now(self.devices.set_limit(question.uuid, question.cap_mw))
                except DeviceError as error:
                    kind = type(error).__name__
                    return m.SetFailed(
                        uuid=question.uuid,
                        error=str(error),
                        in_doubt=kind in IN_DOUBT,
                        lasting=kind in LASTING,
                    )
                return m.SetDone(uuid=question.uuid, limits=limits)
        try:
            infos, failures = now(self.devices.list_devices())
        except DeviceError as error:
            return m.DevicesUnavailable(error=str(error))
        there = {info.uuid for info in infos}  # gres.conf leads to what NVML lists
        return m.DevicesListed(
            devices=infos,
            failures=failures,
            journal={info.uuid: self.entry_of(info.uuid) for info in infos},
            positions={place: uuid for place, uuid in self.positions.items() if uuid in there},
            driver_start=self.driver_start,
            map_fault=self.map_fault,
        )

    def entry_of(self, uuid: GpuId) -> JournalEntry | str | None:
        entry = self.journal.get(uuid)
        if isinstance(entry, JournalEntry) and entry.driver_start != self.driver_start:
            return None
        return entry

    # --------------------------------------------------------------------------------------- what must hold

    def check_entry(self, entry: JournalEntry) -> None:
        assert entry.prior_mw not in self.issued[entry.uuid], "a value of ours recorded as prior limit"
        assert entry.boot_id == BOOT

    def check_set(self, action: m.SetLimit, before: Iterable[m.Action]) -> None:
        """Called before the device is asked."""
        uuid, cap_mw = action.uuid, action.cap_mw
        # A cap waits for the disk, a restore does not: it may lead to a prior limit that is not written down yet.
        entry = self.unwritten.get(uuid, self.journal.get(uuid))
        assert isinstance(entry, JournalEntry), "set without a readable journal entry"
        assert cap_mw <= entry.prior_mw, "set above the prior limit"
        said = [a.fields for a in before if isinstance(a, m.Audit) and a.event == "set"]
        assert any(f["uuid"] == uuid and f["cap_mw"] == cap_mw for f in said), "set without its audit record"
        if cap_mw == entry.prior_mw:
            assert action.reason.startswith("restore")
        else:
            assert entry.current_mw == cap_mw and cap_mw in entry.issued_mw, "set before its journal entry"
            self.issued[uuid].add(cap_mw)
        assert cap_mw <= self.most_allowed_mw(uuid, entry.prior_mw), "set above the plan in force"
        pending = self.state.gpus[uuid].pending  # what stood there when it was last read, too
        before_mw = 0 if pending is None or pending.before_mw is None else pending.before_mw
        if cap_mw > max(self.devices.gpus[uuid].requested_mw, before_mw) + 1000:
            assert self.raise_is_due(), "raised after a restart without a plan or the known schedule"

    def most_allowed_mw(self, uuid: GpuId, prior_mw: int) -> int:
        """An own reading of the plan: the highest limit that anything in force allows this GPU."""
        held = self.state.held
        if self.state.released:
            return prior_mw
        assert held is not None, "set without a plan"
        if held.plan.mode == "observe":
            return prior_mw
        begun = [
            s
            for s in held.plan.steps
            if held.received_ns + s.starts_in_s * 1e9 <= self.now_ns
            and not (s.lease and self.on_orphan == "hold")
        ]
        last = begun[-1]
        here = [
            next(
                (
                    cap
                    for cap in last.caps
                    if cap.run.job_id == file.job_id and cap.run.restart == file.restart
                ),
                None,
            )
            for file in self.jobs.values()
            if uuid in [self.positions[p] for p in file.gpus if p in self.positions]
        ]
        park_mw = prior_mw if last.park_cap_mw is None else last.park_cap_mw
        given = [park_mw if cap is None else prior_mw if cap.cap_mw is None else cap.cap_mw for cap in here]
        return max(given, default=park_mw)

    def raise_is_due(self) -> bool:
        held = self.state.held
        if self.fresh_plan or self.state.released or held is None:
            return True
        _, found = held.in_force(self.now_ns, skip_lease=self.on_orphan == "hold")
        return (
            found.park_cap_mw is None
            or held.start_ns(found) > self.state.started_ns
            or (held.plan.mode == "observe")
        )

    # ------------------------------------------------------------------------------------- what others do

    def advance(self, nanoseconds: int) -> None:
        """Let time pass; the core is woken whenever it asked for it."""
        ends_ns = self.now_ns + nanoseconds
        wakes = 0
        while not self.exited:
            wakes += 1
            assert wakes < 200 + 100 * nanoseconds / S, "woken in a loop"
            due_ns = next_deadline_ns(self.state, self.now_ns)
            if due_ns > ends_ns:
                break
            self.devices.advance(max(due_ns - self.now_ns, 1))
            self.event(m.Tick())
        self.devices.advance(max(0, ends_ns - self.now_ns))

    def read_jobs(self) -> None:
        self.event(m.JobFilesRead(files=tuple(self.jobs.values())))

    def begin_job(self, job_id: int, *gpus: int, restart: int = 0, flex: str = "medium") -> Run:
        self.jobs[f"{job_id}.{restart}"] = JobFile(
            job_id=job_id, restart=restart, uid=1000, gpus=gpus, flex=flex
        )
        self.read_jobs()
        return Run("c", job_id, restart)

    def end_job(self, run: Run) -> None:
        self.jobs.pop(f"{run.job_id}.{run.restart}", None)
        self.read_jobs()

    def make_plan(self, *steps: PlanStep, **changes: Any) -> Plan:
        """A plan that answers the last report."""
        self.seq += 1
        plan = Plan(
            cluster="c",
            node="n1",
            id=PlanId(epoch=1, seq=self.seq),
            answers=self.reports[-1].id,
            mode="enforce",
            reason="test",
            steps=steps,
        )
        return msgspec.structs.replace(plan, **changes)

    def send(self, plan: Plan) -> bool:
        """Deliver it; whether it is held now."""
        count = len(self.audit)
        self.event(m.PlanReceived(plan=plan))
        return any(event == "plan_accepted" for event, _ in self.audit[count:])

    def window(self, park_cap_mw: int, caps: dict[Run, int | None] | None = None, **changes: Any) -> bool:
        return self.send(self.make_plan(window_step(park_cap_mw, caps), **changes))

    def requested(self) -> list[int]:
        return [gpu.requested_mw for gpu in self.devices.gpus.values()]

    def said(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.audit if name == event]


def window_step(
    park_cap_mw: int | None,
    caps: dict[Run, int | None] | None = None,
    starts_in_s: float = 0.0,
    *,
    lease: bool = False,
) -> PlanStep:
    return PlanStep(
        starts_in_s=starts_in_s,
        park_cap_mw=park_cap_mw,
        caps=tuple(RunCap(run=run, cap_mw=cap) for run, cap in (caps or {}).items()),
        lease=lease,
    )


__all__ = ["MS", "S", "World", "replace", "window_step"]
