"""Questions of the command line to a daemon: one JSON line there, one back, over a Unix socket.

Anyone may connect; who may do what is decided by the handler, which is told the peer's uid by the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from .unix import Listener, Peer, UnreachableError, accept_forever, connect, end_tasks, listen, peer_of

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


Handler: TypeAlias = Callable[[Request, Peer], Awaitable[Reply]]


def refusal(message: str, *, exit_code: int = WRONG_USE) -> Reply:
    """A reply that says no, and why."""
    return Reply(ok=False, exit_code=exit_code, message=message)


class ControlServer:
    """Answers requests, each connection in a task of its own: a slow one keeps nobody waiting.

    ``deadline_s`` bounds the arrival of a request and the taking of its answer, ``handler_deadline_s`` the work
    between. A user beside root and the daemon's own holds at most a quarter of ``max_connections``.
    """

    def __init__(
        self,
        path: Path,
        *,
        handler: Handler,
        mode: int = 0o666,
        deadline_s: float = 5.0,
        handler_deadline_s: float = 30.0,
        max_connections: int = 64,
        on_fault: Callable[[str], None] | None = None,
    ) -> None:
        self._path = path
        self._handler = handler
        self._mode = mode
        self._deadline_s = deadline_s
        self._handler_deadline_s = handler_deadline_s
        self._max_connections = max_connections
        self._on_fault = on_fault
        self._listener: Listener | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_uid: Counter[int] = Counter()

    async def start(self) -> None:
        """Listen. Raises SocketInUseError when another instance does, SocketError when the place is not safe."""
        self._listener = listen(self._path, mode=self._mode)
        self._accepting = asyncio.create_task(accept_forever(self._listener, self._accept))

    async def close(self) -> None:
        """Stop listening, drop what is under way, remove the socket if it is still ours."""
        if self._accepting is not None:
            await end_tasks([self._accepting])
        await end_tasks(self._tasks)
        if self._listener is not None:
            self._listener.close()

    def _accept(self, connection: socket.socket, peer: Peer) -> None:
        whole = peer.uid in {0, os.geteuid()}
        share = self._max_connections if whole else max(1, self._max_connections // 4)
        if len(self._tasks) >= self._max_connections or self._by_uid[peer.uid] >= share:
            with contextlib.suppress(OSError):
                connection.settimeout(0)
                connection.send(
                    _line(refusal("too many questions at once; try again", exit_code=UNREACHABLE))
                )
            connection.close()
            return
        task = asyncio.create_task(self._serve(connection, peer))
        self._tasks.add(task)
        self._by_uid[peer.uid] += 1
        task.add_done_callback(lambda done: self._leave(done, peer.uid))

    def _leave(self, task: asyncio.Task[None], uid: int) -> None:
        self._tasks.discard(task)
        self._by_uid[uid] -= 1
        if self._by_uid[uid] <= 0:
            del self._by_uid[uid]

    async def _serve(self, connection: socket.socket, peer: Peer) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_REQUEST_BYTES)
        try:
            reply = await self._answer(reader, peer)
            if reply is not None:
                writer.write(self._reply_line(reply))
                async with asyncio.timeout(self._deadline_s):
                    await writer.drain()
                    writer.write_eof()
                    await reader.read(1)  # until the client has it all and closes, or the deadline
        except (OSError, TimeoutError):
            pass  # the client went away or does not read; nobody else waits for it
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, peer: Peer) -> Reply | None:
        try:
            async with asyncio.timeout(self._deadline_s):
                line = await reader.readline()
        except TimeoutError:
            return refusal(f"no whole request within {self._deadline_s:g} s", exit_code=UNREACHABLE)
        except ValueError:
            return refusal(f"a request has at most {MAX_REQUEST_BYTES} bytes")
        if not line:
            return None
        try:
            request = msgspec.json.decode(line, type=Request)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return refusal(f"not a request: {error}")
        return await self._handle(request, peer)

    async def _handle(self, request: Request, peer: Peer) -> Reply:
        try:
            async with asyncio.timeout(self._handler_deadline_s):
                return await self._handler(request, peer)
        except TimeoutError:
            return refusal(f"{request.command[:64]}: no answer in time", exit_code=UNREACHABLE)
        except Exception as error:
            self._fault(f"the request {request.command[:64]!r} failed: {error!r}")
            return refusal(
                f"{request.command[:64]}: internal error, see the daemon's log", exit_code=UNREACHABLE
            )

    def _reply_line(self, reply: Reply) -> bytes:
        try:
            return _line(reply)
        except (TypeError, ValueError, OverflowError) as error:
            self._fault(f"an answer could not be written: {error!r}")
            return _line(refusal("internal error, see the daemon's log", exit_code=UNREACHABLE))

    def _fault(self, text: str) -> None:
        if self._on_fault is not None:
            self._on_fault(text)


def _line(message: Request | Reply) -> bytes:
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
                connection.sendall(_line(Request(command=command, args=args or {})))
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
