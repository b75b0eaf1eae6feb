"""What commands that look at a site share: what they look at, and how findings are shown."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec
from rich.table import Table
from rich.text import Text

from ..bus.asking import NO, WRONG_USE
from ..config import Config
from ..controller.nodes import ConfigNodesError, declared_nodes
from ..node.paths import node_name as find_node_name
from .checks.everything import gather
from .checks.finding import Facts, Finding, Outcome
from .common import console, fail, given_path, print_json

_STYLES: dict[Outcome, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "unseen": "cyan"}

node_name_option = click.option(
    "--node-name", metavar="NAME", help="the node to look at; default $SLURMD_NODENAME, else this host's name"
)


def site_facts(context: click.Context, config: Config, node_name: str | None = None) -> Facts:
    """What the checks are given, for this node; ends the command if the config's nodes cannot be used."""
    try:
        declared = {name: view.gpus for name, view in declared_nodes(config).items()}
        node = find_node_name(node_name)
    except ConfigNodesError as error:
        fail(f"{given_path(context)}: {error}", WRONG_USE)
    except ValueError as error:
        fail(str(error), WRONG_USE)
    return gather(config, given_path(context), declared, node)


def show_findings(findings: Sequence[Finding], node: str, *, as_json: bool) -> int:
    """Print them, and give the exit code: 1 if a check failed, else 0."""
    counts = {outcome: sum(1 for found in findings if found.outcome == outcome) for outcome in _STYLES}
    if as_json:
        checks = [msgspec.to_builtins(finding) for finding in findings]
        print_json({"ok": not counts["fail"], "node": node, "counts": counts, "checks": checks})
    else:
        console().print(as_table(findings))
        click.echo(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return NO if counts["fail"] else 0


def as_table(findings: Sequence[Finding]) -> Table:
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
