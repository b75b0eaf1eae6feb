"""How long slurmd waits for our hooks: the first part of ``bench.start_latency``.

A small C program stands in slurm.conf for each hook. It runs the real hook in slurmd's own environment and stamps
CLOCK_MONOTONIC before and after, so the times are those of hooks that slurmd starts for real jobs: start of the shell
included, slurmd's own fork not. In turn with ours runs an empty /bin/sh script.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from testbed.cluster import Cluster, ClusterOptions
from testbed.cluster_files import REPO, ClusterError, find_program, install_hook
from testbed.processes import wait_until

from .intervals import interval, told
from .plain_slurm import set_scheduler

Kind: TypeAlias = Literal["ours", "empty"]

KINDS: Final[tuple[Kind, Kind]] = ("ours", "empty")
SOURCES: Final = {"prolog": REPO / "prolog/slurm-pfi-prolog", "epilog": REPO / "epilog/slurm-pfi-epilog"}
NODES: Final = 4
GPUS: Final = 8
JOB: Final = "#!/bin/sh\nexec true\n"
# Every job that can start does so in one look at the queue; the testbed's 100 would make two or three waves.
SCHEDULER: Final = (
    "sched_interval=2,batch_sched_delay=0,sched_min_interval=0,bf_interval=1,default_queue_depth=1000"
)


@dataclass(frozen=True, slots=True)
class Stamp:
    """One hook that slurmd ran."""

    hook: str
    node: str
    job: int
    begin_ns: int
    end_ns: int
    status: int

    @property
    def took_ms(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6


class StampedHooks:
    """The stamping program as both hooks of a cluster that is yet to be started, and what it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        program = folder / "stamp_hook"
        source = Path(__file__).with_name("stamp_hook.c")
        subprocess.run([find_program("gcc"), "-O2", "-o", str(program), str(source)], check=True)
        for name in SOURCES:
            shutil.copy(program, folder / name)
            empty = folder / f"{name}.empty"
            empty.write_text("#!/bin/sh\nexit 0\n")
            empty.chmod(0o755)

    def install(self, cluster: Cluster) -> None:
        """Our hooks, for the folders of this cluster."""
        for name, source in SOURCES.items():
            layout = cluster.layout
            target = self.folder / f"{name}.ours"
            install_hook(source, target, state_dir=layout.state_dir, log_file=layout.hook_log)

    def use(self, kind: Kind) -> None:
        """What slurmd runs from here on. No hook may be running."""
        for name in SOURCES:
            fresh = self.folder / f"{name}.fresh"
            fresh.symlink_to(f"{name}.{kind}")
            fresh.rename(self.folder / f"{name}.hook")

    def stamps(self) -> list[Stamp]:
        """All so far. Raises ClusterError when a hook failed."""
        path = self.folder / "stamps"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            hook, node, job, begin, end, status = line.split()
            found.append(Stamp(hook, node, int(job), int(begin), int(end), int(status)))
        failed = [stamp for stamp in found if stamp.status != 0]
        if failed:
            raise ClusterError(f"hooks failed: {failed[:3]}")
        return found


@dataclass(frozen=True, slots=True)
class Sizes:
    """Jobs in all one after another, in rounds of so many; jobs started together, and how often."""

    serial: int
    serial_round: int
    together: int
    rounds: int


class HookBench:
    """The measurements on one cluster."""

    def __init__(self, cluster: Cluster, hooks: StampedHooks) -> None:
        self._cluster = cluster
        self._hooks = hooks

    def _finished(self, jobs: set[int], timeout_s: float) -> list[Stamp]:
        """Wait until the epilog of every job has run; their stamps."""
        found: list[Stamp] = []

        def ended() -> bool:
            found[:] = [stamp for stamp in self._hooks.stamps() if stamp.job in jobs]
            return len(found) == 2 * len(jobs)

        wait_until(ended, timeout_s, f"prolog and epilog of {len(jobs)} jobs")
        return found

    def serial(self, kind: Kind, jobs: int) -> list[Stamp]:
        """Jobs that want the same whole node, so that Slurm itself runs them one after another."""
        self._hooks.use(kind)
        whole = ["--nodelist=n1", "--exclusive", f"--gres=gpu:{GPUS}"]
        ids = {self._cluster.sbatch(JOB, *whole) for _ in range(jobs)}
        return self._finished(ids, 30 + 2 * jobs)

    def together(self, kind: Kind, jobs: int) -> list[Stamp]:
        """Jobs that all become free to start at one instant, over all nodes."""
        self._hooks.use(kind)
        self._cluster.scontrol("update", "partitionname=main", "state=down")
        ids = {self._cluster.sbatch(JOB, "--ntasks=1") for _ in range(jobs)}
        self._cluster.scontrol("update", "partitionname=main", "state=up")
        found = self._finished(ids, 60 + jobs)
        self._cluster.cancel_all()
        return found


