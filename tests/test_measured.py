"""What is measured of a run: baselines, levels and totals from its reports, and counters that lie."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pfi.controller.measuring.levels import MOST_BATCHES, MOST_LEVELS
from slurm_pfi.controller.measuring.measured import (
    KEPT_DRAWS,
    Level,
    Recalled,
    Record,
    Sample,
    believed,
    evidence,
    observe,
)
from slurm_pfi.elasticity.evidence import RunEvidence
from slurm_pfi.elasticity.learned import loss_at
from slurm_pfi.elasticity.learner import learn
from slurm_pfi.elasticity.library import Library
from slurm_pfi.elasticity.prior import Prior

from .measured_run import FREE_MW, FREE_RATE, GPUS, NS, PRIOR_MW, TIMES, MadeUpRun, W, rate_at


def told(run: MadeUpRun) -> RunEvidence:
    return evidence(run.record, "NVIDIA H200", "kin", round(run.now_s * NS))


def level(record: Record, cap_w: int | None) -> Level:
    found = record.level(None if cap_w is None else cap_w * W)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------ baseline and levels


def test_a_baseline_is_seen_after_its_time_uncapped_and_levels_are_measured_against_it() -> None:
    run = MadeUpRun()
    assert run.run(29).source == "bounded"
    assert run.record.draw_mw is None
    assert run.run(5).source == "seen"
    assert run.record.draw_mw == pytest.approx(FREE_MW, rel=0.005)
    assert run.record.rate_per_s == pytest.approx(FREE_RATE, rel=0.01)
    assert not run.record.measured, "no cap has bound it yet"
    run.run(60, 450)
    assert run.record.measured
    assert level(run.record, 450).rate_per_s == pytest.approx(rate_at(450 * W), rel=0.01)
    (point,) = told(run).measurements
    assert point.reduction == pytest.approx(0.25, abs=0.005)
    assert point.loss == pytest.approx(0.125, abs=0.01)
    assert point.sd >= 0.002
    assert point.age_s < 2
    assert (told(run).baseline, told(run).baseline_sd) == ("seen", run.record.baseline_sd)


@pytest.mark.parametrize(
    ("report_s", "tell_s", "jitter_s"), [(1.0, 0.5, 0.1), (1.0, 7.3, 0.1), (5.0, 0.5, 0.3), (1.0, 1.0, 0.6)]
)
def test_what_is_lost_follows_the_runs_own_counter_within_a_percentage_point(
    report_s: float, tell_s: float, jitter_s: float
) -> None:
    run = MadeUpRun(report_s=report_s, tell_s=tell_s, jitter_s=jitter_s)
    run.run(300)
    for cap_w, seconds in ((450, 200), (380, 7), (520, 61), (None, 40), (300, 150), (None, 30), (560, 90)):
        run.run(seconds, cap_w)
    record = run.record
    assert record.loss == pytest.approx(run.lost / (run.lost + run.true), abs=0.01)
    assert record.totals.done == pytest.approx(run.true, rel=0.03)
    assert record.totals.drawn_j == pytest.approx(run.energy_j, rel=0.02)
    saved_wh = sum(
        (FREE_MW - c * W) / 1000 * GPUS * s / 3600
        for c, s in ((450, 200), (380, 7), (520, 61), (300, 150), (560, 90))
    )
    assert record.energy_wh == pytest.approx(-saved_wh, rel=0.03)
    assert record.loss_capped is not None
    assert record.loss is not None
    assert record.loss_capped > record.loss > 0
    assert record.totals.lost_sd is not None
    assert abs((record.totals.lost or 0) - run.lost) < 3 * record.totals.lost_sd
    assert not record.doubt
    assert record.segment == 0


def test_the_first_moments_under_a_cap_count_as_work_and_teach_no_level() -> None:
    run = MadeUpRun(noise=0.0)
    run.run(60)
    run.run(1.5, 450, speed=0.5)
    assert run.record.level(450 * W) is None
    run.run(40, 450)
    assert level(run.record, 450).rate_per_s == pytest.approx(rate_at(450 * W), rel=0.02)
    assert run.record.tally.work_s > 39


def test_caps_near_each_other_are_one_level_and_no_change() -> None:
    run = MadeUpRun()
    run.run(60)
    for cap_w in (450, 453, 447, 451) * 5:
        run.run(2, cap_w)
    assert [one.cap_mw for one in run.record.levels] == [None, 450 * W]
    assert level(run.record, 450).count > 25
    run.run(2, 460)
    run.run(5, 460)
    assert len(run.record.levels) == 3


def test_a_slow_ramp_of_caps_does_not_push_out_what_was_measured() -> None:
    run = MadeUpRun()
    run.run(60)
    for cap_w in (300, 400):
        run.run(30, cap_w)
    for cap_w in range(400, 600, 2):
        run.run(1.4, cap_w)
    assert len(run.record.levels) <= MOST_LEVELS
    assert {300 * W, 400 * W, None} <= {one.cap_mw for one in run.record.levels}
    assert run.record.loss == pytest.approx(run.lost / (run.lost + run.true), abs=0.01)


def test_gpus_under_different_caps_are_at_no_level_and_what_they_lose_counts() -> None:
    run = MadeUpRun()
    run.run(60)
    base = run.record
    for i in range(1, 31):
        run.true += 700
        run.told = (run.true, run.now_s + i)
        sample = msgspec.structs.replace(run.sample(650 * W, 500 * W), lowest_mw=300 * W)
        sample = msgspec.structs.replace(
            sample, now_ns=round((run.now_s + i) * NS), counter_ns=round((run.now_s + i) * NS)
        )
        run.record = observe(run.record, sample, TIMES)
    assert len(run.record.levels) == len(base.levels)
    assert run.record.totals.capped_s == pytest.approx(30, abs=1)
    assert run.record.totals.lost == pytest.approx(30 * 300, rel=0.1)
    assert not run.record.measured


def test_a_cap_above_the_draw_does_not_bind() -> None:
    run = MadeUpRun()
    run.run(60)
    run.run(60, 650)
    totals = run.record.totals
    assert (totals.capped_s, totals.lost, totals.saved_j) == (0.0, 0.0, 0.0)
    assert run.record.loss == 0.0
    assert run.record.loss_capped is None
    assert run.record.capped_since_ns is None
    assert not run.record.measured


def test_the_time_under_caps_that_bind_is_counted() -> None:
    run = MadeUpRun()
    run.run(60)
    run.run(60, 500)
    assert run.record.capped_since_ns == pytest.approx((run.now_s - 59.5) * NS, abs=1 * NS)
    run.run(30)
    assert run.record.totals.capped_s == pytest.approx(60, abs=1)
    assert run.record.totals.known_s == pytest.approx(149, abs=1)
    assert run.record.capped_since_ns is None


# ------------------------------------------------------------------------------------------------- stalls


@pytest.mark.parametrize("cap_w", [None, 450])
def test_stalls_neither_move_a_level_nor_count_as_lost(cap_w: int | None) -> None:
    run = MadeUpRun()
    run.run(120)
    for _ in range(3):
        run.run(60, cap_w)
        run.run(20, cap_w, speed=0, draw_w=150)
    run.run(60, cap_w)
    record = run.record
    assert record.segment == 0
    assert record.rate_per_s == pytest.approx(FREE_RATE, rel=0.01)
    assert level(record, cap_w).rate_per_s == pytest.approx(
        rate_at(None if cap_w is None else cap_w * W), rel=0.01
    )
    assert record.mean_draw_mw == pytest.approx(FREE_MW, rel=0.01)
    assert record.loss == pytest.approx(run.lost / (run.lost + run.true), abs=0.005)
    hours = 4 * 60 / 3600
    saved_wh = 0 if cap_w is None else (FREE_MW / W - cap_w) * GPUS * hours
    assert record.energy_wh == pytest.approx(-saved_wh, abs=0.05 * saved_wh + 1e-9), (
        "nothing is saved by waiting"
    )
    assert record.totals.known_s == pytest.approx(120 + 4 * 60 + 3 * 20, abs=2)


def test_a_start_up_is_no_baseline() -> None:
    run = MadeUpRun()
    run.run(40, speed=0.02, draw_w=120)
    assert run.record.seen
    run.run(20)
    assert not run.record.seen, "it trains only now"
    run.run(40)
    assert run.record.seen
    assert run.record.rate_per_s == pytest.approx(FREE_RATE, rel=0.01)
    assert run.record.mean_draw_mw == pytest.approx(FREE_MW, rel=0.01)
    assert not run.record.doubt


def test_a_draw_far_above_the_baseline_under_a_cap_says_that_it_had_not_begun_to_train() -> None:
    run = MadeUpRun()
    run.run(60, draw_w=100, speed=0.1)
    run.run(10, 450)
    assert run.record.source == "bounded"
    assert run.record.draw_mw is None
    assert run.record.loss is None
    assert told(run).measurements == ()


def test_a_new_level_that_begins_in_a_checkpoint_is_not_slow() -> None:
    run = MadeUpRun()
    run.run(60)
    run.run(12, 450, speed=0, draw_w=150)
    run.run(60, 450)
    assert level(run.record, 450).rate_per_s == pytest.approx(rate_at(450 * W), rel=0.01)
    assert level(run.record, 450).draw_mw == pytest.approx(450 * W, rel=0.01)
    assert run.record.loss == pytest.approx(run.lost / (run.lost + run.true), abs=0.01)


# ------------------------------------------------------------------------------------------- other work


def test_a_lasting_change_uncapped_is_a_new_segment_with_a_baseline_of_its_own() -> None:
    run = MadeUpRun()
    run.run(60)
    run.run(100, 450)
    run.run(200, speed=0.7)
    record = run.record
    assert record.segment == 1
    assert record.source == record.rate_source == "seen"
    assert record.rate_per_s == pytest.approx(0.7 * FREE_RATE, rel=0.02)
    run.run(100, 450, speed=0.7)
    assert run.record.loss == pytest.approx(run.lost / (run.lost + run.true), abs=0.01)
    old, new = told(run).measurements
    assert (old.segment, new.segment) == (0, 1)
    assert new.loss == pytest.approx(0.125, abs=0.01)
    assert old.loss == pytest.approx(0.125, abs=0.01)
    assert old.baseline_sd is not None
    assert old.baseline_sd > 0.04, "a baseline of work that is over says less"
    assert new.baseline_sd is None


def test_a_lasting_slump_is_other_work_and_no_stall() -> None:
    run = MadeUpRun()
    run.run(100)
    run.run(100, speed=0.3)
    assert run.record.segment == 1
    assert run.record.rate_per_s == pytest.approx(0.3 * FREE_RATE, rel=0.05)


def test_work_that_changes_under_a_cap_has_no_baseline_until_it_is_seen_uncapped_again() -> None:
    run = MadeUpRun()
    run.run(60)
    run.run(60, 450)
    run.run(150, 450, speed=0.6)
    record = run.record
    assert record.segment == 1
    assert record.rate_per_s is None
    assert record.draw_mw == pytest.approx(FREE_MW, rel=0.01), "what it draws uncapped is still known"
    assert record.loss is None
    run.run(60, speed=0.6)
    assert run.record.rate_per_s == pytest.approx(0.6 * FREE_RATE, rel=0.02)
    assert run.record.loss == pytest.approx(run.lost / (run.lost + run.true), abs=0.02), "priced afterwards"


def test_a_counter_in_another_unit_begins_anew() -> None:
    run = MadeUpRun()
    run.run(60)
    run.run(60, 450)
    run.unit = "steps"
    run.run(10, 450)
    assert run.record.unit == "steps"
    assert run.record.loss is None
    assert run.record.totals.done < run.true / 5
    assert run.record.rate_per_s is None


# --------------------------------------------------------------------------------------------------- lies


def test_lie_a_job_that_slows_its_counter_when_capped_is_not_believed() -> None:
    run = MadeUpRun()
    run.run(60)
    base = run.true
    run.lie = lambda counter: base + 0.4 * (counter - base)
    run.run(60, 500)
    record = run.record
    assert "while its draw fell by 17 %" in record.doubt
    assert (record.loss, record.loss_capped, record.totals.lost) == (None, None, None)
    assert not record.measured
    assert told(run).measurements == ()
    assert record.energy_wh is not None, "its draw is no word of its own"


def test_lie_a_job_that_slows_its_counter_by_little_is_left_to_what_its_curve_may_be() -> None:
    run = MadeUpRun()
    run.run(60)
    base = run.true
    run.lie = lambda counter: base + 0.75 * (counter - base)
    run.run(60, 500)
    assert not run.record.doubt
    (point,) = told(run).measurements
    assert point.loss > 0.3
    taken = believed(told(run), lambda reduction: (reduction / 2, 0.02))
    assert 0.1 < taken.measurements[0].loss < 0.17
    assert taken.unlikely
    assert believed(told(run), lambda reduction: (0.3, 0.02)) == told(run)


def test_a_counter_that_counts_something_else_leaves_the_energy_known() -> None:
    run = MadeUpRun()
    run.run(60)
    run.run(60, 500)
    saved_wh = run.record.energy_wh
    assert saved_wh is not None
    run.unit = "steps"
    run.run(60, 500)
    assert run.record.loss is None, "what steps are worth in tokens is not known"
    assert run.record.energy_wh == pytest.approx(2 * saved_wh, rel=0.03)
    run.run(60)
    assert run.record.energy_wh == pytest.approx(2 * saved_wh, rel=0.03)


def test_lie_a_counter_that_rises_tenfold_uncapped_is_not_believed() -> None:
    run = MadeUpRun()
    run.run(90)
    base = run.true
    run.lie = lambda counter: base + 10 * (counter - base)
    run.run(30)
    assert "times as fast at the same draw" in run.record.doubt
    assert run.record.loss is None


def test_lie_a_counter_that_rises_faster_under_a_cap_is_not_believed() -> None:
    for factor in (1.7, 10.0):
        run = MadeUpRun()
        run.run(90)
        base = run.true
        run.lie = lambda counter, base=base, factor=factor: base + factor * (counter - base)  # type: ignore[misc]
        run.run(30, 450)
        assert "under a cap" in run.record.doubt, factor
        assert not run.record.measured


def test_lie_a_counter_that_was_set_far_ahead_once_is_neither_work_nor_a_rate() -> None:
    run = MadeUpRun()
    run.run(60)
    run.run(30, 450)
    run.lie = lambda counter: counter + 1e6
    run.run(60, 450)
    assert not run.record.doubt
    assert run.record.totals.done == pytest.approx(run.true, rel=0.03)
    assert run.record.loss == pytest.approx(run.lost / (run.lost + run.true), abs=0.01)


def test_a_counter_that_restarts_at_zero_loses_nothing_else() -> None:
    run = MadeUpRun()
    run.run(60)
    run.run(60, 450)
    before = run.record
    base = run.true
    run.lie = lambda counter: counter - base
    run.run(60, 450)
    record = run.record
    assert not record.doubt
    assert record.segment == before.segment
    assert record.totals.done == pytest.approx(run.true, rel=0.03)
    assert record.loss == pytest.approx(run.lost / (run.lost + run.true), abs=0.01)
    assert level(record, 450).count > level(before, 450).count


def test_a_run_that_never_reports_has_a_draw_and_no_loss() -> None:
    run = MadeUpRun(lie=lambda _: None)
    run.run(60)
    run.run(60, 450)
    record = run.record
    assert not record.reporting
    assert record.source == "seen"
    assert (record.loss, record.loss_capped, record.rate_per_s, record.rate_now) == (None, None, None, None)
    assert record.energy_wh is not None
    assert record.energy_wh < 0
    assert not record.measured
    assert told(run).measurements == ()
    assert told(run).baseline == "bounded"


def test_a_counter_that_falls_silent_under_a_cap_has_no_loss_after_a_while() -> None:
    run = MadeUpRun()
    run.run(60)
    run.run(30, 450)
    assert run.record.loss is not None
    run.tell_s = 1e9
    run.run(700, 450)
    assert run.record.loss is None
    assert run.record.rate_now is None


def test_a_job_shorter_than_a_sample_is_a_run_of_which_nothing_is_known() -> None:
    record = Record()
    assert (record.source, record.draw_mw, record.rate_per_s, record.energy_wh) == (
        "bounded",
        None,
        None,
        0.0,
    )
    assert (record.loss, record.loss_capped, record.totals.lost) == (None, None, None)
    run = MadeUpRun()
    run.run(0.3)
    assert run.record.last_ns is not None
    assert run.record.loss is None
    assert run.record.totals.known_s == 0.0
    assert told(run) == RunEvidence("NVIDIA H200", "kin", baseline="bounded", baseline_sd=0.1)


def test_a_run_with_no_baseline_has_no_loss() -> None:
    run = MadeUpRun()
    run.run(120, 300)
    record = run.record
    assert record.source == "bounded"
    assert (record.draw_mw, record.rate_per_s, record.loss, record.energy_wh) == (None, None, None, None)
    assert record.totals.capped_s == pytest.approx(120, abs=2), "it draws what its cap allows"
    assert told(run).measurements == ()
    run.run(60)
    assert run.record.loss == pytest.approx(run.lost / (run.lost + run.true), abs=0.01), "known afterwards"


# ----------------------------------------------------------------------------------- recalled and bounded


def test_a_recalled_baseline_serves_until_one_is_seen() -> None:
    recalled = Recalled(draw_mw=FREE_MW, rate_per_s=FREE_RATE * 1.02, sd=0.01)
    run = MadeUpRun()
    run.record = Record(recalled=recalled)
    run.run(60, 450)
    assert (run.record.source, run.record.rate_source) == ("recalled", "recalled")
    assert run.record.baseline_sd == 0.03
    assert run.record.measured
    assert run.record.loss == pytest.approx(run.lost / (run.lost + run.true), abs=0.03)
    (point,) = told(run).measurements
    assert point.reduction == pytest.approx(0.25, abs=0.01)
    assert told(run).baseline == "recalled"
    run.run(60)
    assert (run.record.source, run.record.rate_source) == ("seen", "seen")
    assert run.record.loss == pytest.approx(run.lost / (run.lost + run.true), abs=0.01)


def test_a_recalled_rate_that_cannot_be_is_dropped_and_the_counter_is_not_doubted_for_it() -> None:
    run = MadeUpRun()
    run.record = Record(recalled=Recalled(draw_mw=FREE_MW, rate_per_s=FREE_RATE / 3, sd=0.01))
    run.run(60, 450)
    assert not run.record.doubt
    assert run.record.rate_per_s is None
    assert run.record.loss is None
    assert run.record.draw_mw == FREE_MW


def test_a_recalled_draw_that_is_passed_under_a_cap_is_forgotten() -> None:
    run = MadeUpRun()
    run.record = Record(recalled=Recalled(draw_mw=300 * W, rate_per_s=None, sd=0.01))
    run.run(5, 450)
    assert run.record.recalled is None
    assert run.record.source == "bounded"


def test_of_a_run_never_seen_uncapped_only_how_its_caps_compare_is_told() -> None:
    """Near its prior limit, where its baseline draw can be little else."""
    run = MadeUpRun()
    for cap_mw, rate in ((660 * W, 1000.0), (400 * W, 800.0)):
        for _ in range(60):
            run.now_s += 1
            run.true += rate
            run.told = (run.true, run.now_s)
            run.record = observe(run.record, run.sample(cap_mw, cap_mw), TIMES)
    assert run.record.source == "bounded"
    shallow, deep = sorted(told(run).measurements, key=lambda point: point.reduction)
    assert shallow.loss == pytest.approx(0.0)
    assert deep.loss == pytest.approx(0.2, abs=0.02)
    assert shallow.baseline_sd == deep.baseline_sd == 10.0
    assert deep.sd > 0.02, "its baseline draw lies somewhere between 660 and 700 W"
    # The learner takes the ratio: some loss at the shallow cap too, and more at the deep one than the ratio alone.
    prior = Prior(Library.load_default())
    mean, sd = loss_at(learn(prior, [told(run), told(run)]), np.array([shallow.reduction, deep.reduction]))
    assert 0.19 < mean[1] < 0.3
    assert 0 <= mean[0] < 0.06
    assert sd[1] < loss_at(learn(prior, [RunEvidence("NVIDIA H200")]), np.array([deep.reduction]))[1][0]


# --------------------------------------------------------------------------------- gaps, bounds, conservation


def test_a_silence_is_neither_time_nor_energy_nor_loss() -> None:
    run = MadeUpRun()
    run.run(60)
    run.run(60, 450)
    before = run.record.totals
    run.run(300, 450, silent=True)
    run.run(10, 450)
    after = run.record.totals
    assert after.known_s == pytest.approx(before.known_s + 10, abs=2)
    assert after.drawn_j == pytest.approx(before.drawn_j + 10 * 450 * GPUS, rel=0.1)
    assert after.lost is not None
    assert before.lost is not None
    assert after.lost - before.lost < 0.125 * FREE_RATE * 15
    assert after.done == pytest.approx(run.true, rel=0.03), "what its counter did meanwhile is work"


def test_unknown_draws_and_limits_stay_unknown() -> None:
    run = MadeUpRun()
    run.run(60)
    record, now_ns = run.record, run.record.last_ns or 0
    for i in range(1, 20):
        sample = Sample(
            now_ns=now_ns + i * NS, gpus=GPUS, prior_mw=PRIOR_MW, counter=1.0 * i, counter_ns=i, unit="tokens"
        )
        record = observe(record, sample, TIMES)
    assert record.since_ns is None
    assert record.totals.drawn_j == run.record.totals.drawn_j
    assert record.totals.capped_s == 0
    assert record.draw_mw == run.record.draw_mw


def test_the_baseline_draw_is_of_instants_and_what_was_used_is_by_energy() -> None:
    """The mean since the reading before may reach back into a time in which the run did not train yet."""
    record = Record()
    for second in range(1, 71):
        sample = Sample(
            now_ns=second * NS,
            gpus=GPUS,
            draw_mw=FREE_MW,
            mean_mw=FREE_MW // 2 if second == 1 else FREE_MW - 20 * W,
            cap_mw=PRIOR_MW,
            lowest_mw=PRIOR_MW,
            prior_mw=PRIOR_MW,
            uncapped=True,
        )
        record = observe(record, sample, TIMES)
    assert record.draw_mw == FREE_MW
    free = record.level(None)
    assert free is not None and free.draw_mw == FREE_MW - 20 * W
    assert record.totals.drawn_j == pytest.approx(69 * GPUS * (FREE_MW - 20 * W) / 1000)


def test_a_late_sample_changes_nothing() -> None:
    run = MadeUpRun()
    run.run(30)
    late = msgspec.structs.replace(run.sample(None, FREE_MW), now_ns=(run.record.last_ns or 0) - 1)
    assert observe(run.record, late, TIMES) is run.record


def test_memory_is_bounded_after_a_hundred_thousand_samples() -> None:
    rng = random.Random(1)
    record, counter, cap_mw = Record(), 0.0, None
    sizes = []
    for i in range(100_000):
        if i % 50 == 0:
            cap_mw = None if rng.random() < 0.3 else rng.randrange(200, 700) * W
        counter += rate_at(cap_mw) * rng.gauss(1, 0.01) * (0.8 if i % 20_000 > 10_000 else 1)
        sample = Sample(
            now_ns=(i + 1) * NS,
            gpus=GPUS,
            draw_mw=min(FREE_MW, cap_mw or FREE_MW),
            cap_mw=PRIOR_MW if cap_mw is None else cap_mw,
            prior_mw=PRIOR_MW,
            uncapped=cap_mw is None,
            counter=counter,
            counter_ns=(i + 1) * NS,
            unit="tokens",
        )
        record = observe(record, sample, TIMES)
        if i % 10_000 == 9_999:
            sizes.append(len(msgspec.json.encode(record)))
            assert len(record.levels) <= MOST_LEVELS
            assert all(len(one.batches) <= 2 * MOST_BATCHES for one in record.levels)
            assert len(record.draws) <= 4 * KEPT_DRAWS
    assert max(sizes) < 16_000
    assert record.level(None) is not None
    assert not record.doubt


PHASES = st.lists(
    st.tuples(
        st.integers(5, 60),
        st.one_of(st.none(), st.integers(300, 620)),
        st.sampled_from([1.0, 1.0, 1.0, 0.0, 0.6]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(phases=PHASES, seed=st.integers(0, 9), report_s=st.sampled_from([0.5, 1.0, 5.0]))
def test_totals_add_up_whatever_happens(
    phases: list[tuple[int, int | None, float]], seed: int, report_s: float
) -> None:
    run = MadeUpRun(seed=seed, report_s=report_s)
    before = run.run(40)
    for seconds, cap_w, speed in phases:
        record = run.run(seconds, cap_w, speed=speed, draw_w=150 if speed == 0 else None)
        totals, old = record.totals, before.totals
        assert old.known_s <= totals.known_s <= run.now_s - 999
        assert old.capped_s <= totals.capped_s <= totals.known_s
        assert totals.drawn_j >= old.drawn_j
        assert old.done <= totals.done <= run.true * 1.0001
        tally, rate = record.tally, record.rate_per_s
        if totals.lost is not None and rate is not None and tally.work_s > 0:
            expected = rate * tally.work_s
            assert tally.work_done + (totals.lost - tally.past_lost) == pytest.approx(expected)
        assert record.loss is None or record.loss <= 1
        assert tally.work_s >= -1e-9
        assert tally.done_capped <= tally.done + 1e-6
        told(run)
        before = record


@settings(max_examples=200, deadline=None)
@given(
    calm=st.integers(8, 60),
    stalls=st.lists(st.tuples(st.integers(0, 60), st.floats(0.001, 0.2), st.integers(1, 60)), max_size=3),
)
def test_where_stalls_fall_does_not_change_the_levels(
    calm: int, stalls: list[tuple[int, float, int]]
) -> None:
    """Intervals of a second, and between some of them stalls in which the run got on a little."""
    cap_mw = 450 * W

    def work(stalls: list[tuple[int, float, int]]) -> Record:
        record, now_s, counter = Record(), 0, 0.0
        steps = [(None, 1, 1.0)] * 40 + [(cap_mw, 1, 1.0)] * 3
        for i in range(calm):
            steps.extend((cap_mw, seconds, speed) for place, speed, seconds in stalls if place % calm == i)
            steps.append((cap_mw, 1, 1.0))
        for cap, seconds, speed in steps:
            now_s += seconds
            counter += rate_at(cap) * seconds * speed
            sample = Sample(
                now_ns=now_s * NS,
                gpus=GPUS,
                draw_mw=cap or FREE_MW,
                cap_mw=cap or PRIOR_MW,
                prior_mw=PRIOR_MW,
                uncapped=cap is None,
                counter=counter,
                counter_ns=now_s * NS,
                unit="tokens",
            )
            record = observe(record, sample, TIMES)
        return record

    record = work(stalls)
    assert record.segment == 0
    assert level(record, 450).rate_per_s == pytest.approx(rate_at(cap_mw))
    assert record.rate_per_s == pytest.approx(FREE_RATE)
    assert record.totals.lost == pytest.approx(work([]).totals.lost, abs=FREE_RATE * 0.125 * 4)
    assert not record.doubt


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.floats(0.01, 40),
            st.one_of(st.none(), st.integers(200_000, 700_000)),
            st.one_of(st.none(), st.integers(0, 800_000)),
            st.one_of(st.none(), st.floats(0, 1e24)),
            st.floats(0, 100),
            st.sampled_from(["tokens", "tokens", "tokens", "steps"]),
        ),
        max_size=60,
    )
)
def test_nothing_that_a_node_may_say_breaks_the_record(
    steps: list[tuple[float, int | None, int | None, float | None, float, str]],
) -> None:
    record, now_ns = Record(), 10**12
    for seconds, cap_mw, draw_mw, counter, age_s, unit in steps:
        now_ns += round(seconds * NS)
        sample = Sample(
            now_ns=now_ns,
            gpus=1,
            draw_mw=draw_mw,
            cap_mw=cap_mw,
            lowest_mw=cap_mw,
            prior_mw=PRIOR_MW,
            uncapped=cap_mw is not None and cap_mw > 650_000,
            counter=counter,
            counter_ns=None if counter is None else now_ns - round(age_s * NS),
            unit=unit,
        )
        record = observe(record, sample, TIMES)
        told = believed(evidence(record, "g", "", now_ns), lambda reduction: (reduction, 0.05))
        assert all(point.loss <= 1 for point in told.measurements)
        assert record.totals.known_s >= record.totals.capped_s >= 0
        assert record.loss is None or record.loss <= 1
        assert record.energy_wh is None or abs(record.energy_wh) < 1e9
        assert record.measured in (True, False)
