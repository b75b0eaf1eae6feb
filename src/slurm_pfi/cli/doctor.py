"""``slurm-pfi doctor``: what is installed, who may do what, what is missing."""

from __future__ import annotations

import click
import msgspec
from rich.table import Table
from rich.text import Text

from ..bus.asking import NO, WRONG_USE
from ..controller.nodes import ConfigNodesError, declared_nodes
from ..node.paths import node_name as find_node_name
from .checks.everything import gather, run_checks
from .checks.finding import Finding, Outcome
from .common import console, fail, given_path, print_json, site_config

_STYLES: dict[Outcome, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "unseen": "cyan"}


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
    counts = {outcome: sum(1 for f in findings if f.outcome == outcome) for outcome in _STYLES}
    if as_json:
        checks = [msgspec.to_builtins(finding) for finding in findings]
        print_json({"ok": not counts["fail"], "node": node, "counts": counts, "checks": checks})
    else:
        out = console()
        out.print(as_table(findings))
        out.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return NO if counts["fail"] else 0


def as_table(findings: list[Finding]) -> Table:
    """One row for each finding; the long column wraps within itself, what to do stands below what was found."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for finding in findings:
        said = Text(finding.found)
        if finding.todo and finding.outcome != "ok":
            said.append(f"\n-> {finding.todo}", style="bold")
        made.add_row(Text(finding.outcome, style=_STYLES[finding.outcome]), Text(finding.check), said)
    return made
