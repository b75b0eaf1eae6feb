"""What a run did under one cap: draw and throughput, kept in few figures however long it lasts. Pure."""

from __future__ import annotations

from itertools import pairwise
from math import isqrt, sqrt
from typing import Final, NamedTuple, TypeVar

import msgspec

from ...elasticity.evidence import LEAST_NOISE_SD
from ...model import Frozen

FEWEST_INTERVALS: Final = 4
"""A level of fewer says nothing: its noise is not known."""

MOST_BATCHES: Final = 16
LONGEST_BATCH_S: Final = 600.0
"""Past it the oldest batch is dropped instead of being joined: a level is the run of the last two hours or so."""

LEAST_CLOCK_S: Final = 4.0

STALL: Final = 0.5
"""Below this share of its level's rate a run is not training: a checkpoint, an evaluation, a start."""

JUMP: Final = 2.0
"""Above this multiple of its level's rate a counter was set anew, or what came before was no training."""


class Batches(Frozen, frozen=True, kw_only=True):
    """A rate over time in a few figures.

    ``batches``: seconds and units by turns, oldest first; each is one interval until there are more than
    MOST_BATCHES, then each lasts ``batch_s`` at least. ``count`` intervals have taught it.
    """

    batches: tuple[float, ...] = ()
    batch_s: float = 0.0
    count: int = 0

    @property
    def seconds(self) -> float:
        """How long it was watched."""
        return sum(self.batches[::2])

    @property
    def done(self) -> float:
        """Units in these seconds."""
        return sum(self.batches[1::2])

    @property
    def rate_per_s(self) -> float | None:
        """Mean rate; None without an interval."""
        seconds = self.seconds
        return self.done / seconds if seconds > 0 else None

    @property
    def rate_sd(self) -> float | None:
        """Relative standard deviation of the mean rate; None with too few intervals.

        By the means of a few batches: an interval that ends late makes the next one short, so that single intervals
        scatter by far more than their sum.
        """
        number = len(self.batches) // 2
        groups = max(FEWEST_INTERVALS, isqrt(number))
        if number < groups:
            return None
        edges = [2 * (number * i // groups) for i in range(groups + 1)]
        rates = [
            sum(self.batches[start + 1 : end : 2]) / sum(self.batches[start:end:2])
            for start, end in pairwise(edges)
        ]
        mean = sum(rates) / groups
        if mean <= 0:
            return None
        square = sum((rate - mean) * (rate - mean) for rate in rates) / (groups - 1)
        return max(LEAST_NOISE_SD, sqrt(square / groups) / mean)


class Active(Frozen, frozen=True, kw_only=True):
    """What its GPUs did: tensor cycles (share of cycles x SM clock, MHz) and SM clock (MHz), each x seconds."""

    tensor_s: float = 0.0
    tensor_mhz_s: float = 0.0
    clock_s: float = 0.0
    clock_mhz_s: float = 0.0

    def and_then(self, other: Active) -> Active:
        """Both together."""
        return Active(
            tensor_s=self.tensor_s + other.tensor_s,
            tensor_mhz_s=self.tensor_mhz_s + other.tensor_mhz_s,
            clock_s=self.clock_s + other.clock_s,
            clock_mhz_s=self.clock_mhz_s + other.clock_mhz_s,
        )


IDLE: Final = Active()


class Level(Batches, frozen=True, kw_only=True):
    """One cap under which a run has worked; ``cap_mw`` None: without one. Its batches are of the run's counter.

    ``draw_s`` and ``draw_mws`` (mW x s of one GPU) are what its draw is the mean of. ``last_ns``: when it was taught
    last. ``tensor``: tensor cycles, in 10^6, of one GPU; ``clock_s`` and ``clock_mhz_s``: SM clock of the slowest.
    """

    cap_mw: int | None
    segment: int
    last_ns: int
    draw_s: float = 0.0
    draw_mws: float = 0.0
    tensor: Batches = Batches()
    clock_s: float = 0.0
    clock_mhz_s: float = 0.0

    @property
    def draw_mw(self) -> int | None:
        """Mean draw of one GPU."""
        return round(self.draw_mws / self.draw_s) if self.draw_s > 0 else None

    @property
    def clock_mhz(self) -> float | None:
        """Mean SM clock of the slowest GPU; None while it is not known well enough."""
        return self.clock_mhz_s / self.clock_s if self.clock_s >= LEAST_CLOCK_S else None


# ------------------------------------------------------------------------------------------------- teaching

LOW_DRAW: Final = 0.7
"""Below this share of its level's draw a GPU waits for something: a sample that says nothing of the cap."""

MOST_LEVELS: Final = 12
_LEAST_DRAW_S: Final = 3.0
_LEAST_TO_JUDGE: Final = 3


class Unlearned(NamedTuple):
    """What a level has forgotten as no training: seconds and counter units."""

    seconds: float
    done: float


def typical_rate(level: Level) -> float | None:
    """The rate that a new interval is judged by; None while the level has too few."""
    if level.count < _LEAST_TO_JUDGE:
        return None
    return _median(level.batches) if level.batch_s == 0 else level.rate_per_s


def learned(level: Level, seconds: float, done: float, now_ns: int) -> tuple[Level, Unlearned]:
    """One more interval of the counter. While each is kept by itself, those far off the median are forgotten."""
    level, forgotten = _with_interval(level, seconds, done)
    return msgspec.structs.replace(level, last_ns=now_ns), forgotten


_B = TypeVar("_B", bound=Batches)


def _with_interval(one: _B, seconds: float, done: float) -> tuple[_B, Unlearned]:
    batches, batch_s, forgotten = one.batches, one.batch_s, Unlearned(0.0, 0.0)
    if batch_s > 0 and batches[-2] < batch_s:
        batches = (*batches[:-2], batches[-2] + seconds, batches[-1] + done)
    else:
        batches = (*batches, seconds, done)
    if batch_s == 0:
        batches, forgotten = _near_median(batches)
    if len(batches) > 2 * MOST_BATCHES:
        if batch_s < LONGEST_BATCH_S:
            pairs = zip(
                batches[::4], batches[1::4], [*batches[2::4], 0.0], [*batches[3::4], 0.0], strict=False
            )
            batches = tuple(figure for s, d, s2, d2 in pairs for figure in (s + s2, d + d2))
            batch_s = 2 * sum(batches[::2]) / len(batches)
        else:
            batches = batches[2:]
    count = len(batches) // 2 if forgotten.seconds > 0 else one.count + 1
    return msgspec.structs.replace(one, batches=batches, batch_s=batch_s, count=count), forgotten


def acted(level: Level, active: Active) -> Level:
    """More of what its GPUs did. It fades as the batches do."""
    if active.tensor_s > 0:
        tensor, _ = _with_interval(level.tensor, active.tensor_s, active.tensor_mhz_s)
        level = msgspec.structs.replace(level, tensor=tensor)
    if active.clock_s > 0:
        fade = 0.5 if level.clock_s > MOST_BATCHES * LONGEST_BATCH_S else 1.0
        level = msgspec.structs.replace(
            level,
            clock_s=level.clock_s * fade + active.clock_s,
            clock_mhz_s=level.clock_mhz_s * fade + active.clock_mhz_s,
        )
    return level


def _median(batches: tuple[float, ...]) -> float:
    rates = sorted(done / seconds for seconds, done in zip(batches[::2], batches[1::2], strict=True))
    return rates[(len(rates) - 1) // 2]


def _near_median(batches: tuple[float, ...]) -> tuple[tuple[float, ...], Unlearned]:
    """Without the intervals far off the median. The newest may be far above: more like it tell whether it is right."""
    if len(batches) < 2 * _LEAST_TO_JUDGE:
        return batches, Unlearned(0.0, 0.0)
    median = _median(batches)
    pairs = list(zip(batches[::2], batches[1::2], strict=True))
    fits = [STALL * median <= done / seconds <= JUMP * median for seconds, done in pairs]
    fits[-1] = pairs[-1][1] / pairs[-1][0] >= STALL * median
    if all(fits):
        return batches, Unlearned(0.0, 0.0)
    kept = tuple(figure for one, fit in zip(pairs, fits, strict=True) if fit for figure in one)
    off = [one for one, fit in zip(pairs, fits, strict=True) if not fit]
    return kept, Unlearned(sum(s for s, _ in off), sum(d for _, d in off))


def is_low(level: Level | None, draw_mw: int) -> bool:
    """Whether a draw is far below that of its level."""
    return (
        level is not None
        and level.draw_s >= _LEAST_DRAW_S
        and draw_mw < LOW_DRAW * level.draw_mws / level.draw_s
    )


def is_high(level: Level | None, draw_mw: int) -> bool:
    """Whether a draw is so far above that of its level that the level saw no training."""
    return level is not None and level.draw_s > 0 and draw_mw * LOW_DRAW > level.draw_mws / level.draw_s


def drew(level: Level, draw_mws: float, seconds: float, now_ns: int) -> Level:
    """More of its draw, in mW x s of one GPU. It fades as the batches do."""
    fade = 0.5 if level.draw_s > MOST_BATCHES * LONGEST_BATCH_S else 1.0
    return msgspec.structs.replace(
        level,
        draw_s=level.draw_s * fade + seconds,
        draw_mws=level.draw_mws * fade + draw_mws,
        last_ns=now_ns,
    )


def kept(levels: tuple[Level, ...], level: Level) -> tuple[Level, ...]:
    """The levels with this one in its place.

    Of too many one of the oldest segment goes: one that says nothing, else the oldest, uncapped ones last.
    """
    key = level.segment, level.cap_mw
    for place, other in enumerate(levels):
        if (other.segment, other.cap_mw) == key:
            return (*levels[:place], level, *levels[place + 1 :])
    if len(levels) >= MOST_LEVELS:
        gone = min(levels, key=_worth)
        levels = tuple(one for one in levels if one is not gone)
    return (*levels, level)


def _worth(level: Level) -> tuple[int, bool, bool, int]:
    return level.segment, level.cap_mw is None, level.count >= FEWEST_INTERVALS, level.last_ns


def nearest_cap(levels: tuple[Level, ...], segment: int, cap_mw: int, within_mw: float) -> int:
    """The cap of the level that this cap belongs to: its own where no other is near."""
    near = [
        level.cap_mw
        for level in levels
        if level.segment == segment and level.cap_mw is not None and abs(level.cap_mw - cap_mw) <= within_mw
    ]
    return min(near, key=lambda other: abs(other - cap_mw), default=cap_mw)
