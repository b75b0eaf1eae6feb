"""A whole site under one folder: a real Slurm cluster with simulated GPUs, node agents, a controller, an observer.

    with Site(SiteOptions()) as site:
        job = site.submit("L70 FT nc", gpus=8, flex="medium")
        site.cli("limit", "set", "20kW")

Nodes n2 and n4 are scrambled: gres position, minor number and NVML index differ for every GPU. Jobs run as an ordinary
user. Everything listens on loopback or in the folder, and ``stop`` ends each process by its own pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from . import gpus
from .cluster import Cluster, ClusterError, ClusterOptions, Gpu, wait_until
from .daemons import START_S
from .processes import processes_naming
from .simjob import install_job
from .site_use import SiteOptions, SiteUse

__all__ = ["Site", "SiteOptions", "sleep_until"]

CONFIG: Final = """\
cluster = "{name}"
mode = "{mode}"

[[node_set]]
names = "{nodes}"
gpus = {gpus}
gpu_max_w = 700
overhead_w = {overhead_w}

[controller]
user = "{user}"
state_dir = "{root}/controller/state"
run_dir = "{root}/controller/run"

[node]
state_dir = "{root}/nodes"
identity_dir = "{root}/identity"

[slurm]
conf = "{slurm_conf}"
"""


class Site(SiteUse):
    """Starts with ``start()`` or ``with``, and must be stopped. Not for use by several threads."""

    def start(self) -> Site:
        """Bring everything up, and return when the controller has heard every node."""
        self.root = Path(tempfile.mkdtemp(prefix="pfi-site-"))
        self.root.chmod(0o755)
        try:
            self._install_job()
            self._start_cluster()
            self._create_gpus()
            self._set_admin_limits()
            self._write_config()
            self.start_controller()
            agents = [node for node in self.node_names if node not in self.options.agentless]
            for node in agents:
                self.start_agent(node, wait=False)
            self.wait_heard(*agents)
        except BaseException:
            self.stop()
            raise
        return self

    def __enter__(self) -> Site:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leftovers = self.stop()
        if error is None and leftovers:
            raise ClusterError("; ".join(leftovers))

    def stop(self) -> list[str]:
        """End agents, controller and cluster, each by its pid. Returns what was not as it should be."""
        troubles: list[str] = []
        for name in [name for name in self._processes if name != "controller"]:
            self._end(name, troubles)
        if "controller" in self._processes:
            self._end("controller", troubles)
        if hasattr(self, "cluster") and self.cluster in Cluster.running:
            report = self.cluster.stop()
            troubles += [f"{node} out of service: {why}" for node, why in report.drained.items()]
            troubles += list(report.leftovers)
        troubles += self._end_restorers()
        if not self.options.keep:
            shutil.rmtree(self.root, ignore_errors=True)
        return troubles

    def _install_job(self) -> None:
        """Jobs run as another user, who may not be able to read where this project lies."""
        self._job = install_job(self.root / "python", self.root / "sim")
        (self.root / "out").mkdir()
        (self.root / "out").chmod(0o1777)

    def _start_cluster(self) -> None:
        options = self.options
        names = [f"n{number}" for number in range(1, options.nodes + 1)]
        gres = {
            name: [
                Gpu(minor=device.minor)
                for device in gpus.plan_devices(
                    name, options.gpus, Path("/"), scrambled=name in options.scrambled
                )
            ]
            for name in names
        }
        job_env = {
            **self._job.env,
            "PYTHONDONTWRITEBYTECODE": "1",
            "SLURM_PFI_PROGRESS": f"{self.root}/nodes/%n/progress.sock",
        }
        self.cluster = Cluster(
            ClusterOptions(
                nodes=options.nodes,
                gres=gres,
                parts=options.parts,
                conf=options.conf,
                job_env=job_env,
                slurm_user=options.slurm_user,
                accounting=options.accounting,
                parent=self.root,
                keep=options.keep,
            )
        ).start()
        (self.root / "nodes").symlink_to(self.cluster.state_dir)

    def _create_gpus(self) -> None:
        for name in self.node_names:
            gpus.create_node(
                self.sim_dir(name),
                gpus=self.options.gpus,
                device_dir=self.cluster.layout.device(name, 0).parent,
                scrambled=name in self.options.scrambled,
            )
            identity = self.root / "identity" / name
            identity.mkdir(parents=True)
            (identity / "boot_id").write_text(f"{uuid.uuid4()}\n")
            (identity / "driver_start").write_text("1\n")

    def _set_admin_limits(self) -> None:
        for node, limits in self.options.admin_limits.items():
            for position, watts in limits.items():
                self.foreign_write(node, position, watts)
        self.before = self.snapshot()

    def _write_config(self) -> None:
        account = self.controller_account
        for folder in ("controller", "controller/state", "controller/run"):
            path = self.root / folder
            path.mkdir(mode=0o755)
            if os.getuid() == 0:
                os.chown(path, account.pw_uid, account.pw_gid)
        options = self.options
        text = CONFIG.format(
            name=self.cluster.options.name,
            mode=options.mode,
            nodes=f"n[1-{options.nodes}]" if options.nodes > 1 else "n1",
            gpus=options.gpus,
            overhead_w=options.overhead_w,
            user=account.pw_name,
            root=self.root,
            slurm_conf=self.cluster.slurm_conf,
        )
        for section, values in (("policy", options.policy), ("times", {"rebound_s": 0, **options.times})):
            lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
            text += "\n".join(["", f"[{section}]", *lines, ""])
        self.config_file.write_text(text)

    def set_policy(self, name: str) -> None:
        """Change the policy in the config, and return when the controller goes by it."""
        text = self.config_file.read_text()
        self.config_file.write_text(re.sub(r'(?m)^name = ".*"$', f'name = "{name}"', text, count=1))
        self.send_signal("controller", signal.SIGHUP)
        wait_until(lambda: self.status()["policy"] == name, START_S, f"the controller goes by policy {name}")

    def start_controller(self) -> None:
        """Start it, and return when it answers."""
        self._spawn("controller", ["controller"], self._daemon_env, _run_as(self.controller_account))
        self._wait_for("controller", lambda: self.cli("status", check=False).returncode == 0)

    def start_agent(
        self, node: str, *, wait: bool = True, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the agent of a node, and return when it answers. ``environment`` replaces that of its NVML."""
        if environment is None:
            environment = gpus.nvml_environment(self.sim_dir(node))
        self._spawn(node, ["node", "run", "--node-name", node], {**self._daemon_env, **environment})
        if wait:
            self._wait_for(node, lambda: self.node_cli(node, "status", check=False).returncode == 0)

    def wait_heard(self, *nodes: str, timeout_s: float = START_S) -> None:
        """Wait until the controller shows these nodes as ok, with all their GPUs' prior limits known."""

        def heard() -> bool:
            shown = {node["name"]: node for node in self.status()["nodes"]}
            return all(shown[n]["state"] == "ok" and not shown[n]["prior_unknown"] for n in nodes)

        wait_until(heard, timeout_s, f"the controller has heard {', '.join(nodes)}")

    def _end_restorers(self) -> list[str]:
        """Restorers that agents left behind belong to this site and go with it."""
        left = processes_naming(self.root) if self.root != Path() else {}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"left running: {command}" for command in left.values() if "restorer" not in command]


def _run_as(account: pwd.struct_passwd) -> list[str]:
    """The words that make a command another user's.

    A clone and its interpreter may lie where only their owner gets (below /root, say), so the process keeps the one
    right to read everything; it writes and is known to others as that user.
    """
    if account.pw_uid == os.getuid():
        return []
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
    return ["setpriv", *user, *rights, "env"]  # env begins with that right, setpriv itself does not


def sleep_until(mono_ns: int) -> None:
    """For measurements over a stretch of time; never a wait for something to happen."""
    time.sleep(max(0.0, (mono_ns - time.monotonic_ns()) / 1e9))
