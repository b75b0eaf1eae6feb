"""One line on stderr for each change: ``level event key=value ...``, for the journal of systemd or a file.

structlog is not used here: where rich is installed it imports it, and this process runs as root with little in it.
"""

from __future__ import annotations

import json
import sys
from typing import Final, TextIO

# systemd reads the level from this prefix (sd-daemon(3)) and strips it.
_PREFIX: Final = {"info": "<6>", "warning": "<4>", "error": "<3>"}


class Log:
    """Writes lines; never raises into the caller, whatever becomes of the stream."""

    def __init__(self, *, prefixed: bool, stream: TextIO | None = None) -> None:
        self._prefixed = prefixed
        self._stream = stream

    def info(self, event: str, **fields: object) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        prefix = _PREFIX[level] if self._prefixed else ""
        words = [f"{key}={_quoted(value)}" for key, value in fields.items()]
        stream = self._stream or sys.stderr
        try:
            stream.write(f"{prefix}{level} {event}{''.join(' ' + word for word in words)}\n")
            stream.flush()
        except (OSError, ValueError):
            return  # nobody reads the log any more; limits must still be kept


def _quoted(value: object) -> str:
    """Text of others on one line, without a way to forge another."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "-"
    text = str(value)
    plain = text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if plain and text else json.dumps(text)
