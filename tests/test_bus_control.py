"""Questions of the command line to a daemon."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from slurm_pfi.bus.asking import MAX_REQUEST_BYTES, Reply, Request, ask, refusal
from slurm_pfi.bus.control import ControlServer
from slurm_pfi.bus.unix import Peer, UnreachableError, connect, listen


async def echo(request: Request, peer: Peer) -> Reply:
    if request.command == "hang":
        await asyncio.Event().wait()
    if request.command == "fail":
        raise ValueError("secret detail")
    if request.command == "odd":
        return Reply(ok=True, data=object())
    if request.command == "no":
        return refusal("no such thing", exit_code=1)
    return Reply(ok=True, data={"args": request.args, "uid": peer.uid, "pid": peer.pid})


@asynccontextmanager
async def server(
    folder: Path, *, deadline_s: float = 5.0, handler_deadline_s: float = 5.0, faults: list[str] | None = None
) -> AsyncIterator[Path]:
    path = folder / "control.sock"
    control = ControlServer(
        path,
        handler=echo,
        deadline_s=deadline_s,
        handler_deadline_s=handler_deadline_s,
        max_connections=4,
        on_fault=(faults if faults is not None else []).append,
    )
    await control.start()
    try:
        yield path
    finally:
        await control.close()


async def raw(path: Path, sent: bytes) -> Reply:
    reader, writer = await asyncio.open_unix_connection(sock=connect(path))
    writer.write(sent)
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return msgspec.json.decode(line, type=Reply)


def test_a_question_is_answered_and_the_peer_is_known(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as path:
            reply = await asyncio.to_thread(ask, path, "status", {"node": "n1"})
            assert reply.ok
            assert reply.data == {"args": {"node": "n1"}, "uid": os.geteuid(), "pid": os.getpid()}
            reply = await asyncio.to_thread(ask, path, "no")
            assert (reply.ok, reply.exit_code, reply.message) == (False, 1, "no such thing")

    asyncio.run(scenario())


def test_a_large_answer_arrives_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as path:
            text = "x" * 60_000
            reply = await asyncio.to_thread(ask, path, "status", {"text": text})
            assert reply.data["args"]["text"] == text

    asyncio.run(scenario())


@pytest.mark.parametrize("sent", [b"hello\n", b"{}\n", b'{"command": 5}\n', b"[]\n", b"\xff\xfe\n", b"\n"])
def test_what_is_no_request_gets_one_clear_refusal(tmp_path: Path, sent: bytes) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as path:
            reply = await raw(path, sent)
            assert (reply.ok, reply.exit_code) == (False, 2)
            assert "not a request" in reply.message

    asyncio.run(scenario())


def test_a_request_above_the_limit_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as path:
            reply = await raw(path, b'{"command": "' + b"x" * (2 * MAX_REQUEST_BYTES))
            assert not reply.ok
            assert str(MAX_REQUEST_BYTES) in reply.message

    asyncio.run(scenario())


def test_slow_clients_do_not_keep_others_and_are_cut_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, deadline_s=0.5) as path:
            slow = [await asyncio.open_unix_connection(sock=connect(path)) for _ in range(3)]
            for _, writer in slow:
                writer.write(b'{"comm')
            assert (await raw(path, b'{"command": "status"}\n')).ok
            for reader, writer in slow:
                reply = msgspec.json.decode(await reader.readline(), type=Reply)
                assert "no whole request" in reply.message
                writer.close()
                await writer.wait_closed()

    asyncio.run(scenario())


def test_too_many_connections_are_told_to_try_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as path:
            held = [await asyncio.open_unix_connection(sock=connect(path)) for _ in range(4)]
            reader, writer = await asyncio.open_unix_connection(sock=connect(path))
            reply = msgspec.json.decode(await reader.readline(), type=Reply)
            assert (reply.ok, reply.exit_code) == (False, 3)
            writer.close()
            held[0][1].close()
            await held[0][1].wait_closed()
            while not (await asyncio.to_thread(ask, path, "status")).ok:
                await asyncio.sleep(0.01)
            for _, other in held[1:]:
                other.close()

    asyncio.run(scenario())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_take_all_connections(tmp_path: Path) -> None:
    hold = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "held = []\n"
        "for _ in range(4):\n"
        "    s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); held.append(s)\n"
        "print(sum(b'too many' in s.recv(200) for s in held[1:]), flush=True)\n"
        "sys.stdin.read()\n"
    )

    async def scenario() -> None:
        async with server(tmp_path) as path:
            for folder in [path.parent, *path.parent.parents][:-2]:
                folder.chmod(folder.stat().st_mode | 0o055 & ~0o022)
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", hold, str(path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert child.stdout is not None
            assert await child.stdout.readline() == b"3\n"
            assert (await raw(path, b'{"command": "status"}\n')).ok
            await child.communicate(b"")

    asyncio.run(scenario())


def test_a_handler_that_hangs_or_fails_is_answered_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        faults: list[str] = []
        async with server(tmp_path, handler_deadline_s=0.3, faults=faults) as path:
            for command in ("hang", "fail", "odd"):
                reply = await asyncio.to_thread(ask, path, command)
                assert (reply.ok, reply.exit_code) == (False, 3)
                assert "secret" not in reply.message
            assert len(faults) == 2
            assert "secret detail" in faults[0]

    asyncio.run(scenario())


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="nobody"):
        ask(tmp_path / "absent.sock", "status")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left.sock"))
    with pytest.raises(UnreachableError, match="refused"):
        ask(tmp_path / "left.sock", "status")


def test_a_daemon_that_does_not_answer(tmp_path: Path) -> None:
    listener = listen(tmp_path / "s.sock")
    with pytest.raises(UnreachableError, match="did not answer"):
        ask(tmp_path / "s.sock", "status", timeout_s=0.2)
    with pytest.raises(UnreachableError, match="not trusted"):
        ask(tmp_path / "s.sock", "status", trusted_uids={os.geteuid() + 1})
    listener.close()


def test_a_server_that_closes_while_somebody_connects_says_nothing_of_it(tmp_path: Path) -> None:
    troubles: list[dict[str, object]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: troubles.append(context))
        for _ in range(20):
            async with server(tmp_path) as path:
                await asyncio.sleep(0)
                clients = [connect(path) for _ in range(3)]
            for client in clients:
                client.close()
            await asyncio.sleep(0)

    asyncio.run(scenario())
    gc.collect()
    assert [str(trouble) for trouble in troubles] == []
