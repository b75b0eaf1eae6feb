"""What we cost slurmctld beside a tool that polls it: ``python -m bench.slurm_load [--quick]``.

A real cluster with simulated GPUs, our controller and agents, jobs running on all GPUs and many more queued, and a job
that ends and another that starts in its place now and then. In the same minutes a tool runs ``squeue --json`` every
10 s. sdiag tells whose calls slurmctld served how long: the controller is one user, the tool another. Two stretches:
without a limit, and in a window, where every run is capped and its tag is written anew every 5 minutes.

Writes build/bench/slurm_load.json: ``ratio`` is the tool's time over that of **all** reads of ours, without a limit;
``window.ratio`` the same in the window, where most of our reads are those that belong to writing a tag. The writes
stand beside both. ``memory``: 10,000 reads of single jobs through the controller's worker and backend.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from testbed.cluster_files import REPO, ClusterError, slurm_release
from testbed.processes import wait_until
from testbed.site import Site, SiteOptions, sleep_until

from . import sdiag
from .plain_slurm import set_scheduler
from .results import tell, wants_quick
from .slurm_reads import rss_kib

TRAIN: Final = "L70 FT nc"
POLLER: Final = "daemon"  # an ordinary user of every Debian
OVERHEAD_W: Final = 1000.0
LIMITED_SHARE: Final = 0.75  # of the most that the site can draw
SCHEDULER: Final = (
    "SchedulerParameters=bf_interval=30"  # the testbed's looks for work each second, unlike a site
)
ALL_JOBS: Final = "REQUEST_JOB_INFO"
ONE_JOB: Final = "REQUEST_JOB_INFO_SINGLE"
WRITES: Final = "REQUEST_UPDATE_JOB"


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured, how long."""

    nodes: int
    gpus: int
    queued: int
    seconds: float
    poll_s: float
    settle_s: float
    starts: int
    reads: int

    @property
    def running(self) -> int:
        return self.nodes * self.gpus


FULL: Final = Size(nodes=4, gpus=8, queued=2000, seconds=600, poll_s=10, settle_s=90, starts=5, reads=10_000)
QUICK: Final = Size(nodes=2, gpus=2, queued=10, seconds=4, poll_s=1, settle_s=2, starts=1, reads=50)


def prepare(site: Site, size: Size) -> list[int]:
    """Running and queued jobs, and a scheduler that works as at a site; the ids of the running ones."""
    cluster = site.cluster
    running = [site.submit(TRAIN, gpus=1, flex="medium") for _ in range(size.running)]
    site.wait_training(*running, timeout_s=60 + 2 * size.running)
    more = ["--comment=fine-tuning, second sweep", "--time=2-00:00:00"]
    # Enough that the queue never falls below its size.
    for _ in range(size.queued + 2 * size.starts):
        site.submit(TRAIN, gpus=1, flex="medium", more=more)
    set_scheduler(cluster, SCHEDULER)
    return running


def poll(site: Site) -> float:
    """What the other tool does; its own wall time, s."""
    began_s = time.monotonic()
    done = subprocess.run(
        ["squeue", "--json"],
        env=site.cluster.client_env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
        user=POLLER,
        cwd="/",
    )
    if done.returncode != 0:
        raise ClusterError(f"squeue --json: exit {done.returncode}: {done.stderr.decode()}")
    return time.monotonic() - began_s


def let_pass(site: Site, size: Size, oldest: Iterator[int]) -> tuple[list[float], list[int]]:
    """Polls in their time, while some of the oldest jobs end and others take their place.

    Returns the polls' wall times, s, and the controller's resident memory at each of them, KiB.
    """
    began_ns = time.monotonic_ns()
    polls: list[float] = []
    rss: list[int] = []
    starts = 0
    while (passed_s := (time.monotonic_ns() - began_ns) / 1e9) < size.seconds:
        polls.append(poll(site))
        rss.append(rss_kib(site.pid_of("controller")))
        if starts < size.starts and passed_s >= (starts + 0.5) * size.seconds / size.starts:
            site.cluster.run(["scancel", str(next(oldest))], user="root")
            starts += 1
        sleep_until(began_ns + round(len(polls) * size.poll_s * 1e9))

    # The reconciling read comes every 10 minutes and belongs into the account, also if it is some seconds late.
    def all_read() -> bool:
        return sdiag.read(site.cluster).of_type(ALL_JOBS).count > len(polls)

    wait_until(all_read, 60, "the controller has read all jobs once")
    return polls, rss


