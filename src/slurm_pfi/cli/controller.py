"""``slurm-pfi controller``: run the commanding daemon."""

from __future__ import annotations

import click

from .common import given_path, site_config


@click.command()
@click.pass_context
def controller(context: click.Context) -> int:
    """Run the controller in the foreground, as SlurmUser."""
    from ..controller.shell import run_controller

    return run_controller(site_config(context), given_path(context))
