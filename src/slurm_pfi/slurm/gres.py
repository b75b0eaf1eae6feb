"""What Slurm writes about generic resources: index lists, GRES text of jobs and nodes.

Three answers are kept apart: which indices, how many without saying which, and damaged text (an error).
"""

from __future__ import annotations

import re
from typing import Final

from ..model import Frozen
from .hosts import HostListError, parse_ranges

MAX_POSITION: Final = 1023
_NOTHING: Final = ("", "(null)", "N/A")
_ENTRY: Final = re.compile(
    r"(?:gres[:/])?(?P<name>[A-Za-z][A-Za-z0-9_]*)"
    r"(?::(?P<type>\(null\)|(?![0-9]+(?:[:(]|$))[A-Za-z0-9_][A-Za-z0-9_.-]*))?"
    r"(?::(?P<count>[0-9]{1,9}))?"
    r"(?:\((?P<detail>[^()]*)\))?",
    re.ASCII,
)
_TAKEN: Final = re.compile(r"[0-9]{1,9}/[0-9]{1,9}(?:,[0-9]{1,9}/[0-9]{1,9})*", re.ASCII)


class GresError(ValueError):
    """Text that is not what Slurm writes; the message says what and where."""


class Gres(Frozen, frozen=True, kw_only=True):
    """One entry. ``type`` is empty when none is given. None as ``count`` or ``indices``: the text does not say."""

    name: str
    type: str
    count: int | None
    indices: tuple[int, ...] | None


def parse_positions(text: str | None) -> tuple[int, ...]:
    """Read ``0,2-3`` (SLURM_JOB_GPUS) as positions in gres.conf; nothing given means none, never all.

    Raises GresError on anything else, on a position named twice and on one above 1023.
    """
    if not text:
        return ()
    try:
        ranges = parse_ranges(text)
    except HostListError as error:
        raise GresError(f"not a list of GPU positions: {error}") from error
    if any(numbers.high > MAX_POSITION for numbers in ranges):
        raise GresError(f"{text[:80]!r}: a GPU position above {MAX_POSITION}")
    positions = [number for numbers in ranges for number in range(numbers.low, numbers.high + 1)]
    if len(set(positions)) != len(positions):
        raise GresError(f"{text[:80]!r}: a GPU position is named twice")
    return tuple(positions)


def parse_gres(text: str, *, counted: bool = False) -> tuple[Gres, ...]:
    """Read ``gpu:h200:3(IDX:0,2-3),shard:2`` in the forms that Slurm 17.11 and later write. Raises GresError.

    ``counted``: text in which Slurm writes every count (what nodes have in use, a job's share of a node), so that an
    entry without one has been cut off.
    """
    if text.strip() in _NOTHING:
        return ()
    entries = [(place, _parse_entry(entry, place, text)) for place, entry in _split(text.strip())]
    for place, entry in entries:
        if counted and entry.count is None:
            raise GresError(f"GRES {text!r} is cut off: the entry at {place} has no count")
    return tuple(entry for _, entry in entries)


def _split(text: str) -> list[tuple[int, str]]:
    """The entries with their places: what lies between those commas that are outside of parentheses."""
    entries, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth not in (0, 1):
            raise GresError(f"GRES {text!r}: unexpected {letter!r} at {place}")
        if letter == "," and depth == 0:
            entries.append((start, text[start:place]))
            start = place + 1
    if depth:
        raise GresError(f"GRES {text!r} is cut off: the parenthesis after {start} is not closed")
    return [*entries, (start, text[start:])]


def _parse_entry(entry: str, place: int, text: str) -> Gres:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise GresError(f"GRES {text!r}: {entry!r} at {place} is not a resource")
    count = None if match["count"] is None else int(match["count"])
    kind = match["type"] or ""
    try:
        indices = _indices(match["detail"])
    except GresError as error:
        raise GresError(f"GRES {text!r}: {entry!r} at {place}: {error}") from error
    if indices is not None and match["name"] == "gpu":  # of others many parts lie on one GPU: mps:200(IDX:0)
        count = len(indices) if count is None else count
        if count != len(indices):
            raise GresError(f"GRES {text!r}: {entry!r} at {place} counts {count} and names {len(indices)}")
    return Gres(name=match["name"], type="" if kind == "(null)" else kind, count=count, indices=indices)


def _indices(detail: str | None) -> tuple[int, ...] | None:
    """The indices in the parenthesis; None when it is absent or tells something else.

    That is sockets (``S:0-1``), or of each GPU how much is taken of what it has (``1/4,0/4``).
    """
    if detail is None or detail.startswith("S:") or _TAKEN.fullmatch(detail):
        return None
    label, colon, value = detail.partition(":")
    if label not in ("IDX", "IDX_LIST") or not colon:
        raise GresError(f"{detail!r} is not understood")
    if value == "N/A":
        return ()
    if not value:
        raise GresError("it names no index")
    return parse_positions(value)
