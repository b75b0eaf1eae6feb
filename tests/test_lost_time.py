"""What time limits need of a run's record: time lost under caps, the share of stalls, and the total it tells."""

from __future__ import annotations

import msgspec
import pytest

from slurm_pfi.controller.answers.jobs import cost_of
from slurm_pfi.controller.measuring.measured import observe
from slurm_pfi.controller.measuring.record import Record

from .measured_run import FREE_RATE, NS, TIMES, MadeUpRun


@pytest.mark.parametrize("cap_w", [550, 400, 250])
def test_lost_time_is_that_without_caps_for_the_same_work(cap_w: int) -> None:
    made = MadeUpRun(seed=cap_w)
    made.run(120)
    assert made.record.lost_s == pytest.approx(0, abs=0.1)
    made.run(300, cap_w)
    made.run(60)
    assert made.record.lost_s == pytest.approx(made.lost / FREE_RATE, rel=0.05)


def test_it_adds_up_over_work_of_another_speed() -> None:
    made = MadeUpRun()
    made.run(120)
    made.run(200, 400)
    first_s = made.lost / FREE_RATE
    made.run(300, speed=0.5)
    assert made.record.segment == 1
    assert made.record.lost_s == pytest.approx(first_s, rel=0.05)
    before = made.lost
    made.run(200, 400, speed=0.5)
    second_s = (made.lost - before) / (0.5 * FREE_RATE)
    assert made.record.lost_s == pytest.approx(first_s + second_s, rel=0.05)
    told = cost_of(made.record)
    assert told["longer_s"] == made.record.lost_s
    assert told["longer_low_s"] < first_s + second_s < told["longer_high_s"]


def test_it_is_unknown_where_the_loss_is() -> None:
    never_free = MadeUpRun()
    never_free.run(200, 400)
    silent = MadeUpRun(lie=lambda _: None)
    silent.run(120)
    silent.run(200, 400)
    liar = MadeUpRun(lie=lambda counter: min(counter, 120_000) + max(0.0, counter - 120_000) / 4)
    liar.run(120)
    liar.run(200, 550)
    assert [made.record.lost_s for made in (never_free, silent, liar)] == [None, None, None]
    assert liar.record.doubt


@pytest.mark.parametrize("cap_w", [None, 400])
def test_stalls_are_a_share_of_the_time_under_caps_or_not(cap_w: int | None) -> None:
    made = MadeUpRun()
    made.run(120)
    assert made.record.stalled == pytest.approx(0, abs=0.01)
    for _ in range(6):
        made.run(15, cap_w, speed=0.0, draw_w=150)
        made.run(45, cap_w)
    assert made.record.stalled == pytest.approx(90 / 480, abs=0.03)


def told(record: Record, counter: float, total: float | None, at_s: float, unit: str = "steps") -> Record:
    sample = msgspec.structs.replace(
        MadeUpRun().sample(None, 600_000),
        now_ns=round(at_s * NS),
        counter=counter,
        counter_ns=round(at_s * NS),
        total=total,
        unit=unit,
    )
    return observe(record, sample, TIMES)


def test_the_newest_total_counts_and_none_is_none() -> None:
    record = Record()
    for at_s, total in enumerate((None, 900.0, 1000.0, 1000.0, None), 1):
        record = told(record, 10.0 * at_s, total, float(at_s))
        assert record.total == total
