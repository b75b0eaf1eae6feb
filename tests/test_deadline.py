"""Time limits: the greatest loss that still fits, and when lost minutes are given back."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slurm_pfi.controller.deadline import (
    BATCH_S,
    END_SHARE,
    LAST_S,
    LOOSER_BY,
    NEAR_END_S,
    Ahead,
    Deadline,
    Work,
    greatest_loss,
    is_due,
    judge,
    needed_s,
    owed_s,
)
from slurm_pfi.slurm.numbers import MINUTE_S
from slurm_pfi.units import Z95_ONE_SIDED

HOUR_S = 3600.0

works = st.builds(
    Work,
    left=st.floats(0, 1e9),
    rate_per_s=st.floats(0.01, 1e6),
    rate_sd=st.floats(0, 0.3),
    stalled=st.floats(0, 0.6),
)
aheads = st.builds(Ahead, left_s=st.floats(0, 30 * 86400.0), capped_s=st.floats(0, 30 * 86400.0))
shares = st.floats(0, 1)


def fitting(work: Work, part: float) -> Work:
    """The same with so much left that it takes this part of a day."""
    return work._replace(left=part * 86400.0 * work.rate_per_s)


# ------------------------------------------------------------------------------------------- the greatest loss


@given(
    work=works,
    part=st.floats(0.01, 0.97),
    capped_s=st.floats(0, 2 * 86400.0),
    begin=shares,
    slower=st.floats(-1, 1),
)
def test_at_the_greatest_loss_the_work_is_done_in_time(
    work: Work, part: float, capped_s: float, begin: float, slower: float
) -> None:
    """Played through: 95 % of all rates, caps that begin at any time and last as long as they may."""
    work, ahead = fitting(work, part), Ahead(86400.0, capped_s)
    loss = greatest_loss(work, ahead)
    assume(loss > 0)
    pace = work.rate_per_s * (1 - work.stalled)
    pace *= 1 - slower * Z95_ONE_SIDED * work.rate_sd
    capped_s = min(capped_s, ahead.left_s)
    from_s = begin * (ahead.left_s - capped_s)
    done, step_s = 0.0, ahead.left_s / 1000
    for i in range(1000):
        at_s = (i + 0.5) * step_s
        capped = from_s <= at_s < from_s + capped_s
        done += pace * (1 - loss if capped else 1) * step_s
    assert done >= work.left * (1 - 1e-9) - pace * 2 * step_s


@given(work=works, ahead=aheads, more=st.floats(1, 10))
def test_it_is_monotone_in_everything(work: Work, ahead: Ahead, more: float) -> None:
    loss = greatest_loss(work, ahead)
    near = 1e-9
    assert 0 <= loss <= 1
    assert greatest_loss(work._replace(left=work.left * more), ahead) <= loss + near
    assert greatest_loss(work._replace(rate_per_s=work.rate_per_s * more), ahead) >= loss - near
    assert greatest_loss(work._replace(rate_sd=work.rate_sd * more), ahead) <= loss + near
    assert greatest_loss(work._replace(stalled=min(0.9, work.stalled * more)), ahead) <= loss + near
    assert greatest_loss(work, ahead._replace(left_s=ahead.left_s * more)) >= loss - near
    assert greatest_loss(work, ahead._replace(capped_s=ahead.capped_s * more)) <= loss + near


def test_figures() -> None:
    """Ten hours left, nine of work: 2 % kept for the end leaves 0.8 h to lose, in so many hours of caps."""
    work = Work(left=9 * HOUR_S, rate_per_s=1.0, rate_sd=0.0, stalled=0.0)
    assert greatest_loss(work, Ahead(10 * HOUR_S, 8 * HOUR_S)) == pytest.approx(0.1)
    assert greatest_loss(work, Ahead(10 * HOUR_S, 1 * HOUR_S)) == pytest.approx(0.8)
    assert greatest_loss(work, Ahead(10 * HOUR_S, 0.5 * HOUR_S)) == 1.0
    assert greatest_loss(work, Ahead(9 * HOUR_S, HOUR_S)) == 0.0
    assert greatest_loss(work._replace(left=0.0), Ahead(1.0, HOUR_S)) == 1.0
    assert needed_s(work._replace(stalled=0.1)) == pytest.approx(10 * HOUR_S)
    assert greatest_loss(work._replace(rate_sd=0.04), Ahead(10 * HOUR_S, 8 * HOUR_S)) < 0.03


# --------------------------------------------------------------------------------------------------- the verdict

FLEX = 0.15


@given(
    work=works,
    ahead=aheads,
    flex=shares,
    tightest=st.floats(0, 0.2),
    before=st.sampled_from([None, 0.02, 0.1]),
)
def test_a_bound_is_never_looser_than_the_flex_nor_tighter_than_allowed(
    work: Work, ahead: Ahead, flex: float, tightest: float, before: float | None
) -> None:
    was = None
    if before is not None:
        was = Deadline(verdict="tight", max_loss=max(before, tightest), left_s=0, needed_s=0)
    found = judge(work, ahead, flex, tightest, was)
    assert min(flex, tightest) <= found.max_loss <= flex
    assert (found.verdict == "tight") == (found.max_loss < flex)
    assert found.max_loss in (flex, tightest, round(found.max_loss, 3)), "in whole steps"
    if found.verdict == "tight" and found.max_loss > tightest:
        assert found.max_loss <= greatest_loss(work, ahead) + 1e-9


def test_who_fits_keeps_the_flex_and_who_cannot_be_saved_too() -> None:
    work = Work(left=9 * HOUR_S, rate_per_s=1.0, rate_sd=0.01, stalled=0.0)
    assert judge(work, Ahead(20 * HOUR_S, 20 * HOUR_S), FLEX, 0.0, None).verdict == "fits"
    tight = judge(work, Ahead(10 * HOUR_S, 10 * HOUR_S), FLEX, 0.0, None)
    assert tight.verdict == "tight" and 0.05 < tight.max_loss < 0.1
    late = judge(work, Ahead(8 * HOUR_S, 8 * HOUR_S), FLEX, 0.0, None)
    assert late.verdict == "late" and late.max_loss == FLEX
    undecided = judge(work, Ahead(9.1 * HOUR_S, 8 * HOUR_S), FLEX, 0.0, None)
    assert undecided.verdict == "tight" and undecided.max_loss == 0.0, "it may be done in time"


def test_noise_moves_no_bound() -> None:
    """The rate is off by half a percent, up and down: one bound, and one word."""
    before: Deadline | None = None
    told = []
    for i in range(40):
        rate = 1.0 + (0.004 if i % 2 else -0.004)
        work = Work(left=9 * HOUR_S, rate_per_s=rate, rate_sd=0.01, stalled=0.0)
        before = judge(work, Ahead(10 * HOUR_S, 10 * HOUR_S), FLEX, 0.0, before)
        told.append(before.max_loss)
    assert len(set(told[1:])) == 1 and told[1] <= told[0]


def test_the_edge_between_tight_and_late_is_passed_once() -> None:
    words, before = [], None
    for i in range(60):
        left_s = 9.2 * HOUR_S - i * 60 + (120 if i % 2 else 0)
        work = Work(left=9 * HOUR_S, rate_per_s=1.0, rate_sd=0.01, stalled=0.0)
        before = judge(work, Ahead(left_s, left_s), FLEX, 0.0, before)
        words.append(before.verdict)
    assert words == sorted(words, reverse=True) and {"tight", "late"} == set(words)
    raised = judge(work, Ahead(11 * HOUR_S, HOUR_S), FLEX, 0.0, before)
    assert raised.verdict == "fits", "its limit was raised"


@given(gains=st.lists(st.floats(-0.004, 0.004), max_size=30))
def test_a_bound_that_loosens_moves_by_a_point_at_least(gains: list[float]) -> None:
    before: Deadline | None = None
    spare = 0.08
    for gain in gains:
        spare = min(0.14, max(0.01, spare + gain))
        work = Work(left=HOUR_S * (1 - END_SHARE) * (1 - spare), rate_per_s=1.0, rate_sd=0.0, stalled=0.0)
        found = judge(work, Ahead(HOUR_S, HOUR_S), FLEX, 0.0, before)
        if before is not None and found.max_loss > before.max_loss:
            assert found.max_loss >= before.max_loss + LOOSER_BY - 1e-9
        before = found


# ------------------------------------------------------------------------------------------------ time given back


@given(lost=st.lists(st.floats(0, 1e5), max_size=30))
def test_never_more_is_given_than_was_lost(lost: list[float]) -> None:
    """A loss is an estimate that moves; what was given is not taken back."""
    given_s = 0
    for lost_s in lost:
        more_s = owed_s(lost_s, given_s)
        assert more_s % MINUTE_S == 0 and more_s >= 0
        given_s += more_s
        assert given_s <= max(lost) + MINUTE_S


@given(lost_s=st.floats(0, 1e5), given=st.integers(0, 2000), left_s=st.floats(0, 1e6), capped=st.booleans())
def test_nothing_is_due_that_is_not_owed(lost_s: float, given: int, left_s: float, capped: bool) -> None:
    given_s = given * MINUTE_S
    if is_due(lost_s, given_s, left_s, capped=capped):
        assert owed_s(lost_s, given_s) >= MINUTE_S


@pytest.mark.parametrize(
    ("lost_s", "left_s", "capped", "due"),
    [
        (59.0, 2 * NEAR_END_S, False, False),
        (61.0, 2 * NEAR_END_S, False, True),
        (61.0, 2 * NEAR_END_S, True, False),
        (BATCH_S, 2 * NEAR_END_S, True, True),
        (61.0, NEAR_END_S, True, True),
        (20.0, NEAR_END_S, True, False),
        (20.0, LAST_S, True, True),
        (2.0, LAST_S, True, False),
    ],
)
def test_few_changes_and_none_too_late(lost_s: float, left_s: float, capped: bool, due: bool) -> None:
    assert is_due(lost_s, 0, left_s, capped=capped) is due
