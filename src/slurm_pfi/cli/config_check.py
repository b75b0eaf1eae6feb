"""``slurm-pfi config check``: is this file usable, and what would it mean?"""

from __future__ import annotations

import click
import msgspec

from ..bus.control import WRONG_USE
from ..config import Config
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
    if read.controller.curves is not None:
        _check_curves(read, context)
    if as_json:
        print_json(msgspec.to_builtins(read))
        return
    enforced = sum(1 for node in nodes.values() if node.mode == "enforce")
    click.echo(
        f"{given_path(context)}: fine. Cluster {read.cluster}, policy {read.policy.name}, "
        f"{len(nodes)} nodes ({enforced} enforce, {len(nodes) - enforced} observe)."
    )


def _check_curves(read: Config, context: click.Context) -> None:
    """The site's own curves as the controller would read them; says what of them is of no use."""
    from ..controller.science import site_library
    from ..elasticity.library import LibraryError

    try:
        library = site_library(read)
    except LibraryError as error:
        fail(f"{given_path(context)}: controller.curves: {error}", WRONG_USE)
    for curve_id, reason in library.left_out:
        click.echo(f"slurm-pfi: curve {curve_id} does not count: {reason}", err=True)
