"""What all commands share: the config, the question to the controller, how answers and errors are shown."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import click

from ..bus.asking import NO, UNREACHABLE, WRONG_USE, Reply, ask
from ..bus.unix import UnreachableError
from ..config import Config, ConfigError, config_path, load_config

if TYPE_CHECKING:
    from rich.console import Console

CONTROL_SOCKET: Final = "control.sock"
SIMULATED: Final = "SIMULATED GPUs: these are figures of a simulation, not of hardware."
_PIPE_WIDTH: Final = 1000
"""Columns where there is no terminal: nothing is cut for the next program."""


def fail(message: str, exit_code: int) -> NoReturn:
    """End the command with one line on stderr."""
    click.echo(f"slurm-pfi: {' '.join(message.splitlines())}", err=True)
    sys.exit(exit_code)


def site_config(context: click.Context) -> Config:
    """The config named by ``--config``, the environment, or the default; ends the command if it is unusable."""
    try:
        return load_config(given_path(context))
    except ConfigError as error:
        fail(str(error), WRONG_USE)


def given_path(context: click.Context) -> Path:
    """The config file that this command line means."""
    return config_path(context.find_root().params.get("config"))


def control_path(config: Config) -> Path:
    """The controller's socket for questions."""
    return Path(config.controller.run_dir) / CONTROL_SOCKET


def ask_controller(context: click.Context, command: str, args: dict[str, Any] | None = None) -> Reply:
    """Put a question to the controller; ends the command with 3 if it cannot be reached, 1 or 2 if it says no."""
    path = control_path(site_config(context))
    try:
        return ask_at(path, command, args)
    except UnreachableError as error:
        fail(f"the controller cannot be reached: {why_unreachable(error, path)}", UNREACHABLE)


def ask_at(path: Path, command: str, args: dict[str, Any] | None = None) -> Reply:
    """The answer at this socket; ends the command if it is no. Raises UnreachableError."""
    reply = ask(path, command, args)
    if not reply.ok:
        fail(reply.message, reply.exit_code or NO)
    return reply


def why_unreachable(error: UnreachableError, path: Path) -> str:
    """What is in the way to a daemon's socket, and what to do about it."""
    cause = error.__cause__
    match cause.errno if isinstance(cause, OSError) else None:
        case errno.ENOENT:
            return f"{path} is not there: ask on the host where it runs, start it, or name its folder in the config"
        case errno.ECONNREFUSED:
            return f"nobody listens at {path}; it has ended: start it again and see its log"
        case errno.EACCES:
            return (
                f"uid {os.geteuid()} may not open {path}; let users into its folder: chmod 0755 {path.parent}"
            )
    return str(error)


def print_json(data: Any) -> None:
    """Machine-readable output: one JSON document."""
    click.echo(json.dumps(data, indent=2, sort_keys=True))


class Screen:
    """Standard output for lines of text: as wide as the terminal; without one nothing is cut, unless COLUMNS says so.

    Who asks a short question does not wait until rich is loaded.
    """

    def __init__(self) -> None:
        known = os.environ.get("COLUMNS", "").isdigit() or sys.stdout.isatty()
        self.width = shutil.get_terminal_size().columns if known else _PIPE_WIDTH

    def print(
        self,
        text: str = "",
        *,
        style: Literal["", "bold", "dim"] = "",
        markup: Literal[False] = False,
        soft_wrap: bool = False,
    ) -> None:
        """One line, broken between words where it is too long and not ``soft_wrap``. There is never any markup."""
        whole = soft_wrap or len(text) <= self.width
        for line in [text] if whole else textwrap.wrap(text, self.width, break_on_hyphens=False):
            click.echo(click.style(line, **{style: True}) if style else line)


def tell(message: str) -> None:
    """What a daemon said, its lines broken where the terminal ends."""
    out = Screen()
    for line in message.splitlines():
        out.print(line)


def console() -> Console:
    """Standard output as rich writes it; as wide as `Screen`."""
    from rich.console import Console

    made = Console(highlight=False, emoji=False)
    if made.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return made
    return Console(highlight=False, emoji=False, width=_PIPE_WIDTH)


def job_name(run: str, names: Mapping[str, str]) -> str:
    """``cluster:1234.0`` as Slurm's commands name the job, with the restart if there was one: ``1234``, ``80+1.1``.

    ``names``: how a task of an array (``77_3``) or a component (``80+1``) is named, by run.
    """
    job, _, restart = run.rpartition(":")[2].partition(".")
    name = names.get(run) or job
    return name if restart in ("", "0") else f"{name}.{restart}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share for people; ``?`` when unknown."""
    return "?" if share is None else f"{round(100 * share, digits) + 0.0:.{digits}f} %"