def total_ms(stamps: list[Stamp]) -> float:
    """From the start of the first prolog to the end of the last one."""
    prologs = [stamp for stamp in stamps if stamp.hook == "prolog"]
    return (max(s.end_ns for s in prologs) - min(s.begin_ns for s in prologs)) / 1e6


def sum_ms(stamps: list[Stamp]) -> float:
    """What slurmd waited for all prologs, added up."""
    return sum(stamp.took_ms for stamp in stamps if stamp.hook == "prolog")


def measure_serial(bench: HookBench, sizes: Sizes) -> dict[str, Any]:
    """One after another, ours and empty ones in turn."""
    stamps: dict[Kind, list[Stamp]] = {kind: [] for kind in KINDS}
    for _ in range(sizes.serial // sizes.serial_round):
        for kind in KINDS:
            stamps[kind] += bench.serial(kind, sizes.serial_round)
    return {
        "jobs": sizes.serial,
        **{
            f"{kind}_{hook}_ms": told([s.took_ms for s in stamps[kind] if s.hook == hook], 2)
            for kind in KINDS
            for hook in SOURCES
        },
    }


def measure_together(bench: HookBench, sizes: Sizes) -> dict[str, Any]:
    """All at once, ours and empty ones in turn; the ratio is that of the medians over the rounds."""
    rounds: list[dict[Kind, list[Stamp]]] = []
    for number in range(sizes.rounds):
        order = KINDS if number % 2 == 0 else KINDS[::-1]
        rounds.append({kind: bench.together(kind, sizes.together) for kind in order})
    totals = [(total_ms(one["ours"]), total_ms(one["empty"])) for one in rounds]
    sums = [(sum_ms(one["ours"]), sum_ms(one["empty"])) for one in rounds]

    def ratio(pairs: Sequence[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)

    return {
        "jobs": sizes.together,
        "rounds": sizes.rounds,
        "ratio": round(ratio(totals), 3),
        "ratio_interval_95": [round(bound, 3) for bound in interval(totals, ratio)],
        "ours_total_ms": [round(a, 1) for a, _ in totals],
        "empty_total_ms": [round(b, 1) for _, b in totals],
        "ours_prolog_ms": told([s.took_ms for one in rounds for s in one["ours"] if s.hook == "prolog"]),
        "empty_prolog_ms": told([s.took_ms for one in rounds for s in one["empty"] if s.hook == "prolog"]),
        "added_up_ratio": round(ratio(sums), 3),
    }


def measure(sizes: Sizes) -> dict[str, Any]:
    """Both, on a cluster of their own."""
    with tempfile.TemporaryDirectory(prefix="pfi-hooks-") as name:
        hooks = StampedHooks(Path(name))
        options = ClusterOptions(
            nodes=NODES, gpus_per_node=GPUS, prolog=hooks.folder / "prolog", epilog=hooks.folder / "epilog"
        )
        with Cluster(options) as cluster:
            hooks.install(cluster)
            set_scheduler(cluster, SCHEDULER)
            bench = HookBench(cluster, hooks)
            bench.serial("ours", 2)  # the first of all reads everything from disk
            result = {"serial": measure_serial(bench, sizes), "together": measure_together(bench, sizes)}
            if faults := cluster.layout.hook_log.read_text():
                raise ClusterError(f"our hooks tell of faults: {faults[:500]}")
    return {"nodes": NODES, "gpus_per_node": GPUS, "cpus_per_node": 64, "agents": 0, **result}
