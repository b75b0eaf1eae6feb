"""Figures and tables that several studies print alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console

from ..tables import Column, shortened, show_table

_MOST_DIGITS: Final = 6


def show_with_intervals(out: Console, columns: Sequence[Column], rows: Sequence[Any]) -> None:
    """A table whose ``short`` cells are those without intervals; says so where the width lets only them in."""
    show_table(out, columns, rows)
    if shortened(columns, rows, out.width):
        out.print(f"intervals not shown on {out.width} columns (--json has all)", style="dim")


def figure(value: float, digits: int = 0) -> str:
    """With so many digits; what rounds to zero is 0 without a sign."""
    return f"{value:z.{digits}f}"


def signed(value: float, digits: int = 2) -> str:
    """With its sign, and more digits where fewer would show a zero that it is not; 0 where it is next to nothing."""
    for more in range(digits, _MOST_DIGITS + 1):
        text = f"{value:+.{more}f}"
        if float(text) != 0:
            return text
    return "0"
