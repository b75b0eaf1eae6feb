"""The local bus between real sockets and real processes."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from slurm_pfi.bus.codec import encode
from slurm_pfi.bus.local import LocalClient, LocalServer
from slurm_pfi.bus.unix import Peer, SocketError, SocketInUseError, check_folder, connect, listen, peer_of
from slurm_pfi.model import Plan, PlanId, PlanStep, Report, ReportId

ME = os.geteuid()


def report(node: str = "n1", seq: int = 1) -> Report:
    return Report(
        cluster="c",
        node=node,
        id=ReportId(boot_id="b", agent_id="a", seq=seq),
        highest_epoch=0,
        held=None,
        released=False,
        window_ends_in_s=None,
        gpus=(),
        runs=(),
    )


def plan(node: str = "n1", seq: int = 1) -> Plan:
    return Plan(
        cluster="c",
        node=node,
        id=PlanId(epoch=1, seq=seq),
        answers=ReportId(boot_id="b", agent_id="a", seq=1),
        mode="enforce",
        reason="test",
        steps=(PlanStep(starts_in_s=0.0, park_cap_mw=200_000),),
    )


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Let the loop run until the condition holds; a test fails if it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


class Ends:
    """A server and what it and its clients were told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports: list[tuple[Report, Peer]] = []
        self.plans: list[Plan] = []
        self.gone: list[str] = []
        self.faults: list[str] = []
        self.states: list[tuple[bool, str]] = []
        self.server = self.new_server()

    def new_server(self) -> LocalServer:
        return LocalServer(
            self.path,
            on_report=lambda report, peer: self.reports.append((report, peer)),
            on_gone=self.gone.append,
            on_fault=self.faults.append,
            node_uids={ME},
        )

    @asynccontextmanager
    async def client(self, trusted_uids: frozenset[int] = frozenset({ME})) -> AsyncIterator[LocalClient]:
        client = LocalClient(
            self.path,
            trusted_uids=trusted_uids,
            on_plan=self.plans.append,
            on_state=lambda connected, why: self.states.append((connected, why)),
            back_off_cap_s=0.1,
        )
        task = asyncio.create_task(client.run())
        try:
            yield client
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def ends(folder: Path) -> AsyncIterator[Ends]:
    both = Ends(folder / "run" / "bus.sock")
    await both.server.start()
    try:
        yield both
    finally:
        await both.server.close()


def test_reports_go_up_and_plans_go_down(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ends(tmp_path) as bus, bus.client() as client:
            await until(lambda: client.connected)
            assert client.send(report())
            await until(lambda: len(bus.reports) == 1)
            assert bus.reports[0] == (report(), Peer(pid=os.getpid(), uid=ME, gid=os.getegid()))
            assert bus.server.nodes == {"n1"}
            assert bus.server.send("n1", plan())
            assert not bus.server.send("n2", plan("n2"))
            await until(lambda: bus.plans == [plan()])

    asyncio.run(scenario())


def test_the_client_comes_back_after_the_controller_did(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ends(tmp_path) as bus, bus.client() as client:
            await until(lambda: client.connected)
            await bus.server.close()
            await until(lambda: not client.connected)
            assert not client.send(report())
            bus.server = bus.new_server()
            await bus.server.start()
            await until(lambda: client.connected)
            assert client.send(report(seq=2))
            await until(lambda: bool(bus.reports))
            assert [connected for connected, _ in bus.states][:1] == [True]
            assert any(not connected for connected, _ in bus.states)

    asyncio.run(scenario())


def test_a_missing_controller_is_said_once_and_raises_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        bus = Ends(tmp_path / "absent" / "bus.sock")
        async with bus.client() as client:
            await until(lambda: bool(bus.states))
            for _ in range(5):
                assert not client.send(report())
                await asyncio.sleep(0.1)
            assert len(bus.states) == 1
            assert "bus.sock" in bus.states[0][1]

    asyncio.run(scenario())


def test_a_second_connection_of_a_node_replaces_the_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ends(tmp_path) as bus, bus.client() as second:
            with connect(bus.path) as first:
                first.sendall(encode(report(seq=1)))
                await until(lambda: len(bus.reports) == 1)
                await until(lambda: second.connected)
                second.send(report(seq=2))
                await until(lambda: len(bus.reports) == 2)
                await until(lambda: is_closed(first))
            assert bus.server.nodes == {"n1"}
            assert bus.gone == []
            assert bus.server.send("n1", plan())
            await until(lambda: bus.plans == [plan()])

    asyncio.run(scenario())


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (struct.pack(">I", 2**31), "not within"),
        (struct.pack(">I", 5) + b"hello", "not a report or plan"),
        (encode(plan()), "reports only"),
        (encode(report("n1")) + encode(report("n2")), "speaks as node"),
    ],
    ids=["too long", "garbage", "a plan", "two names"],
)
def test_a_peer_that_misbehaves_is_cut_off_and_the_others_are_not(
    tmp_path: Path, sent: bytes, said: str
) -> None:
    async def scenario() -> None:
        async with ends(tmp_path) as bus, bus.client() as good:
            await until(lambda: good.connected)
            with connect(bus.path) as bad:
                bad.sendall(sent)
                await until(lambda: is_closed(bad))
            assert [fault for fault in bus.faults if said in fault]
            good.send(report("n9"))
            await until(lambda: bus.reports[-1:] != [] and bus.reports[-1][0].node == "n9")

    asyncio.run(scenario())


