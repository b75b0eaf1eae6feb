"""What tests and the demo do with a site that runs: its names, its command lines, its jobs, its GPUs."""

from __future__ import annotations

import contextlib
import json
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import slurm_pfi

from . import gpus
from .cluster import Cluster, ClusterError, wait_until
from .daemons import START_S, Daemons
from .simjob import InstalledJob

PACKAGE_PARENT: Final = Path(slurm_pfi.__file__).parent.parent


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


class SiteUse(Daemons):
    """A site without its start and stop, which are ``testbed.site.Site``'s."""

    def __init__(self, options: SiteOptions | None = None) -> None:
        self.options = options or SiteOptions()
        super().__init__()
        self.before: list[dict[str, Any]] = []
        self.foreign: list[dict[str, Any]] = []
        self.cluster: Cluster
        self._job: InstalledJob

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
