"""Tables that keep one line for each row: a narrow terminal gets shorter words and fewer columns, never a mess."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_GAP = 2


@dataclass(frozen=True)
class Column:
    """``cell`` makes the text of a row, ``short`` a shorter one for narrow terminals.

    ``clip``: the width down to which the text may be cut (with an ellipsis); None for figures, which are never cut.
    ``drop``: columns are left out by ascending number where nothing else helps; None never.
    """

    heading: str
    cell: Callable[[Any], str]
    side: Literal["left", "right"] = "left"
    short: Callable[[Any], str] | None = None
    clip: int | None = None
    drop: int | None = None


def show_table(out: Console, columns: Sequence[Column], rows: Sequence[Any]) -> None:
    """Print the rows within the width of ``out``, and say which columns had no room."""
    made, hidden = fit(columns, rows, out.width)
    out.print(made)
    if hidden:
        out.print(f"not shown on {out.width} columns: {', '.join(hidden)} (--json has all)", style="dim")


def plain(text: str) -> str:
    """Text on one line and without anything that would steer a terminal: names come from users."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in text)


def names_text(names: Sequence[str], most: int = 8) -> str:
    """Names as a list for people, not longer than ``most`` of them."""
    more = len(names) - most
    shown = ", ".join(names[:most])
    return plain(shown if more <= 0 else f"{shown} and {more:,} more")


def fit(columns: Sequence[Column], rows: Sequence[Any], width: int) -> tuple[Table, list[str]]:
    """The table within ``width``, and the headings of the columns left out."""
    shown = list(columns)
    cells = {column.heading: [plain(column.cell(row)) for row in rows] for column in columns}
    if _total(shown, cells) > width:
        for column in columns:
            if column.short is not None:
                cells[column.heading] = [plain(column.short(row)) for row in rows]
    hidden: list[str] = []
    for column in sorted((c for c in columns if c.drop is not None), key=lambda c: c.drop or 0):
        if _total(shown, cells, clipped=True) <= width:
            break
        shown.remove(column)
        hidden.append(column.heading)
    widths = _clip(shown, cells, width)
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in shown:
        made.add_column(
            column.heading,
            justify=column.side,
            no_wrap=True,
            overflow="ellipsis",
            width=widths[column.heading],
        )
    for place in range(len(rows)):
        # What a user chose, such as a job's name, is text and never markup.
        made.add_row(*(Text(cells[column.heading][place]) for column in shown))
    return made, hidden


def _width(column: Column, cells: dict[str, list[str]]) -> int:
    return max(cell_len(text) for text in [column.heading, *cells[column.heading]])


def _total(columns: Sequence[Column], cells: dict[str, list[str]], *, clipped: bool = False) -> int:
    widths = [_width(column, cells) for column in columns]
    if clipped:
        widths = [
            width if column.clip is None else min(width, max(column.clip, cell_len(column.heading)))
            for width, column in zip(widths, columns, strict=True)
        ]
    return sum(widths) + _GAP * (len(columns) - 1)


def _clip(columns: Sequence[Column], cells: dict[str, list[str]], width: int) -> dict[str, int]:
    """Widths that fit: the widest text gives first."""
    widths = {column.heading: _width(column, cells) for column in columns}
    least = {c.heading: max(c.clip, cell_len(c.heading)) for c in columns if c.clip is not None}
    over = sum(widths.values()) + _GAP * (len(columns) - 1) - width
    while over > 0:
        heading = max(least, key=lambda name: widths[name] - least[name], default=None)
        if heading is None or widths[heading] <= least[heading]:
            break
        widths[heading] -= 1
        over -= 1
    return widths
