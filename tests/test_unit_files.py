"""The unit files: what they take away, that it has a reason, and that it leaves the agent what it needs."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from slurm_pfi.config import load_config
from slurm_pfi.node.agent import STOP_S
from testbed.lone_node import Commander, LoneNode, wait_for
from tests.lone_site import site
from tests.node_world import window_step

__all__ = ["site"]
REPO: Final = Path(__file__).parent.parent

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
    before, _, hardening = (REPO / "etc" / f"{unit}.service").read_text().partition("# --- what it may do")
    assert not re.search(
        r"(?m)^(Protect|Restrict|Private|Capability|NoNew|Lock|SystemCall|Memory|Tasks)", before
    )
    block, _, _ = hardening.partition("\n[Install]")
    told = False
    for line in block.splitlines()[1:]:
        told = told or line.startswith("#")
        if line and not line.startswith("#"):
            assert told, f"{line}: why?"
        told = told and bool(line)


def test_the_controllers_unit_fits_its_config() -> None:
    given = _assignments("slurm-pfi-controller")
    assert {("Type", "exec"), ("Type", "notify")} & set(given)
    assert ("User", "slurm") in given
    assert "PrivateUsers" not in dict(given), "it must see the uids of its peers"
    defaults = load_config(REPO / "etc/slurm-pfi.toml").controller
    assert ("StateDirectory", defaults.state_dir.removeprefix("/var/lib/")) in given
    assert ("RuntimeDirectory", defaults.run_dir.removeprefix("/run/")) in given


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
