"""The draw before a window, kept for a controller that restarts inside it or in the rebound after it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog

from ..store.draws import DrawBefore, DrawStore
from ..store.sealed import UnreadableError
from .ledger import NS_PER_S
from .state import State

log = structlog.get_logger("controller")


class RememberedDraws:
    """Writes only when something has changed: as a window opens, as its rebound begins, and when both are over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._store = DrawStore(path)
        self._kept: tuple[dict[str, int] | None, int | None] | None = None

    def recall(self, state: State, now_ns: int, now_unix_s: float) -> State:
        """The state with what a predecessor left. What cannot be read is unknown, and said."""
        try:
            left = self._store.load()
        except UnreadableError as error:
            log.warning(
                f"{error}; what the site drew before a window is unknown: after it caps rise by the ramp alone"
            )
            left = DrawBefore()
        until_ns = None
        if left.held_until_unix_s is not None:
            until_ns = now_ns + round((left.held_until_unix_s - now_unix_s) * NS_PER_S)
        self._kept = (left.by_node, until_ns)
        return msgspec.structs.replace(state, draw_before=left.by_node, held_until_ns=until_ns)

    def keep(self, state: State, now_ns: int, now_unix_s: float) -> None:
        """Save what a successor would need, if it has changed."""
        rebound = state.rebound
        until_ns = None if rebound is None or state.draw_before is None else rebound.until_ns
        if not state.planned or self._kept == (state.draw_before, until_ns):
            return
        self._kept = (state.draw_before, until_ns)
        until_unix_s = None if until_ns is None else now_unix_s + (until_ns - now_ns) / NS_PER_S
        try:
            self._store.save(DrawBefore(by_node=state.draw_before, held_until_unix_s=until_unix_s))
        except OSError as error:
            log.warning(f"{self._path} is not written, and forgotten when the controller restarts: {error}")
