"""Watts, durations and intervals as people write them, integers as the daemons use them.

Inside and on the wire power is an int in milliwatts (``*_mw``), time a float in seconds (``*_s``) or an int in
nanoseconds (``*_ns``). Text has its unit spelled out; a number without one is refused, never guessed.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

MW_PER_W: Final = 1000
MAX_POWER_MW: Final = 10**13  # 10 GW: more than any site draws, so a larger figure is a slip of the pen

Z95: Final = 1.96
"""Standard deviations from the mean to either end of a 95 % interval."""

Z95_ONE_SIDED: Final = 1.645
"""Standard deviations that one of twenty normal values lies beyond, on one side."""

_POWER: Final = re.compile(r"([+-]?)(\d{1,15}(?:\.\d{1,6})?)\s?([a-zA-Z]*)", re.ASCII)
_POWER_UNITS: Final = {"W": 10**3, "kW": 10**6, "MW": 10**9}
_DURATION: Final = re.compile(
    r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m(?:in)?)?(?:(\d{1,6})s)?", re.ASCII
)


class UnitError(ValueError):
    """Text that is not a quantity; the message says what was read and what is allowed."""


def parse_power_mw(text: str) -> int:
    """Read ``18.5kW``, ``750 W`` or ``1.2MW`` as milliwatts, rounded down to whole milliwatts.

    Raises UnitError on a missing or unknown unit, a negative value or one above 10 GW. Zero is a power.
    """
    allowed = "write a power with its unit, such as 750W, 18.5kW or 1.2MW"
    match = _POWER.fullmatch(text.strip())
    if match is None:
        raise UnitError(f"power {text!r} is not a number with a unit: {allowed}")
    sign, number, unit = match.groups()
    if not unit:
        raise UnitError(f"power {text!r} has no unit: {allowed}")
    if unit not in _POWER_UNITS:
        raise UnitError(f"power {text!r} has the unknown unit {unit!r}: {allowed}")
    power_mw = int(Decimal(number) * _POWER_UNITS[unit])
    if sign == "-" and power_mw > 0:
        raise UnitError(f"power {text!r} is below zero: {allowed}")
    if power_mw > MAX_POWER_MW:
        raise UnitError(f"power {text!r} is above 10 GW: {allowed}")
    return power_mw


def parse_duration_s(text: str) -> float:
    """Read ``2h``, ``90m``, ``1h30m`` or ``45s`` as seconds. Raises UnitError on anything else and on zero."""
    allowed = "write a duration with its unit, such as 45s, 90m, 2h or 1h30m"
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise UnitError(f"duration {text!r} is not understood: {allowed}")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    duration_s = float(days * 86400 + hours * 3600 + minutes * 60 + seconds)
    if duration_s == 0:
        raise UnitError(f"duration {text!r} is zero: {allowed}")
    return duration_s


def watts_to_mw(watts: float) -> int:
    """Watts from a config file as milliwatts, rounded to the nearest milliwatt."""
    return round(watts * MW_PER_W)


def format_power(power_mw: int | None) -> str:
    """Power for people: whole watts below 10 kW, else kilowatts with two digits; ``?`` when unknown."""
    if power_mw is None:
        return "?"
    watts = power_mw / MW_PER_W
    if abs(watts) >= 10_000:
        return f"{watts / 1000:.2f} kW"
    return f"{watts:.0f} W"


def format_duration(duration_s: float) -> str:
    """A duration for people: ``45 s``, ``12 min``, ``3 h 05 min``, ``2 d 04 h``."""
    whole_s = round(duration_s)
    if whole_s < 120:
        return f"{whole_s} s"
    minutes = whole_s // 60
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"
