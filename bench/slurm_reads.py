"""Whether the controller's way to Slurm keeps its memory: ``python -m bench.slurm_reads CONF COUNT JOB...``.

A process of its own reads single jobs, COUNT in all, through the controller's own worker and backend, and prints JSON:
its resident memory beside the number of reads so far. ``bench.slurm_load`` starts it on its cluster.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Final

from slurm_pfi.config import Config, NodeSet, SlurmSection
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.worker.slurm_worker import READERS, SlurmWorker
from slurm_pfi.model import Run
from slurm_pfi.slurm.choice import open_backend

SAMPLES: Final = 50


def rss_kib(pid: int | str = "self") -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise ValueError(f"process {pid} has no memory")


async def read(conf: str, count: int, jobs: list[int]) -> dict[str, object]:
    """Read the jobs in turn, as many at a time as the controller does."""
    config = Config(
        cluster="pfi",
        slurm=SlurmSection(conf=conf),
        node_set=(NodeSet(names="n1", gpus=1, gpu_max_w=700, overhead_w=0),),
    )
    backend = open_backend(
        config.slurm, timeout_s=config.times.slurm_timeout_s, say=lambda text: print(text, file=sys.stderr)
    )
    came = asyncio.Semaphore(2 * READERS)
    answers, unknown = 0, 0
    samples: list[tuple[int, int]] = []

    def take(event: cs.Event) -> None:
        nonlocal answers, unknown
        answers += 1
        unknown += not isinstance(event, cs.JobRead) or event.job is None
        if answers % max(1, count // SAMPLES) == 0:
            samples.append((answers, rss_kib()))
        came.release()

    worker = SlurmWorker(backend, config, take)
    working = asyncio.create_task(worker.run())
    began_s = time.monotonic()
    for number in range(count):
        await came.acquire()
        worker.read_job(Run("pfi", jobs[number % len(jobs)]))
    for _ in range(2 * READERS):  # all have answered when every place is free again
        await came.acquire()
    took_s = time.monotonic() - began_s
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return {"reads": answers, "unknown": unknown, "seconds": round(took_s, 1), "rss_kib": samples}


def main() -> None:
    """Read, print."""
    conf, count, *jobs = sys.argv[1:]
    print(json.dumps(asyncio.run(read(conf, int(count), [int(job) for job in jobs]))))


if __name__ == "__main__":
    main()
