"""The figures of the demo, from what it left behind: samples, token logs, audit files. Nothing here asks a daemon."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ..observer import Samples, worst_excess

SECOND_NS: Final = 1_000_000_000
REACTION_S: Final = 5.0

Tokens = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in CLOCK_MONOTONIC ns."""

    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / SECOND_NS


def read_audit(path: Path) -> list[dict[str, Any]]:
    """The records of an audit file; a half-written last line is left out."""
    complete, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in complete.split("\n") if line]


def limit_entry_ns(controller: Sequence[Mapping[str, Any]], revision: int) -> int:
    """When the controller audited that this limit was set."""
    for record in controller:
        if record["event"] == "limit" and record["action"] == "set" and record["revision"] == revision:
            return int(record["mono_ns"])
    raise ValueError(f"no audit entry of limit revision {revision}")


def compliance_ns(nodes: Mapping[str, Sequence[Mapping[str, Any]]], set_ns: int) -> int:
    """When the last GPU that the limit lowered was read back at its new enforced cap.

    A GPU's new cap is the first that was set within the reaction time and is below what it had; what is learned
    afterwards may move it again. Raises ValueError when such a cap was never read back.
    """
    last_ns = set_ns
    for node, records in nodes.items():
        held: dict[str, int] = {}
        wanted: dict[str, int] = {}
        done: set[str] = set()
        for record in records:
            uuid, at_ns = str(record.get("uuid")), record["mono_ns"]
            if record["event"] == "readback":
                held[uuid] = record["enforced_mw"]
                if uuid in wanted and uuid not in done and record["enforced_mw"] <= wanted[uuid] + 1000:
                    done.add(uuid)
                    last_ns = max(last_ns, at_ns)
            elif record["event"] == "set" and set_ns <= at_ns < set_ns + REACTION_S * SECOND_NS:
                before_mw = held.get(uuid, record["prior_mw"])
                if uuid not in wanted and (before_mw is None or record["cap_mw"] < before_mw):
                    wanted[uuid] = record["cap_mw"]
        for uuid in wanted.keys() - done:
            raise ValueError(f"{node}: {uuid} was set to {wanted[uuid]} mW and never read back at it")
    return last_ns


def rate_per_s(tokens: Tokens, span: Span) -> float:
    """Tokens per second over a span, by linear interpolation of the job's own counter. Raises ValueError outside."""
    return (_at(tokens, span.end_ns) - _at(tokens, span.start_ns)) / span.seconds


def loss(tokens: Tokens, before: Span, window: Span) -> float:
    """1 - tokens in the window / (own rate before it x its length)."""
    return 1 - rate_per_s(tokens, window) / rate_per_s(tokens, before)


def share_kept(tokens: Tokens, before: Span, window: Span) -> float | None:
    """Rate in the window as a share of the own rate before; None for a job that did not run through both."""
    try:
        return rate_per_s(tokens, window) / rate_per_s(tokens, before)
    except (ValueError, ZeroDivisionError):
        return None


def loss_since_start(tokens: Tokens, before: Span, until_ns: int) -> float | None:
    """1 - tokens so far / (own rate before x the time it has run); None for a job that did not run before."""
    try:
        own = rate_per_s(tokens, before)
    except ValueError:
        return None
    start_ns, start = tokens[0]
    end_ns, end = [entry for entry in tokens if entry[0] <= until_ns][-1]
    return 1 - (end - start) / (own * (end_ns - start_ns) / SECOND_NS)


def _at(tokens: Tokens, time_ns: int) -> float:
    for (start_ns, start), (end_ns, end) in pairwise(tokens):
        if start_ns <= time_ns <= end_ns:
            return start + (end - start) * (time_ns - start_ns) / max(1, end_ns - start_ns)
    raise ValueError(f"the token log does not reach {time_ns} ns")


def seconds_below(samples: Samples, uuids: Sequence[str], mw: int, span: Span) -> float:
    """For how long every one of these GPUs had a limit below this power, at the sampling interval."""
    place = {uuid: (node, i) for node, names in samples.gpus.items() for i, uuid in enumerate(names)}
    count = 0
    for sample in samples.between(span.start_ns, span.end_ns):
        limits = [(sample.caps_mw[place[u][0]] or ())[place[u][1]] for u in uuids]
        count += all(limit < mw for limit in limits)
    return count / samples.hz


def lowest_cap(samples: Samples, uuids: Sequence[str], span: Span) -> int:
    """The lowest limit that any of these GPUs had."""
    place = {uuid: (node, i) for node, names in samples.gpus.items() for i, uuid in enumerate(names)}
    return min(
        (sample.caps_mw[place[u][0]] or ())[place[u][1]]
        for sample in samples.between(span.start_ns, span.end_ns)
        for u in uuids
    )


def mean_cap_w(samples: Samples, uuids: Sequence[str], span: Span) -> float:
    """The mean limit of these GPUs over the span. Raises ValueError where nothing was sampled."""
    place = {uuid: (node, i) for node, names in samples.gpus.items() for i, uuid in enumerate(names)}
    found = [
        (sample.caps_mw[place[u][0]] or ())[place[u][1]]
        for sample in samples.between(span.start_ns, span.end_ns)
        for u in uuids
    ]
    if not found:
        raise ValueError("no sample in this span")
    return sum(found) / len(found) / 1000


def excess_w(samples: Samples, limit_mw: int, span: Span) -> float:
    """The most that the site drew above the limit over the span; below zero: the least room."""
    return worst_excess(samples, [(0, limit_mw)], span.start_ns, span.end_ns).worst_mw / 1000
