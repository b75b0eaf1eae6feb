"""``slurm-pfi doctor``: what is installed, who may do what, what is missing."""

from __future__ import annotations

import click

from ..bus.asking import WRONG_USE
from ..controller.nodes import ConfigNodesError, declared_nodes
from ..node.paths import node_name as find_node_name
from .checks.everything import gather, run_checks
from .common import fail, given_path, site_config
from .findings import show_findings


@click.command(short_help="Check everything slurm-pfi needs and say what to do.")
@click.option(
    "--node-name", metavar="NAME", help="the node to look at; default $SLURMD_NODENAME, else this host's name"
)
@click.option("--json", "as_json", is_flag=True, help="machine-readable output")
@click.pass_context
def doctor(context: click.Context, node_name: str | None, as_json: bool) -> int:
    """Look at everything slurm-pfi needs, and say what to do about what is missing.

    Changes nothing, and works as any user: what this user or host cannot see is told as 'unseen'. Ends with 0 if no
    check failed, else with 1; with 2 if the config cannot be used.
    """
    config = site_config(context)
    try:
        declared = {name: view.gpus for name, view in declared_nodes(config).items()}
        node = find_node_name(node_name)
    except ConfigNodesError as error:
        fail(f"{given_path(context)}: {error}", WRONG_USE)
    except ValueError as error:
        fail(str(error), WRONG_USE)
    findings = list(run_checks(gather(config, given_path(context), declared, node)))
    return show_findings(findings, node, as_json=as_json)
