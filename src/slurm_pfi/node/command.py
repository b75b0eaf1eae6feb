"""``slurm-pfi node``: the agent of one node, and its admin's words to it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec

from ..bus.asking import NO, UNREACHABLE, WRONG_USE, Reply, ask
from ..bus.unix import SocketError, UnreachableError
from ..config import Config, ConfigError, config_path, load_config
from ..gpu.device import DeviceError
from ..gpu.identity import IdentityError
from ..gpu.journal import JournalError
from ..store.audit import AuditLog
from .agent import SIGNALS, Agent
from .lock import Lock, LockedError, take_within
from .log import Log
from .paths import NodePaths, node_name, node_paths
from .rescue import rescue_config
from .restore import Restored, restore_all
from .restorer import dismiss, leave_without_agent
from .setup import close_hardware, make_hardware
from .shown import counted, status_lines

DONE: Final = 0


class _StopError(Exception):
    """Ends the command with one line and this exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 1 the answer is no, 2 wrong use, 3 the agent or the GPUs cannot be reached."""
    given = make_parser().parse_args(argv)
    config_file = config_path(given.config).absolute()
    try:
        node = node_name(given.node_name)
        strict = given.command == "run"
        config = load_config(config_file) if strict else _any_config(config_file, given.state_dir)
        paths = node_paths(config, node)
        match given.command:
            case "release":
                return _release(config, node, paths)
            case "resume":
                return _resume(node, paths)
            case "status":
                return _status(node, paths, as_json=given.json)
            case _:
                return _run(config, config_file, node, paths)
    except (ConfigError, ValueError) as error:
        code = _say(str(error), WRONG_USE)
        if given.command == "run":
            _leave_limits_an_end(config_file, given.node_name)
        return code
    except _StopError as stop:
        return _say(str(stop), stop.exit_code)


def _any_config(config_file: Path, state_dir: str | None) -> Config:
    """For the red buttons: a file that went bad must not keep anybody from giving the GPUs back."""
    try:
        config = load_config(config_file)
    except ConfigError as error:
        config = rescue_config(config_file)
        used = state_dir or f"{config.node.state_dir} (--state-dir DIR names another)"
        _warn(f"{error}; going on with the state folder {used}")
    if state_dir is None:
        return config
    if not Path(state_dir).is_absolute():
        raise ValueError(f"--state-dir {state_dir[:80]!r}: write an absolute path")
    replace = msgspec.structs.replace
    return replace(config, node=replace(config.node, state_dir=state_dir))


def make_parser() -> argparse.ArgumentParser:
    """The words of ``slurm-pfi node``."""
    parser = argparse.ArgumentParser(
        prog="slurm-pfi node",
        description="The agent of one GPU node, run as root, and what its admin tells it.",
    )
    parser.set_defaults(command="run", config=None, node_name=None)
    everywhere, asking = (argparse.ArgumentParser(add_help=False) for _ in range(2))
    for taker in (parser, everywhere):  # before the command or after it
        taker.add_argument(
            "--config",
            metavar="FILE",
            default=argparse.SUPPRESS,
            help="the site's config; default $SLURM_PFI_CONF or /etc/slurm-pfi/slurm-pfi.toml",
        )
        taker.add_argument(
            "--node-name",
            metavar="NAME",
            default=argparse.SUPPRESS,
            help="default $SLURMD_NODENAME, else the host name",
        )
    asking.add_argument("--state-dir", metavar="DIR", help="in place of node.state_dir in the config")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("run", parents=[everywhere], help="run the agent in the foreground (the default)")
    admin = [everywhere, asking]
    commands.add_parser("release", parents=admin, help="restore every GPU of this node now, and stay so")
    commands.add_parser("resume", parents=admin, help="take plans again after a release")
    status = commands.add_parser("status", parents=admin, help="what the agent of this node knows")
    status.add_argument("--json", action="store_true", help="as one JSON document")
    return parser


# -------------------------------------------------------------------------------------------------------- run


def _run(config: Config, config_file: Path, node: str, paths: NodePaths) -> int:
    log = Log(prefixed="JOURNAL_STREAM" in os.environ)
    # Root is not asked for: whoever owns the state folder may run a simulated node, and on real GPUs the driver
    # itself refuses a set without privilege, which is then reported as a fault.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        paths.prepare()
        lock, dismissed = _take_node(node, paths)
    except SocketError as error:
        raise _StopError(f"the agent of {node} cannot start: {error}", WRONG_USE) from error
    except OSError as error:  # a full disk, for one: trying again may help
        raise _StopError(f"the agent of {node} cannot start: {error}", UNREACHABLE) from error
    except LockedError as error:
        raise _StopError(f"the agent of {node} runs already: {error}", NO) from error
    if dismissed is not None:
        log.info("restorer dismissed", pid=dismissed)
    try:
        asyncio.run(_serve(config, config_file, node, paths, log))
    except IdentityError as error:
        raise _StopError(f"the agent of {node} cannot start: {error}", UNREACHABLE) from error
    finally:
        lock.release()
    return DONE


def _leave_limits_an_end(config_file: Path, name: str | None) -> None:
    """The config is of no use, and the agent before may have died in a window."""
    with contextlib.suppress(ValueError):
        log = Log(prefixed="JOURNAL_STREAM" in os.environ)
        leave_without_agent(rescue_config(config_file), node_name(name), log)


def _take_node(node: str, paths: NodePaths) -> tuple[Lock, int | None]:
    """The node's lock, and the pid of a restorer that was ended for it. Raises LockedError, OSError."""
    dismissed = dismiss(node, paths)
    try:
        return Lock(paths.lock), dismissed
    except LockedError:
        late = dismiss(node, paths)  # a restorer that had only begun when we looked for it
        if late is None:
            raise
        return take_within(paths.lock), late


