"""What a controller leaves for one that starts after it in the same boot: the draw before a window, runs' records."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import structlog

from ..store.draws import DrawBefore, DrawStore
from ..store.rows import KeptRecord, Row
from ..store.sealed import UnreadableError
from .ledger import NS_PER_S
from .measuring.record import Record
from .state import RunView, State

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

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


# -------------------------------------------------------------------------------------------------- runs' records


def host_boot_id() -> str:
    """Which boot of this host it is: only in the same one do times of the monotonic clock mean the same. Else empty."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def kept_records(views: Iterable[RunView], boot_id: str, now_unix_s: float) -> list[Row]:
    """What was measured of these runs, for the history; nothing where the boot is not known."""
    return [
        KeptRecord(
            run=str(view.run),
            boot_id=boot_id,
            unix_s=now_unix_s,
            value=msgspec.json.encode(view.record),
        )
        for view in views
        if boot_id and view.phase in ("admitted", "waiting") and view.record.last_ns is not None
    ]


def read_record(value: bytes | None) -> Record | None:
    """A record as it was kept; None for none, and for one that another version of this program wrote."""
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=Record)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def with_kept(view: RunView, kept: Record | None) -> RunView:
    """A run that an earlier controller measured goes on from there; time that nobody saw is a gap in its record."""
    if kept is None or kept.last_ns is None or kept.last_ns >= view.first_seen_ns:
        return view
    return msgspec.structs.replace(view, record=kept)
