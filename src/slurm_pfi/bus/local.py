"""The bus of one host: reports and plans over a Unix socket, each end checked by SO_PEERCRED.

The server is the controller's. It believes reports of root only; a node is the name in its report. The client is
the node agent's. It believes plans only of a listener whose uid it was told to trust, and nothing that the other
end does or fails to do raises into the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from ..model import BusMessage, Plan, Report
from .accepting import accept_forever, end_tasks
from .codec import HEADER_BYTES, CodecError, decode, encode, frame_length
from .unix import Listener, Peer, SocketError, connect, listen, peer_of

_BACK_OFF_FIRST_S: Final = 0.1
_BACK_OFF_CAP_S: Final = 2.0
_STEADY_S: Final = 5.0  # a connection that held this long was a good one: the next pause is short again
_MAX_LINKS: Final = 8192


class _Link:
    """One connection. ``node`` is None until its first report names it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.node: str | None = None

    def send(self, message: BusMessage) -> bool:
        """Write a frame, or nothing at all if the other end has not read what it already has."""
        if self.writer.is_closing() or self.writer.transport.get_write_buffer_size() > 0:
            return False
        self.writer.write(encode(message))
        return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self.writer.wait_closed()


async def _read(reader: asyncio.StreamReader) -> BusMessage | None:
    """The next message, None at the end of the stream. Raises CodecError, OSError."""
    try:
        length = frame_length(await reader.readexactly(HEADER_BYTES))
        return decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise CodecError("the connection ended inside a frame") from error
        return None


