"""File systems with a fault, mounted in a test's own folder: full, read-only, or one that never answers.

They need root's rights and a kernel that lets us mount; where it does not, that is an error with a name, never a skip.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .cluster_files import ClusterError

MNT_DETACH: Final = 2  # sys/mount.h
MS_NOSUID_NODEV: Final = 6
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def tmpfs(folder: Path, *options: str) -> Iterator[Path]:
    """A file system in memory on this folder. Raises ClusterError."""
    command = ["mount", "-t", "tmpfs", "-o", ",".join(["mode=755", *options]), "pfi-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"a tmpfs cannot be mounted here (are we root?): {done.stderr.strip()}")
    try:
        yield folder
    finally:
        _unmount(folder)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[Path]:
    """A file system on which files can still be made and hold nothing."""
    with tmpfs(folder, "size=16k"):
        with contextlib.suppress(OSError), (folder / ".filled").open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        yield folder


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """A file system that is empty and stays so."""
    with tmpfs(folder, "ro"):
        yield folder


@contextlib.contextmanager
def hung(folder: Path) -> Iterator[Path]:
    """A file system whose server never answers: whoever touches it waits in the kernel until it is unmounted."""
    try:
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ClusterError(f"/dev/fuse cannot be opened: {error.strerror}") from error
    try:
        data = f"fd={server},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if _LIBC.mount(b"pfi-hung", os.fsencode(folder), b"fuse", MS_NOSUID_NODEV, data) != 0:
            raise ClusterError(
                f"a fuse file system cannot be mounted here (are we root?): {os.strerror(ctypes.get_errno())}"
            )
        try:
            yield folder
        finally:
            # Without its server every request fails, so nobody waits on.
            os.close(server)
            server = -1
            _unmount(folder)
    finally:
        if server >= 0:
            os.close(server)


def _unmount(folder: Path) -> None:
    """At once, whoever is in it; a busy one goes when the last has left."""
    for _ in range(20):
        if _LIBC.umount2(os.fsencode(folder), MNT_DETACH) == 0:
            return
        time.sleep(0.05)
    raise ClusterError(f"{folder} cannot be unmounted: {os.strerror(ctypes.get_errno())}")
