"""The little HTTP that a scrape needs: GET /metrics over a Unix socket or a loopback port, one answer, then the end.

Anyone on the host may connect. So a request is short and comes within a deadline, connections are few, of too many the
oldest goes, and an answer serves for a second: no client costs the agent more than that, or keeps another one out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ..bus.accepting import accept_all
from ..bus.unix import SocketError, listen

_MOST_HEAD_BYTES: Final = 8192
_DEADLINE_S: Final = 5.0
_MOST_CONNECTIONS: Final = 16
_FRESH_S: Final = 1.0
_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"  # what generate_latest writes


class MetricsServer:
    """``where`` is ``unix`` (then at ``path``) or ``ADDRESS:PORT`` on loopback, as the config has checked it."""

    def __init__(
        self, where: str, path: Path, render: Callable[[], bytes], *, deadline_s: float = _DEADLINE_S
    ) -> None:
        self._where = where
        self._path = path
        self._render = render
        self._deadline_s = deadline_s
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._stop_listening: Callable[[], None] = lambda: None
        self._answer = (b"", -_FRESH_S)

    def start(self) -> None:
        """Listen. Raises SocketError that says what is in the way."""
        if self._where == "unix":
            listener = listen(self._path)
            self._stop_listening, sock = listener.close, listener.socket
        else:
            sock = _loopback(self._where)
            self._stop_listening = sock.close
        self._accepting = asyncio.create_task(accept_all(sock, self._accept))

    async def close(self) -> None:
        """Stop listening and drop what is under way."""
        ending = [*self._tasks, *([self._accepting] if self._accepting else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._stop_listening()

    def _accept(self, connection: socket.socket) -> None:
        if len(self._tasks) >= _MOST_CONNECTIONS:
            next(iter(self._tasks)).cancel()  # the oldest; a scrape lasts milliseconds
        task = asyncio.create_task(self._serve(connection))
        self._tasks[task] = None
        task.add_done_callback(self._leave(connection))

    def _leave(self, connection: socket.socket) -> Callable[[asyncio.Task[None]], None]:
        def leave(task: asyncio.Task[None]) -> None:
            """Also of a task that was cancelled before it began."""
            self._tasks.pop(task, None)
            connection.close()

        return leave

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._deadline_s):
                head = bytearray()
                while b"\r\n\r\n" not in head and b"\n\n" not in head:
                    part = await loop.sock_recv(connection, 4096)
                    head += part
                    if not part or len(head) > _MOST_HEAD_BYTES:
                        break
                await loop.sock_sendall(connection, self._reply(bytes(head)))
                connection.shutdown(socket.SHUT_WR)
                await loop.sock_recv(connection, 1)  # a close with unread bytes would take the answer back

    def _reply(self, head: bytes) -> bytes:
        if len(head) > _MOST_HEAD_BYTES:
            return _response("431 Request Header Fields Too Large", b"the request is too long\n")
        words = head.split(b"\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", b"this is HTTP/1.1: GET /metrics\n")
        method, target = words[0], words[1].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET and HEAD\n", "Allow: GET, HEAD\r\n")
        if target != b"/metrics":
            return _response("404 Not Found", b"the metrics are at /metrics\n")
        body = self._metrics()
        return _response("200 OK", body, with_body=method == b"GET")

    def _metrics(self) -> bytes:
        body, made_s = self._answer
        now_s = time.monotonic()
        if now_s - made_s >= _FRESH_S:
            body = self._render()
            self._answer = (body, now_s)
        return body


def _response(status: str, body: bytes, more: str = "", *, with_body: bool = True) -> bytes:
    kind = _TYPE if status.startswith("200") else "text/plain; charset=utf-8"
    size = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"HTTP/1.1 {status}\r\n{size}{more}Connection: close\r\n\r\n".encode() + (
        body if with_body else b""
    )


def _loopback(where: str) -> socket.socket:
    """A listening socket at a loopback address. Raises SocketError."""
    host, _, port = where.rpartition(":")
    address = ipaddress.ip_address(host.strip("[]"))
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise SocketError(
            f"no IP sockets for this process ({error.strerror}): install slurm-pfi-node.metrics.conf beside the unit"
        ) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((str(address), int(port)))
        sock.listen(_MOST_CONNECTIONS)
        sock.settimeout(0)
    except OSError as error:
        sock.close()
        what = (
            "another process listens there; choose another port"
            if error.errno == errno.EADDRINUSE
            else error.strerror
        )
        raise SocketError(f"cannot listen at {where}: {what}") from error
    return sock
