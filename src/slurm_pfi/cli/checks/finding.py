"""What a check hands back, and what all checks are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ...config import Config
from .slurmconf import SlurmConf

Outcome: TypeAlias = Literal["ok", "warn", "fail", "unseen"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer. ``unseen``: this user, or this host, cannot tell; it is never taken for fine."""

    check: str
    outcome: Outcome
    found: str
    todo: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Read once, before the checks. A text that could not be read is None, and ``*_said`` says why.

    ``declared``: GPUs of every node that the config names. ``is_node``: this host, or the node asked for, runs jobs.
    """

    config: Config
    config_file: Path
    declared: Mapping[str, int]
    node: str
    is_node: bool
    slurm: SlurmConf | None
    slurm_said: str
    gres_text: str | None
    gres_said: str

    @property
    def slurm_conf(self) -> Path:
        return Path(self.config.slurm.conf)
