"""What servers on a Unix socket share: accepting connections, and ending the tasks that serve them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Final

from .unix import Listener, Peer, peer_of

_ACCEPT_PAUSE_S: Final = 0.1


async def accept_all(listening: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    """Hand every connection, non-blocking, to ``handle``, which then owns it. Ends by being cancelled only.

    Not by ``loop.sock_accept``: cancelled while a connection is there, that loses it and leaves a traceback in the log.
    """
    loop = asyncio.get_running_loop()
    again: asyncio.TimerHandle | None = None

    def take() -> None:
        nonlocal again
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # no descriptors left, or the peer was gone first: others must still get in
            loop.remove_reader(listening)
            again = loop.call_later(_ACCEPT_PAUSE_S, loop.add_reader, listening, take)
            return
        connection.settimeout(0)
        handle(connection)

    loop.add_reader(listening, take)
    try:
        await loop.create_future()
    finally:
        if again is not None:
            again.cancel()
        loop.remove_reader(listening)


async def accept_forever(listener: Listener, handle: Callable[[socket.socket, Peer], None]) -> None:
    """The same with the peer of each connection, as the kernel tells it."""

    def with_peer(connection: socket.socket) -> None:
        try:
            peer = peer_of(connection)
        except OSError:
            connection.close()
            return
        handle(connection, peer)

    await accept_all(listener.socket, with_peer)


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel and await. Each task gets to its first await before, so that it owns, and closes, its socket."""
    ending = list(tasks)
    await asyncio.sleep(0)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
