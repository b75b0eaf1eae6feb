"""What Slurm itself tells an ordinary user of runs and their tags, from a host with nothing but Slurm's commands.

Here is what ``squeue`` (running) and ``sacct`` (ended, module ``sacct``) have in common, and squeue's side. Slurm's own
PrivateData decides what they show. Nothing here raises for what Slurm does or fails to do.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from .backend import HOLDS_NODES, JobGone, Span, Unavailable
from .damage import SlurmTextError
from .squeue import NO_SUCH_JOB, UNSET, new_end, split_rows, squeue_line
from .text import expand_nodes, named, parse_count, parse_job_id, parse_state, parse_unix_s
from .tres import count_gpus

Source: TypeAlias = Literal["squeue", "sacct"]
ReadRow: TypeAlias = "Callable[[dict[str, str]], TaggedRun | None]"
"""A row's fields as a run; None for what is none. Raises SlurmTextError."""

# States of a job that is not over (slurm.h, job_states and job state flags; EXPEDITING since 25.11).
_GOES_ON: Final = HOLDS_NODES | {
    "PENDING",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
    "EXPEDITING",
}
_FIELDS: Final = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "HetJobOffset",
    "RestartCnt",
    "Cluster",
    "UserName",
    "Account",
    "Partition",
    "Name",
    "State",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "NodeList",
    "tres-alloc",
    "admin_comment",
)
_COMMENTS: Final = ("admin_comment", "AdminComment")  # as squeue and as sacct call it
_KEPT: Final = ("PATH", "HOME", "SLURM_CONF", "SLURM_JWT")


@dataclass(frozen=True, slots=True)
class JobName:
    """A job as users write it: ``1234``, ``77_3`` a task, ``55+1`` a component; ``restart`` names one of its runs."""

    job_id: int
    task: int | None = None
    component: int | None = None
    restart: int | None = None

    @property
    def spec(self) -> str:
        """As Slurm's commands take it, without the restart."""
        if self.task is not None:
            return f"{self.job_id}_{self.task}"
        return str(self.job_id) if self.component is None else f"{self.job_id}+{self.component}"


@dataclass(frozen=True, slots=True)
class TaggedRun:
    """One run as Slurm tells it. Texts are the user's own where Slurm lets them choose; empty: not given.

    ``spec`` names the job alone (``77_3``), ``parent`` is the id of the array or heterogeneous job it belongs to.
    ``restart`` and ``gpus`` are None where Slurm does not tell. ``admin_comment`` keeps bytes that are no UTF-8 as
    surrogates (PEP 383).
    """

    source: Source
    job_id: int
    parent: int | None
    spec: str
    restart: int | None
    cluster: str
    user: str
    account: str
    partition: str
    name: str
    state: str
    submit_unix_s: Span
    start_unix_s: Span
    end_unix_s: Span
    nodes: tuple[str, ...]
    gpus: int | None
    admin_comment: str

    @property
    def has_ended(self) -> bool:
        return self.state not in _GOES_ON

    def is_of(self, name: JobName) -> bool:
        """Whether a user means this job, or a part of an array or heterogeneous job, by this name."""
        if name.task is not None or name.component is not None:
            return self.spec == name.spec
        return name.job_id in (self.job_id, self.parent)


class UserCommands:
    """Runs Slurm's commands as who we are; ``conf`` is used where the environment names no SLURM_CONF."""

    def __init__(
        self, *, bin_dir: str | None = None, conf: str | None = None, timeout_s: float = 30.0
    ) -> None:
        self._bin_dir = bin_dir
        self._timeout_s = timeout_s
        # Bare: SQUEUE_FORMAT, SACCT_FORMAT, SLURM_CLUSTERS and the like would change what the commands say.
        env = {name: os.environ[name] for name in _KEPT if name in os.environ}
        if conf is not None:
            env.setdefault("SLURM_CONF", conf)
        self._env = {**env, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}

    def run(self, command: str, *arguments: str) -> bytes | Unavailable:
        """The command's output; Unavailable if it did not end well, with what it said."""
        path = f"{self._bin_dir}/{command}" if self._bin_dir else command
        try:
            done = subprocess.run(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=self._timeout_s,
                env=self._env,
            )
        except subprocess.TimeoutExpired:
            return Unavailable(f"{command} gave no answer within {self._timeout_s:g} s")
        except OSError as error:
            return Unavailable(f"{command} cannot be run here: {error.strerror}")
        said = " ".join(done.stderr.decode("utf-8", "replace").split())[:500]
        if done.returncode != 0:
            return Unavailable(f"{command} exited {done.returncode}: {said or 'it said nothing'}")
        if not done.stdout.strip() and said:  # 22.05 may end with 0 after an error
            return Unavailable(f"{command} named nothing, and said: {said}")
        return done.stdout


