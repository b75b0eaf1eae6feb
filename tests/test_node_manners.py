"""The agent as a daemon: what it tells systemd, and how it stops.

Real processes on the stand-in library, and a real notify socket.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from slurm_pfi.gpu.identity import HostIdentity
from slurm_pfi.gpu.journal import Journal, JournalEntry
from slurm_pfi.gpu.memory import MemoryGpu, MemoryGpuDevices
from slurm_pfi.node import health, runtime
from slurm_pfi.node.hardware import Hardware
from slurm_pfi.node.log import Log
from slurm_pfi.node.messages import Connected, JobFilesRead
from slurm_pfi.node.paths import NodePaths
from slurm_pfi.node.runtime import Runtime, wait_until
from testbed import gpus
from testbed.gpus import FaultKind
from testbed.lone_node import Commander, LoneNode, wait_for
from tests.lone_site import site
from tests.node_world import settings, window_step

__all__ = ["site"]


SET: Final = "nvmlDeviceSetPowerManagementLimit"


class Systemd:
    """The end of the notify socket that systemd has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.told: list[tuple[float, list[str]]] = []

    def until(self, line: str, deadline_s: float = 15.0) -> list[str]:
        """The first message that has a line beginning so, among those that come from now on."""
        ends_s = time.monotonic() + deadline_s
        while (left_s := ends_s - time.monotonic()) > 0:
            self.socket.settimeout(left_s)
            try:
                lines = self.socket.recv(4096).decode().split("\n")
            except TimeoutError:
                break
            self.told.append((time.monotonic(), lines))
            if any(word.startswith(line) for word in lines):
                return lines
        raise AssertionError(f"systemd was not told {line} within {deadline_s:g} s: {self.told}")

    def drain(self) -> list[list[str]]:
        """What has come and was not read yet."""
        self.socket.setblocking(False)
        found = []
        try:
            while True:
                found.append(self.socket.recv(4096).decode().split("\n"))
        except BlockingIOError:
            return found


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(tmp_path / "notify")
    with made.socket:
        yield made


# ------------------------------------------------------------------------------------------------ notifications


def test_ready_comes_though_the_library_hangs_in_its_init(site: LoneNode, systemd: Systemd) -> None:
    with gpus.planted(site.sim) as node:
        node.fault("nvmlInit_v2", FaultKind.DELAY, delay_s=60.0)
        began_s = time.monotonic()
        agent = site.start(NOTIFY_SOCKET=str(systemd.path))
        ready = systemd.until("READY=1")
        assert time.monotonic() - began_s < 15.0
        assert ready[1] == "STATUS=no plan held, GPUs not listed yet, controller not reached"
        agent.terminate()
        assert agent.wait(10) == 0


def test_status_follows_the_state_and_stopping_is_said_at_once(site: LoneNode, systemd: Systemd) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start(NOTIFY_SOCKET=str(systemd.path))
            await controller.plan(window_step(200_000), window_step(None, {}, 600.0))
            await controller.ceilings(*[200_000] * 8)
            await asyncio.to_thread(systemd.until, "STATUS=window open, 8 of 8 GPUs capped")
            with gpus.Node(site.sim) as node:
                node.poke("hidden", 1, gpu=site.devices[0].uuid)
            await asyncio.to_thread(systemd.until, "STATUS=window open, 7 of 8 GPUs follow the plan, ")
            agent.terminate()
            stopping = await asyncio.to_thread(systemd.until, "STOPPING=1")
            assert stopping[1:] == ["EXTEND_TIMEOUT_USEC=10000000", "STATUS=stopping"]
            assert agent.wait(10) == 0

    asyncio.run(story())
    said = systemd.told[-2][1]
    assert said[0].endswith("fault") or said[0].endswith("faults"), said


def test_a_reload_is_announced_and_ends(site: LoneNode, systemd: Systemd) -> None:
    agent = site.start(NOTIFY_SOCKET=str(systemd.path))
    systemd.until("READY=1")
    before_us = time.monotonic_ns() // 1000
    agent.send_signal(signal.SIGHUP)
    begins = systemd.until("RELOADING=1")
    name, _, at_us = begins[1].partition("=")
    assert name == "MONOTONIC_USEC"
    assert before_us <= int(at_us) <= time.monotonic_ns() // 1000
    assert systemd.until("READY=1")[1].startswith("STATUS=")


def test_the_watchdog_is_petted_by_a_live_agent(site: LoneNode, systemd: Systemd) -> None:
    site.start(NOTIFY_SOCKET=str(systemd.path), WATCHDOG_USEC="400000")
    for _ in range(3):
        systemd.until("WATCHDOG=1")


