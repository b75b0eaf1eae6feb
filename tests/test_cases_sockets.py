"""F5: sockets and pid files that are found at a start. One table for every socket that a daemon of ours opens."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from slurm_pfi.bus.asking import Reply, ask
from slurm_pfi.bus.control import ControlServer
from slurm_pfi.bus.local import LocalServer
from slurm_pfi.bus.unix import SocketError, SocketInUseError, UnreachableError, connect, listen
from slurm_pfi.node.lock import Lock, LockedError, end_holder
from slurm_pfi.node.progress import ProgressTable
from slurm_pfi.node.progress_socket import ProgressSocket
from slurm_pfi.node.scrape import MetricsServer
from slurm_pfi.node.sender import JobFinder
from testbed.lone_node import LoneNode, wait_for

NOBODY: Final = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


@dataclass(frozen=True)
class Opened:
    """A socket of ours, open. ``close`` ends it."""

    close: Callable[[], Awaitable[None]]


async def _control(path: Path) -> Opened:
    async def answer(request: object, peer: object) -> Reply:
        return Reply(ok=True)

    server = ControlServer(path, handler=answer)
    await server.start()
    return Opened(close=server.close)


async def _bus(path: Path) -> Opened:
    server = LocalServer(path, on_report=lambda report, peer: None, on_fault=lambda text: None, node_uids=[0])
    await server.start()
    return Opened(close=server.close)


async def _metrics(path: Path) -> Opened:
    server = MetricsServer("unix", path, lambda: b"x 1\n")
    server.start()
    return Opened(close=server.close)


async def _progress(path: Path) -> Opened:
    finder = JobFinder(frozenset({os.geteuid()}))
    server = ProgressSocket(path, finder, ProgressTable(), on_first_drop=lambda why, uid: None)
    server.open()

    async def close() -> None:
        server.close()

    return Opened(close=close)


OPENERS: Final = {"control": _control, "bus": _bus, "metrics": _metrics, "progress": _progress}
# The progress socket's name belongs to whoever holds the node's lock, so a live one there is never met.
STREAMS: Final = ("control", "bus", "metrics")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can look into, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="pfi-") as name:
        made = Path(name)
        made.chmod(0o755)
        yield made


def _kind(name: str) -> socket.SocketKind:
    return socket.SOCK_DGRAM if name == "progress" else socket.SOCK_STREAM


def _answers(name: str, path: Path) -> None:
    """Raises OSError when nobody listens."""
    with socket.socket(socket.AF_UNIX, _kind(name)) as sock:
        sock.connect(str(path))


@pytest.mark.parametrize("name", OPENERS)
def test_f5_a_socket_left_behind_is_replaced(name: str, folder: Path) -> None:
    path = folder / "x.sock"
    with socket.socket(socket.AF_UNIX, _kind(name)) as dead:
        dead.bind(str(path))
    left = path.stat().st_ino

    async def story() -> None:
        opened = await OPENERS[name](path)
        _answers(name, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        await opened.close()

    with pytest.raises(ConnectionRefusedError):
        _answers(name, path)
    asyncio.run(story())
    assert not path.exists() or path.stat().st_ino != left


@pytest.mark.parametrize("name", STREAMS)
def test_f5_a_live_one_is_respected(name: str, folder: Path) -> None:
    path = folder / "x.sock"

    async def story() -> None:
        first = await OPENERS[name](path)
        with pytest.raises(SocketInUseError, match=rf"in use by pid {os.getpid()}; stop that one first"):
            await OPENERS[name](path)
        _answers(name, path)
        await first.close()

    asyncio.run(story())


@pytest.mark.parametrize("name", OPENERS)
@pytest.mark.parametrize("lies", ["file", "symlink", "dangling symlink", "folder", "fifo"])
def test_f5_what_is_no_socket_is_left_alone(name: str, lies: str, folder: Path) -> None:
    path, other = folder / "x.sock", folder / "other"
    match lies:
        case "file":
            path.write_text("precious")
        case "symlink":
            with socket.socket(socket.AF_UNIX, _kind(name)) as dead:
                dead.bind(str(other))
            path.symlink_to(other)
        case "dangling symlink":
            path.symlink_to(other)
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
    before, there = path.lstat(), other.exists()

    async def story() -> None:
        with pytest.raises(SocketError, match="exists and is not a socket; it is left alone: move it away"):
            await OPENERS[name](path)

    asyncio.run(story())
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert other.exists() == there, "nothing behind the link was made or removed"


@contextmanager
def _as_user(uid: int) -> Iterator[None]:
    """This process acts as another user, without root's powers."""
    groups, gid, own = os.getgroups(), os.getegid(), os.geteuid()
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(own)
        os.setegid(gid)
        os.setgroups(groups)


