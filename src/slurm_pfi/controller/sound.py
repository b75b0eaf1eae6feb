"""What a report may say: a node's numbers are believed only where a GPU could have them."""

from __future__ import annotations

from typing import Final

import msgspec

from ..model import GpuReport, Report
from .state import NodeView

MAX_GPUS: Final = 64
"""As many as a node set may declare."""

MAX_RUNS: Final = 4096
MAX_GPU_MW: Final = 20_000_000
"""20 kW: no GPU of this decade has such a limit."""


def refusal(report: Report) -> str:
    """Why this report cannot be taken at all; empty if it can."""
    uuids = [gpu.uuid for gpu in report.gpus]
    if len(uuids) > MAX_GPUS:
        return f"it names {len(uuids)} GPUs; a node has at most {MAX_GPUS}"
    if len(set(uuids)) < len(uuids):
        return "it names a GPU twice"
    if len(report.runs) > MAX_RUNS:
        return f"it names {len(report.runs)} runs; a node has at most {MAX_RUNS}"
    return ""


def sound(report: Report, node: NodeView) -> Report:
    """The report with every impossible GPU marked as faulty, to be counted as one of which nothing is known."""
    if all(_possible(gpu) for gpu in report.gpus):
        return report
    gpus = tuple(gpu if _possible(gpu) else _unknown(gpu, node) for gpu in report.gpus)
    return msgspec.structs.replace(report, gpus=gpus)


def _possible(gpu: GpuReport) -> bool:
    if not 0 < gpu.min_mw <= gpu.default_mw <= gpu.max_mw <= MAX_GPU_MW:
        return False
    if gpu.prior_mw is not None and not gpu.min_mw <= gpu.prior_mw <= gpu.max_mw:
        return False
    values = (gpu.requested_mw, gpu.enforced_mw, gpu.ceiling_mw, gpu.draw_mw, gpu.mean_mw)
    return all(value is None or 0 <= value <= MAX_GPU_MW for value in values)


def _unknown(gpu: GpuReport, node: NodeView) -> GpuReport:
    return msgspec.structs.replace(
        gpu,
        min_mw=0,
        max_mw=node.gpu_max_mw,
        default_mw=node.gpu_max_mw,
        requested_mw=None,
        enforced_mw=None,
        ceiling_mw=None,
        prior_mw=None,
        draw_mw=None,
        mean_mw=None,
        activity=None,
        slowed="",
        fault=gpu.fault or "what its node says of its limits cannot be",
    )
