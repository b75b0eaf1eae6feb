"""Unix stream sockets: bind without stealing another's, connect without believing whoever listens.

Ours alone: both daemons and the command line use it through ``local`` and ``control``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CREDENTIALS: Final = struct.Struct("iII")
_SUN_PATH_MAX: Final = 107  # bytes of a Unix socket's address without the closing zero (unix(7))


class SocketError(Exception):
    """A socket that cannot be had; the message says what is in the way and what to do."""


class SocketInUseError(SocketError):
    """Another process listens there. ``pid`` is its id, None when the kernel does not say."""

    def __init__(self, path: Path, pid: int | None) -> None:
        who = f"pid {pid}" if pid else "another process"
        super().__init__(f"{path} is in use by {who}; stop that one first, or give this one another folder")
        self.pid = pid


class UnreachableError(SocketError):
    """Nobody answers at a socket."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, from SO_PEERCRED. For a listener: who called listen."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """The kernel's word on the other end of a connected Unix socket. Raises OSError."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(raw))


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """The path as a socket address; one that is too long goes by way of its folder's descriptor."""
    if len(os.fsencode(path)) <= _SUN_PATH_MAX:
        yield os.fspath(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connect(path: Path) -> socket.socket:
    """A connected, non-blocking socket. Raises UnreachableError at once; it never waits.

    A Unix socket connects or fails immediately; EAGAIN says that the listener's queue is full.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(0)
        with _address(path) as address:
            connection.connect(address)
    except OSError as error:
        connection.close()
        raise UnreachableError(f"nobody can be reached at {path}: {error.strerror or error}") from error
    return connection


class Listener:
    """A listening socket that knows its own inode, so that closing it never removes another's."""

    def __init__(self, path: Path, sock: socket.socket) -> None:
        self.path = path
        self.socket = sock
        self._identity = _identity(path)
        self._open = True

    def close(self) -> None:
        """Remove the file if it is still ours, then stop listening. Safe to call twice."""
        if not self._open:
            return
        self._open = False
        # Unlink while still bound: only then can the inode number not have been given to another file.
        with contextlib.suppress(OSError), _lock(self.path):
            if _identity(self.path) == self._identity:
                self.path.unlink()
        self.socket.close()


def listen(path: Path, *, mode: int = 0o666, backlog: int = 128) -> Listener:
    """Bind and listen at ``path``; its folder is made (0755) if missing and must be the caller's own.

    A socket left behind is replaced. Raises SocketInUseError when somebody answers there, SocketError when the path
    is something else (a file, a symlink: never removed) or the folder is not safe. ``mode`` is in force before
    the first connection can be made.
    """
    path = path.absolute()
    check_folder(path.parent)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _lock(path):
            _clear(path)
            with _address(path) as address:
                sock.bind(address)
            path.chmod(mode)
            sock.listen(backlog)
            sock.settimeout(0)
            return Listener(path, sock)
    except OSError as error:
        sock.close()
        raise SocketError(f"cannot listen at {path}: {error.strerror or error}") from error
    except SocketError:
        sock.close()
        raise


def check_folder(folder: Path) -> None:
    """Make the folder if it is missing; raise SocketError unless it is ours and nobody else may write in it."""
    try:
        if not folder.exists():
            folder.mkdir(mode=0o755, parents=True)
            folder.chmod(0o755)
        found = folder.lstat()
    except OSError as error:
        raise SocketError(f"the folder {folder} cannot be used: {error.strerror or error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise SocketError(f"{folder} is not a folder (a symlink is not followed); move it away")
    if found.st_uid != os.geteuid():
        raise SocketError(f"{folder} belongs to uid {found.st_uid}, not to {os.geteuid()}: chown it")
    if found.st_mode & 0o022:
        raise SocketError(
            f"{folder} may be written by others (mode {found.st_mode & 0o7777:04o}): chmod 0755 it"
        )


def _clear(path: Path) -> None:
    """Remove a dead socket. Raises SocketInUseError or SocketError for anything that is not one."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketError(f"{path} exists and is not a socket; it is left alone: move it away")
    try:
        probe = connect(path)
    except UnreachableError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno != errno.ECONNREFUSED:
            raise SocketInUseError(path, None) from error
        path.unlink()
        return
    with probe:
        raise SocketInUseError(path, peer_of(probe).pid or None)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held only while a socket is checked and bound, or removed: two starting at once cannot both win.

    The lock file is 0600 in a folder of ours, so no other user can hold it.
    """
    name = path.with_name(f".{path.name}.lock")
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
