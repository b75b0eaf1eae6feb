"""The sockets that jobs send their progress to. Any user may try to; none may cost the agent or another job anything.

- **A socket for each run**, ``progress/<job>.<restart>``, which the kernel lets only that run's user write to (and
  root). Its queue is its own, so nobody can fill it for others. ``progress.sock`` is for processes that do not find it,
  such as those of a heterogeneous job: everyone shares its queue, and in a flood reports there get lost.
- **Reading in turns**: a few datagrams, then a pause, whatever still waits. That bounds the CPU time. What does not fit
  in the queue is refused to the sender, which never waits; the next counter makes good for a lost one.
- **No descriptors**: the last close of a passed one can block whoever does it, for hours (a TCP socket that lingers,
  a file on a dead server). Linux 6.16 refuses them for us. Before it, each datagram is peeked at, and one that carries
  any is thrown away by a thread that nobody waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeAlias

from ..bus.unix import SocketError, check_folder
from .jobfile import JobFile
from .progress import MAX_BYTES, ProgressTable, RunKey, newest_runs, parse_progress
from .sender import Dropped, JobFinder, Senders, Turn

MAX_SOCKETS: Final = 64
PER_TURN: Final = 64
LOOKUPS_PER_TURN: Final = 4
PAUSE_S: Final = 0.1
CROWDED_PAUSE_S: Final = 0.5
MAX_THREADS: Final = 8

NO_CREDENTIALS: Final = "no credentials"
NO_PROGRESS: Final = "not a progress datagram"
DESCRIPTORS: Final = "carries file descriptors"
OTHER_RUN: Final = "sender belongs to another run"
OTHER_USER: Final = "sender is not the run's user"
CROWDED: Final = "more than can be read"

_CREDENTIALS: Final = struct.Struct("iII")
_SO_PASSRIGHTS: Final = 83  # Linux 6.16; Python has no name for it
_SPACE: Final = socket.CMSG_SPACE(_CREDENTIALS.size)
"""Room for the credentials alone: of passed descriptors the kernel then installs none, and sets MSG_CTRUNC."""

Datagram: TypeAlias = tuple[bytes, list[tuple[int, int, bytes]], int, object]


class Inlet:
    """One datagram socket, read in turns. ``uid`` alone may write to it; None lets everybody.

    ``take`` gets each datagram; it must not raise.
    """

    def __init__(
        self, path: Path, uid: int | None, take: Callable[[Datagram, Turn], None], drop: Callable[[str], None]
    ) -> None:
        """Bind and begin to read. Raises OSError."""
        self._path = path
        self._take = take
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        self._closed = False
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._sealed = _refuse_descriptors(self._socket)
            # The mode of the socket itself becomes that of its name, so there is no moment with a wider one.
            os.fchmod(self._socket.fileno(), 0o600)
            with _short(path) as address:
                self._socket.bind(address)
            if uid is None:
                path.chmod(0o666)
            elif uid != os.geteuid():
                os.setxattr(path, "system.posix_acl_access", _only(uid))
        except OSError:
            self._socket.close()
            raise
        self._loop.add_reader(self._socket, self._readable)

    def close(self) -> None:
        """Stop reading and remove the socket; what waits in it is lost."""
        self._closed = True
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._socket)
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        if self._sealed:
            self._socket.close()
        else:
            # The queue may hold descriptors whose close blocks.
            threading.Thread(target=self._socket.close, name="progress-close", daemon=True).start()

    def _readable(self) -> None:
        turn = Turn(time.monotonic(), LOOKUPS_PER_TURN)
        self._loop.remove_reader(self._socket)
        pause_s = PAUSE_S
        for _ in range(PER_TURN):
            try:
                if not self._sealed and self._carries_descriptors():
                    self._throw_away()
                    return
                datagram = self._socket.recvmsg(MAX_BYTES + 1, _SPACE)
            except OSError:
                break
            self._take(datagram, turn)
        else:
            self._drop(CROWDED)
            pause_s = CROWDED_PAUSE_S
        if turn.lookups == 0:
            pause_s = CROWDED_PAUSE_S
        self._pause(pause_s)

    def _pause(self, pause_s: float) -> None:
        self._resume = self._loop.call_later(pause_s, self._loop.add_reader, self._socket, self._readable)

    def _carries_descriptors(self) -> bool:
        return bool(self._socket.recvmsg(1, _SPACE, socket.MSG_PEEK)[2] & socket.MSG_CTRUNC)

    def _throw_away(self) -> None:
        """Take a datagram with descriptors out of the queue, however long their close may take."""
        if sum(thread.name == "progress-discard" for thread in threading.enumerate()) >= MAX_THREADS:
            self._pause(CROWDED_PAUSE_S)
            return
        self._drop(DESCRIPTORS)

        def discard() -> None:
            with contextlib.suppress(OSError):
                self._socket.recv(1)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._again)

        threading.Thread(target=discard, name="progress-discard", daemon=True).start()

    def _again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket, self._readable)


class ProgressSocket:
    """All sockets of one node. ``dropped`` counts, by reason, what was not taken."""

    def __init__(
        self,
        path: Path,
        finder: JobFinder,
        table: ProgressTable,
        *,
        on_first_drop: Callable[[str, int | None], None],
    ) -> None:
        """``path`` is the shared one; those of single runs lie in the folder ``progress`` beside it."""
        self._path = path
        self._folder = path.parent / "progress"
        self._table = table
        self._senders = Senders(finder, table.run_of)
        self._on_first_drop = on_first_drop
        self._shared: Inlet | None = None
        self._own: dict[RunKey, Inlet] = {}
        self._wanted: dict[RunKey, int] = {}
        self.dropped: Counter[str] = Counter()

    def expect(self, files: Iterable[JobFile]) -> None:
        """The job files of this node: these runs may report, and those with GPUs get a socket."""
        runs = newest_runs(files)
        self._table.expect(runs.values())
        wanted = ((run, file.uid) for run, file in runs.items() if file.gpus)
        self._wanted = dict(list(wanted)[:MAX_SOCKETS])
        if self._shared is not None:
            self._adjust()

    @property
    def listening(self) -> bool:
        """Whether it was opened."""
        return self._shared is not None

    def open(self) -> None:
        """Bind. Raises SocketError when something other than a dead socket of ours lies there."""
        if self._path.is_symlink() or (self._path.exists() and not self._path.is_socket()):
            raise SocketError(f"{self._path} exists and is not a socket; it is left alone: move it away")
        check_folder(self._folder)
        try:
            # Whoever holds the node's lock owns these names: a socket that lies there was left behind.
            for path in (self._path, *self._folder.iterdir()):
                if path.is_socket():
                    path.unlink()
            self._shared = Inlet(self._path, None, self._take_shared, self._drop)
        except OSError as error:
            raise SocketError(f"cannot listen at {self._path}: {error.strerror or error}") from error
        self._adjust()

    def close(self) -> None:
        """Stop listening and remove the sockets."""
        for inlet in (*self._own.values(), *([self._shared] if self._shared else [])):
            inlet.close()
        self._shared = None
        self._own.clear()

    def _adjust(self) -> None:
        """One socket for each run that shall have one."""
        for run in self._own.keys() - self._wanted.keys():
            self._own.pop(run).close()
        for run, uid in self._wanted.items():
            if run in self._own:
                continue
            path = self._folder / f"{run.job_id}.{run.restart}"

            def take(datagram: Datagram, turn: Turn, run: RunKey = run) -> None:
                self._take(datagram, turn, run)

            try:
                self._own[run] = Inlet(path, uid, take, self._drop)
            except OSError as error:
                self._drop(f"no socket of its own: {error.strerror or error}", uid)

    # ------------------------------------------------------------------------------------------ datagrams

    def _take_shared(self, datagram: Datagram, turn: Turn) -> None:
        self._take(datagram, turn, None)

    def _take(self, datagram: Datagram, turn: Turn, only: RunKey | None) -> None:
        """Take a datagram in. What is cheap to see comes first, /proc last."""
        data, ancillary, flags, _ = datagram
        uid = None
        try:
            if flags & socket.MSG_CTRUNC:
                raise Dropped(DESCRIPTORS)
            pid, uid = _credentials(ancillary)
            said = None if flags & socket.MSG_TRUNC else parse_progress(data)
            if said is None:
                raise Dropped(NO_PROGRESS)
            run = self._senders.run_of(pid, uid, turn)
            if only is not None and run != only:
                raise Dropped(OTHER_RUN)
            if self._table.user_of(run) != uid:
                raise Dropped(OTHER_USER)
        except Dropped as why:
            self._drop(str(why), uid)
        else:
            self._table.take(run, said, turn.now_s)

    def _drop(self, why: str, uid: int | None = None) -> None:
        self.dropped[why] += 1
        if self.dropped[why] == 1:
            self._on_first_drop(why, uid)


def _credentials(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, int]:
    """Pid and uid that the kernel checked. Raises Dropped."""
    for level, kind, raw in ancillary:
        if (level, kind, len(raw)) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, _CREDENTIALS.size):
            pid, uid, _ = _CREDENTIALS.unpack(raw)
            return pid, uid
    raise Dropped(NO_CREDENTIALS)


def _refuse_descriptors(opened: socket.socket) -> bool:
    """Have the kernel refuse passed descriptors; False where it is too old to."""
    try:
        opened.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return True


def _only(uid: int) -> bytes:
    """An access list (acl(5), as the kernel stores it): read and write for the owner, write for this user alone.

    Unlike chown it needs no capability, and the user cannot change it.
    """
    entries = ((0x01, 6, None), (0x02, 2, uid), (0x04, 0, None), (0x10, 2, None), (0x20, 0, None))
    packed = (
        struct.pack("<HHI", tag, bits, 0xFFFFFFFF if who is None else who) for tag, bits, who in entries
    )
    return struct.pack("<I", 2) + b"".join(packed)


class _short:  # noqa: N801 - a context manager used like a function
    """A path as a socket address, by way of its folder's descriptor where it is too long (unix(7): 107 bytes)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder: int | None = None

    def __enter__(self) -> str:
        if len(os.fsencode(self._path)) <= 107:
            return os.fspath(self._path)
        self._folder = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._folder}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            os.close(self._folder)
