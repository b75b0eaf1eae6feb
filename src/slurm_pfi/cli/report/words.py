"""A window in plain words: the same sentences stand in the terminal and on the page. Nothing here is markup."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Final

from ...controller.answers.outcome import Given, WindowReport
from ...store.rows import DRAW_BEFORE_S, EventRow, RunFacts, WindowRow
from ...units import format_duration, format_power
from ..common import job_name

UNKNOWN: Final = "not known"
HELD: Final = 1.005
"""Up to this share of the draw before a slow release holds the site down; later it only lets go."""

SIMULATED: Final = "The GPUs of this window were simulated: no figure here was measured on hardware."
OBSERVED: Final = "Mode observe: caps were planned and none was set; the draw is what the jobs drew anyway."
MIXED: Final = "Some nodes were only observed: their GPUs kept their limits."
STILL_OPEN: Final = "The window is still open: this is what there is so far."


# ---------------------------------------------------------------------------------------------------- time


def utc(unix_s: float, pattern: str = "%Y-%m-%d %H:%M:%S") -> str:
    return dt.datetime.fromtimestamp(unix_s, dt.UTC).strftime(pattern)


def local_offset(unix_s: float) -> str:
    """This host's offset from UTC at that instant: ``+01:00``."""
    text = dt.datetime.fromtimestamp(unix_s, dt.UTC).astimezone().strftime("%z")
    return f"{text[:3]}:{text[3:5]}"


def span(start_s: float, end_s: float) -> str:
    """``2026-11-30 14:00:00 to 14:20:00 UTC``; with this host's own time beside it where that differs."""

    def both(start: dt.datetime, end: dt.datetime) -> str:
        ends = "%H:%M:%S" if start.date() == end.date() else "%Y-%m-%d %H:%M:%S"
        return f"{start:%Y-%m-%d %H:%M:%S} to {end.strftime(ends)}"

    start, end = (dt.datetime.fromtimestamp(at_s, dt.UTC) for at_s in (start_s, end_s))
    told = f"{both(start, end)} UTC"
    here = start.astimezone()
    if here.utcoffset():
        told += f" ({here:%H:%M:%S} to {end.astimezone():%H:%M:%S} local time, UTC{local_offset(start_s)})"
    return told


# ---------------------------------------------------------------------------------------------------- figures


def percent(share: float | None, digits: int = 1) -> str:
    return UNKNOWN if share is None else f"{round(100 * share, digits) + 0.0:.{digits}f} %"


def power(power_mw: int | None) -> str:
    return UNKNOWN if power_mw is None else format_power(power_mw)


def energy(kwh: float) -> str:
    """Watt-hours below 1 kWh, so that little is not told as nothing."""
    return f"{kwh:.2f} kWh" if kwh >= 1 else f"{1000 * kwh:.1f} Wh"


def gpu_hours(hours: float) -> str:
    """A third digit where there is little, so that a short window has not lost nothing."""
    if 0 < abs(hours) < 0.001:
        return "less than 0.001 GPU-hours"
    return f"{hours:.2f} GPU-hours" if abs(hours) >= 0.1 or hours == 0 else f"{hours:.3f} GPU-hours"


def job_of(facts: RunFacts) -> str:
    """A run as Slurm's commands name its job, with the restart only if there was one."""
    return job_name(facts.run, {facts.run: facts.spec})


def names_of(report: WindowReport) -> dict[str, str]:
    """How Slurm's commands name the jobs of a window's runs, by run."""
    return {run.facts.run: run.facts.spec for run in report.runs if run.facts.spec}


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number:,} {thing}s"


# ---------------------------------------------------------------------------------------------------- sentences


def headline(window: WindowRow, until_s: float) -> str:
    length = format_duration(until_s - window.opened_unix_s)
    return f"{span(window.opened_unix_s, until_s)}, {length}"


def limit_line(window: WindowRow) -> str:
    return (
        f"opened by {window.class_} limit {', '.join(window.limit_ids)} of {format_power(window.limit_mw)}, "
        f"policy {window.policy}, mode {window.mode}"
    )


def ended_line(window: WindowRow) -> str:
    return (
        STILL_OPEN
        if window.closed_unix_s is None
        else f"It closed because {window.ended or 'of a reason not recorded'}."
    )


def verdict(report: WindowReport) -> str:
    """Whether the limit was kept, as far as samples tell."""
    found, response_s = report.compliance, report.window.response_s
    if not found.counted_s or found.worst_mw is None:
        return "Whether the limit was kept is not known: " + (
            "no sample has a known draw." if found.unknown_s else f"it was not in force for {response_s:g} s."
        )
    unknown = ""
    if found.unknown_s >= 1:
        unknown = f" For {format_duration(found.unknown_s)} more the draw is not known."
    interval = "" if found.interval_s is None else f", sampled every {found.interval_s:.1f} s"
    counted = f"{format_duration(found.counted_s)}{interval}"
    if found.above_s <= 0:
        room_mw = -found.worst_mw
        near = (
            "At times it was right at it"
            if room_mw < 500
            else f"It came within {format_power(room_mw)} of it"
        )
        return f"The limit was kept: in {counted}, the draw was never above it. {near}.{unknown}"
    share = found.above_s / found.counted_s
    return (
        f"The draw was above the limit for {found.above_s:.1f} s of {counted} ({percent(share)}): "
        f"{energy(found.above_kwh)} in all, {format_power(found.worst_mw)} at the worst.{unknown}"
    )


def counting(report: WindowReport) -> str:
    return f"A limit counts from {report.window.response_s:g} s after it came into force (times.response_s)."


