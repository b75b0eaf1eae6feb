"""The NVML process: ``python -I -m slurm_pfi.gpu.child PARENT_PID``, started by the agent, never by hand.

Its standard input and output are one socket. One thread reads requests and hands each to the thread of its device, so
that a device whose calls hang holds up no other. The process ends when the agent does, and after any answer that says
the library is gone: only a new process can load another version of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from queue import SimpleQueue
from typing import Final

import msgspec

from ..model import GpuId
from .device import (
    DeadlineError,
    DeviceError,
    LibraryGoneError,
    LostError,
    NeedsResetError,
    UnknownDeviceError,
)
from .nvml import Nvml
from .wire import Count, Describe, Frames, Reply, Request, SetLimit, failed, pack

_PR_SET_PDEATHSIG: Final = 1
_READ_BYTES: Final = 64 * 1024


def main(argv: list[str]) -> int:
    """Serve until the agent closes its end. Exit codes: 0 ended by the agent, 1 the library is gone, 2 wrong use."""
    for noise in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(noise, signal.SIG_IGN)  # meant for the agent, which ends us when it is ready to
    if len(argv) != 1 or not argv[0].isdigit():
        sys.stderr.write("usage: python -I -m slurm_pfi.gpu.child PARENT_PID (the node agent starts this)\n")
        return 2
    if not _die_with(int(argv[0])):
        return 0
    request_fd, reply_fd = _take_standard_streams()
    server = _Server(Nvml(), reply_fd)
    if server.open():
        server.serve(request_fd)
    # No way round this: a thread that hangs in the library would hold up an orderly end.
    os._exit(server.exit_code)


def _die_with(parent_pid: int) -> bool:
    """Ask the kernel to kill us with our parent; False when it is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent_pid


def _take_standard_streams() -> tuple[int, int]:
    """Keep the socket to ourselves: what the library reads is empty, what it prints goes to standard error."""
    request_fd, reply_fd = os.dup(0), os.dup(1)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.dup2(2, 1)
    os.close(null_fd)
    return request_fd, reply_fd


class _Server:
    """Requests in, replies out. Only ``serve`` hands out work; every thread writes its own replies."""

    def __init__(self, nvml: Nvml, reply_fd: int) -> None:
        self.exit_code = 0
        self._nvml = nvml
        self._reply_fd = reply_fd
        self._writing = threading.Lock()
        self._queues: dict[GpuId, SimpleQueue[Request]] = {}

    def open(self) -> bool:
        """Load the library and say how that went."""
        try:
            self._nvml.open()
        except DeviceError as error:
            self._send(Reply(number=0, failed=failed(error)))
            self.exit_code = 1
            return False
        self._send(Reply(number=0))
        return True

    def serve(self, request_fd: int) -> None:
        """Hand out requests until the agent closes its end."""
        frames, decoder = Frames(), msgspec.msgpack.Decoder(Request)
        while data := os.read(request_fd, _READ_BYTES):
            for body in frames.feed(data):
                self._hand_out(decoder.decode(body))

    def _hand_out(self, request: Request) -> None:
        if not request.device:
            threading.Thread(target=self._do, args=(request,), daemon=True).start()
            return
        queue = self._queues.get(request.device)
        if queue is None:
            queue = self._queues[request.device] = SimpleQueue()
            threading.Thread(target=self._work, args=(queue,), daemon=True).start()
        queue.put(request)

    def _work(self, queue: SimpleQueue[Request]) -> None:
        while True:
            self._do(queue.get())

    def _do(self, request: Request) -> None:
        reply = self._answer(request)
        self._send(reply)
        if reply.failed is not None and reply.failed.kind == LibraryGoneError.__name__:
            os._exit(1)

    def _answer(self, request: Request) -> Reply:
        number, call, uuid = request.number, request.call, getattr(request.call, "uuid", "")
        try:
            if time.monotonic_ns() > request.until_ns:
                raise DeadlineError("its turn came too late; it was not begun", uuid=uuid)
            if isinstance(call, Count):
                return Reply(number=number, count=self._nvml.count())
            if isinstance(call, Describe):
                return Reply(number=number, info=self._nvml.describe(call.index))
            if isinstance(call, SetLimit):
                limits = self._nvml.set_limit(uuid, call.cap_mw, request.until_ns)
                return Reply(number=number, limits=limits)
            sample = self._nvml.sample(uuid, activity=call.activity, quick=call.quick)
            return Reply(number=number, sample=sample)
        except DeviceError as error:
            if isinstance(error, LostError | NeedsResetError):
                self._nvml.forget(uuid)
            return Reply(number=number, failed=failed(error))
        except Exception as error:  # a binding without types can hand out anything
            surprise = UnknownDeviceError(f"{type(error).__name__}: {error}", uuid=uuid)
            return Reply(number=number, failed=failed(surprise))

    def _send(self, reply: Reply) -> None:
        rest = memoryview(pack(reply))
        try:
            with self._writing:
                while rest:
                    rest = rest[os.write(self._reply_fd, rest) :]
        except OSError:
            os._exit(0)  # the agent has gone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
