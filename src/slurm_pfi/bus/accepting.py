"""What servers on a Unix socket share: accepting connections, and ending the tasks that serve them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Final

from .unix import Listener, Peer, peer_of

_ACCEPT_PAUSE_S: Final = 0.1


async def accept_forever(listener: Listener, handle: Callable[[socket.socket, Peer], None]) -> None:
    """Hand every connection and its peer to ``handle``, which then owns it. Ends by being cancelled only."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener.socket)
        except OSError:  # no descriptors left, or the peer was gone first: others must still get in
            await asyncio.sleep(_ACCEPT_PAUSE_S)
            continue
        try:
            peer = peer_of(connection)
        except OSError:
            connection.close()
            continue
        handle(connection, peer)


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel and await. Each task gets to its first await before, so that it owns, and closes, its socket."""
    ending = list(tasks)
    await asyncio.sleep(0)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
