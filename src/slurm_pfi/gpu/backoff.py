"""Waiting longer after each failure in a row."""

from __future__ import annotations

import time
from typing import Final

from .device import DeviceError

FIRST_BACK_OFF_S: Final = 1.0
MOST_BACK_OFF_S: Final = 60.0


class BackOff:
    """After the n-th failure in a row nothing is tried for ``first_s`` x 2^(n-1), at most a minute."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._failures = 0
        self._until_s = -MOST_BACK_OFF_S
        self.error: DeviceError | None = None

    def fail(self, error: DeviceError) -> None:
        """It failed, or failed again."""
        self._until_s = time.monotonic() + min(self._first_s * 2 ** min(self._failures, 16), MOST_BACK_OFF_S)
        self._failures += 1
        self.error = error

    @property
    def calm(self) -> bool:
        """Whether the last failure is so long ago that the next one is a new story."""
        return time.monotonic() > self._until_s + MOST_BACK_OFF_S

    @property
    def left_s(self) -> float:
        """How long it is too early for another try."""
        return max(0.0, self._until_s - time.monotonic())

    def held(self) -> str:
        """What went wrong and when the next try is; empty when one may be made."""
        left_s = self.left_s
        return f"{self.error} (next try in {left_s:.1f} s)" if self.error is not None and left_s > 0 else ""