def bottom_up(report: WindowReport) -> str:
    """Delivered, as the sum over runs."""
    found = report.delivered
    if found.bottom_up_mw is None:
        return "What the runs gave is not known: none of them has a known baseline."
    interval = ""
    if found.low_mw is not None and found.high_mw is not None:
        interval = f" (95 % interval {format_power(found.low_mw)} to {format_power(found.high_mw)})"
    text = (
        f"{count(found.known_runs, 'run')} gave {format_power(found.bottom_up_mw)}{interval} on average: "
        "baseline draw less draw."
    )
    if found.unknown_runs:
        text += f" Not counted: {count(found.unknown_runs, 'run')} without a known baseline."
    return text


def top_down(report: WindowReport) -> str:
    """Delivered, as seen from the site."""
    before_mw, mean_mw = report.window.draw_before_mw, report.compliance.mean_draw_mw
    if before_mw is None:
        return "The draw before the window is not known, so the site's own reduction is not known."
    if mean_mw is None:
        return f"The site drew {format_power(before_mw)} before; what it drew in the window is not known."
    less_mw = before_mw - mean_mw
    how = "less" if less_mw >= 0 else "more"
    share = f" ({percent(abs(less_mw) / before_mw)})" if before_mw > 0 else ""
    return (
        f"The site drew {format_power(before_mw)} in the {DRAW_BEFORE_S:g} s before and {format_power(mean_mw)} on "
        f"average in the window: {format_power(abs(less_mw))} {how}{share}."
    )


def cost(report: WindowReport) -> str:
    """What the runs lost."""
    if report.loss is None or report.lost_gpu_h is None:
        return "What it cost in throughput is not known: no run told its progress beside a known baseline."
    known = sum(1 for run in report.runs if run.lost_gpu_h is not None)
    rest = len(report.runs) - known
    verb = "gained" if round(report.loss, 3) < 0 else "lost"
    partial = report.runs_left_out or report.runs_hidden
    who = "The runs" if partial else count(known, "run")
    text = (
        f"{who} {verb} {percent(abs(report.loss))} of throughput, "
        f"{gpu_hours(abs(report.lost_gpu_h))} of work."
    )
    if rest and not partial:
        text += f" Of {count(rest, 'run')} the loss is not known."
    return text + left_out(report)


def left_out(report: WindowReport) -> str:
    """What is said where there were too many runs to tell of each; with a space before it, empty if not."""
    left, hidden = report.runs_left_out, report.runs_hidden
    told = f" {count(left, 'run')} that gave least are in the sums and not told one by one." if left else ""
    if hidden:
        told += f" So are {count(hidden, 'run')} of others (PrivateData in slurm.conf)."
    return told


def promises(report: WindowReport) -> str:
    """What was not held, floors passed, and runs that waited."""
    passed = [job_of(run.facts) for run in report.runs if run.floor_passed]
    waited = [job_of(run.facts) for run in report.runs if run.waited]
    parts = []
    if any(
        event.kind == "infeasible" and "cannot" in event.text
        for event in report.events
        if _inside(event, report)
    ):
        parts.append("For a time the limit could not be held, with every run as low as it might go.")
    if report.runs_hidden:
        parts.append("Of the runs that you may see:")
    parts.append(f"Floors passed by an emergency: {_some(passed)}." if passed else "No floor was passed.")
    parts.append(
        f"Waited for power longer than a start may take: {_some(waited)}."
        if waited
        else "No run waited for power longer than a start may take (times.start_grace_s)."
    )
    return " ".join(parts)


def rebound(report: WindowReport) -> str | None:
    """The peak of the slow release beside the peak before the window; None where nothing is known of either."""
    opened_s = report.window.opened_unix_s
    before = [s.draw_mw for s in report.site if s.unix_s < opened_s and s.draw_mw is not None]
    if not before or report.window.closed_unix_s is None:
        return None
    most_mw = max(before)
    held = [s for s in report.site if s.phase == "rebound" and (s.limit_mw or 0) <= HELD * most_mw]
    draws = [sample.draw_mw for sample in held if sample.draw_mw is not None]
    if not draws:
        return None
    return (
        f"While the caps rose again, held to the draw before, the site drew {format_power(max(draws))} at most; in the "
        f"two minutes before the window it drew {format_power(most_mw)} at most."
    )


def warnings(report: WindowReport) -> list[str]:
    """What a reader must know before any figure."""
    told = [SIMULATED] if report.window.simulated else []
    if report.window.mode != "enforce":
        told.append(OBSERVED if report.window.mode == "observe" else MIXED)
    if report.window.closed_unix_s is None:
        told.append(STILL_OPEN)
    opened_s, until_s = report.window.opened_unix_s, report.until_unix_s
    inside = [s for s in report.site if opened_s <= s.unix_s <= until_s and s.draw_mw is not None]
    most_mw = max((sample.unmeasured_mw for sample in inside), default=0)
    if most_mw:
        told.append(
            f"Of the draw in the window up to {format_power(most_mw)} was not measured: GPUs without a reading count "
            "at the most that they could draw."
        )
    return told


def note(run: Given) -> str:
    """What is remarkable about one run; empty if nothing is."""
    notes = []
    if run.floor_passed:
        notes.append("floor passed")
    if run.waited:
        notes.append("waited for power")
    if run.facts.baseline_draw_mw is None:
        notes.append("no known baseline")
    elif run.facts.baseline == "recalled":
        notes.append("baseline recalled")
    return ", ".join(notes)


def _inside(event: EventRow, report: WindowReport) -> bool:
    return report.window.opened_unix_s - 1 <= event.unix_s <= report.until_unix_s


def _some(names: Iterable[str], most: int = 12) -> str:
    known = list(names)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more