def test_the_watchdog_of_another_process_is_not_ours(site: LoneNode, systemd: Systemd) -> None:
    agent = site.start(NOTIFY_SOCKET=str(systemd.path), WATCHDOG_USEC="20000", WATCHDOG_PID="1")
    systemd.until("READY=1")
    agent.terminate()
    systemd.until("STOPPING=1")
    assert not any("WATCHDOG=1" in lines for _, lines in systemd.told)


class _SilentGpus(MemoryGpuDevices):
    """The question for the list is never answered, as no device layer with deadlines should do."""

    async def list_devices(self) -> Any:
        await asyncio.Event().wait()


def _runtime(folder: Path, log: Log, devices: MemoryGpuDevices | None = None) -> Runtime:
    paths = NodePaths(folder=folder / "n1")
    paths.prepare()
    hardware = Hardware(
        devices=devices or MemoryGpuDevices([MemoryGpu(uuid="GPU-0", minor=0, index=0)]),
        journal_folder=paths.journal,
        identity=lambda: HostIdentity(boot_id="boot-1", driver_start="d1"),
        gres_files=dict,
    )
    return Runtime(settings(), paths=paths, hardware=hardware, log=log, leave_restorer=lambda at_ns: None)


def test_sockets_that_could_not_be_had_at_start_are_opened_later(site: LoneNode) -> None:
    """Else a disk that was full at start takes the red button away for as long as the agent lives."""
    text = site.config.read_text().replace("[slurm]", 'metrics = "unix"\n[slurm]')
    site.config.write_text(f"{text}[times]\nrescan_s = 1\n")
    site.paths.folder.mkdir(parents=True)
    places = (site.paths.control, site.paths.progress, site.paths.metrics)
    for place in places:
        place.write_text("in the way")
    site.start()
    wait_for(lambda: site.log.read_text().count("is not a socket") >= 3, "each said")
    assert site.ask("status").returncode == 3
    for place in places:
        place.unlink()
    wait_for(lambda: all(place.is_socket() for place in places), "opened")
    done = site.ask("status", "--json")
    assert done.returncode == 0, done.stderr
    assert not any("socket" in fault for fault in json.loads(done.stdout)["faults"])


class _Deaf:
    """A controller that is there and reads nothing."""

    connected = True

    def __init__(self) -> None:
        self.sent = 0

    def send(self, report: object) -> bool:
        self.sent += 1
        return False


def test_a_controller_that_does_not_read_costs_one_try_at_a_time(tmp_path: Path) -> None:
    """Each report that could not be sent had a try of its own after 50 ms, which failed and had one of its own."""
    deaf = _Deaf()

    async def story() -> None:
        core = _runtime(tmp_path, Log(prefixed=False))
        core.client = deaf  # type: ignore[assignment]
        core.feed(JobFilesRead(files=()))
        core.feed(Connected(up=True))
        await wait_until(core, lambda state: state.listed, 5.0)
        for _ in range(20):  # each is a report of its own: they are 10 ms apart at least
            core.feed(Connected(up=True))
            await asyncio.sleep(0.012)
        deaf.sent = 0
        began_s = time.monotonic()
        await asyncio.sleep(0.5)
        most = (time.monotonic() - began_s) / 0.05 + 5
        assert 0 < deaf.sent <= most
        await core.close()

    asyncio.run(story())


async def _petted(systemd: Systemd, core: Runtime, log: Log) -> bool:
    """Whether one round of petting tells systemd anything."""
    systemd.drain()
    petting = asyncio.create_task(health.pet_watchdog(core.stalled, 60.0, log))
    await asyncio.sleep(0)
    petting.cancel()
    await asyncio.gather(petting, return_exceptions=True)
    return ["WATCHDOG=1"] in systemd.drain()


