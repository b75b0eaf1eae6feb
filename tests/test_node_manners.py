"""The agent as a daemon: what it tells systemd, how it stops, what it leaves behind, what its unit allows it.

Real processes on the stand-in library, a real notify socket, a real ``systemd-analyze``. Where a test runs without
systemd a recording ``systemd-run`` stands in for its client.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from slurm_pfi.config import Config, NodeSection
from slurm_pfi.gpu.identity import HostIdentity
from slurm_pfi.gpu.journal import Journal, JournalEntry
from slurm_pfi.gpu.memory import MemoryGpu, MemoryGpuDevices
from slurm_pfi.node import health, restorer, runtime
from slurm_pfi.node.agent import STOP_S
from slurm_pfi.node.hardware import Hardware
from slurm_pfi.node.lock import Lock
from slurm_pfi.node.log import Log
from slurm_pfi.node.messages import Connected, JobFilesRead
from slurm_pfi.node.paths import NodePaths
from slurm_pfi.node.runtime import Runtime, wait_until
from testbed import gpus
from testbed.gpus import FaultKind
from testbed.lone_node import Commander, LoneNode, wait_for
from tests.node_world import settings, window_step

REPO: Final = Path(__file__).parent.parent
SET: Final = "nvmlDeviceSetPowerManagementLimit"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LoneNode]:
    made = LoneNode(tmp_path, n_gpus=8)
    try:
        yield made
    finally:
        made.close()


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


# ------------------------------------------------------------------------------------------ the timer of systemd

_RECORDER: Final = """#!/bin/sh
printf '%s\\n' "$0" "$@" > "{folder}/$(basename "$0").args"
case "$0" in *systemd-run) ;; *) exit 0 ;; esac
if [ -e "{folder}/refuse" ]; then echo "Failed to connect to bus" >&2; exit 1; fi
while [ "$1" != -- ]; do
  case "$1" in --on-active=*) pause=${{1#--on-active=}} ;; --setenv=*) export "${{1#--setenv=}}" ;; esac
  shift
done
shift
(sleep "$pause"; exec "$@") > /dev/null 2> "{folder}/restorer.err" < /dev/null &
"""


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recording stand-ins for systemd's clients in PATH; the first really starts its command at its time."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("systemd-run", "systemctl"):
        (folder / name).write_text(_RECORDER.format(folder=folder))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(restorer, "_SYSTEMD", tmp_path)
    return folder


def _config(site: LoneNode) -> Config:
    node = NodeSection(state_dir=str(site.folder / "state"), identity_dir=str(site.folder / "id"))
    return Config(cluster="c", node=node)


def _capped(site: LoneNode) -> None:
    """All GPUs capped, and an agent that was killed."""

    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.plan(window_step(200_000))
            await controller.ceilings(*[200_000] * 8)
            agent.kill()
            agent.wait()

    asyncio.run(story())


def test_the_timer_has_this_command_line_and_its_command_restores(
    site: LoneNode, recorder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _capped(site)
    site.paths.plan.unlink()
    site.config.write_text("cluster = [broken since\n")
    environment = gpus.nvml_environment(site.sim)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    at_ns = time.monotonic_ns() + 2_000_000_000
    restorer.leave(_config(site), "n1", site.paths, at_ns, Log(prefixed=False))
    words = (recorder / "systemd-run.args").read_text().splitlines()[1:]
    middle = words.index("--")
    ours, command = words[:middle], words[middle + 1 :]
    (in_s,) = [float(word.partition("=")[2]) for word in ours if word.startswith("--on-active=")]
    assert 1.0 < in_s <= 2.0
    assert [word for word in ours if not word.startswith("--on-active=")] == [
        "--quiet",
        "--collect",
        "--unit=slurm-pfi-restorer-n1",
        "--description=slurm-pfi: prior GPU power limits of n1 at the window's end",
        "--timer-property=AccuracySec=100ms",
        "--property=NoNewPrivileges=yes",
        "--property=Restart=on-failure",
        "--property=RestartSec=5",
        "--property=RestartPreventExitStatus=2",
        f"--setenv=LD_LIBRARY_PATH={environment['LD_LIBRARY_PATH']}",
    ]
    assert command == [
        *[sys.executable, "-I", "-m", "slurm_pfi.node.restorer", "--at-mono-ns", str(at_ns)],
        *["--node-name", "n1", "--state-dir", str(site.folder / "state")],
        *["--on-orphan", "hold", "--deadline-s", "5.0", "--identity-dir", str(site.folder / "id")],
    ]
    assert "limits are restored by a timer unit=slurm-pfi-restorer-n1.timer" in capsys.readouterr().err
    assert site.limits() == [200_000] * 8, "nothing is lifted early"
    wait_for(lambda: site.limits() == [700_000] * 8, "the restore", 30.0)
    assert gpus.read_trace(site.sim)[-1].mono_ns >= at_ns


def test_a_plan_saved_later_holds_the_timers_command_back(site: LoneNode, recorder: Path) -> None:
    """The agent that was left a timer heard before its end that the window goes on, and no agent is there now."""

    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.plan(window_step(200_000), window_step(None, {}, 6.0))
            await controller.ceilings(*[200_000] * 8)
            agent.kill()
            agent.wait()

    asyncio.run(story())
    ends_ns = time.monotonic_ns()  # long before the plan's end
    command = [
        sys.executable,
        "-m",
        "slurm_pfi.node.restorer",
        "--at-mono-ns",
        str(ends_ns),
        "--node-name",
        "n1",
    ]
    command += ["--state-dir", str(site.folder / "state"), "--identity-dir", str(site.folder / "id")]
    done = subprocess.run(
        command, env=site.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    wait_for(lambda: site.limits() == [700_000] * 8, "the restore in force")
    plan = json.loads(site.paths.plan.read_text())
    assert gpus.read_trace(site.sim)[-1].mono_ns >= plan["received_ns"] + 6_000_000_000


# The process is left to outlive the one that started it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("log_fits", [True, False])
def test_where_systemd_refuses_a_process_waits_and_the_log_says_so(
    site: LoneNode, recorder: Path, capsys: pytest.CaptureFixture[str], *, log_fits: bool
) -> None:
    site.paths.prepare()
    if not log_fits:  # as on a full disk
        site.paths.restorer_log.mkdir()
    (recorder / "refuse").touch()
    restorer.leave(
        _config(site), "n1", site.paths, time.monotonic_ns() + 600_000_000_000, Log(prefixed=False)
    )
    pid = wait_for(
        lambda: site.paths.restorer_lock.exists() and site.restorer_pid(), "a process of our own waits"
    )
    said = capsys.readouterr().err
    assert 'fault="Failed to connect to bus"' in said
    assert "slurm-pfi node release" in said and f"pid={pid}" in said
    assert restorer.dismiss("n1", site.paths) == pid
    asked = (recorder / "systemctl.args").read_text().splitlines()[1:]
    assert asked == ["stop", "slurm-pfi-restorer-n1.timer", "slurm-pfi-restorer-n1.service"]


def test_a_restorer_whose_folder_is_gone_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slurm_pfi.node.restorer", "--at-mono-ns", "1", "--node-name", "n1"]
    done = subprocess.run(
        [*command, "--state-dir", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f'nothing to restore why="{tmp_path}/n1 is gone"' in done.stderr


def test_a_restorer_in_the_middle_of_its_work_is_dismissed_in_time(site: LoneNode) -> None:
    _capped(site)
    site.paths.plan.unlink()
    with gpus.planted(site.sim) as node:
        node.fault(SET, FaultKind.DELAY, delay_s=60.0)
        command = [sys.executable, "-m", "slurm_pfi.node.restorer", "--at-mono-ns", "1", "--node-name", "n1"]
        command += ["--state-dir", str(site.folder / "state"), "--identity-dir", str(site.folder / "id")]
        waiting = subprocess.Popen(command, env=site.environment(), stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: len(site.audit("set")) > 8, "a restore is under way")
            assert restorer.dismiss("n1", site.paths) == waiting.pid
            Lock(site.paths.lock).release()
            assert waiting.wait(10) == 0
        finally:
            waiting.kill()
            waiting.wait()
    site.start()
    assert site.limits() == [200_000] * 8


# ---------------------------------------------------------------------------------------------------- the units

_UNITS: Final = ("slurm-pfi-node", "slurm-pfi-controller")
_CAPABILITIES: Final = ("CAP_SYS_ADMIN", "CAP_DAC_READ_SEARCH", "CAP_SYS_PTRACE", "CAP_SETGID")


def _tool(name: str) -> str:
    """A program of the system that a test needs; the Makefile installs its package."""
    found = shutil.which(name)
    assert found is not None, f"{name} is missing: apt-get install {'systemd' if 'systemd' in name else name}"
    return found


def _assignments(unit: str) -> list[tuple[str, str]]:
    lines = (REPO / "etc" / f"{unit}.service").read_text().splitlines()
    return [
        (line.partition("=")[0], line.partition("=")[2]) for line in lines if "=" in line and line[0] != "#"
    ]


@pytest.mark.parametrize("unit", _UNITS)
def test_the_unit_exposes_little(unit: str) -> None:
    done = subprocess.run(
        [
            *[_tool("systemd-analyze"), "security", "--offline=yes", "--no-pager", "--threshold=40"],
            str(REPO / "etc" / f"{unit}.service"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    (level,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert float(level) <= 4.0
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("unit", _UNITS)
def test_systemd_understands_every_line_of_the_unit(unit: str, tmp_path: Path) -> None:
    """With the program's path replaced by one that is there; systemd names each key and value that it does not know."""
    text = (REPO / "etc" / f"{unit}.service").read_text()
    copy = tmp_path / f"{unit}.service"
    copy.write_text(text.replace("/usr/bin/slurm-pfi", "/bin/true"))
    done = subprocess.run(
        [_tool("systemd-analyze"), "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    ours = [line for line in done.stderr.splitlines() if unit in line]
    assert ours == []


@pytest.mark.parametrize("unit", _UNITS)
def test_each_line_that_takes_something_away_has_its_reason(unit: str) -> None:
    _, _, hardening = (REPO / "etc" / f"{unit}.service").read_text().partition("# --- what it may do")
    block, _, _ = hardening.partition("\n[Install]")
    told = False
    for line in block.splitlines()[1:]:
        told = told or line.startswith("#")
        if line and not line.startswith("#"):
            assert told, f"{line}: why?"
        told = told and bool(line)


def test_c1_the_unit_leaves_the_agent_what_a_set_needs() -> None:
    given = _assignments("slurm-pfi-node")
    assert ("CapabilityBoundingSet", " ".join(_CAPABILITIES)) in given
    keys = {key for key, _ in given}
    assert not keys & {"User", "DynamicUser", "PrivateDevices", "PrivateUsers", "ProtectProc", "ProcSubset"}
    devices = {value for key, value in given if key == "DeviceAllow"}
    assert {"char-195 rw", "char-nvidiactl rw", "char-nvidia-caps r"} <= devices
    assert ("RestrictAddressFamilies", "AF_UNIX") in given
    assert ("ReadWritePaths", "/run/slurm-pfi") in given and ("RuntimeDirectoryPreserve", "yes") in given


@pytest.mark.parametrize(("name", "code"), [("good", 0), ("bad_type", 2)])
def test_f4_a_reload_with_a_bad_file_fails(name: str, code: int) -> None:
    """The unit's second ExecReload line, run as it stands there."""
    _, check = [value for key, value in _assignments("slurm-pfi-node") if key == "ExecReload"]
    program, *words = check.split()
    assert program == "/usr/bin/slurm-pfi"
    config = REPO / "tests" / "data" / "config" / f"{name}.toml"
    done = subprocess.run(
        [sys.executable, "-m", "slurm_pfi", *words],
        env={**os.environ, "SLURM_PFI_CONF": str(config)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert code == 0 or f"{config}: line 4: policy.reserve_w" in done.stderr


def test_times_of_the_unit_fit_what_the_agent_promises() -> None:
    given = dict(_assignments("slurm-pfi-node"))
    assert given["Type"] == "notify" and given["NotifyAccess"] == "main"
    assert float(given["TimeoutStopSec"]) > STOP_S
    assert float(given["TimeoutStartSec"]) > 15
    assert given["KillMode"] == "mixed"


def _restricted(site: LoneNode) -> None:
    """Agents of this site start with the unit's capabilities and no way to others."""
    capabilities = ",".join(f"+{name.removeprefix('CAP_').lower()}" for name in _CAPABILITIES)
    cut = [_tool("setpriv"), f"--bounding-set=-all,{capabilities}", "--inh-caps=-all", "--no-new-privs", "--"]
    plain = site.command
    site.command = lambda *words: [*cut, *plain(*words)]  # type: ignore[method-assign]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give capabilities up")
def test_the_units_capabilities_are_enough_from_start_to_restore(site: LoneNode) -> None:
    plain = site.command
    _restricted(site)
    gres = site.folder / "gres.conf"
    os.chown(gres, 65534, 65534)
    gres.chmod(0o600)

    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            wide = int(_status_of(agent.pid, "CapEff"), 16)
            assert wide.bit_count() == len(_CAPABILITIES), "the test takes away what the unit takes away"
            run = site.job(7, "0")
            await controller.until(lambda report: report.runs and report.runs[0].gpus, "gres.conf is read")
            await controller.plan(window_step(200_000, {run: 450_000}), window_step(None, {}, 600.0))
            await controller.ceilings(450_000, *[200_000] * 7)
            agent.terminate()
            assert agent.wait(10) == 0
            assert wait_for(site.restorer_pid, "a restorer")
            site.start()
            assert site.restorer_pid() is None, "ended without CAP_KILL"
            await controller.until(lambda report: len(report.gpus) == 8, "GPUs listed")
            site.command = plain  # type: ignore[method-assign]
            done = await asyncio.to_thread(site.ask, "release")
            assert done.returncode == 0, done.stderr

    asyncio.run(story())
    wait_for(lambda: site.limits() == [700_000] * 8, "the restore")
    assert stat.S_IMODE(site.paths.control.stat().st_mode) == 0o666


def _status_of(pid: int, key: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{key}:"))


def _calls_in(group: str) -> set[str]:
    """The system calls of one of systemd's groups, those of the groups in it included."""
    done = subprocess.run(
        [_tool("systemd-analyze"), "syscall-filter", group],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    words = {line.split()[0] for line in done.stdout.splitlines()[1:] if line.strip() and "#" not in line}
    inner = {word for word in words if word.startswith("@")}
    return (words - inner).union(*map(_calls_in, inner))


def _start_traced(site: LoneNode) -> int:
    """The agent's pid below strace."""
    with site.log.open("ab") as log:
        site.started.append(subprocess.Popen(site.command("run"), env=site.environment(), stderr=log))
    found = wait_for(lambda: re.search(r"ready node=n1 pid=([0-9]+)", site.log.read_text()), "ready", 60.0)
    return int(found[1])


def test_the_units_system_calls_are_enough(site: LoneNode) -> None:
    """What agent, NVML process (with the stand-in library) and restorer call, from start to restore, by strace."""
    out = site.folder / "calls"
    plain = site.command
    site.command = lambda *words: [  # type: ignore[method-assign]
        *[_tool("strace"), "-f", "-qq", "-e", "signal=none", "-o", str(out)],
        *plain(*words),
    ]

    async def story() -> None:
        async with Commander(site) as controller:
            traced = await asyncio.to_thread(_start_traced, site)
            await controller.plan(window_step(200_000), window_step(None, {}, 600.0))
            await controller.ceilings(*[200_000] * 8)
            os.kill(traced, signal.SIGHUP)
            await controller.plan(window_step(None))
            await controller.ceilings(*[700_000] * 8)
            os.kill(traced, signal.SIGTERM)
            await asyncio.to_thread(site.started[-1].wait, 20)

    asyncio.run(story())
    called = set(re.findall(r"^[0-9]+ +([a-z_0-9]+)\(", out.read_text(), re.MULTILINE))
    assert {"ioctl", "sendto", "fsync", "rename"} & called, "strace saw the agent"
    assert called - _calls_in("@system-service") == set()


@pytest.mark.parametrize("window", ["ends", "is over", "has no end"])
def test_a_config_gone_bad_after_the_agent_died_keeps_no_cap_in_force(site: LoneNode, window: str) -> None:
    """The identity of simulated nodes is not known without the config, so what is looked at is what is left."""
    steps = {"ends": (600.0,), "is over": (0.5,), "has no end": ()}[window]

    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.until(lambda report: len(report.gpus) == 8, "GPUs listed")
            await controller.plan(window_step(200_000), *(window_step(None, {}, at) for at in steps))
            agent.kill()
            agent.wait()

    asyncio.run(story())
    if window == "is over":
        time.sleep(steps[0])  # it ends while there is no agent
    site.config.write_text("cluster = \n")
    done = subprocess.run(
        site.command("run"),
        env={**site.environment(), "RUNTIME_DIRECTORY": str(site.folder / "state")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "not valid TOML" in done.stderr
    if window == "has no end":
        assert 'no end of the window is known repair="slurm-pfi node release"' in done.stderr
        return
    (found,) = re.findall(
        r"limits are restored by a process that waits pid=([0-9]+) in_s=([0-9.]+)", done.stderr
    )
    pid, in_s = int(found[0]), float(found[1])
    assert 500 < in_s <= 600 if window == "ends" else in_s == 0
    wait_for(
        lambda: site.restorer_pid() == pid or not Path(f"/proc/{pid}").exists(), "it waits, or has ended"
    )
