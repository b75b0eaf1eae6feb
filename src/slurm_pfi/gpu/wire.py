"""What the agent and its NVML process say to each other: frames of msgpack with the length in front.

Each request has one reply with its number; replies come in any order. A request touches at most one device, so that a
call which hangs or crashes is known by its device. The first frame of a new process is a reply with number 0: the
library is ready, or how it failed.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

import msgspec

from ..model import Frozen, GpuId
from .device import (
    DeadlineError,
    DeviceError,
    DeviceInfo,
    DeviceLimits,
    DeviceSample,
    LibraryGoneError,
    LostError,
    NeedsResetError,
    PermissionDeniedError,
    RangeError,
    UnknownDeviceError,
    UnsupportedError,
)

MAX_FRAME_BYTES: Final = 64 * 1024
LENGTH: Final = struct.Struct(">I")
KINDS: Final[dict[str, type[DeviceError]]] = {
    kind.__name__: kind
    for kind in (
        PermissionDeniedError,
        UnsupportedError,
        RangeError,
        LostError,
        NeedsResetError,
        DeadlineError,
        LibraryGoneError,
        UnknownDeviceError,
    )
}


class Count(Frozen, frozen=True, kw_only=True, tag="count"):
    """How many devices are there."""


class Describe(Frozen, frozen=True, kw_only=True, tag="describe"):
    """Identity and limits of the device that is number ``index`` today."""

    index: int


class SetLimit(Frozen, frozen=True, kw_only=True, tag="set"):
    """Set a limit and read it back."""

    uuid: GpuId
    cap_mw: int


class TakeSample(Frozen, frozen=True, kw_only=True, tag="sample"):
    """Read one device: with ``quick`` limits and draw only, with ``activity`` its counters too."""

    uuid: GpuId
    activity: bool = False
    quick: bool = False


Call: TypeAlias = Count | Describe | SetLimit | TakeSample


class Request(Frozen, frozen=True, kw_only=True):
    """``number`` comes back with the reply.

    Requests of one ``device`` are done in order by one thread, those of different ones at the same time; a request
    without one has a thread of its own. After ``until_ns`` (CLOCK_MONOTONIC) it is not begun any more.
    """

    number: int
    device: GpuId
    until_ns: int
    call: Call


class Failed(Frozen, frozen=True, kw_only=True):
    """A DeviceError on its way: the name of its class, and what it carries."""

    kind: str
    message: str
    uuid: GpuId
    code: int | None


class Reply(Frozen, frozen=True, kw_only=True):
    """Exactly one field beside ``number`` is set, the one that the call asks for or ``failed``."""

    number: int
    count: int | None = None
    info: DeviceInfo | None = None
    limits: DeviceLimits | None = None
    sample: DeviceSample | None = None
    failed: Failed | None = None


class Frames:
    """Puts frames together again out of whatever pieces a stream socket delivers."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete now. Raises ValueError for a frame longer than any of ours."""
        self._data += data
        bodies = []
        while len(self._data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = LENGTH.size + length
            if len(self._data) < end:
                break
            bodies.append(bytes(self._data[LENGTH.size : end]))
            del self._data[:end]
        return bodies


def pack(message: Request | Reply) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def failed(error: DeviceError) -> Failed:
    return Failed(kind=type(error).__name__, message=str(error), uuid=error.uuid, code=error.code)


def to_error(failure: Failed) -> DeviceError:
    kind = KINDS.get(failure.kind, UnknownDeviceError)
    return kind(failure.message, uuid=failure.uuid, code=failure.code)
