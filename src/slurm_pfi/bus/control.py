"""The side that answers the questions of the command line (`asking`), over a Unix socket.

Anyone may connect; who may do what is decided by the handler, which is told the peer's uid by the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from .accepting import accept_forever, end_tasks
from .asking import MAX_REQUEST_BYTES, UNREACHABLE, Reply, Request, line_of, refusal
from .unix import Listener, Peer, listen

Handler: TypeAlias = Callable[[Request, Peer], Awaitable[Reply]]


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

    @property
    def listening(self) -> bool:
        """Whether it was started."""
        return self._listener is not None

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
                    line_of(refusal("too many questions at once; try again", exit_code=UNREACHABLE))
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
            return line_of(reply)
        except (TypeError, ValueError, OverflowError) as error:
            self._fault(f"an answer could not be written: {error!r}")
            return line_of(refusal("internal error, see the daemon's log", exit_code=UNREACHABLE))

    def _fault(self, text: str) -> None:
        if self._on_fault is not None:
            self._on_fault(text)
