"""How soon caps are in force on a node of eight GPUs: ``python -m bench.device`` writes build/bench/device.json.

The real agent and its NVML process on simulated GPUs, 15 ms in every NVML call. Each time is that from sending a plan
to the agent's own record of the enforced read-back of the last GPU. ``hang_delay_ms`` is how much later the caps of
seven GPUs are when the calls of the eighth hang for 45 s: the greatest time with the hang minus the median without. The
node's files lie in memory, as they do at sites (/run): a disk adds some 10 ms for the journal entry of each GPU.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from slurm_pfi.model import PlanStep, Run, RunCap
from testbed import gpus
from testbed.cluster_files import REPO
from testbed.lone_node import Commander, LoneNode

N_GPUS: Final = 8
CALL_S: Final = 0.015
HANG_S: Final = 45.0
RUNS: Final = 10
CAPS_MW: Final = (450_000, 400_000)
WAIT_S: Final = 20.0
MEMORY: Final = Path("/dev/shm")


async def cap_all(node: LoneNode, commander: Commander, run: Run, cap_mw: int, wanted: set[str]) -> float:
    """Send a plan and wait until the GPUs that are wanted have read it back as enforced; ms."""
    seen = len(node.audit("readback"))
    began_ns = time.monotonic_ns()
    caps = (RunCap(run=run, cap_mw=cap_mw),)
    await commander.plan(PlanStep(starts_in_s=0, park_cap_mw=200_000, caps=caps))
    async with asyncio.timeout(WAIT_S):
        while True:
            read = [line for line in node.audit("readback")[seen:] if line["enforced_mw"] == cap_mw]
            if wanted <= {line["uuid"] for line in read}:
                break
            await asyncio.sleep(0.1)  # its own clock stamps the records, so this costs no accuracy
    last_ns = max(line["mono_ns"] for line in read if line["uuid"] in wanted)
    return float(last_ns - began_ns) / 1e6


async def hang(node: LoneNode, commander: Commander, run: Run, sick: str, cap_mw: int, n: int) -> list[float]:
    """One GPU begins to hang just before a plan; then ``n`` more plans while it is held back."""
    well = {device.uuid for device in node.devices} - {sick}
    with gpus.Node(node.sim) as sim:
        sim.fault("*", gpus.FaultKind.DELAY, gpu=sick, delay_s=HANG_S)
    times = []
    for number in range(n):
        times.append(await cap_all(node, commander, run, cap_mw - 5_000 * number, well))
        await asyncio.sleep(0.5)
    return times


def slow_down(node: LoneNode) -> None:
    with gpus.Node(node.sim) as sim:
        sim.clear_faults()
        sim.fault("*", gpus.FaultKind.DELAY, delay_s=CALL_S)


async def measure(folder: Path, runs: int) -> dict[str, object]:
    """All runs on one node, the hangs at the end, each GPU hanging in turn."""
    node = LoneNode(folder, n_gpus=N_GPUS)
    everyone = {device.uuid for device in node.devices}
    try:
        async with Commander(node) as commander:
            node.start()
            run = node.job(7, f"0-{N_GPUS - 1}")
            await commander.until(lambda report: report.runs, "the run")
            slow_down(node)
            well = []
            for number in range(2 * runs):
                cap_mw = CAPS_MW[number % 2]
                well.append(await cap_all(node, commander, run, cap_mw, everyone))
            sick = await hang(node, commander, run, node.devices[3].uuid, CAPS_MW[1] - 5_000, runs)
    finally:
        node.close()
    lowered, raised = well[1::2], well[2::2]
    return {
        "plan_to_enforced_ms": round(max(well), 1),
        "plan_to_enforced_median_ms": round(statistics.median(well), 1),
        "lowered_median_ms": round(statistics.median(lowered), 1),
        "raised_median_ms": round(statistics.median(raised), 1),
        "hang_delay_ms": round(max(0.0, max(sick) - statistics.median(lowered)), 1),
        "hang_delay_median_ms": round(statistics.median(sick) - statistics.median(lowered), 1),
        "first_hang_delay_ms": round(sick[0] - statistics.median(lowered), 1),
        "gpus": N_GPUS,
        "call_ms": CALL_S * 1000,
        "hang_s": HANG_S,
        "runs": len(well) + len(sick),
    }


def main() -> None:
    """Measure, print, write."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    with tempfile.TemporaryDirectory(prefix="pfi-bench-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        result = asyncio.run(measure(Path(folder), runs))
    target = REPO / "build/bench/device.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
