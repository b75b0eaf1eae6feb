"""What a controller's cycles leave in the history: windows, the samples around them, what happened, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec
import pytest

from slurm_pfi.config import Config, NodeSet
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.measuring.record import Recalled, Record, Tally
from slurm_pfi.controller.recorder import BEFORE_S, FACTS_PER_CYCLE, Recorder
from slurm_pfi.controller.site_rows import (
    MOST_TOLD,
    limit_now_mw,
    node_events,
    run_facts,
    run_sample,
    site_sample,
    work,
)
from slurm_pfi.model import Limit, LimitStep, Run
from slurm_pfi.store.rows import EndedRun, EventRow, RunFacts, RunSample, SiteSample, WindowRow

from .test_controller_core import NOW_S, RUN, S, gpu
from .test_run_events import Watched

T = TypeVar("T")


def of(site: Watched, kind: type[T]) -> list[T]:
    return [row for row in site.rows.rows if isinstance(row, kind)]


def ready(**times: float) -> Watched:
    site = Watched(**{"baseline_s": 5.0, "rebound_s": 1.0, **times})
    site.seconds(1)
    site.identify(RUN, "n1")
    site.seconds(150)
    return site


@pytest.fixture
def site() -> Watched:
    return ready()


# ---------------------------------------------------------------------------------------------------- windows


def test_without_a_window_no_sample_is_written(site: Watched) -> None:
    assert not of(site, SiteSample)
    assert not of(site, RunSample)
    assert not of(site, WindowRow)


def test_a_window_has_a_beginning_an_end_and_what_was_before(site: Watched) -> None:
    opened_s = NOW_S + site.now_ns / S
    site.limit(1200)
    site.seconds(30, 540)
    (row,) = of(site, WindowRow)
    assert (row.id, row.closed_unix_s, row.policy, row.class_, row.mode) == (
        1,
        None,
        "marginal",
        "economic",
        "enforce",
    )
    assert row.opened_unix_s == pytest.approx(opened_s, abs=1.5)
    assert row.limit_mw == 1_200_000
    assert row.draw_before_mw == 2 * 650_000 + 100_000
    assert site.recorder.window_id == 1
    site.limit(None)
    site.seconds(5)
    closed = of(site, WindowRow)[-1]
    assert closed.closed_unix_s == pytest.approx(row.opened_unix_s + 30, abs=2)
    assert closed.ended == "its limit was cleared"
    assert site.recorder.window_id is None


def test_samples_reach_from_two_minutes_before_to_a_while_after(site: Watched) -> None:
    site.limit(1200)
    site.seconds(30, 540)
    site.limit(None)
    site.seconds(400)
    samples = of(site, SiteSample)
    phases = Counter(sample.phase for sample in samples)
    assert phases["before"] == pytest.approx(BEFORE_S, abs=2)
    assert phases["window"] == pytest.approx(30, abs=2)
    assert phases["after"] == pytest.approx(120, abs=5)
    times = [sample.unix_s for sample in samples]
    assert times == sorted(times)
    assert {sample.limit_mw for sample in samples if sample.phase == "window"} == {1_200_000}
    assert {sample.limit_mw for sample in samples if sample.phase == "before"} == {None}
    assert all(sample.committed_mw is not None for sample in samples if sample.phase == "window")
    assert {row.run for row in of(site, RunSample)} == {str(RUN)}


def test_a_release_is_told_apart_from_the_window() -> None:
    site = ready(rebound_s=60.0)
    site.limit(1200)
    site.seconds(20, 540)
    site.limit(None)
    site.seconds(20, 560)
    samples = [sample for sample in of(site, SiteSample) if sample.phase == "rebound"]
    assert len(samples) == pytest.approx(20, abs=2)
    assert all(sample.limit_mw is not None for sample in samples)
    assert site.recorder.window_id is None


def test_a_limit_counts_when_it_is_in_force_and_not_when_it_is_known(site: Watched) -> None:
    now_s = NOW_S + site.now_ns / S
    steps = (
        LimitStep(start_unix_s=now_s + 5, limit_mw=1_200_000),
        LimitStep(start_unix_s=now_s + 20, limit_mw=None),
    )
    limit = Limit(id="m", revision=1, source="t", class_="economic", steps=steps)
    site.tell(cs.LimitsChanged(limits=(limit,)))
    site.seconds(15, 540)
    inside = [sample for sample in of(site, SiteSample) if sample.phase == "window"]
    early = [sample.limit_mw for sample in inside if sample.unix_s < now_s + 5]
    assert early, "the window opens before the limit, to lower in time"
    assert set(early) == {None}
    assert inside[-1].limit_mw == 1_200_000
    site.seconds(15)
    assert of(site, WindowRow)[-1].ended == "its limit ended"


def test_limits_that_cannot_be_read_are_not_told_as_none_or_some(site: Watched) -> None:
    site.limit(1200)
    site.tell(cs.LimitsChanged(limits=site.state.limits, known=False))
    assert limit_now_mw(site.state, NOW_S + site.now_ns / S) is None


def test_a_window_left_open_goes_on_where_its_limit_still_binds(site: Watched) -> None:
    site.limit(1200)
    site.seconds(10, 540)
    (left,) = of(site, WindowRow)
    site.rows.left_open = left
    site.recorder = Recorder(site.rows)
    site.seconds(5, 540)
    assert site.recorder.window_id == left.id
    site.limit(None)
    site.seconds(3)
    assert {row.id for row in of(site, WindowRow)} == {1}
    assert of(site, WindowRow)[-1].opened_unix_s == left.opened_unix_s


def test_a_window_whose_end_nobody_saw_is_closed_where_it_was_last_seen(site: Watched) -> None:
    site.limit(1200)
    site.seconds(10, 540)
    (left,) = of(site, WindowRow)
    seen_s = left.opened_unix_s + 9
    site.limit(None)
    site.rows.left_open, site.rows.last_seen_s = left, seen_s
    site.recorder = Recorder(site.rows)
    site.seconds(3)
    closed = of(site, WindowRow)[-1]
    assert (closed.id, closed.closed_unix_s) == (1, seen_s)
    assert "no controller ran" in closed.ended


def test_a_history_that_cannot_be_written_opens_the_window_later(
    site: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_s = NOW_S + site.now_ns / S
    monkeypatch.setattr(site.rows, "new_window_id", lambda: None)
    site.limit(1200)
    site.seconds(5, 540)
    assert not of(site, WindowRow)
    monkeypatch.undo()
    site.seconds(2, 540)
    (row,) = of(site, WindowRow)
    assert row.opened_unix_s == pytest.approx(opened_s, abs=1.5)
    assert row.draw_before_mw == 1_400_000


# ---------------------------------------------------------------------------------------------------- unknown


def big_site(nodes: int = 40) -> Watched:
    site = Watched()
    site.config = Config(
        cluster="c",
        mode="enforce",
        node_set=(NodeSet(names=f"n[1-{nodes}]", gpus=1, gpu_max_w=700, overhead_w=0),),
    )
    view = cs.NodeView(name="", gpus=1, gpu_max_mw=700_000, overhead_mw=0, mode="enforce")
    names = [f"n{number}" for number in range(1, nodes + 1)]
    site.state = msgspec.structs.replace(
        site.state, nodes={name: msgspec.structs.replace(view, name=name) for name in names}
    )
    return site


def heard(site: Watched, names: list[str], draw_mw: int | None = 600_000) -> None:
    nodes = dict(site.state.nodes)
    for name in names:
        report = site.report(name, gpu(f"G-{name}", draw_mw=draw_mw, limit_w=650))
        nodes[name] = msgspec.structs.replace(
            nodes[name], report=report, heard_ns=site.now_ns, connected=True
        )
    site.state = msgspec.structs.replace(site.state, nodes=nodes)


def sampled(site: Watched) -> SiteSample:
    return site_sample(site.state, site.config, "window", site.now_ns, NOW_S)


def test_what_is_not_measured_counts_at_its_most_and_is_told(site: Watched) -> None:
    large = big_site(40)
    heard(large, [f"n{number}" for number in range(1, 40)])
    sample = sampled(large)
    assert (sample.draw_mw, sample.unmeasured_mw) == (39 * 600_000 + 700_000, 700_000)


def test_a_site_of_which_much_is_not_measured_has_no_known_draw() -> None:
    large = big_site(40)
    heard(large, [f"n{number}" for number in range(1, 31)])
    assert sampled(large).draw_mw is None
    heard(large, [f"n{number}" for number in range(31, 41)], draw_mw=None)
    sample = sampled(large)
    assert sample.draw_mw is None
    assert sample.unmeasured_mw == 10 * 650_000, (
        "a GPU without a reading draws no more than its limit lets it"
    )


def test_what_a_node_said_long_ago_is_no_draw_of_now() -> None:
    large = big_site(2)
    heard(large, ["n1", "n2"])
    assert sampled(large).draw_mw == 1_200_000
    large.wait(30)
    assert sampled(large).draw_mw is None


def test_a_run_on_a_node_not_heard_has_no_known_draw_and_no_known_throughput(site: Watched) -> None:
    view = site.state.runs[RUN]
    assert run_sample(view, site.state, site.config, site.now_ns, NOW_S, 1.0).draw_mw == 650_000
    late_ns = site.now_ns + 30 * S
    sample = run_sample(view, site.state, site.config, late_ns, NOW_S, 1.0)
    assert (sample.draw_mw, sample.share, sample.cap_mw) == (None, None, None)


# ---------------------------------------------------------------------------------------------------- runs


def test_the_loss_of_a_run_is_that_of_the_window_alone(site: Watched) -> None:
    recalled = Recalled(draw_mw=650_000, rate_per_s=10.0, sd=0.03)

    def at(done: float, work_s: float, work_done: float) -> cs.RunView:
        tally = Tally(done=done, capped_s=work_s, work_s=work_s, work_done=work_done)
        record = Record(recalled=recalled, reporting=True, tally=tally)
        return msgspec.structs.replace(site.state.runs[RUN], record=record)

    opened, closed = at(1000, 50, 400), at(1900, 150, 1300)
    since = work(opened)
    assert since == (1000, 100.0)
    facts = run_facts(1, closed, site.state, since, site.now_ns)
    assert facts.loss == pytest.approx(100 / 1000), "200 lost less 100 before, of 900 done and 100 lost"
    assert facts.baseline == "recalled"
    assert run_facts(1, closed, site.state, None, site.now_ns).loss is None


def test_a_run_that_ends_in_a_window_leaves_its_summary_and_what_it_was(site: Watched) -> None:
    site.limit(1200)
    site.seconds(10, 540)
    site.wait(0.9)
    site.hear("n1", gpu("G0", limit_w=540), gpu("G1", limit_w=540))
    site.cycle()
    site.recorder.cycle(site.state, site.config, site.now_ns, NOW_S + site.now_ns / S)
    (ended,) = of(site, EndedRun)
    assert (ended.run, ended.job_id, ended.uid) == (str(RUN), RUN.job_id, 1000)
    assert ended.value["run"] == str(RUN)
    facts = [row for row in of(site, RunFacts) if row.run == str(RUN)]
    assert facts[-1].baseline_draw_mw == 650_000
    assert facts[-1].gpus == 2


@pytest.mark.parametrize(("age_s", "most"), [(0, 200), (1800, 50), (7200, 20), (100_000, 5)])
def test_many_runs_have_their_turn_one_after_the_other(site: Watched, age_s: int, most: int) -> None:
    view = site.state.runs[RUN]
    runs = {
        Run("c", number): msgspec.structs.replace(view, run=Run("c", number)) for number in range(1, 1001)
    }
    opened_ns = site.now_ns - age_s * S
    window = cs.WindowView(
        limit_mw=1,
        limit_ids=("m",),
        budget_mw=1,
        committed_mw=1,
        shortfall_mw=0,
        silent=(),
        opened_ns=opened_ns,
    )
    site.state = msgspec.structs.replace(site.state, runs=runs, window=window)
    site.wait(1.0)  # with the first cycle comes what was before the window
    site.recorder.cycle(site.state, site.config, site.now_ns, NOW_S + site.now_ns / S)
    seen: Counter[str] = Counter()
    turns = 1000 // most
    for _ in range(turns):
        site.rows.rows.clear()
        site.wait(1.0)
        site.recorder.cycle(site.state, site.config, site.now_ns, NOW_S + site.now_ns / S)
        rows = of(site, RunSample)
        assert len(rows) == most
        assert {row.held_s for row in rows} == {float(turns)}
        seen.update(row.run for row in rows)
    assert len(seen) == 1000
    assert set(seen.values()) == {1}


def test_the_facts_of_many_runs_are_worked_out_a_few_at_a_time_and_are_still_of_their_instant(
    site: Watched,
) -> None:
    view = site.state.runs[RUN]
    runs = {Run("c", n): msgspec.structs.replace(view, run=Run("c", n)) for n in range(1, 201)}
    site.state = msgspec.structs.replace(site.state, runs=runs)
    site.limit(1200)
    site.cycle()
    counts: list[int] = []
    for step in range(6):
        site.rows.rows.clear()
        if step == 1:  # what comes later must not change what was known when the window opened
            later = {run: msgspec.structs.replace(one, floor_mw=1) for run, one in site.state.runs.items()}
            site.state = msgspec.structs.replace(site.state, runs=later)
        site.wait(0.1)
        site.recorder.cycle(site.state, site.config, site.now_ns, NOW_S + site.now_ns / S)
        facts = of(site, RunFacts)
        counts.append(len(facts))
        assert all(one.floor_mw != 1 for one in facts)
    assert counts == [FACTS_PER_CYCLE] * 4 + [0, 0]


def test_many_cycles_a_second_give_one_sample_a_second(site: Watched) -> None:
    site.limit(1200)
    site.seconds(2, 540)
    before = len(of(site, SiteSample))
    for _ in range(200):
        site.wait(0.05)
        site.recorder.cycle(site.state, site.config, site.now_ns, NOW_S + site.now_ns / S)
    assert len(of(site, SiteSample)) - before == pytest.approx(10, abs=1)


# ---------------------------------------------------------------------------------------------------- events


def test_the_site_is_told_of_limits_and_what_cannot_be_held(site: Watched) -> None:
    site.limit(500)
    site.seconds(10, 540)
    site.limit(None)
    site.seconds(5)
    kinds = [(row.kind, row.text) for row in of(site, EventRow) if not row.run]
    texts = " | ".join(text for _, text in kinds)
    assert "window 1 opens: limit 500 W (m)" in texts
    assert "the limit cannot be held: " in texts
    assert "window 1 is over: its limit was cleared" in texts


def test_what_goes_wrong_with_a_node_is_told_once(site: Watched) -> None:
    def told() -> list[str]:
        return [row.text for row in of(site, EventRow) if row.kind == "node"]

    def hear(fault: str) -> None:
        site.wait(0.9)
        site.hear("n1", gpu("G0", RUN), gpu("G1", RUN, fault=fault))
        site.cycle()
        site.recorder.cycle(site.state, site.config, site.now_ns, NOW_S + site.now_ns / S)

    for fault in ("", "Xid 79", "Xid 79", ""):
        hear(fault)
    assert told() == ["node n1: G1: Xid 79"]
    site.tell(cs.NodeLost(node="n1"))
    site.recorder.cycle(site.state, site.config, site.now_ns, NOW_S)
    hear("")
    assert told()[1:] == ["node n1: its agent is not connected", "node n1: its agent is connected again"]


def test_a_storm_of_faults_is_told_in_short() -> None:
    large = big_site(40)
    before = large.state
    heard(large, [f"n{number}" for number in range(1, 41)])
    calm = large.state.nodes
    nodes = {name: msgspec.structs.replace(node, connected=False) for name, node in calm.items()}
    rows = node_events(calm, msgspec.structs.replace(before, nodes=nodes), NOW_S)
    assert len(rows) == MOST_TOLD + 1
    assert rows[-1].text.startswith("and 20 more")


def test_a_fault_of_the_recorder_ends_nothing_and_is_said_once(
    site: Watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_args: object) -> list[object]:
        raise ZeroDivisionError("planted")

    broken_call: Callable[..., object] = broken
    monkeypatch.setattr(site.recorder, "_rows", broken_call)
    site.seconds(3)
    said = capsys.readouterr()
    assert (said.out + said.err).count("please report it") == 1
