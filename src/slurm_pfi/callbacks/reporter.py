"""What the callbacks share: reports at a bounded rate, and classes whose base is loaded when they are first used."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any, Final

from ..progress import report

APART_S: Final = 0.2


class Reporter:
    """Hands a counter over, at most every ``APART_S``, and never raises."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def tell(self, counter: float, unit: str, total: float | None = None, *, last: bool = False) -> None:
        """Report ``counter`` in ``unit`` unless another was just reported; ``last``: in any case.

        ``total``: what it will be when the work is done, None where nobody knows.
        """
        now_s = time.monotonic()
        if last or now_s >= self._next_s:
            self._next_s = now_s + APART_S
            report(counter, unit, total)


def base_class(module: str, name: str, package: str, user: str) -> type[Any]:
    """A class of a training library. Raises ImportError that says what to install."""
    try:
        found: type[Any] = getattr(import_module(module), name)
    except ImportError as error:
        raise ImportError(f"{user} needs {package}: pip install {package} ({error})") from error
    return found
