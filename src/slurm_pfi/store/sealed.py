"""Small JSON files with a checksum: read whole and right, or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from ..files import write_atomically

_MAX_BYTES: Final = 64 * 1024 * 1024

T = TypeVar("T")


class UnreadableError(Exception):
    """A file of the store that is there but cannot be trusted. Never the same as an empty one."""


class Versioned(msgspec.Struct, frozen=True, kw_only=True):
    """Base of a body that says which version of its form it has; read by ``read_versioned``."""

    version: int


V = TypeVar("V", bound=Versioned)


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    sha256: str
    body: msgspec.Raw


def write_sealed(path: Path, body: object, *, mode: int = 0o600) -> None:
    """Write ``body`` as JSON beside its checksum, atomically and durably. Raises OSError; the old file stays then."""
    raw = msgspec.json.encode(body)
    sealed = _Sealed(sha256=hashlib.sha256(raw).hexdigest(), body=msgspec.Raw(raw))
    write_atomically(path, msgspec.json.encode(sealed) + b"\n", mode)


def read_sealed(path: Path, kind: type[T]) -> T | None:
    """The body, or None if there is no such file. Raises UnreadableError on anything else."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        body = bytes(sealed.body)
        if hashlib.sha256(body).hexdigest() != sealed.sha256:
            raise UnreadableError(f"{path} is damaged: its checksum does not match")
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableError(f"{path} is damaged: {error}") from error


def read_versioned(path: Path, kind: type[V], version: int = 1) -> V | None:
    """The same of a body with a version: one of another is not read. Raises UnreadableError."""
    body = read_sealed(path, kind)
    if body is not None and body.version != version:
        raise UnreadableError(f"{path} is of version {body.version}; this program reads version {version}")
    return body
