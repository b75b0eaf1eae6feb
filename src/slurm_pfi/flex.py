"""Reading what a user allows: the value of ``--power-flex``.

The same words are read by the SPANK plugin (C) and the prolog (sh); ``tests/data/flex_corpus.tsv`` holds good and
bad values for all three.
"""

from __future__ import annotations

import re
from typing import Final

from .model import Flex

_CLASSES: Final = {"none": 0.0, "low": 0.05, "medium": 0.15, "high": 0.30}
_PERCENT: Final = re.compile(r"([1-9][0-9]?|100)%", re.ASCII)

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
