"""The agent as processes: on the stand-in library, with a controller's end of the bus in the test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_pfi.bus.local import LocalServer
from slurm_pfi.model import Plan, PlanId, PlanStep, Report, Run
from slurm_pfi.node.paths import NodePaths
from testbed import gpus
from tests.node_world import window_step

ALL = [700_000] * 4
WAIT_S = 15.0


def wait_for(what: Callable[[], Any], why: str, deadline_s: float = WAIT_S) -> Any:
    """Poll what only another process's files can tell."""
    ends_s = time.monotonic() + deadline_s
    while time.monotonic() < ends_s:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {deadline_s:g} s: {why}")


class Site:
    """A simulated node of four GPUs whose three numberings differ, its config, and the agents started on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sim = folder / "sim" / "n1"
        device_dir = folder / "dev"
        device_dir.mkdir()
        self.devices = gpus.create_node(self.sim, gpus=4, device_dir=device_dir, scrambled=True)
        for device in self.devices:
            Path(device.file).symlink_to("/dev/null")
        (folder / "gres.conf").write_text(
            "".join(f"NodeName=n1 Name=gpu File={device.file}\n" for device in self.devices)
        )
        identity = folder / "id" / "n1"
        identity.mkdir(parents=True)
        (identity / "boot_id").write_text("boot-1\n")
        (identity / "driver_start").write_text("driver-1\n")
        self.config = folder / "pfi.toml"
        self.config.write_text(
            f'cluster = "c"\n[controller]\nuser = "root"\nrun_dir = "{folder}/ctl"\n'
            f'[node]\nstate_dir = "{folder}/state"\nidentity_dir = "{folder}/id"\n'
            f'[slurm]\nconf = "{folder}/slurm.conf"\n'
        )
        self.paths = NodePaths(folder=folder / "state" / "n1")
        self.started: list[subprocess.Popen[bytes]] = []
        self.log = folder / "agent.log"

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
            "n1",
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
        ready = f"ready node=n1 pid={agent.pid}"
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
        restorer = self.restorer_pid() if self.paths.restorer_lock.exists() else None
        if restorer is not None:
            os.kill(restorer, signal.SIGKILL)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    try:
        yield made
    finally:
        made.close()


class Controller:
    """The other end of the bus: keeps the last report and answers it when told to."""

    def __init__(self, site: Site) -> None:
        self.reports: list[Report] = []
        self.faults: list[str] = []
        self.news = asyncio.Event()
        self.seq = 0
        self.server = LocalServer(
            site.folder / "ctl" / "bus.sock",
            on_report=lambda report, peer: self._take(report),
            on_fault=self.faults.append,
            node_uids=[os.geteuid()],
        )

    async def __aenter__(self) -> Controller:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def _take(self, report: Report) -> None:
        self.reports.append(report)
        self.news.set()

    async def until(self, reached: Callable[[Report], object], why: str) -> Report:
        try:
            async with asyncio.timeout(WAIT_S):
                while not (self.reports and reached(self.reports[-1])):
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            raise AssertionError(f"no report: {why}; last {self.reports[-1:]}") from None
        return self.reports[-1]

    async def plan(self, *steps: PlanStep, **changes: Any) -> Report:
        """Answer the newest report; returns the report that shows the plan held."""
        report = await self.until(lambda report: report.gpus, "GPUs listed")
        self.seq = max(self.seq, report.held.seq if report.held else 0) + 1
        plan = Plan(
            cluster="c",
            node="n1",
            id=PlanId(1, self.seq),
            answers=report.id,
            mode="enforce",
            reason="t",
            steps=steps,
        )
        self.server.send("n1", msgspec.structs.replace(plan, **changes))
        return await self.until(lambda report: report.held and report.held.seq == self.seq, "the plan held")

    async def ceilings(self, *wanted_mw: int) -> Report:
        """Wait until the GPUs, in gres.conf order, are acknowledged at these limits."""
        return await self.until(lambda report: ceilings(report) == list(wanted_mw), f"ceilings {wanted_mw}")


def priors(report: Report) -> set[int | None]:
    return {gpu.prior_mw for gpu in report.gpus}


def ceilings(report: Report) -> list[int | None]:
    return [gpu.ceiling_mw for gpu in sorted(report.gpus, key=lambda gpu: gpu.position or 0)]


def test_a_window_from_job_file_to_restore(site: Site) -> None:
    async def story() -> None:
        async with Controller(site) as controller:
            site.start()
            run = site.job(7, "1-2")
            report = await controller.until(lambda report: report.runs, "the run")
            assert set(report.runs[0].gpus) == {site.devices[1].uuid, site.devices[2].uuid}
            began_s = time.monotonic()
            await controller.plan(window_step(200_000, {run: 450_000}))
            await controller.ceilings(200_000, 450_000, 450_000, 200_000)
            assert time.monotonic() - began_s < 1.0
            assert site.limits() == [200_000, 450_000, 450_000, 200_000]
            (site.paths.jobs / "7.0").unlink()
            await controller.ceilings(*[200_000] * 4)
            await controller.plan(window_step(None))
            await controller.ceilings(*ALL)

    asyncio.run(story())
    wait_for(lambda: site.limits() == ALL, "the restore in force")
    sets = site.audit("set")
    assert len(sets) == 4 + 2 + 4
    trace = [
        line
        for line in gpus.read_trace(site.sim)
        if line.event == "limit" and line.pid not in (0, os.getpid())
    ]
    assert len(trace) == len(sets)
    for line in trace:
        told = [s for s in sets if s["uuid"] == line.uuid and s["cap_mw"] == line.effective_mw]
        assert told and min(s["mono_ns"] for s in told) < line.mono_ns, "audited before it was done"


def test_kill_9_in_the_window_leaves_it_standing_and_the_next_agent_ends_it(site: Site) -> None:
    async def story() -> None:
        async with Controller(site) as controller:
            agent = site.start()
            run = site.job(7, "0")
            await controller.until(lambda report: report.runs, "the run")
            await controller.plan(window_step(200_000, {run: 400_000}), window_step(None, {}, 3600.0))
            await controller.ceilings(400_000, 200_000, 200_000, 200_000)
            agent.kill()
            agent.wait()
            assert site.limits() == [400_000, 200_000, 200_000, 200_000]
            controller.reports.clear()
            site.start()
            report = await controller.ceilings(400_000, 200_000, 200_000, 200_000)
            assert report.held is not None and report.highest_epoch == 1
            assert all(gpu.prior_mw == 700_000 for gpu in report.gpus)
            await controller.plan(window_step(None))
            await controller.ceilings(*ALL)

    asyncio.run(story())
    assert site.audit("adopted")[-1]["reason"].startswith("4 GPUs")
    wait_for(lambda: site.limits() == ALL, "the restore in force")


def test_sigterm_in_the_window_leaves_a_restorer_that_restores_at_its_end(site: Site) -> None:
    async def story() -> None:
        async with Controller(site) as controller:
            agent = site.start()
            await controller.plan(window_step(200_000), window_step(None, {}, 4.0))
            await controller.ceilings(*[200_000] * 4)
            agent.terminate()
            assert agent.wait(10) == 0

    asyncio.run(story())
    assert site.limits() == [200_000] * 4
    assert "4 GPUs keep" in site.audit("stopped")[0]["reason"]
    pid = wait_for(site.restorer_pid, "a restorer")
    assert os.getsid(pid) == pid, "in a session of its own"
    wait_for(lambda: site.limits() == ALL, "the restore")
    wait_for(lambda: site.restorer_pid() is None, "the restorer's end")
    assert all(line["reason"].startswith("restore") for line in site.audit("set")[4:])
    assert len(site.audit("readback")) == 8


def test_a_restorer_ends_when_an_agent_is_back(site: Site) -> None:
    async def story() -> None:
        async with Controller(site) as controller:
            agent = site.start()
            await controller.plan(window_step(200_000), window_step(None, {}, 600.0))
            await controller.ceilings(*[200_000] * 4)
            agent.terminate()
            agent.wait(10)

    asyncio.run(story())
    assert wait_for(site.restorer_pid, "a restorer")
    site.start()
    assert site.restorer_pid() is None
    assert site.limits() == [200_000] * 4


def test_a_second_agent_is_refused_and_says_who_runs(site: Site) -> None:
    first = site.start()
    second = site.ask("run")
    assert second.returncode == 1
    assert f"pid {first.pid}" in second.stderr
    assert first.poll() is None


def test_release_with_the_agent_alive_then_resume(site: Site) -> None:
    async def story() -> None:
        async with Controller(site) as controller:
            site.start()
            await controller.plan(window_step(200_000))
            await controller.ceilings(*[200_000] * 4)
            done = await asyncio.to_thread(site.ask, "release")
            assert done.returncode == 0, done.stderr
            wait_for(lambda: site.limits() == ALL, "the restore in force")
            first = next(report for report in controller.reports if report.released)
            assert ceilings(first) == [200_000] * 4, "told before it was done"
            assert (await asyncio.to_thread(site.ask, "resume")).returncode == 0
            await controller.until(lambda report: not report.released, "resumed")

    asyncio.run(story())


def test_release_without_an_agent_restores_from_the_journal(site: Site) -> None:
    async def story() -> None:
        async with Controller(site) as controller:
            agent = site.start()
            await controller.plan(window_step(200_000))
            await controller.ceilings(*[200_000] * 4)
            agent.kill()
            agent.wait()

    asyncio.run(story())
    with gpus.Node(site.sim) as node:
        node.poke("requested_mw", 333_000, gpu=site.devices[3].uuid)
    assert site.ask("status").returncode == 3
    done = site.ask("release")
    assert done.returncode == 0, done.stderr
    assert "somebody else" in done.stdout
    wait_for(lambda: site.limits() == [700_000, 700_000, 700_000, 333_000], "the restore")
    assert site.audit("conflict")[-1]["found_mw"] == 333_000
    assert site.ask("release").returncode == 0, "nothing is left to do, which is no failure"


def test_while_the_journal_cannot_be_written_the_gpus_rest_and_follow_their_owner(site: Site) -> None:
    async def story() -> None:
        async with Controller(site) as controller:
            site.start()
            await controller.until(lambda report: priors(report) == set(ALL), "prior limits recorded")
            site.paths.journal.chmod(0o777)
            await controller.plan(window_step(200_000))
            await controller.until(lambda report: any("journal" in fault for fault in report.faults), "said")
            with gpus.Node(site.sim) as node:
                node.poke("requested_mw", 650_000, gpu=site.devices[3].uuid)
            await controller.until(lambda report: 650_000 in priors(report), "the owner's limit seen")
            assert site.audit("readback") == [], "nothing was set"
            site.paths.journal.chmod(0o700)
            await controller.ceilings(*[200_000] * 4)
            await controller.plan(window_step(None))
            await controller.ceilings(*ALL[:3], 650_000)

    asyncio.run(story())
    assert all("not tried" in said["error"] for said in site.audit("set_failed"))
    assert site.audit("conflict") == []


def test_garbage_on_the_progress_socket_and_in_the_job_folder_is_dropped(site: Site) -> None:
    agent = site.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for data in (b"", b"\0" * 256, b"x" * 4096, b"pfi-progress 1 nan tokens", b"pfi-progress 1 5 tokens"):
            sender.sendto(data, str(site.paths.progress))
    (site.paths.jobs / "1.0").write_bytes(os.urandom(300))
    (site.paths.jobs / "2.0").write_bytes(b"x" * 5000)
    (site.paths.jobs / "3.0").symlink_to("/etc/hostname")
    (site.paths.jobs / "4.0").mkdir()
    os.mkfifo(site.paths.jobs / "5.0")
    (site.paths.jobs / "notes").write_text("hello")
    site.job(6, "9")
    (site.paths.jobs / "7.0").write_text("pfi-job 1\njob_id 8\nrestart 0\nuid 1\ngpus 0\nflex -\n")
    site.job(9, "0")
    (site.paths.jobs / "9.0").chmod(0o666)

    def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(site.ask("status", "--json").stdout)
        return found

    found = wait_for(
        lambda: (s := status()) and len(s["job_files_ignored"]) == 8 and s, "all files looked at"
    )
    assert [run["run"]["job_id"] for run in found["runs"]] == [6]
    assert found["runs"][0]["gpus"] == [] and any("position 9" in fault for fault in found["faults"])
    assert found["progress_dropped"] == {"not a progress datagram": 4, "sender is in no job of this node": 1}
    assert agent.poll() is None
    log = site.log.read_text()
    assert log.count("job file ignored name=1.0") == 1, "one line for each file"


def test_without_a_library_the_agent_is_ready_and_says_what_is_missing(site: Site) -> None:
    agent = site.start(LD_LIBRARY_PATH="/nonexistent")
    wait_for(lambda: "libnvidia-ml" in site.log.read_text(), "the fault said")
    assert agent.poll() is None
    agent.terminate()
    assert agent.wait(10) == 0


def test_without_permission_the_fault_is_said_and_nothing_storms(site: Site) -> None:
    async def story() -> None:
        async with Controller(site) as controller:
            site.start(PFI_STANDIN_EUID="1000")
            await controller.plan(window_step(200_000))
            report = await controller.until(
                lambda report: all(gpu.fault for gpu in report.gpus), "the faults"
            )
            assert ceilings(report) == ALL

    asyncio.run(story())
    assert len(site.audit("set_failed")) == 4
    assert site.limits() == ALL


def test_systemd_is_told(site: Site, tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(address))
        listener.settimeout(15)
        site.start(NOTIFY_SOCKET=str(address), WATCHDOG_USEC="400000")
        told = [listener.recv(200) for _ in range(3)]
    assert any(b"READY=1" in word for word in told) and any(word == b"WATCHDOG=1" for word in told)


@pytest.mark.parametrize(
    ("words", "code"), [(["bogus"], 2), (["status"], 3), (["resume"], 3), (["release"], 3), (["run"], 2)]
)
def test_exit_codes(site: Site, words: list[str], code: int) -> None:
    if words == ["run"]:
        site.config.write_text("cluster = 3\n")
    done = site.ask(*words)
    assert done.returncode == code
    assert done.stderr.strip()
