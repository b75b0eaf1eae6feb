"""Reports and plans as bytes: a length of four bytes (big endian), then JSON.

Unknown fields are ignored, so that versions N and N-1 talk. Everything else is strict: a wrong type, a missing
field, a number that is not finite or a frame above 1 MiB is a CodecError, and the connection that brought it ends.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from ..model import BusMessage, Plan, Report

MAX_FRAME_BYTES: Final = 1 << 20
HEADER_BYTES: Final = 4

_HEADER: Final = struct.Struct(">I")
_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[Report | Plan]] = msgspec.json.Decoder(Report | Plan)


class CodecError(ValueError):
    """Bytes or a message that may not pass; the text says what is wrong with it."""


def encode(message: BusMessage) -> bytes:
    """One message as a frame. Raises CodecError when what arrived would not equal what was sent.

    JSON knows no NaN and no infinity, and the encoder would turn them into null, which means "unknown" or
    "no end" here; a type error of the sender would surface only at the receiver. Reading it back finds both.
    """
    try:
        payload = _ENCODER.encode(message)
        same = _DECODER.decode(payload) == message
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"a {type(message).__name__} cannot be written: {error}") from error
    if not same:
        raise CodecError(f"a {type(message).__name__} would arrive changed: a number in it is not finite")
    if len(payload) > MAX_FRAME_BYTES:
        raise CodecError(f"a {type(message).__name__} of {len(payload)} bytes is above {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(payload)) + payload


def frame_length(header: bytes) -> int:
    """The bytes that follow this header of four. Raises CodecError on an empty frame or one above the limit."""
    if len(header) != HEADER_BYTES:
        raise CodecError(f"a frame header has {HEADER_BYTES} bytes, not {len(header)}")
    (length,) = _HEADER.unpack(header)
    if not 0 < length <= MAX_FRAME_BYTES:
        raise CodecError(f"a frame of {length} bytes is not within 1 and {MAX_FRAME_BYTES}")
    return int(length)


def decode(payload: bytes) -> BusMessage:
    """The message in a frame's payload (without its header). Raises CodecError."""
    if len(payload) > MAX_FRAME_BYTES:
        raise CodecError(f"a message of {len(payload)} bytes is above {MAX_FRAME_BYTES}")
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"not a report or plan: {error}") from error
