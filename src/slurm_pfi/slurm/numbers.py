"""Numbers in Slurm's JSON: plain, null, or an object that says whether there is one.

Releases before 23.02 write ``120`` or ``null``, later ones ``{"set": true, "infinite": false, "number": 120}``; both
can stand in one file. Zero, unlimited and not set are three values. An object that is infinite is so even when it says
that it is not set, as 24.11 and 26.05 write the limit of a job without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .backend import Span, Special
from .damage import SlurmTextError

MINUTE_S: Final = 60
"""Slurm's time limits are whole minutes (scontrol(1), TimeLimit)."""

_KEYS: Final = frozenset({"set", "infinite", "number"})
_INFINITE_32: Final = 0xFFFFFFFF  # slurm.h, INFINITE and NO_VAL: plain where a plugin passes the raw value on
_NO_VALUE_32: Final = 0xFFFFFFFE
_MOST: Final = 2**53


def read_number(value: object, where: str) -> Span:
    """A whole number from 0 on, unlimited, or not set. ``where`` is told in the SlurmTextError of anything else."""
    if value is None:
        return Special.NOT_SET
    if isinstance(value, Mapping):
        return _read_object(value, where)
    return _plain(value, where)


def _plain(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise SlurmTextError(f"{where}: {value!r:.64} is no whole number from 0 to {_MOST}")
    return value


def _read_object(value: Mapping[object, object], where: str) -> Span:
    if missing := sorted(_KEYS - value.keys()):
        raise SlurmTextError(f"{where}: a number without {', '.join(missing)}")
    for key in ("set", "infinite"):
        if not isinstance(value[key], bool):
            raise SlurmTextError(f"{where}.{key}: {value[key]!r:.64} is neither true nor false")
    number = _plain(value["number"], f"{where}.number")
    if value["infinite"]:
        return Special.UNLIMITED
    return number if value["set"] else Special.NOT_SET


def read_minutes_s(value: object, where: str) -> Span:
    """A time limit in minutes as seconds, unlimited, or not set. Raises SlurmTextError."""
    minutes = read_number(value, where)
    if minutes == _INFINITE_32:
        return Special.UNLIMITED
    if minutes == _NO_VALUE_32:
        return Special.NOT_SET
    return minutes if isinstance(minutes, Special) else minutes * MINUTE_S


def read_time(value: object, where: str) -> Span:
    """A point in time in Unix seconds; 0 is Slurm's word for "not yet", never 1970. Raises SlurmTextError."""
    at = read_number(value, where)
    return Special.NOT_SET if at == 0 else at


def read_id(value: object, where: str) -> int | None:
    """The id of what may not be: a number from 1 on, or None where it is 0 or not set. Raises SlurmTextError."""
    number = read_number(value, where)
    if number is Special.UNLIMITED:
        raise SlurmTextError(f"{where}: an id cannot be unlimited")
    return number if isinstance(number, int) and number > 0 else None


def read_count(value: object, where: str) -> int:
    """A number that must be there. Raises SlurmTextError."""
    number = read_number(value, where)
    if isinstance(number, Special):
        raise SlurmTextError(f"{where}: there is no number ({number.value})")
    return number
