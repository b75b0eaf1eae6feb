"""``slurm-pfi doctor``: what is installed, who may do what, what is missing."""

from __future__ import annotations

import click

from .checks.everything import run_checks
from .common import site_config
from .findings import node_name_option, show_findings, site_facts


@click.command(short_help="Check everything slurm-pfi needs and say what to do.")
@node_name_option
@click.option("--json", "as_json", is_flag=True, help="machine-readable output")
@click.pass_context
def doctor(context: click.Context, node_name: str | None, as_json: bool) -> int:
    """Look at everything slurm-pfi needs, and say what to do about what is missing.

    Changes nothing, and works as any user: what this user or host cannot see is told as 'unseen'. Ends with 0 if no
    check failed, else with 1; with 2 if the config cannot be used.
    """
    facts = site_facts(context, site_config(context), node_name)
    return show_findings(list(run_checks(facts)), facts.node, as_json=as_json)
