"""A simulated training job whose counter lies: while a cap slows it, it reports FACTOR times what it has done.

    python lying_job.py FACTOR --workload "L70 FT nc"

Everything else is ``slurm_pfi.sim.job``; its own token log stays true.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Final
from unittest.mock import patch

from slurm_pfi.progress import report
from slurm_pfi.sim import job

SLOWED: Final = 0.99
"""Work per second as a share of that without a cap: below it the job lies."""


class Lie:
    """What is said instead of what was done."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._seen: tuple[int, float] | None = None
        self._slowed = False
        self._true = 0.0
        self._told = 0.0

    def look(self, at_ns: int, work: Mapping[job.GpuKey, float]) -> None:
        """See how fast the slowest GPU is."""
        done = min(work.values(), default=0.0)
        if self._seen is not None and at_ns > self._seen[0]:
            self._slowed = (done - self._seen[1]) * 1e9 < SLOWED * (at_ns - self._seen[0])
        self._seen = at_ns, done

    def report(self, counter: float, unit: str = "tokens", total: float | None = None) -> bool:
        """Report in place of the job."""
        self._told += (counter - self._true) * (self._factor if self._slowed else 1.0)
        self._true = counter
        return report(self._told, unit, total)


def main(argv: Sequence[str]) -> int:
    """Run the job with a lie; exit codes are the job's."""
    lie = Lie(float(argv[0]))

    class Watched(job.Gpus):
        def work(self) -> tuple[int, dict[job.GpuKey, float]]:
            at_ns, work = super().work()
            lie.look(at_ns, work)
            return at_ns, work

    with patch.object(job, "Gpus", Watched), patch.object(job, "report", lie.report):
        return job.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
