"""What a run did under one cap: draw and throughput, kept in few figures however long it lasts. Pure."""

from __future__ import annotations

from math import sqrt
from typing import Final

from ..elasticity.evidence import LEAST_NOISE_SD
from ..model import Frozen

FEWEST_INTERVALS: Final = 4
"""A level of fewer says nothing: its noise is not known."""

MOST_BATCHES: Final = 16
LONGEST_BATCH_S: Final = 600.0
"""Past it the oldest batch is dropped instead of being joined: a level is the run of the last two hours or so."""

STALL: Final = 0.5
"""Below this share of its level's rate a run is not training: a checkpoint, an evaluation, a start."""

JUMP: Final = 2.0
"""Above this multiple of its level's rate a counter was set anew, or what came before was no training."""


class Level(Frozen, frozen=True, kw_only=True):
    """One cap under which a run has worked; ``cap_mw`` None: without one.

    ``batches``: seconds and counter units by turns, oldest first; each is one interval until there are more than
    MOST_BATCHES, then each lasts ``batch_s`` at least. ``count`` intervals of the counter have taught it. ``draw_s``
    and ``draw_mws`` (mW x s of one GPU) are what its draw is the mean of. ``last_ns``: when it was taught last.
    """

    cap_mw: int | None
    segment: int
    last_ns: int
    batches: tuple[float, ...] = ()
    batch_s: float = 0.0
    count: int = 0
    draw_s: float = 0.0
    draw_mws: float = 0.0

    @property
    def draw_mw(self) -> int | None:
        """Mean draw of one GPU."""
        return round(self.draw_mws / self.draw_s) if self.draw_s > 0 else None

    @property
    def seconds(self) -> float:
        """How long its counter was watched."""
        return sum(self.batches[::2])

    @property
    def done(self) -> float:
        """Counter units in these seconds."""
        return sum(self.batches[1::2])

    @property
    def rate_per_s(self) -> float | None:
        """Mean rate of the run's counter; None without one."""
        seconds = self.seconds
        return self.done / seconds if seconds > 0 else None

    @property
    def rate_sd(self) -> float | None:
        """Relative standard deviation of the mean rate, by batch means; None with too few of them."""
        rates = [done / seconds for seconds, done in zip(self.batches[::2], self.batches[1::2], strict=True)]
        if len(rates) > FEWEST_INTERVALS and self.batches[-2] < self.batch_s / 2:
            rates.pop()  # the one that has just begun is as noisy as it is short
        mean = sum(rates) / len(rates) if rates else 0.0
        if len(rates) < FEWEST_INTERVALS or mean <= 0:
            return None
        square = sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1)
        return max(LEAST_NOISE_SD, sqrt(square / len(rates)) / mean)
