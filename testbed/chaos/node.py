"""One simulated node under fire: its files, its agent, and the means to kill what runs on it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, TypeAlias

from slurm_pfi.bus.asking import Reply, ask
from slurm_pfi.bus.unix import SocketError
from testbed import gpus
from testbed.lone_node import LoneNode

from .judge import Violation, judge_journal, judge_rest
from .record import Job, Kill, Record

PATIENCE_S: Final = 60.0
"""For what must happen in the end on however loaded a machine; nothing is judged by it but that it happens."""
FOREVER_NS: Final = 2**62
_POLL_S: Final = 0.004
_SET_S: Final = 0.015
"""What a set takes: 10 to 20 ms are reported of hardware, and a kill must be able to hit one."""
Persistence: TypeAlias = Literal["on", "held", "off"]
"""Persistence mode: on; off, with another program that holds the GPUs; off, with none."""


class ChaosError(Exception):
    """The rig itself could not go on; the message says where and why."""


class AgentEndedError(ChaosError):
    """The agent ended though nobody killed it. systemd would start it again, and so does the rig, but it is counted."""


async def wait_until(condition: object, what: str, patience_s: float = PATIENCE_S) -> None:
    """Ask until true, letting the rest of the rig run. Raises ChaosError naming ``what``."""
    assert callable(condition)
    ends_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > ends_s:
            raise ChaosError(f"waited {patience_s:g} s in vain: {what}")
        await asyncio.sleep(_POLL_S)


class ChaosNode:
    """Four GPUs whose three numberings differ; the prior limits of some are not their defaults."""

    def __init__(
        self, folder: Path, name: str, priors_mw: Iterable[int], persistence: Persistence = "on"
    ) -> None:
        """Its files lie in ``folder`` / ``name``."""
        wanted = tuple(priors_mw)
        (folder / name).mkdir(parents=True)
        self.lone = LoneNode(folder / name, name=name, n_gpus=len(wanted))
        self.name, self.log, self.folder = name, self.lone.log, self.lone.paths.folder
        self.devices, sim = self.lone.devices, self.lone.sim
        with self.lone.config.open("a") as config:
            config.write(
                f'[[node_set]]\nnames = "{name}"\ngpus = {len(wanted)}\ngpu_max_w = 700\noverhead_w = 500\n'
            )
        self.gpus = gpus.Node(sim)
        self._holder = _hold(sim) if persistence == "held" else None
        if persistence != "on":
            self.gpus.poke("persistence", 0)
        priors = {device.uuid: mw for device, mw in zip(self.devices, wanted, strict=True)}
        for uuid, prior_mw in priors.items():
            self.gpus.poke("requested_mw", prior_mw, gpu=uuid)
        while any(state.effective_mw != priors[state.uuid] for state in self.gpus.snapshot()):
            time.sleep(_POLL_S)
        self.gpus.fault("nvmlDeviceSetPowerManagementLimit", gpus.FaultKind.DELAY, delay_s=_SET_S)
        self.record = Record(
            node=name,
            sim=sim,
            folder=self.folder,
            priors=priors,
            effect_ns=gpus.GpuModel().effect_us * 1000,
            falls=persistence == "off",
        )
        self.violations: list[Violation] = []
        self.agent: subprocess.Popen[bytes] | None = None
        self.ended_by_itself = 0
        self._next_job = 1

    # ------------------------------------------------------------------------------------------- processes

    def start(self, word: str = "run", *, wrapper: Iterable[str] = ()) -> None:
        """Start the agent, as systemd does when it has ended; or another command that acts on the GPUs.

        ``wrapper`` is put before its command line (strace).
        """
        assert self.agent is None
        self.record.spawns_ns.append(time.monotonic_ns())
        with self.log.open("ab") as log:
            self.agent = subprocess.Popen(
                [*wrapper, *self._command(word)],
                env=self.lone.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _command(self, word: str) -> list[str]:
        if word != "restorer":
            return self.lone.command(word)
        words = ["--at-mono-ns", str(time.monotonic_ns()), "--node-name", self.name]
        words += ["--state-dir", str(self.folder.parent), "--identity-dir", str(self.lone.folder / "id")]
        return [sys.executable, "-m", "slurm_pfi.node.restorer", *words]

    def kill_child(self) -> bool:
        """SIGKILL to the agent's NVML process; False when there is none now."""
        children = _children(self.agent.pid) if self.agent is not None else []
        return bool(children) and self._kill(children[0], "child")

    def kill_agent(self, what: str = "agent") -> bool:
        """SIGKILL to the agent. ``collect`` it afterwards."""
        return self.agent is not None and self._kill(self.agent.pid, what)

    def control(self, word: str) -> Reply | None:
        """The admin's word to a living agent, and its answer; None when it dies over it. Blocks."""
        if word == "release":
            self.record.releases_ns.append((time.monotonic_ns(), FOREVER_NS))
        try:
            reply = ask(self.folder / "control.sock", word, timeout_s=PATIENCE_S)
        except (SocketError, OSError):
            return None
        if word == "resume" and reply.ok:
            self.resumed()
        return reply

    def resumed(self) -> None:
        """The last release is over, or never came about."""
        begin_ns, end_ns = self.record.releases_ns[-1]
        self.record.releases_ns[-1] = (begin_ns, min(end_ns, time.monotonic_ns()))

    def terminate(self) -> None:
        """SIGTERM to the agent: it may leave a restorer behind."""
        if self.agent is not None and self.agent.poll() is None:
            self.agent.terminate()

    async def collect(self) -> None:
        """Wait for the agent's end and, as systemd would, for that of every process it left in its group."""
        agent = self.agent
        if agent is None:
            return
        await wait_until(lambda: agent.poll() is not None, f"{self.name}: the agent's end")
        await wait_until(lambda: not self._nvml_pids(agent.pid), f"{self.name}: the end of its NVML process")
        self.agent = None

    def restorer_pid(self) -> int | None:
        """The restorer that lives, by its own lock."""
        try:
            text = (self.folder / "restorer.lock").read_text().strip()
            line = Path(f"/proc/{int(text)}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return int(text) if b"slurm_pfi.node.restorer" in line and self.name.encode() in line else None

    def kill_restorer(self) -> bool:
        """SIGKILL to the restorer or, one time in three, its NVML process first."""
        pid = self.restorer_pid()
        return pid is not None and self._kill(pid, "restorer")

    def kill_restorers_child(self) -> bool:
        pid = self.restorer_pid()
        children = _children(pid) if pid is not None else []
        return bool(children) and self._kill(children[0], "restorer's child")

    def kill_other(self, process: subprocess.Popen[bytes], what: str) -> bool:
        """SIGKILL to a command of ours."""
        return process.poll() is None and self._kill(process.pid, what)

    def _kill(self, pid: int, what: str) -> bool:
        kill = Kill(time.monotonic_ns(), what, self.last_audited())
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.record.kills.append(kill)
        return True

    def _nvml_pids(self, agent_pid: int) -> list[int]:
        """NVML processes of an agent that is gone: they die with it, but not in the same instant."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"slurm_pfi.gpu.child" in words and str(agent_pid).encode() in words:
                    found.append(int(entry.name))
        return found

    # ------------------------------------------------------------------------------------------------- jobs

    def begin_job(self, positions: Iterable[int]) -> Job:
        """As the prolog does: written beside, then renamed."""
        places = sorted(positions)
        uuid_at = {device.position: device.uuid for device in self.devices}
        job = Job(self._next_job, tuple(uuid_at[place] for place in places), time.monotonic_ns())
        self._next_job += 1
        self.record.jobs.append(job)
        self.lone.job(job.job_id, ",".join(map(str, places)))
        return job

    def end_job(self, job: Job) -> None:
        (self.folder / "jobs" / f"{job.job_id}.0").unlink()
        job.end_ns = time.monotonic_ns()

    @property
    def jobs(self) -> list[Job]:
        """Those whose job file is there."""
        return [job for job in self.record.jobs if job.end_ns is None]

    # ---------------------------------------------------------------------------------------------- looking

    def last_audited(self) -> str:
        """The last event of the audit log: what a kill came after."""
        try:
            with (self.folder / "audit.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().split(b"\n")
            return str(json.loads(lines[-2])["event"])
        except (OSError, ValueError, IndexError, KeyError):
            return ""

    def look_at_the_dead(self) -> None:
        """With no process of ours alive: is every limit of ours written down?"""
        if self.restorer_pid() is not None:
            return
        requested = {state.uuid: state.requested_mw for state in self.gpus.snapshot()}
        self.violations += judge_journal(self.record, requested, time.monotonic_ns())

    async def rest(self, patience_s: float = PATIENCE_S) -> bool:
        """Wait until nothing of ours is left; what is left after that time is a violation."""

        def look() -> list[Violation]:
            return judge_rest(self.record, self.gpus.snapshot(), time.monotonic_ns())

        try:
            await wait_until(lambda: not look(), f"{self.name}: rest", patience_s)
        except ChaosError:
            self.violations += look()
            return False
        return True

    def doctor(self) -> str:
        """What ``slurm-pfi doctor`` says on this node."""
        words = ["--config", str(self.lone.config), "doctor", "--node-name", self.name]
        done = subprocess.run(
            [sys.executable, "-m", "slurm_pfi", *words],
            env=self.lone.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.stdout + done.stderr

    async def close(self) -> None:
        """End whatever still runs."""
        if self.agent is not None:
            self.agent.kill()
            await self.collect()
        pid = self.restorer_pid()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        if self._holder is not None:
            self._holder.communicate()
        self.gpus.close()


def _hold(sim: Path) -> subprocess.Popen[bytes]:
    """Another program that has the GPUs open, until its input is closed."""
    script = "import pynvml, sys; pynvml.nvmlInit(); sys.stdout.write('held'); sys.stdout.flush(); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, **gpus.nvml_environment(sim)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.read(4) == b"held"
    return holder


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
