"""Our own side: the config file, the folders, and whether agent and controller answer."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ...bus.asking import ask
from ...bus.unix import UnreachableError, connect, peer_of
from ...node.paths import node_paths
from ...units import format_duration
from ..common import control_path, why_unreachable
from .finding import Facts, Finding
from .slurm import whoami

_PATIENCE_S: Final = 5.0


def config_file(facts: Facts) -> Iterator[Finding]:
    """It could be read, else nobody would be here; now who may write it."""
    path = facts.config_file
    try:
        mode = path.stat().st_mode
    except OSError as error:
        yield Finding("config", "unseen", f"{path}: {error.strerror}")
        return
    if mode & 0o022:
        text = f"{path} may be written by others (mode {stat.S_IMODE(mode):04o}), and root acts on it"
        yield Finding("config", "fail", text, f"chmod 0644 {path}")
    else:
        yield Finding("config", "ok", f"{path}: fine, cluster {facts.config.cluster}")


def folders(facts: Facts) -> Iterator[Finding]:
    """State folders: the right owner, and nobody else may write."""
    controller = facts.config.controller
    try:
        owner: int | None = pwd.getpwnam(controller.user).pw_uid
    except KeyError:
        owner = None  # told by the check of users
    hint = f"install -d -m 0755 -o {controller.user}"
    for path in (controller.state_dir, controller.run_dir):
        yield folder_finding(Path(path), owner, f"{hint} {path}; the service makes it by itself")
    if facts.is_node:
        # A simulated node belongs to whoever runs it.
        agents = None if facts.config.node.identity_dir else 0
        yield folder_finding(
            node_paths(facts.config, facts.node).folder, agents, "the agent makes it when it starts as root"
        )


def folder_finding(path: Path, owner: int | None, todo: str) -> Finding:
    """Judge one folder. ``owner``: the uid that it must have, None for any."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return Finding("folder", "unseen", f"{path} is not there", todo)
    except OSError as error:
        return Finding("folder", "unseen", f"{path}: {error.strerror}", "run doctor as root")
    if not stat.S_ISDIR(about.st_mode):
        return Finding(
            "folder", "fail", f"{path} is not a folder (a symlink is not followed)", "move it away"
        )
    if owner is not None and about.st_uid != owner:
        return Finding(
            "folder", "fail", f"{path} belongs to uid {about.st_uid}, not to {owner}", f"chown {owner} {path}"
        )
    if about.st_mode & 0o022:
        text = f"{path} may be written by others (mode {stat.S_IMODE(about.st_mode):04o})"
        return Finding("folder", "fail", text, f"chmod 0755 {path}")
    return Finding("folder", "ok", f"{path} (mode {stat.S_IMODE(about.st_mode):04o})")


def agent(facts: Facts) -> Iterator[Finding]:
    """The agent of this node: whether it answers, as whom it runs, what it complains of."""
    if not facts.is_node:
        return
    path = node_paths(facts.config, facts.node).control
    reply = _ask(path)
    if isinstance(reply, str):
        yield Finding("agent", "fail", f"{facts.node}: {reply}", "start it: systemctl start slurm-pfi-node")
        return
    data, uid = reply
    state = "released" if data.get("released") else "holds a plan" if data.get("held") else "has no plan yet"
    link = "reaches" if data.get("connected") else "does NOT reach"
    text = f"{facts.node}: answers (uid {uid}), {state}, {link} the controller"
    faults = [str(fault) for fault in data.get("faults", [])]
    faults += [f"{gpu['uuid']}: {gpu['fault']}" for gpu in data.get("gpus", []) if gpu.get("fault")]
    if uid != 0 and not facts.config.node.identity_dir:
        yield Finding("agent", "fail", f"{text}; only root may set limits", "run it by its systemd unit")
    elif faults:
        yield Finding("agent", "warn", f"{text}; {'; '.join(faults[:4])}", "see the agent's log")
    elif not data.get("connected"):
        yield Finding("agent", "warn", text, "start the controller, or see the agent's log")
    else:
        yield Finding("agent", "ok", text)


def controller(facts: Facts) -> Iterator[Finding]:
    """The controller: whether it answers, and which nodes it hears."""
    path = control_path(facts.config)
    reply = _ask(path)
    if isinstance(reply, str):
        yield Finding("controller", "fail", reply, "start it: systemctl start slurm-pfi-controller")
        return
    data, uid = reply
    text = f"answers (uid {uid}), epoch {data['epoch']}, {_window(data)}"
    quiet = [node["name"] for node in data["nodes"] if node["state"] != "ok"]
    if not data["limits_known"]:
        todo = "'slurm-pfi limit clear --all' puts the damaged file aside"
        yield Finding("controller", "fail", f"{text}; its limits are unreadable", todo)
    elif quiet:
        todo = "see 'slurm-pfi status', and the agents on these nodes"
        yield Finding("controller", "warn", f"{text}; not heard as they should be: {','.join(quiet)}", todo)
    else:
        yield Finding("controller", "ok", f"{text}; hears all {len(data['nodes'])} nodes")


def _window(data: dict[str, Any]) -> str:
    if data["off"]:
        return "OFF: nothing is enforced"
    window = data["window"]
    if window is None:
        return "no window"
    if window.get("rebound"):
        return "caps rise slowly after a window"
    return f"window open for {format_duration(window['open_s'])}"


def _ask(path: Path) -> tuple[dict[str, Any], int] | str:
    """The answer to ``status`` and the uid of who gave it, or why there is none."""
    try:
        with connect(path) as connection:
            uid = peer_of(connection).uid
        reply = ask(path, "status", timeout_s=_PATIENCE_S)
    except UnreachableError as error:
        return f"{why_unreachable(error, path)}" + ("" if os.geteuid() == 0 else f" (asked as {whoami()})")
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not reply.ok or not isinstance(reply.data, dict):
        return f"{path}: {reply.message or 'no proper answer'}"
    return reply.data, uid
