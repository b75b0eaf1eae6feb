"""A whole real Slurm cluster under one folder: munged, slurmctld and N slurmd, on loopback only.

    with Cluster(ClusterOptions(nodes=2)) as cluster:
        job = cluster.sbatch("#!/bin/sh\nsleep 30\n", "--gres=gpu:2")
        cluster.wait_job_state(job, "RUNNING")

Started as root, jobs run as ``nobody``; started by anybody else, everything runs as that user. Needs Debian's packages
slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins and munge; starts no system service. Accounting (sacct) is
there with ``accounting=True`` alone; ended jobs stay readable by ``job_fields`` for ten minutes.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final

from slurm_pfi.slurm.text import read_submission

from . import accounting
from .cluster_daemons import FIRST_AND_LAST, STOP_DEADLINE_S, ClusterDaemons
from .cluster_files import (
    REPO,
    SEARCH_PATH,
    ClusterError,
    ClusterOptions,
    Gpu,
    Layout,
    find_ports,
    find_program,
    make_folders,
    write_files,
)
from .processes import POLL_S, become, processes_naming, submitter, wait_until

__all__ = [
    "REPO",
    "Cluster",
    "ClusterError",
    "ClusterOptions",
    "Gpu",
    "StopReport",
    "processes_naming",
    "wait_until",
]

START_DEADLINE_S: Final = 30.0
START_TRIES: Final = 3
ENDED_STATES: Final = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    ]
)
_FIELD: Final = re.compile(r"(?:^|\s)([A-Z][A-Za-z_]*(?:[:/][A-Za-z_]+)*)=")


@dataclass(frozen=True)
class StopReport:
    """What the end found: nodes out of service (name: reason), processes that outlived their job or daemon."""

    folder: Path
    drained: Mapping[str, str]
    leftovers: Sequence[str]

    @property
    def clean(self) -> bool:
        return not self.drained and not self.leftovers


class Cluster(ClusterDaemons):
    """The cluster; starts by ``start()`` or ``with``, and must be stopped. Not for use by several threads."""

    running: ClassVar[set[Cluster]] = set()
    stopped: ClassVar[list[StopReport]] = []

    def __init__(self, options: ClusterOptions | None = None) -> None:
        super().__init__()
        self.options = options or ClusterOptions()
        self._ready = False
        self.accounting_start_s: float | None = None

    # ------------------------------------------------------------------------------------------ start and stop

    def start(self) -> Cluster:
        """Start all daemons and return when every node is idle. Raises ClusterError with the end of the logs."""
        for program in ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "sinfo", "scancel"):
            find_program(program)
        for program in accounting.PROGRAMS if self.options.accounting else ():
            find_program(program)
        parent = self.options.parent or Path(tempfile.gettempdir())
        self.layout = Layout(Path(tempfile.mkdtemp(prefix="pfi-", dir=parent)))
        Cluster.running.add(self)
        try:
            make_folders(self.layout, self.options)
            for attempt in range(1, START_TRIES + 1):
                ports = find_ports(2 + self.options.nodes)
                write_files(self.layout, self.options, ports[1:])
                if self.options.accounting:
                    accounting.write_files(self.layout, self.options, ports[0])
                try:
                    self._start_daemons()
                    self._ready = True
                    break
                except ClusterError as error:
                    # A port can be taken between our look and the daemon's bind.
                    if attempt == START_TRIES or "Address already in use" not in str(error):
                        raise
                    self._end_daemons()
        except BaseException:
            self.stop()
            raise
        return self

    def _start_daemons(self) -> None:
        if "munged" not in self._daemons:
            self._start_munged()
        if self.options.accounting:
            self._start_accounting()
        self.start_slurmctld()
        for node in self.options.node_names:
            self.start_slurmd(node)
        self.wait_nodes_idle()

    def _start_munged(self) -> None:
        folder = self.layout.munge
        files = {"key-file": "key", "pid-file": "pid", "log-file": "munged.log", "seed-file": "seed"}
        arguments = [f"--{name}={folder / file}" for name, file in files.items()]
        arguments += [f"--socket={self.layout.munge_socket}", "--num-threads=2"]
        self._spawn("munged", ["munged", "--force", "--foreground", *arguments])
        wait_until(lambda: self._alive("munged") and self.layout.munge_socket.exists(), 10, "munged's socket")

    def _start_accounting(self) -> None:
        """The database, slurmdbd, and in them this cluster with an account and its users."""
        begin = time.monotonic()
        if "mariadbd" not in self._daemons:
            accounting.make_database(self.layout, self.options)
            command = accounting.database_command(self.layout)
            self._spawn("mariadbd", command, account=accounting.database_account())
            socket = accounting.database_socket(self.layout)
            wait_until(lambda: self._alive("mariadbd") and socket.exists(), 20, "the database's socket")
        env = accounting.database_env(self.layout)
        self._spawn("slurmdbd", ["slurmdbd", "-D"], account=self.options.slurm_account, env=env)
        asking = ["sacctmgr", "--noheader", "show", "cluster"]
        try:
            wait_until(
                lambda: self._alive("slurmdbd") and self._run(asking, check=False).returncode == 0,
                START_DEADLINE_S,
                "slurmdbd answers",
            )
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self._log_tails()}") from error
        for told in accounting.registration(self.options):
            self._run(told)
        self.accounting_start_s = time.monotonic() - begin

    def start_slurmctld(self) -> None:
        """Start slurmctld (again), with the state it had."""
        self._spawn("slurmctld", ["slurmctld", "-D", "-i"], account=self.options.slurm_account)

    def start_slurmd(self, node: str) -> None:
        """Start a node's slurmd (again)."""
        self._spawn(_slurmd(node), ["slurmd", "-D", "-N", node], env=self.options.slurmd_env)

    def stop_slurmctld(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """End slurmctld and wait for it; jobs go on."""
        self._end("slurmctld", sig)

    def stop_slurmd(self, node: str, sig: signal.Signals = signal.SIGTERM) -> None:
        """End a node's slurmd and wait for it; its jobs go on."""
        self._end(_slurmd(node), sig)

    def wait_nodes_idle(self, timeout_s: float = START_DEADLINE_S) -> None:
        """Return when every node takes jobs and has none."""

        def idle() -> bool:
            for name in list(self._daemons):
                self._alive(name)
            shown = self._run(["sinfo", "-h", "-N", "-o", "%N %t"], check=False).stdout.split("\n")
            return {f"{node} idle" for node in self.options.node_names} <= set(shown)

        try:
            wait_until(idle, timeout_s, f"all of {', '.join(self.options.node_names)} idle")
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self._log_tails()}") from error

    def stop(self) -> StopReport:
        """Cancel all jobs, wait for the empty queue, end each daemon by its pid, remove the folder.

        The report names nodes that were out of service before and processes that were left; those are killed.
        """
        if self not in Cluster.running:
            raise ClusterError("this cluster does not run")
        Cluster.running.discard(self)
        drained: Mapping[str, str] = {}
        leftovers: list[str] = []
        if self._ready:
            state_lost = self._daemons["slurmctld"].poll() not in (None, 0)
            try:
                if self._daemons["slurmctld"].poll() is not None:
                    self.start_slurmctld()
                drained = self.drained_nodes()
                self.cancel_all()
            except ClusterError as error:
                leftovers.append(f"jobs not cancelled: {error}")
            if state_lost:
                # A slurmctld that was killed forgets the jobs of its last seconds, and nobody else ends them.
                self._kill(processes_naming(self.layout.root, below="slurmstepd"))
        self._end_daemons()
        for name in FIRST_AND_LAST:
            if name in self._daemons:
                self._end(name, signal.SIGTERM)
        leftovers += self._end_leftovers()
        if not self.options.keep:
            shutil.rmtree(self.layout.root, ignore_errors=True)
        report = StopReport(self.layout.root, drained, leftovers)
        Cluster.stopped.append(report)
        return report

    def cancel_all(self, timeout_s: float = STOP_DEADLINE_S) -> None:
        """Cancel every job and wait until none is left, epilogs included."""
        wait_until(
            lambda: self._run(["squeue", "-h"], check=False).returncode == 0, timeout_s, "slurmctld answers"
        )
        ids = self._run(["squeue", "-h", "-o", "%A"]).stdout.split()
        if ids:
            self._run(["scancel", *dict.fromkeys(ids)], check=False)
        wait_until(lambda: not self._run(["squeue", "-h"]).stdout.strip(), timeout_s, "the queue is empty")

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        report = self.stop()
        if error is None and report.leftovers:
            raise ClusterError(f"left behind in {report.folder}: {'; '.join(report.leftovers)}")

    # ------------------------------------------------------------------------------------------ what users do

    @property
    def folder(self) -> Path:
        return self.layout.root

    @property
    def state_dir(self) -> Path:
        """``node.state_dir`` for slurm-pfi on this cluster."""
        return self.layout.state_dir

    @property
    def slurm_conf(self) -> Path:
        return self.layout.slurm_conf

    @property
    def node_names(self) -> tuple[str, ...]:
        return self.options.node_names

    @property
    def client_env(self) -> dict[str, str]:
        """The whole environment in which Slurm's commands run."""
        base = {"PATH": SEARCH_PATH, "HOME": "/", "LANG": "C.UTF-8", "SLURM_CONF": str(self.slurm_conf)}
        return {**base, **self.options.client_env}

    def run(
        self,
        command: Sequence[str],
        *,
        user: str | None = None,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as ``user`` (default: ``nobody`` where we are root), ``env`` added to ``client_env``.

        Raises ClusterError with what it wrote when it fails and ``check``.
        """
        account = submitter(user)
        try:
            done = subprocess.run(
                list(command),
                input=stdin,
                capture_output=True,
                encoding="utf-8",
                errors="surrogateescape",  # Slurm's tables cut users' texts anywhere
                check=False,
                timeout=timeout_s,
                cwd=self.layout.out,
                env={**self.client_env, **(env or {})},
                **become(account),
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{' '.join(command)}: no end after {timeout_s:g} s") from error
        if check and done.returncode != 0:
            raise ClusterError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()}")
        return done

    def _run(self, command: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """As ourselves, that is as an admin of the cluster."""
        return self.run(command, user=pwd.getpwuid(os.getuid()).pw_name, check=check)

    def sbatch(
        self, script: str, *args: str, user: str | None = None, env: Mapping[str, str] | None = None
    ) -> int:
        """Submit a script (its text) and return the job id. Output goes to ``job_output``."""
        out = ["--output", str(self.layout.out / "%j.out")]
        done = self.run(["sbatch", "--parsable", *out, *args], user=user, stdin=script, env=env)
        return read_submission(done.stdout).job_id

    def scontrol(self, *args: str) -> str:
        """scontrol as an admin; its output."""
        return self._run(["scontrol", *args]).stdout

    def squeue(self, *args: str) -> list[str]:
        """Lines of ``squeue -h`` as an admin."""
        return self._run(["squeue", "-h", *args]).stdout.splitlines()

    def sacct(self, job: str, *fields: str) -> list[list[str]]:
        """These fields of what the accounting has on ``job`` (an id, or N_M), uncut; one list for each of its runs.

        Empty until slurmdbd knows the job. Whatever stands in a field, newlines too, stays inside it.
        """
        end = f"<{secrets.token_hex(8)}>"
        form = ["--noheader", "--parsable", f"--delimiter={end}", f"--format={','.join(fields)}"]
        shown = self._run(["sacct", "--allocations", "--duplicates", "--jobs", job, *form]).stdout
        *cells, _ = shown.split(end)
        width = len(fields)
        rows = [cells[start : start + width] for start in range(0, len(cells), width)]
        return [[row[0].removeprefix("\n"), *row[1:]] for row in rows]

    def job_fields(self, job_id: int) -> dict[str, str]:
        """The job's record, also after its end. Per-node lines (``-d``) lie under ``Nodes``, ``GRES`` (the last)."""
        text = self.scontrol("-o", "show", "job", "-d", str(job_id)).strip()
        matches = list(_FIELD.finditer(text))
        ends = [match.start() for match in matches[1:]] + [len(text)]
        return {match.group(1): text[match.end() : end] for match, end in zip(matches, ends, strict=True)}

    def job_state(self, job_id: int) -> str:
        return self.job_fields(job_id)["JobState"]

    def job_output(self, job_id: int) -> str:
        """What the batch script wrote so far."""
        path = self.layout.out / f"{job_id}.out"
        return path.read_text() if path.exists() else ""

    def wait_job_state(self, job_id: int, *states: str, timeout_s: float = 30.0) -> str:
        """Wait for one of the states. Raises ClusterError at once when the job has ended in another."""
        deadline = time.monotonic() + timeout_s
        while True:
            fields = self.job_fields(job_id)
            state = fields["JobState"]
            if state in states:
                return state
            if state in ENDED_STATES or time.monotonic() > deadline:
                raise ClusterError(
                    f"job {job_id} is {state} ({fields.get('Reason')}), not {' or '.join(states)}; "
                    f"output: {self.job_output(job_id)[-500:]!r}"
                )
            time.sleep(POLL_S)

    def requeue(self, job_id: int, timeout_s: float = 30.0) -> None:
        """Requeue a running job and wait until its next run has begun; Slurm alone would hold it for two minutes."""
        runs = int(self.job_fields(job_id)["Restarts"])
        self.scontrol("requeue", str(job_id))
        # PENDING only once the epilogs are done. One update: each puts the job off to the scheduler's next look.
        self.wait_job_state(job_id, "PENDING", timeout_s=timeout_s)
        # slurmd knows by whole seconds that a run is new (22.05): within the second it would skip the prolog. That is
        # why Slurm by itself puts a requeued job off by two minutes.
        new_at_unix_s = int(time.time()) + 2
        wait_until(lambda: time.time() >= new_at_unix_s, 5, "the clock goes on")
        self.scontrol("update", f"jobid={job_id}", "starttime=now")
        self.wait_job_state(job_id, "RUNNING", timeout_s=timeout_s)
        if int(self.job_fields(job_id)["Restarts"]) != runs + 1:
            raise ClusterError(
                f"job {job_id} had {runs} restarts and has {self.job_fields(job_id)['Restarts']}"
            )

    def job_file(self, node: str, job_id: int, restart: int = 0) -> Path:
        """Where the prolog puts the job file of a run."""
        return self.state_dir / node / "jobs" / f"{job_id}.{restart}"

    def drained_nodes(self) -> dict[str, str]:
        """Nodes out of service (drained, draining, down or failing), with state and reason."""
        lines = self._run(["sinfo", "-h", "-N", "-o", "%N|%T|%E"]).stdout.splitlines()
        bad = {}
        for line in lines:
            node, state, reason = line.split("|", 2)
            if re.match(r"drain|down|fail|err|inval", state):
                bad[node] = f"{state}: {reason}"
        return bad

    def node_log(self, node: str) -> str:
        """slurmd's log."""
        return (self.layout.log / f"slurmd.{node}.log").read_text(errors="replace")


def _slurmd(node: str) -> str:
    return f"slurmd.{node}"
