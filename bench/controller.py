"""How long one planning cycle takes: ``python -m bench.controller``. Reports are made up; the core is the real one.

Writes build/bench/controller.json, for each size: ``report_ms`` to take one report in, ``first_ms`` for the cycle that
answers a new limit (every node gets a plan), ``steady_ms`` for one in which nothing is new (median of five).
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

from slurm_pfi.config import Config, NodeSet, TimesSection
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.core import Core
from slurm_pfi.controller.nodes import declared_nodes
from slurm_pfi.controller.science import Science
from slurm_pfi.elasticity.library import Library
from slurm_pfi.model import GpuReport, Limit, LimitStep, PlanId, Report, ReportId, Run, RunReport

OUT = Path(__file__).resolve().parent.parent / "build/bench/controller.json"
GPUS = 8
NOW_S = 1_800_000_000.0


def report(node: str, number: int, held: PlanId | None) -> Report:
    """One node with one run on all its GPUs, uncapped."""
    run = Run("bench", number)
    uuids = tuple(f"GPU-{node}-{i}" for i in range(GPUS))
    gpus = tuple(
        GpuReport(
            uuid=uuid,
            model="NVIDIA H200",
            position=i,
            min_mw=200_000,
            max_mw=700_000,
            default_mw=700_000,
            requested_mw=700_000,
            enforced_mw=700_000,
            ceiling_mw=700_000,
            prior_mw=700_000,
            draw_mw=650_000,
            runs=(run,),
        )
        for i, uuid in enumerate(uuids)
    )
    return Report(
        cluster="bench",
        node=node,
        id=ReportId(boot_id="b", agent_id="a", seq=1),
        highest_epoch=1,
        held=held,
        released=False,
        window_ends_in_s=None,
        gpus=gpus,
        runs=(RunReport(run=run, uid=1000, flex="medium", gpus=uuids),),
    )


def measure(nodes: int) -> dict[str, float]:
    """Milliseconds for a site of this size."""
    config = Config(
        cluster="bench",
        mode="enforce",
        node_set=(NodeSet(names=f"n[1-{nodes}]", gpus=GPUS, gpu_max_w=700, overhead_w=1000),),
        times=TimesSection(start_settle_s=0.001),
    )
    core = Core(config, Science(Library.load_default()))
    state = cs.State(epoch=1, started_ns=0, nodes=declared_nodes(config))
    now_ns = 10**9
    reports = [report(name, number, None) for number, name in enumerate(state.nodes, start=1)]
    for first in reports:
        state, _ = core.step(state, cs.ReportCame(report=first), now_ns)
    began_s = time.perf_counter()
    for again in reports:
        state, _ = core.step(state, cs.ReportCame(report=again), now_ns)
    reports_ms = (time.perf_counter() - began_s) * 1000
    state, _ = core.step(state, cs.Cycle(now_unix_s=NOW_S), now_ns)
    limit_mw = round(nodes * (1000 + GPUS * 700) * 1000 * 0.9)
    step = LimitStep(start_unix_s=NOW_S, limit_mw=limit_mw)
    limit = Limit(id="m", revision=1, source="bench", class_="economic", steps=(step,))
    state, _ = core.step(state, cs.LimitsChanged(limits=(limit,)), now_ns)
    cycles: list[float] = []
    sent = 0
    for _ in range(6):
        began_s = time.perf_counter()
        state, actions = core.step(state, cs.Cycle(now_unix_s=NOW_S), now_ns)
        cycles.append((time.perf_counter() - began_s) * 1000)
        sent = max(sent, sum(isinstance(action, cs.SendPlan) for action in actions))
    if sent != nodes:
        raise RuntimeError(f"{sent} plans for {nodes} nodes: this measures something else")
    return {
        "nodes": nodes,
        "report_ms": round(reports_ms / nodes, 3),
        "first_ms": round(cycles[0], 1),
        "steady_ms": round(statistics.median(cycles[1:]), 1),
    }


def main() -> None:
    """Measure, print and write."""
    sizes = [measure(nodes) for nodes in (200, 2000)]
    for size in sizes:
        print(", ".join(f"{key} {value:g}" for key, value in size.items()))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"sizes": sizes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
