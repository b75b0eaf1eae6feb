"""The command line: one module per command, put together here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import click

from .. import __version__
from ..bus.asking import WRONG_USE

_MODULES: Final = {
    "config": "config_check",
    "controller": "controller",
    "doctor": "doctor",
    "fit-predictor": "fit_predictor",
    "hooks": "hooks.command",
    "job": "job",
    "jobs": "jobs",
    "limit": "limit",
    "node": "node",
    "off": "off",
    "offer": "offer",
    "on": "off",
    "pfi": "pfi",
    "report": "report.command",
    "status": "status",
    "study": "study",
    "what-if": "what_if",
    "top": "top",
}
"""Which module has a command: it is imported when the command is used, so that nobody waits for what others need."""


class _Commands(click.Group):
    """A group that imports a command when it is used, or all of them to list them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module = import_module(f".{_MODULES[cmd_name]}", __package__)
        found: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return found


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    metavar="FILE",
    help="the site's config; default $SLURM_PFI_CONF or /etc/slurm-pfi/slurm-pfi.toml",
)
@click.version_option(__version__, prog_name="slurm-pfi")
def root(config: str | None) -> None:
    """Hold a site power limit on a Slurm GPU cluster and lose the least work.

    The agent of a GPU node is 'slurm-pfi node' (see 'slurm-pfi node --help').

    Exit codes: 0 done, 1 the answer is no, 2 wrong use, 3 a component cannot be reached.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; exit codes: 0 done, 1 no, 2 wrong use, 3 a component cannot be reached."""
    try:
        result: Any = root.main(
            None if argv is None else list(argv), prog_name="slurm-pfi", standalone_mode=False
        )
    except click.exceptions.Abort:
        click.echo("slurm-pfi: interrupted", err=True)
        return 130
    except click.ClickException as error:
        click.echo(usage_line(error), err=True)
        return WRONG_USE if isinstance(error, click.UsageError) else error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    return result if isinstance(result, int) else 0


def usage_line(error: click.ClickException) -> str:
    """One line: what is wrong and where to read on. A group without a command shows its help instead."""
    message = error.format_message()
    if message.startswith("Usage:"):
        return message
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context is not None else "slurm-pfi"
    text = " ".join(message.split()).rstrip(".")
    see = " See" if text.endswith("?") else "; see"
    return f"slurm-pfi: {text[:1].lower()}{text[1:]}{see} '{path} --help'"
