"""What the controller's cycles leave in the history: windows, samples in and around them, what happened to whom.

A fault in here is said once and costs history: it never reaches the cycle that is being recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import structlog

from ..config import Config
from ..model import Run
from ..store.rows import DRAW_BEFORE_S, EndedRun, EventRow, Row, SiteSample, WindowRow
from .audit_words import audit_event
from .kinship import kin_of
from .ledger import NS_PER_S
from .remembered import kept_records
from .site_rows import (
    Work,
    cap_events,
    limit_event,
    node_events,
    phase_of,
    promise_events,
    run_facts,
    run_sample,
    site_sample,
    why_closed,
    window_row,
    work,
)
from .state import NodeView, RunView, State, WindowView
from .views import run_view

SAMPLE_S: Final = 1.0
BEFORE_S: Final = 120.0
"""How long before a window its page begins."""

AFTER_S: Final = 120.0
RUNS_PER_S: Final = ((600.0, 200), (3600.0, 50), (86_400.0, 20), (float("inf"), 5))
"""Runs sampled each second, by the age of the window (s): often while caps move, seldom in a long one. Where there are
more runs each has its turn less often, so that a report has some hundred samples of a run and is read in seconds."""

RUNS_PER_S_BEFORE: Final = 40
MOST_HELD_S: Final = 10.0
"""A cycle that is later than this leaves a gap: what was meanwhile, no sample tells."""

FACTS_S: Final = 60.0
FACTS_PER_CYCLE: Final = 50
"""Runs whose facts are worked out in one cycle: a thousand at once would keep acknowledgements waiting."""


log = structlog.get_logger("controller")


Summary: TypeAlias = Callable[[RunView, State, Config, int, float], dict[str, Any]]
"""What is kept of a run that ended: its view, the state, the config, monotonic ns and Unix seconds of now."""


def plain_summary(
    view: RunView, state: State, _config: Config, now_ns: int, _now_unix_s: float
) -> dict[str, Any]:
    """What ``jobs`` shows of the run."""
    return run_view(view, state, now_ns)


class Sink(Protocol):
    """Where rows go; the history. Neither call waits."""

    left_open: WindowRow | None
    last_seen_s: float | None

    def add(self, rows: Iterable[Row]) -> None: ...

    def new_window_id(self) -> int | None: ...


class Recorder:
    """Looks at the state after each cycle and hands over what is new. No clock of its own.

    ``boot_id``: of this host, whose clock the runs' records are in; without one none is kept.
    """

    def __init__(self, history: Sink, summary: Summary = plain_summary, boot_id: str = "") -> None:
        self._history = history
        self._boot_id = boot_id
        self._summary = summary
        self._open: WindowRow | None = None
        self._limit: tuple[int, tuple[str, ...]] | None = None
        self._settled = False
        self._runs: dict[Run, RunView] = {}
        self._nodes: dict[str, NodeView] = {}
        self._told_caps: dict[Run, int] = {}
        self._work: dict[Run, Work | None] = {}
        self._due: deque[tuple[int, RunView, Work | None, State, int, float]] = deque()
        self._draws: deque[tuple[int, SiteSample]] = deque()
        self._held: deque[tuple[int, Row]] = deque()
        self._next_sample_ns = 0
        self._last_sample_ns: int | None = None
        self._next_facts_ns = 0
        self._after_until_ns = 0
        self._turn = 0
        self._said = ""

    @property
    def window_id(self) -> int | None:
        """The number of the window that is open; None without one, or while history cannot be written."""
        return None if self._open is None else self._open.id

    def cycle(self, state: State, config: Config, now_ns: int, now_unix_s: float) -> None:
        """Record the state after a cycle. Raises nothing."""
        try:
            if state.planned:
                self._history.add(self._rows(state, config, now_ns, now_unix_s))
        except Exception as error:
            self._fault("a cycle", error)

    def audit(self, event: str, fields: Mapping[str, Any], now_unix_s: float) -> None:
        """Record an entry of the audit log, if people should read of it. Raises nothing."""
        try:
            row = audit_event(event, fields, now_unix_s)
            if row is not None:
                self._history.add((row,))
        except Exception as error:
            self._fault(event, error)

    def _fault(self, what: str, error: Exception) -> None:
        text = f"{what}: {error!r}"
        if text != self._said:
            log.exception(f"a fault of the recorder, please report it; the history misses {text}")
        self._said = text

    # ------------------------------------------------------------------------------------------- one cycle

    def _rows(self, state: State, config: Config, now_ns: int, now_unix_s: float) -> list[Row]:
        rows: list[Row] = []
        if not self._settled:
            rows += self._take_over(state, now_unix_s)
            self._settled = True
        binding = state.window if state.window is not None and not state.window.rebound else None
        if binding is not None:
            rows += self._in_window(binding, state, config, now_ns, now_unix_s)
        elif self._open is not None:
            rows += self._close(state, now_ns, now_unix_s)
        rows += cap_events(self._runs, state, config.policy.name, self._told_caps, now_ns, now_unix_s)
        rows += promise_events(self._runs, state, now_unix_s)
        rows += node_events(self._nodes, state, now_unix_s)
        rows += self._some_facts()
        rows += self._ended(state, config, now_ns, now_unix_s)
        if now_ns >= self._next_sample_ns:
            self._next_sample_ns = max(
                self._next_sample_ns + round(SAMPLE_S * NS_PER_S), now_ns + NS_PER_S // 2
            )
            rows += self._samples(state, config, now_ns, now_unix_s)
        self._runs, self._nodes = state.runs, state.nodes
        return rows

    def _take_over(self, state: State, now_unix_s: float) -> list[Row]:
        """A window that the last controller left open goes on, if its limit still binds; else its end was not seen."""
        left = self._history.left_open
        if left is None:
            return []
        window = state.window
        if window is not None and not set(window.limit_ids).isdisjoint(left.limit_ids):
            self._open = left
            self._limit = (window.limit_mw, window.limit_ids)
            return []
        seen_s = self._history.last_seen_s
        closed_s = now_unix_s if seen_s is None else min(now_unix_s, max(seen_s, left.opened_unix_s))
        ended = "no controller ran when it ended; this is the last that was seen of it"
        return [msgspec.structs.replace(left, closed_unix_s=closed_s, ended=ended)]

    def _in_window(
        self, window: WindowView, state: State, config: Config, now_ns: int, now_unix_s: float
    ) -> list[Row]:
        rows: list[Row] = []
        limit = (window.limit_mw, window.limit_ids)
        first = self._open is None
        if first:
            window_id = self._history.new_window_id()
            if window_id is None:
                return []  # nothing can be written; the next cycle tries again
            opened_s = now_unix_s - (now_ns - window.opened_ns) / NS_PER_S
            before_mw = self._draw_before_mw(window.opened_ns)
            self._open = window_row(window_id, window, state, config, opened_s, before_mw)
            self._work = {run: work(view) for run, view in state.runs.items()}
            rows += [self._open, *(row for _, row in self._held)]
            self._held.clear()
            self._next_sample_ns = self._next_facts_ns = now_ns
        assert self._open is not None
        if limit != self._limit:
            rows.append(limit_event(window, self._open.id, now_unix_s, first=first))
            self._limit = limit
        if config.policy.name != self._open.policy:
            self._open = msgspec.structs.replace(self._open, policy=config.policy.name)
            text = f"the policy is {config.policy.name} from now on"
            rows += [self._open, EventRow(unix_s=now_unix_s, kind="policy", text=text)]
        if now_ns >= self._next_facts_ns and not self._due:
            self._next_facts_ns = now_ns + round(FACTS_S * NS_PER_S)
            self._plan_facts(state, now_ns, now_unix_s)
        return rows

    def _close(self, state: State, now_ns: int, now_unix_s: float) -> list[Row]:
        assert self._open is not None
        why = why_closed(self._open, state, now_unix_s)
        row = msgspec.structs.replace(self._open, closed_unix_s=now_unix_s, ended=why)
        text = f"window {row.id} is over: {why}"
        rows: list[Row] = [row, EventRow(unix_s=now_unix_s, kind="closed", text=text)]
        self._due.clear()
        self._plan_facts(state, now_ns, now_unix_s)
        self._open = self._limit = None
        self._next_sample_ns = now_ns
        return rows

    def _plan_facts(self, state: State, now_ns: int, now_unix_s: float) -> None:
        """All runs as they are now; a state never changes, so what is worked out later is still of now."""
        assert self._open is not None
        self._due.extend(
            (self._open.id, view, self._work.setdefault(view.run, work(view)), state, now_ns, now_unix_s)
            for view in state.runs.values()
            if view.phase != "gone"
        )

    def _some_facts(self) -> list[Row]:
        rows: list[Row] = []
        for _ in range(min(FACTS_PER_CYCLE, len(self._due))):
            window_id, view, since, state, now_ns, now_unix_s = self._due.popleft()
            rows.append(run_facts(window_id, view, state, since, now_ns))
            # Remembered before they end too: a controller that starts anew knows no run, but its kin.
            kin = kin_of(view, state.nodes, now_ns, now_unix_s)
            rows += [] if kin is None else [kin]
            rows += kept_records((view,), self._boot_id, now_unix_s)
        return rows

    def leave(self, state: State, now_unix_s: float) -> None:
        """For a successor: what was measured of every run until now. Raises nothing."""
        try:
            self._history.add(kept_records(state.runs.values(), self._boot_id, now_unix_s))
        except Exception as error:
            self._fault("what was measured of the runs", error)

    def _ended(self, state: State, config: Config, now_ns: int, now_unix_s: float) -> list[Row]:
        """Runs that were there at the last cycle and are not now."""
        rows: list[Row] = []
        for run, view in self._runs.items():
            if run in state.runs:
                continue
            self._told_caps.pop(run, None)
            if view.phase in ("new", "refused"):
                continue
            nodes = {name for name in view.gpus if name in state.nodes}
            kept = msgspec.structs.replace(view, gpus={name: view.gpus[name] for name in nodes})
            if self._open is not None:
                self._due = deque(due for due in self._due if due[1].run != run)
                since = self._work.setdefault(run, work(view))
                rows.append(run_facts(self._open.id, kept, state, since, now_ns))
            kin = kin_of(kept, state.nodes, now_ns, now_unix_s)
            rows += [] if kin is None else [kin]
            value = self._summary(kept, state, config, now_ns, now_unix_s)
            rows.append(
                EndedRun(
                    run=str(run),
                    job_id=run.job_id,
                    spec=view.spec,
                    uid=None if view.job is None else view.job.user_id,
                    ended_unix_s=now_unix_s,
                    value=value,
                )
            )
        return rows

    # ------------------------------------------------------------------------------------------- samples

    def _samples(self, state: State, config: Config, now_ns: int, now_unix_s: float) -> list[Row]:
        """Written in a window and for a while after it; before one they are only held, in case one opens."""
        if state.window is not None:
            self._after_until_ns = now_ns + round(AFTER_S * NS_PER_S)
        after = now_ns < self._after_until_ns
        sample = site_sample(state, config, phase_of(state, after=after), now_ns, now_unix_s)
        self._draws.append((now_ns, sample))
        while self._draws and now_ns - self._draws[0][0] > DRAW_BEFORE_S * NS_PER_S:
            self._draws.popleft()
        rows: list[Row] = [sample]
        last_ns, self._last_sample_ns = self._last_sample_ns, now_ns
        step_s = SAMPLE_S if last_ns is None else min(MOST_HELD_S, (now_ns - last_ns) / NS_PER_S)
        views, every = self._whose_turn(
            state, self._runs_per_s(state, now_ns) if after else RUNS_PER_S_BEFORE
        )
        for view in views:
            rows.append(run_sample(view, state, config, now_ns, now_unix_s, every * step_s))
        if after:
            return rows
        self._held.extend((now_ns, row) for row in rows)
        while self._held and now_ns - self._held[0][0] > BEFORE_S * NS_PER_S:
            self._held.popleft()
        return []

    def _runs_per_s(self, state: State, now_ns: int) -> int:
        age_s = 0.0 if state.window is None else (now_ns - state.window.opened_ns) / NS_PER_S
        return next(most for until_s, most in RUNS_PER_S if age_s <= until_s)

    def _whose_turn(self, state: State, most: int) -> tuple[list[RunView], int]:
        """At most ``most`` runs, and every how many samples each has its turn."""
        runs = [view for view in state.runs.values() if view.phase in ("admitted", "waiting")]
        every = max(1, -(-len(runs) // most))
        self._turn += 1
        return [view for place, view in enumerate(runs) if (place + self._turn) % every == 0], every

    def _draw_before_mw(self, opened_ns: int) -> int | None:
        """The mean of the known samples of the last DRAW_BEFORE_S before; None without one."""
        known = [
            sample.draw_mw
            for at_ns, sample in self._draws
            if at_ns < opened_ns and sample.draw_mw is not None
        ]
        return round(sum(known) / len(known)) if known else None
