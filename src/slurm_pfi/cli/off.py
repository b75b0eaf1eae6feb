"""``slurm-pfi off`` and ``on``: the red button."""

from __future__ import annotations

import click

from .common import ask_controller


@click.command()
@click.pass_context
def off(context: click.Context) -> None:
    """Stop enforcing: every GPU goes back to its prior limit. Limits stay known; 'slurm-pfi on' enforces them again."""
    click.echo(ask_controller(context, "off").message)


@click.command()
@click.pass_context
def on(context: click.Context) -> None:
    """Enforce the limits again after 'slurm-pfi off'."""
    click.echo(ask_controller(context, "on").message)