def test_a_report_handler_that_fails_does_not_end_the_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ends(tmp_path) as bus, bus.client() as client:

            def fail(report: Report, peer: Peer) -> None:
                bus.reports.append((report, peer))
                raise ValueError("broken")

            bus.server._on_report = fail
            await until(lambda: client.connected)
            client.send(report(seq=1))
            await until(lambda: len(bus.reports) == 1)
            client.send(report(seq=2))
            await until(lambda: len(bus.reports) == 2)
            assert "broken" in bus.faults[0]

    asyncio.run(scenario())


def test_a_node_that_does_not_read_gets_no_more_plans_and_blocks_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ends(tmp_path) as bus:
            with connect(bus.path) as deaf:
                deaf.sendall(encode(report()))
                await until(lambda: bus.server.nodes == {"n1"})
                large = msgspec.structs.replace(plan(), reason="x" * 100_000)
                answers = [bus.server.send("n1", large) for _ in range(20)]
                assert answers[0]
                assert not answers[-1]

    asyncio.run(scenario())


def test_a_listener_of_an_untrusted_user_is_not_believed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ends(tmp_path) as bus, bus.client(trusted_uids=frozenset({ME + 1})) as client:
            await until(lambda: bool(bus.states))
            assert not client.connected
            assert "may not command" in bus.states[0][1]
            assert not client.send(report())

    asyncio.run(scenario())


@pytest.mark.skipif(ME != 0, reason="only root can become another user")
def test_another_user_may_not_speak_as_a_node(tmp_path: Path) -> None:
    speak = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "try:\n    s.sendall(bytes.fromhex(sys.argv[2]))\nexcept BrokenPipeError:\n    pass\n"
        "sys.exit(0 if s.recv(1) == b'' else 1)\n"
    )

    async def scenario() -> None:
        async with ends(tmp_path) as bus:
            for parent in [bus.path.parent, *bus.path.parent.parents][:-2]:
                parent.chmod(parent.stat().st_mode | 0o055 & ~0o022)
            for _ in range(2):
                child = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", speak, str(bus.path), encode(report()).hex(), stderr=subprocess.PIPE
                )
                _, complaint = await child.communicate()
                # A reset says the same as an orderly end: the connection was refused unread.
                assert child.returncode == 0 or b"ConnectionResetError" in complaint, complaint
            assert bus.reports == []
            assert len(bus.faults) == 1
            assert "65534" in bus.faults[0]

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------- sockets left and found


def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    listener = listen(path, mode=0o660)
    assert path.stat().st_mode & 0o777 == 0o660
    with connect(path) as connection:
        assert peer_of(connection).pid == os.getpid()
    listener.close()
    assert not path.exists()


def test_a_live_socket_is_respected_and_its_owner_named(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    first = listen(path)
    with pytest.raises(SocketInUseError, match=f"in use by pid {os.getpid()}") as caught:
        listen(path)
    assert caught.value.pid == os.getpid()
    connect(path).close()
    first.close()


def test_a_live_socket_whose_queue_is_full_is_respected(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    first = listen(path, backlog=0)
    waiting = [connect(path)]
    with pytest.raises(SocketInUseError):
        listen(path)
    for connection in waiting:
        connection.close()
    first.close()


@pytest.mark.parametrize("kind", ["file", "symlink", "dangling"])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.sock"
    other = tmp_path / "other"
    if kind == "file":
        path.write_text("precious")
    elif kind == "symlink":
        other.write_text("precious")
        path.symlink_to(other)
    else:
        path.symlink_to(other)
    with pytest.raises(SocketError, match="left alone"):
        listen(path)
    assert path.is_symlink() or path.read_text() == "precious"
    assert other.exists() == (kind == "symlink")


def test_closing_never_removes_the_socket_of_another(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    first = listen(path)
    path.unlink()
    second = listen(path)
    first.close()
    connect(path).close()
    second.close()
    second.close()
    assert not path.exists()


def test_the_folder_is_made_and_must_be_ours_alone(tmp_path: Path) -> None:
    listen(tmp_path / "new" / "s.sock").close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o755
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(SocketError, match="chmod"):
        check_folder(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    with pytest.raises(SocketError, match="not a folder"):
        listen(tmp_path / "link" / "s.sock")
    if ME == 0:
        os.chown(tmp_path / "new", 65534, 65534)
        with pytest.raises(SocketError, match="belongs to uid 65534"):
            check_folder(tmp_path / "new")


def test_a_path_longer_than_a_socket_address_works(tmp_path: Path) -> None:
    path = tmp_path / ("d" * 100) / "s.sock"
    listener = listen(path)
    connect(path).close()
    listener.close()
    assert not path.exists()
