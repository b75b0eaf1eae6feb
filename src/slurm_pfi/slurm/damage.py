"""The error of text from Slurm that is not understood, with the place in it."""

from __future__ import annotations

_MOST_SHOWN = 64


class SlurmTextError(ValueError):
    """Text from Slurm that is not understood; the message says which, what was wanted, and at which character."""


def damaged(text: str, place: int, wanted: str) -> SlurmTextError:
    """The error for ``text``, in which at ``place`` (characters from 0) no ``wanted`` stands."""
    return SlurmTextError(f"{_around(text, place)} is not {wanted}: see character {place}")


def _around(text: str, place: int) -> str:
    """The text, or of a long one what lies around the place."""
    if len(text) <= _MOST_SHOWN:
        return repr(text)
    start = max(0, min(place - _MOST_SHOWN // 2, len(text) - _MOST_SHOWN))
    part = text[start : start + _MOST_SHOWN]
    return f"{'...' if start else ''}{part!r}{'...' if start + _MOST_SHOWN < len(text) else ''}"
