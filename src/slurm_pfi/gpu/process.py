"""One NVML process as the agent sees it: started, asked with a deadline, ended. It never blocks the event loop.

The process runs in Python's isolated mode (``-I``): a root daemon must not load code from PYTHONPATH, the user's
site folder or the working folder. Packages of the environment that the agent itself runs in are found all the same.
LD_LIBRARY_PATH and the rest of the environment are handed on, because the loader needs them to find the library.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from .device import DeadlineError, LibraryGoneError
from .wire import LENGTH, MAX_FRAME_BYTES, Call, Reply, Request, pack, to_error

_END_S: Final = 1.0
"""How long an ended process is waited for. One that is stuck in the driver outlives even SIGKILL."""


class NvmlProcess:
    """Made by ``start``. After an error it is of no use and has to be killed."""

    def __init__(
        self, popen: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._popen = popen
        self._reader = reader
        self._writer = writer
        self._number = 0

    @classmethod
    async def start(cls, deadline_s: float, environment: Mapping[str, str] | None) -> NvmlProcess:
        """Start it and wait until the library is ready. Raises LibraryGoneError when it fails or takes too long."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-m", "slurm_pfi.gpu.child", str(os.getpid())]
        end = theirs.fileno()
        whole = None if environment is None else dict(environment)
        try:
            popen = subprocess.Popen(command, stdin=end, stdout=end, env=whole, cwd="/")
        except OSError as error:
            ours.close()
            raise LibraryGoneError(f"the NVML process cannot be started: {error}") from error
        finally:
            theirs.close()
        process = cls(popen, *await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(deadline_s):
                first = await process._reply(0)
            if first.failed is not None:
                raise to_error(first.failed)
        except TimeoutError as error:
            await process.kill()
            raise LibraryGoneError(f"the NVML process was not ready within {deadline_s:g} s") from error
        except BaseException:
            await process.kill()
            raise
        return process

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone; asking also takes its exit status, so that no zombie stays."""
        return self._popen.poll() is not None

    async def ask(self, call: Call, deadline_s: float, uuid: str) -> Reply:
        """Send one request; the reply may carry an error. Raises DeadlineError, or LibraryGoneError if it died."""
        self._number += 1
        try:
            async with asyncio.timeout(deadline_s):
                self._writer.write(pack(Request(number=self._number, call=call)))
                return await self._reply(self._number)
        except TimeoutError as error:
            raise DeadlineError(
                f"{_name(call, uuid)}: no answer from NVML in {deadline_s:g} s", uuid=uuid
            ) from error
        except LibraryGoneError as error:
            raise LibraryGoneError(f"{_name(call, uuid)}: {error}", uuid=uuid) from error

    async def end(self) -> None:
        """Close its input, so that it ends by itself and lets go of every handle; then make sure."""
        self._writer.close()
        await self._gone(_END_S)
        await self.kill()

    async def kill(self) -> bool:
        """End it for good; False when it is stuck in the driver and still there."""
        self._writer.transport.abort()
        if not self.has_ended:
            self._popen.kill()
            await self._gone(_END_S)
        return self.has_ended

    async def _reply(self, number: int) -> Reply:
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise LibraryGoneError(f"the NVML process sent a frame of {length} bytes")
            reply = msgspec.msgpack.decode(await self._reader.readexactly(length), type=Reply)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise LibraryGoneError(f"the NVML process died{await self._how()}") from error
        except msgspec.DecodeError as error:
            raise LibraryGoneError(f"the NVML process sent nonsense: {error}") from error
        if reply.number != number:
            raise LibraryGoneError(f"the NVML process answered {reply.number} when asked {number}")
        return reply

    async def _how(self) -> str:
        await self._gone(_END_S)
        code = self._popen.poll()
        if code is None:
            return ""
        return f" of signal {-code}" if code < 0 else f" with exit code {code}"

    async def _gone(self, patience_s: float) -> None:
        """Wait for the process to end; poll, because a process handle cannot be awaited on every kernel we run on."""
        clock = asyncio.get_running_loop()
        until = clock.time() + patience_s
        while self._popen.poll() is None and clock.time() < until:
            await asyncio.sleep(0.005)


def _name(call: Call, uuid: str) -> str:
    name = type(call).__name__
    return f"{uuid}: {name}" if uuid else name
