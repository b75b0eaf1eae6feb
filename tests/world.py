"""Both pure cores in one made-up world: virtual time, slow devices, a bus that delays and loses.

No process, no socket, no real clock; every choice comes from a seeded random source. The world keeps the limits that
are in force on its devices apart from what anybody believes, and checks the budget on them at every change.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import Phase, settings
from msgspec.structs import replace

from slurm_pfi.config import Config, NodeSet, PolicySection, TimesSection
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.core import Core
from slurm_pfi.controller.knowledge import learn_runs
from slurm_pfi.controller.measuring.record import Record
from slurm_pfi.controller.nodes import declared_nodes
from slurm_pfi.controller.science import Science
from slurm_pfi.elasticity.library import Library
from slurm_pfi.gpu.device import DeviceInfo, DeviceLimits, DeviceSample
from slurm_pfi.gpu.journal import JournalEntry
from slurm_pfi.model import Limit, LimitStep, Plan, Progress, Report, Run
from slurm_pfi.node import core as node_core
from slurm_pfi.node import messages as nm
from slurm_pfi.node import state as ns
from slurm_pfi.node.jobfile import JobFile
from slurm_pfi.sim.jobs import ModelJob
from slurm_pfi.sim.physics import CLOCK_MIN, SM_CLOCK_MAX_MHZ, Workload
from slurm_pfi.slurm.backend import JobInfo
from slurm_pfi.slurm.tag import Tag

from .slurm_samples import slurm_job

NS = 1_000_000_000
TENSOR_SHARE = 0.8
"""Of the cycles of work that is bound by the clock, a tensor pipe works in so many; as in the stand-in library."""

MIN_MW, MAX_MW, DEFAULT_MW = 200_000, 700_000, 700_000
EPOCH_UNIX_S = 1_800_000_000.0
# Of an example that is nothing but a world's seed there is nothing to shrink.
SEEDS = settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
LIBRARY = Library.load_default()


@functools.cache
def clock_under(workload: Workload, cap_mw: int) -> float:
    """SM clock under a cap, as a share of the highest: worked out once for each."""
    return workload.clock_for_cap(cap_mw / 1000)


@dataclass
class Device:
    """One made-up GPU: what was asked, what rules now, and when the last ask comes into force."""

    uuid: str
    requested_mw: int = DEFAULT_MW
    enforced_mw: int = DEFAULT_MW
    demand_mw: int = 75_000
    asked_ns: int = 0
    at_ns: int = 0
    tensor_s: float = 0.0


@dataclass
class Trainee:
    """A made-up training job: it draws and works as its workload does under the lowest of its GPUs' limits."""

    workload: Workload
    tokens_per_s: float
    devices: tuple[Device, ...]
    at_ns: int
    tokens: float = 0.0
    began_ns: int = 0

    def advance(self, now_ns: int) -> None:
        """Count the tokens up to now, at the limits as they are."""
        slowest = clock_under(self.workload, min(device.enforced_mw for device in self.devices))
        work = 1 / self.workload.step_time(slowest)
        full = 1 / self.workload.step_time(clock_under(self.workload, DEFAULT_MW))
        self.tokens += self.tokens_per_s * work / full * (now_ns - self.at_ns) / NS
        self.at_ns = now_ns
        for device in self.devices:
            # As in the stand-in library: so many cycles for a step, whatever the clock; a faster GPU waits.
            active = TENSOR_SHARE * self.workload.compute_share * work / self.clock(device)
            device.tensor_s += active * (now_ns - max(device.at_ns, self.began_ns)) / NS
            device.at_ns = now_ns

    def clock(self, device: Device) -> float:
        """SM clock of one of its GPUs, as a share of the highest."""
        return clock_under(self.workload, device.enforced_mw)


@dataclass
class Fate:
    """How bad the world is.

    ``activity``: its GPUs tell what they do; ``tensor``: with tensor pipes; ``noise``: relative error of each reading.
    """

    bus_delay_s: float = 0.05
    loss: float = 0.0
    set_delay_s: float = 0.02
    activity: bool = True
    tensor: bool = True
    noise: float = 0.0
    effect_delay_s: float = 0.05