@pytest.mark.parametrize("trouble", ["none", "no answer", "every step fails", "deadline missed"])
def test_a_core_that_hangs_is_not_petted(
    trouble: str,
    tmp_path: Path,
    systemd: Systemd,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(systemd.path))
    log = Log(prefixed=False)

    async def story() -> None:
        core = _runtime(tmp_path, log, _SilentGpus([]) if trouble == "no answer" else None)
        core.feed(Connected(up=False))
        await asyncio.sleep(0)
        assert await _petted(systemd, core, log), "alive at first, whatever comes"
        if trouble == "no answer":
            monkeypatch.setattr(runtime, "_UNANSWERED_S", 0.0)
        if trouble == "every step fails":
            monkeypatch.setattr(runtime, "_FAILING_S", 0.0)
            monkeypatch.setattr(runtime, "step", lambda *_: 1 / 0)
            core.feed(Connected(up=False))
            core.feed(Connected(up=False))
        if trouble == "deadline missed":
            monkeypatch.setattr(runtime, "_LATE_S", -3600.0)
        assert await _petted(systemd, core, log) == (trouble == "none")
        await core.close()

    asyncio.run(story())
    assert ("no sign of life to systemd's watchdog" in capsys.readouterr().err) == (trouble != "none")


# ----------------------------------------------------------------------------------------------- stopping (F1)


def _written(site: LoneNode) -> set[str]:
    """GPUs whose limit some agent really changed, by the stand-in's own trace."""
    return {
        line.uuid
        for line in gpus.read_trace(site.sim)
        if line.event == "limit" and line.pid not in (0, os.getpid())
    }


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "second SIGTERM"])
def test_f1_a_stop_after_three_of_eight_gpus_leaves_an_exact_record(site: LoneNode, how: str) -> None:
    slow = [device.uuid for device in sorted(site.devices, key=lambda device: device.index)[3:]]

    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.until(lambda report: len(report.gpus) == 8, "GPUs listed")
            with gpus.planted(site.sim) as node:
                for uuid in slow:
                    node.fault(SET, FaultKind.DELAY, gpu=uuid, delay_s=30.0)
                await controller.plan(window_step(200_000), window_step(None, {}, 600.0))
                await asyncio.to_thread(wait_for, lambda: len(_written(site)) == 3, "three are written")
                began_s = time.monotonic()
                agent.send_signal(signal.SIGINT if how == "SIGINT" else signal.SIGTERM)
                if how == "second SIGTERM":
                    agent.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(agent.wait, 15) == 0
                assert time.monotonic() - began_s < 10.0
                assert len(_written(site)) == 3, "nothing is done behind the back of an agent that ended"

    asyncio.run(story())
    (stopped,) = site.audit("stopped")
    sure = {line["uuid"] for line in site.audit("readback")}
    asked = {line["uuid"] for line in site.audit("set")}
    failed = {line["uuid"] for line in site.audit("set_failed")}
    assert asked - failed - set(stopped["unanswered"]) == _written(site), "each is told as what it is"
    assert sure <= _written(site)
    journal = Journal(site.paths.journal, "boot-1", "driver-1").read_all()
    for uuid in asked:
        entry = journal[uuid]
        assert isinstance(entry, JournalEntry), "written down before it was asked for"
        assert entry.prior_mw == 700_000
    assert "restored in" in stopped["reason"]
    wait_for(site.restorer_pid, "a restorer")

    async def after() -> None:
        async with Commander(site) as controller:
            site.start()
            controller.seq = 1
            await controller.ceilings(*[200_000] * 8)
            await controller.plan(window_step(None))
            await controller.ceilings(*[700_000] * 8)

    asyncio.run(after())


def test_f1_a_read_that_blocks_does_not_hold_up_the_stop(site: LoneNode) -> None:
    """gres.conf on a file system that does not answer: here a FIFO that nobody writes."""
    path = site.folder / "gres.conf"
    path.unlink()
    os.mkfifo(path)
    agent = site.start()
    writer = wait_for(lambda: _writer(path), "the agent reads")  # it gets neither text nor an end
    try:
        agent.terminate()
        assert agent.wait(10) == 0
    finally:
        os.close(writer)
    assert "limits of ours, if any, stay until an agent is back" in site.audit("stopped")[0]["reason"]


def _writer(fifo: Path) -> int | None:
    """A descriptor to write with, as soon as somebody waits to read."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def test_an_agent_stopped_before_it_knows_its_gpus_leaves_a_restorer_again(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.plan(window_step(200_000), window_step(None, {}, 8.0))
            await controller.ceilings(*[200_000] * 8)
            agent.kill()
            agent.wait()

    asyncio.run(story())
    with gpus.planted(site.sim) as node:
        node.fault("nvmlInit_v2", FaultKind.DELAY, delay_s=3.0, count=1)
        agent = site.start()
        agent.terminate()
        assert agent.wait(10) == 0
    assert "limits of ours, if any, stay; they are restored in" in site.audit("stopped")[-1]["reason"]
    wait_for(lambda: site.limits() == [700_000] * 8, "the restore", 30.0)
