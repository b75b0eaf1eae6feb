"""The controller's answer to a question that Slurm alone could answer in part; loads little."""

from __future__ import annotations

import os
from typing import Any, Final

import click

from ..bus.asking import Reply
from ..bus.unix import UnreachableError
from ..config import PATH_VARIABLE, Config
from .common import ask_at, control_path, given_path, site_config, why_unreachable

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
    file = given_path(context)
    named = context.find_root().params.get("config") or os.environ.get(PATH_VARIABLE)
    if not named and not os.access(file, os.R_OK):
        raise NoControllerError(f"this host has no {file} that you may read", None)
    config = site_config(context)
    path = control_path(config)
    try:
        return ask_at(path, command, args)
    except UnreachableError as error:
        raise NoControllerError(why_unreachable(error, path), config) from error
