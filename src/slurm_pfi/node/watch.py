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
_EVENTS: Final = 0x008 | 0x040 | 0x080 | 0x200 | 0x004


class FolderWatch:
    """Tells that something changed in a folder, not what: the reader looks at all of it anyway."""

    def __init__(self) -> None:
        """Raises OSError where the kernel gives no inotify; the regular rescan must then do."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = self._libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if self.descriptor < 0:
            raise _last_error("inotify_init1")

    def watch(self, folder: Path) -> None:
        """Watch this folder; asking again is harmless, and needed after it was replaced. Raises OSError."""
        name = os.fsencode(folder)
        if self._libc.inotify_add_watch(self.descriptor, name, _EVENTS | _IN_ONLYDIR) < 0:
            raise _last_error(str(folder))

    def drain(self) -> None:
        """Forget the changes that are waiting."""
        try:
            while os.read(self.descriptor, 65536):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.descriptor)


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)
