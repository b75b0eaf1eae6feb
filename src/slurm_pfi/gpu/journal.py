"""The durable record of each GPU's limit before us, and of every value that we have issued since.

It is written before a limit is set, so that a crash at any instant leaves either no change or a record of it. It
lives under /run and so dies with a reboot, as the limits do; boot id and driver start tell an older record apart.
An entry that cannot be trusted is said to be so; nothing in it is used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from ..files import remove_temporaries_of_the_dead, write_atomically_at
from ..model import Frozen, GpuId

VERSION: Final = 1
_MAX_BYTES: Final = 64 * 1024
_UUID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,95}", re.ASCII)
_SUFFIX: Final = ".json"

PriorSource: TypeAlias = Literal["default", "read", "controller"]


class JournalError(Exception):
    """The journal could not be written or its folder cannot be trusted; the old entry, if any, is intact."""


class JournalEntry(Frozen, frozen=True, kw_only=True):
    """What is known of one GPU in this boot.

    ``prior_mw`` is the limit before us and ``how`` says where it is from. ``issued_mw`` holds every value that we
    have set in this boot. ``current_mw`` is the last one that is not yet restored, None when the GPU is as it was.
    ``run`` is the run it was set for as text, empty when none. ``lost_mw``: caps whose set was never answered; a call
    that hangs in the driver may still do it, even when the GPU is as it was.
    """

    version: int = VERSION
    uuid: GpuId
    prior_mw: int
    issued_mw: tuple[int, ...]
    current_mw: int | None
    run: str
    boot_id: str
    driver_start: str
    how: PriorSource
    lost_mw: tuple[int, ...] = ()


class Missing(Frozen, frozen=True, kw_only=True):
    """There is no entry."""


class Unreadable(Frozen, frozen=True, kw_only=True):
    """There is a file, but nothing in it may be used."""

    reason: str


class Stale(Frozen, frozen=True, kw_only=True):
    """A sound entry of another boot or driver start: the limits it tells of are gone."""

    entry: JournalEntry
    reason: str


JournalRead: TypeAlias = JournalEntry | Missing | Unreadable | Stale


class _File(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True):
    entry: msgspec.Raw
    sha256: str


class Journal:
    """The folder of entries of one node. One process writes it at a time."""

    def __init__(self, folder: Path, boot_id: str, driver_start: str) -> None:
        """Make the folder (0700) if it is missing. Raises JournalError when it is not ours alone to write."""
        self._folder = folder
        self._boot_id = boot_id
        self._driver_start = driver_start
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise JournalError(f"{folder}: cannot be made: {error.strerror}") from error
        self._tidy()

    def read(self, uuid: GpuId) -> JournalRead:
        """The entry of one GPU. Raises JournalError only when the folder itself cannot be trusted."""
        folder_fd = self._open_folder()
        try:
            return self._read_at(folder_fd, uuid)
        finally:
            os.close(folder_fd)

    def read_all(self) -> dict[GpuId, JournalEntry | Unreadable | Stale]:
        """Every file of the folder, by the UUID in its name. Raises as ``read`` does."""
        folder_fd = self._open_folder()
        try:
            names = sorted(name for name in _list(folder_fd) if not name.startswith("."))
            found = {name.removesuffix(_SUFFIX): self._read_at(folder_fd, name) for name in names}
        finally:
            os.close(folder_fd)
        return {uuid: read for uuid, read in found.items() if not isinstance(read, Missing)}

    def sweep(self, listed: Collection[GpuId]) -> tuple[JournalEntry, ...]:
        """Drop what another boot or driver start left of GPUs that are no longer listed: they were replaced.

        Returns the entries of this one which say that a limit of ours stands on a GPU that is not listed. Raises as
        ``read`` does; an entry that cannot be removed stays.
        """
        lost: list[JournalEntry] = []
        for uuid, read in self.read_all().items():
            if uuid in listed:
                continue
            if isinstance(read, Stale):
                with contextlib.suppress(JournalError):
                    self.remove(uuid)
            elif isinstance(read, JournalEntry) and read.current_mw is not None:
                lost.append(read)
        return tuple(lost)

    def write(self, entry: JournalEntry) -> None:
        """Replace the entry of its GPU, durably.

        Raises JournalError when it cannot be written, is of another boot, or when its prior limit is a value that
        we issued ourselves: such a value is never a prior limit.
        """
        if (entry.boot_id, entry.driver_start) != (self._boot_id, self._driver_start):
            raise JournalError(
                f"{entry.uuid}: the entry is of another boot or driver start than this journal"
            )
        raw = msgspec.json.encode(entry)
        data = msgspec.json.encode(_File(entry=msgspec.Raw(raw), sha256=_checksum(raw)))
        name = self._name(entry.uuid)
        if len(data) > _MAX_BYTES:  # it would not be read again, and the GPU's prior limit would be lost
            issued = len(entry.issued_mw)
            raise JournalError(
                f"{entry.uuid}: {len(data)} bytes are too large for an entry: {issued} values issued"
            )
        folder_fd = self._open_folder()
        try:
            self._check_prior(entry, self._read_at(folder_fd, entry.uuid))
            write_atomically_at(folder_fd, name, data, 0o600)
        except OSError as error:
            raise JournalError(f"{self._folder / name}: cannot be written: {error.strerror}") from error
        finally:
            os.close(folder_fd)

    def remove(self, uuid: GpuId) -> None:
        """Drop the entry of a GPU, durably; it may be missing already. Raises JournalError."""
        name = self._name(uuid)
        folder_fd = self._open_folder()
        try:
            os.unlink(name, dir_fd=folder_fd)
            os.fsync(folder_fd)
        except FileNotFoundError:
            return
        except OSError as error:
            raise JournalError(f"{self._folder / name}: cannot be removed: {error.strerror}") from error
        finally:
            os.close(folder_fd)

    def _check_prior(self, entry: JournalEntry, old: JournalRead) -> None:
        if not isinstance(old, JournalEntry) or entry.prior_mw == old.prior_mw:
            return
        if entry.prior_mw in old.issued_mw:
            raise JournalError(
                f"{entry.uuid}: {entry.prior_mw} mW was issued by us in this boot and cannot be a prior limit; "
                f"the record says {old.prior_mw} mW"
            )

    def _open_folder(self) -> int:
        try:
            folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise JournalError(f"{self._folder}: cannot be opened as a folder: {error.strerror}") from error
        about = os.fstat(folder_fd)
        if about.st_uid == os.geteuid() and not about.st_mode & 0o022:
            return folder_fd
        os.close(folder_fd)
        raise JournalError(
            f"{self._folder}: owner {about.st_uid}, mode {stat.S_IMODE(about.st_mode):04o}; it must belong to "
            f"uid {os.geteuid()} and be writable by nobody else (chown and chmod 700)"
        )

    def _name(self, uuid: GpuId) -> str:
        if _UUID.fullmatch(uuid) is None:
            raise JournalError(f"{uuid!r} is not the UUID of a GPU")
        return uuid + _SUFFIX

    def _read_at(self, folder_fd: int, name: str) -> JournalRead:
        uuid = name.removesuffix(_SUFFIX)
        if _UUID.fullmatch(uuid) is None:
            return Unreadable(reason=f"{name!r} is not named after a GPU")
        try:
            data = _read_file(folder_fd, uuid + _SUFFIX)
        except FileNotFoundError:
            return Missing()
        except OSError as error:
            return Unreadable(reason=error.strerror or str(error))
        return self._parse(uuid, data)

    def _parse(self, uuid: GpuId, data: bytes) -> JournalEntry | Unreadable | Stale:
        try:
            entry = _decode(uuid, data)
        except ValueError as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
            return Unreadable(reason=str(error))
        if entry.boot_id != self._boot_id:
            return Stale(entry=entry, reason=f"boot {entry.boot_id}, now {self._boot_id}")
        if entry.driver_start != self._driver_start:
            return Stale(entry=entry, reason=f"driver start {entry.driver_start}, now {self._driver_start}")
        return entry

    def _tidy(self) -> None:
        folder_fd = self._open_folder()
        try:
            with contextlib.suppress(OSError):  # litter harms no entry; limits must be restored all the same
                remove_temporaries_of_the_dead(folder_fd)
        finally:
            os.close(folder_fd)


def _decode(uuid: GpuId, data: bytes) -> JournalEntry:
    """The entry in a file's content. Raises ValueError saying what is wrong with it."""
    if not data.strip(b"\0"):
        raise ValueError("filled with NUL bytes" if data else "empty")
    file = msgspec.json.decode(data, type=_File)
    if _checksum(bytes(file.entry)) != file.sha256:
        raise ValueError("wrong checksum")
    entry = msgspec.json.decode(file.entry, type=JournalEntry)
    if entry.version != VERSION:
        raise ValueError(f"version {entry.version}, expected {VERSION}")
    if entry.uuid != uuid:
        raise ValueError(f"holds the entry of {entry.uuid}")
    return entry


def _list(folder_fd: int) -> list[str]:
    with os.scandir(folder_fd) as found:
        return [item.name for item in found]


def _checksum(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _read_file(folder_fd: int, name: str) -> bytes:
    """The content of a regular file of ours; anything else there is an OSError, and none of it is waited for."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file_fd = os.open(name, flags, dir_fd=folder_fd)
    try:
        about = os.fstat(file_fd)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise OSError(errno.EPERM, "owned or writable by somebody else")
        if about.st_size > _MAX_BYTES:
            raise OSError(errno.EFBIG, f"{about.st_size} bytes: too large for an entry")
        with os.fdopen(os.dup(file_fd), "rb") as file:
            return file.read(_MAX_BYTES)
    finally:
        os.close(file_fd)
