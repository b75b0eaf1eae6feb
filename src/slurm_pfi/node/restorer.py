"""What a stopped agent leaves behind: ``python -m slurm_pfi.node.restorer`` restores prior limits at a given instant.

Where there is systemd, a transient timer starts it then: that costs no memory until its time has come, is shown by
``systemctl list-timers``, and outlives the agent's unit, whose processes end with it, and a re-execution of systemd.
Its clock is CLOCK_MONOTONIC, as ours is: neither a step of the wall clock nor a suspend moves the instant, and a reboot
takes the timer away together with the limits. Elsewhere the process itself waits, in a session of its own.

Either way it looks first at the plan that is saved, for a later agent may have heard that the window goes on; makes
sure that no agent lives; restores from the journal; and ends. A starting agent dismisses it. It reads no config file:
what it needs was given to it by the agent, so that a file that went bad since cannot keep a cap in force.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Final, get_args

import msgspec

from ..config import Config, NodeSection, TimesSection
from ..gpu.device import DeviceError
from ..gpu.identity import IdentityError
from ..gpu.journal import JournalError
from ..store.audit import AuditLog
from .lock import Lock, LockedError, end_holder, take_within
from .log import Log
from .paths import NodePaths, node_name, node_paths
from .plan import HeldPlan
from .restore import restore_all
from .setup import close_hardware, make_hardware
from .state import Orphan

_SYSTEMD: Final = Path("/run/systemd/system")
_SYSTEMD_S: Final = 3.0  # systemd answers at once or not at all; the agent has 10 s to end in
_AGENT_EXIT_S: Final = 10.0
_RETRY_S: Final = 5.0
_KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH",)


def leave(config: Config, node: str, paths: NodePaths, at_ns: int, log: Log) -> None:
    """See to it that limits are restored at ``at_ns`` (CLOCK_MONOTONIC) though the caller ends now.

    Says in the log how. Raises OSError when nothing could be left.
    """
    command = [sys.executable, "-I", "-m", "slurm_pfi.node.restorer", "--at-mono-ns", str(at_ns)]
    command += ["--node-name", node, "--state-dir", config.node.state_dir]
    command += ["--on-orphan", config.node.on_orphan, "--deadline-s", str(config.times.device_deadline_s)]
    if config.node.identity_dir is not None:
        command += ["--identity-dir", config.node.identity_dir]
    in_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
    if by_systemd():
        fault = _start_timer(command, node, in_s)
        if not fault:
            log.info("limits are restored by a timer", unit=f"{unit_name(node)}.timer", in_s=f"{in_s:.1f}")
            return
        log.error(
            "no timer of systemd; a process waits instead, which ends if systemd ends it with this unit",
            fault=fault,
            check=f"after {in_s:.0f} s: slurm-pfi node status, or slurm-pfi node release",
        )
    with contextlib.ExitStack() as stack:
        stderr: IO[bytes] | int = subprocess.DEVNULL
        with contextlib.suppress(OSError):  # a full disk: it restores without a log
            stderr = stack.enter_context(paths.restorer_log.open("ab"))
        waiting = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
            cwd="/",
        )
    log.info("limits are restored by a process that waits", pid=waiting.pid, in_s=f"{in_s:.1f}")


def leave_without_agent(config: Config, node: str, log: Log) -> None:
    """An agent cannot start: if one died in a window, see to it that its limits still end with that window.

    ``config`` need only say where the node's folder is. Nothing is done while an agent lives. Never raises.
    """
    paths = node_paths(config, node)
    try:
        if not any(paths.journal.glob("*.json")):
            return
        Lock(paths.lock).release()
        held = msgspec.json.decode(paths.plan.read_bytes(), type=HeldPlan)
        now_ns = time.monotonic_ns()
        ends_ns = held.window_end_ns(now_ns, skip_lease=config.node.on_orphan == "hold")
        if ends_ns is None and held.in_force(now_ns, skip_lease=True)[1].park_cap_mw is not None:
            log.error("limits of ours stay: no end of the window is known", repair="slurm-pfi node release")
            return
        dismiss(node, paths)
        leave(config, node, paths, ends_ns or now_ns, log)
    except (OSError, LockedError, msgspec.MsgspecError, IndexError) as error:
        log.error("limits of ours, if any, stay", why=error, repair="slurm-pfi node release")


def dismiss(node: str, paths: NodePaths) -> int | None:
    """End what an earlier agent left, timer or process; returns the pid of a process that had begun to run.

    Raises LockedError if that one stays.
    """
    if by_systemd():
        units = [f"{unit_name(node)}.timer", f"{unit_name(node)}.service"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ["systemctl", "stop", *units], check=False, capture_output=True, timeout=_SYSTEMD_S
            )
    return end_holder(paths.restorer_lock)


def by_systemd() -> bool:
    """Whether this host's services are systemd's and we may ask it for a unit."""
    return _SYSTEMD.is_dir() and os.geteuid() == 0


def unit_name(node: str) -> str:
    """Name of the transient timer and of the service that it starts, without their suffix."""
    return f"slurm-pfi-restorer-{node}"


def _start_timer(command: list[str], node: str, in_s: float) -> str:
    """Ask systemd to run it in ``in_s`` seconds; returns what went wrong, empty if nothing did."""
    kept = [f"--setenv={name}={os.environ[name]}" for name in _KEPT_VARIABLES if name in os.environ]
    start = [
        "systemd-run",
        "--quiet",
        "--collect",  # a unit that failed must not be in the way of the next one
        f"--unit={unit_name(node)}",
        f"--description=slurm-pfi: prior GPU power limits of {node} at the window's end",
        f"--on-active={in_s:.3f}",
        "--timer-property=AccuracySec=100ms",  # its default is a minute
        "--property=NoNewPrivileges=yes",
        "--property=Restart=on-failure",  # it tries again by itself; this is for its own death
        "--property=RestartSec=5",
        "--property=RestartPreventExitStatus=2",
        *kept,
        "--",
        *command,
    ]
    try:
        done = subprocess.run(start, check=False, capture_output=True, text=True, timeout=_SYSTEMD_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done or not needed any more, 2 wrong use."""
    parser = argparse.ArgumentParser(prog="slurm-pfi-restorer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--node-name", required=True)
    parser.add_argument("--state-dir", required=True, type=Path)
    parser.add_argument("--at-mono-ns", required=True, type=int)
    parser.add_argument("--on-orphan", choices=get_args(Orphan), default="hold")
    parser.add_argument("--deadline-s", type=float, default=TimesSection().device_deadline_s)
    parser.add_argument("--identity-dir")
    given = parser.parse_args(argv)
    log = Log(prefixed="JOURNAL_STREAM" in os.environ)
    try:
        node = node_name(given.node_name)
    except ValueError as error:
        log.error("restorer cannot start", why=error)
        return 2
    config = Config(
        cluster="restorer",
        node=NodeSection(
            state_dir=str(given.state_dir), on_orphan=given.on_orphan, identity_dir=given.identity_dir
        ),
        times=TimesSection(device_deadline_s=given.deadline_s),
    )
    paths = node_paths(config, node)
    try:
        own = Lock(paths.restorer_lock)
    except LockedError as error:
        log.info("another restorer waits already", why=error)
        return 0
    except FileNotFoundError:
        log.info("nothing to restore", why=f"{paths.folder} is gone")
        return 0
    try:
        return asyncio.run(_wait_and_restore(config, node, paths, given.at_mono_ns, log))
    finally:
        own.release()


