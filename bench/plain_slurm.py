"""A plain Slurm cluster, without anything of ours, beside the one that is measured, and other scheduler settings."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from testbed import gpus
from testbed.cluster import Cluster, ClusterOptions
from testbed.processes import wait_until
from testbed.simjob import install_job


class PlainSlurm:
    """A cluster with simulated GPUs as a site has it without us: no hook, no plugin, no daemon of ours."""

    def __init__(self, *, nodes: int, gpus_per_node: int) -> None:
        self._nodes = nodes
        self._gpus = gpus_per_node
        self.cluster: Cluster

    def __enter__(self) -> PlainSlurm:
        self.root = Path(tempfile.mkdtemp(prefix="pfi-plain-"))
        self.root.chmod(0o755)
        job = install_job(self.root / "python", self.root / "sim")
        self.command = job.command
        options = ClusterOptions(
            nodes=self._nodes,
            gpus_per_node=self._gpus,
            hooks=False,
            plugin=False,
            job_env={**job.env, "PYTHONDONTWRITEBYTECODE": "1"},
            parent=self.root,
        )
        self.cluster = Cluster(options).start()
        for name in self.cluster.node_names:
            devices = self.cluster.layout.device(name, 0).parent
            gpus.create_node(self.sim_dir(name), gpus=self._gpus, device_dir=devices)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cluster.stop()
        shutil.rmtree(self.root, ignore_errors=True)

    def sim_dir(self, node: str) -> Path:
        """The stand-in's folder of a node."""
        return self.root / "sim" / node


def set_scheduler(cluster: Cluster, parameters: str) -> None:
    """Give slurmctld other SchedulerParameters, by a restart, and return when all its nodes answer."""
    cluster.stop_slurmctld()
    lines = cluster.slurm_conf.read_text().splitlines()
    key = "SchedulerParameters="
    lines = [f"{key}{parameters}" if line.startswith(key) else line for line in lines]
    cluster.slurm_conf.write_text("\n".join([*lines, ""]))
    cluster.start_slurmctld()

    def up() -> bool:
        shown = cluster.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%t"], user="root", check=False)
        states = shown.stdout.split()
        return len(states) == cluster.options.nodes and set(states) <= {"alloc", "idle", "mix"}

    wait_until(up, 60, "slurmctld is back and every node answers")
