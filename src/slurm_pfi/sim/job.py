"""A simulated training job, run by sbatch or srun like any other.

    python -m slurm_pfi.sim.job --workload "L70 FT nc"

It finds its GPUs as a CUDA program would, draws and works on them as the model job does under their limits, and
reports its token counter through ``slurm_pfi.progress``. A synchronous job runs at its slowest GPU: in each tick its
tokens are T_max times the least work increment of all its GPUs. Under srun there is one task per node; rank 0 takes
the GPUs of all nodes into account (found by the job they are registered for), other ranks report their own node's.

Suspended (Slurm sends SIGTSTP before SIGSTOP) it leaves its GPUs idle until it is resumed.

Environment: PFI_SIM_DIR (holds one folder per simulated node), SLURMD_NODENAME, PFI_STANDIN_LIB, CUDA_VISIBLE_DEVICES
and Slurm's own. It ends on SIGTERM, SIGINT or after ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from ..progress import report
from .jobs import ModelJob, model_job, model_jobs
from .standin import NodeGpus, SimulationError, visible_uuids

TICK_S: Final = 0.1
STEP_S: Final = 1.0
GATHER_S: Final = 30.0
ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
SIGNALS: Final = (*ENDING_SIGNALS, signal.SIGTSTP)
EXIT_WRONG_USE: Final = 2

GpuKey = tuple[str, int]
"""Node and NVML index of one GPU of the job."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands in its job."""

    sim_dir: Path
    node: str
    job: str
    rank: int
    nodes: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Place:
        """Read PFI_SIM_DIR, SLURMD_NODENAME and Slurm's variables. Raises SimulationError if one is missing."""
        missing = [
            name for name in ("PFI_SIM_DIR", "SLURMD_NODENAME", "SLURM_JOB_ID") if not environ.get(name)
        ]
        if missing:
            raise SimulationError(
                f"{', '.join(missing)} not set: run this under sbatch on a simulated cluster"
            )
        if environ.get("SLURM_LOCALID", "0") != "0":
            raise SimulationError("one task per node: a task takes all GPUs of the job on its node")
        # A batch script knows SLURM_NNODES too, but trains alone; only a step spans nodes.
        return cls(
            sim_dir=Path(environ["PFI_SIM_DIR"]),
            node=environ["SLURMD_NODENAME"],
            job=f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_RESTART_COUNT') or '0'}",
            rank=int(environ.get("SLURM_PROCID") or "0"),
            nodes=int(environ.get("SLURM_STEP_NUM_NODES") or "1"),
        )


class Training:
    """The tokens of a synchronous job, counted from the work of its GPUs."""

    def __init__(self, workload: ModelJob) -> None:
        self._workload = workload
        self._work: dict[GpuKey, float] = {}
        self.tokens = 0.0
        self.total: float | None = None

    def begin(self, work: Mapping[GpuKey, float], work_s: float | None = None) -> None:
        """From this reading on the GPUs named in it work together; for so many seconds without a cap, or on and on."""
        self._work = dict(work)
        if work_s is not None:
            self.total = self._workload.tokens_per_s_on(len(work)) * work_s

    @property
    def done(self) -> bool:
        """Whether all of its work is done."""
        return self.total is not None and self.tokens >= self.total

    def advance(self, work: Mapping[GpuKey, float]) -> None:
        """Count the tokens since the last reading. A GPU that no longer works for the job stalls it."""
        slowest = min(work.get(gpu, before) - before for gpu, before in self._work.items())
        self.tokens += self._workload.tokens_per_s_on(len(self._work)) * max(0.0, slowest)
        self._work = {gpu: work.get(gpu, before) for gpu, before in self._work.items()}


class Gpus:
    """The GPUs that this rank counts: its own, and for rank 0 of several nodes those of the other nodes too."""

    def __init__(self, place: Place, workload: ModelJob) -> None:
        own_dir = place.sim_dir / place.node
        self._uuids = visible_uuids(own_dir, os.environ)
        self._workload = workload.workload
        self.own = NodeGpus(own_dir, place.job)
        self._others: list[NodeGpus] = []
        self._nodes = place.nodes if place.rank == 0 else 1
        if self._nodes > 1:
            folders = sorted(state.parent for state in place.sim_dir.glob("*/state"))
            self._others = [NodeGpus(folder, place.job) for folder in folders if folder != own_dir]
        self._take()

    def _take(self) -> None:
        for uuid in self._uuids:
            self.own.register(uuid, self._workload)

    def pause(self) -> None:
        """Leave the GPUs, stop, and take them again when somebody lets this process go on."""
        self.own.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def work(self) -> tuple[int, dict[GpuKey, float]]:
        """Instant of the reading, and the work of every GPU that works for the job."""
        work: dict[GpuKey, float] = {}
        for node in self._others:
            work |= {(node.node_dir.name, index): done for index, done in node.work()[1].items()}
        at_ns, own = self.own.work()
        return at_ns, work | {(self.own.node_dir.name, index): done for index, done in own.items()}

    def complete(self) -> bool:
        """Whether every node of the step has registered its GPUs."""
        return len({node for node, _ in self.work()[1]}) >= self._nodes

    def close(self) -> None:
        for node in (self.own, *self._others):
            node.close()


