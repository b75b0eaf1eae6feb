"""The audit log: one JSON object a line, appended with one write each.

A full disk never stops a daemon and is never silent: the fault is told once, what is lost is counted, and the
first line after it says how many are missing.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_ENVELOPE: Final = frozenset({"mono_ns", "unix_s", "actor", "event"})


class AuditLog:
    """One daemon's file; nothing here raises into the caller.

    ``actor`` is ``controller`` or ``node:<name>``. ``on_fault(text)`` is called once when writing begins to fail and
    once when it works again. With ``max_bytes`` a file that has grown beyond is kept as ``<name>.1``, in place of the
    one before, and a new one begun.
    """

    def __init__(
        self,
        path: Path,
        actor: str,
        *,
        on_fault: Callable[[str], None] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._path = path
        self._actor = actor
        self._on_fault = on_fault
        self._max_bytes = max_bytes
        self._bytes = 0
        self._descriptor: int | None = None
        self._failing = False
        self._unsaid = 0
        self._torn = False
        self.lost = 0
        """Lines that could not be written since the start."""
        self.reopen()

    def write(
        self,
        event: str,
        fields: Mapping[str, object] | None = None,
        *,
        mono_ns: int | None = None,
        unix_s: float | None = None,
    ) -> bool:
        """Append one line; False if it is lost. Times are now unless given (CLOCK_MONOTONIC ns, Unix seconds)."""
        if self._descriptor is None and not self.reopen():
            self._lose()
            return False
        gap = [self._line("audit_gap", {"lost": self._unsaid})] if self._unsaid else []
        try:
            line = self._line(event, fields or {}, mono_ns=mono_ns, unix_s=unix_s)
            self._append(b"".join([*gap, line]))
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            self._fail(f"the audit log {self._path} cannot be written: {error}; lines are lost until it can")
            self._lose()
            return False
        self._unsaid = 0
        if self._max_bytes is not None and self._bytes > self._max_bytes:
            self._begin_anew()
        if self._failing:
            self._failing = False
            self._say(f"the audit log {self._path} is written again; {self.lost} lines are lost")
        return True

    def reopen(self) -> bool:
        """Open the path anew, after logrotate has renamed the file. On failure the old file stays in use."""
        try:
            descriptor = os.open(self._path, _FLAGS, 0o640)
        except OSError as error:
            self._fail(
                f"the audit log {self._path} cannot be opened: {error.strerror}; make its folder writable"
            )
            return False
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            self._fail(f"the audit log {self._path} is not a regular file; move it away")
            return False
        self.close()
        self._descriptor = descriptor
        self._bytes = os.fstat(descriptor).st_size
        self._torn = _ends_torn(self._path)
        return True

    def close(self) -> None:
        """Close the file. A later write opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _line(
        self,
        event: str,
        fields: Mapping[str, object],
        *,
        mono_ns: int | None = None,
        unix_s: float | None = None,
    ) -> bytes:
        clash = _ENVELOPE & fields.keys()
        if clash:
            raise ValueError(f"the event {event} has fields of the envelope: {', '.join(sorted(clash))}")
        envelope = {
            "mono_ns": time.monotonic_ns() if mono_ns is None else mono_ns,
            "unix_s": time.time() if unix_s is None else unix_s,
            "actor": self._actor,
            "event": event,
        }
        return msgspec.json.encode({**envelope, **fields}) + b"\n"

    def _append(self, line: bytes) -> None:
        assert self._descriptor is not None
        if self._torn:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        if written == len(line):
            self._torn = False
            self._bytes += written
            return
        # The disk is full in the middle of a line. We are the only writer: take the piece back.
        try:
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
        except OSError:
            self._torn = True
        raise OSError(f"only {written} of {len(line)} bytes fit")

    def _begin_anew(self) -> None:
        try:
            self._path.rename(self._path.with_name(f"{self._path.name}.1"))
        except OSError as error:
            self._bytes = 0  # tried again when as much more has been written
            self._say(f"the audit log {self._path} grows, for it cannot be renamed: {error.strerror}")
            return
        self.reopen()

    def _lose(self) -> None:
        self.lost += 1
        self._unsaid += 1

    def _fail(self, text: str) -> None:
        if not self._failing:
            self._failing = True
            self._say(text)

    def _say(self, text: str) -> None:
        if self._on_fault is not None:
            self._on_fault(text)


def _ends_torn(path: Path) -> bool:
    """Whether the last line lacks its end, as after a power cut."""
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return True  # an empty line more harms no reader
