"""One simulated node with the real agent on it and no Slurm: files, processes, and a commander at the bus.

For what concerns the agent alone: tests, chaos, its cost. The commander is a controller's end of the real bus and says
what it is told to.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from slurm_pfi.bus.local import LocalServer
from slurm_pfi.model import Plan, PlanId, PlanStep, Report, Run
from slurm_pfi.node.paths import NodePaths

from . import gpus

WAIT_S: Final = 15.0
_ANSWERED_S: Final = 4.0
"""Within this a report says that a plan is held; else it was lost, as on any bus, and another one is sent."""


def wait_for(what: Callable[[], Any], why: str, deadline_s: float = WAIT_S) -> Any:
    """Poll what only another process's files can tell."""
    ends_s = time.monotonic() + deadline_s
    while time.monotonic() < ends_s:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {deadline_s:g} s: {why}")


class LoneNode:
    """A simulated node of GPUs whose three numberings differ, its config, and the agents started on it.

    ``name`` is the node's; several may share a folder. ``close`` ends every process.
    """

    def __init__(self, folder: Path, *, name: str = "n1", n_gpus: int = 4) -> None:
        self.name = name
        self.folder = folder
        self.sim = folder / "sim" / name
        device_dir = folder / "dev" / name
        device_dir.mkdir(parents=True)
        self.devices = gpus.create_node(self.sim, gpus=n_gpus, device_dir=device_dir, scrambled=True)
        for device in self.devices:
            Path(device.file).symlink_to("/dev/null")
        with (folder / "gres.conf").open("a") as gres:
            gres.writelines(f"NodeName={name} Name=gpu File={device.file}\n" for device in self.devices)
        identity = folder / "id" / name
        identity.mkdir(parents=True)
        (identity / "boot_id").write_text("boot-1\n")
        (identity / "driver_start").write_text("driver-1\n")
        self.config = folder / "pfi.toml"
        self.config.write_text(
            f'cluster = "c"\n[controller]\nuser = "root"\nrun_dir = "{folder}/ctl"\n'
            f'[node]\nstate_dir = "{folder}/state"\nidentity_dir = "{folder}/id"\n'
            f'[slurm]\nconf = "{folder}/slurm.conf"\n'
        )
        self.paths = NodePaths(folder=folder / "state" / name)
        self.started: list[subprocess.Popen[bytes]] = []
        self.log = folder / f"{name}.log"

    def environment(self) -> dict[str, str]:
        return {**os.environ, **gpus.nvml_environment(self.sim)}

    def command(self, *words: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "slurm_pfi",
            "node",
            *words,
            "--config",
            str(self.config),
            "--node-name",
            self.name,
        ]

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            agent = subprocess.Popen(
                self.command("run"),
                env={**self.environment(), **environment},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        self.started.append(agent)
        ready = f"ready node={self.name} pid={agent.pid}"
        wait_for(lambda: ready in self.log.read_text() or agent.poll() is not None, "the agent's start")
        assert agent.poll() is None, self.log.read_text()
        return agent

    def ask(self, word: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(word, *more),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def limits(self) -> list[int]:
        """Effective limits in gres.conf order."""
        by_uuid = {state.uuid: state.effective_mw for state in gpus.snapshot(self.sim)}
        return [by_uuid[device.uuid] for device in self.devices]

    def audit(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.paths.audit.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def job(self, job_id: int, positions: str, *, restart: int = 0) -> Run:
        """As the prolog does: written beside, then renamed."""
        text = f"pfi-job 1\njob_id {job_id}\nrestart {restart}\nuid 1000\ngpus {positions}\nflex -\n"
        made = self.paths.jobs / f".{job_id}.tmp"
        made.write_text(text)
        made.rename(self.paths.jobs / f"{job_id}.{restart}")
        return Run("c", job_id, restart)

    def restorer_pid(self) -> int | None:
        """The restorer that lives, by its own lock."""
        found = self.paths.restorer_lock.read_text().strip()
        if not found or not Path(f"/proc/{found}").exists():
            return None
        return (
            int(found) if b"slurm_pfi.node.restorer" in Path(f"/proc/{found}/cmdline").read_bytes() else None
        )

    def close(self) -> None:
        for agent in self.started:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        for pid in self._restorers():
            os.kill(pid, signal.SIGKILL)

    def _restorers(self) -> list[int]:
        """Restorers of this node, also one that has not taken its lock yet."""
        found = []
        for process in Path("/proc").iterdir():
            try:
                words = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
            except OSError:
                continue  # it has ended
            if b"slurm_pfi.node.restorer" in words and os.fsencode(self.folder) in words:
                found.append(int(process.name))
        return found


class Commander:
    """The other end of the bus: keeps the node's reports and answers the newest when told to."""

    def __init__(self, site: LoneNode) -> None:
        self.site = site
        self.reports: list[Report] = []
        self.faults: list[str] = []
        self.news = asyncio.Event()
        self.seq = 0
        self.server = LocalServer(
            site.folder / "ctl" / "bus.sock",
            on_report=lambda report, _peer: self._take(report),
            on_fault=self.faults.append,
            node_uids=[os.geteuid()],
        )

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def _take(self, report: Report) -> None:
        self.reports.append(report)
        self.news.set()

    async def until(
        self, reached: Callable[[Report], object], why: str, deadline_s: float = WAIT_S
    ) -> Report:
        """The newest report once it is so."""
        try:
            async with asyncio.timeout(deadline_s):
                while not (self.reports and reached(self.reports[-1])):
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            raise AssertionError(f"no report: {why}; last {self.reports[-1:]}") from None
        return self.reports[-1]

    async def plan(self, *steps: PlanStep, **changes: Any) -> Report:
        """Answer the newest report, again while nothing comes of it; returns the report that shows the plan held."""
        ends_s = time.monotonic() + WAIT_S
        while True:
            report = await self.until(lambda report: report.gpus, "GPUs listed")
            self.seq = max(self.seq, report.held.seq if report.held else 0) + 1
            plan = Plan(
                cluster="c",
                node=self.site.name,
                id=PlanId(1, self.seq),
                answers=report.id,
                mode="enforce",
                reason="t",
                steps=steps,
            )
            self.server.send(self.site.name, msgspec.structs.replace(plan, **changes))
            try:
                return await self.until(
                    lambda report: report.held and report.held.seq == self.seq, "the plan held", _ANSWERED_S
                )
            except AssertionError:
                if time.monotonic() > ends_s:
                    raise AssertionError(
                        f"refused: {[r.refused for r in self.reports if r.refused]}"
                    ) from None

    async def ceilings(self, *wanted_mw: int) -> Report:
        """Wait until the GPUs, in gres.conf order, are acknowledged at these limits."""
        return await self.until(lambda report: ceilings(report) == list(wanted_mw), f"ceilings {wanted_mw}")


def priors(report: Report) -> set[int | None]:
    return {gpu.prior_mw for gpu in report.gpus}


def ceilings(report: Report) -> list[int | None]:
    return [gpu.ceiling_mw for gpu in sorted(report.gpus, key=lambda gpu: gpu.position or 0)]