async def _serve(config: Config, config_file: Path, node: str, paths: NodePaths, log: Log) -> None:
    hardware = make_hardware(config, node, paths)
    try:
        await Agent(config, config_file, node, paths, hardware, log).run()
    finally:
        await close_hardware(hardware)
    if threading.active_count() > 1:
        # A thread may hang in a read that never ends (a dead NFS server). All is written and closed by now; waiting
        # for it would end in SIGKILL.
        os._exit(DONE)


# -------------------------------------------------------------------------------------------- release, resume


def _release(config: Config, node: str, paths: NodePaths) -> int:
    try:
        reply = ask(paths.control, "release")
    except UnreachableError as error:
        return _release_without_agent(config, node, paths, error)
    return _say(reply.message, reply.exit_code)


def _release_without_agent(config: Config, node: str, paths: NodePaths, why: UnreachableError) -> int:
    """No agent answers: if none lives, the journal is enough to restore by."""
    if not paths.folder.is_dir():
        raise _StopError(f"{paths.folder} is not there: no agent has run as {node}", UNREACHABLE)
    try:
        lock, _ = _take_node(node, paths)
    except LockedError as error:
        raise _StopError(
            f"the agent of {node} lives but does not answer ({error}): {_told(why, paths)}", UNREACHABLE
        ) from why
    except OSError as error:
        raise _StopError(f"{paths.folder}: {error.strerror}; this is for root", UNREACHABLE) from error
    try:
        forgotten = _remember_release(paths)
        restored = asyncio.run(_restore(config, node, paths))
    except (DeviceError, JournalError, IdentityError, OSError) as error:
        raise _StopError(f"{node} cannot be restored: {error}", UNREACHABLE) from error
    finally:
        lock.release()
    return _say_restored(node, restored, forgotten)


def _remember_release(paths: NodePaths) -> str:
    """The plan must not come back with the next agent, and that one stays released; why this cannot be kept.

    A full disk stops no restore.
    """
    try:
        paths.plan.unlink(missing_ok=True)
        paths.released.touch()
    except OSError as error:
        return f"the next agent takes plans again, for this cannot be kept: {error}"
    return ""


async def _restore(config: Config, node: str, paths: NodePaths) -> Restored:
    hardware = make_hardware(config, node, paths)
    audit = AuditLog(paths.audit, f"node:{node}")
    try:
        audit.write("released", {"reason": "asked for by the admin, no agent"})
        return await restore_all(hardware, audit, "released by the admin")
    finally:
        audit.close()
        await close_hardware(hardware)


def _say_restored(node: str, restored: Restored, forgotten: str) -> int:
    parts = [f"{counted(len(restored.done), 'GPU')} at the prior limit"] if restored.done else []
    if restored.conflicts:
        parts.append(f"left alone, as somebody else had set another limit: {', '.join(restored.conflicts)}")
    left = {**restored.failed, **restored.unreadable}
    if left:
        parts.append(f"NOT restored: {'; '.join(f'{uuid}: {why}' for uuid, why in left.items())}")
    parts = parts or ["nothing to restore: no cap of ours stands"]
    parts.append(forgotten or "the next agent stays released until 'slurm-pfi node resume'")
    return _say(f"{node} released without an agent: {'; '.join(parts)}", NO if left or forgotten else DONE)


def _resume(node: str, paths: NodePaths) -> int:
    reply = _ask(node, paths, "resume")
    return _say(reply.message, reply.exit_code)


# ----------------------------------------------------------------------------------------------------- status


def _status(node: str, paths: NodePaths, *, as_json: bool) -> int:
    reply = _ask(node, paths, "status")
    if not reply.ok:
        return _say(reply.message, reply.exit_code)
    if as_json:
        print(json.dumps(reply.data, indent=2, sort_keys=True))  # noqa: T201 - what the command is for
    else:
        print("\n".join(status_lines(node, reply.data)))  # noqa: T201
    return DONE


def _ask(node: str, paths: NodePaths, command: str) -> Reply:
    try:
        return ask(paths.control, command)
    except UnreachableError as error:
        raise _StopError(
            f"the agent of {node} cannot be reached: {_told(error, paths)}; "
            "see: systemctl status slurm-pfi-node",
            UNREACHABLE,
        ) from error


def _told(error: UnreachableError, paths: NodePaths) -> str:
    if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
        return f"no agent listens at {paths.control}"
    return str(error)


def _say(message: str, exit_code: int) -> int:
    """One line: what was done on stdout, what was not on stderr."""
    stream = sys.stdout if exit_code == DONE else sys.stderr
    print(f"slurm-pfi: {message}", file=stream)
    return exit_code


def _warn(message: str) -> None:
    print(f"slurm-pfi: warning: {message}", file=sys.stderr)  # noqa: T201 - for the admin
