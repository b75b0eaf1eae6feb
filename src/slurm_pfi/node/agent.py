"""The running agent: job files, progress, bus, control socket and signals around one Runtime."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from .. import __version__
from ..bus.asking import NO, UNREACHABLE, WRONG_USE, Reply, Request, refusal
from ..bus.control import ControlServer
from ..bus.local import LocalClient
from ..bus.unix import Peer, SocketError
from ..config import Config, ConfigError, load_config
from ..gpu.identity import driver_version
from ..model import Plan
from .hardware import Hardware
from .health import pet_watchdog, tell_status
from .jobfile import read_job_folder
from .joblines import JobLines
from .log import Log
from .messages import (
    Connected,
    FaultChanged,
    JobFilesRead,
    PlanRead,
    PlanReceived,
    Reconfigured,
    ReleaseAsked,
    ResumeAsked,
    StopAsked,
)
from .notify import notify, reloading, status, summary, watchdog_period_s
from .overview import overview
from .paths import BUS_SOCKET, NodePaths
from .plan import HeldPlan
from .progress_socket import ProgressSocket
from .restorer import leave
from .runtime import Runtime, wait_until
from .sender import JobFinder
from .setup import commanders, settings_of
from .state import State
from .watch import FolderWatch

if TYPE_CHECKING:
    from .scrape import MetricsServer

SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Block them before a restorer is dismissed, until ``run`` can heed them: a stop in between must leave one again."""
STOP_S: Final = 10.0
"""The longest way from SIGTERM to the end: sets under way 3 s, systemd 3 s, the NVML process 3 s."""
_RELEASE_S: Final = 20.0
_MOST_REFUSED_UIDS: Final = 1024


