"""The simulated job under a real Slurm: it works on the GPUs whose device files Slurm allocated."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from testbed.cluster import Cluster, ClusterOptions
from testbed.cluster_files import Gpu
from testbed.gpus import Device, create_node, plan_devices, snapshot
from testbed.simjob import install_job
from tests.standin_client import wait_until

pytestmark = pytest.mark.cluster

ATTEMPT = """
import pynvml
pynvml.nvmlInit()
for index in range(pynvml.nvmlDeviceGetCount()):
    try:
        pynvml.nvmlDeviceSetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(index), 650_000)
    except pynvml.NVMLError_NoPermission:
        print("refused")
"""

GPUS = 4
NODES = ("n1", "n2")
_ALLOCATED = re.compile(r"Nodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=gpu:\w+:\d+\(IDX:([\d,-]+)\)")


def _positions(text: str) -> set[int]:
    spans = [part.split("-") for part in text.split(",")]
    return {position for span in spans for position in range(int(span[0]), int(span[-1]) + 1)}


def _allocated(cluster: Cluster, job_id: int) -> dict[str, set[int]]:
    """Positions in gres.conf by node, as slurmctld has them."""
    found = _ALLOCATED.findall(cluster.scontrol("-o", "show", "job", "-d", str(job_id)))
    return {node: _positions(text) for nodes, text in found for node in _hosts(nodes)}


def _hosts(text: str) -> tuple[str, ...]:
    return NODES if text == "n[1-2]" else (text,)


def test_jobs_work_on_the_gpus_that_slurm_allocated() -> None:
    plan = {node: plan_devices(node, GPUS, Path("/"), scrambled=True) for node in NODES}
    options = ClusterOptions(
        nodes=len(NODES),
        gpus_per_node=GPUS,
        gres={node: [Gpu(minor=device.minor) for device in devices] for node, devices in plan.items()},
        hooks=False,
        plugin=False,
    )
    with Cluster(options) as cluster:
        sim_dir = cluster.folder / "sim"
        job = install_job(cluster.folder / "lib", sim_dir)
        devices: dict[str, tuple[Device, ...]] = {
            node: create_node(
                sim_dir / node, gpus=GPUS, scrambled=True, device_dir=cluster.layout.device(node, 0).parent
            )
            for node in NODES
        }
        assert all(Path(device.file).is_char_device() for node in NODES for device in devices[node])
        train = f"{job.command} --workload 'L70 FT nc'"
        one_node = f"#!/bin/sh\nexec {train}\n"
        two_nodes = f"#!/bin/sh\nexec srun {train}\n"
        jobs = [
            cluster.sbatch(one_node, "--nodelist=n1", "--gres=gpu:1", env=job.env),
            cluster.sbatch(one_node, "--nodelist=n1", "--gres=gpu:2", env=job.env),
            cluster.sbatch(two_nodes, "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", env=job.env),
        ]
        for job_id in jobs:
            cluster.wait_job_state(job_id, "RUNNING")
        for job_id, gpus in zip(jobs, (1, 2, 2), strict=True):
            allocated = _allocated(cluster, job_id)
            expected = {
                device.uuid
                for node, places in allocated.items()
                for device in devices[node]
                if device.position in places
            }
            assert len(expected) == gpus
            wait_until(
                lambda expected=expected, job_id=job_id: _busy(sim_dir, job_id) == expected,  # type: ignore[misc]
                f"job {job_id} on {sorted(expected)}; it said: {cluster.job_output(job_id)}",
            )
        attempt = cluster.sbatch(
            f"#!/bin/sh\n{job.nvml_python} - <<'EOF'\n{ATTEMPT}EOF\n", "--nodelist=n2", env=job.env
        )
        cluster.wait_job_state(attempt, "COMPLETED")
        # Without root the user who submits has made the simulated GPUs, and is their root.
        refused = GPUS if os.getuid() == 0 else 0
        assert cluster.job_output(attempt).split() == ["refused"] * refused
        cluster.cancel_all()
        wait_until(lambda: not any(_busy(sim_dir, job_id) for job_id in jobs), "all GPUs idle")
        assert cluster.drained_nodes() == {}


def _busy(sim_dir: Path, job_id: int) -> set[str]:
    return {gpu.uuid for node in NODES for gpu in snapshot(sim_dir / node) if gpu.job == f"{job_id}.0"}
