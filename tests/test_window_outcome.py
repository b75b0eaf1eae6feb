"""What a window came to, by cases whose figures can be worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from slurm_pfi.cli.report.words import cost
from slurm_pfi.controller.answers import window_report
from slurm_pfi.controller.answers.outcome import compliance, delivered, given, limit_steps, lost, thin
from slurm_pfi.store.history import RunMeans
from slurm_pfi.store.rows import EventRow, Phase, SiteSample

from .report_samples import OPENED_S, facts, made_report, window

KW = 1_000_000


def sample(
    second: float, draw_kw: float | None, limit_kw: float | None = 10.0, phase: Phase = "window"
) -> SiteSample:
    return SiteSample(
        unix_s=OPENED_S + second,
        phase=phase,
        limit_mw=None if limit_kw is None else round(limit_kw * KW),
        draw_mw=None if draw_kw is None else round(draw_kw * KW),
        committed_mw=None,
    )


def series(*parts: tuple[int, float | None, float | None]) -> list[SiteSample]:
    """(seconds, draw in kW, limit in kW), one sample a second, after one minute before the window at 14 kW."""
    before = [sample(second, 14.0, None, "before") for second in range(-60, 0)]
    second = 0
    inside = []
    for length, draw_kw, limit_kw in parts:
        inside += [sample(second + number, draw_kw, limit_kw) for number in range(length)]
        second += length
    return [*before, *inside]


# ------------------------------------------------------------------------------------------------- the limit


def test_a_limit_that_is_kept() -> None:
    found = compliance(series((10, 14, 10), (90, 9.5, 10)), window(), OPENED_S + 100)
    assert found.from_unix_s == OPENED_S + 10
    assert (found.counted_s, found.unknown_s, found.above_s, found.above_kwh) == (90, 0, 0, 0)
    assert (found.worst_mw, found.mean_draw_mw, found.interval_s) == (-KW // 2, 9_500_000, 1.0)


def test_what_is_above_counts_in_seconds_and_kilowatt_hours_after_the_response_time_only() -> None:
    found = compliance(series((10, 14, 10), (36, 12, 10), (54, 9, 10)), window(), OPENED_S + 100)
    assert found.above_s == 36
    assert found.above_kwh == pytest.approx(2 * 36 / 3600)
    assert found.worst_mw == 2 * KW


def test_a_limit_that_falls_counts_at_its_old_value_for_the_response_time() -> None:
    found = compliance(series((50, 9, 10), (10, 9, 8), (40, 7, 8)), window(), OPENED_S + 100)
    assert found.above_s == 0
    late = compliance(series((50, 9, 10), (13, 9, 8), (37, 7, 8)), window(), OPENED_S + 100)
    assert late.above_s == 3
    assert late.above_kwh == pytest.approx(1 * 3 / 3600)


def test_a_limit_that_rises_counts_at_once_at_its_new_value() -> None:
    found = compliance(series((50, 9, 10), (50, 11, 12)), window(), OPENED_S + 100)
    assert found.above_s == 0


def test_a_limit_announced_but_not_in_force_counts_nothing() -> None:
    found = compliance(series((30, 13, None), (70, 9, 10)), window(), OPENED_S + 100)
    assert found.from_unix_s == OPENED_S + 40
    assert found.counted_s == 60


def test_an_unknown_draw_is_neither_kept_nor_broken() -> None:
    found = compliance(series((10, 14, 10), (40, None, 10), (50, 9, 10)), window(), OPENED_S + 100)
    assert (found.counted_s, found.unknown_s, found.above_s) == (50, 40, 0)
    assert found.mean_draw_mw == 9 * KW


def test_a_gap_between_samples_is_unknown_beyond_five_seconds() -> None:
    samples = [one for one in series((100, 9, 10)) if not 50 <= one.unix_s - OPENED_S < 80]
    found = compliance(samples, window(), OPENED_S + 100)
    assert found.counted_s == 90 - 30 + 4, (
        "the sample before stands for five seconds, its own second included"
    )
    assert found.unknown_s == 26


def test_samples_farther_apart_weigh_by_their_time() -> None:
    samples = [*series((20, 8, 10)), *(sample(20 + 2 * number, 11.0) for number in range(40))]
    found = compliance(samples, window(), OPENED_S + 100)
    assert found.above_s == 80
    assert found.mean_draw_mw == pytest.approx((10 * 8 * KW + 80 * 11 * KW) / 90, abs=1)


@pytest.mark.parametrize("samples", [[], series((5, 9, 10)), series((100, None, 10)), series((100, 9, None))])
def test_where_nothing_counts_nothing_is_told(samples: list[SiteSample]) -> None:
    found = compliance(samples, window(), OPENED_S + 100)
    assert (found.counted_s, found.worst_mw, found.mean_draw_mw) == (0, None, None)


def test_a_release_after_the_window_is_no_part_of_it() -> None:
    samples = [*series((50, 9, 10)), *(sample(50 + s, 20.0, 10.0, "rebound") for s in range(50))]
    assert compliance(samples, window(), OPENED_S + 100).above_s == 0


@drawn(
    st.lists(
        st.tuples(st.integers(1, 20), st.none() | st.floats(0, 20), st.none() | st.floats(1, 20)), max_size=8
    )
)
def test_counted_and_unknown_never_exceed_the_window(
    parts: list[tuple[int, float | None, float | None]],
) -> None:
    total_s = sum(length for length, _, _ in parts)
    found = compliance(series(*parts), window(), OPENED_S + total_s)
    assert found.counted_s + found.unknown_s <= max(0, total_s - 10) + 1e-6
    assert 0 <= found.above_s <= found.counted_s
    assert (found.above_kwh > 0) == (found.above_s > 0)


def test_the_steps_of_a_limit_are_its_changes() -> None:
    found = limit_steps(series((10, 9, 10), (10, 9, 8), (10, 9, None)))
    assert [(at_s - OPENED_S, mw) for at_s, mw in found] == [
        (-60, None),
        (0, 10 * KW),
        (10, 8 * KW),
        (20, None),
    ]


@drawn(st.lists(st.none() | st.integers(0, 10**7), max_size=400), st.integers(4, 80))
def test_thinning_keeps_the_extremes_and_says_no_more_than_was_there(
    draws: list[int | None], most: int
) -> None:
    samples = [sample(s, None if mw is None else mw / KW) for s, mw in enumerate(draws)]
    kept = thin(samples, most)
    assert len(kept) <= max(most, 4)
    assert {one.unix_s for one in kept} <= {one.unix_s for one in samples}
    assert list(kept) == sorted(kept, key=lambda one: one.unix_s)
    known = [one.draw_mw for one in samples if one.draw_mw is not None]
    left = [one.draw_mw for one in kept if one.draw_mw is not None]
    assert (min(known, default=None), max(known, default=None)) == (
        min(left, default=None),
        max(left, default=None),
    )
    assert (None in draws) == any(one.draw_mw is None for one in kept)


# ------------------------------------------------------------------------------------------------- the runs


def means(seconds: int, draw_mw: float | None, share: float | None = None) -> RunMeans:
    return RunMeans(float(seconds), draw_mw, share, 400_000)


def test_what_a_run_gave_is_baseline_less_draw_of_all_its_gpus() -> None:
    run = given(facts(0, baseline_draw_mw=700_000, loss=0.1, gpus=8), means(3600, 500_000.0), 3600, ())
    assert run.gave_mw == 8 * 200_000
    assert run.reduction == pytest.approx(2 / 7)
    assert run.lost_gpu_h == pytest.approx(0.8)
    assert run.gave_sd_mw == 8 * 3_500


def test_a_run_there_for_half_of_the_window_gave_half() -> None:
    run = given(facts(0, baseline_draw_mw=700_000, gpus=1), means(1800, 500_000.0), 3600, ())
    assert run.gave_mw == 100_000
    assert run.present_s == 1800


def test_without_a_baseline_a_run_gave_nothing_that_is_known() -> None:
    run = given(facts(0, baseline="bounded", baseline_draw_mw=None, loss=None), means(60, 500_000.0), 60, ())
    assert (run.gave_mw, run.reduction, run.loss, run.lost_gpu_h) == (None, None, None, None)


def test_without_a_measured_loss_the_throughput_seen_counts() -> None:
    assert given(facts(0, loss=None), means(60, None, 0.9), 60, ()).loss == pytest.approx(0.1)


def test_a_run_that_was_never_sampled_is_unknown() -> None:
    run = given(facts(0, loss=None), None, 60, ())
    assert (run.present_s, run.draw_mw, run.gave_mw, run.loss) == (0, None, None, None)


def test_floors_and_waiting_are_read_off_the_events() -> None:
    kinds = [EventRow(unix_s=0, run="c:1.0", kind=kind, text="") for kind in ("floor_passed", "floor_breach")]
    run = given(facts(0), means(60, 500_000.0), 60, kinds)
    assert run.floor_passed
    assert run.waited


def test_the_sum_over_runs_has_an_interval_from_their_baselines_and_counts_no_unknown() -> None:
    runs = [
        given(facts(place, baseline_draw_mw=700_000, baseline_sd=0.01, gpus=1), means(60, 500_000.0), 60, ())
        for place in range(4)
    ]
    unknown = given(facts(9, baseline_draw_mw=None), means(60, 500_000.0), 60, ())
    found = compliance(series((10, 14, 10), (50, 9, 10)), window(), OPENED_S + 60)
    total = delivered(window(draw_before_mw=14 * KW), found, [*runs, unknown], 3600)
    assert total.bottom_up_mw == 800_000
    assert total.low_mw == pytest.approx(800_000 - 1.96 * 14_000, abs=2)
    assert total.high_mw == pytest.approx(800_000 + 1.96 * 14_000, abs=2)
    assert (total.known_runs, total.unknown_runs) == (4, 1)
    assert total.top_down_mw == 5 * KW


def test_nothing_known_gives_no_figure() -> None:
    unknown = given(facts(9, baseline_draw_mw=None, loss=None), means(60, None), 60, ())
    found = compliance([], window(), OPENED_S + 60)
    total = delivered(window(), found, [unknown], 60)
    assert (total.bottom_up_mw, total.low_mw, total.top_down_mw) == (None, None, None)
    assert lost([unknown]) == (None, None)


def test_a_baseline_without_an_error_gives_no_interval() -> None:
    run = given(facts(0, baseline_sd=None), means(60, 500_000.0), 60, ())
    total = delivered(window(), compliance([], window(), OPENED_S), [run], 60)
    assert total.bottom_up_mw is not None
    assert (total.low_mw, total.high_mw) == (None, None)


def test_the_whole_of_it_out_of_a_history(tmp_path: Path) -> None:
    report = made_report(tmp_path, runs=3)
    assert report.compliance.above_s == 0
    assert report.compliance.counted_s == pytest.approx(1190)
    best = report.runs[0]
    assert best.facts.run == "demo:1201.0", "who gave most comes first"
    assert best.reduction == pytest.approx(0.08 + 0.3 * 7 / 9, abs=0.001)
    assert report.delivered.bottom_up_mw == pytest.approx(sum(run.gave_mw or 0 for run in report.runs))
    assert set(report.series) == {"demo:1200.0", "demo:1201.0", "demo:1202.0"}


def test_more_runs_than_a_reply_takes_stay_in_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made_report(tmp_path, runs=6)
    monkeypatch.setattr(window_report, "MOST_RUNS", 3)
    monkeypatch.setattr(window_report, "MOST_RUNS_IN_STEPS", 5)
    monkeypatch.setattr(window_report, "MOST_SHOWN", 1)
    least = whole.runs[-1].facts.run
    broken = EventRow(unix_s=OPENED_S + 5, run=least, kind="floor_passed", text="")
    (tmp_path / "b").mkdir()
    report = made_report(tmp_path / "b", runs=6, extra=(broken,))
    assert [run.facts.run for run in report.runs] == [*(run.facts.run for run in whole.runs[:2]), least]
    assert report.runs_left_out == 3
    assert report.delivered == whole.delivered
    assert (report.loss, report.lost_gpu_h) == (whole.loss, whole.lost_gpu_h)
    assert set(report.series) == {whole.runs[0].facts.run}
    assert "3 runs that gave least are in the sums" in cost(report)
