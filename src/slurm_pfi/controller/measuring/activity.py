"""What the GPUs of a run did, beside what its counter tells: whether they agree, and a loss without a counter. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, isfinite, sqrt
from typing import Final, NamedTuple

from ...elasticity.evidence import LEAST_NOISE_SD
from ...elasticity.proxy import CLOCK_SD, LEAST_TENSOR, Judged, Ratio, estimate, judge
from ...model import Activity, GpuReport
from .levels import Level
from .record import Record
from .sample import Pace

NS_PER_S: Final = 1_000_000_000
LEAST_JUDGED_S: Final = 10.0
"""A counter is held against activity when it was watched for so long at both levels."""

FEWEST_READINGS: Final = 2
"""Readings of activity under a cap that say something beside those without."""

LEAST_COVERED: Final = 0.5
"""A loss is told by activity when it was known for so much of the time under caps."""

MOST_CLOCK_MHZ: Final = 10_000.0
LONGEST_S: Final = 60.0
UNTAUGHT: Final = frozenset({"thermal", "power brake", "other"})
"""Words of ``GpuReport.slowed`` that have nothing to do with a cap of ours."""


class Estimated(NamedTuple):
    """Share of its throughput that a run lost while capped, by activity alone, and the standard deviation of that."""

    loss: float
    sd: float


# ------------------------------------------------------------------------------------------------ from reports


def pace_of(gpus: Sequence[tuple[GpuReport, int]], number: int) -> Pace | None:
    """What all ``number`` GPUs of a run did of late; None while one of them does not tell it.

    ``gpus``: each with the instant (our clock) at which its report came.
    """
    # What a board does for several runs says nothing of one of them.
    found = [(gpu.activity, at_ns) for gpu, at_ns in gpus if gpu.activity is not None and len(gpu.runs) < 2]
    told = [(one, at_ns) for one, at_ns in found if _possible(one)]
    if not number or len(told) < number:
        return None
    clocks = [one.sm_clock_mhz for one, _ in told if one.sm_clock_mhz is not None]
    tensors = [
        one.tensor * one.sm_clock_mhz
        for one, _ in told
        if one.tensor is not None and one.sm_clock_mhz is not None
    ]
    if len(clocks) < number:
        return None
    return Pace(
        from_ns=min(at_ns - round((one.age_s + one.over_s) * NS_PER_S) for one, at_ns in told),
        to_ns=max(at_ns - round(one.age_s * NS_PER_S) for one, at_ns in told),
        tensor_mhz=sum(tensors) / number if len(tensors) == number else None,
        clock_mhz=min(clocks),
    )


def _possible(one: Activity) -> bool:
    clock = one.sm_clock_mhz
    return (
        0 < one.over_s <= LONGEST_S
        and 0 <= one.age_s <= LONGEST_S
        and (clock is None or (isfinite(clock) and 0 < clock <= MOST_CLOCK_MHZ))
        and (one.tensor is None or 0 <= one.tensor <= 1)
    )


# ------------------------------------------------------------------------------------------------ what it shows


def dispute(record: Record) -> str:
    """That the counter tells another thing of the present cap than the GPUs did, in words; empty if it does not."""
    level, free = record.level(record.cap_mw), record.level(None)
    if level is None or free is None or level.cap_mw is None or record.rate_source != "seen":
        return ""
    if min(level.seconds, free.seconds) < LEAST_JUDGED_S:
        return ""
    found = judged(level, free)
    if found is None or not found.why:
        return ""
    return f"at a cap of {level.cap_mw / 1000:.0f} W it kept {found.why}"


def judged(level: Level, free: Level | None, *, disputed: bool = False) -> Judged | None:
    """The throughput that a level kept of that without a cap: as told where activity agrees, else by activity.

    ``disputed``: the counter was contradicted at one level, so that activity rules at all that it tells of. None where
    neither tells anything.
    """
    if free is None:
        return None
    told, tensor, clock = _told(level, free), _tensor(level, free), _clock(level, free)
    if disputed and (shown := estimate(tensor, clock)) is not None:
        return Judged(shown.value, shown.sd)
    return None if told is None else judge(told, tensor, clock)


def unjudged(level: Level, free: Level | None) -> bool:
    """Whether activity will tell of this level, but does not yet: until then its counter is not followed.

    Nor is it before activity has told of the level without a cap: a counter that stalls in each reading keeps it off.
    """
    if free is None:
        return False
    if (
        free.clock_mhz is None
        or level.clock_mhz is None
        or (free.tensor.count and free.tensor.rate_sd is None)
    ):
        return True
    return _by_tensor(free) and _tensor(level, free) is None


def lost_by_activity(record: Record) -> Estimated | None:
    """What caps cost a run by the activity of its GPUs alone, in the last hours; None where that does not tell it."""
    if record.shared:
        return None  # a part of the time under caps is not in its levels
    free = {level.segment: level for level in record.levels if level.cap_mw is None}
    binding_mw = record.draw_mw
    loss = sd = known_s = capped_s = 0.0
    for level in record.levels:
        if level.cap_mw is None or (binding_mw is not None and level.cap_mw >= binding_mw):
            continue
        capped_s += level.draw_s
        base = free.get(level.segment)
        shown = None if base is None else estimate(_tensor(level, base), _clock(level, base))
        if shown is None:
            continue
        # All levels are held against one baseline, so that their errors go together.
        seconds = level.tensor.seconds
        known_s += seconds
        loss += seconds * (1 - shown.value)
        sd += seconds * shown.value * shown.sd
    if known_s <= 0 or known_s < LEAST_COVERED * capped_s:
        return None
    return Estimated(loss / known_s, sd / known_s)


def _told(level: Level, free: Level) -> Ratio | None:
    rate, base = level.rate_per_s, free.rate_per_s
    rate_sd, base_sd = level.rate_sd, free.rate_sd
    if rate is None or not base or rate_sd is None or base_sd is None:
        return None
    share = rate / base
    return Ratio(share, hypot(rate_sd, base_sd)) if isfinite(share) else None


def _by_tensor(free: Level) -> bool:
    """Whether the tensor pipes do the work of a run, as far as it was seen without a cap."""
    clock_mhz, rate = free.clock_mhz, free.tensor.rate_per_s
    if clock_mhz is None or rate is None or free.tensor.rate_sd is None:
        return False
    return rate >= LEAST_TENSOR * clock_mhz


def _tensor(level: Level, free: Level) -> Ratio | None:
    """How much of its tensor cycles per time is left; None where the tensor pipes do not do the work."""
    one, base = level.tensor, free.tensor
    if one.count < FEWEST_READINGS or not _by_tensor(free):
        return None
    rate, base_rate, base_sd = one.rate_per_s or 0.0, base.rate_per_s or 0.0, base.rate_sd or 0.0
    # Of few readings the noise is not known: they are taken to be as good as those without a cap.
    one_sd = one.rate_sd or max(LEAST_NOISE_SD, base_sd * sqrt(base.count / one.count))
    return Ratio(rate / base_rate, hypot(one_sd, base_sd))


def _clock(level: Level, free: Level) -> Ratio | None:
    mhz, base_mhz = level.clock_mhz, free.clock_mhz
    return None if mhz is None or not base_mhz else Ratio(mhz / base_mhz, CLOCK_SD)
