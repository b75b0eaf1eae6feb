"""What restores at a window's end when no agent is there: systemd's timer, or a process that waits."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from slurm_pfi.config import Config, NodeSection
from slurm_pfi.node import restorer
from slurm_pfi.node.lock import Lock
from slurm_pfi.node.log import Log
from testbed import gpus
from testbed.gpus import FaultKind
from testbed.lone_node import Commander, LoneNode, wait_for
from tests.lone_site import site
from tests.node_world import window_step

__all__ = ["site"]


SET: Final = "nvmlDeviceSetPowerManagementLimit"

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
