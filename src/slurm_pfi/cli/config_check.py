"""``slurm-pfi config check``: is this file usable, and what would it mean?"""

from __future__ import annotations

import click
import msgspec

from ..bus.control import WRONG_USE
from ..controller.nodes import ConfigNodesError, declared_nodes
from .common import fail, given_path, print_json, site_config


@click.group()
def config() -> None:
    """Work on the config file."""


@config.command("check")
@click.option("--json", "as_json", is_flag=True, help="print the whole config as it is understood")
@click.pass_context
def check(context: click.Context, as_json: bool) -> None:
    """Read the config as the daemons would, and say what is wrong with it."""
    read = site_config(context)
    try:
        nodes = declared_nodes(read)
    except ConfigNodesError as error:
        fail(f"{given_path(context)}: {error}", WRONG_USE)
    if as_json:
        print_json(msgspec.to_builtins(read))
        return
    enforced = sum(1 for node in nodes.values() if node.mode == "enforce")
    click.echo(
        f"{given_path(context)}: fine. Cluster {read.cluster}, policy {read.policy.name}, "
        f"{len(nodes)} nodes ({enforced} enforce, {len(nodes) - enforced} observe)."
    )