def watch(site: Site, size: Size, oldest: Iterator[int]) -> dict[str, Any]:
    """One stretch. Raises ClusterError when its calls cannot be told apart."""
    sdiag.reset(site.cluster)
    began_s = time.monotonic()
    polls, rss = let_pass(site, size, oldest)
    served = sdiag.read(site.cluster)
    return {
        "seconds": round(time.monotonic() - began_s, 1),
        **account(served, polls, site.controller_account.pw_name),
        "jobs_started": size.starts,
        "controller_rss_kib": rss[:: max(1, len(rss) // 10)],
        "calls_by_type": {
            name: [calls.count, calls.total_us] for name, calls in sorted(served.by_type.items())
        },
    }


def account(served: sdiag.Served, polls: Sequence[float], controller: str) -> dict[str, Any]:
    """Who was served how long. Raises ClusterError when a user of the two made other calls than it should."""
    writes, theirs, ours = served.of_type(WRITES), served.of_user(POLLER), served.of_user(controller)
    reads = ours - writes  # nobody but the controller writes
    if theirs.count != len(polls) or reads.total_us <= 0:
        raise ClusterError(
            f"{len(polls)} polls, but sdiag shows {theirs} of {POLLER}, {ours} of {controller}"
        )
    return {
        "ratio": round(theirs.total_us / reads.total_us, 1),
        "poller": {
            "polls": theirs.count,
            "read_ms": round(theirs.total_us / 1000, 2),
            "each_ms": round(theirs.total_us / theirs.count / 1000, 3),
            "client_wall_median_ms": round(statistics.median(polls) * 1000, 1),
        },
        "ours": {
            "reads": reads.count,
            "read_ms": round(reads.total_us / 1000, 2),
            "full_reads": served.of_type(ALL_JOBS).count - len(polls),
            "single_reads": served.of_type(ONE_JOB).count,
        },
        "tag_writes": {
            "count": writes.count,
            "write_ms": round(writes.total_us / 1000, 2),
            "ratio_with_writes": round(theirs.total_us / ours.total_us, 1),
        },
    }


def open_window(site: Site, size: Size) -> None:
    """A limit at which every run is capped; returns when all caps are in force."""
    most_w = size.nodes * OVERHEAD_W + size.running * 700
    limit_mw = round(LIMITED_SHARE * most_w * 1000)
    site.ask("limit_set", {"id": "bench", "class": "economic", "limit_mw": limit_mw, "end_unix_s": None})

    def capped() -> bool:
        return all(gpu["effective_mw"] < 700_000 for gpu in site.snapshot())

    wait_until(capped, 60, "every GPU is capped")


def memory(site: Site, size: Size, jobs: list[int]) -> dict[str, Any]:
    """Resident memory over many reads: ours, and slurmctld's."""
    slurmctld = site.cluster.daemon_pid("slurmctld")
    before = rss_kib(slurmctld)
    command = [sys.executable, "-m", "bench.slurm_reads", str(site.cluster.slurm_conf), str(size.reads)]
    done = subprocess.run(
        [*command, *map(str, jobs)],
        env={**os.environ, **site.cluster.client_env},
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout)
    if told["unknown"] or told["reads"] != size.reads:
        raise ClusterError(f"{told['reads']} of {size.reads} reads, {told['unknown']} without an answer")
    # What the first reads leave is the code and the buffers of the first time.
    later = [(reads, kib) for reads, kib in told["rss_kib"] if reads > size.reads / 5]
    slope = statistics.linear_regression([reads for reads, _ in later], [kib for _, kib in later]).slope
    return {
        "reads": told["reads"],
        "seconds": told["seconds"],
        "bytes_per_read": round(slope * 1024, 1),
        "rss_kib": [told["rss_kib"][0][1], later[0][1], later[-1][1]],
        "slurmctld_rss_kib": [before, rss_kib(slurmctld)],
    }


def measure(size: Size) -> dict[str, Any]:
    """Everything on one site."""
    options = SiteOptions(
        nodes=size.nodes,
        gpus=size.gpus,
        overhead_w=OVERHEAD_W,
        slurm_user="slurm",
        scrambled=("n2",),
        times={
            "full_read_s": size.seconds,
            "tag_refresh_s": size.seconds / 2,
            "tag_after_s": min(30.0, size.settle_s),
            "cycle_s": min(10.0, size.seconds / 6),
        },
    )
    with Site(options) as site:
        running = prepare(site, size)
        oldest = iter(running)
        # The first tags, and all that a new slurmctld is asked at first, are no steady state.
        sleep_until(time.monotonic_ns() + round(size.settle_s * 1e9))
        steady = watch(site, size, oldest)
        open_window(site, size)
        sleep_until(time.monotonic_ns() + round(size.settle_s * 1e9))
        window = watch(site, size, oldest)
        found = memory(site, size, list(oldest))
    return {
        "ratio": steady["ratio"],
        "tag_writes": steady["tag_writes"]["count"],
        "window_ratio": window["ratio"],
        "window_tag_writes": window["tag_writes"]["count"],
        "bytes_per_read": found["bytes_per_read"],
        "slurm": slurm_release(),
        "nodes": size.nodes,
        "running": size.running,
        "queued": size.queued,
        "poll_s": size.poll_s,
        "steady": steady,
        "window": window,
        "memory": found,
    }


def table(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    lines = [f"{'':14}{'poller':>10}{'our reads':>11}{'ratio':>7}{'tag writes':>12}{'their time':>12}"]
    for name in ("steady", "window"):
        part = result[name]
        lines.append(
            f"{name:14}{part['poller']['read_ms']:7.1f} ms{part['ours']['read_ms']:8.1f} ms{part['ratio']:7.1f}"
            f"{part['tag_writes']['count']:12}{part['tag_writes']['write_ms']:9.1f} ms"
        )
    found = result["memory"]
    lines.append(
        f"{found['reads']} reads of single jobs: {found['bytes_per_read']:+.1f} bytes a read,"
        f" {found['rss_kib'][1]} -> {found['rss_kib'][2]} KiB"
        f" (slurmctld {found['slurmctld_rss_kib'][0]} -> {found['slurmctld_rss_kib'][1]})"
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    quick = wants_quick("slurm_load", argv)
    if os.getuid() != 0:
        raise SystemExit(
            "start this as root: sdiag tells calls apart by user, so controller and poller must differ"
        )
    tell("slurm_load", measure(QUICK if quick else FULL), table, quick=quick)


if __name__ == "__main__":
    main()
