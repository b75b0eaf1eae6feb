"""Tables that keep one line for each row: a narrow terminal gets shorter words and fewer columns, never a mess."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rich.cells import cell_len, set_cell_size

_GAP = 2


class Out(Protocol):
    """Where a table is shown: a `Screen`, or rich's Console."""

    @property
    def width(self) -> int: ...

    def print(
        self,
        text: str,
        /,
        *,
        style: Literal["", "bold", "dim"] = "",
        markup: Literal[False] = False,
        soft_wrap: bool = False,
    ) -> None: ...


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


def show_table(out: Out, columns: Sequence[Column], rows: Sequence[Any]) -> None:
    """Print the rows within the width of ``out``, and say which columns had no room."""
    (headings, *lines), hidden = fit(columns, rows, out.width)
    out.print(headings, style="bold", markup=False, soft_wrap=True)
    if lines:
        out.print("\n".join(lines), markup=False, soft_wrap=True)
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


def fit(columns: Sequence[Column], rows: Sequence[Any], width: int) -> tuple[list[str], list[str]]:
    """The table within ``width``, a line for the headings and one for each row; and what columns were left out."""
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
    # Not rich's own table: that takes a second and a half for a thousand rows. What a user chose is text, never markup.
    made = [_line([column.heading for column in shown], shown, widths, width)]
    made += [
        _line(row, shown, widths, width)
        for row in zip(*(cells[column.heading] for column in shown), strict=True)
    ]
    return made, hidden


def shortened(columns: Sequence[Column], rows: Sequence[Any], width: int) -> bool:
    """Whether one of the columns shown stands in its short form."""
    full = {column.heading: [plain(column.cell(row)) for row in rows] for column in columns}
    if _total(columns, full) <= width:
        return False
    _, hidden = fit(columns, rows, width)
    return any(
        plain(column.short(row)) != text
        for column in columns
        if column.short is not None and column.heading not in hidden
        for row, text in zip(rows, full[column.heading], strict=True)
    )


def _line(texts: Sequence[str], columns: Sequence[Column], widths: Mapping[str, int], width: int) -> str:
    parts = (
        _padded(text, widths[column.heading], column.side)
        for text, column in zip(texts, columns, strict=True)
    )
    line = (" " * _GAP).join(parts).rstrip()
    return line if _cells(line) <= width else _cut(line, width)


def _padded(text: str, width: int, side: Literal["left", "right"]) -> str:
    if _cells(text) > width:
        text = _cut(text, width)
    blank = " " * (width - _cells(text))
    return blank + text if side == "right" else text + blank


def _cut(text: str, width: int) -> str:
    """The beginning of a text, with an ellipsis, in ``width`` columns at most."""
    return set_cell_size(text, width - 1).rstrip() + "\N{HORIZONTAL ELLIPSIS}" if width > 0 else ""


def _cells(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _width(column: Column, cells: dict[str, list[str]]) -> int:
    return max(map(_cells, [column.heading, *cells[column.heading]]))


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