@root_only
def test_f5_a_user_outside_the_mode_cannot_connect(folder: Path) -> None:
    path = folder / "x.sock"
    listener = listen(path, mode=0o660)
    try:
        with _as_user(NOBODY), pytest.raises(UnreachableError, match="Permission denied"):
            connect(path)
        connect(path).close()
    finally:
        listener.close()


def test_f5_the_mode_is_set_before_anyone_is_heard(folder: Path) -> None:
    """By the kernel's account: bind, chmod, listen, in this order, though the umask would let everybody in."""
    strace = shutil.which("strace")
    assert strace is not None, "strace is missing: apt-get install strace"
    code = (
        "import os, pathlib; os.umask(0); from slurm_pfi.bus.unix import listen; "
        f"listen(pathlib.Path({str(folder / 'x.sock')!r}), mode=0o600)"
    )
    out = folder / "calls"
    calls = "bind,chmod,fchmodat,fchmod,listen"
    subprocess.run(
        [strace, "-qq", "-o", out, "-e", f"trace={calls}", sys.executable, "-c", code], check=True, timeout=60
    )
    seen = re.findall(r"^(\w+)\(", out.read_text(), re.MULTILINE)
    assert [name.replace("fchmodat", "chmod") for name in seen][-3:] == ["bind", "chmod", "listen"]


@root_only
def test_f5_the_peers_uid_decides_on_each_connection(folder: Path) -> None:
    site = LoneNode(folder)
    try:
        site.start()
        control = site.paths.control
        with _as_user(NOBODY):
            assert ask(control, "status").ok
            for _ in range(2):
                refused = ask(control, "release")
                assert (refused.ok, refused.exit_code) == (False, 1)
                assert refused.message == "uid 65534 may not release this node; ask its admin"
        assert ask(control, "release").ok
        assert site.log.read_text().count("control refused uid=65534") == 1
    finally:
        site.close()


# ---------------------------------------------------------------------------------------------------- pid files


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with us."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_f5_a_pid_in_a_file_that_nobody_holds_is_not_believed(
    folder: Path, stranger: subprocess.Popen[bytes]
) -> None:
    path = folder / "lock"
    path.write_text(f"{stranger.pid}\n")
    assert end_holder(path) is None
    Lock(path).release()
    assert stranger.poll() is None


def test_f5_a_pid_in_a_held_file_is_believed_only_of_who_has_it_open(
    folder: Path, stranger: subprocess.Popen[bytes]
) -> None:
    path = folder / "lock"
    held = Lock(path)
    path.write_text(f"{stranger.pid}\n")
    with pytest.raises(LockedError):
        end_holder(path, wait_s=0.2)
    assert stranger.poll() is None
    held.release()


def test_f5_the_holder_itself_is_ended(folder: Path) -> None:
    path = folder / "lock"
    code = "import time, pathlib, sys; from slurm_pfi.node.lock import Lock; "
    code += "held = Lock(pathlib.Path(sys.argv[1])); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)]) as holder:
        wait_for(lambda: path.exists() and path.read_text().strip() == str(holder.pid), "the lock held")
        assert end_holder(path) == holder.pid
        assert holder.wait(10) == -15
