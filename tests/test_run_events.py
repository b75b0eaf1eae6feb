"""What happened to a run, as its user reads it: its caps and why, and when a floor was passed and held again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from slurm_pfi.cli.job_words import floor_stretches
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.answers.jobs import summary_with
from slurm_pfi.controller.recorder import Recorder
from slurm_pfi.model import Run
from slurm_pfi.store.rows import EndedRun, EventRow, Row, WindowRow

from .test_controller_core import NOW_S, RUN, S, Site, gpu


class Rows:
    """Keeps what the history would write."""

    left_open: WindowRow | None = None
    last_seen_s: float | None = None

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, rows: Iterable[Row]) -> None:
        self.rows.extend(rows)

    def new_window_id(self) -> int:
        return 1

    def events(self, run: Run) -> list[EventRow]:
        return [row for row in self.rows if isinstance(row, EventRow) and row.run == str(run)]


class Watched(Site):
    """A site of one node whose controller is recorded; its one run draws what its cap lets it."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(nodes=1, gpus=2, **changes)
        self.rows = Rows()
        self.recorder = Recorder(self.rows, summary_with(self.core.science))

    def seconds(self, count: int, limit_w: int = 700, *runs: Run) -> None:
        """A report and a cycle each second, with the GPUs at this limit."""
        for _ in range(count):
            self.wait(0.9)
            seen = len(self.actions)
            pair = [
                gpu(f"G{i}", *runs or (RUN,), limit_w=limit_w, draw_mw=min(650, limit_w - 5) * 1000)
                for i in range(2)
            ]
            self.hear("n1", *pair)
            self.cycle()
            now_s = NOW_S + self.now_ns / S
            for action in self.actions[seen:]:
                if isinstance(action, cs.Audit):
                    self.recorder.audit(action.event, action.fields, now_s)
            self.recorder.cycle(self.state, self.config, self.now_ns, now_s)

    def texts(self) -> list[str]:
        return [event.text for event in self.rows.events(RUN)]


@pytest.fixture
def site() -> Watched:
    made = Watched(baseline_s=5.0, rebound_s=1.0)
    made.seconds(1)
    made.identify(RUN, "n1")
    made.seconds(80)
    return made


def test_a_cap_is_told_from_where_to_where_and_why(site: Watched) -> None:
    site.limit(1200)
    site.seconds(3, 700)
    site.seconds(10, 540)
    capped = [event for event in site.rows.events(RUN) if event.kind == "capped"]
    assert capped[0].text.startswith("capped from 700 W to ")
    assert "economic limit m of 1200 W, policy marginal" in capped[0].text


def test_a_floor_passed_by_an_emergency_is_told_and_when_it_holds_again(site: Watched) -> None:
    site.limit(700, class_="emergency")
    site.seconds(3, 700)
    site.seconds(20, 300)
    assert site.state.runs[RUN].floor_passed
    site.limit(1250)
    site.seconds(20, 500)
    kinds = [event.kind for event in site.rows.events(RUN)]
    assert kinds.index("floor_passed") < kinds.index("floor_kept")
    assert any("emergency limit m of 700 W" in text for text in site.texts())
    events = [{"unix_s": one.unix_s, "kind": one.kind, "text": one.text} for one in site.rows.events(RUN)]
    ((start_s, end_s),) = floor_stretches(events)
    assert end_s is not None
    assert 20 <= end_s - start_s <= 26


def test_a_limit_that_cannot_be_held_is_told_and_when_it_can_again(site: Watched) -> None:
    site.limit(700)
    site.seconds(5, 540)
    site.limit(1250)
    site.seconds(5, 540)
    told = {row.kind: row.text for row in site.rows.rows if isinstance(row, EventRow) and not row.run}
    assert told["infeasible"].startswith("the limit cannot be held: ")
    assert told["feasible"] == "the limit can be held again"


def test_a_release_goes_by_caps_and_is_not_told_as_a_floor() -> None:
    site = Watched(baseline_s=5.0, rebound_s=60.0)
    site.seconds(1)
    site.identify(RUN, "n1")
    site.seconds(80)
    site.limit(1260)
    site.seconds(10, 575)
    promised_mw, cap_mw = site.state.runs[RUN].floor_mw, site.state.runs[RUN].target_cap_mw
    assert promised_mw is not None
    assert cap_mw is not None
    assert cap_mw > promised_mw + 10_000, "the limit leaves it more than its floor"
    told = len(site.texts())
    site.limit(None)
    site.seconds(40, 600)
    assert site.state.rebound is not None
    assert (site.state.runs[RUN].target_cap_mw or 0) >= cap_mw
    assert site.state.runs[RUN].floor_mw == pytest.approx(promised_mw, rel=0.02)
    released = [text for text in site.texts()[told:] if "slow release" in text]
    assert released
    assert not [text for text in released if "floor" in text]


def test_a_run_that_begins_inside_a_window_is_told_to_wait() -> None:
    site = Watched(baseline_s=5.0)
    other = Run("c", 9)
    site.seconds(1)
    site.identify(RUN, "n1")
    site.limit(700)
    site.seconds(3, 300)
    pair = (gpu("G0", RUN, limit_w=300, draw_mw=290_000), gpu("G1", other, limit_w=200, draw_mw=190_000))
    site.hear("n1", *pair)
    site.identify(other, "n1")
    site.cycle()
    site.recorder.cycle(site.state, site.config, site.now_ns, NOW_S + site.now_ns / S)
    told = [event for event in site.rows.events(other) if event.kind == "waiting"]
    assert [event.text for event in told] == [
        "began inside a window: held at the park cap until there is power for its floor"
    ]


def test_of_a_run_that_ended_all_is_kept_that_job_tells(site: Watched) -> None:
    site.limit(1200)
    site.seconds(3, 700)
    site.seconds(20, 540)
    site.hear("n1", gpu("G0"), gpu("G1"))
    site.cycle()
    site.recorder.cycle(site.state, site.config, site.now_ns, NOW_S + site.now_ns / S)
    (ended,) = [row for row in site.rows.rows if isinstance(row, EndedRun)]
    assert (ended.run, ended.spec, ended.uid) == ("c:1.0", "1", 1000)
    assert ended.value["baseline"] == "seen"
    assert ended.value["cost"]["capped_s"] > 10
    assert ended.value["cost"]["saved_wh"] > 0
    assert ended.value["cost"]["loss"] is None, "it reported no progress"
