"""Tables of Slurm's commands whose delimiter cannot be chosen: ``sacctmgr -P``, ``sreport -P``, captures of others.

A text of a user may hold the delimiter or a newline. What we ask ourselves is delimited by a word that nobody knows
beforehand (``squeue``, ``sacct``); here the lines that cannot be told apart are kept and named, never left out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnreadableLine:
    """A line of another number of fields than the table has; ``number`` counts from 1."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """The rows in their order, and every line that is none. Bytes that are no UTF-8 stand as ``\\xNN``."""

    rows: tuple[tuple[str, ...], ...]
    unreadable: tuple[UnreadableLine, ...]


def read_table(out: bytes, width: int, delimiter: bytes = b"|") -> Table:
    """Read lines of ``width`` fields. A last line without its newline has been cut off, and is unreadable."""
    *lines, rest = out.split(b"\n")
    rows: list[tuple[str, ...]] = []
    unreadable: list[UnreadableLine] = []
    for number, line in enumerate(lines, 1):
        cells = tuple(cell.decode("utf-8", "backslashreplace") for cell in line.split(delimiter))
        if len(cells) == width:
            rows.append(cells)
        else:
            unreadable.append(UnreadableLine(number, line.decode("utf-8", "backslashreplace")))
    if rest:
        unreadable.append(UnreadableLine(len(lines) + 1, rest.decode("utf-8", "backslashreplace")))
    return Table(tuple(rows), tuple(unreadable))
