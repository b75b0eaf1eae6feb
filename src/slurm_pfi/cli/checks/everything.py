"""All checks in the order in which an admin mends things."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ...config import Config
from . import daemons, gpus, hooks, reading, slurm
from .finding import Facts, Finding
from .slurmconf import parse_slurm_conf

CHECKS: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    daemons.config_file,
    slurm.modes,
    slurm.slurm_files,
    slurm.commands,
    reading.reading,
    slurm.slurmctld,
    slurm.users,
    slurm.risks,
    hooks.hooks,
    hooks.others,
    hooks.plugin,
    slurm.node_sets,
    gpus.gpus,
    daemons.folders,
    daemons.controller,
    daemons.agent,
)


HOOK_CHECKS: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    slurm.slurm_files,
    slurm.risks,
    hooks.hooks,
    hooks.others,
    hooks.plugin,
)
"""What 'slurm-pfi hooks check' looks at: files alone."""


def gather(config: Config, config_file: Path, declared: dict[str, int], node: str) -> Facts:
    """Read the files that several checks look at."""
    slurm_conf = Path(config.slurm.conf)
    slurm_text, slurm_said = _read(slurm_conf)
    gres_text, gres_said = _read(slurm_conf.with_name("gres.conf"))
    parsed = None
    if slurm_text is not None:
        parsed = parse_slurm_conf(slurm_text, include=lambda name: _read(slurm_conf.parent / name)[0])
    return Facts(
        config=config,
        config_file=config_file,
        declared=declared,
        node=node,
        is_node=node in declared or (parsed is not None and parsed.names_node(node)),
        slurm=parsed,
        slurm_said=slurm_said,
        gres_text=gres_text,
        gres_said=gres_said,
    )


def run_checks(
    facts: Facts, checks: Sequence[Callable[[Facts], Iterator[Finding]]] | None = None
) -> Iterator[Finding]:
    """Findings of these checks, or all; one that breaks is told as unseen and harms no other."""
    for check in CHECKS if checks is None else checks:
        try:
            yield from check(facts)
        except Exception as error:  # whatever a site's files may hold, the rest must be looked at
            name = f"{check.__module__.rsplit('.', 1)[-1]}.{check.__name__}"
            yield Finding(name, "unseen", f"this check broke: {error!r}", "please report this")


def _read(path: Path) -> tuple[str | None, str]:
    """The text, or None and why not."""
    try:
        return path.read_text(encoding="utf-8", errors="replace"), ""
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror}"
