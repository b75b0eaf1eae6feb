"""Lines that jobs of this node have in their own output at their end: files that the SPANK plugin reads as root.

One file for each run, ``<job id>.<restart>`` in a folder that nobody else can look into.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Final

from ..files import write_atomically

MOST: Final = 1024
"""Lines taken from one plan."""

_NAME: Final = re.compile(r"[0-9]{1,10}\.[0-9]{1,10}", re.ASCII)
_LINE: Final = re.compile(r"[ -~]{1,300}", re.ASCII)  # PFI_LINE_BYTES of spank/job_line.h, less its end


class JobLines:
    """Keeps them in ``folder``; what cannot be written is said by the OSError of `keep`, and costs a job its line."""

    def __init__(self, folder: Path, cluster: str) -> None:
        self._folder = folder
        self._prefix = f"{cluster}:"
        self._kept: dict[str, str] = {}

    def keep(self, lines: Mapping[str, str], present: Container[str]) -> None:
        """Write the lines of runs (``cluster:12.0``) that are ``present`` (``12.0``) here. Raises OSError."""
        for run, line in list(lines.items())[:MOST]:
            name = run.removeprefix(self._prefix)
            if not _NAME.fullmatch(name) or not _LINE.fullmatch(line) or name not in present:
                continue
            if self._kept.get(name) != line:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                write_atomically(self._folder / name, line.encode("ascii"), 0o600)
                self._kept[name] = line

    def forget(self, present: Container[str]) -> None:
        """Remove the lines of runs that are not here (any more), those of an earlier agent too."""
        try:
            names = [path.name for path in self._folder.iterdir()]
        except OSError:
            return
        for name in names:
            if name not in present:
                self._kept.pop(name, None)
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink()
