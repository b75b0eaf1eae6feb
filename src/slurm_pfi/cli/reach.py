"""The controller's answer to a question that Slurm alone could answer in part; loads little."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import click

from ..bus.asking import NO, Reply, ask
from ..bus.unix import UnreachableError
from ..config import PATH_VARIABLE, Config
from .common import CONTROL_SOCKET, fail, given_path, site_config, why_unreachable

SOURCES: Final = {
    "controller": "from the controller",
    "squeue": "from Slurm's AdminComment (squeue)",
    "sacct": "from Slurm's accounting (sacct)",
}
"""Where an answer came from, in words, by the word in ``source``."""


class NoControllerError(Exception):
    """The controller cannot be asked from here; the message says why. ``config`` is the site's, if this host has it."""

    def __init__(self, why: str, config: Config | None) -> None:
        super().__init__(why)
        self.config = config


def ask_or_leave(context: click.Context, command: str, args: dict[str, Any]) -> Reply:
    """The controller's answer. Raises NoControllerError where there is none; ends the command when it says no."""
    path = given_path(context)
    named = context.find_root().params.get("config") or os.environ.get(PATH_VARIABLE)
    if not named and not os.access(path, os.R_OK):
        raise NoControllerError(f"this host has no {path} that you may read", None)
    config = site_config(context)
    socket = Path(config.controller.run_dir) / CONTROL_SOCKET
    try:
        reply = ask(socket, command, args)
    except UnreachableError as error:
        raise NoControllerError(why_unreachable(error, socket), config) from error
    if not reply.ok:
        fail(reply.message, reply.exit_code or NO)
    return reply
