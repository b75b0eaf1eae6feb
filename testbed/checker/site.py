"""What the controller's audit says of the site: limits, windows, shortfalls, nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from .files import Record, RunFolder
from .rebound import Rebounds
from .steps import UNBOUNDED, Steps

SECOND_NS: Final = 1_000_000_000
BEGUN_NS: Final = 3 * SECOND_NS  # a rebound is told of this soon after the limit has ended


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node of a site record."""

    gpus: int
    overhead_mw: int
    gpu_max_mw: int
    mode: str

    @property
    def most_mw(self) -> int:
        """What all its GPUs may draw when nothing is known of them."""
        return self.gpus * self.gpu_max_mw


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """One site record. ``load_mw``: all that draws beside GPUs.

    ``release_ns``: how long a node that hears nothing may hold caps beyond the end that it knows.
    """

    mono_ns: int
    nodes: dict[str, NodeFacts]
    unmanaged_mw: int
    response_ns: int
    release_ns: int

    @property
    def load_mw(self) -> int:
        return self.unmanaged_mw + sum(node.overhead_mw for node in self.nodes.values())

    @property
    def enforces(self) -> bool:
        return any(node.mode == "enforce" for node in self.nodes.values())


class Site:
    """Limits as they bound the site at each instant.

    ``limit``: the lowest limit in force, none while everything is switched off. ``allowed``: the same plus the
    shortfall that an ``infeasible`` record says. ``due``: what the site owes at an instant: ``allowed``, a lowering
    ``response_s`` late, counted from when it was known.
    """

    def __init__(self, run: RunFolder) -> None:
        self.facts = [_site_facts(record) for record in run.controller if record["event"] == "site"]
        if not self.facts:
            run.fault("the controller's audit has no site record: the site's load is unknown")
        self.limit = _while_on(_lowest_limit(run.controller), run.controller)
        self.shortfall = _shortfall(run.controller, self.limit)
        times = sorted({*self.limit.times, *self.shortfall.times})
        self.allowed = Steps(
            [(time_ns, self.limit.value_at(time_ns) + self.shortfall.value_at(time_ns)) for time_ns in times]
        )
        # A reload may change response_s; the shortest that was ever declared is the promise.
        response_ns = min((facts.response_ns for facts in self.facts), default=0)
        lately_known = _replaced_schedules(run.controller, response_ns)
        self.due = self.allowed.highest_over_past(response_ns).highest_with(lately_known)
        self.response_ns = response_ns
        self.rebounds = Rebounds(run.controller, max((facts.release_ns for facts in self.facts), default=0))
        self.held_at_end = self._held_at_end(run)

    def facts_at(self, time_ns: int) -> SiteFacts | None:
        """The record in force; the first one counts for all that came before it. None when there is none."""
        held = None
        for facts in self.facts:
            if held is not None and facts.mono_ns > time_ns:
                break
            held = facts
        return held

    def _held_at_end(self, run: RunFolder) -> bool:
        """Whether caps had a reason still when the run ended: a limit in force, or time left to give back."""
        told = [record for record in run.controller if record["event"] in ("window", "rebound")]
        if told and not told[-1]["open"]:
            return False
        if told and told[-1]["event"] == "rebound":
            return self.rebounds.held(run.last_ns)
        return self.in_window(run.last_ns) or self.held(run.last_ns)

    def in_window(self, time_ns: int) -> bool:
        return self.limit.value_at(time_ns) != UNBOUNDED

    def held(self, time_ns: int) -> bool:
        """Whether caps may stay though no limit is in force: in a rebound, or on nodes that wait to hear of one."""
        if self.rebounds.held(time_ns):
            return True
        return any(end <= time_ns < end + self.rebounds.release_ns for _, end in self.windows())

    def windows(self) -> Iterator[tuple[int, float]]:
        """(start, end) of each stretch with a limit in force; the end is infinite while it is open."""
        start: int | None = None
        for time_ns, value in zip(self.limit.times, self.limit.values, strict=True):
            if value == UNBOUNDED and start is not None:
                yield start, time_ns
                start = None
            elif value != UNBOUNDED and start is None:
                start = time_ns
        if start is not None:
            yield start, UNBOUNDED

    def window_start(self, time_ns: int) -> int | None:
        """When the window that covers ``time_ns`` opened, a rebound counts as part of it; None outside of both."""
        rebound = self.rebounds.span_at(time_ns)
        at_ns = time_ns if rebound is None or self.in_window(time_ns) else rebound.start_ns - 1
        for start, end in self.windows():
            if start <= at_ns < end + (0 if rebound is None else BEGUN_NS):
                return start
        return None if rebound is None else rebound.start_ns


