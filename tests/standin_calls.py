"""Calls of pynvml as text for an NvmlProcess, and a node of four GPUs on which time stands still but for `advance`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from unittest import mock

from slurm_pfi.sim.jobs import model_job
from slurm_pfi.sim.standin import NodeGpus
from testbed.gpus import GpuModel, Node, create_node, library_path
from tests.standin_client import NvmlError, NvmlProcess

DEFAULT_MW: Final = 700_000
SET: Final = "N.nvmlDeviceSetPowerManagementLimit(h[{}], {})"
REQUESTED: Final = "N.nvmlDeviceGetPowerManagementLimit(h[{}])"
ENFORCED: Final = "N.nvmlDeviceGetEnforcedPowerLimit(h[{}])"
POWER: Final = "N.nvmlDeviceGetPowerUsage(h[{}])"
ENERGY: Final = "N.nvmlDeviceGetTotalEnergyConsumption(h[{}])"
REASONS: Final = "N.nvmlDeviceGetCurrentClocksEventReasons(h[{}])"
COUNT: Final = "N.nvmlDeviceGetCount()"
PIDS: Final = "[p.pid for p in N.nvmlDeviceGetComputeRunningProcesses(h[{}])]"
FIELDS: Final = "[(v.nvmlReturn, v.value.uiVal) for v in N.nvmlDeviceGetFieldValues(h[{}], {})]"


@contextmanager
def still_node(node_dir: Path) -> Iterator[Node]:
    """A new node whose limits come into force and whose draw follows at once."""
    create_node(node_dir, gpus=4, model=GpuModel(effect_us=0, tau_ms=0))
    with Node(node_dir) as node:
        node.poke("manual_ns", time.monotonic_ns())
        yield node


@contextmanager
def job_on_first_gpu(node: Node) -> Iterator[NodeGpus]:
    """A job of this process on GPU 0."""
    with mock.patch.dict(os.environ, PFI_STANDIN_LIB=str(library_path())):
        job = NodeGpus(node.node_dir, "7.0")
    job.register(node.snapshot()[0].uuid, model_job("L70 FT nc").workload)
    try:
        yield job
    finally:
        job.close()


def advance(node: Node, seconds: float) -> None:
    """Turn the node's clock."""
    node.poke("advance_ns", round(seconds * 1e9))


def code_of(process: NvmlProcess, expression: str) -> int | None:
    """The return code of a call; None when it succeeds."""
    try:
        process(expression)
    except NvmlError as error:
        return error.code
    return None
