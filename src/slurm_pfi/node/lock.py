"""Exactly one process acts on a node's GPUs at a time: whoever holds the lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Final

_WAIT_S: Final = 5.0
_STEP_S: Final = 0.05


class LockedError(Exception):
    """Somebody else holds it. ``pid`` is None when the file does not tell."""

    def __init__(self, path: Path, pid: int | None) -> None:
        super().__init__(f"{path} is held by {f'pid {pid}' if pid else 'another process'}")
        self.pid = pid


class Lock:
    """An flock with the holder's pid in the file; the kernel lets go of it when the process dies."""

    def __init__(self, path: Path) -> None:
        """Take it at once. Raises LockedError, or OSError when the file cannot be had."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = _pid_in(self._descriptor)
            os.close(self._descriptor)
            raise LockedError(path, pid) from error
        with contextlib.suppress(OSError):  # on a full disk the lock is as good without its pid
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let go. The file stays, so that nobody locks a file that another is about to remove."""
        os.close(self._descriptor)


def take_within(path: Path, wait_s: float = _WAIT_S) -> Lock:
    """Take it, waiting a little for a holder that is about to end. Raises LockedError."""
    ends_s = time.monotonic() + wait_s
    while True:
        try:
            return Lock(path)
        except LockedError:
            if time.monotonic() >= ends_s:
                raise
            time.sleep(_STEP_S)  # flock has no wait with a deadline


def end_holder(path: Path, wait_s: float = _WAIT_S) -> int | None:
    """Send SIGTERM to the process that holds the lock and wait for its end. Returns its pid, None if nobody did.

    The pid in the file is believed only of a process that has the file open: a holder of an instant ago may not have
    written its own yet. Raises LockedError when it does not end in time.
    """
    try:
        Lock(path).release()
    except LockedError as error:
        if error.pid is not None and _has_open(error.pid, path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(error.pid, signal.SIGTERM)
        take_within(path, wait_s).release()
        return error.pid
    return None


def _has_open(pid: int, path: Path) -> bool:
    """By the names of its descriptors; none of its files is touched, for one may be on a server that is gone."""
    wanted = str(path.resolve())
    with contextlib.suppress(OSError):
        return any(str(entry.readlink()) == wanted for entry in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _pid_in(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0).strip()
    return int(text) if text.isdigit() and int(text) > 1 else None
