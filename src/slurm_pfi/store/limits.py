"""The site limits: kept on disk, and as steps from now on.

A file that cannot be read never means "no limit": the caller keeps every cap and raises nothing until an admin
has put it aside.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..model import Limit, LimitClass, LimitStep
from ..units import MAX_POWER_MW
from .sealed import UnreadableError, Versioned, read_versioned, write_sealed

KEEP_ENDED_S: Final = 86_400.0
"""An ended limit is kept a day: a clock that jumps ahead and back must not lose a limit that is still due."""

MAX_LIMITS: Final = 256
MAX_STEPS: Final = 1024
MAX_AHEAD: Final = 8
"""Steps that a schedule tells one by one: each costs the controller a whole allocation, and a node takes so many."""

BEYOND_S: Final = 1.0
"""The short rest begins so long after the horizon, at which a step of its own may begin."""

MAX_UNIX_S: Final = 1e11
"""The year 5138: what lies beyond is a slip of the pen."""
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}", re.ASCII)


class LimitError(ValueError):
    """A limit that makes no sense; the message says what is wrong and what is allowed."""


class _Book(Versioned, frozen=True, kw_only=True):
    revision: int
    limits: tuple[Limit, ...]


class LimitStore:
    """The limits of the site in ``limits.json``. Every change is on disk before it is in force.

    Call ``load`` first. ``limits`` raises UnreadableError for as long as they are not known.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._book: _Book | None = None
        self._trouble = f"{path} has not been read yet"

    def load(self, *, first_start: bool) -> tuple[Limit, ...]:
        """Read the file. Without one: no limits if this is the site's first start, else UnreadableError.

        A first start writes the empty file, so that a missing one is known as missing ever after.
        """
        self._book = None
        try:
            book = read_versioned(self._path, _Book)
            if book is None and not first_start:
                raise UnreadableError(f"{self._path} is missing, but limits have been kept there before")
            if book is not None:
                _check_book(book, self._path)
        except UnreadableError as error:
            self._trouble = str(error)
            raise
        if book is None:
            book = _Book(version=1, revision=0, limits=())
            self._write(book)
        self._book = book
        return book.limits

    @property
    def limits(self) -> tuple[Limit, ...]:
        """All limits kept, also ended ones. Raises UnreadableError when they are not known."""
        return self._known().limits

    @property
    def revision(self) -> int:
        """Grows with each change. Raises UnreadableError."""
        return self._known().revision

    def set_limit(
        self, limit_id: str, *, class_: LimitClass, source: str, steps: Iterable[LimitStep], now_unix_s: float
    ) -> Limit:
        """Add a limit, or replace the one of this id. Raises LimitError, UnreadableError, OSError (nothing changed)."""
        book = self._known()
        limit = Limit(
            id=limit_id, revision=book.revision + 1, source=source[:200], class_=class_, steps=tuple(steps)
        )
        check_limit(limit)
        others = [other for other in _due(book.limits, now_unix_s) if other.id != limit_id]
        if len(others) >= MAX_LIMITS:
            raise LimitError(f"there are {len(others)} limits already; clear some first")
        self._replace((*others, limit))
        return limit

    def clear_limit(self, limit_id: str, *, now_unix_s: float) -> Limit | None:
        """End a limit now and forget it; None if there is none of this id. Raises UnreadableError, OSError."""
        book = self._known()
        found = next((limit for limit in book.limits if limit.id == limit_id), None)
        if found is not None:
            self._replace(tuple(limit for limit in _due(book.limits, now_unix_s) if limit.id != limit_id))
        return found

    def set_aside(self, *, now_unix_s: float) -> Path | None:
        """An admin's explicit word that a damaged file may go: rename it and begin with no limits.

        Returns where the damaged file is now; None if it was missing. Raises LimitError when the limits are known.
        """
        if self._book is not None:
            raise LimitError(f"{self._path} is in order; clear its limits by name instead")
        aside: Path | None = None
        try:
            taken = self._path.with_name(f"{self._path.name}.damaged-{now_unix_s:.0f}")
            self._path.rename(taken)
            aside = taken
        except FileNotFoundError:
            pass
        # A revision above any that the lost file can have had keeps later ones in order.
        book = _Book(version=1, revision=int(now_unix_s), limits=())
        self._write(book)
        self._book = book
        return aside

    def _known(self) -> _Book:
        if self._book is None:
            raise UnreadableError(self._trouble)
        return self._book

    def _replace(self, limits: tuple[Limit, ...]) -> None:
        book = _Book(version=1, revision=self._known().revision + 1, limits=limits)
        self._write(book)
        self._book = book

    def _write(self, book: _Book) -> None:
        write_sealed(self._path, book, mode=0o640)


def check_limit(limit: Limit) -> None:
    """Raise LimitError unless the limit has a proper id, class and ascending steps of possible powers."""
    if not _ID.fullmatch(limit.id):
        raise LimitError(f"limit id {limit.id[:64]!r}: 1 to 64 letters, digits, or one of _ . : -")
    if limit.class_ not in {"economic", "emergency"}:
        raise LimitError(f"limit {limit.id}: class {limit.class_!r} is neither economic nor emergency")
    if not 0 < len(limit.steps) <= MAX_STEPS:
        raise LimitError(f"limit {limit.id}: it has {len(limit.steps)} steps; 1 to {MAX_STEPS} are allowed")
    before_s = -math.inf
    for step in limit.steps:
        if not math.isfinite(step.start_unix_s) or step.start_unix_s <= before_s:
            raise LimitError(f"limit {limit.id}: its steps do not ascend in time")
        if abs(step.start_unix_s) > MAX_UNIX_S:
            raise LimitError(f"limit {limit.id}: {step.start_unix_s:g} is no time in seconds since 1970")
        before_s = step.start_unix_s
        if step.limit_mw is not None and not 0 <= step.limit_mw <= MAX_POWER_MW:
            raise LimitError(f"limit {limit.id}: {step.limit_mw} mW is not within 0 and 10 GW")


