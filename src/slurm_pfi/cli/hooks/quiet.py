"""Taking a file out of a folder of hooks while slurmd goes on.

slurmd lists the files of a pattern, then runs one after the other; what it has listed and does not find drains the
node. So a hook is first replaced by one that does nothing, and goes only when nobody looks: the kernel says whether the
folder was opened meanwhile, /proc whether a hook of it still runs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from ...node.watch import OPENED, FolderWatch
from .safe import opened

_QUIET_S: Final = 0.3


def remove_when_quiet(path: Path, patience_s: float) -> bool:
    """Remove ``path``, a hook that does nothing; False when hooks ran all the time, and it is left. Raises OSError."""
    hidden = f".{path.name}.removed"  # no pattern matches it
    deadline = time.monotonic() + patience_s
    watch = FolderWatch(OPENED)
    try:
        with opened(path.parent) as folder:
            watch.watch(path.parent)
            while time.monotonic() < deadline:
                watch.drain()
                time.sleep(_QUIET_S)
                if watch.drain() or _run_from(path.parent):
                    continue
                os.rename(path.name, hidden, src_dir_fd=folder, dst_dir_fd=folder)
                if not watch.drain():
                    os.unlink(hidden, dir_fd=folder)
                    return True
                # Somebody looked just before. It is back within microseconds, and to start a hook takes longer.
                os.rename(hidden, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        watch.close()
    return False


def _run_from(folder: Path) -> bool:
    """Whether a process runs a file of this folder, itself or through its interpreter."""
    prefix = os.fsencode(folder) + b"/"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")[:3]
        except OSError:  # gone meanwhile
            continue
        if any(word.startswith(prefix) for word in words):
            return True
    return False
