"""The charts as inline SVG, drawn by hand: colours come from the page's style, so that they follow its scheme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import median
from typing import Final

from ...controller.answers.outcome import MOST_GAP_S, WindowReport, thin
from ...store.rows import RunSample, SiteSample
from ...units import format_power
from .scale import Scale, round_axis, time_ticks
from .words import utc

SITE_POINTS: Final = 600
OUTSIDE_GAP_S: Final = 31.0
"""Outside a window the controller looks less often: only a longer silence is a gap."""

KW_MW: Final = 1_000_000
W_MW: Final = 1_000

Point = tuple[float, float | None]


def text(value: str) -> str:
    """Text from outside as markup: nothing in it can become an element, an attribute or a control character."""
    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in value))


# ---------------------------------------------------------------------------------------------------- lines


def pieces(points: Iterable[Point], gap_s: float) -> list[list[tuple[float, float]]]:
    """Stretches without a gap: an unknown value ends one, and so does a longer silence."""
    found: list[list[tuple[float, float]]] = []
    last_s: float | None = None
    for at_s, value in points:
        if value is None:
            last_s = None
            continue
        if last_s is None or at_s - last_s > gap_s:
            found.append([])
        found[-1].append((at_s, value))
        last_s = at_s
    return found


def line(points: Iterable[Point], x: Scale, y: Scale, gap_s: float) -> str:
    """The ``d`` of a path through the points; a lone one is a short dash, so that it can be seen."""
    parts: list[str] = []
    for piece in pieces(points, gap_s):
        spots = [f"{x.at(at_s):g} {y.at(value):g}" for at_s, value in piece]
        parts.append(f"M{spots[0]}" + ("h1.5" if len(spots) == 1 else "L" + " ".join(spots[1:])))
    return "".join(parts)


def steps(points: Sequence[Point], end_s: float, x: Scale, y: Scale) -> str:
    """The ``d`` of a path that holds each value until the next point."""
    parts: list[str] = []
    before: float | None = None
    for place, (at_s, value) in enumerate(points):
        if value is not None:
            if before is None:
                parts.append(f"M{x.at(at_s):g} {y.at(value):g}")
            elif before != value:
                parts.append(f"V{y.at(value):g}")
            next_s = points[place + 1][0] if place + 1 < len(points) else end_s
            parts.append(f"H{x.at(next_s):g}")
        before = value
    return "".join(parts)


# ---------------------------------------------------------------------------------------------------- the site


@dataclass(frozen=True, slots=True)
class Paper:
    """A sheet in user units, which are CSS pixels at its natural width."""

    name: str
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x_ticks: int
    y_ticks: int


WIDE: Final = Paper("wide", 1040, 340, 62, 16, 30, 34, 10, 6)
NARROW: Final = Paper("narrow", 360, 260, 44, 8, 30, 34, 4, 5)


def site_chart(report: WindowReport, paper: Paper) -> str:
    """Draw against the limit: the limit in steps, the sum of the caps, the draw, and the phases shaded."""
    site = thin(report.site, SITE_POINTS)
    window = report.window
    start_s, end_s = _span(report)
    unit, mw, marks = _power_axis(site, paper)
    x = Scale(start_s, end_s, paper.left, paper.width - paper.right)
    y = Scale(marks[0], marks[-1], paper.height - paper.bottom, paper.top)

    def known(power_mw: int | None) -> float | None:
        return None if power_mw is None else power_mw / mw

    parts = [
        _opening(paper.width, paper.height, f"site-chart {paper.name}", "Draw of the site against its limit")
    ]
    parts += _phases(report, x, y, paper)
    parts += _y_axis(y, marks, unit, paper)
    parts += _x_axis(x, y, time_ticks(start_s, end_s, paper.x_ticks), paper)
    piece_s = (end_s - start_s) / max(1, len(site))
    outside_s = max(OUTSIDE_GAP_S, 4 * piece_s)
    inside_s = max(MOST_GAP_S, 4 * piece_s)
    opened_s, until_s = window.opened_unix_s, report.until_unix_s
    committed = [(s.unix_s, known(s.committed_mw)) for s in site]
    parts.append(f'<path class="caps" d="{steps(committed, end_s, x, y)}"/>')
    draws = [(s.unix_s, known(s.draw_mw)) for s in site]
    inside = [point for point in draws if opened_s <= point[0] <= until_s]
    outside = [point for point in draws if not opened_s <= point[0] <= until_s]
    path = line(inside, x, y, inside_s) + "".join(
        line(side, x, y, outside_s)
        for side in (
            [*(p for p in outside if p[0] < opened_s), *inside[:1]],
            [*inside[-1:], *(p for p in outside if p[0] > until_s)],
        )
    )
    parts.append(f'<path class="draw" d="{path}"/>')
    limits = [(at_s, known(limit)) for at_s, limit in report.limits]
    held = [*(step for step in limits if step[0] < until_s), (until_s, None)]
    parts.append(f'<path class="limit" d="{steps(held, until_s, x, y)}"/>')
    after = [step for step in limits if step[0] >= until_s and window.closed_unix_s is not None]
    if after:
        parts.append(f'<path class="hold" d="{steps(after, end_s, x, y)}"/>')
    parts += _direct_labels(report, x, y, mw)
    parts.append("</svg>")
    return "".join(parts)


def _power_axis(site: Sequence[SiteSample], paper: Paper) -> tuple[str, int, list[float]]:
    """Its unit, that in mW, and its marks."""
    values = [v for s in site for v in (s.draw_mw, s.limit_mw, s.committed_mw) if v is not None]
    unit, mw = ("W", W_MW) if max(values, default=0) < 10 * KW_MW else ("kW", KW_MW)
    low, high = 0.97 * min(values, default=0) / mw, 1.02 * max(values, default=mw) / mw
    return unit, mw, round_axis(low, high, paper.y_ticks)


def begins_at_zero(report: WindowReport) -> bool:
    """Whether the axis of power does, on either sheet."""
    site = thin(report.site, SITE_POINTS)
    return all(_power_axis(site, paper)[2][0] == 0 for paper in (WIDE, NARROW))


def _span(report: WindowReport) -> tuple[float, float]:
    """The first and last instant on the axes of time."""
    times = [sample.unix_s for sample in (*report.site[:1], *report.site[-1:])]
    return min([report.window.opened_unix_s, *times]), max([report.until_unix_s, *times])


def _opening(width: int, height: int, kind: str, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{text(title)}">'
    )


def _phases(report: WindowReport, x: Scale, y: Scale, paper: Paper) -> list[str]:
    """Shaded areas of window and rebound, their names above."""
    rebound = [sample.unix_s for sample in report.site if sample.phase == "rebound"]
    until_s = report.until_unix_s
    spans = [("window", "shade", report.window.opened_unix_s, until_s)]
    if rebound and rebound[-1] > until_s:
        spans.append(("slow release", "release", until_s, rebound[-1]))
    parts: list[str] = []
    for name, kind, begins_s, ends_s in spans:
        left, right = x.at(begins_s), x.at(ends_s)
        size = f'width="{max(0.0, right - left):.1f}" height="{y.start - y.end:g}"'
        parts.append(f'<rect class="{kind}" x="{left:g}" y="{y.end:g}" {size}/>')
        if right - left > 7 * len(name):
            parts.append(
                f'<text class="phase" x="{(left + right) / 2:.1f}" y="{paper.top - 8}">{name}</text>'
            )
    counted_s = report.compliance.from_unix_s
    if counted_s is not None:
        at = x.at(counted_s)
        parts.append(f'<path class="counts" d="M{at:g} {y.start:g}V{y.end:g}"/>')
    return parts


def _y_axis(y: Scale, marks: Sequence[float], unit: str, paper: Paper) -> list[str]:
    parts = [f'<text class="unit" x="{paper.left - 8}" y="{paper.top - 8}">{unit}</text>']
    for value in marks:
        at = y.at(value)
        parts.append(f'<path class="grid" d="M{paper.left} {at:g}H{paper.width - paper.right}"/>')
        parts.append(f'<text class="y" x="{paper.left - 8}" y="{at + 4:g}">{value:,g}</text>')
    return parts


def _x_axis(x: Scale, y: Scale, marks: Sequence[tuple[float, str]], paper: Paper) -> list[str]:
    parts = [f'<path class="axis" d="M{x.start:g} {y.start:g}H{x.end:g}"/>']
    for at_s, label in marks:
        at = x.at(at_s)
        parts.append(f'<path class="axis" d="M{at:g} {y.start:g}v5"/>')
        half = 3.4 * len(label)
        place = min(max(at, half), paper.width - half)
        parts.append(f'<text class="x" x="{place:g}" y="{y.start + 20:g}">{label}</text>')
    return parts


def _direct_labels(report: WindowReport, x: Scale, y: Scale, mw: int) -> list[str]:
    """The limit by its name, above its line where the draw is below it."""
    until_s = report.until_unix_s
    known = [(at_s, limit) for at_s, limit in report.limits if limit is not None and at_s < until_s]
    if not known:
        return []
    at_s, limit_mw = known[0]
    ends_s = known[1][0] if len(known) > 1 else until_s
    label = f"limit {format_power(limit_mw)}"
    width = 7.0 * len(label)
    # At the end of the line: where it begins, the draw still falls through it.
    left = max(x.at(max(at_s, report.window.opened_unix_s)) + 8, x.at(ends_s) - width - 8)
    left = min(left, x.end - width)
    return [f'<text class="limit-name" x="{left:g}" y="{y.at(limit_mw / mw) - 7:g}">{label}</text>']


# ---------------------------------------------------------------------------------------------------- one run

RUN_WIDTH: Final = 300
RUN_HEIGHT: Final = 150
_RUN_LEFT: Final = 44
_SHARE_BOX: Final = (10.0, 72.0)
_CAP_BOX: Final = (88.0, 132.0)


def run_chart(report: WindowReport, samples: Sequence[RunSample], name: str) -> str:
    """Throughput above, cap and draw of one GPU below, on one axis of time."""
    start_s, end_s = _span(report)
    x = Scale(start_s, end_s, _RUN_LEFT, RUN_WIDTH - 4)
    gap_s = _run_gap_s(samples)
    shares = [(s.unix_s, s.share) for s in samples]
    caps = [(s.unix_s, None if s.cap_mw is None else s.cap_mw / W_MW) for s in samples]
    draws = [(s.unix_s, None if s.draw_mw is None else s.draw_mw / W_MW) for s in samples]
    known = [value for _, value in shares if value is not None]
    low = 0.5 if min(known, default=0.0) >= 0.5 else 0.0
    share_y = Scale(low, max(1.1, *known) if known else 1.1, _SHARE_BOX[1], _SHARE_BOX[0])
    watts = [value for _, value in (*caps, *draws) if value is not None]
    watt_top = round_axis(0.0, max([1.0, *watts]), 4)[-1]
    watt_y = Scale(0.0, watt_top, _CAP_BOX[1], _CAP_BOX[0])
    left, right = x.at(report.window.opened_unix_s), x.at(report.until_unix_s)
    parts = [_opening(RUN_WIDTH, RUN_HEIGHT, "run-chart", f"Throughput and cap of {name}")]
    for top, bottom in (_SHARE_BOX, _CAP_BOX):
        parts.append(
            f'<rect class="shade" x="{left:g}" y="{top:g}" width="{right - left:.1f}" height="{bottom - top:g}"/>'
            f'<path class="axis" d="M{_RUN_LEFT} {bottom:g}H{RUN_WIDTH - 4}"/>'
        )
    parts.append(f'<path class="base" d="M{_RUN_LEFT} {share_y.at(1.0):g}H{RUN_WIDTH - 4}"/>')
    for value, label in ((1.0, "100 %"), (low, f"{100 * low:.0f} %")):
        parts.append(f'<text class="y" x="{_RUN_LEFT - 6}" y="{share_y.at(value) + 4:g}">{label}</text>')
    for value in (watt_top, 0.0):
        label = f"{value:g} W" if value else "0"
        parts.append(f'<text class="y" x="{_RUN_LEFT - 6}" y="{watt_y.at(value) + 4:g}">{label}</text>')
    parts.append(f'<path class="share" d="{line(shares, x, share_y, gap_s)}"/>')
    parts.append(f'<path class="draw" d="{line(draws, x, watt_y, gap_s)}"/>')
    parts.append(f'<path class="limit" d="{_stepped(caps, gap_s, x, watt_y)}"/>')
    if all(value is None for _, value in shares):
        middle = (share_y.start + share_y.end) / 2
        parts.append(
            f'<text class="none" x="{(x.start + x.end) / 2:g}" y="{middle + 4:g}">throughput not known</text>'
        )
    for at_s, label in _ends(start_s, end_s):
        anchor = "x first" if at_s == start_s else "x last"
        parts.append(f'<text class="{anchor}" x="{x.at(at_s):g}" y="{RUN_HEIGHT - 2}">{label}</text>')
    parts.append("</svg>")
    return "".join(parts)


def _run_gap_s(samples: Sequence[RunSample]) -> float:
    """Where there are many runs each is sampled less often: a gap is what is long beside its usual step."""
    times = [sample.unix_s for sample in samples]
    gaps = [later - sooner for sooner, later in pairwise(times)]
    return max(OUTSIDE_GAP_S, 5 * median(gaps)) if gaps else OUTSIDE_GAP_S


def _stepped(points: Sequence[Point], gap_s: float, x: Scale, y: Scale) -> str:
    """A step line with gaps."""
    return "".join(steps(piece, piece[-1][0], x, y) for piece in pieces(points, gap_s))


def _ends(start_s: float, end_s: float) -> list[tuple[float, str]]:
    """The first and the last instant of an axis too short for more."""
    span_s = end_s - start_s
    pattern = "%H:%M:%S" if span_s < 600 else "%H:%M" if span_s < 86_400 else "%d %b %H:%M"
    return [(at_s, utc(at_s, pattern)) for at_s in (start_s, end_s)] if span_s > 0 else []


def bar(share: float) -> str:
    """A bar of a table: ``share`` (0..1) of its column."""
    width = 0.0 if not math.isfinite(share) else 100 * min(1.0, max(0.0, share))
    return f'<span class="bar" style="width:{width:.1f}%"></span>'
