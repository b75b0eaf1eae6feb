"""Files that root will run: looked at, written and removed only where nobody else can have a hand in it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ...files import write_atomically_at

MODE: Final = 0o755
MOST_BYTES: Final = 256 * 1024
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
_SHARED: Final = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "orangefs",
        "panfs",
        "smb3",
        "wekafs",
    ]
)


class RefusedError(Exception):
    """What is asked would be unsafe, or would drain a node; the message says why and what to do."""


def real(path: Path) -> Path:
    """Where symlinks lead; a loop of them, at which Path.resolve raises before Python 3.13, to a part of itself."""
    return Path(os.path.realpath(path))


def check_folder(folder: Path) -> None:
    """A folder for hooks, which need not be there yet. Raises RefusedError.

    It is no symlink, and nobody but root, or whoever we are, may write it or put another in its place.
    """
    for path in (folder, *folder.parents, *real(folder).parents):
        try:
            about = path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise RefusedError(f"{path}: {error.strerror}") from error
        if path == folder and stat.S_ISLNK(about.st_mode):
            raise RefusedError(f"{path} is a symbolic link to {path.readlink()}: name the folder itself")
        if stat.S_ISLNK(about.st_mode):
            continue  # where it leads is in the resolved parents, and who may change it in its own parent
        if not stat.S_ISDIR(about.st_mode):
            raise RefusedError(f"{path} is no folder")
        if about.st_uid not in (0, os.geteuid()):
            raise RefusedError(
                f"{path} belongs to uid {about.st_uid}, who could put any hook there: chown root it"
            )
        # In a sticky folder such as /tmp others can add names, but neither remove nor rename root's.
        if about.st_mode & 0o022 and (path == folder or not about.st_mode & stat.S_ISVTX):
            mode = stat.S_IMODE(about.st_mode)
            raise RefusedError(
                f"{path} may be written by others than its owner (mode {mode:04o}), and root runs what lies there: "
                f"chmod go-w {path}"
            )


def check_runnable(folder: Path) -> None:
    """Raises RefusedError where the kernel would not run a file."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        raise RefusedError(
            f"{there} is mounted noexec, so slurmd could not run a hook there: choose another folder"
        )


def text_of(path: Path) -> str | None:
    """The text of a regular file, None when there is none. Raises RefusedError for anything else, a symlink too."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if path.is_symlink():
            raise RefusedError(f"{path} is a symbolic link: move it away first") from error
        raise RefusedError(f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RefusedError(f"{path} is no ordinary file: move it away first")
        return file.read(MOST_BYTES).decode("utf-8", "replace")


def is_right(path: Path, data: bytes) -> bool:
    """Whether the file is there as `write` would leave it."""
    text = text_of(path)
    if text is None or text.encode() != data:
        return False
    about = path.lstat()
    return stat.S_IMODE(about.st_mode) == MODE and about.st_uid == os.geteuid()


def write(path: Path, data: bytes) -> None:
    """The whole file with its mode, or what was there before; no pattern matches what is written meanwhile, for its
    name begins with a dot. Raises OSError."""
    with opened(path.parent) as folder:
        write_atomically_at(folder, path.name, data, MODE)


def shared_kind(path: Path) -> str | None:
    """The kind of the file system where it is one that other hosts may use too. Raises OSError."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    kind = file_system(real(path), mounts)
    return kind if kind in _SHARED or kind.startswith("fuse") else None


def file_system(path: Path, mounts: str) -> str:
    """The kind of file system that ``path`` lies on, by the text of mountinfo; see proc(5). Of two mounts on one folder
    the later one counts."""
    best, kind = Path("/"), ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        where = Path(_ESCAPED.sub(lambda found: chr(int(found[1], 8)), before.split()[4]))
        if path.is_relative_to(where) and where.is_relative_to(best):
            best, kind = where, after.split()[0]
    return kind


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of the folder itself, never of what a symlink leads to."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
