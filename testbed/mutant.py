"""A fault planted in the sources, to see the tests fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """``old`` must stand exactly once in ``file``. ``invariant``: the invariant, fault or field case that it breaks."""

    name: str
    invariant: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
