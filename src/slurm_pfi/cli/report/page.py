"""The page of a window: one HTML file with its style and its charts in it, no script and nothing from a network."""

from __future__ import annotations

import re
import time
from html import escape
from typing import Final

from ... import __version__
from ...controller.answers.outcome import Given, WindowReport
from ...store.rows import DRAW_BEFORE_S
from ...units import format_duration, format_power
from . import words
from .charts import NARROW, WIDE, begins_at_zero, run_chart, site_chart, text
from .style import STYLE
from .table import MOST_RUNS, events_table, runs_table

MOST_CHARTS: Final = 40

_BEFORE_UNIT: Final = re.compile(r"(?<=\d) (?=(?:[kM]?Wh?|%|s|min|h)(?!\w))")

Tile = tuple[str, str, str]
"""What it is, the figure, and what belongs to it in small print."""


def page(report: WindowReport, *, made_unix_s: float | None = None) -> str:
    """The whole document. ``made_unix_s``: when, by default now."""
    window = report.window
    made_s = time.time() if made_unix_s is None else made_unix_s
    title = f"Window {window.id} on {window.cluster}"
    body = [
        f"<h1>{text(title)}</h1>",
        f'<p class="when">{text(words.headline(window, report.until_unix_s))}<br/>{text(words.limit_line(window))}</p>',
        *(f'<p class="warn">{text(said)}</p>' for said in words.warnings(report)),
        f'<p class="verdict">{_unbroken(words.verdict(report))}</p>',
        _tiles(report),
        _site(report),
        _said(report),
        "<h2>Who gave what</h2>",
        f'<p class="how">Means over {_counted(report)}; a loss by the job\'s own counter is of the whole window. '
        "Draw and cap are of one GPU, what a run gave is of all its GPUs; shares are of its own uncapped baseline.</p>",
        runs_table(report),
        _runs(report),
        "<h2>What happened</h2>",
        events_table(report),
        _notes(report),
        f"<footer>slurm-pfi {text(__version__)}, made {words.utc(made_s)} UTC</footer>",
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _unbroken(told: str) -> str:
    """Text as markup in which no line ends between a figure and its unit."""
    return _BEFORE_UNIT.sub("&#160;", text(told))


def _counted(report: WindowReport) -> str:
    hours = report.delivered.hours
    return f"{format_duration(hours * 3600)} from when the limit counts"


# ---------------------------------------------------------------------------------------------------- figures


def _tiles(report: WindowReport) -> str:
    found, given = report.compliance, report.delivered
    before_mw, mean_mw = report.window.draw_before_mw, found.mean_draw_mw
    less = ""
    if before_mw and mean_mw is not None:
        change = (mean_mw - before_mw) / before_mw
        less = f"{'-' if change < 0 else '+'}{abs(100 * change):.1f} % against before"
    interval = ""
    if given.low_mw is not None and given.high_mw is not None:
        interval = f"95 %: {format_power(given.low_mw)} to {format_power(given.high_mw)}"
    above = words.UNKNOWN if not found.counted_s else f"{found.above_s:.1f} s"
    tiles: list[Tile] = [
        ("Site limit", format_power(report.window.limit_mw), _changes(report)),
        ("Site draw before", words.power(before_mw), f"mean of the {DRAW_BEFORE_S:g} s before"),
        ("Site draw under the limit", words.power(mean_mw), less),
        ("Given by the runs", words.power(given.bottom_up_mw), interval),
        ("Above the limit", above, words.energy(found.above_kwh) if found.counted_s else ""),
        (
            "Work lost",
            words.percent(report.loss),
            "" if report.lost_gpu_h is None else words.gpu_hours(report.lost_gpu_h),
        ),
    ]
    cells = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{_unbroken(small)}</small></dd></div>'
        for name, value, small in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _changes(report: WindowReport) -> str:
    steps = {limit for at_s, limit in report.limits if limit is not None and at_s < report.until_unix_s}
    return f"{len(steps)} different ones in this window" if len(steps) > 1 else report.window.class_


def _site(report: WindowReport) -> str:
    """The main chart twice, one for each kind of screen, with its key."""
    if not report.site:
        return '<h2>Draw against the limit</h2><p class="none">No sample of the site was recorded.</p>'
    held = any(at_s >= report.until_unix_s and limit is not None for at_s, limit in report.limits)
    keys = [
        ("limit", "site limit"),
        ("caps", "sum of the caps, declared load included"),
        ("draw", "draw of the site"),
        ("counts", "from here the limit counts"),
    ]
    if held and report.window.closed_unix_s is not None:
        keys.append(("hold", "most that the slow release lets through"))
    offset = words.local_offset(report.window.opened_unix_s)
    zone = "" if offset == "+00:00" else f" This host's own time is UTC{offset}."
    axis = "" if begins_at_zero(report) else " The axis of power does not begin at zero."
    return (
        f"<h2>Draw against the limit</h2>{_key(keys)}"
        f"{site_chart(report, WIDE)}{site_chart(report, NARROW)}"
        f'<p class="how">Time in UTC.{zone}{axis} '
        "A gap in the draw is a time in which it was not known. "
        f"Of every figure {format_power(report.window.beside_mw)} is declared beside the GPUs and not measured.</p>"
    )


def _key(keys: list[tuple[str, str]]) -> str:
    """What the lines of a chart mean: (class of the line, words)."""
    items = "".join(
        '<li><svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">'
        f'<path class="{name}" d="M1 5H25"/></svg>{text(said)}</li>'
        for name, said in keys
    )
    return f'<ul class="key">{items}</ul>'


def _said(report: WindowReport) -> str:
    lines = [words.top_down(report), words.bottom_up(report), words.cost(report), words.promises(report)]
    if after := words.rebound(report):
        lines.append(after)
    if report.window.closed_unix_s is not None:
        lines.append(words.ended_line(report.window))
    return '<ul class="said">' + "".join(f"<li>{_unbroken(said)}</li>" for said in lines) + "</ul>"


# ---------------------------------------------------------------------------------------------------- the runs


def _runs(report: WindowReport) -> str:
    """A small chart for each of those who gave most."""
    shown = [run for run in report.runs[:MOST_CHARTS] if report.series.get(run.facts.run)]
    if not shown:
        return ""
    cards = "".join(_card(report, run) for run in shown)
    rest = len(report.runs) - len(shown)
    more = f" {words.count(rest, 'run')} that gave less, or were too short, are not drawn." if rest else ""
    keys = [
        ("share", "throughput, 100 % is its own uncapped baseline"),
        ("limit", "cap of a GPU"),
        ("draw", "draw of a GPU"),
    ]
    return (
        "<h2>Throughput and cap of each run</h2>"
        f"{_key(keys)}"
        f'<div class="cards">{cards}</div>'
        f'<p class="how">Each point is the mean of {report.fine_step_s:.3g} s.{more}</p>'
    )


def _card(report: WindowReport, run: Given) -> str:
    facts = run.facts
    job = words.job_of(facts)
    who = f"{text((facts.user or '?')[:20])}, {words.count(facts.gpus, 'GPU')}"
    told = [
        f"gave {words.power(run.gave_mw)}",
        f"loss {words.percent(run.loss)}",
        f"flex {facts.flex or '?'}",
    ]
    return (
        f'<figure><figcaption><b>{text(job)}</b> {who}<span class="sub">{text(", ".join(told))}</span></figcaption>'
        f"{run_chart(report, report.series[facts.run], f'job {job}')}</figure>"
    )


# ---------------------------------------------------------------------------------------------------- notes


def _notes(report: WindowReport) -> str:
    found = report.compliance
    interval = "" if found.interval_s is None else f" Samples are {found.interval_s:.1f} s apart."
    notes = [
        f"{words.counting(report)} Until then the limit before it does.{interval} What the draw does between two "
        "samples is not seen.",
        "Given by the runs: for each run its uncapped baseline draw less its mean draw, times its GPUs and its share "
        "of the time, summed. The interval comes from the baselines' own errors, taken as independent from run to run. "
        "Parked GPUs and runs without a known baseline are not in it.",
        "The site's own reduction differs from it by what came, went or was parked meanwhile.",
        "Loss: one less throughput over the run's own uncapped throughput, by the counter that the job reports itself. "
        "A run that reports none has no known loss.",
        "Baselines: seen, when the run ran uncapped long enough; recalled, from earlier runs of the same work.",
    ]
    if len(report.runs) > MOST_RUNS:
        notes.append(
            f"The {MOST_RUNS} runs that gave most are shown one by one; all {len(report.runs):,} are in the CSV files."
        )
    items = "".join(f"<li>{text(said)}</li>" for said in notes)
    return f'<h2>How this was counted</h2><ul class="said">{items}</ul>'
