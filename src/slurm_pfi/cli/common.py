"""What all commands share: the config, the question to the controller, how answers and errors are shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

from ..bus.control import NO, UNREACHABLE, WRONG_USE, Reply, ask
from ..bus.unix import UnreachableError
from ..config import Config, ConfigError, config_path, load_config

CONTROL_SOCKET = "control.sock"


def fail(message: str, exit_code: int) -> NoReturn:
    """End the command with one line on stderr."""
    click.echo(f"slurm-pfi: {message}", err=True)
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


def ask_controller(context: click.Context, command: str, args: dict[str, Any] | None = None) -> Reply:
    """Put a question to the controller; ends the command with 3 if it cannot be reached, 1 or 2 if it says no."""
    path = Path(site_config(context).controller.run_dir) / CONTROL_SOCKET
    try:
        reply = ask(path, command, args)
    except UnreachableError as error:
        fail(f"the controller cannot be reached: {error}. Is 'slurm-pfi controller' running?", UNREACHABLE)
    if not reply.ok:
        fail(reply.message, reply.exit_code or NO)
    return reply


def print_json(data: Any) -> None:
    """Machine-readable output: one JSON document."""
    click.echo(json.dumps(data, indent=2, sort_keys=True))


def table(title: str, columns: Iterable[tuple[str, str]], rows: Iterable[Iterable[str]]) -> Table:
    """A plain table; a column is (heading, "left" or "right")."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading, side in columns:
        made.add_column(heading, justify="right" if side == "right" else "left", no_wrap=side == "right")
    for row in rows:
        made.add_row(*row)
    return made


def console() -> Console:
    """Standard output; wide enough for a table when it is not a terminal."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=140)


def percent(share: float | None, digits: int = 1) -> str:
    """A share for people; ``?`` when unknown."""
    return "?" if share is None else f"{100 * share:.{digits}f} %"