class LocalServer:
    """The controller's end.

    ``on_report(report, peer)`` is called in the event loop for each report; ``on_gone(node)`` when a node's last
    connection ends; ``on_fault(text)`` with one line on what was refused. ``node_uids`` adds users who may speak
    as a node, for simulations without root.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_report: Callable[[Report, Peer], None],
        on_gone: Callable[[str], None] | None = None,
        on_fault: Callable[[str], None] | None = None,
        node_uids: Iterable[int] = (),
    ) -> None:
        self._path = path
        self._on_report = on_report
        self._on_gone = on_gone
        self._on_fault = on_fault
        self._allowed = frozenset({0, *node_uids})
        self._listener: Listener | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: dict[str, _Link] = {}
        self._refused_uids: set[int] = set()

    async def start(self) -> None:
        """Listen. Raises SocketInUseError when another controller does, SocketError when the place is not safe."""
        self._listener = listen(self._path, mode=0o666)
        self._accepting = asyncio.create_task(accept_forever(self._listener, self._accept))

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes with a connection now."""
        return frozenset(self._links)

    def send(self, node: str, plan: Plan) -> bool:
        """Hand a plan to the node's connection. False: there is none, or the node does not read; nothing was sent.

        True means handed over, not arrived: until a report holds it the plan counts as possibly in force.
        Raises CodecError for a plan that cannot be written.
        """
        link = self._links.get(node)
        return link is not None and link.send(plan)

    async def close(self) -> None:
        """Stop listening, end every connection, remove the socket if it is still ours."""
        if self._accepting is not None:
            await end_tasks([self._accepting])
        await end_tasks(self._tasks)
        if self._listener is not None:
            self._listener.close()

    def _accept(self, connection: socket.socket, peer: Peer) -> None:
        if peer.uid not in self._allowed:
            connection.close()
            if peer.uid not in self._refused_uids and len(self._refused_uids) < _MAX_LINKS:
                self._refused_uids.add(peer.uid)
                self._fault(
                    f"uid {peer.uid} (pid {peer.pid}) may not speak as a node; its connections are closed"
                )
            return
        if len(self._tasks) >= _MAX_LINKS:
            connection.close()
            return
        task = asyncio.create_task(self._serve(connection, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket, peer: Peer) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        link = _Link(writer)
        try:
            while (message := await _read(reader)) is not None:
                self._take(link, message, peer)
        except CodecError as error:
            self._fault(f"node {link.node or '?'} (pid {peer.pid}): {error}; its connection is closed")
        except OSError:
            pass  # the node went away; its silence is counted elsewhere
        finally:
            self._forget(link)
            await link.close()

    def _take(self, link: _Link, message: BusMessage, peer: Peer) -> None:
        if not isinstance(message, Report):
            raise CodecError("a node may send reports only")
        if link.node is None:
            link.node = message.node
            older = self._links.get(message.node)
            self._links[message.node] = link
            if older is not None:
                older.writer.close()
        elif link.node != message.node:
            raise CodecError(f"its connection now speaks as node {message.node[:64]!r}")
        elif self._links.get(message.node) is not link:
            return  # replaced by a newer connection: what it still says is old
        try:
            self._on_report(message, peer)
        except Exception as error:
            self._fault(f"the report of node {message.node} could not be handled: {error!r}")

    def _forget(self, link: _Link) -> None:
        if link.node is not None and self._links.get(link.node) is link:
            del self._links[link.node]
            if self._on_gone is not None:
                self._on_gone(link.node)

    def _fault(self, text: str) -> None:
        if self._on_fault is not None:
            self._on_fault(text)


class LocalClient:
    """The node agent's end: ``run`` keeps a connection up for ever.

    ``on_plan(plan)`` is called in the event loop; ``on_state(connected, why)`` on each change, for the log and to
    send a report at once when a controller is there again. ``trusted_uids``: root and the controller's user.
    """

    def __init__(
        self,
        path: Path,
        *,
        trusted_uids: Iterable[int],
        on_plan: Callable[[Plan], None],
        on_state: Callable[[bool, str], None] | None = None,
        back_off_cap_s: float = _BACK_OFF_CAP_S,
    ) -> None:
        self._path = path
        self._trusted = frozenset(trusted_uids)
        self._on_plan = on_plan
        self._on_state = on_state
        self._back_off_cap_s = back_off_cap_s
        self._link: _Link | None = None
        self._said: tuple[bool, str] | None = None

    @property
    def connected(self) -> bool:
        return self._link is not None

    def send(self, report: Report) -> bool:
        """Hand a report over. False: no controller, or it does not read, or the report cannot be written.

        Nothing is queued: the next report says more than this one.
        """
        if self._link is None:
            return False
        try:
            return self._link.send(report)
        except CodecError as error:
            self._say(connected=True, why=str(error))
            return False
        except OSError:
            return False

    async def run(self) -> None:
        """Connect, hand plans over, reconnect with a growing, jittered pause. Ends by being cancelled only."""
        loop = asyncio.get_running_loop()
        pause_s = _BACK_OFF_FIRST_S
        while True:
            started_s = loop.time()
            try:
                why = await self._converse()
            except (SocketError, CodecError, OSError) as error:
                why = str(error)
            except Exception as error:
                why = f"the bus failed in a way it should not: {error!r}"
            self._say(connected=False, why=why)
            if loop.time() - started_s >= _STEADY_S:
                pause_s = _BACK_OFF_FIRST_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._back_off_cap_s)

    async def _converse(self) -> str:
        connection = connect(self._path)
        peer = peer_of(connection)
        if peer.uid not in self._trusted:
            connection.close()
            return (
                f"{self._path} is served by uid {peer.uid} (pid {peer.pid}), which may not command; "
                "no plan of it is read: check controller.user in the config file"
            )
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        link = _Link(writer)
        try:
            self._link = link
            self._say(connected=True, why=f"controller at {self._path} (pid {peer.pid})")
            while (message := await _read(reader)) is not None:
                if not isinstance(message, Plan):
                    raise CodecError("the controller sent something other than a plan")
                try:
                    self._on_plan(message)
                except Exception as error:
                    self._say(connected=True, why=f"a plan could not be handled: {error!r}")
            return "the controller closed the connection"
        finally:
            self._link = None
            await link.close()

    def _say(self, *, connected: bool, why: str) -> None:
        if self._said != (connected, why):
            self._said = (connected, why)
            if self._on_state is not None:
                self._on_state(connected, why)
