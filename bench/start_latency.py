"""What our hooks and a window cost a job at its start: ``python -m bench.start_latency [--quick]``.

Real clusters with simulated GPUs. Writes build/bench/start_latency.json:

hooks          wall time of our hooks as slurmd runs them, and of an empty one (bench.hook_times): 200 jobs one after
               another, and 200 at once
first_kernel   from the start of sbatch to the job's first kernel, in turn with plugin and hooks (agents and controller
               stopped), with all of ours at work, and on a plain cluster: medians, and their differences. A node's
               agent and the controller share the cores of this one machine with job and Slurm, as at no site. Also
               from the allocation, which comes at slurmctld's next look at the queue, once a second, whoever waits
first_raise    in a window, from the agent's first sight of a run to the first cap of its GPU above the park cap, which
               holds it until the controller has admitted it; also from its first kernel, which comes later
"""

from __future__ import annotations

import json
import random
import re
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from testbed import gpus
from testbed.cluster import Cluster
from testbed.cluster_files import ClusterError, slurm_release
from testbed.processes import wait_until
from testbed.site import Site, SiteOptions

from . import hook_times
from .intervals import interval, told
from .plain_slurm import PlainSlurm
from .results import tell, wants_quick

TRAIN: Final = "L70 FT nc"
NODES: Final = 2
GPUS: Final = 4
OVERHEAD_W: Final = 1000.0
PARK_MW: Final = 200_000
# All GPUs parked, all overheads, and power for one GPU at its limit.
LIMIT_MW: Final = NODES * 1_000_000 + NODES * GPUS * PARK_MW + 700_000
WAIT_S: Final = 60.0
ARMS: Final = ("all", "hooks", "without")


@dataclass(frozen=True, slots=True)
class Size:
    """How many of each."""

    hooks: hook_times.Sizes
    turns: int
    raises: int


FULL: Final = Size(hook_times.Sizes(serial=200, serial_round=50, together=200, rounds=5), turns=40, raises=20)
QUICK: Final = Size(hook_times.Sizes(serial=4, serial_round=4, together=8, rounds=1), turns=2, raises=2)


def first_kernel_ns(folder: Path, job: int) -> int | None:
    """When a job started its first kernel; None before it has."""
    starts = (
        line.mono_ns
        for line in gpus.read_trace(folder)
        if line.event == "kernel" and line.job.startswith(f"{job}.")
    )
    return next(starts, None)


def wait_free(cluster: Cluster, job: int) -> None:
    """Wait until the job's nodes are free again, epilogs included."""
    wait_until(
        lambda: (
            not cluster.squeue(f"--jobs={job}", "--states=all", "--format=%i")
            or cluster.job_state(job) == "COMPLETED"
        ),
        WAIT_S,
        f"job {job} has ended",
    )
    cluster.wait_nodes_idle()


def allocated_ns(cluster: Cluster, job: int) -> int:
    """When slurmctld gave the job its node, to the millisecond. Raises ClusterError when its log does not tell."""
    log = (cluster.layout.log / "slurmctld.log").read_text(errors="replace")
    told_at = re.findall(rf"^\[(\S+)\] .*(?:Allocate|Started) JobId={job} ", log, re.MULTILINE)
    if not told_at:
        raise ClusterError(f"slurmctld's log does not tell when job {job} was allocated")
    unix_s = datetime.fromisoformat(told_at[0]).astimezone().timestamp()
    return round((unix_s - time.time() + time.monotonic()) * 1e9)


def start_ms(cluster: Cluster, command: str, folder: Path) -> tuple[float, float]:
    """One short job on an idle n1: ms to its first kernel since the start of sbatch, and since its allocation.

    slurmctld looks for jobs to start once a second, so the first is mostly the wait for that look; submitting at an
    instant of our own making would measure its phase.
    """
    time.sleep(random.random())
    began_ns = time.monotonic_ns()
    job = cluster.sbatch(f"#!/bin/sh\nexec {command}\n", "--gres=gpu:1", "--nodelist=n1")
    wait_free(cluster, job)
    started_ns = first_kernel_ns(folder, job)
    if started_ns is None:
        raise ClusterError(f"job {job} started no kernel: {cluster.job_output(job)[-500:]}")
    return (started_ns - began_ns) / 1e6, (started_ns - allocated_ns(cluster, job)) / 1e6