def _site_facts(record: Record) -> SiteFacts:
    nodes = {
        name: NodeFacts(node["gpus"], node["overhead_mw"], node["gpu_max_mw"], node["mode"])
        for name, node in record["nodes"].items()
    }
    return SiteFacts(
        record["mono_ns"],
        nodes,
        record["unmanaged_mw"],
        round(record["response_s"] * SECOND_NS),
        round(record.get("release_s", 0) * SECOND_NS),
    )


def _while_on(limit: Steps, records: list[Record]) -> Steps:
    """Nothing is promised while an admin has switched everything off."""
    off = Steps(
        [(record["mono_ns"], float(record["off"])) for record in records if record["event"] == "off"],
        before=0,
    )
    times = sorted({*limit.times, *off.times})
    return Steps(
        [(time_ns, UNBOUNDED if off.value_at(time_ns) else limit.value_at(time_ns)) for time_ns in times]
    )


Schedules = dict[str, list[list[int | None]]]


def _versions(audit: list[Record]) -> list[tuple[int, Schedules]]:
    """(since when, the limits known from then on), in order."""
    held: Schedules = {}
    found: list[tuple[int, Schedules]] = []
    for record in audit:
        if record["event"] == "limit":
            held = {**held, record["id"]: record["steps"] if record["action"] == "set" else []}
            found.append((record["mono_ns"], held))
    return found


def _starts(limits: Schedules, from_ns: int, to_ns: float) -> set[int]:
    return {
        start
        for steps in limits.values()
        for start, _ in steps
        if start is not None and from_ns < start < to_ns
    }


def _lowest_at(limits: Schedules, time_ns: int) -> float:
    return min((_step_at(steps, time_ns) for steps in limits.values()), default=UNBOUNDED)


def _lowest_limit(audit: list[Record]) -> Steps:
    """The lowest limit in force at each instant. A limit is in force from its audit entry on, never before."""
    versions = _versions(audit)
    ends = [since for since, _ in versions[1:]] + [UNBOUNDED] * bool(versions)
    return Steps(
        (time_ns, _lowest_at(limits, time_ns))
        for (since, limits), end in zip(versions, ends, strict=True)
        for time_ns in sorted({since} | _starts(limits, since, end))
    )


def _replaced_schedules(audit: list[Record], response_ns: int) -> Steps:
    """The highest that schedules replaced within the past ``response_ns`` allow now; nothing else counts here.

    A limit that is extended a moment before its end may not have reached every node: some still follow its old end.
    """
    versions = _versions(audit)
    spans = [
        (replaced, replaced + response_ns, limits)
        for (_, limits), (replaced, _) in pairwise(versions)
        if limits
    ]
    times = {edge for start, end, _ in spans for edge in (start, end)}
    times |= {time_ns for start, end, limits in spans for time_ns in _starts(limits, start, end)}
    return Steps(
        [
            (time_ns, max((_lowest_at(held, time_ns) for a, b, held in spans if a <= time_ns < b), default=0))
            for time_ns in times
        ],
        before=0,
    )


def _step_at(steps: list[list[int | None]], time_ns: int) -> float:
    value: float = UNBOUNDED
    for start_ns, limit_mw in steps:
        if start_ns is not None and start_ns <= time_ns:
            value = UNBOUNDED if limit_mw is None else limit_mw
    return value


def _shortfall(records: list[Record], limit: Steps) -> Steps:
    """How many milliwatts the controller said were missing.

    A record covers the time until the next one or a ``feasible`` one, until no limit is in force, or until a window
    record says that the window is closed or that what is committed fits the budget again.
    """
    changes = [
        (time_ns, 0) for time_ns, value in zip(limit.times, limit.values, strict=True) if value == UNBOUNDED
    ]
    for record in records:
        if record["event"] == "infeasible":
            changes.append((record["mono_ns"], record["shortfall_mw"]))
        elif record["event"] == "feasible" or (record["event"] == "window" and _fits(record)):
            changes.append((record["mono_ns"], 0))
    return Steps(changes, before=0)


def _fits(record: Record) -> bool:
    if not record["open"]:
        return True
    committed_mw, budget_mw = record.get("committed_mw"), record.get("budget_mw")
    return isinstance(committed_mw, int) and isinstance(budget_mw, int) and committed_mw <= budget_mw