async def _wait_and_restore(config: Config, node: str, paths: NodePaths, at_ns: int, log: Log) -> int:
    """Wait, restore, end. Dismissed at any moment it stops there: the journal serves whoever comes next."""
    dismissed = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, dismissed.set)
    log.info("restorer waits", node=node, seconds=f"{max(0, at_ns - time.monotonic_ns()) / 1e9:.1f}")
    work = asyncio.create_task(_restore_when_due(config, node, paths, at_ns, log))
    waiting = asyncio.create_task(dismissed.wait())
    await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not work.done():
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        log.info("restorer dismissed", why="an agent is back")
        return 0
    await work
    return 0


async def _restore_when_due(config: Config, node: str, paths: NodePaths, at_ns: int, log: Log) -> None:
    pause_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
    while True:
        await asyncio.sleep(pause_s)
        now_ns = time.monotonic_ns()
        is_open, ends_ns = _window(config, paths, now_ns)
        if is_open and ends_ns is None:
            log.info("restorer ends", why="a later plan has opened a window without end")
            return
        if ends_ns is not None:
            pause_s = (ends_ns - now_ns) / 1e9
            continue
        try:
            failed = await _restore_once(config, node, paths, log)
        except LockedError as error:
            log.info("restorer ends", why=f"an agent is back: {error}")
            return
        if not failed:
            return
        pause_s = _RETRY_S


def _window(config: Config, paths: NodePaths, now_ns: int) -> tuple[bool, int | None]:
    """Whether a window is open by the plan that is saved, which may be later than what we were told, and its end."""
    skip_lease = config.node.on_orphan == "hold"
    try:
        held = msgspec.json.decode(paths.plan.read_bytes(), type=HeldPlan)
        _, found = held.in_force(now_ns, skip_lease=skip_lease)
    except (OSError, msgspec.MsgspecError, IndexError):
        return False, None
    if held.plan.mode == "observe" or found.park_cap_mw is None:
        return False, None
    return True, held.window_end_ns(now_ns, skip_lease=skip_lease)


async def _restore_once(config: Config, node: str, paths: NodePaths, log: Log) -> bool:
    """One pass over all GPUs as the node's one actor; whether something is left to do. Raises LockedError."""
    lock = take_within(paths.lock, _AGENT_EXIT_S)
    if _window(config, paths, time.monotonic_ns())[0]:  # whoever held the lock took another plan meanwhile
        lock.release()
        return True
    hardware = make_hardware(config, node, paths)
    audit = AuditLog(paths.audit, f"node:{node}", on_fault=lambda text: log.error("audit", fault=text))
    try:
        restored = await restore_all(hardware, audit, "window over, no agent")
    except (DeviceError, JournalError, IdentityError) as error:
        log.error("restore failed; tried again", why=error)
        return True
    finally:
        audit.close()
        await close_hardware(hardware)
        lock.release()
    for uuid, why in restored.unreadable.items():
        log.error("GPU left alone", uuid=uuid, why=why)
    for uuid, why in restored.failed.items():
        log.error("GPU not restored; tried again", uuid=uuid, why=why)
    log.info("restored", gpus=len(restored.done), conflicts=len(restored.conflicts))
    return bool(restored.failed)


if __name__ == "__main__":
    sys.exit(main())
