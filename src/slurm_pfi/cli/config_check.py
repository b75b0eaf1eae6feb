"""``slurm-pfi config check``: is this file usable, and what would it mean?"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
import msgspec

from ..bus.asking import WRONG_USE
from ..config import Config
from ..controller.nodes import ConfigNodesError, declared_nodes
from .common import fail, given_path, print_json, site_config

_MOST_NAMED: Final = 5


@click.group()
def config() -> None:
    """Work on the config file."""


@config.command("check", short_help="Read the config as the daemons would; say what is wrong.")
@click.option("--json", "as_json", is_flag=True, help="print the whole config as it is understood")
@click.option(
    "--for",
    "daemon",
    type=click.Choice(["node", "controller"]),
    default="controller",
    help="as which daemon would read it: a node does not read the files that the controller names",
)
@click.pass_context
def check(context: click.Context, as_json: bool, daemon: str) -> None:
    """Read the config as the daemons would, and say what is wrong with it."""
    read = site_config(context)
    try:
        nodes = declared_nodes(read)
    except ConfigNodesError as error:
        fail(f"{given_path(context)}: {error}", WRONG_USE)
    if daemon == "controller" and read.controller.curves is not None:
        _check_curves(read, context, to_stderr=as_json)
    if as_json:
        print_json(msgspec.to_builtins(read))
        return
    none = "" if nodes else " Without a [[node_set]] nothing is managed: add one."
    enforced = sum(1 for node in nodes.values() if node.mode == "enforce")
    click.echo(
        f"{given_path(context)}: fine. Cluster {read.cluster}, policy {read.policy.name}, "
        f"{len(nodes)} nodes ({enforced} enforce, {len(nodes) - enforced} observe).{none}"
    )


def _check_curves(read: Config, context: click.Context, *, to_stderr: bool) -> None:
    """Say what of the site's own curves joins the library as the controller would read it, and what does not."""
    from ..controller.science import site_library
    from ..elasticity.library import Library, LibraryError

    try:
        library = site_library(read)
    except LibraryError as error:
        fail(f"{given_path(context)}: controller.curves: {error}", WRONG_USE)
    shipped = Library.load_default()
    joined = library.curves[len(shipped.curves) :]
    left_out = library.left_out[len(shipped.left_out) :]
    named = [f"{curve.curve_id}, {curve.gpu_model}" for curve in joined[:_MOST_NAMED]]
    if len(joined) > _MOST_NAMED:
        named.append(f"{len(joined) - _MOST_NAMED} more")
    count = len(joined) + len(left_out)
    text = (
        f"{Path(read.controller.curves or '')}: {len(joined)} of {count} curve{'' if count == 1 else 's'} "
        f"{'joins' if len(joined) == 1 else 'join'} the library ({'; '.join(named)})."
    )
    lost = [f"{curve_id or 'a row without a name'} does not: {reason}." for curve_id, reason in left_out]
    # One goes on the same line, several are read better below it.
    click.echo(" ".join([text, *lost]) if len(lost) == 1 else "\n  ".join([text, *lost]), err=to_stderr)