@contextmanager
def daemons_stopped(site: Site) -> Iterator[None]:
    """Plugin and hooks stay; agents and controller take none of the few cores that the whole site shares here."""
    names = ("controller", *site.node_names)
    for name in names:
        site.send_signal(name, signal.SIGSTOP)
    try:
        yield
    finally:
        for name in names:
            site.send_signal(name, signal.SIGCONT)


def measure_first_kernel(site: Site, plain: PlainSlurm, turns: int) -> dict[str, Any]:
    """With all of ours, with plugin and hooks alone, and without us, in turn; who goes first changes."""
    with_us = site.training(TRAIN, seconds=0.2)
    without_us = f'{plain.command} --workload "{TRAIN}" --seconds 0.2'

    def one(arm: str) -> tuple[float, float]:
        if arm == "without":
            return start_ms(plain.cluster, without_us, plain.sim_dir("n1"))
        with daemons_stopped(site) if arm == "hooks" else nullcontext():
            return start_ms(site.cluster, with_us, site.sim_dir("n1"))

    found: list[dict[str, tuple[float, float]]] = []
    for number in range(turns + 1):
        order = [*ARMS[number % len(ARMS) :], *ARMS[: number % len(ARMS)]]
        found.append({arm: one(arm) for arm in order})
    found = found[1:]  # the first of each reads everything from disk

    return {
        "turns": turns,
        "since_submit": compared([{arm: both[0] for arm, both in turn.items()} for turn in found]),
        "since_allocation": compared([{arm: both[1] for arm, both in turn.items()} for turn in found]),
    }