class Agent:
    """Everything of one node but its GPUs, which ``hardware`` stands for. The caller holds the node's lock."""

    def __init__(
        self, config: Config, config_file: Path, node: str, paths: NodePaths, hardware: Hardware, log: Log
    ) -> None:
        """Raises IdentityError when boot id or driver start cannot be read."""
        self._config = config
        self._config_file = config_file
        self._node = node
        self._paths = paths
        self._log = log
        self._trusted = frozenset({0, os.geteuid()})
        self._ignored: dict[str, str] = {}
        self._refused_uids: set[int] = set()
        self._watch: FolderWatch | None = None
        self._metrics: MetricsServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._present: frozenset[str] = frozenset()
        self._lines = JobLines(paths.lines, config.cluster)
        self.runtime = Runtime(
            settings_of(config, node, hardware.identity().boot_id),
            paths=paths,
            hardware=hardware,
            log=log,
            leave_restorer=self._leave_restorer,
        )
        self._client = LocalClient(
            Path(config.controller.run_dir) / BUS_SOCKET,
            trusted_uids=commanders(config),
            on_plan=self._on_plan,
            on_state=self._bus_changed,
            back_off_cap_s=min(2.0, config.times.report_s),
        )
        self.runtime.client = self._client
        self._control = ControlServer(
            paths.control, handler=self._answer, on_fault=lambda text: log.warning("control", fault=text)
        )
        self._progress = ProgressSocket(
            paths.progress,
            JobFinder(self._trusted),
            self.runtime.progress,
            on_first_drop=lambda why, uid: log.warning("progress dropped", why=why, uid=uid),
        )

    async def run(self) -> None:
        """Serve until SIGTERM has been dealt with. Whatever is missing at start is said, and tried again."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self.runtime.feed(_read_plan(self._paths.plan))
        if self._paths.released.exists():
            self._log.info("released by the admin before; 'slurm-pfi node resume' ends it")
            self.runtime.feed(ReleaseAsked())
        self._watch_jobs()
        self._read_jobs()
        await self._open_sockets()
        self._tasks = [
            asyncio.create_task(self._client.run()),
            asyncio.create_task(self._rescan()),
            asyncio.create_task(self._tell_listed()),
        ]
        period_s = watchdog_period_s()
        if period_s is not None:
            pet = pet_watchdog(self.runtime.stalled, period_s, self._log)
            self._tasks.append(asyncio.create_task(pet))
        notify("READY=1", status(self._summary()))
        if os.environ.get("NOTIFY_SOCKET"):
            self._tasks.append(asyncio.create_task(tell_status(self.runtime)))
        self._log.info("ready", node=self._node, pid=os.getpid())
        try:
            await self.runtime.ended.wait()
        finally:
            await self._close()

    async def _tell_listed(self) -> None:
        """What runs here and on what, in one line, once the GPUs are known."""
        async with self.runtime.changed:
            await self.runtime.changed.wait_for(lambda: self.runtime.state.listed)
        state = self.runtime.state
        self._log.info(
            "GPUs listed",
            gpus=len(state.gpus),
            mode=state.held.plan.mode if state.held else "no plan",
            version=__version__,
            config=self._config_file,
            driver="simulated" if self._config.simulated else driver_version() or "unknown",
        )

    def _stop(self) -> None:
        """SIGTERM or SIGINT. A second one changes nothing: the sets under way are waited for, for a bounded time."""
        notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(STOP_S * 1e6)}", status("stopping"))
        self.runtime.feed(StopAsked())

    def _summary(self) -> str:
        return summary(self.runtime.state, time.monotonic_ns())

    async def _open_sockets(self) -> None:
        """Those that are not open: at start, and again while a full disk or another process is in the way."""
        if not self._control.listening:
            fault = ""
            try:
                await self._control.start()
            except SocketError as error:
                fault = f"slurm-pfi node release will not work: {error}"
            self.runtime.feed(FaultChanged(what="control", text=fault))
        if not self._progress.listening:
            fault = ""
            try:
                self._progress.open()
            except SocketError as error:
                fault = f"jobs cannot report progress: {error}"
            self.runtime.feed(FaultChanged(what="progress", text=fault))
        self._open_metrics()

    def _open_metrics(self) -> None:
        where = self._config.node.metrics
        if where == "off" or self._metrics is not None:
            return
        from .metrics import exposition
        from .scrape import MetricsServer

        server = MetricsServer(where, self._paths.metrics, exposition(self.runtime))
        try:
            server.start()
            self._metrics = server
            self.runtime.feed(FaultChanged(what="metrics", text=""))
            self._log.info("metrics", at=self._paths.metrics if where == "unix" else where)
        except SocketError as error:
            self.runtime.feed(FaultChanged(what="metrics", text=f"Prometheus cannot read metrics: {error}"))

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch.descriptor)
            self._watch.close()
        self._progress.close()
        if self._metrics is not None:
            await self._metrics.close()
        await self._control.close()
        await self.runtime.close()
        self._log.tell_repeated(all_of_it=True)

    # ------------------------------------------------------------------------------------------- job files

    def _watch_jobs(self) -> None:
        try:
            self._watch = FolderWatch()
            self._watch.watch(self._paths.jobs)
        except OSError as error:
            self._log.warning("jobs are seen late", why=error, rescan_s=self._config.times.rescan_s)
            if self._watch is None:
                return
        asyncio.get_running_loop().add_reader(self._watch.descriptor, self._jobs_changed)

    def _jobs_changed(self) -> None:
        assert self._watch is not None
        self._watch.drain()
        self._read_jobs()

    async def _rescan(self) -> None:
        """inotify may lose events, and the folder may be replaced: look at all of it now and then."""
        while True:
            await asyncio.sleep(self._config.times.rescan_s)
            self._log.tell_repeated()
            self.runtime.save_again()
            await self._open_sockets()
            if self._watch is not None:
                with contextlib.suppress(OSError):
                    self._watch.watch(self._paths.jobs)
            self._read_jobs()

    def _read_jobs(self) -> None:
        try:
            files, ignored = read_job_folder(self._paths.jobs, trusted_uids=self._trusted)
        except OSError as error:
            # Unknown is not the same as no jobs: what was known stays.
            text = f"job files cannot be read: {error}"
            self.runtime.feed(FaultChanged(what="jobs", text=text))
            return
        for name, why in ignored.items():
            if self._ignored.get(name) != why:
                self._log.warning("job file ignored", name=name, why=why)
        self._ignored = ignored
        self._progress.expect(files)
        self._present = frozenset(file.name for file in files)
        self._lines.forget(self._present)
        self.runtime.feed(FaultChanged(what="jobs", text=""))
        self.runtime.feed(JobFilesRead(files=files))

    # ------------------------------------------------------------------------------------- bus and control

    def _on_plan(self, plan: Plan) -> None:
        self.runtime.feed(PlanReceived(plan=plan))
        held = self.runtime.state.held
        if not plan.lines or held is None or held.plan.id != plan.id:
            return
        try:
            self._lines.keep(plan.lines, self._present)
        except OSError as error:
            self._log.warning("a job's line cannot be kept", why=error)

    def _bus_changed(self, up: bool, why: str) -> None:  # noqa: FBT001 - LocalClient's callback
        if up:
            self._log.info("controller reached", why=why)
        else:
            self._log.warning("controller not reached", why=why)
        self.runtime.feed(Connected(up=up))

    async def _answer(self, request: Request, peer: Peer) -> Reply:
        if request.command == "status":
            return Reply(ok=True, data=self._status())
        if request.command not in ("release", "resume"):
            return refusal(f"unknown command {request.command[:40]!r}", exit_code=WRONG_USE)
        if peer.uid not in self._trusted:
            self._log_refused(request.command, peer)
            return refusal(f"uid {peer.uid} may not {request.command} this node; ask its admin", exit_code=NO)
        if request.command == "resume":
            try:
                self._paths.released.unlink(missing_ok=True)
            except OSError as error:
                return refusal(f"{self._paths.released} cannot be removed: {error.strerror}", exit_code=NO)
            self.runtime.feed(ResumeAsked())
            return Reply(ok=True, message=f"{self._node} takes plans again")
        return await self._release()

    def _log_refused(self, command: str, peer: Peer) -> None:
        """Once for each user: who asks a thousand times shall not fill the log."""
        if peer.uid not in self._refused_uids and len(self._refused_uids) < _MOST_REFUSED_UIDS:
            self._refused_uids.add(peer.uid)
            self._log.warning("control refused", uid=peer.uid, pid=peer.pid, command=command)

    async def _release(self) -> Reply:
        if self.runtime.state.stopping_ns is not None:
            return refusal(f"the agent of {self._node} is stopping; ask again", exit_code=UNREACHABLE)
        try:
            self._paths.released.touch()
        except OSError as error:  # it restores all the same
            self._log.error("the release is forgotten when the agent restarts", why=error)
        self.runtime.feed(ReleaseAsked())
        freed = await wait_until(self.runtime, lambda state: state.freed, _RELEASE_S)
        state = self.runtime.state
        if not state.listed:
            how = "the GPUs are free for a reset" if freed else "still being tried"
            why = state.faults.get("nvml", "GPUs not listed yet")
            return refusal(f"nothing could be restored, {how}: {why}", exit_code=NO)
        if not freed or not _all_rest(state):
            left = [
                f"{gpu.uuid} ({gpu.set_fault or gpu.blocked or gpu.read_fault or 'waiting'})"
                for gpu in state.gpus.values()
                if gpu.current_mw is not None or gpu.pending is not None
            ]
            how = (
                "not restored; the GPUs are free for a reset"
                if freed
                else "not restored yet, still being tried"
            )
            return refusal(f"{how}: {', '.join(left)}", exit_code=NO)
        message = (
            f"{self._node} released: every GPU is at its prior limit and free for a reset; "
            "'slurm-pfi node resume' ends it"
        )
        return Reply(ok=True, message=message)

    def _status(self) -> dict[str, Any]:
        data = overview(self.runtime.state, time.monotonic_ns())
        data["progress_dropped"] = dict(self._progress.dropped)
        data["job_files_ignored"] = self._ignored
        return data

    # --------------------------------------------------------------------------------------------- the rest

    def _leave_restorer(self, at_ns: int) -> None:
        try:
            leave(self._config, self._node, self._paths, at_ns, self._log)
        except OSError as error:
            self._log.error("no restorer could be left; limits stay until an agent is back", why=error)

    def _reload(self) -> None:
        """SIGHUP: what of a new config may change while we run. A bad file changes nothing at all, and is said."""
        reloading()
        self.runtime.reopen_audit()
        try:
            self._take(load_config(self._config_file))
        except ConfigError as error:
            self.runtime.feed(FaultChanged(what="config", text=f"the old settings stay in force: {error}"))
        finally:
            notify("READY=1", status(self._summary()))

    def _take(self, config: Config) -> None:
        new, later = _reloaded(self._config, config)
        old = self.runtime.state.settings
        self._config = new
        self.runtime.feed(FaultChanged(what="config", text=""))
        self.runtime.feed(Reconfigured(settings=settings_of(new, self._node, old.boot_id, old.agent_id)))
        if later:
            self._log.warning("these change at the next start only", keys=later)
        self._log.info("settings reloaded", config=self._config_file)


def _reloaded(old: Config, new: Config) -> tuple[Config, list[str]]:
    """The new config with the old value of what a running agent keeps, and the names of what differs there."""
    replace = msgspec.structs.replace
    kept = replace(
        new,
        cluster=old.cluster,
        node=old.node,
        slurm=old.slurm,
        controller=replace(new.controller, user=old.controller.user, run_dir=old.controller.run_dir),
        times=replace(new.times, device_deadline_s=old.times.device_deadline_s),
    )
    differing = {
        "cluster": kept.cluster != new.cluster,
        "[node]": kept.node != new.node,
        "[slurm]": kept.slurm != new.slurm,
        "controller.user, controller.run_dir": kept.controller != new.controller,
        "times.device_deadline_s": kept.times != new.times,
    }
    return kept, [name for name, differs in differing.items() if differs]


def _all_rest(state: State) -> bool:
    return all(gpu.current_mw is None and gpu.pending is None for gpu in state.gpus.values())


def _read_plan(path: Path) -> PlanRead:
    try:
        return PlanRead(held=msgspec.json.decode(path.read_bytes(), type=HeldPlan))
    except FileNotFoundError:
        return PlanRead(held=None)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        return PlanRead(held=None, fault=f"{path} is of no use: {error}; limits stay until a plan comes")
