"""What readings say of a GPU's draw and work, and what of that can be: absurd is unknown, never 0. Pure.

Energy is the difference of the device's counter between two readings. Activity comes less often and covers the time
since it was last asked for.
"""

from __future__ import annotations

from math import isfinite
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from ..gpu.device import DeviceSample
from ..model import Activity

NS_PER_S: Final = 1_000_000_000
MOST_DRAW: Final = 1.5
"""A draw beyond this share of the device's greatest limit is none: over 2 kW was seen on boards of 700 W."""

LEAST_ENERGY_S: Final = 0.5
"""Devices bring their energy counter up to date some ten times a second: over less time a difference says little."""

IDLE_DRAW: Final = 0.25
"""At less than this share of its greatest limit a GPU that claims to be busy all the time is not."""

MOST_CLOCK: Final = 1.1
ABSURD_CLOCK_MHZ: Final = 10_000
OVER_CAP: Final = 1.05
OVER_CAP_MW: Final = 2000
FRESH_ACTIVITY_NS: Final = 30 * NS_PER_S

_SW_POWER_CAP: Final = 0x4
_HW_SLOWDOWN: Final = 0x8
_SYNC_BOOST: Final = 0x10
_SW_THERMAL: Final = 0x20
_HW_THERMAL: Final = 0x40
_POWER_BRAKE: Final = 0x80
"""Clocks event reasons, as nvml.h numbers them. Idleness and clocks that an admin fixed are no slowdown."""

_REASONS: Final = (
    ("power brake", _POWER_BRAKE),
    ("thermal", _SW_THERMAL | _HW_THERMAL),
    ("other", _HW_SLOWDOWN | _SYNC_BOOST),
    ("power cap", _SW_POWER_CAP),
)


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """What of earlier readings counts for the next. All times are CLOCK_MONOTONIC nanoseconds.

    ``mean_mw``: between ``mean_from_ns`` and ``energy_ns``, the instants of the last two energy readings.
    ``clock_mhz``: sum of the SM clocks read since activity was last asked for, of which there are ``clocks``.
    ``asked_ns``: when that was. ``activity`` was right when it was taken: its age counts from ``asked_ns``.
    """

    energy_mj: int | None = None
    energy_ns: int = 0
    mean_mw: int | None = None
    mean_from_ns: int = 0
    clock_mhz: float = 0.0
    clocks: int = 0
    asked_ns: int | None = None
    activity: Activity | None = None
    slowed: str = ""

    def activity_now(self, now_ns: int) -> Activity | None:
        """The last activity with its age; None where there is none of late."""
        if self.activity is None or self.asked_ns is None or now_ns - self.asked_ns > FRESH_ACTIVITY_NS:
            return None
        age_s = max(0, now_ns - self.asked_ns) / NS_PER_S
        return replace(self.activity, age_s=round(age_s, 3))


NOTHING_READ: Final = Telemetry()


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What a device can be: its greatest power limit and, where known, its greatest SM clock."""

    max_mw: int
    sm_clock_max_mhz: int | None = None


class Taken(NamedTuple):
    """A reading as far as it is believed. The texts say what is not; they are empty where all is well."""

    telemetry: Telemetry
    draw_mw: int | None
    draw_fault: str
    energy_fault: str


def taken(
    before: Telemetry, sample: DeviceSample, bounds: Bounds, *, quick: bool = False, asked: bool = False
) -> Taken:
    """Take one reading in. ``asked``: for activity too; ``quick``: only a draw and limits, between two others."""
    draw_mw, draw_fault = _draw(sample, bounds)
    if quick:
        return Taken(before, draw_mw, draw_fault, "")
    telemetry = replace(before, slowed=slowed(sample.event_reasons))
    telemetry, energy_fault = _energy(telemetry, sample, draw_mw, bounds)
    return Taken(
        _activity(telemetry, sample, draw_mw, bounds, asked=asked), draw_mw, draw_fault, energy_fault
    )


def slowed(event_reasons: int | None) -> str:
    """The gravest reason for a lower clock: power brake, thermal, other, power cap; empty for none, and if unknown."""
    reasons = event_reasons or 0
    return next((word for word, bits in _REASONS if reasons & bits), "")


def over_cap(telemetry: Telemetry, enforced_mw: int | None, since_ns: int) -> str:
    """That a GPU draws more than its cap, in words; empty if it does not.

    At its lowest clock a GPU can do no more. ``since_ns``: since when the cap has been in force.
    """
    mean_mw = telemetry.mean_mw
    if mean_mw is None or enforced_mw is None or telemetry.mean_from_ns < since_ns:
        return ""
    if mean_mw <= enforced_mw * OVER_CAP + OVER_CAP_MW:
        return ""
    watts, cap_w = mean_mw / 1000, enforced_mw / 1000
    return f"it draws {watts:.0f} W under a cap of {cap_w:.0f} W: at its lowest clock a cap has no hold on it"


def _draw(sample: DeviceSample, bounds: Bounds) -> tuple[int | None, str]:
    """The draw now, or the device's own average where that alone can be; a GPU that is on never draws nothing."""
    most_mw = MOST_DRAW * bounds.max_mw
    for draw_mw in (sample.draw_mw, sample.average_mw):
        if draw_mw is not None and 0 < draw_mw <= most_mw:
            believed: int | None = draw_mw
            break
    else:
        believed = None
    told_mw = sample.draw_mw
    absurd = told_mw is not None and not 0 < told_mw <= most_mw
    return believed, f"a draw of {told_mw} mW is not believed" if absurd else ""