def job_in_queue(commands: UserCommands, name: JobName) -> tuple[TaggedRun, ...] | JobGone | Unavailable:
    """The runs of this name that slurmctld remembers, the present one of each job alone."""
    found = _squeue(commands, "--states=all", "--jobs", name.spec)
    if isinstance(found, Unavailable):
        return JobGone(found.why) if NO_SUCH_JOB in found.why else found
    runs = tuple(run for run in found if run.is_of(name))
    return runs or JobGone(f"job {name.spec}: not in the queue")


def queue(commands: UserCommands, *, mine: bool) -> tuple[TaggedRun, ...] | Unavailable:
    """All jobs in the queue that this user may see, pending ones too."""
    return _squeue(commands, *(("--me",) if mine else ()))


def _squeue(commands: UserCommands, *which: str) -> tuple[TaggedRun, ...] | Unavailable:
    end = new_end()
    out = commands.run(*squeue_line(which, end, _FIELDS))
    if isinstance(out, Unavailable):
        return out
    return read_runs(out, _FIELDS, end, _read_queued, "squeue")


def read_runs(
    out: bytes, fields: Sequence[str], end: str, read: ReadRow, command: str
) -> tuple[TaggedRun, ...] | Unavailable:
    """All rows as runs; one that is not understood makes the whole answer unknown."""
    runs = []
    try:
        rows = split_rows(out, tuple(fields), end.encode())
    except SlurmTextError as error:
        return Unavailable(f"{command}'s answer is not understood: {error}")
    for row in rows:
        # What is compared with nothing but shown is kept readable; the AdminComment byte for byte.
        cell = {
            name: text.decode("utf-8", "surrogateescape" if name in _COMMENTS else "backslashreplace")
            for name, text in row.items()
        }
        try:
            run = read(cell)
        except SlurmTextError as error:
            return Unavailable(f"{command}'s line on job {row[fields[0]][:20]!r} is not understood: {error}")
        if run is not None:
            runs.append(run)
    return tuple(runs)


def _read_queued(cell: dict[str, str]) -> TaggedRun | None:
    task, het = cell["ArrayTaskID"], cell["HetJobID"]
    job_id = parse_job_id(cell["JobID"])
    spec, parent = str(job_id), None
    if task != "N/A":
        if not task.isdigit():  # the tasks of an array that wait, as one group such as 5-9%1
            return None
        parent = parse_job_id(cell["ArrayJobID"])
        spec = f"{parent}_{parse_count(task)}"
    elif het != "N/A":
        parent = parse_job_id(het)
        spec = f"{parent}+{parse_count(cell['HetJobOffset'])}"
    return TaggedRun(
        source="squeue",
        job_id=job_id,
        parent=parent,
        spec=spec,
        restart=parse_count(cell["RestartCnt"]),
        cluster=named(cell["Cluster"]),
        user=named(cell["UserName"]),
        account=named(cell["Account"]),
        partition=named(cell["Partition"]),
        name=named(cell["Name"]),
        state=parse_state(cell["State"]),
        submit_unix_s=parse_unix_s(cell["SubmitTime"]),
        start_unix_s=parse_unix_s(cell["StartTime"]),
        end_unix_s=parse_unix_s(cell["EndTime"]),
        nodes=expand_nodes(cell["NodeList"]),
        gpus=count_gpus(cell["tres-alloc"]) if cell["tres-alloc"] and named(cell["NodeList"]) else None,
        admin_comment="" if cell["admin_comment"] == UNSET else cell["admin_comment"],
    )
