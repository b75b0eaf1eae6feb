"""``slurm-pfi node``: shown among the commands here; the entry point hands it over before click is loaded."""

from __future__ import annotations

import click

from ..node.command import main


@click.command(
    "node",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="The agent of this GPU node: run, status, release, resume.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def node(context: click.Context, words: tuple[str, ...]) -> int:
    """The agent of this GPU node, run as root: run, status, release, resume."""
    config = context.find_root().params.get("config")
    return main([*(() if config is None else ("--config", str(config))), *words])
