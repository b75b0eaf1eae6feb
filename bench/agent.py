"""What an agent costs its node: ``python -m bench.agent [SECONDS]`` writes build/bench/agent.json.

Eight simulated GPUs, 15 ms in every NVML call, a window open, so caps and draw are read every second. CPU time and PSS
are those of the whole process tree. Beside it, in the same time on the same machine, runs a bare loop of two processes
that makes the same NVML calls at the same pace and does nothing with the answers: the ratio is what our care costs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurm_pfi.model import PlanStep, RunCap
from testbed import gpus
from testbed.cluster_files import REPO
from testbed.lone_node import Commander, LoneNode

N_GPUS: Final = 8
CALL_S: Final = 0.015
SETTLE_S: Final = 5.0
SECONDS: Final = 120.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time since the start of each process, and memory in proportion to who shares it."""

    cpu_s: float
    pss_mb: float


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from tree(int(child))


def cost(pid: int) -> Cost:
    """What the tree of a process has used; the scheduler's own clock, so no tick is missed."""
    cpu_ns, pss_kb = 0, 0
    for member in tree(pid):
        for task in Path(f"/proc/{member}/task").iterdir():
            cpu_ns += int((task / "schedstat").read_text().split()[0])
        for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                pss_kb += int(line.split()[1])
    return Cost(cpu_s=cpu_ns / 1e9, pss_mb=pss_kb / 1024)


def start_bare(node: LoneNode) -> subprocess.Popen[bytes]:
    """The loop to compare with."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench.agent_bare", "1.0"],
        env=node.environment(),
        cwd=REPO,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def calls_of(*nodes: LoneNode) -> list[int]:
    """How many NVML calls each node has answered: each of them met the planted delay."""
    fired = []
    for node in nodes:
        with gpus.Node(node.sim) as sim:
            fired.append(sim.faults_fired())
    return fired


async def measure(folder: Path, seconds: float) -> dict[str, float]:
    """Both side by side for ``seconds``."""
    node, other = LoneNode(folder, n_gpus=N_GPUS), LoneNode(folder, name="bare", n_gpus=N_GPUS)
    bare = start_bare(other)
    try:
        async with Commander(node) as commander:
            agent = node.start()
            run = node.job(7, f"0-{N_GPUS - 1}")
            await commander.until(lambda report: report.runs, "the run")
            window = PlanStep(starts_in_s=0, park_cap_mw=200_000, caps=(RunCap(run=run, cap_mw=450_000),))
            await commander.plan(window)
            await commander.ceilings(*[450_000] * N_GPUS)
            for one in (node, other):
                with gpus.Node(one.sim) as sim:
                    sim.fault("*", gpus.FaultKind.DELAY, delay_s=CALL_S)
            await asyncio.sleep(SETTLE_S)
            began_s, first, bare_first = time.monotonic(), cost(agent.pid), cost(bare.pid)
            reports, calls = len(commander.reports), calls_of(node, other)
            await asyncio.sleep(seconds)
            took_s, last, bare_last = time.monotonic() - began_s, cost(agent.pid), cost(bare.pid)
            made = [after - before for after, before in zip(calls_of(node, other), calls, strict=True)]
            said = len(commander.reports) - reports
            if said < 0.9 * took_s:
                raise SystemExit(f"{said} reports in {took_s:.0f} s: the agent does not read every second")
    finally:
        os.killpg(bare.pid, signal.SIGTERM)
        bare.wait()
        node.close()
    ours_s, bare_s = last.cpu_s - first.cpu_s, bare_last.cpu_s - bare_first.cpu_s
    return {
        "cpu_share": round(ours_s / took_s, 5),
        "pss_mb": round(last.pss_mb, 1),
        "ratio": round(ours_s / bare_s, 2),
        "bare_cpu_share": round(bare_s / took_s, 5),
        "bare_pss_mb": round(bare_last.pss_mb, 1),
        "gpus": N_GPUS,
        "call_ms": CALL_S * 1000,
        "seconds": round(took_s, 1),
        "reports": said,
        "nvml_calls_per_s": round(made[0] / took_s, 1),
        "bare_nvml_calls_per_s": round(made[1] / took_s, 1),
    }


def main() -> None:
    """Measure, print, write."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    with tempfile.TemporaryDirectory(prefix="pfi-bench-") as folder:
        result = asyncio.run(measure(Path(folder), seconds))
    target = REPO / "build/bench/agent.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
