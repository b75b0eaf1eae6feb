"""Files that are whole or not there: written beside their place, made durable, then renamed over it."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

TEMPORARY_SUFFIX: Final = ".tmp"


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data``; a reader, also after a power cut, sees the old content or the new one.

    The mode is set exactly, whatever the umask. A symlink at ``path`` is replaced, never followed. Raises OSError
    (disk full, no folder, no permission); the old content is then intact and no temporary file is left.
    """
    folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        write_atomically_at(folder_fd, path.name, data, mode)
    finally:
        os.close(folder_fd)


def write_atomically_at(folder_fd: int, name: str, data: bytes, mode: int = 0o600) -> None:
    """The same for the file ``name`` in an open folder, for callers that have checked that very folder."""
    temporary = f".{name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file_fd = os.open(temporary, flags, mode, dir_fd=folder_fd)
    try:
        try:
            os.fchmod(file_fd, mode)
            _write_all(file_fd, data)
            os.fsync(file_fd)
        finally:
            os.close(file_fd)
        os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:
        os.unlink(temporary, dir_fd=folder_fd)
        raise
    os.fsync(folder_fd)


def writer_of_temporary(name: str) -> int | None:
    """The pid that made the temporary file ``name``; None when it is not one of ours."""
    parts = name.split(".")
    if not name.startswith(".") or not name.endswith(TEMPORARY_SUFFIX) or len(parts) < 5:
        return None
    return int(parts[-3]) if parts[-3].isascii() and parts[-3].isdigit() else None


def remove_temporaries_of_the_dead(folder_fd: int) -> None:
    """A writer killed between write and rename leaves its temporary file; nobody else would remove it.

    One whose writer lives is left alone. Raises OSError.
    """
    with os.scandir(folder_fd) as found:
        names = [item.name for item in found]
    for name in names:
        writer = writer_of_temporary(name)
        if writer is not None and not Path(f"/proc/{writer}").exists():
            with contextlib.suppress(FileNotFoundError):  # somebody else tidies too
                os.unlink(name, dir_fd=folder_fd)


def _write_all(file_fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file_fd, rest) :]
