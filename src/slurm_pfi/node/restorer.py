"""What a stopped agent leaves behind: ``python -m slurm_pfi.node.restorer`` restores prior limits at a given instant.

It waits, makes sure that no agent is back, restores from the journal, and ends. A starting agent ends it first.
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
from typing import Final

import msgspec

from ..config import Config, ConfigError, load_config
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

_SYSTEMD: Final = Path("/run/systemd/system")
_AGENT_EXIT_S: Final = 10.0
_RETRY_S: Final = 5.0
_KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH", "PYTHONPATH")


def leave(config_file: Path, node: str, paths: NodePaths, at_ns: int) -> None:
    """Start the restorer so that it outlives the caller: a transient unit where there is systemd, else a session.

    Raises OSError when it cannot be started.
    """
    command = [sys.executable, "-m", "slurm_pfi.node.restorer"]
    command += ["--config", str(config_file), "--node-name", node, "--at-mono-ns", str(at_ns)]
    if _SYSTEMD.is_dir() and os.geteuid() == 0 and _run_by_systemd(command, node):
        return
    with paths.restorer_log.open("ab") as log:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )


def dismiss(node: str, paths: NodePaths) -> int | None:
    """End a restorer that an earlier agent left; returns its pid if there was one. Raises LockedError if it stays."""
    if _SYSTEMD.is_dir() and os.geteuid() == 0:
        unit = _unit(node)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ["systemctl", "stop", f"{unit}.service"], check=False, capture_output=True, timeout=5
            )
    return end_holder(paths.restorer_lock)


def _unit(node: str) -> str:
    return f"slurm-pfi-restorer-{node}"


def _run_by_systemd(command: list[str], node: str) -> bool:
    """Ask systemd to run it apart from the agent's unit, whose processes end with it."""
    kept = [f"--setenv={name}={os.environ[name]}" for name in _KEPT_VARIABLES if name in os.environ]
    start = ["systemd-run", "--quiet", "--collect", f"--unit={_unit(node)}", *kept, "--", *command]
    try:
        done = subprocess.run(start, check=False, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done or not needed any more, 1 some GPU could not be restored, 2 wrong use."""
    parser = argparse.ArgumentParser(prog="slurm-pfi-restorer", description=__doc__)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--node-name", required=True)
    parser.add_argument("--at-mono-ns", required=True, type=int)
    given = parser.parse_args(argv)
    log = Log(prefixed=False)
    try:
        config = load_config(given.config)
        node = node_name(given.node_name)
    except (ConfigError, ValueError) as error:
        log.error("restorer cannot start", why=error)
        return 2
    paths = node_paths(config, node)
    try:
        own = Lock(paths.restorer_lock)
    except LockedError as error:
        log.info("another restorer waits already", why=error)
        return 0
    try:
        return asyncio.run(_wait_and_restore(config, node, paths, given.at_mono_ns, log))
    finally:
        own.release()


async def _wait_and_restore(config: Config, node: str, paths: NodePaths, at_ns: int, log: Log) -> int:
    dismissed = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, dismissed.set)
    log.info("restorer waits", node=node, seconds=f"{max(0, at_ns - time.monotonic_ns()) / 1e9:.1f}")
    pause_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(dismissed.wait(), pause_s)
        if dismissed.is_set():
            log.info("restorer dismissed", why="an agent is back")
            return 0
        later_ns = _still_open_until_ns(config, paths)
        if later_ns is not None and later_ns > time.monotonic_ns():
            pause_s = (later_ns - time.monotonic_ns()) / 1e9
            continue
        try:
            failed = await _restore_once(config, node, paths, log)
        except LockedError as error:
            log.info("restorer ends", why=f"an agent is back: {error}")
            return 0
        if not failed:
            return 0
        pause_s = _RETRY_S


def _still_open_until_ns(config: Config, paths: NodePaths) -> int | None:
    """The end of the window by the plan that is saved, if it is later than what we were told."""
    try:
        held = msgspec.json.decode(paths.plan.read_bytes(), type=HeldPlan)
        return held.window_end_ns(time.monotonic_ns(), skip_lease=config.node.on_orphan == "hold")
    except (OSError, msgspec.MsgspecError, IndexError):
        return None


async def _restore_once(config: Config, node: str, paths: NodePaths, log: Log) -> bool:
    """One pass over all GPUs as the node's one actor; whether something is left to do. Raises LockedError."""
    lock = take_within(paths.lock, _AGENT_EXIT_S)
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
    for uuid, why in restored.failed.items():
        log.error("GPU not restored; tried again", uuid=uuid, why=why)
    log.info("restored", gpus=len(restored.done), conflicts=len(restored.conflicts))
    return bool(restored.failed)


if __name__ == "__main__":
    sys.exit(main())
