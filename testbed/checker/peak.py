"""After a window the limits in force stay within what its rebound allows: no new peak, whatever starts."""

from __future__ import annotations

from typing import Final

from .budget import TraceSum
from .files import RunFolder
from .rebound import Span
from .site import SECOND_NS, Site
from .steps import UNBOUNDED
from .verdict import Finding, Result

PEAK: Final = "rebound"
NEWS_NS: Final = 3 * SECOND_NS


def check_rebounds(run: RunFolder, site: Site) -> Result:
    """At each change of a limit in a rebound that knows what the site drew before.

    One that follows a window shorter than the response time is judged from that time on: lowerings were under way.
    """
    trace = TraceSum(run)
    findings: list[Finding] = []
    worst: tuple[float, int] | None = None
    told: set[int] = set()
    checked = 0
    for line in run.limits:
        trace.apply(line.node, line.uuid, line.effective_mw)
        facts = site.facts_at(line.mono_ns)
        span = site.rebounds.span_at(line.mono_ns)
        if facts is None or span is None or line.mono_ns < _settled_ns(site, span):
            continue
        bound_mw = span.bound_mw(line.mono_ns, site.response_ns, NEWS_NS)
        if bound_mw == UNBOUNDED:
            continue
        checked += 1
        room_mw = bound_mw - trace.total_mw(facts, line.mono_ns)
        if worst is None or room_mw < worst[0]:
            worst = (room_mw, line.mono_ns)
        if room_mw < 0 and span.start_ns not in told:
            told.add(span.start_ns)
            text = (
                f"the limits in force exceed the {bound_mw / 1000:.0f} W of the rebound "
                f"by {-room_mw / 1000:.3f} W"
            )
            findings.append(Finding(PEAK, line.mono_ns, line.node, line.uuid, text))
    return Result(
        PEAK,
        "no new peak after a window",
        checked,
        "changes of limits in a rebound",
        tuple(findings),
        None if worst is None else worst[0],
        None if worst is None else worst[1],
    )


def _settled_ns(site: Site, span: Span) -> int:
    start_ns = site.window_start(span.start_ns)
    return span.start_ns if start_ns is None else start_ns + site.response_ns
