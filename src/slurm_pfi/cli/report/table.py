"""The tables of the page: who gave what, and what happened. Everything from outside is escaped here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ...controller.answers.outcome import Given, WindowReport
from ...store.rows import EventRow
from ..common import job_name
from .charts import bar, text
from .words import UNKNOWN, count, job_of, names_of, note, percent, power, utc

MOST_RUNS: Final = 40
MOST_EVENTS: Final = 120
EVERY_CAP: Final = 80
"""With more entries than this of caps that came and went, these are only counted."""

_ROUTINE: Final = frozenset({"capped", "uncapped", "admitted", "ended"})


@dataclass(frozen=True, slots=True)
class Head:
    """A column: ``side`` is its CSS class, ``less`` hides it on narrow screens."""

    title: str
    cell: Callable[[Given], str]
    numeric: bool = True
    less: bool = False


def _class(head: Head) -> str:
    names = [name for name, on in (("num", head.numeric), ("less", head.less)) if on]
    return f' class="{" ".join(names)}"' if names else ""


def _short(value: str | None, most: int = 24) -> str:
    """A user's text, cut to a length that a table bears."""
    if not value:
        return "?"
    return text(value if len(value) <= most else f"{value[: most - 1]}\u2026")


def _job(run: Given) -> str:
    name = f'<span class="sub">{_short(run.facts.name)}</span>' if run.facts.name else ""
    remark = note(run)
    told = f'<span class="sub note">{text(remark)}</span>' if remark else ""
    return f"{text(job_of(run.facts))}{name}{told}"


def runs_table(report: WindowReport) -> str:
    """Those who gave most, and the rest in one line."""
    shown, rest = report.runs[:MOST_RUNS], report.runs[MOST_RUNS:]
    if not shown:
        none = "No run that you may see was" if report.runs_hidden else "No run was known"
        return f'<p class="none">{none} in this window.</p>'
    most_mw = max((run.gave_mw or 0 for run in shown), default=0)

    def gave(run: Given) -> str:
        if run.gave_mw is None:
            return power(None)
        return f"{power(run.gave_mw)}{bar(run.gave_mw / most_mw if most_mw > 0 else 0.0)}"

    heads = (
        Head("Job", _job, numeric=False),
        Head("User", lambda run: _short(run.facts.user), numeric=False, less=True),
        Head("GPUs", lambda run: str(run.facts.gpus)),
        Head("Flex", lambda run: _short(run.facts.flex), less=True),
        Head("Lowest cap", lambda run: power(run.lowest_cap_mw), less=True),
        Head("Draw of a GPU", _draws, less=True),
        Head("Gave", gave),
        Head("Of its draw", lambda run: percent(run.reduction)),
        Head("Loss", lambda run: percent(run.loss)),
        Head("GPU-hours lost", lambda run: _hours(run.lost_gpu_h), less=True),
    )
    rows = [_row(heads, run) for run in shown]
    if rest:
        rows.append(_rest(rest, heads))
    head = "".join(f"<th{_class(one)}>{one.title}</th>" for one in heads)
    body = "".join(rows)
    return f'<div class="scroll"><table class="runs"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(heads: Sequence[Head], run: Given) -> str:
    return "<tr>" + "".join(f"<td{_class(head)}>{head.cell(run)}</td>" for head in heads) + "</tr>"


def _draws(run: Given) -> str:
    return f"{power(run.facts.baseline_draw_mw)} \u2192 {power(run.draw_mw)}"


def _hours(hours: float | None) -> str:
    if hours is None:
        return UNKNOWN
    if 0 < abs(hours) < 0.001:
        return "&lt; 0.001"
    return f"{hours:,.3f}" if abs(hours) < 10 else f"{hours:,.1f}"


def _rest(rest: Sequence[Given], heads: Sequence[Head]) -> str:
    """One line for all the others together: sums of what is known."""
    gave = [run.gave_mw for run in rest if run.gave_mw is not None]
    lost = [run.lost_gpu_h for run in rest if run.lost_gpu_h is not None]
    cells = {
        "Job": f"{count(len(rest), 'more run')}",
        "GPUs": str(sum(run.facts.gpus for run in rest)),
        "Gave": power(sum(gave)) if gave else power(None),
        "GPU-hours lost": _hours(sum(lost) if lost else None),
    }
    return (
        '<tr class="rest">'
        + "".join(f"<td{_class(head)}>{cells.get(head.title, '')}</td>" for head in heads)
        + "</tr>"
    )


# ---------------------------------------------------------------------------------------------------- events


def events_table(report: WindowReport) -> str:
    """What happened, the routine of many caps only counted."""
    begin_s, end_s = report.window.opened_unix_s - 60.0, report.until_unix_s + 60.0
    own = [event for event in report.events if begin_s <= event.unix_s <= end_s]
    shown, left = excerpt(own)
    names = names_of(report)
    if not shown:
        return '<p class="none">Nothing was recorded.</p>'
    rows = "".join(
        f'<tr><td class="num">{utc(event.unix_s, "%H:%M:%S")}</td>'
        f"<td>{text(job_name(event.run, names)) if event.run else 'site'}</td><td>{text(event.text)}</td></tr>"
        for event in shown
    )
    more = f'<p class="none">{count(left, "more entry").replace("entrys", "entries")} in the CSV file of events.</p>'
    table = (
        '<div class="scroll"><table class="events"><thead><tr><th class="num">UTC</th><th>Job</th><th>What</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></div>"
    )
    return table + (more if left else "")


def excerpt(events: Sequence[EventRow]) -> tuple[list[EventRow], int]:
    """The entries to show, and how many are left out: first of all those that are every day's."""
    routine = sum(1 for event in events if event.kind in _ROUTINE)
    kept = [event for event in events if event.kind not in _ROUTINE or routine <= EVERY_CAP]
    shown = kept[:MOST_EVENTS]
    return shown, len(events) - len(shown)
