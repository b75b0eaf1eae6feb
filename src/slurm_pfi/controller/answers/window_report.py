"""Answers what a window came to, from the history and in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from ...bus.asking import NO, Reply, Request, refusal
from ...store.history import History, HistoryError
from ...store.rows import EventRow, RunSample, SiteSample, WindowRow
from ..recorder import AFTER_S, BEFORE_S
from .outcome import Given, WindowReport, compliance, delivered, given, limit_steps, lost, thin
from .privacy import Asker, private_report

if TYPE_CHECKING:
    from ..shell import Controller

COMMANDS: Final = frozenset({"windows", "report"})
MOST_SITE_ROWS: Final = 10_000
MOST_RUNS: Final = 10_000
"""Runs of one reply, which has at most bus.control.MAX_REPLY_BYTES: some 800 bytes each."""

MOST_RUNS_IN_STEPS: Final = 5_000
"""With more runs than this only those of MOST_SHOWN are told in steps of time."""

MOST_SHOWN: Final = 40
"""Runs, those that gave most, that are told in fine steps."""

FINE_POINTS: Final = 600
ALL_POINTS: Final = 20_000
"""Samples of all the other runs together."""

REBOUND_S: Final = 7200.0
"""How long after a window what follows is looked for at most."""


class WindowQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``report``: of this window, or with None of the last."""

    window: Annotated[int, Meta(ge=1, le=2**53)] | None = None


class NoQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``windows`` asks for all."""


def read_report(history: History, window: WindowRow, now_unix_s: float) -> WindowReport:
    """Read and count. Blocks; raises HistoryError."""
    until_s = now_unix_s if window.closed_unix_s is None else window.closed_unix_s
    begin_s, end_s = window.opened_unix_s - BEFORE_S, min(now_unix_s, until_s + REBOUND_S)
    samples = _own(history.site_samples(begin_s, end_s), until_s)
    end_s = max(until_s, samples[-1].unix_s if samples else until_s)
    found = compliance(samples, window, until_s)
    from_s = window.opened_unix_s if found.from_unix_s is None else found.from_unix_s
    window_s = max(0.0, until_s - from_s)
    means = history.run_means(from_s, until_s)
    events = history.events(begin_s, end_s)
    by_run: dict[str, list[EventRow]] = {}
    for event in events:
        if window.opened_unix_s <= event.unix_s <= until_s:
            by_run.setdefault(event.run, []).append(event)
    runs = [
        given(facts, means.get(facts.run), window_s, by_run.get(facts.run, ()))
        for facts in history.facts(window.id)
    ]
    runs.sort(key=lambda run: (run.gave_mw is None, -(run.gave_mw or 0), run.facts.run))
    loss, lost_gpu_h = lost(runs)
    fine = tuple(run.facts.run for run in runs[:MOST_SHOWN])
    span_s = max(1.0, end_s - begin_s)
    fine_step_s = max(1.0, span_s / FINE_POINTS)
    coarse_step_s = max(fine_step_s, span_s * max(1, len(runs) - len(fine)) / ALL_POINTS)
    series: dict[str, list[RunSample]] = {}
    if len(fine) < len(runs) <= MOST_RUNS_IN_STEPS:
        series = history.run_series(begin_s, end_s, coarse_step_s)
    series.update(history.run_series(begin_s, end_s, fine_step_s, fine))
    site = thin(samples, MOST_SITE_ROWS)
    return WindowReport(
        window=window,
        until_unix_s=until_s,
        compliance=found,
        delivered=delivered(window, found, runs, window_s),
        loss=loss,
        lost_gpu_h=lost_gpu_h,
        runs=_kept(runs),
        runs_left_out=max(0, len(runs) - MOST_RUNS),
        site=site,
        site_thinned=len(site) < len(samples),
        limits=limit_steps(samples),
        fine=fine,
        fine_step_s=fine_step_s,
        coarse_step_s=coarse_step_s,
        series={run: tuple(rows) for run, rows in series.items() if run in {r.facts.run for r in runs}},
        events=tuple(events),
    )


def _kept(runs: Sequence[Given]) -> tuple[Given, ...]:
    """As many as one reply takes: whose promise was broken, and who gave most."""
    if len(runs) <= MOST_RUNS:
        return tuple(runs)
    first = sorted(range(len(runs)), key=lambda place: not (runs[place].floor_passed or runs[place].waited))
    return tuple(runs[place] for place in sorted(first[:MOST_RUNS]))


def _own(samples: Sequence[SiteSample], until_s: float) -> list[SiteSample]:
    """Without what belongs to a window after this one, and no more than a moment after the rebound."""
    kept: list[SiteSample] = []
    quiet_s = until_s
    for sample in samples:
        if sample.unix_s > until_s:
            if sample.phase == "rebound":
                quiet_s = sample.unix_s
            if sample.phase == "window" or sample.unix_s > quiet_s + AFTER_S:
                break
        kept.append(sample)
    return kept


class Reports:
    """Answers ``windows`` and ``report``: one at a time, for each costs the controller's process some time."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._one = asyncio.Lock()

    async def answer(self, request: Request, asker: Asker) -> Reply:
        """The reply to one of COMMANDS."""
        history = self._controller.history
        try:
            async with self._one:
                if request.command == "windows":
                    msgspec.convert(request.args, NoQuestion)
                    return Reply(ok=True, data=await asyncio.to_thread(history.windows))
                question = msgspec.convert(request.args, WindowQuestion)
                return await asyncio.to_thread(self._report, history, question.window, asker)
        except msgspec.ValidationError as error:
            return refusal(f"{request.command}: {error}")
        except HistoryError as error:
            return refusal(str(error), exit_code=NO)

    def _report(self, history: History, window_id: int | None, asker: Asker) -> Reply:
        window = history.window(window_id)
        if window is not None:
            return Reply(ok=True, data=private_report(read_report(history, window, time.time()), asker))
        last = history.window() if window_id is not None else None
        if last is None:
            return refusal(
                "no window was recorded yet; there is one once a limit lies below what the site can draw "
                "('slurm-pfi limit set')",
                exit_code=NO,
            )
        return refusal(
            f"there is no window {window_id}; the last is {last.id} ('slurm-pfi report --list')", exit_code=NO
        )
