"""What the controller's audit says of the time after a window, in which caps rise to what the site drew before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from .files import Record
from .steps import UNBOUNDED

SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Level:
    """From ``since_ns`` on: what the site comes back to (None: unknown), and the least that it may draw."""

    since_ns: int
    limit_mw: int | None
    least_mw: int


@dataclass(slots=True)
class Span:
    """One rebound. Up to ``until_ns`` it holds the site, then it lets go, until ``end_ns`` at the latest."""

    start_ns: int
    until_ns: int
    end_ns: float
    from_mw: int
    rise_mw_per_s: int
    levels: list[Level] = field(default_factory=list)

    def bound_mw(self, time_ns: int, late_ns: int, news_ns: int) -> float:
        """The most that all caps may allow: the highest of what was told from ``late_ns`` ago until in ``news_ns``."""
        if not self.start_ns <= time_ns < min(self.until_ns, self.end_ns):
            return UNBOUNDED
        ramp_mw = self.from_mw + (time_ns - self.start_ns) / SECOND_NS * self.rise_mw_per_s
        first = max(
            (i for i, level in enumerate(self.levels) if level.since_ns <= time_ns - late_ns), default=0
        )
        return max(
            max(level.least_mw, ramp_mw if level.limit_mw is None else min(ramp_mw, level.limit_mw))
            for i, level in enumerate(self.levels)
            if i >= first and (i == first or level.since_ns <= time_ns + news_ns)
        )


class Rebounds:
    """All rebounds of a run. ``release_ns``: how long a node that hears nothing more may hold on beyond the end."""

    def __init__(self, records: Iterable[Record], release_ns: int) -> None:
        self.release_ns = release_ns
        self.spans: list[Span] = []
        for record in records:
            event, at_ns = record["event"], record["mono_ns"]
            if event == "rebound" and record["open"]:
                self._open(record, at_ns)
            elif event in ("rebound", "leader"):  # a new controller begins one of its own
                self._close(at_ns)

    def _open(self, record: Record, at_ns: int) -> None:
        under_way = self.span_at(at_ns)
        if under_way is None:
            until_ns, end_ns = (at_ns + round(record[name] * SECOND_NS) for name in ("until_s", "ends_s"))
            under_way = Span(at_ns, until_ns, end_ns, record["from_mw"], record["rise_mw_per_s"])
            self.spans.append(under_way)
        under_way.levels.append(Level(at_ns, record["limit_mw"], record["least_mw"]))

    def _close(self, at_ns: int) -> None:
        if self.spans:
            self.spans[-1].end_ns = min(self.spans[-1].end_ns, at_ns)

    def span_at(self, time_ns: int) -> Span | None:
        """The rebound that holds at that instant."""
        return next((span for span in self.spans if span.start_ns <= time_ns < span.end_ns), None)

    def held(self, time_ns: int) -> bool:
        """Whether caps of a rebound may be in force: also on nodes that have not heard that it ends."""
        return any(span.start_ns <= time_ns < span.end_ns + self.release_ns for span in self.spans)
