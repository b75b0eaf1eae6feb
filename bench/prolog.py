"""How long the prolog takes: ``python -m bench.prolog`` writes build/bench/prolog.json.

Each run is a real process in the bare environment of a Slurm hook, writing a real job file. An empty script of the
same shell is measured in turn, to tell our share from that of starting a process on this machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from testbed.cluster_files import REPO, install_hook

RUNS = 200


def measure_ms(script: Path, env: dict[str, str]) -> float:
    """Wall time of one run of ``script``. Raises CalledProcessError when it fails."""
    started = time.perf_counter_ns()
    pid = os.posix_spawn(script, [str(script)], env)
    _, status = os.waitpid(pid, 0)
    took_ms = (time.perf_counter_ns() - started) / 1e6
    if status != 0:
        raise subprocess.CalledProcessError(status, str(script))
    return took_ms


def main() -> None:
    """Measure, print, write."""
    ours, empty_ones = [], []
    with tempfile.TemporaryDirectory(prefix="pfi-bench-") as name:
        folder = Path(name)
        prolog, empty = folder / "prolog", folder / "empty"
        install_hook(
            REPO / "prolog/slurm-pfi-prolog", prolog, state_dir=folder / "state", log_file=folder / "no-log"
        )
        jobs = folder / "state/n1/jobs"
        jobs.mkdir(parents=True)
        empty.write_text("#!/bin/sh\nexit 0\n")
        empty.chmod(0o755)
        for number in range(1, RUNS + 1):
            env = {
                "SLURM_JOB_ID": str(number),
                "SLURM_JOB_UID": "20011",
                "SLURMD_NODENAME": "n1",
                "SLURM_JOB_RESTART_COUNT": "0",
                "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7",
                "SPANK_PFI_FLEX": "10%",
            }
            ours.append(measure_ms(prolog, env))
            empty_ones.append(measure_ms(empty, env))
        written = len(list(jobs.iterdir()))
    if written != RUNS:
        raise SystemExit(f"{RUNS} prologs left {written} job files")
    result = {
        "runs": RUNS,
        "median_ms": round(statistics.median(ours), 3),
        "p95_ms": round(statistics.quantiles(ours, n=20)[-1], 3),
        "empty_sh_median_ms": round(statistics.median(empty_ones), 3),
    }
    target = REPO / "build/bench/prolog.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"prolog over {RUNS} runs: median {result['median_ms']} ms, 95 % within {result['p95_ms']} ms"
        f" (an empty sh script: {result['empty_sh_median_ms']} ms); written to {target.relative_to(REPO)}"
    )


if __name__ == "__main__":
    main()