def compared(found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians of each arm, and how much later a job is with ours, by the difference of medians."""

    def later(arm: str) -> dict[str, Any]:
        def by(sample: Sequence[dict[str, float]]) -> float:
            return statistics.median(x[arm] for x in sample) - statistics.median(x["without"] for x in sample)

        return {"ms": round(by(found), 1), "interval_95_ms": [round(x, 1) for x in interval(found, by)]}

    return {
        **{f"{arm}_ms": told([times[arm] for times in found]) for arm in ARMS},
        "hooks_later": later("hooks"),
        "all_later": later("all"),
    }


def seen_ns(site: Site, node: str, job: int) -> int | None:
    """When the node's agent took up a run."""
    path = site.node_dir(node) / "audit.jsonl"
    for line in path.read_text().splitlines():
        record = json.loads(line) if line.endswith("}") else {}
        if record.get("event") == "run_seen" and f":{job}." in record["run"]:
            return int(record["mono_ns"])
    return None


def one_raise(site: Site) -> tuple[float, float]:
    """One job that starts in the window: seconds to its first raise since it was seen, and since its first kernel."""
    folder = site.sim_dir("n1")
    job = site.submit(TRAIN, gpus=1, flex="medium", where="n1")
    found: list[tuple[int, int, int]] = []

    def raised() -> bool:
        seen, kernel = seen_ns(site, "n1", job), first_kernel_ns(folder, job)
        if seen is None or kernel is None:
            return False
        lines = gpus.read_trace(folder)
        mine = {line.uuid for line in lines if line.event == "kernel" and line.job.startswith(f"{job}.")}
        up = (
            line.mono_ns
            for line in lines
            if line.uuid in mine
            and line.event == "limit"
            and line.mono_ns > seen
            and line.effective_mw > PARK_MW
        )
        found[:] = [(seen, kernel, first) for first in [next(up, 0)] if first]
        return bool(found)

    wait_until(raised, WAIT_S, f"job {job} is raised above the park cap")
    site.cluster.run(["scancel", str(job)], user="root")
    site.cluster.wait_nodes_idle()
    wait_parked(site)
    seen, kernel, first = found[0]
    return (first - seen) / 1e9, (first - kernel) / 1e9


def wait_parked(site: Site) -> None:
    """Wait until every GPU is at the park cap."""
    wait_until(
        lambda: all(gpu["effective_mw"] == PARK_MW for gpu in site.snapshot()), WAIT_S, "every GPU is parked"
    )


def measure_first_raise(site: Site, raises: int) -> dict[str, Any]:
    """Jobs that start in a window, one after another, with power for one."""
    limit = {"id": "bench", "class": "economic", "limit_mw": LIMIT_MW, "end_unix_s": None}
    site.ask("limit_set", limit)
    wait_parked(site)
    times = [one_raise(site) for _ in range(raises)]
    site.ask("limit_clear", {"id": None})
    site.wait_restored()
    return {
        "jobs": raises,
        "limit_w": LIMIT_MW / 1000,
        "since_seen_s": told([seen for seen, _ in times], 2),
        "since_first_kernel_s": told([kernel for _, kernel in times], 2),
    }


def measure(size: Size) -> dict[str, Any]:
    """All three, one after another."""
    hooks = hook_times.measure(size.hooks)
    options = SiteOptions(nodes=NODES, gpus=GPUS, overhead_w=OVERHEAD_W, scrambled=())
    with Site(options) as site:
        with PlainSlurm(nodes=NODES, gpus_per_node=GPUS) as plain:
            first_kernel = measure_first_kernel(site, plain, size.turns)
        first_raise = measure_first_raise(site, size.raises)
    serial, together = hooks["serial"], hooks["together"]
    return {
        "hook_median_ms": serial["ours_prolog_ms"]["median"],
        "hook_p99_ms": serial["ours_prolog_ms"]["p99"],
        "together_ratio": together["ratio"],
        "first_kernel_later_ms": first_kernel["since_allocation"]["hooks_later"]["ms"],
        "first_raise_max_s": first_raise["since_seen_s"]["max"],
        "slurm": slurm_release(),
        "nodes": NODES,
        "gpus_per_node": GPUS,
        "hooks": hooks,
        "first_kernel": first_kernel,
        "first_raise": first_raise,
    }


def table(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    serial, together = result["hooks"]["serial"], result["hooks"]["together"]
    lines = [f"{'':34}{'median':>9}{'p99':>9}{'greatest':>10}"]
    rows = {
        f"{kind} {hook}, one after another": serial[f"{kind}_{hook}_ms"]
        for kind in hook_times.KINDS
        for hook in hook_times.SOURCES
    }
    for kind in hook_times.KINDS:
        rows[f"{kind} prolog, {together['jobs']} at once"] = together[f"{kind}_prolog_ms"]
    first = result["first_kernel"]
    for since, words in (("since_submit", "submit"), ("since_allocation", "allocation")):
        for arm in ARMS:
            rows[f"{words} to first kernel, {arm}"] = first[since][f"{arm}_ms"]
    lines += [
        f"{name:34}{row['median']:9.1f}{row['p99']:9.1f}{row['max']:10.1f} ms" for name, row in rows.items()
    ]
    row = result["first_raise"]["since_seen_s"]
    lines.append(f"{'seen to first raise':34}{row['median']:9.2f}{row['p99']:9.2f}{row['max']:10.2f} s")
    low, high = together["ratio_interval_95"]
    lines.append(
        f"{together['jobs']} at once, all prologs: {together['ratio']} times the empty hook ({low} to {high})"
    )
    for since in ("since_submit", "since_allocation"):
        for name, words in (("hooks", "plugin and hooks"), ("all", "all of ours")):
            later = first[since][f"{name}_later"]
            low, high = later["interval_95_ms"]
            lines.append(
                f"first kernel {since.replace('_', ' ')}, {words}: {later['ms']:+} ms ({low} to {high})"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    quick = wants_quick("start_latency", argv)
    tell("start_latency", measure(QUICK if quick else FULL), table, quick=quick)


if __name__ == "__main__":
    main()