def _ended(gpus: Gpus, timeout_s: float) -> bool:
    """Wait; True when a signal asks the job to end. The signals are blocked, so none is lost."""
    came = signal.sigtimedwait(SIGNALS, max(0.0, timeout_s))
    # Stopped while it waits, Python 3.11 answers with a signal that never came.
    number = None if came is None else came.si_signo
    if number == signal.SIGTSTP:
        gpus.pause()
    return number in ENDING_SIGNALS


def _gather(gpus: Gpus) -> bool:
    """Wait for the other nodes of the step. False when a signal came first."""
    deadline_s = time.monotonic() + GATHER_S
    while not gpus.complete():
        if time.monotonic() > deadline_s:
            raise SimulationError(f"not every node of the step registered its GPUs within {GATHER_S:.0f} s")
        if _ended(gpus, TICK_S / 2):
            return False
    return True


def _write_log(log: TextIO | None, at_ns: int, tokens: float) -> None:
    if log is not None:
        log.write(json.dumps({"mono_ns": at_ns, "tokens": tokens}) + "\n")
        log.flush()


def train(
    gpus: Gpus,
    workload: ModelJob,
    *,
    seconds: float,
    work_s: float | None,
    report_interval_s: float,
    log: TextIO | None,
) -> bool:
    """Train until the time is over, the work is done, or a signal comes (then True)."""
    training = Training(workload)
    gpus.own.launch_kernel()
    if not _gather(gpus):
        return True
    at_ns, work = gpus.work()
    training.begin(work, work_s)
    _write_log(log, at_ns, training.tokens)
    report(training.tokens, total=training.total)
    start_s = time.monotonic()
    next_tick_s, next_step_s, next_report_s = start_s + TICK_S, start_s + STEP_S, start_s + report_interval_s
    while True:
        ended = _ended(gpus, next_tick_s - time.monotonic())
        now_s = time.monotonic()
        at_ns, work = gpus.work()
        training.advance(work)
        if now_s >= next_step_s and not ended:
            gpus.own.launch_kernel()
            next_step_s = max(next_step_s + STEP_S, now_s)
        done = ended or training.done or now_s - start_s >= seconds
        if now_s >= next_report_s or done:
            _write_log(log, at_ns, training.tokens)
            report(training.tokens, total=training.total)
            next_report_s = max(next_report_s + report_interval_s, now_s)
        if done:
            return ended
        next_tick_s = max(next_tick_s + TICK_S, now_s)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slurm_pfi.sim.job", description="A simulated training job."
    )
    parser.add_argument("--workload", required=True, help="a model job: " + ", ".join(sorted(model_jobs())))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this time")
    parser.add_argument(
        "--work-s", type=float, help="tell a total, of so many seconds of work without a cap, and end with it"
    )
    parser.add_argument("--report-interval-s", type=float, default=0.5, help="between progress reports")
    parser.add_argument("--log", type=Path, help="token log, JSON lines; ranks above 0 append .<rank>")
    return parser.parse_args(argv)


def _open_log(path: Path | None, rank: int) -> TextIO | None:
    if path is None:
        return None
    if rank > 0:
        path = path.with_name(f"{path.name}.{rank}")
    return path.open("a", encoding="ascii")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job. Exit codes: 0 done, 2 wrong use or no hardware, 143 ended by a signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    arguments = _arguments(argv)
    gpus: Gpus | None = None
    log: TextIO | None = None
    try:
        workload = model_job(arguments.workload)
        place = Place.from_environment(os.environ)
        log = _open_log(arguments.log, place.rank)
        gpus = Gpus(place, workload)
        ended = train(
            gpus,
            workload,
            seconds=arguments.seconds,
            work_s=arguments.work_s,
            report_interval_s=arguments.report_interval_s,
            log=log,
        )
    except (SimulationError, KeyError, OSError) as error:
        print(f"simulated job: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)  # noqa: T201
        return EXIT_WRONG_USE
    finally:
        if gpus is not None:
            gpus.close()
        if log is not None:
            log.close()
    return 128 + signal.SIGTERM if ended else 0


if __name__ == "__main__":
    sys.exit(main())
