"""What the nodes drew before the window that is open, on disk, for a controller that restarts in it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from .sealed import read_sealed, write_sealed


class DrawBefore(msgspec.Struct, frozen=True, kw_only=True):
    """``by_node``: mean draw of each node's GPUs (mW), None when no window is remembered.

    ``held_until_unix_s``: until when the rebound after it holds the site at this; None as long as the window is open.
    """

    by_node: dict[str, int] | None = None
    held_until_unix_s: float | None = None


class DrawStore:
    """``draw_before.json``. Nothing is unsafe without it: caps then rise by the ramp alone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> DrawBefore:
        """What was saved last; without a file nothing is remembered. Raises UnreadableError."""
        return read_sealed(self._path, DrawBefore) or DrawBefore()

    def save(self, before: DrawBefore) -> None:
        """Make it durable. Raises OSError; the file is then as before."""
        write_sealed(self._path, before)
