"""A whole site under one folder: a real Slurm cluster with simulated GPUs, node agents, a controller, an observer.

    with Site(SiteOptions()) as site:
        job = site.submit("L70 FT nc", gpus=8, flex="medium")
        site.cli("limit", "set", "20kW")

Nodes n2 and n4 are scrambled: gres position, minor number and NVML index differ for every GPU. Jobs run as an ordinary
user. Everything listens on loopback or in the folder, and ``stop`` ends each process by its own pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import slurm_pfi

from . import gpus
from .cluster import Cluster, ClusterError, ClusterOptions, Gpu, wait_until
from .daemons import START_S, Daemons
from .processes import processes_naming
from .simjob import InstalledJob, install_job

PACKAGE_PARENT: Final = Path(slurm_pfi.__file__).parent.parent
CONFIG: Final = """\
cluster = "{name}"
mode = "{mode}"

[[node_set]]
names = "{nodes}"
gpus = {gpus}
gpu_max_w = 700
overhead_w = {overhead_w}

[controller]
user = "{user}"
state_dir = "{root}/controller/state"
run_dir = "{root}/controller/run"

[node]
state_dir = "{root}/nodes"
identity_dir = "{root}/identity"

[slurm]
conf = "{slurm_conf}"
"""


@dataclass(frozen=True, kw_only=True)
class SiteOptions:
    """``policy`` and ``times`` are TOML lines for these sections; ``scrambled`` names nodes of mixed-up numbering.
    Every cap goes as soon as its limit ends, unless ``times`` has a ``rebound_s``.

    ``admin_limits`` gives watts by node and gres position that an admin had set before any agent starts;
    ``agentless`` names nodes whose agent is not started; ``parts``, ``conf`` and ``accounting`` are the cluster's.
    """

    nodes: int = 4
    gpus: int = 8
    overhead_w: float = 1000.0
    mode: str = "enforce"
    scrambled: tuple[str, ...] = ("n2", "n4")
    slurm_user: str | None = None
    policy: Mapping[str, Any] = field(default_factory=lambda: {"none_partitions": ["urgent"]})
    times: Mapping[str, Any] = field(default_factory=dict)
    admin_limits: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    agentless: tuple[str, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict)
    conf: Sequence[str] = ()
    accounting: bool = False
    keep: bool = False


class Site(Daemons):
    """Starts with ``start()`` or ``with``, and must be stopped. Not for use by several threads."""

    def __init__(self, options: SiteOptions | None = None) -> None:
        self.options = options or SiteOptions()
        super().__init__()
        self.before: list[dict[str, Any]] = []
        self.foreign: list[dict[str, Any]] = []
        self.cluster: Cluster
        self._job: InstalledJob

    # ------------------------------------------------------------------------------------------ start and stop

    def start(self) -> Site:
        """Bring everything up, and return when the controller has heard every node."""
        self.root = Path(tempfile.mkdtemp(prefix="pfi-site-"))
        self.root.chmod(0o755)
        try:
            self._install_job()
            self._start_cluster()
            self._create_gpus()
            self._set_admin_limits()
            self._write_config()
            self.start_controller()
            agents = [node for node in self.node_names if node not in self.options.agentless]
            for node in agents:
                self.start_agent(node, wait=False)
            self.wait_heard(*agents)
        except BaseException:
            self.stop()
            raise
        return self

    def __enter__(self) -> Site:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leftovers = self.stop()
        if error is None and leftovers:
            raise ClusterError("; ".join(leftovers))

    def stop(self) -> list[str]:
        """End agents, controller and cluster, each by its pid. Returns what was not as it should be."""
        troubles: list[str] = []
        for name in [name for name in self._processes if name != "controller"]:
            self._end(name, troubles)
        if "controller" in self._processes:
            self._end("controller", troubles)
        if hasattr(self, "cluster") and self.cluster in Cluster.running:
            report = self.cluster.stop()
            troubles += [f"{node} out of service: {why}" for node, why in report.drained.items()]
            troubles += list(report.leftovers)
        troubles += self._end_restorers()
        if not self.options.keep:
            shutil.rmtree(self.root, ignore_errors=True)
        return troubles

    def _install_job(self) -> None:
        """Jobs run as another user, who may not be able to read where this project lies."""
        self._job = install_job(self.root / "python", self.root / "sim")
        (self.root / "out").mkdir()
        (self.root / "out").chmod(0o1777)

    def _start_cluster(self) -> None:
        options = self.options
        names = [f"n{number}" for number in range(1, options.nodes + 1)]
        gres = {
            name: [
                Gpu(minor=device.minor)
                for device in gpus.plan_devices(
                    name, options.gpus, Path("/"), scrambled=name in options.scrambled
                )
            ]
            for name in names
        }
        job_env = {
            **self._job.env,
            "PYTHONDONTWRITEBYTECODE": "1",
            "SLURM_PFI_PROGRESS": f"{self.root}/nodes/%n/progress.sock",
        }
        self.cluster = Cluster(
            ClusterOptions(
                nodes=options.nodes,
                gres=gres,
                parts=options.parts,
                conf=options.conf,
                job_env=job_env,
                slurm_user=options.slurm_user,
                accounting=options.accounting,
                parent=self.root,
                keep=options.keep,
            )
        ).start()
        (self.root / "nodes").symlink_to(self.cluster.state_dir)

    def _create_gpus(self) -> None:
        for name in self.node_names:
            gpus.create_node(
                self.sim_dir(name),
                gpus=self.options.gpus,
                device_dir=self.cluster.layout.device(name, 0).parent,
                scrambled=name in self.options.scrambled,
            )
            identity = self.root / "identity" / name
            identity.mkdir(parents=True)
            (identity / "boot_id").write_text(f"{uuid.uuid4()}\n")
            (identity / "driver_start").write_text("1\n")

    def _set_admin_limits(self) -> None:
        for node, limits in self.options.admin_limits.items():
            for position, watts in limits.items():
                self.foreign_write(node, position, watts)
        self.before = self.snapshot()

    def _write_config(self) -> None:
        account = self.controller_account
        for folder in ("controller", "controller/state", "controller/run"):
            path = self.root / folder
            path.mkdir(mode=0o755)
            if os.getuid() == 0:
                os.chown(path, account.pw_uid, account.pw_gid)
        options = self.options
        text = CONFIG.format(
            name=self.cluster.options.name,
            mode=options.mode,
            nodes=f"n[1-{options.nodes}]" if options.nodes > 1 else "n1",
            gpus=options.gpus,
            overhead_w=options.overhead_w,
            user=account.pw_name,
            root=self.root,
            slurm_conf=self.cluster.slurm_conf,
        )
        for section, values in (("policy", options.policy), ("times", {"rebound_s": 0, **options.times})):
            lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
            text += "\n".join(["", f"[{section}]", *lines, ""])
        self.config_file.write_text(text)

    def set_policy(self, name: str) -> None:
        """Change the policy in the config, and return when the controller goes by it."""
        text = self.config_file.read_text()
        self.config_file.write_text(re.sub(r'(?m)^name = ".*"$', f'name = "{name}"', text, count=1))
        self.send_signal("controller", signal.SIGHUP)
        wait_until(lambda: self.status()["policy"] == name, START_S, f"the controller goes by policy {name}")

    # ------------------------------------------------------------------------------------------ daemons

    def start_controller(self) -> None:
        """Start it, and return when it answers."""
        self._spawn("controller", ["controller"], self._daemon_env, _run_as(self.controller_account))
        self._wait_for("controller", lambda: self.cli("status", check=False).returncode == 0)

    def start_agent(
        self, node: str, *, wait: bool = True, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the agent of a node, and return when it answers. ``environment`` replaces that of its NVML."""
        if environment is None:
            environment = gpus.nvml_environment(self.sim_dir(node))
        self._spawn(node, ["node", "run", "--node-name", node], {**self._daemon_env, **environment})
        if wait:
            self._wait_for(node, lambda: self.node_cli(node, "status", check=False).returncode == 0)

    def wait_heard(self, *nodes: str, timeout_s: float = START_S) -> None:
        """Wait until the controller shows these nodes as ok, with all their GPUs' prior limits known."""

        def heard() -> bool:
            shown = {node["name"]: node for node in self.status()["nodes"]}
            return all(shown[n]["state"] == "ok" and not shown[n]["prior_unknown"] for n in nodes)

        wait_until(heard, timeout_s, f"the controller has heard {', '.join(nodes)}")

    def _end_restorers(self) -> list[str]:
        """Restorers that agents left behind belong to this site and go with it."""
        left = processes_naming(self.root) if self.root != Path() else {}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"left running: {command}" for command in left.values() if "restorer" not in command]

    # ------------------------------------------------------------------------------------------ names

    @property
    def node_names(self) -> tuple[str, ...]:
        return self.cluster.node_names

    @property
    def config_file(self) -> Path:
        return self.root / "slurm-pfi.toml"

    @property
    def _daemon_env(self) -> dict[str, str]:
        """In which daemons and command lines run."""
        return {
            **self.cluster.client_env,
            "SLURM_PFI_CONF": str(self.config_file),
            "PYTHONPATH": str(PACKAGE_PARENT),  # what runs is what the test imports, also from a second clone
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    @property
    def controller_account(self) -> pwd.struct_passwd:
        """Who runs the controller: SlurmUser."""
        return self.cluster.options.slurm_account

    def sim_dir(self, node: str) -> Path:
        """The stand-in's folder of a node."""
        return self.root / "sim" / node

    def node_dir(self, node: str) -> Path:
        """The agent's folder of a node."""
        return self.root / "nodes" / node

    # ------------------------------------------------------------------------------------------ use

    def cli(
        self, *arguments: str, check: bool = True, columns: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``slurm-pfi`` as an admin, on a terminal of so many columns."""
        environment = {} if columns is None else {"COLUMNS": str(columns)}
        return self._slurm_pfi(list(arguments), check=check, environment=environment)

    def node_cli(self, node: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ``slurm-pfi node`` on a node, as its admin."""
        command = ["node", *arguments, "--node-name", node]
        return self._slurm_pfi(command, check=check, environment=gpus.nvml_environment(self.sim_dir(node)))

    def _slurm_pfi(
        self, arguments: list[str], *, check: bool, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "slurm_pfi", *arguments],
            env={**self._daemon_env, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=self.root,
        )
        if check and done.returncode != 0:
            raise ClusterError(
                f"slurm-pfi {' '.join(arguments)}: exit {done.returncode}: {done.stderr.strip()}"
            )
        return done

    def ask(self, command: str, args: dict[str, Any] | None = None) -> Any:
        """Put a question to the controller over its socket, without the cost of starting a command line."""
        from slurm_pfi.bus.asking import ask

        reply = ask(self.root / "controller/run/control.sock", command, args)
        if not reply.ok:
            raise ClusterError(f"{command}: {reply.message}")
        return reply.data

    def status(self) -> Any:
        """``slurm-pfi status --json``."""
        return self.ask("status")

    def of_window(self, key: str) -> Any:
        """A value of the open window; None before the controller has opened one."""
        return (self.status()["window"] or {}).get(key)

    def jobs(self) -> dict[int, Any]:
        """``slurm-pfi jobs --json``, by job id."""
        return {run["job_id"]: run for run in self.ask("jobs")}

    def training(
        self,
        workload: str,
        *,
        seconds: float | None = None,
        work_s: float | None = None,
        lie: float | None = None,
    ) -> str:
        """Shell text of a simulated training job, for scripts of a test's own; ``tokens`` finds what it logs."""
        length = "" if seconds is None else f" --seconds {seconds:g}"
        length += "" if work_s is None else f" --work-s {work_s:g}"
        log = f"{self.root}/out/$SLURM_JOB_ID.jsonl"
        program = self._job.command if lie is None else self._job.lying(lie)
        return f'{program} --workload "{workload}" --log {log}{length}'

    def submit(
        self,
        workload: str,
        *,
        gpus: int = 0,
        gres: str | None = None,
        nodes: int = 1,
        flex: str | None = None,
        partition: str = "main",
        where: str | None = None,
        seconds: float | None = None,
        work_s: float | None = None,
        lie: float | None = None,
        more: Sequence[str] = (),
    ) -> int:
        """Submit a simulated training job of ``gpus`` GPUs a node, as an ordinary user; returns the job id.

        ``gres`` asks for something else than whole GPUs (``shard:2``).
        ``work_s``: it tells a total, of so much time without a cap, and ends with it. ``lie``: how many times too fast
        its counter is while a cap slows it. ``more`` are further words for sbatch.
        """
        command = self.training(workload, seconds=seconds, work_s=work_s, lie=lie)
        command = f"srun --ntasks-per-node=1 {command}" if nodes > 1 else f"exec {command}"
        arguments = [
            f"--job-name={workload.replace(' ', '-')}",
            f"--gres={gres or f'gpu:{gpus}'}",
            f"--nodes={nodes}",
            f"--partition={partition}",
            "--ntasks-per-node=1",
        ]
        if flex is not None:
            arguments.append(f"--power-flex={flex}")
        if where is not None:
            arguments.append(f"--nodelist={where}")
        return self.cluster.sbatch(f"#!/bin/sh\n{command}\n", *arguments, *more)

    def wait_training(self, *jobs: int, timeout_s: float = 30.0) -> None:
        """Wait until each of these jobs has made tokens."""
        for job in jobs:
            self.cluster.wait_job_state(job, "RUNNING", timeout_s=timeout_s)
            wait_until(lambda job=job: bool(self.tokens(job)), timeout_s, f"job {job} makes tokens")  # type: ignore[misc]

    def tokens(self, job: int) -> list[tuple[int, float]]:
        """The job's own token log: (CLOCK_MONOTONIC ns, tokens so far)."""
        path = self.root / "out" / f"{job}.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        found = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                found.append((int(entry["mono_ns"]), float(entry["tokens"])))
        return found

    def snapshot(self) -> list[dict[str, Any]]:
        """Every GPU as the simulation has it: node, uuid, requested and effective limit, draw."""
        return [
            {
                "node": node,
                "uuid": state.uuid,
                "requested_mw": state.requested_mw,
                "effective_mw": state.effective_mw,
                "draw_mw": state.draw_mw,
                "job": state.job,
            }
            for node in self.node_names
            for state in gpus.snapshot(self.sim_dir(node))
        ]

    def foreign_write(self, node: str, position: int, watts: float) -> None:
        """Set a limit behind the product's back, as an admin would, declare it, and wait until it has been in force.

        The trace says so: the agent may have taken it back before anybody can look at the GPU.
        """
        uuid = gpus.read_devices(self.sim_dir(node))[position].uuid
        limit_mw = round(watts * 1000)
        with gpus.Node(self.sim_dir(node)) as simulated:
            written_ns = time.monotonic_ns()
            self.foreign.append({"node": node, "uuid": uuid, "mono_ns": written_ns, "mw": limit_mw})
            simulated.poke("requested_mw", limit_mw, gpu=uuid)

            def came() -> bool:
                if any(g.uuid == uuid and g.effective_mw == limit_mw for g in simulated.snapshot()):
                    return True
                return any(
                    (line.uuid, line.event, line.effective_mw) == (uuid, "limit", limit_mw)
                    and line.mono_ns >= written_ns
                    for line in gpus.read_trace(self.sim_dir(node))
                )

            wait_until(came, START_S, f"{uuid} is or was at {watts:g} W")

    def wait_restored(self, expected: Mapping[str, int] | None = None, timeout_s: float = 30.0) -> None:
        """Wait until every GPU is at its expected limit (by UUID, in mW; default: what it was before any agent)."""
        wanted = {gpu["uuid"]: gpu["effective_mw"] for gpu in self.before} if expected is None else expected

        def wrong() -> list[str]:
            return [
                f"{gpu['node']} {gpu['uuid']} at {gpu['effective_mw']} not {wanted[gpu['uuid']]} mW"
                for gpu in self.snapshot()
                if gpu["effective_mw"] != wanted[gpu["uuid"]]
            ]

        try:
            wait_until(lambda: not wrong(), timeout_s, "every GPU is back at its prior limit")
        except ClusterError as error:
            raise ClusterError(f"{error}: {'; '.join(wrong())}") from error

    def save_run(self, folder: Path) -> None:
        """Copy traces, audit files and snapshots to where the checker looks for them, and the daemons' logs."""
        files: dict[Path, Path] = {folder / "logs" / log.name: log for log in self.root.glob("*.log")}
        for node in self.node_names:
            files[folder / "nodes" / node / "trace.jsonl"] = self.sim_dir(node) / "trace.jsonl"
            files[folder / "nodes" / node / "audit.jsonl"] = self.node_dir(node) / "audit.jsonl"
        files[folder / "controller/audit.jsonl"] = self.root / "controller/state/audit.jsonl"
        for target, source in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a node that never had an agent has no audit
                shutil.copy(source, target)
        for name, content in (("before", self.before), ("after", self.snapshot()), ("foreign", self.foreign)):
            (folder / f"{name}.json").write_text(json.dumps(content))


def _run_as(account: pwd.struct_passwd) -> list[str]:
    """The words that make a command another user's.

    A clone and its interpreter may lie where only their owner gets (below /root, say), so the process keeps the one
    right to read everything; it writes and is known to others as that user.
    """
    if account.pw_uid == os.getuid():
        return []
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
    return ["setpriv", *user, *rights, "env"]  # env begins with that right, setpriv itself does not


def sleep_until(mono_ns: int) -> None:
    """For measurements over a stretch of time; never a wait for something to happen."""
    time.sleep(max(0.0, (mono_ns - time.monotonic_ns()) / 1e9))
