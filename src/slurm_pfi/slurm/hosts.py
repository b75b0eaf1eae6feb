"""Slurm's bracket lists (``n[01-04,7],m1``): does a name belong to one, and which names does a short one hold.

Small and strict on purpose: the node agent needs only this of host lists. A number matches with the padding of its
range's low end, as in ``scontrol show hostnames``: ``n[08-12]`` holds n08 and n12, not n8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

_MAX_CHARS: Final = 64 * 1024
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)


class HostListError(ValueError):
    """Text that is no bracket list; the message says where it goes wrong."""


@dataclass(frozen=True, slots=True)
class _Range:
    low: int
    high: int
    width: int

    def holds(self, digits: str) -> bool:
        number = int(digits)
        return self.low <= number <= self.high and digits == str(number).zfill(self.width)


_Part: TypeAlias = str | tuple[_Range, ...]


def host_in_list(name: str, hosts: str) -> bool:
    """Whether ``name`` is one of ``hosts``. Raises HostListError on a damaged list."""
    return any(_matches(parts, name) for parts in _parse(hosts))


def expand_list(text: str, most: int) -> tuple[str, ...]:
    """The names that a list holds, in its order. Raises HostListError on a damaged list and on more than ``most``."""
    names: list[str] = []
    for parts in _parse(text):
        for name in _expand(parts):
            if len(names) == most:
                raise HostListError(f"{_shown(text)} holds more than {most} names")
            names.append(name)
    return tuple(names)


def count_list(text: str) -> int:
    """How many names a list holds, without expanding it. Raises HostListError on a damaged list."""
    total = 0
    for parts in _parse(text):
        names = 1
        for part in parts:
            names *= 1 if isinstance(part, str) else sum(numbers.high - numbers.low + 1 for numbers in part)
        total += names
    return total


def parse_ranges(text: str) -> tuple[_Range, ...]:
    """Read ``0,2-3``. Raises HostListError on anything else, on a range that runs backwards and on an empty text."""
    ranges = []
    for word in text.split(","):
        match = _RANGE.fullmatch(word)
        if match is None:
            raise HostListError(f"{word!r} in {_shown(text)} is neither a number nor a range")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise HostListError(f"the range {word!r} in {_shown(text)} runs backwards")
        ranges.append(_Range(int(low), int(high), len(low)))
    return tuple(ranges)


def _parse(text: str) -> list[list[_Part]]:
    """Each name or group of names as its parts: literal text, or what may stand for a bracket."""
    if len(text) > _MAX_CHARS:
        raise HostListError(f"a list of {len(text)} characters")
    return [_parse_one(word, text) for word in _split(text)]


def _split(text: str) -> Iterator[str]:
    """The words between those commas that stand outside of brackets."""
    depth = start = 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise HostListError(f"{_shown(text)}: unexpected {letter!r} at {place}")
        if letter == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    if depth:
        raise HostListError(f"{_shown(text)}: a bracket is not closed")
    yield text[start:]


def _parse_one(word: str, text: str) -> list[_Part]:
    if not word or any(letter.isspace() for letter in word):
        raise HostListError(f"{_shown(text)}: an empty name or a space")
    parts: list[_Part] = []
    rest = word
    while rest:
        literal, bracket, rest = rest.partition("[")
        if literal:
            parts.append(literal)
        if bracket:
            inside, _, rest = rest.partition("]")
            parts.append(parse_ranges(inside))
    return parts


def _matches(parts: list[_Part], name: str) -> bool:
    if not parts:
        return not name
    first, rest = parts[0], parts[1:]
    if isinstance(first, str):
        return name.startswith(first) and _matches(rest, name[len(first) :])
    digits = len(name) - len(name.lstrip("0123456789"))
    return any(
        _matches(rest, name[end:])
        for end in range(1, min(digits, 9) + 1)
        if any(numbers.holds(name[:end]) for numbers in first)
    )


def _expand(parts: list[_Part]) -> Iterator[str]:
    if not parts:
        yield ""
        return
    first, rest = parts[0], parts[1:]
    if isinstance(first, str):
        yield from (first + tail for tail in _expand(rest))
        return
    for numbers in first:
        for number in range(numbers.low, numbers.high + 1):
            yield from (str(number).zfill(numbers.width) + tail for tail in _expand(rest))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
