"""What the controller's learning is worth in a closed loop: ``python -m bench.live``. Simulated, not measured.

Both real cores in the made-up world of the tests, with 12 of the 25 model jobs on 24 GPUs (arXiv 2609.11542, fitted).
Each site is seen uncapped for 40 s, then a limit below its draw holds; after 200 s of learning (``times.learn_s`` 60)
the throughput that all jobs keep is averaged over a minute. Writes build/bench/live.json, prints one line a limit.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Final

from tests.test_live_learning import busy_world, draw_w, kept

OUT: Final = Path(__file__).resolve().parent.parent / "build/bench/live.json"
SEEDS: Final = range(20, 26)
CUTS: Final = (0.08, 0.15, 0.25)
POLICIES: Final = ("equal", "pfi", "marginal")


def play(seed: int, policy: str, cut: float) -> float:
    """Throughput kept, averaged over the jobs, with nothing of the budget or the floors broken."""
    world = busy_world(seed, policy)
    world.set_limit(round(draw_w(world) * 1000 * (1 - cut)))
    world.run(200)
    shares = kept(world, 60)
    if world.violations:
        raise RuntimeError(f"seed {seed}, {policy}, {cut:.0%}: {world.violations[0]}")
    for run, share in shares.items():
        flex = world.controller.runs[run].flex
        if flex is None or share < 1 - flex.max_loss:
            raise RuntimeError(f"seed {seed}, {policy}, {cut:.0%}: {run} kept {share:.3f}")
    return statistics.fmean(shares.values())


def main() -> None:
    results = [
        {"seed": seed, "cut": cut, **{policy: play(seed, policy, cut) for policy in POLICIES}}
        for cut in CUTS
        for seed in SEEDS
    ]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"simulated": True, "results": results}, indent=1) + "\n")
    for cut in CUTS:
        rows = [row for row in results if row["cut"] == cut]
        text = f"cut {cut:.0%}: equal keeps {100 * statistics.fmean(row['equal'] for row in rows):.2f} %"
        for policy in POLICIES[1:]:
            gains = [100 * (row[policy] - row["equal"]) for row in rows]
            text += (
                f"; {policy} {statistics.fmean(gains):+.2f} points ({min(gains):+.2f} to {max(gains):+.2f})"
            )
        print(text)


if __name__ == "__main__":
    main()
