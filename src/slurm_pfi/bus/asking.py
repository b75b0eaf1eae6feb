"""Questions of the command line to a daemon: one JSON line there, one back, over a Unix socket.

What both sides share, and the side that asks. It loads little: nobody waits for it at the start of a command.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from .unix import UnreachableError, connect, peer_of

MAX_REQUEST_BYTES: Final = 64 * 1024
MAX_REPLY_BYTES: Final = 16 * 1024 * 1024

DONE: Final = 0
NO: Final = 1
WRONG_USE: Final = 2
UNREACHABLE: Final = 3


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """``command`` is a word of the daemon's vocabulary; ``args`` is checked by its handler."""

    command: str
    args: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """``exit_code`` is what the command line ends with: 0 done, 1 no, 2 wrong use, 3 not reachable."""

    ok: bool
    exit_code: int = DONE
    message: str = ""
    data: Any = None


def refusal(message: str, *, exit_code: int = WRONG_USE) -> Reply:
    """A reply that says no, and why."""
    return Reply(ok=False, exit_code=exit_code, message=message)


def line_of(message: Request | Reply) -> bytes:
    """A message as it goes over the socket. Raises TypeError, ValueError, OverflowError for what JSON cannot say."""
    return msgspec.json.encode(message) + b"\n"


def ask(
    path: Path,
    command: str,
    args: dict[str, Any] | None = None,
    *,
    timeout_s: float = 35.0,
    trusted_uids: Iterable[int] | None = None,
) -> Reply:
    """Put one question to the daemon at ``path`` and return its reply; blocks for ``timeout_s`` at most.

    With ``trusted_uids`` a listener of another user is not asked. Raises UnreachableError with one line for the user.
    """
    ends_s = time.monotonic() + timeout_s
    with _connect_within(path, ends_s) as connection:
        peer = peer_of(connection)
        if trusted_uids is not None and peer.uid not in frozenset(trusted_uids):
            raise UnreachableError(
                f"{path} is served by uid {peer.uid} (pid {peer.pid}), which is not trusted"
            )
        try:
            with contextlib.suppress(BrokenPipeError):  # it may have answered "busy" and closed already
                connection.settimeout(max(0.01, ends_s - time.monotonic()))
                connection.sendall(line_of(Request(command=command, args=args or {})))
            line = _read_line(connection, ends_s)
        except TimeoutError as error:
            raise UnreachableError(
                f"{path} (pid {peer.pid}) did not answer within {timeout_s:g} s"
            ) from error
        except OSError as error:
            raise UnreachableError(f"{path} (pid {peer.pid}) broke off: {error.strerror or error}") from error
    try:
        return msgspec.json.decode(line, type=Reply)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreachableError(f"{path} (pid {peer.pid}) gave no proper answer: {error}") from error


def _connect_within(path: Path, ends_s: float) -> socket.socket:
    while True:
        try:
            return connect(path)
        except UnreachableError as error:
            full = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EAGAIN
            if not full or time.monotonic() >= ends_s:
                raise
            time.sleep(0.02)  # the listener's queue is full; there is no event to wait for


def _read_line(connection: socket.socket, ends_s: float) -> bytes:
    parts = bytearray()
    while not parts.endswith(b"\n"):
        connection.settimeout(max(0.01, ends_s - time.monotonic()))
        part = connection.recv(65536)
        if not part:
            break
        parts += part
        if len(parts) > MAX_REPLY_BYTES:
            raise OSError(errno.EMSGSIZE, "the answer is too long")
    return bytes(parts)
