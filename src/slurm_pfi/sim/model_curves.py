"""The curves of the 25 model jobs as a curve file, for the library: ``python -m slurm_pfi.sim.model_curves > FILE``.

Model, not measurement. One row for each cap that lowers the draw, and the uncapped one.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from typing import Final

from .jobs import ModelJob, model_jobs
from .physics import REFERENCE_CAP_W

COLUMNS: Final = (
    "curve_id", "gpu", "family", "workload", "task", "cap_w", "power_w_per_gpu", "throughput", "basis", "source",
    "licence",
)  # fmt: skip
CAPS_W: Final = tuple(float(cap) for cap in range(200, 700, 50))
SOURCE: Final = "physical model fitted to arXiv 2609.11542 Table 6"
_BINDS: Final = 0.999
_ARCHITECTURE: Final = {
    "L70": ("llama", "Llama-3.1-70B"),
    "Q32": ("qwen", "Qwen3-32B"),
    "Q30": ("qwen", "Qwen3-30B-A3B"),
    "oss": ("gpt", "gpt-oss-20b"),
}


def text() -> str:
    """The whole file; throughput is relative to that at 700 W, the board power."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for job in model_jobs().values():
        writer.writerows(_rows(job))
    return out.getvalue()


def _rows(job: ModelJob) -> list[tuple[str, ...]]:
    family, model = _ARCHITECTURE[job.name[:3]]
    task = "FT" if job.job_class.endswith("F") else "PT"
    curve_id = "h200_model_" + re.sub(r"[^a-z0-9]+", "_", job.name.lower())
    uncapped_w = job.workload.draw_w(REFERENCE_CAP_W)
    caps = [cap for cap in CAPS_W if job.workload.draw_w(cap) < _BINDS * uncapped_w]
    return [
        (
            curve_id, "H200", family, f"{model} {job.name[4:]}", task, f"{cap:g}", f"{job.workload.draw_w(cap):.6f}",
            f"{job.workload.relative_throughput(cap):.8f}", "model", SOURCE, "MIT",
        )
        for cap in (*caps, REFERENCE_CAP_W)
    ]  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(text())