@dataclass
class SimNode:
    """One agent and what survives it: devices, journal, plan file, job files."""

    name: str
    devices: dict[str, Device]
    state: ns.State
    journal: dict[str, JournalEntry] = field(default_factory=dict)
    plan: Any = None
    jobs: dict[Run, JobFile] = field(default_factory=dict)
    alive: bool = True
    frozen: bool = False
    life: int = 0
    wake: int = 0


def make_config(nodes: int, gpus: int, *, rebound_s: float = 0.0, **policy: Any) -> Config:
    return Config(
        cluster="world",
        mode="enforce",
        node_set=(NodeSet(names=f"n[1-{nodes}]", gpus=gpus, gpu_max_w=700, overhead_w=500),),
        policy=PolicySection(none_partitions=("urgent",), **policy),
        times=TimesSection(
            baseline_s=5,
            response_s=10,
            node_answer_s=4,
            tag_after_s=1,
            max_hold_s=3600,
            rebound_s=rebound_s,
        ),
    )


class World:
    """Runs events in order of their time. ``violations`` must stay empty."""

    def __init__(
        self,
        seed: int,
        *,
        nodes: int = 3,
        gpus: int = 4,
        fate: Fate | None = None,
        rebound_s: float = 0.0,
        **policy: Any,
    ) -> None:
        self.random = random.Random(seed)
        self._noise = random.Random(seed)
        self.fate = fate or Fate()
        self.now_ns = 1_000 * NS
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.config = make_config(nodes, gpus, rebound_s=rebound_s, **policy)
        self.core = Core(self.config, Science(LIBRARY))
        self.epoch = 0
        self.controller_life = 0
        self.limits: tuple[Limit, ...] = ()
        self.slurm: dict[Run, JobInfo] = {}
        self.slurm_up = True
        self.audit: list[tuple[int, str, str, dict[str, Any]]] = []
        self.violations: list[str] = []
        self.raises = 0
        self.held_back: dict[str, list[Plan]] = {}
        """Plans to these nodes are kept here instead of being delivered."""
        self.said_mw: list[tuple[int, int]] = [(0, 0)]
        self.draws_kept: tuple[dict[str, int] | None, int | None] = (None, None)
        """What a controller leaves to its successor of the draw before a window."""
        self.training: dict[Run, Trainee] = {}
        self.tags: dict[Run, list[tuple[int, Tag]]] = {}
        """Every tag that was ordered, with its instant."""
        self.kept: dict[Run, Record] = {}
        """What the history has kept of runs' records, for a controller that starts anew."""
        self.nodes: dict[str, SimNode] = {}
        for number in range(1, nodes + 1):
            name = f"n{number}"
            devices = {f"GPU-{name}-{i}": Device(f"GPU-{name}-{i}") for i in range(gpus)}
            self.nodes[name] = SimNode(name, devices, self._fresh_agent(name, 0))
        self.start_controller()
        for name in self.nodes:
            self._start_agent(self.nodes[name])

    # ------------------------------------------------------------------------------------------- time

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self._at(self.now_ns + max(1, round(delay_s * NS)), what)

    def _at(self, at_ns: int, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at_ns, next(self._order), what))

    def run(self, seconds: float) -> None:
        end_ns = self.now_ns + round(seconds * NS)
        while self._queue and self._queue[0][0] <= end_ns:
            self.now_ns, _, what = heapq.heappop(self._queue)
            what()
        self.now_ns = end_ns

    def run_until_restored(self, most_s: float) -> bool:
        """Whether every GPU is back at its default within ``most_s``, and still so 10 s later."""
        end_ns = self.now_ns + round(most_s * NS)
        while not self.all_restored() and self.now_ns < end_ns:
            self.run(5)
        self.run(10)
        return self.all_restored()

    @property
    def unix_s(self) -> float:
        return EPOCH_UNIX_S + self.now_ns / NS

    def _lag(self, most_s: float) -> float:
        return self.random.uniform(0.2, 1.0) * most_s

    # ------------------------------------------------------------------------------------------- controller

    def start_controller(self) -> None:
        self.controller_life += 1
        self.epoch += 1
        self.controller = cs.State(
            epoch=0,
            started_ns=self.now_ns,
            nodes=declared_nodes(self.config),
            draw_before=self.draws_kept[0],
            held_until_ns=self.draws_kept[1],
        )
        self.controller_up = True
        self.tell(cs.EpochTaken(epoch=self.epoch))
        self.tell(cs.LimitsChanged(limits=self.limits))
        self._cycle(self.controller_life)
        for node in self.nodes.values():
            if node.alive:
                self._to_agent(node, nm.Connected(up=True))

    def kill_controller(self) -> None:
        self.controller_up = False
        self.controller_life += 1

    def tell(self, event: cs.Event) -> None:
        if not self.controller_up:
            return
        self.controller, actions = self.core.step(self.controller, event, self.now_ns)
        if self.controller.planned:
            rebound = self.controller.rebound
            self.draws_kept = (self.controller.draw_before, None if rebound is None else rebound.until_ns)
        for action in actions:
            self._controller_does(action)

    def _cycle(self, life: int) -> None:
        if life != self.controller_life or not self.controller_up:
            return
        self.tell(cs.Cycle(now_unix_s=self.unix_s))
        self.after(0.25, lambda: self._cycle(life))

    def _controller_does(self, action: cs.Action) -> None:
        life = self.controller_life

        def later(event: cs.Event) -> Callable[[], None]:
            return lambda: self.tell(event) if life == self.controller_life else None

        match action:
            case cs.Audit(event=event, fields=fields):
                self.audit.append((self.now_ns, "controller", event, fields))
                if event == "infeasible":
                    self.said_mw.append((self.now_ns, fields["shortfall_mw"]))
                elif event == "feasible":
                    self.said_mw.append((self.now_ns, 0))
            case cs.SendPlan(plan=plan):
                node = self.nodes[plan.node]
                if plan.node in self.held_back:
                    self.held_back[plan.node].append(plan)
                elif self.random.random() >= self.fate.loss:
                    self.after(
                        self._lag(self.fate.bus_delay_s),
                        lambda: self._to_agent(node, nm.PlanReceived(plan=plan)),
                    )
            case cs.ReadJob(run=run):
                job = self.slurm.get(run)
                unavailable = "" if self.slurm_up else "slurmctld is down"
                self.after(
                    0.02,
                    later(cs.JobRead(run=run, job=job, unavailable=unavailable, kept=self.kept.get(run))),
                )
            case cs.ReadAllJobs():
                jobs = tuple(self.slurm.values()) if self.slurm_up else None
                self.after(0.05, later(cs.AllJobsRead(jobs=jobs)))
            case cs.WriteTag(run=run, tag=tag):
                self.tags.setdefault(run, []).append((self.now_ns, tag))
                self.after(0.01, later(cs.TagWritten(run=run, ok=self.slurm_up)))
            case cs.LearnCurves(evidence=evidence, number=number):
                knowledge = learn_runs(self.core.science.prior, evidence, number)
                self.after(0.1, later(cs.CurvesLearned(knowledge=knowledge)))
            case cs.NeedEpoch(above=above):
                self.epoch = max(self.epoch, above) + 1
                self.after(0.001, later(cs.EpochTaken(epoch=self.epoch)))

    def set_limit(
        self, limit_mw: int | None, *, emergency: bool = False, ends_in_s: float | None = None
    ) -> None:
        """The one limit of this world, or none."""
        before_mw = self.limit_now_mw()
        self.limit_before_mw = 10**12 if before_mw is None else before_mw
        if limit_mw is None:
            self.limits = ()
        else:
            steps = [LimitStep(start_unix_s=self.unix_s, limit_mw=limit_mw)]
            if ends_in_s is not None:
                steps.append(LimitStep(start_unix_s=self.unix_s + ends_in_s, limit_mw=None))
            class_: Any = "emergency" if emergency else "economic"
            self.limits = (Limit(id="m", revision=1, source="test", class_=class_, steps=tuple(steps)),)
        self.limit_set_ns = self.now_ns
        self.tell(cs.LimitsChanged(limits=self.limits))

    def limit_now_mw(self) -> int | None:
        found = None
        for limit in self.limits:
            for step in limit.steps:
                if step.start_unix_s <= self.unix_s:
                    found = step.limit_mw
        return found

    # ------------------------------------------------------------------------------------------- agents

    def _fresh_agent(self, name: str, life: int) -> ns.State:
        settings = ns.Settings(
            cluster="world",
            node=name,
            agent_id=f"{name}-{life}",
            boot_id="boot",
            on_orphan="hold",
            report_ns=5 * NS,
            report_window_ns=NS,
            report_age_ns=30 * NS,
            response_ns=10 * NS,
            deadline_ns=5 * NS,
        )
        return node_core.initial_state(settings, self.now_ns)

    def _start_agent(self, node: SimNode) -> None:
        node.life += 1
        node.alive, node.frozen = True, False
        node.state = self._fresh_agent(node.name, node.life)
        self._to_agent(node, nm.PlanRead(held=node.plan))
        self._to_agent(node, nm.JobFilesRead(files=tuple(node.jobs.values())))
        self._to_agent(node, nm.Connected(up=True))

    def deliver(self, plan: Plan) -> None:
        """Bring a plan that was held back."""
        self._to_agent(self.nodes[plan.node], nm.PlanReceived(plan=plan))

    def kill_agent(self, node: SimNode) -> None:
        node.alive = False
        node.life += 1
        self.tell(cs.NodeLost(node=node.name))

    def restart_agent(self, node: SimNode) -> None:
        if node.alive:
            self.kill_agent(node)
        self._start_agent(node)

    def _to_agent(self, node: SimNode, event: nm.Event) -> None:
        if not node.alive or node.frozen:
            return
        node.state, actions = node_core.step(node.state, event, self.now_ns)
        broken: set[str] = set()
        for action in actions:
            self._agent_does(node, action, broken)
        self._wake_agent(node)

    def _wake_agent(self, node: SimNode) -> None:
        node.wake += 1
        wake, life = node.wake, node.life
        due_ns = node_core.next_deadline_ns(node.state, self.now_ns)

        def tick() -> None:
            if (node.wake, node.life) == (wake, life):
                self._to_agent(node, nm.Tick())

        self._at(max(due_ns, self.now_ns + 1), tick)

    def _agent_does(self, node: SimNode, action: nm.Action, broken: set[str]) -> None:
        life = node.life

        def later(event: nm.Event) -> Callable[[], None]:
            return lambda: self._to_agent(node, event) if node.life == life else None

        match action:
            case nm.Audit(event=event, fields=fields):
                self.audit.append((self.now_ns, node.name, event, fields))
            case nm.WriteJournal(entry=entry):
                node.journal[entry.uuid] = entry
            case nm.SetLimit(uuid=uuid, cap_mw=cap_mw):
                if uuid not in node.journal:
                    self.violations.append(f"{uuid}: set without a journal entry")
                self.after(self._lag(self.fate.set_delay_s), lambda: self._set(node, uuid, cap_mw, life))
            case nm.SavePlan(held=held):
                node.plan = held
            case nm.RemoveJobFile(run=run):
                node.jobs.pop(run, None)
            case nm.SendReport(report=report):
                report = self._with_progress(report)
                if self.random.random() >= self.fate.loss:
                    self.after(
                        self._lag(self.fate.bus_delay_s),
                        lambda: self.tell(cs.ReportCame(report=report, priors={})),
                    )
            case nm.ListDevices():
                self.after(0.01, later(self._listed(node)))
            case nm.Sample():
                answer = self._sampled(node, action)
                self.after(0.005, later(answer))
            case nm.LeaveRestorer() | nm.Exit():
                raise AssertionError("nobody asked an agent of this world to stop")

    def _with_progress(self, report: Report) -> Report:
        """The report with the counters of the jobs that train; in life the agent's shell adds them."""
        for run in report.runs:
            if run.run in self.training:
                self.training[run.run].advance(self.now_ns)
        runs = tuple(
            replace(
                run,
                progress=Progress(
                    counter=self.told_tokens(run.run), unit="tokens", rate_per_s=None, age_s=0.0
                ),
            )
            if run.run in self.training
            else run
            for run in report.runs
        )
        return replace(report, runs=runs)

    def told_tokens(self, run: Run) -> float:
        """What a job that trains tells of its tokens: the truth, unless a test puts a lie in its place."""
        return self.training[run].tokens

    def _listed(self, node: SimNode) -> nm.DevicesListed:
        infos = []
        for i, device in enumerate(node.devices.values()):
            limits = self._limits(device)
            infos.append(
                DeviceInfo(
                    uuid=device.uuid,
                    model="NVIDIA H200",
                    pci=f"{i}",
                    minor=i,
                    index=i,
                    limits=limits,
                    persistence=True,
                )
            )
        positions = dict(enumerate(node.devices))
        journal: dict[str, JournalEntry | str | None] = {
            uuid: node.journal.get(uuid) for uuid in node.devices
        }
        return nm.DevicesListed(
            devices=tuple(infos), failures=(), journal=journal, positions=positions, driver_start="d"
        )

    def _limits(self, device: Device) -> DeviceLimits:
        return DeviceLimits(
            min_mw=MIN_MW,
            max_mw=MAX_MW,
            default_mw=DEFAULT_MW,
            requested_mw=device.requested_mw,
            enforced_mw=device.enforced_mw,
        )

    def _sampled(self, node: SimNode, asked: nm.Sample) -> nm.Sampled:
        samples = []
        for uuid in asked.uuids:
            device = node.devices[uuid]
            clock_mhz, tensor = self._activity(device, asked=asked.activity)
            samples.append(
                DeviceSample(
                    uuid=uuid,
                    monotonic_ns=self.now_ns,
                    requested_mw=device.requested_mw,
                    enforced_mw=device.enforced_mw,
                    draw_mw=self._draw_mw(device),
                    energy_mj=None,
                    utilisation=None,
                    sm_clock_mhz=clock_mhz,
                    event_reasons=None,
                    sm_active=None if tensor is None else 0.97,
                    tensor_active=tensor if self.fate.tensor else None,
                )
            )
        return nm.Sampled(samples=tuple(samples), quick=asked.quick, activity=asked.activity)

    def _activity(self, device: Device, *, asked: bool) -> tuple[int | None, float | None]:
        """SM clock now, and if asked for the share of cycles with tensor work since it was last asked."""
        if not self.fate.activity:
            return None, None
        clock = CLOCK_MIN
        for trainee in self.training.values():
            if device in trainee.devices:
                trainee.advance(self.now_ns)
                clock = trainee.clock(device)
        noise = self._noise
        mhz = round(clock * SM_CLOCK_MAX_MHZ * noise.gauss(1, self.fate.noise) / 15) * 15
        if not asked:
            return mhz, None
        seconds, tensor_s = (self.now_ns - device.asked_ns) / NS, device.tensor_s
        device.asked_ns, device.tensor_s = self.now_ns, 0.0
        return mhz, min(1.0, tensor_s / seconds * noise.gauss(1, self.fate.noise)) if seconds > 0 else None

    def _draw_mw(self, device: Device) -> int:
        for trainee in self.training.values():
            if device in trainee.devices:
                return round(trainee.workload.power_w(trainee.clock(device)) * 1000)
        return min(device.demand_mw, device.enforced_mw)

    def _set(self, node: SimNode, uuid: str, cap_mw: int, life: int) -> None:
        """The device takes the value, though the agent that asked may be gone by now."""
        device = node.devices[uuid]
        device.requested_mw = cap_mw
        self.after(self._lag(self.fate.effect_delay_s), lambda: self._effect(node, device, cap_mw))
        if node.life == life:
            self._to_agent(node, nm.SetDone(uuid=uuid, limits=self._limits(device)))

    def _effect(self, node: SimNode, device: Device, cap_mw: int) -> None:
        if device.requested_mw != cap_mw:
            return
        before_mw = device.enforced_mw
        for trainee in self.training.values():
            if device in trainee.devices:
                trainee.advance(self.now_ns)
        device.enforced_mw = cap_mw
        if cap_mw > before_mw:
            self.raises += 1
            self._check_raise(device, before_mw)

    # ------------------------------------------------------------------------------------------- judging

    def caps_mw(self) -> int:
        return sum(device.enforced_mw for node in self.nodes.values() for device in node.devices.values())

    def site_mw(self) -> int:
        return self.caps_mw() + sum(round(s.overhead_w * 1000) for s in self.config.node_set) * len(
            self.nodes
        )

    def _check_raise(self, device: Device, before_mw: int) -> None:
        """Inside a window no raise may take the sum over the limit, or over what was said to be missing."""
        limit_mw = self.limit_now_mw()
        if limit_mw is None:
            return
        if self.now_ns - self.limit_set_ns < self.config.times.response_s * NS:
            limit_mw = max(limit_mw, self.limit_before_mw)  # raises of the limit before may be under way
        # What was said to be missing counts until the response time after it was taken back.
        since_ns = self.now_ns - round(self.config.times.response_s * NS)
        recent = [mw for at_ns, mw in self.said_mw if at_ns >= since_ns]
        before = [mw for at_ns, mw in self.said_mw if at_ns < since_ns]
        limit_mw += max([*recent, *before[-1:]])
        if self.site_mw() > limit_mw:
            self.violations.append(
                f"{(self.now_ns - self.limit_set_ns) / NS:.2f} s after the limit: {device.uuid} went from "
                f"{before_mw} to {device.enforced_mw} and the site to {self.site_mw()} over {limit_mw}"
            )

    # ------------------------------------------------------------------------------------------- jobs

    def start_job(
        self,
        job_id: int,
        gpus: dict[str, list[int]],
        *,
        flex: str = "",
        partition: str = "main",
        watts: int = 690,
        model: ModelJob | None = None,
        restart: int = 0,
    ) -> Run:
        """With a ``model`` the job draws, works and tells its progress as that model job does."""
        run = Run("world", job_id, restart)
        self.slurm[run] = job_info(run, tuple(gpus), partition)
        for name, positions in gpus.items():
            node = self.nodes[name]
            node.jobs[run] = JobFile(
                job_id=job_id, restart=restart, uid=1000, gpus=tuple(positions), flex=flex
            )
            for place in positions:
                list(node.devices.values())[place].demand_mw = watts * 1000
            self._to_agent(node, nm.JobFilesRead(files=tuple(node.jobs.values())))
        if model is not None:
            devices = tuple(
                list(self.nodes[name].devices.values())[place]
                for name, places in gpus.items()
                for place in places
            )
            rate = model.tokens_per_s_on(len(devices))
            self.training[run] = Trainee(model.workload, rate, devices, self.now_ns, began_ns=self.now_ns)
        return run

    def end_job(self, run: Run) -> None:
        self.slurm.pop(run, None)
        self.training.pop(run, None)
        for node in self.nodes.values():
            job = node.jobs.pop(run, None)
            if job is not None:
                for place in job.gpus:
                    list(node.devices.values())[place].demand_mw = 75_000
                self._to_agent(node, nm.JobFilesRead(files=tuple(node.jobs.values())))

    def cap_of(self, run: Run) -> set[int]:
        found: set[int] = set()
        for node in self.nodes.values():
            if run in node.jobs:
                devices = list(node.devices.values())
                found.update(devices[place].enforced_mw for place in node.jobs[run].gpus)
        return found

    def all_restored(self) -> bool:
        return all(
            device.enforced_mw == device.requested_mw == DEFAULT_MW
            for node in self.nodes.values()
            for device in node.devices.values()
        )


def job_info(run: Run, nodes: tuple[str, ...], partition: str) -> JobInfo:
    """Slurm's record of a run of this world."""
    return slurm_job(run.job_id, restart=run.restart, nodes=nodes, partition=partition)
