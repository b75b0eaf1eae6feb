"""Times as admins type them, as Unix seconds: one instant each, or an error.

The rules:
- ``18:00`` is the next 18:00 on this host's clock (its time zone, or TZ where that is set).
- An hour that the clock shows twice, when it is set back, means the first of the two that is still ahead.
- An hour that the clock leaves out, when it is set forward, is refused: nobody can know which was meant.
- An ISO time has its offset (``+01:00`` or ``Z``) and is that instant, whatever this host's zone; without an offset
  it is refused. Two times are compared as instants, never as text.
- A duration is a count of seconds: ``1d`` is 24 h, also across a change of the clock.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

from ..units import UnitError, parse_duration_s

_CLOCK: Final = re.compile(r"([0-9]{1,2}):([0-9]{2})", re.ASCII)
_ALLOWED: Final = "write 18:00 or 2026-11-30T18:00+01:00"


def parse_start_s(text: str, now_s: float) -> float:
    """A start: a duration from now, or a time as in `parse_time_s`. Raises UnitError."""
    try:
        return now_s + parse_duration_s(text)
    except UnitError:
        return parse_time_s(text, now_s)


def parse_time_s(text: str, now_s: float) -> float:
    """``18:00`` or an ISO time with its offset, by the rules above, as Unix seconds. Raises UnitError."""
    shown = repr(text[:64])
    match = _CLOCK.fullmatch(text.strip())
    if match is not None:
        hour, minute = int(match[1]), int(match[2])
        if hour > 23 or minute > 59:
            raise UnitError(f"time {shown} is not on the clock: write 00:00 to 23:59")
        return _next_on_the_clock(dt.time(hour, minute), now_s)
    try:
        at = dt.datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise UnitError(f"time {shown} is not understood: {_ALLOWED}") from error
    if at.tzinfo is None:
        raise UnitError(f"time {shown} has no offset from UTC, so it could be several instants: {_ALLOWED}")
    return at.timestamp()


def _next_on_the_clock(wanted: dt.time, now_s: float) -> float:
    today = _local(now_s).date()
    for day in (today, today + dt.timedelta(days=1)):
        shown = dt.datetime.combine(day, wanted)
        instants = sorted(shown.replace(fold=fold).timestamp() for fold in (0, 1))
        real = [at_s for at_s in instants if _local(at_s) == shown]
        if not real and _local(now_s) < shown:
            raise UnitError(
                f"{shown:%H:%M} does not exist on {shown:%Y-%m-%d}: this host's clock is set forward then; {_ALLOWED}"
            )
        ahead = [at_s for at_s in real if at_s > now_s]
        if ahead:
            return ahead[0]
    raise AssertionError("a clock shows every time of tomorrow, or leaves it out")


def _local(unix_s: float) -> dt.datetime:
    """This host's clock at that instant, without its offset."""
    return dt.datetime.fromtimestamp(unix_s)  # noqa: DTZ006 - a reading of this host's clock


def local_text(unix_s: float) -> str:
    """An instant on this host's clock, with its offset, so that no hour is shown twice."""
    return dt.datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
