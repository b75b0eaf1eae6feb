"""TRES text (``cpu=16,mem=58.25G,gres/gpu=4,gres/gpu:h200=4``) of sacct, squeue and scontrol.

Slurm writes GPUs once without a type and again by type, or only one of both, as AccountingStorageTRES says: the two
speak of the same GPUs. Counts are as sacct(1) writes them without --noconvert: K is 1,024, and two digits after the
point are all that is left of a large number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from .damage import SlurmTextError, damaged

_UNKNOWN: Final = ("N/A", "(null)")
_UNITS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_ENTRY: Final = re.compile(
    r"(?P<name>[a-z][a-z0-9_]*(?:/[A-Za-z0-9_][A-Za-z0-9_.@-]*)?)(?::(?P<type>[A-Za-z0-9_][A-Za-z0-9_.-]*))?"
    r"=(?P<number>[0-9]{1,20}(?:\.[0-9]{1,6})?)(?P<unit>[KMGTPE]?)",
    re.ASCII,
)
_MEBI: Final = 2  # the unit that Slurm counts mem in


@dataclass(frozen=True, slots=True)
class Tres:
    """One entry. ``type`` is empty when none is given.

    ``amount`` is in MiB where the name is ``mem``, else a plain count; a fraction where the text is rounded.
    """

    name: str
    type: str
    amount: Fraction


def parse_tres(text: str) -> tuple[Tres, ...] | None:
    """The entries in their order; None where Slurm says that it does not know. Raises SlurmTextError.

    An entry that stands twice is an error: which of both holds cannot be told.
    """
    if text in _UNKNOWN:
        return None
    entries: dict[tuple[str, str], Tres] = {}
    place = 0
    for word in text.split(",") if text else ():
        match = _ENTRY.fullmatch(word)
        if match is None:
            raise damaged(text, place, f"TRES text ({word[:40]!r} is no name=number)")
        tres = Tres(match["name"], match["type"] or "", _amount(match))
        if (tres.name, tres.type) in entries:
            raise damaged(text, place, f"TRES text ({word[:40]!r} comes twice)")
        entries[tres.name, tres.type] = tres
        place += len(word) + 1
    return tuple(entries.values())


def _amount(match: re.Match[str]) -> Fraction:
    steps = _UNITS[match["unit"]]
    if match["name"] == "mem" and match["unit"]:
        steps -= _MEBI
    return Fraction(match["number"]) * Fraction(1024) ** steps


def count_gpus(text: str) -> int | None:
    """How many GPUs the text speaks of; None where it does not tell. Raises SlurmTextError.

    No text at all means none. Text with no generic resource in it does not tell: a site that does not track
    gres/gpu writes the same for a job with eight.
    """
    entries = parse_tres(text)
    if entries is None:
        return None
    generic = [entry for entry in entries if entry.name.startswith("gres/")]
    if entries and not generic:
        return None
    gpus = [entry for entry in generic if entry.name == "gres/gpu"]
    typed = sum((entry.amount for entry in gpus if entry.type), Fraction(0))
    total = next((entry.amount for entry in gpus if not entry.type), typed)
    if total < typed:
        raise SlurmTextError(f"{text[:64]!r}: gres/gpu={total} in all, but {typed} by type")
    if total.denominator != 1:
        raise SlurmTextError(f"{text[:64]!r}: the count of GPUs is rounded; ask with --noconvert")
    return int(total)
