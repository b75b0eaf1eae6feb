"""The red button, kept on disk: who switched everything off must not find it on again after a restart."""

from __future__ import annotations

from pathlib import Path

import msgspec

from .sealed import read_sealed, write_sealed


class _SwitchBody(msgspec.Struct, frozen=True, kw_only=True):
    off: bool


class OffSwitch:
    """``off.json``. A damaged file is neither on nor off: then nobody commands until an admin has looked."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> bool:
        """Whether everything is off; without a file it is not. Raises UnreadableError."""
        body = read_sealed(self._path, _SwitchBody)
        return body is not None and body.off

    def save(self, *, off: bool) -> None:
        """Make it durable. Raises OSError; the file is then as before."""
        write_sealed(self._path, _SwitchBody(off=off))