def _energy(
    telemetry: Telemetry, sample: DeviceSample, draw_mw: int | None, bounds: Bounds
) -> tuple[Telemetry, str]:
    """The mean draw since the last reading. A counter that cannot be right tells none, and begins anew."""
    if sample.energy_mj is None:
        return replace(telemetry, energy_mj=None, mean_mw=None), ""
    anew = replace(
        telemetry,
        energy_mj=sample.energy_mj,
        energy_ns=sample.monotonic_ns,
        mean_mw=None,
        mean_from_ns=telemetry.energy_ns,
    )
    if telemetry.energy_mj is None:
        return anew, ""
    seconds = (sample.monotonic_ns - telemetry.energy_ns) / NS_PER_S
    if 0 <= seconds < LEAST_ENERGY_S:
        return telemetry, ""
    used_mj = sample.energy_mj - telemetry.energy_mj
    if used_mj < 0 or seconds < 0:
        return anew, "its energy counter ran backwards"
    if used_mj == 0:
        return anew, "" if draw_mw is None else f"its energy counter stands still at a draw of {draw_mw} mW"
    mean_mw = used_mj / seconds
    if mean_mw > MOST_DRAW * bounds.max_mw:
        return anew, f"a mean draw of {mean_mw:.0f} mW, by its energy counter, is not believed"
    return replace(anew, mean_mw=round(mean_mw)), ""


def _activity(
    telemetry: Telemetry, sample: DeviceSample, draw_mw: int | None, bounds: Bounds, *, asked: bool
) -> Telemetry:
    most_mhz = ABSURD_CLOCK_MHZ if bounds.sm_clock_max_mhz is None else MOST_CLOCK * bounds.sm_clock_max_mhz
    clock_mhz = sample.sm_clock_mhz
    if clock_mhz is not None and 0 < clock_mhz <= most_mhz:
        telemetry = replace(telemetry, clock_mhz=telemetry.clock_mhz + clock_mhz, clocks=telemetry.clocks + 1)
    if not asked:
        return telemetry
    made: Activity | None = None
    if telemetry.asked_ns is not None and sample.monotonic_ns > telemetry.asked_ns:
        mean_mhz = telemetry.clock_mhz / telemetry.clocks if telemetry.clocks else None
        made = Activity(
            over_s=round((sample.monotonic_ns - telemetry.asked_ns) / NS_PER_S, 3),
            age_s=0.0,
            sm=_share(sample.sm_active),
            tensor=_share(sample.tensor_active),
            dram=_share(sample.dram_active),
            copy=_share(sample.copy_utilisation),
            busy=_busy(sample, draw_mw, bounds),
            sm_clock_mhz=None if mean_mhz is None else round(mean_mhz, 1),
            sm_clock_max_mhz=bounds.sm_clock_max_mhz,
        )
    return replace(telemetry, activity=made, asked_ns=sample.monotonic_ns, clock_mhz=0.0, clocks=0)


def _share(share: float | None) -> float | None:
    """A share of time as far as it can be one, to what a report needs of it."""
    return round(share, 4) if share is not None and isfinite(share) and 0 <= share <= 1 else None


def _busy(sample: DeviceSample, draw_mw: int | None, bounds: Bounds) -> float | None:
    """Utilisation stays at 100 % on some idle GPUs: it counts only beside a draw that belongs to it."""
    busy = _share(sample.utilisation)
    if busy is None or busy < 1:
        return busy
    return busy if draw_mw is not None and draw_mw >= IDLE_DRAW * bounds.max_mw else None
