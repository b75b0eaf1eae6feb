"""How fast tags go to slurmctld, which is shared with everybody. Pure: the clock and chance come in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

SLOW_S: Final = 2.0
"""A tag that took longer, some milliseconds as a rule, found slurmctld under strain: as good as a failure."""

FIRST_PAUSE_S: Final = 0.5
MOST_PAUSE_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Pace:
    """When the next write may begin: never sooner than ``1 / rate_per_s`` after the last one began.

    Nor before slurmctld was left alone for as long as that one took. Times are seconds of any one monotonic clock.
    ``strained``: how many writes in a row failed or were slow. Nothing is saved up: after a pause, however long, writes
    are as far apart as before it.
    """

    rate_per_s: float
    next_s: float = 0.0
    strained: int = 0

    def after(self, began_s: float, ended_s: float, *, ok: bool, chance: float) -> Pace:
        """The pace after one write. ``chance`` (0..1, random) keeps two controllers from knocking together."""
        strained = 0 if ok and ended_s - began_s <= SLOW_S else self.strained + 1
        next_s = max(began_s + 1 / self.rate_per_s, ended_s + min(MOST_PAUSE_S, ended_s - began_s))
        if strained:
            pause_s = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(strained - 1, 16))
            next_s = max(next_s, ended_s + pause_s * (0.5 + 0.5 * chance))
        return replace(self, next_s=next_s, strained=strained)
