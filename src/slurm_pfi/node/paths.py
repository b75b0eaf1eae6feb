"""Where a node keeps what it has. One folder for each node, owned by the agent's user and written by nobody else."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..bus.unix import check_folder
from ..config import Config
from ..files import remove_temporaries_of_the_dead

BUS_SOCKET: Final = "bus.sock"
_NODE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Files of one node; ``folder`` is ``<node.state_dir>/<node name>``."""

    folder: Path

    @property
    def jobs(self) -> Path:
        return self.folder / "jobs"

    @property
    def lines(self) -> Path:
        """What jobs say at their end."""
        return self.folder / "lines"

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def released(self) -> Path:
        """There while an admin has taken the node from us: a new agent must not take it back. It goes with the boot."""
        return self.folder / "released"

    @property
    def audit(self) -> Path:
        return self.folder / "audit.jsonl"

    @property
    def control(self) -> Path:
        return self.folder / "control.sock"

    @property
    def progress(self) -> Path:
        return self.folder / "progress.sock"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.sock"

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def restorer_lock(self) -> Path:
        return self.folder / "restorer.lock"

    @property
    def restorer_log(self) -> Path:
        return self.folder / "restorer.log"

    def prepare(self) -> None:
        """Make the folders that are missing, 0755. Raises SocketError when one may be written by others.

        What an agent that was killed had half written goes.
        """
        check_folder(self.folder)
        check_folder(self.jobs)
        with contextlib.suppress(OSError):  # litter harms nobody
            folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                remove_temporaries_of_the_dead(folder_fd)
            finally:
                os.close(folder_fd)


def node_paths(config: Config, node: str) -> NodePaths:
    """The files of this node."""
    return NodePaths(folder=Path(config.node.state_dir) / node)


def node_name(given: str | None, environment: Mapping[str, str] | None = None) -> str:
    """The name given, else SLURMD_NODENAME, else the short host name. Raises ValueError on one that is no name."""
    environment = os.environ if environment is None else environment
    name = given or environment.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
    if _NODE_NAME.fullmatch(name) is None:
        raise ValueError(f"{name[:80]!r} is not a node name; give one with --node-name")
    return name
