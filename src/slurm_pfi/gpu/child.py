"""The NVML process: ``python -I -m slurm_pfi.gpu.child PARENT_PID``, started by the agent, never by hand.

It answers one request at a time on its standard input and output, which are one socket. It ends when the agent does,
and after any answer that says the library is gone: only a new process can load another version of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

import msgspec

from .device import DeviceError, LibraryGoneError, UnknownDeviceError
from .nvml import Nvml
from .wire import LENGTH, MAX_FRAME_BYTES, Count, Describe, Reply, Request, SetLimit, failed, pack

_PR_SET_PDEATHSIG: Final = 1


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
    return _serve(request_fd, reply_fd)


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


def _serve(request_fd: int, reply_fd: int) -> int:
    nvml = Nvml()
    decoder = msgspec.msgpack.Decoder(Request)
    reply = _open(nvml)
    try:
        while True:
            _write(reply_fd, pack(reply))
            if reply.failed is not None and reply.failed.kind == LibraryGoneError.__name__:
                return 1
            body = _read_frame(request_fd)
            if body is None:
                return 0
            reply = _answer(nvml, decoder.decode(body))
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the agent has gone


def _open(nvml: Nvml) -> Reply:
    try:
        nvml.open()
    except DeviceError as error:
        return Reply(number=0, failed=failed(error))
    return Reply(number=0)


def _answer(nvml: Nvml, request: Request) -> Reply:
    number, call = request.number, request.call
    try:
        if isinstance(call, Count):
            return Reply(number=number, count=nvml.count())
        if isinstance(call, Describe):
            return Reply(number=number, info=nvml.describe(call.index))
        if isinstance(call, SetLimit):
            return Reply(number=number, limits=nvml.set_limit(call.uuid, call.cap_mw))
        return Reply(number=number, sample=nvml.sample(call.uuid))
    except DeviceError as error:
        return Reply(number=number, failed=failed(error))
    except Exception as error:  # a binding without types can hand out anything
        surprise = UnknownDeviceError(f"{type(error).__name__}: {error}", uuid=getattr(call, "uuid", ""))
        return Reply(number=number, failed=failed(surprise))


def _read_frame(fd: int) -> bytes | None:
    """The next frame; None at the end of the stream, also in the middle of a frame."""
    head = _read_exactly(fd, LENGTH.size)
    if head is None:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {length} bytes")
    return _read_exactly(fd, length)


def _read_exactly(fd: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            return None
        data += part
    return data


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
