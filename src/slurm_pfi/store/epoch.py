"""What a controller must not forget over a restart: its epoch, and whom it ever commanded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from ..model import GpuId
from .sealed import UnreadableError, Versioned, read_sealed, read_versioned, write_sealed

MAX_RAISE: Final = 1000
"""A report may raise the epoch by this much at most, so that no node can use up the numbers."""

MAX_EPOCH: Final = 2**53 - 1
BOOTS_KEPT: Final = 16
"""Boots remembered for each node. Caps end with the boot; an older one cannot report any more."""


class _EpochBody(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int


class EpochStore:
    """The fencing number in ``epoch.json``. Raises UnreadableError when the file is damaged: then nobody commands."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def first_start(self) -> bool:
        """Whether no controller has ever commanded from here."""
        return self.current() == 0

    def current(self) -> int:
        """The last epoch taken; 0 before the first."""
        body = read_sealed(self._path, _EpochBody)
        if body is None:
            return 0
        if not 0 <= body.epoch <= MAX_EPOCH:
            raise UnreadableError(f"{self._path} is damaged: epoch {body.epoch}")
        return body.epoch

    def next_epoch(self, highest_reported: int = 0) -> int:
        """Take the next epoch; it is on disk before it is returned. Raises UnreadableError, OSError.

        ``highest_reported``: the highest that a node has seen; what exceeds ours by more than 1,000 is cut.
        """
        stored = self.current()
        epoch = max(stored, min(highest_reported, stored + MAX_RAISE)) + 1
        write_sealed(self._path, _EpochBody(epoch=epoch))
        return epoch


@dataclass(frozen=True, slots=True)
class NeverCommanded:
    """No enforcing plan ever went to this boot of this node: what its GPUs have is not ours."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The node was commanded, but this prior limit is not recorded; or the record cannot be read."""


Prior: TypeAlias = int | NeverCommanded | Unknown


class _Boot(msgspec.Struct, frozen=True, kw_only=True):
    boot_id: str
    priors_mw: dict[GpuId, int]


class _CommandedBody(Versioned, frozen=True, kw_only=True):
    nodes: dict[str, tuple[_Boot, ...]]


class CommandedStore:
    """``commanded.json``: the boots that ever got an enforcing plan, with a copy of their priors.

    ``mark_commanded`` comes before the first enforcing plan to a boot is sent. A damaged file is said in ``trouble``
    and makes every answer Unknown; what comes in from then on is kept in memory only, until the file is put aside.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._boots: dict[str, tuple[_Boot, ...]] = {}
        self.trouble = ""

    def load(self) -> None:
        """Read the file; none means that nobody was ever commanded. Never raises: see ``trouble``."""
        self._boots, self.trouble = {}, ""
        try:
            body = read_versioned(self._path, _CommandedBody)
        except UnreadableError as error:
            self.trouble = str(error)
            return
        if body is not None:
            self._boots = dict(body.nodes)

    def is_commanded(self, node: str, boot_id: str) -> bool:
        """Whether this boot is on record as commanded."""
        return self._find(node, boot_id) is not None

    def mark_commanded(self, node: str, boot_id: str, priors_mw: Mapping[GpuId, int] | None = None) -> None:
        """Record, durably, that this boot is about to be commanded. Raises OSError: then send no enforcing plan."""
        if self.is_commanded(node, boot_id):
            if priors_mw:
                self.update_priors(node, boot_id, priors_mw)
            return
        self.mark_all([(node, boot_id, priors_mw or {})])

    def mark_all(self, boots: Iterable[tuple[str, str, Mapping[GpuId, int]]]) -> None:
        """``mark_commanded`` of many (node, boot id, priors) with one write: a site begins with all its nodes."""
        newer = dict(self._boots)
        for node, boot_id, priors_mw in boots:
            if not self.is_commanded(node, boot_id):
                boot = _Boot(boot_id=boot_id, priors_mw=dict(priors_mw))
                newer[node] = (*newer.get(node, ()), boot)[-BOOTS_KEPT:]
        self._replace(newer)

    def update_priors(self, node: str, boot_id: str, priors_mw: Mapping[GpuId, int]) -> bool:
        """Copy the priors that a report names; True if something was new. Ignored for a boot never commanded.

        Priors that the report does not name are kept. Raises OSError; memory and file are then as before.
        """
        boot = self._find(node, boot_id)
        if boot is None or all(boot.priors_mw.get(uuid) == prior for uuid, prior in priors_mw.items()):
            return False
        newer = _Boot(boot_id=boot_id, priors_mw={**boot.priors_mw, **priors_mw})
        self._save(node, tuple(newer if other is boot else other for other in self._boots[node]))
        return True

    def prior_for(self, node: str, boot_id: str, uuid: GpuId) -> Prior:
        """Milliwatts of one GPU's prior limit, NeverCommanded, or Unknown. Never a guess."""
        boot = self._find(node, boot_id)
        if boot is None:
            return Unknown() if self.trouble else NeverCommanded()
        return boot.priors_mw.get(uuid, Unknown())

    def set_aside(self, *, now_unix_s: float) -> Path | None:
        """An admin's explicit word that a damaged file may go. Returns where it is now; None if all is in order."""
        if not self.trouble:
            return None
        aside = self._path.with_name(f"{self._path.name}.damaged-{now_unix_s:.0f}")
        self._path.rename(aside)
        self.trouble = ""
        self._write(self._boots)
        return aside

    def _find(self, node: str, boot_id: str) -> _Boot | None:
        return next((boot for boot in self._boots.get(node, ()) if boot.boot_id == boot_id), None)

    def _save(self, node: str, boots: tuple[_Boot, ...]) -> None:
        self._replace({**self._boots, node: boots[-BOOTS_KEPT:]})

    def _replace(self, newer: dict[str, tuple[_Boot, ...]]) -> None:
        if not self.trouble:
            self._write(newer)
        self._boots = newer

    def _write(self, boots: dict[str, tuple[_Boot, ...]]) -> None:
        write_sealed(self._path, _CommandedBody(version=1, nodes=boots))
