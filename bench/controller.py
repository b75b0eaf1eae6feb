"""How long one planning cycle takes: ``python -m bench.controller``. Reports are made up; the core is the real one.

Five runs on every two nodes of eight GPUs. Writes build/bench/controller.json, for each size: ``start_ms`` to hear
every node for the first time, ``report_ms`` to take one more report in, ``first_ms`` for the cycle that answers a new
limit (every node gets a plan), ``steady_ms`` for one in which nothing is new (median of five), ``ahead_ms`` for one in
which the limit has a step for each of the next 32 quarters of an hour.
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
from slurm_pfi.model import GpuReport, Limit, LimitStep, Report, ReportId, Run, RunReport

OUT = Path(__file__).resolve().parent.parent / "build/bench/controller.json"
GPUS = 8
NOW_S = 1_800_000_000.0


def report(node: str, number: int, seq: int) -> Report:
    """One node with two or three runs on its GPUs, uncapped."""
    runs = [Run("bench", 3 * number + i % (2 + number % 2)) for i in range(GPUS)]
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
            runs=(runs[i],),
        )
        for i, uuid in enumerate(uuids)
    )
    return Report(
        cluster="bench",
        node=node,
        id=ReportId(boot_id="b", agent_id="a", seq=seq),
        highest_epoch=1,
        held=None,
        released=False,
        window_ends_in_s=None,
        gpus=gpus,
        runs=tuple(
            RunReport(
                run=run,
                uid=1000,
                flex="medium",
                gpus=tuple(uuid for uuid, other in zip(uuids, runs, strict=True) if other == run),
            )
            for run in sorted(set(runs))
        ),
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
    took_ms: list[float] = []
    for seq in (1, 2):
        reports = [report(name, number, seq) for number, name in enumerate(state.nodes, start=1)]
        began_s = time.perf_counter()
        for one in reports:
            state, _ = core.step(state, cs.ReportCame(report=one), now_ns)
        took_ms.append((time.perf_counter() - began_s) * 1000)
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
    quarters = tuple(
        LimitStep(start_unix_s=NOW_S + 900 * i, limit_mw=limit_mw - (i * 7 % 5) * 1_000_000)
        for i in range(32)
    )
    many = Limit(id="m", revision=2, source="bench", class_="economic", steps=quarters)
    state, _ = core.step(state, cs.LimitsChanged(limits=(many,)), now_ns)
    state, _ = core.step(state, cs.Cycle(now_unix_s=NOW_S), now_ns)
    began_s = time.perf_counter()
    core.step(state, cs.Cycle(now_unix_s=NOW_S), now_ns)
    ahead_ms = (time.perf_counter() - began_s) * 1000
    return {
        "nodes": nodes,
        "runs": len(state.runs),
        "start_ms": round(took_ms[0], 1),
        "report_ms": round(took_ms[1] / nodes, 3),
        "first_ms": round(cycles[0], 1),
        "steady_ms": round(statistics.median(cycles[1:]), 1),
        "ahead_ms": round(ahead_ms, 1),
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
