"""``slurm-pfi hooks install``, ``remove`` and ``check``."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from ...bus.asking import NO, WRONG_USE
from ...config import Config
from ..checks import commands
from ..checks.everything import HOOK_CHECKS, run_checks
from ..checks.finding import Facts
from ..checks.slurmconf import SlurmConf, parse_show_config
from ..common import fail, site_config
from ..findings import node_name_option, show_findings, site_facts
from .act import PATIENCE_S, perform, told
from .plan import Plan, Site, changes, plan_install, plan_remove
from .safe import RefusedError
from .scripts import Settings

FOLDER: Final = "/usr/libexec/slurm-pfi"

_folder = click.option(
    "--folder",
    metavar="DIR",
    default=FOLDER,
    show_default=True,
    help="where our hooks lie if slurm.conf has no pattern such as prolog.d/*",
)
_dry = click.option("--dry-run", is_flag=True, help="say each step and change nothing")


@click.group(short_help="Put prolog and epilog on a node, or remove them.")
def hooks() -> None:
    """Put prolog and epilog among a node's hooks, or remove them.

    slurm.conf is yours: what it needs is said, never written.
    """


@hooks.command("install", short_help="Install or renew prolog and epilog on this node.")
@_folder
@click.option(
    "--wrapper", is_flag=True, help="if the site has one script: write another that runs it and ours"
)
@_dry
@click.pass_context
def install(context: click.Context, folder: str, wrapper: bool, dry_run: bool) -> None:
    """Install or renew prolog and epilog on this node, with the paths of the config in them.

    Where slurm.conf has a pattern (Prolog=/etc/slurm/prolog.d/*), ours goes into that folder: last of the prologs,
    first of the epilogs, and is in force at once. Else it goes into --folder, and the line that you add is said. Each
    file appears whole and executable. Run it again at any time: what is right is kept.
    """
    config = site_config(context)
    facts = site_facts(context, config)
    site = Site(_conf(facts), facts.slurm_conf, _given_folder(folder))
    settings = Settings(config.node.state_dir, config.node.hook_log)
    _do(lambda: plan_install(site, settings, wrap=wrapper), site, dry_run=dry_run)


@hooks.command("remove", short_help="Take prolog and epilog out of this node.")
@_folder
@click.option("--unasked", is_flag=True, help="do not insist on slurmctld's word that it names them no more")
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(min=0),
    default=PATIENCE_S,
    show_default=True,
    metavar="SECONDS",
    help="how long to wait for a moment without a hook",
)
@_dry
@click.pass_context
def remove(context: click.Context, folder: str, unasked: bool, patience_s: float, dry_run: bool) -> None:
    """Take prolog and epilog out of this node, and drain nothing.

    In a folder with a pattern a hook first becomes one that does nothing, and goes when slurmd does not look. The last
    file of a pattern stays, and so does what slurm.conf, slurmctld or a script of yours still names: it is said where.
    """
    config = site_config(context)
    facts = site_facts(context, config)
    site = Site(_conf(facts), facts.slurm_conf, _given_folder(folder), running_conf(config))
    _do(lambda: plan_remove(site, unasked=unasked), site, dry_run=dry_run, patience_s=patience_s)


@hooks.command("check", short_help="Look at hooks, sbatch plugin and the settings that matter to them.")
@node_name_option
@click.option(
    "--slurm-conf", metavar="FILE", help="judge this file, and the gres.conf beside it, instead of the site's"
)
@click.option("--json", "as_json", is_flag=True, help="machine-readable output")
@click.pass_context
def check(context: click.Context, node_name: str | None, slurm_conf: str | None, as_json: bool) -> int:
    """Look at hooks, sbatch plugin and the settings of slurm.conf and gres.conf that matter to them.

    Changes nothing, starts nothing, asks no daemon; 'slurm-pfi doctor' looks at all of this and more. Ends with 0 if no
    check failed, else with 1; with 2 if the config cannot be used.
    """
    config = site_config(context)
    if slurm_conf is not None:
        judged = msgspec.structs.replace(config.slurm, conf=str(Path(slurm_conf).absolute()))
        config = msgspec.structs.replace(config, slurm=judged)
    facts = site_facts(context, config, node_name)
    return show_findings(list(run_checks(facts, HOOK_CHECKS)), facts.node, as_json=as_json)


def running_conf(config: Config) -> SlurmConf | None:
    """What slurmctld runs with, None when it does not say."""
    ran = commands.run(config.slurm, "scontrol", "show", "config")
    if isinstance(ran, str) or ran.exit_code != 0:
        return None
    shown = parse_show_config(ran.out)
    # 24.11 leaves out a Prolog that is not set. This key stands below it in every version.
    return shown if "slurm_version" in shown.values else None


def _conf(facts: Facts) -> SlurmConf:
    """The site's slurm.conf as a whole: a part that cannot be read may name hooks. Ends the command without it."""
    if facts.slurm is None:
        fail(f"{facts.slurm_said}: name it in the config as slurm.conf", NO)
    if facts.slurm.unread:
        fail(
            f"{facts.slurm_conf} includes {', '.join(facts.slurm.unread)}, which cannot be read, and may name hooks",
            NO,
        )
    return facts.slurm


def _given_folder(given: str) -> Path:
    if not Path(given).is_absolute():
        fail(f"--folder {given}: give an absolute path", WRONG_USE)
    return Path(given)


def _do(make: Callable[[], Plan], site: Site, *, dry_run: bool, **more: Any) -> None:
    """Make the plan, then do it or tell it; ends the command with 1 where it refuses."""
    try:
        if not dry_run:
            _check_user(site)
        plan = make()
        if not plan.steps:
            click.echo("nothing of ours is here")
        if dry_run:
            for step in plan.steps:
                click.echo(told(step, done=False))
        else:
            perform(plan.steps, click.echo, **more)
    except RefusedError as error:
        fail(str(error), NO)
    if dry_run and changes(plan.steps):
        click.echo("nothing was changed")
    for line in plan.todo:
        click.echo(line if line.startswith(" ") else f"to do: {line}")


def _check_user(site: Site) -> None:
    """slurmd runs its hooks as SlurmdUser: theirs must be the files. Raises RefusedError."""
    user = site.conf.value("SlurmdUser", "root")
    try:
        uid = pwd.getpwnam(user).pw_uid
    except KeyError as error:
        raise RefusedError(f"SlurmdUser={user} is no user of this host") from error
    if os.geteuid() != uid:
        raise RefusedError(f"hooks run as {user} and must be that user's: run this as {user}")
