"""The controller's process: sockets, clocks, Slurm and files around the pure core. It only composes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import structlog

from ..bus.asking import UNREACHABLE, WRONG_USE
from ..bus.control import ControlServer
from ..bus.local import LocalServer
from ..bus.unix import Peer, SocketError
from ..config import Config, ConfigError, load_config
from ..elasticity.library import LibraryError
from ..model import Report, Run
from ..slurm.choice import open_backend
from ..store.audit import AuditLog
from ..store.epoch import EpochStore
from ..store.given import GivenStore
from ..store.history import History, HistoryError
from ..store.limits import LimitStore
from ..store.sealed import UnreadableError
from ..store.switch import OffSwitch
from .announce import site_fields
from .answers.jobs import summary_with
from .answers.orders import Orders
from .commanded import Commanded
from .core import Core
from .kinship import kin_name
from .knowledge import Knowledge, learn_runs
from .log import set_up_logging
from .nodes import ConfigNodesError, cannot_leave, declared_nodes, with_nodes
from .recorder import Recorder
from .remembered import RememberedDraws, host_boot_id, read_record
from .science import Science, site_library
from .state import (
    Action,
    Audit,
    CurvesLearned,
    Cycle,
    EpochTaken,
    Event,
    JobRead,
    LearnCurves,
    LimitsChanged,
    NeedEpoch,
    NodeLost,
    OffChanged,
    RaiseTimeLimit,
    ReadAllJobs,
    ReadJob,
    ReportCame,
    SendPlan,
    State,
    WriteTag,
)
from .worker.private_data import PrivateData
from .worker.slurm_worker import SlurmWorker
from .worker.time_limit_writer import TimeLimitWriter

BUS_SOCKET = "bus.sock"
CONTROL_SOCKET = "control.sock"
MIN_CYCLE_GAP_S = 0.02
MOST_SAID = 500  # characters of an error that may quote what it stumbled over

log = structlog.get_logger("controller")


class Controller:
    """One controller over one state folder. ``run`` lasts until ``stop`` is called."""

    def __init__(self, config: Config, path: Path) -> None:
        self.config = config
        self._path = path
        self.core = Core(config, Science(site_library(config)))
        state_dir, run_dir = Path(config.controller.state_dir), Path(config.controller.run_dir)
        self._epochs = EpochStore(state_dir / "epoch.json")
        self._commanded = Commanded(state_dir / "commanded.json")
        self.limits = LimitStore(state_dir / "limits.json")
        self._off_switch = OffSwitch(state_dir / "off.json")
        self._draws = RememberedDraws(state_dir / "draw_before.json")
        self.audit = AuditLog(state_dir / "audit.jsonl", "controller", on_fault=log.error)
        self.history = History(
            state_dir / "history.db",
            days=config.controller.history_days,
            most_bytes=round(config.controller.history_max_mb * 2**20),
            on_fault=log.error,
        )
        self._boot_id = host_boot_id()
        self.recorder = Recorder(self.history, summary_with(self.core.science), self._boot_id)
        backend = open_backend(config.slurm, timeout_s=config.times.slurm_timeout_s, say=log.warning)
        self._end_backend = backend.close
        self._given = GivenStore(state_dir / "time_given.json")
        time_limits = TimeLimitWriter(backend, self._given, self._is_alive)
        self._slurm = SlurmWorker(
            backend, config, self._on_slurm, time_limits=time_limits, is_alive=self._is_alive
        )
        self.private_data = PrivateData(backend, lambda: self.config.times)
        self._bus = LocalServer(
            run_dir / BUS_SOCKET,
            on_report=self._on_report,
            on_gone=lambda node: self.take(NodeLost(node=node)),
            on_fault=log.warning,
            node_uids=(os.geteuid(),) if os.geteuid() != 0 and config.node.identity_dir else (),
        )
        self._control = ControlServer(
            run_dir / CONTROL_SOCKET, handler=Orders(self).handle, on_fault=_say_fault
        )
        self._stopping = asyncio.Event()
        self._wake = asyncio.Event()
        self._said = ""
        self.state = State(epoch=0, started_ns=time.monotonic_ns(), nodes=declared_nodes(config))

    # ---------------------------------------------------------------------------------------------- life

    async def run(self) -> int:
        """Take command and keep it until told to stop. Raises nothing that an admin can mend: it says it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            first_start = self._epochs.first_start
            # The bus socket is ours before an epoch is taken: two controllers must not fence each other for ever.
            await self._bus.start()
            await self._control.start()
            self.history.start()
            self._take_command(first_start=first_start)
        except (SocketError, UnreadableError, OSError) as error:
            log.error(f"cannot start: {error}")
            await self._close()
            return UNREACHABLE
        log.info(
            "commanding", cluster=self.config.cluster, epoch=self.state.epoch, nodes=len(self.state.nodes)
        )
        workers = [asyncio.create_task(work) for work in (self._slurm.run(), self.private_data.run())]
        for worker in workers:
            worker.add_done_callback(_tell_end)
        try:
            await self._cycles()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
            await self._close()
        return 0

    def stop(self) -> None:
        """End after the current event. Nodes follow the schedules that they hold."""
        self._stopping.set()
        self._wake.set()

    async def _close(self) -> None:
        await self._control.close()
        await self._bus.close()
        await self._end_backend()
        self.recorder.leave(self.state, time.time())
        self.history.close()
        self.audit.close()

    def _take_command(self, *, first_start: bool) -> None:
        self._commanded.load()
        self.audit.write("site", site_fields(self.state, self.config))
        try:
            self._given.load()
        except UnreadableError as error:
            log.error(
                f"{error}; no time limit is raised until the file is put aside and the controller restarts"
            )
        off = self._off_switch.load()
        self.state = self._draws.recall(self.state, time.monotonic_ns(), time.time())
        self.take(EpochTaken(epoch=self._epochs.next_epoch()))
        if off:
            log.warning("everything is off, as an admin said before; 'slurm-pfi on' enforces again")
            self.take(OffChanged(off=True))
        try:
            limits = self.limits.load(first_start=first_start)
        except UnreadableError as error:
            log.error(f"{error}; nothing is changed until 'slurm-pfi limit clear --all' puts it aside")
            self.take(LimitsChanged(limits=(), known=False))
        else:
            self.take(LimitsChanged(limits=limits))

    def _reload(self) -> None:
        """SIGHUP: a good file comes into force whole, a bad one not at all."""
        self.audit.reopen()
        try:
            config = load_config(self._path)
            declared = declared_nodes(config)
        except (ConfigError, ConfigNodesError) as error:
            log.error(f"config not reloaded, the old one stays in force: {error}")
            return
        if config.cluster != self.config.cluster or config.controller != self.config.controller:
            log.error(
                "config not reloaded: cluster and [controller] need a restart; the old one stays in force"
            )
            return
        if reason := cannot_leave(self.state, declared, self.config, time.monotonic_ns()):
            log.error(f"config not reloaded, the old one stays in force: {reason}")
            return
        before = (self.config.slurm, self.config.times.slurm_timeout_s)
        if (config.slurm, config.times.slurm_timeout_s) != before:
            log.warning("[slurm] and times.slurm_timeout_s stay as they were until a restart")
        self.config = config
        self.core = Core(config, self.core.science)
        self._slurm.set_rate(config.tag.max_writes_per_s)
        self.state = with_nodes(self.state, declared)
        self.audit.write("site", site_fields(self.state, self.config))
        log.info("config reloaded", path=str(self._path))
        self._wake.set()

    # -------------------------------------------------------------------------------------------- events

    def take(self, event: Event) -> None:
        """Hand an event to the core and do what it asks; a planning cycle follows soon."""
        self._handle(event)
        self._wake.set()

    def _handle(self, event: Event) -> None:
        """One event, whatever is wrong with it: a fault of ours is said and leaves the last safe state in force."""
        try:
            self.state, actions = self.core.step(self.state, event, time.monotonic_ns())
            self._commanded.mark(actions, self.state)
            for action in actions:
                self._do(action)
            self._draws.keep(self.state, time.monotonic_ns(), time.time())
        except Exception as error:
            text = f"{type(event).__name__}: {error!r}"[:MOST_SAID]
            if text != self._said:
                log.exception(f"a fault of the controller, please report it; nothing is changed by {text}")
            self._said = text

    def switch(self, *, off: bool, uid: int) -> str:
        """The red button. It works at once; returns why it will not outlive this process, empty if it will."""
        self.take(OffChanged(off=off, uid=uid))
        try:
            self._off_switch.save(off=off)
        except OSError as error:
            return f"; but this is forgotten when the controller restarts: {error}"
        return ""

    async def _cycles(self) -> None:
        """A cycle after every event, several events together, and at the latest after the cycle time."""
        while not self._stopping.is_set():
            self._wake.clear()
            began_s = time.monotonic()
            self._handle(Cycle(now_unix_s=time.time()))
            self.recorder.cycle(self.state, self.config, time.monotonic_ns(), time.time())
            took_s = time.monotonic() - began_s
            times = self.config.times
            wait_s = times.cycle_s if self.state.window is None else times.cycle_window_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait_s)
            # Reports come in bunches: give the bunch a moment, and a large site's reports half of our time.
            await asyncio.sleep(max(MIN_CYCLE_GAP_S, took_s))

    def _on_report(self, report: Report, _peer: Peer) -> None:
        self.take(ReportCame(report=report, priors=self._commanded.priors_for(report)))

    def _is_alive(self, run: Run) -> bool:
        view = self.state.runs.get(run)
        return view is not None and view.phase != "gone"

    def tag_view(self) -> dict[str, Any]:
        """What became of the tags, for ``slurm-pfi status``."""
        return {"enabled": self.config.tag.enabled, **self._slurm.tag_view()}

    def _on_slurm(self, event: Event) -> None:
        """Slurm's answers; one on a job comes with what the history remembers of it and of its kind."""
        if isinstance(event, JobRead) and event.job is not None:
            job = event.job
            event = msgspec.structs.replace(event, given_s=self._given.of(event.run))
            with contextlib.suppress(HistoryError):  # it says itself what is wrong with it
                # A slurmctld that lost its state begins again at job 1: what is older than the run is of another.
                began_s = float(job.start_unix_s) if isinstance(job.start_unix_s, int) else 0.0
                kept = read_record(self.history.kept_record(str(event.run), self._boot_id, began_s))
                kins = self.history.recall(job.user_id, job.account, job.name) if kin_name(job) else ()
                event = msgspec.structs.replace(event, kins=tuple(kins), kept=kept)
        self.take(event)

    # ------------------------------------------------------------------------------------------- actions

    def _do(self, action: Action) -> None:
        match action:
            case Audit(event=event, fields=fields):
                self.audit.write(event, fields)
                self.recorder.audit(event, fields, time.time())
                if event not in ("plan_sent", "window"):
                    log.info(event.replace("_", " "), **fields)
            case SendPlan():
                if self._commanded.may_send(action.plan):
                    self._bus.send(action.plan.node, action.plan)
            case ReadJob(run=run):
                self._slurm.read_job(run)
            case ReadAllJobs():
                self._slurm.read_all()
            case WriteTag():
                self._slurm.write_tag(action)
            case RaiseTimeLimit():
                self._slurm.raise_time_limit(action)
            case LearnCurves():
                self._learn(action)
            case NeedEpoch(above=above):
                self._raise_epoch(above)

    def _learn(self, action: LearnCurves) -> None:
        """In a thread: limits are more urgent than curves, and numpy lets others work meanwhile."""
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(None, learn_runs, self.core.science.prior, action.evidence, action.number)
        done.add_done_callback(self._on_learned)

    def _on_learned(self, done: asyncio.Future[Knowledge]) -> None:
        if done.cancelled() or self._stopping.is_set():
            return
        error = done.exception()
        if error is not None:
            log.error(f"a fault of the learner, please report it; what was known before stands: {error!r}")
        self.take(CurvesLearned(knowledge=None if error is not None else done.result()))

    def _raise_epoch(self, above: int) -> None:
        try:
            epoch = self._epochs.next_epoch(above)
        except (UnreadableError, OSError) as error:
            log.error(f"a node has seen epoch {above}, and no higher one can be taken: {error}")
            return
        asyncio.get_running_loop().call_soon(self.take, EpochTaken(epoch=epoch))


def _say_fault(text: str) -> None:
    log.error(f"a fault of the controller, please report it: {text[:MOST_SAID]}")


def _tell_end(worker: asyncio.Task[None]) -> None:
    """No worker ends by itself; one that does would never be missed."""
    if not worker.cancelled() and (error := worker.exception()) is not None:
        _say_fault(f"Slurm is no longer asked, restart the controller: {error!r}")


def run_controller(config: Config, path: Path) -> int:
    """Run until SIGTERM. Exit codes as everywhere: 2 for a config that cannot work, 3 if a socket is taken."""
    os.umask(0o022)
    set_up_logging()
    try:
        declared_nodes(config)
    except ConfigNodesError as error:
        log.error(f"{path}: {error}")
        return WRONG_USE
    return asyncio.run(_run(config, path))


async def _run(config: Config, path: Path) -> int:
    try:
        controller = Controller(config, path)
    except LibraryError as error:
        log.error(f"cannot start: controller.curves: {error}")
        return WRONG_USE
    except OSError as error:
        log.error(f"cannot start: {error}")
        return UNREACHABLE
    return await controller.run()
