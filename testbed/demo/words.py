"""How the demo breaks its lines, and the sentence that compares its two windows."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import Final

_FIGURE: Final = re.compile(r"(?<=\d) (?=(?:[km]?W|Wh|kWh|s|%|GPUs?)(?![a-zA-Z]))")
_KEPT: Final = "\N{NO-BREAK SPACE}"


def folded(text: str, width: int, hang: int = 2) -> str:
    """Each line within the width, broken between words but never between a figure and its unit.

    What does not fit goes on ``hang`` columns further to the right than its line began.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        lines += textwrap.wrap(
            _FIGURE.sub(_KEPT, line),
            width,
            subsequent_indent=" " * (indent + hang),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines).replace(_KEPT, " ")


@dataclass(frozen=True, slots=True)
class Compared:
    """The same limit shared two ways. ``kept`` (0..1): throughput of the same jobs, at the end of either window.

    ``cap_gap`` (0..1): how far the caps of both were apart, in the mean. ``step`` (0..1): the share of the way from the
    equal cut that was certified in the first window, None where that is not known. ``measured`` of ``jobs`` had a
    measured curve by then, None likewise.
    """

    kept: float
    kept_equal: float
    cap_gap: float
    step: float | None
    measured: int | None
    jobs: int


SAME_CAPS: Final = 0.01
"""Caps that are no further apart are the same: a floor moves by less from one window to the next."""


def comparison(found: Compared) -> str:
    """Both windows in a few sentences, whichever was better, and whether they were shared differently at all."""
    gain = 100 * (found.kept - found.kept_equal)
    text = (
        f"Under the same limit the jobs kept {100 * found.kept:.1f} % of their throughput with policy "
        f'"marginal" and {100 * found.kept_equal:.1f} % with "equal"'
    )
    if found.cap_gap <= SAME_CAPS:
        why = (
            "the plan that was certified was as good as equal"
            if found.step
            else "nothing was certified yet, so marginal was equal in this run"
        )
        text += f": {why}. What lies between the two figures is not the policy's doing."
    else:
        word = "more than" if gain > 0.05 else "less than" if gain < -0.05 else "as much as"
        by = "" if word == "as much as" else f"{abs(gain):.1f} points "
        text += f": sharing by what was measured kept {by}{word} an equal cut."
    if found.measured is not None:
        text += f" Measured by the end of the first window: {found.measured} of {found.jobs} jobs."
    return text
