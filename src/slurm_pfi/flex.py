"""Reading what a user allows: the value of ``--power-flex``, or ``pfi:VALUE`` in the job's comment.

The same values are read by the SPANK plugin (C) and the prolog (sh); ``tests/data/flex_corpus.tsv`` holds good and
bad ones for all three. The comment is read here alone: it is for sites where the plugin is not installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from .model import Flex

_CLASSES: Final = {"none": 0.0, "low": 0.05, "medium": 0.15, "high": 0.30}
_PERCENT: Final = re.compile(r"([1-9][0-9]?|100)%", re.ASCII)
# A word of its own in a comment. Capitals are found too, so that they can be told as wrong instead of passed over.
_MARK: Final = "pfi:"
_IN_COMMENT: Final = re.compile(rf"(?<![^\s,;])({_MARK})([^\s,;]*)", re.ASCII | re.IGNORECASE)
_UNSHOWN: Final = re.compile(r"[^A-Za-z0-9%.:+_-]", re.ASCII)
_MOST_SHOWN: Final = 20

ALLOWED: Final = "none, low, medium, high, auto or a whole percentage from 1% to 100%"


class FlexError(ValueError):
    """Text that is not a flex; the message says what is allowed."""


def parse_flex(text: str, *, site_default: str = "medium") -> Flex:
    """Read a flex exactly: lower case, no white space, no sign, no leading zero.

    ``auto`` takes the loss of ``site_default``, which must itself be a class or a percentage.
    Raises FlexError on anything else.
    """
    if text == "auto":
        if site_default == "auto":
            raise FlexError("the site's default flex may not itself be auto")
        return Flex(text="auto", max_loss=parse_flex(site_default).max_loss)
    if text in _CLASSES:
        return Flex(text=text, max_loss=_CLASSES[text])
    match = _PERCENT.fullmatch(text)
    if match is None:
        raise FlexError(f"flex {text[:32]!r} is not one of: {ALLOWED}")
    return Flex(text=text, max_loss=int(match.group(1)) / 100)


def is_flex(text: str) -> bool:
    """Whether ``parse_flex`` takes it."""
    return text == "auto" or text in _CLASSES or _PERCENT.fullmatch(text) is not None


def flex_in_comment(comment: str) -> str | None:
    """The value of the first valid ``pfi:VALUE`` in a job's comment; None when there is none.

    It stands alone: between blanks, commas, semicolons or an end of the comment. Never raises: this is a user's text.
    """
    return next((value for mark, value in _marked(comment) if mark == _MARK and is_flex(value)), None)


def no_flex_in_comment(comment: str) -> str | None:
    """The first word of a comment that begins as a flex and is none, such as ``pfi:11x``; None when there is none.

    Fit to be shown: shortened, and of plain characters only. Never raises.
    """
    for mark, value in _marked(comment):
        if mark != _MARK or not is_flex(value):
            return _UNSHOWN.sub("?", f"{mark}{value[:_MOST_SHOWN]}")
    return None


def _marked(comment: str) -> Iterator[tuple[str, str]]:
    for match in _IN_COMMENT.finditer(comment):
        yield match[1], match[2]