def _check_book(book: _Book, path: Path) -> None:
    try:
        for limit in book.limits:
            check_limit(limit)
    except LimitError as error:
        raise UnreadableError(f"{path} is damaged: {error}") from error


def has_ended(limit: Limit, now_unix_s: float) -> bool:
    """Whether it no longer binds and never will again."""
    last = limit.steps[-1]
    return last.limit_mw is None and last.start_unix_s <= now_unix_s


def _due(limits: Iterable[Limit], now_unix_s: float) -> list[Limit]:
    return [limit for limit in limits if not has_ended(limit, now_unix_s - KEEP_ENDED_S)]


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """From ``starts_in_s`` on: the lowest limit of any class, and the lowest emergency limit; None if none binds."""

    starts_in_s: float
    limit_mw: int | None
    emergency_mw: int | None


def schedule(
    limits: Iterable[Limit], now_unix_s: float, horizon_s: float, lead_s: float, most: int = MAX_AHEAD
) -> tuple[ScheduleStep, ...]:
    """What the site may draw from now until ``horizon_s`` ahead, as steps; the first is now.

    At each instant the lowest of all limits holds that bind within the next ``lead_s``: so lowering is done by the
    time a limit starts, and nothing is raised before the one that ends has ended. Pure: now is an argument.

    What comes after ``most`` steps or the horizon is told in short, if a limit binds then: the lowest until there is
    none, and that end, however far it is.
    """
    known = tuple(limits)
    starts = {step.start_unix_s - now_unix_s for limit in known for step in limit.steps}
    instants = sorted(t for start in starts for t in {start, start - lead_s} if 0 < t <= horizon_s)
    classes = (known, tuple(limit for limit in known if limit.class_ == "emergency"))
    steps: list[ScheduleStep] = []
    for at_s in (0.0, *instants):
        lowest = tuple(_lowest(some, now_unix_s, at_s, lead_s) for some in classes)
        if steps and (steps[-1].limit_mw, steps[-1].emergency_mw) == lowest:
            continue
        if len(steps) >= most:
            return _with_rest(steps, _rest(classes, starts, now_unix_s, at_s, lead_s))
        steps.append(ScheduleStep(at_s, *lowest))
    if steps[-1].limit_mw is None:
        return tuple(steps)
    rest = _rest(classes, starts, now_unix_s, horizon_s + BEYOND_S, lead_s)
    return _with_rest(steps, rest if rest and rest[-1].limit_mw is None else ())


def binding_ids(limits: Iterable[Limit], now_unix_s: float, lead_s: float) -> tuple[str, ...]:
    """The ids of the limits that bind: as low as the lowest of all that hold within the next ``lead_s``."""
    known = tuple(limits)
    lowest_mw = _lowest(known, now_unix_s, 0.0, lead_s)
    if lowest_mw is None:
        return ()
    return tuple(limit.id for limit in known if _lowest((limit,), now_unix_s, 0.0, lead_s) == lowest_mw)


def _with_rest(steps: list[ScheduleStep], rest: tuple[ScheduleStep, ...]) -> tuple[ScheduleStep, ...]:
    """Both together, without a step that says the same as the one before it."""
    last = steps[-1]
    if rest and (rest[0].limit_mw, rest[0].emergency_mw) == (last.limit_mw, last.emergency_mw):
        rest = rest[1:]
    return (*steps, *rest)


def _rest(
    classes: tuple[tuple[Limit, ...], ...],
    starts: set[float],
    now_unix_s: float,
    from_s: float,
    lead_s: float,
) -> tuple[ScheduleStep, ...]:
    """The lowest limits from then on until none binds, and that end if there is one."""
    known = classes[0]
    later = sorted(start for start in starts if start >= from_s)
    end_s = next((at_s for at_s in later if _lowest(known, now_unix_s, at_s, lead_s) is None), None)
    span_s = (later[-1] if later else from_s) if end_s is None else end_s
    lowest = tuple(_lowest(some, now_unix_s, from_s, max(lead_s, span_s - from_s)) for some in classes)
    held = (ScheduleStep(from_s, *lowest),) if lowest[0] is not None else ()
    return held if end_s is None else (*held, ScheduleStep(end_s, None, None))


def _lowest(limits: tuple[Limit, ...], now_unix_s: float, at_s: float, lead_s: float) -> int | None:
    """The lowest power of these limits over ``at_s`` to ``at_s + lead_s`` from now, both included."""
    found = [
        step.limit_mw
        for limit in limits
        for step, ends_in_s in _spans(limit, now_unix_s)
        # The same subtraction as where the instants are made: equal times must compare as equal.
        if step.limit_mw is not None and step.start_unix_s - now_unix_s - lead_s <= at_s and ends_in_s > at_s
    ]
    return min(found, default=None)


def _spans(limit: Limit, now_unix_s: float) -> Iterable[tuple[LimitStep, float]]:
    """Each step with the seconds from now at which it ends."""
    ends = [step.start_unix_s - now_unix_s for step in limit.steps[1:]]
    return zip(limit.steps, [*ends, math.inf], strict=True)
