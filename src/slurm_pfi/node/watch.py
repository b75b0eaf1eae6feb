"""Learning of changes in one folder at once: inotify(7) through the C library, without a dependency."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

_IN_NONBLOCK: Final = os.O_NONBLOCK
_IN_CLOEXEC: Final = os.O_CLOEXEC
_IN_ONLYDIR: Final = 0x0100_0000
# A file closed after writing, renamed in or out, removed; attributes, as owner and mode count.
CHANGED: Final = 0x008 | 0x040 | 0x080 | 0x200 | 0x004
# The folder, to list it, or a file in it.
OPENED: Final = 0x020


class FolderWatch:
    """Tells that something changed in a folder, or what else is asked for, not what: the reader looks at all of it."""

    def __init__(self, events: int = CHANGED) -> None:
        """Raises OSError where the kernel gives no inotify; the regular rescan must then do."""
        self._events = events
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = self._libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if self.descriptor < 0:
            raise _last_error("inotify_init1")

    def watch(self, folder: Path) -> None:
        """Watch this folder; asking again is harmless, and needed after it was replaced. Raises OSError."""
        name = os.fsencode(folder)
        if self._libc.inotify_add_watch(self.descriptor, name, self._events | _IN_ONLYDIR) < 0:
            raise _last_error(str(folder))

    def drain(self) -> bool:
        """Forget the changes that are waiting; whether there were any."""
        found = False
        try:
            while os.read(self.descriptor, 65536):
                found = True
        except BlockingIOError:
            pass
        return found

    def close(self) -> None:
        os.close(self.descriptor)


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)
