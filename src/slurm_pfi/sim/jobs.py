"""The 25 model jobs: fitted to published figures, not measured (see data/README.md)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

from .physics import Workload


@dataclass(frozen=True, slots=True)
class ModelJob:
    """A model job. ``tokens_per_s`` is the assumed T_max of the whole job on ``gpus`` GPUs; ``pfi`` as published."""

    name: str
    job_class: str
    gpus: int
    pfi: float
    workload: Workload
    tokens_per_s: float

    def tokens_per_s_on(self, gpus: int) -> float:
        """T_max on another number of GPUs: the rate per GPU is kept."""
        return self.tokens_per_s * gpus / self.gpus


@cache
def model_jobs() -> dict[str, ModelJob]:
    """All model jobs by name."""
    path = resources.files("slurm_pfi.sim") / "data" / "h200_model_jobs.csv"
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return {
        row["job"]: ModelJob(
            name=row["job"],
            job_class=row["class"],
            gpus=int(row["gpus"]),
            pfi=float(row["pfi_paper"]),
            workload=Workload(float(row["compute_share"]), float(row["kappa_w"]), float(row["memory_w"])),
            tokens_per_s=float(row["tokens_per_s"]),
        )
        for row in rows
    }


def model_job(name: str) -> ModelJob:
    """One model job. Raises KeyError with the names there are."""
    jobs = model_jobs()
    if name not in jobs:
        raise KeyError(f"no model job {name!r}; there are: {', '.join(sorted(jobs))}")
    return jobs[name]
