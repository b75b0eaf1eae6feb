"""The steps of a plan, done or only told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from .plan import Step
from .quiet import remove_when_quiet
from .safe import MODE, RefusedError, opened, write

PATIENCE_S: Final = 60.0
"""How long a removal waits for a moment in which slurmd runs no hook of the folder."""

_WOULD: Final = {
    "make folder": "would make",
    "make file": "would make",
    "write": "would write",
    "replace": "would replace",
    "keep": "is as it should be:",
    "neutralise": "would turn into a hook that does nothing:",
    "remove": "would remove",
}
_DONE: Final = {
    "make folder": "made",
    "make file": "made",
    "write": "wrote",
    "replace": "replaced",
    "keep": "is as it should be:",
    "neutralise": "turned into a hook that does nothing:",
    "remove": "removed",
}


def told(step: Step, *, done: bool) -> str:
    """One line: what was done, or would be."""
    why = f" ({step.why})" if step.why else ""
    mode = f", mode {MODE:04o}" if step.verb in ("write", "replace") else ""
    return f"{(_DONE if done else _WOULD)[step.verb]} {step.path}{mode}{why}"


def perform(steps: tuple[Step, ...], tell: Callable[[str], None], patience_s: float = PATIENCE_S) -> None:
    """All steps in their order, each told when it is done. Raises RefusedError at the first that fails."""
    harmless: set[Path] = set()
    for step in steps:
        try:
            if step.verb == "neutralise":
                harmless.add(step.path)
            _perform(step, step.path in harmless, patience_s)
        except OSError as error:
            raise RefusedError(
                f"{step.path}: {error.strerror}; what was told before is done, nothing else"
            ) from error
        tell(told(step, done=True))


def _perform(step: Step, found_by_pattern: bool, patience_s: float) -> None:
    match step.verb:
        case "make folder":
            step.path.mkdir(mode=MODE, parents=True)
            step.path.chmod(MODE)
        case "make file":
            os.close(os.open(step.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640))
        case "write" | "replace" | "neutralise":
            write(step.path, step.data)
        case "remove" if found_by_pattern:
            if not remove_when_quiet(step.path, patience_s):
                raise RefusedError(
                    f"{step.path} does nothing now, but is still there: for {patience_s:g} s hooks of its folder ran "
                    "without a break. Run this again at a quiet time"
                )
        case "remove":
            with opened(step.path.parent) as folder:
                os.unlink(step.path.name, dir_fd=folder)
        case "keep":
            pass
