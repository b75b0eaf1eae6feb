"""How much time runs were given back, on disk: written ahead of each change, so that nothing is given twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ..model import Run
from .sealed import Versioned, read_versioned, write_sealed

KEEP_S: Final = 30 * 86_400.0
"""A run that is no longer known is forgotten after this: a node may be silent for long, with its job alive."""


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What one run was given in all, in seconds, an order under way included.

    ``old_s`` and ``new_s``: the limits before and after that order; None when it is known what became of it.
    """

    cluster: str
    job_id: int
    restart: int
    given_s: int
    unix_s: float
    old_s: int | None = None
    new_s: int | None = None

    @property
    def run(self) -> Run:
        return Run(self.cluster, self.job_id, self.restart)


class _Book(Versioned, frozen=True, kw_only=True):
    runs: tuple[Given, ...]


class GivenStore:
    """``time_given.json``. A file that cannot be read never means "nothing": then no time limit is raised.

    Call ``load`` first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: dict[Run, Given] | None = None

    def load(self) -> None:
        """Read the file; without one nothing was given yet. Raises UnreadableError, and ``of`` is None from then on."""
        self._runs = None
        book = read_versioned(self._path, _Book) or _Book(version=1, runs=())
        self._runs = {given.run: given for given in book.runs}

    def of(self, run: Run) -> int | None:
        """What a run has, in seconds: its job's earlier runs included, whose limit it still has. None: not known."""
        if self._runs is None:
            return None
        return sum(
            given.given_s
            for known, given in self._runs.items()
            if (known.cluster, known.job_id) == (run.cluster, run.job_id) and known.restart <= run.restart
        )

    def under_way(self, run: Run) -> Given | None:
        """The order of which nobody knows yet what became of it."""
        given = (self._runs or {}).get(run)
        return given if given is not None and given.new_s is not None else None

    def begin(
        self, run: Run, old_s: int, new_s: int, now_unix_s: float, is_alive: Callable[[Run], bool]
    ) -> None:
        """Put on record that a limit is about to be raised. Raises OSError: then it must not be."""
        known = self._known()
        own = known.get(run)
        before_s = 0 if own is None else own.given_s
        given = Given(
            cluster=run.cluster,
            job_id=run.job_id,
            restart=run.restart,
            given_s=before_s + new_s - old_s,
            unix_s=now_unix_s,
            old_s=old_s,
            new_s=new_s,
        )
        kept = {
            other: one
            for other, one in known.items()
            if now_unix_s - one.unix_s < KEEP_S or is_alive(other) or other.job_id == run.job_id
        }
        self._write({**kept, run: given})

    def end(self, run: Run, *, done: bool) -> None:
        """What became of it: done, or surely not. Raises OSError; then it counts as done."""
        known = self._known()
        given = known.get(run)
        if given is None or given.old_s is None or given.new_s is None:
            return
        taken_s = 0 if done else given.new_s - given.old_s
        given = msgspec.structs.replace(given, given_s=given.given_s - taken_s, old_s=None, new_s=None)
        self._write({**known, run: given})

    def _known(self) -> dict[Run, Given]:
        if self._runs is None:
            raise OSError(f"{self._path} could not be read")
        return self._runs

    def _write(self, runs: dict[Run, Given]) -> None:
        write_sealed(self._path, _Book(version=1, runs=tuple(runs.values())), mode=0o640)
        self._runs = runs
