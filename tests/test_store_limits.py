"""The site limits on disk, and as steps from now."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.model import Limit, LimitClass, LimitStep
from slurm_pfi.store.limits import (
    KEEP_ENDED_S,
    LimitError,
    LimitStore,
    ScheduleStep,
    binding_ids,
    check_limit,
    has_ended,
    schedule,
)
from slurm_pfi.store.sealed import UnreadableError

NOW = 1_796_000_000.0
KW = 1_000_000


def step(start_unix_s: float, limit_mw: int | None) -> LimitStep:
    return LimitStep(start_unix_s=start_unix_s, limit_mw=limit_mw)


def limit(*steps: tuple[float, int | None], class_: LimitClass = "economic", limit_id: str = "a") -> Limit:
    """Steps in seconds from now."""
    return Limit(
        id=limit_id,
        revision=1,
        source="test",
        class_=class_,
        steps=tuple(step(NOW + start_s, limit_mw) for start_s, limit_mw in steps),
    )


def new_store(tmp_path: Path) -> LimitStore:
    store = LimitStore(tmp_path / "limits.json")
    assert store.load(first_start=True) == ()
    return store


def reloaded(tmp_path: Path) -> tuple[Limit, ...]:
    return LimitStore(tmp_path / "limits.json").load(first_start=False)


def test_a_limit_survives_a_restart(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    made = store.set_limit(
        "grid",
        class_="emergency",
        source="cli",
        steps=[step(NOW, 18 * KW), step(NOW + 60, None)],
        now_unix_s=NOW,
    )
    assert made.revision == 1
    assert reloaded(tmp_path) == (made,)
    again = store.set_limit("grid", class_="economic", source="cli", steps=[step(NOW, 0)], now_unix_s=NOW)
    assert again.revision == 2
    assert again.steps[0].limit_mw == 0
    assert reloaded(tmp_path) == (again,)
    assert store.clear_limit("grid", now_unix_s=NOW) == again
    assert store.clear_limit("grid", now_unix_s=NOW) is None
    assert reloaded(tmp_path) == ()


def test_the_revision_goes_on_after_a_restart(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.set_limit("a", class_="economic", source="", steps=[step(NOW, KW)], now_unix_s=NOW)
    store.clear_limit("a", now_unix_s=NOW)
    later = LimitStore(tmp_path / "limits.json")
    later.load(first_start=False)
    made = later.set_limit("b", class_="economic", source="", steps=[step(NOW, KW)], now_unix_s=NOW)
    assert made.revision == 3
    assert later.revision == 3


def damage(path: Path, how: str) -> None:
    text = path.read_text()
    if how == "cut":
        path.write_text(text[: len(text) // 2])
    elif how == "empty":
        path.write_text("")
    elif how == "changed":
        path.write_text(text.replace("18000000", "98000000"))
    elif how == "no limits":
        sealed = json.loads(text)
        sealed["body"]["limits"] = []
        path.write_text(json.dumps(sealed))
    elif how == "bytes":
        path.write_bytes(b"\xff\xfe" + text.encode())
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["cut", "empty", "changed", "no limits", "bytes", "folder", "missing"])
def test_a_damaged_file_never_means_no_limit(tmp_path: Path, how: str) -> None:
    path = tmp_path / "limits.json"
    new_store(tmp_path).set_limit(
        "grid", class_="economic", source="cli", steps=[step(NOW, 18 * KW)], now_unix_s=NOW
    )
    damage(path, how)
    before = path.read_bytes() if path.is_file() else None
    store = LimitStore(path)
    with pytest.raises(UnreadableError, match=r"limits\.json"):
        store.load(first_start=False)
    with pytest.raises(UnreadableError):
        _ = store.limits
    with pytest.raises(UnreadableError):
        store.set_limit("x", class_="economic", source="", steps=[step(NOW, KW)], now_unix_s=NOW)
    with pytest.raises(UnreadableError):
        store.clear_limit("grid", now_unix_s=NOW)
    assert (path.read_bytes() if path.is_file() else None) == before
    aside = store.set_aside(now_unix_s=NOW)
    assert store.limits == ()
    assert reloaded(tmp_path) == ()
    assert (aside is None) == (how == "missing")
    if aside is not None and before is not None:
        assert aside.read_bytes() == before


def test_a_file_in_order_is_not_set_aside(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    with pytest.raises(LimitError):
        store.set_aside(now_unix_s=NOW)


def test_a_store_that_was_not_read_knows_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="not been read"):
        _ = LimitStore(tmp_path / "limits.json").limits


def test_a_change_that_cannot_be_written_is_not_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path)
    store.set_limit("a", class_="economic", source="", steps=[step(NOW, KW)], now_unix_s=NOW)
    kept = store.limits

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            store.clear_limit("a", now_unix_s=NOW)
        with pytest.raises(OSError, match="No space"):
            store.set_limit("b", class_="economic", source="", steps=[step(NOW, KW)], now_unix_s=NOW)
    assert store.limits == kept == reloaded(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["limits.json"]
    store.clear_limit("a", now_unix_s=NOW)
    assert reloaded(tmp_path) == ()


@pytest.mark.parametrize(
    ("limit_id", "class_", "steps"),
    [
        ("", "economic", [step(NOW, KW)]),
        ("a b", "economic", [step(NOW, KW)]),
        ("a", "friendly", [step(NOW, KW)]),
        ("a", "economic", []),
        ("a", "economic", [step(NOW, -1)]),
        ("a", "economic", [step(NOW, 10**15)]),
        ("a", "economic", [step(math.nan, KW)]),
        ("a", "economic", [step(math.inf, KW)]),
        ("a", "economic", [step(NOW, KW), step(NOW, None)]),
        ("a", "economic", [step(NOW + 5, KW), step(NOW, None)]),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(
    tmp_path: Path, limit_id: str, class_: LimitClass, steps: list[LimitStep]
) -> None:
    store = new_store(tmp_path)
    with pytest.raises(LimitError):
        store.set_limit(limit_id, class_=class_, source="", steps=steps, now_unix_s=NOW)
    assert store.limits == ()
    assert store.revision == 0


def test_ended_limits_are_pruned_after_a_day(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.set_limit("old", class_="economic", source="", steps=[step(0, KW), step(NOW, None)], now_unix_s=NOW)

    def kept_at(now_unix_s: float) -> set[str]:
        store.set_limit("new", class_="economic", source="", steps=[step(0, KW)], now_unix_s=now_unix_s)
        return {one.id for one in store.limits}

    assert kept_at(NOW + KEEP_ENDED_S - 1) == {"old", "new"}
    assert kept_at(NOW + KEEP_ENDED_S) == {"new"}


def test_when_a_limit_has_ended() -> None:
    one = limit((0, KW), (60, None))
    assert not has_ended(one, NOW + 59)
    assert has_ended(one, NOW + 60)
    assert not has_ended(limit((0, KW)), NOW + 1e9)


# ------------------------------------------------------------------------------------------------ the schedule


def test_no_limit_is_one_step_without_a_limit() -> None:
    assert schedule([], NOW, 3600, 10) == (ScheduleStep(0.0, None, None),)


def test_lowering_is_due_before_the_start_and_raising_not_before_the_end() -> None:
    steps = schedule([limit((60, 20 * KW), (120, None))], NOW, 3600, 10)
    assert steps == (
        ScheduleStep(0.0, None, None),
        ScheduleStep(50.0, 20 * KW, None),
        ScheduleStep(120.0, None, None),
    )


def test_a_limit_in_force_binds_from_now_and_one_beyond_the_horizon_is_not_named() -> None:
    assert schedule([limit((-60, 20 * KW))], NOW, 3600, 10) == (ScheduleStep(0.0, 20 * KW, None),)
    assert schedule([limit((5, 20 * KW))], NOW, 3600, 10) == (ScheduleStep(0.0, 20 * KW, None),)
    assert schedule([limit((4000, 20 * KW))], NOW, 3600, 10) == (ScheduleStep(0.0, None, None),)


def test_an_ended_limit_does_not_bind_and_zero_is_a_limit() -> None:
    assert schedule([limit((-60, KW), (0, None))], NOW, 60, 0) == (ScheduleStep(0.0, None, None),)
    assert schedule([limit((-60, 0))], NOW, 60, 0) == (ScheduleStep(0.0, 0, None),)


def test_the_lowest_of_several_holds_and_emergency_is_known_apart() -> None:
    steps = schedule(
        [
            limit((0, 20 * KW), (300, None), limit_id="a"),
            limit((60, 15 * KW), (120, None), limit_id="b", class_="emergency"),
            limit((100, 10 * KW), (110, 25 * KW), (400, None), limit_id="c"),
        ],
        NOW,
        3600,
        0,
    )
    assert steps == (
        ScheduleStep(0.0, 20 * KW, None),
        ScheduleStep(60.0, 15 * KW, 15 * KW),
        ScheduleStep(100.0, 10 * KW, 15 * KW),
        ScheduleStep(110.0, 15 * KW, 15 * KW),
        ScheduleStep(120.0, 20 * KW, None),
        ScheduleStep(300.0, 25 * KW, None),
        ScheduleStep(400.0, None, None),
    )


POWERS = st.none() | st.integers(0, 10).map(lambda kw: kw * KW)
LIMITS = st.builds(
    lambda starts, powers, class_: limit(*zip(sorted(starts), powers, strict=False), class_=class_),
    st.sets(st.integers(-100, 100), min_size=4, max_size=4),
    st.lists(POWERS, min_size=1, max_size=4),
    st.sampled_from(["economic", "emergency"]),
)


def in_force(one: Limit, at_s: float) -> int | None:
    """The limit at one instant, by the words of the design."""
    begun = [s.limit_mw for s in one.steps if s.start_unix_s <= NOW + at_s]
    return begun[-1] if begun else None


@given(st.lists(LIMITS, max_size=3), st.integers(0, 20), st.integers(0, 120))
def test_at_each_instant_the_lowest_of_the_next_seconds(
    limits: list[Limit], lead_s: int, horizon_s: int
) -> None:
    steps = schedule(limits, NOW, horizon_s, lead_s, most=1000)
    assert steps[0].starts_in_s == 0.0
    assert [s.starts_in_s for s in steps] == sorted({s.starts_in_s for s in steps})
    for before, after in itertools.pairwise(steps):
        assert (before.limit_mw, before.emergency_mw) != (after.limit_mw, after.emergency_mw)
    for at_s in range(horizon_s + 1):
        now_step = [s for s in steps if s.starts_in_s <= at_s][-1]
        for kind, said in (
            ({"economic", "emergency"}, now_step.limit_mw),
            ({"emergency"}, now_step.emergency_mw),
        ):
            ahead = [
                in_force(one, at_s + seconds)
                for one in limits
                if one.class_ in kind
                for seconds in range(lead_s + 1)
            ]
            assert said == min((power for power in ahead if power is not None), default=None)


@given(st.lists(LIMITS, max_size=3), st.integers(0, 20), st.integers(0, 120), st.integers(1, 5))
def test_what_is_told_in_short_is_never_looser_and_ends_no_earlier_nor_later(
    limits: list[Limit], lead_s: int, horizon_s: int, most: int
) -> None:
    steps = schedule(limits, NOW, horizon_s, lead_s, most=most)
    assert len(steps) <= most + 2
    assert [s.starts_in_s for s in steps] == sorted({s.starts_in_s for s in steps})
    whole = schedule(limits, NOW, 1000, lead_s, most=1000)

    def at(said: tuple[ScheduleStep, ...], at_s: float) -> ScheduleStep:
        return [s for s in said if s.starts_in_s <= at_s][-1]

    told_end = steps[-1].limit_mw is None
    last_s = steps[-1].starts_in_s if told_end else 300.0
    for at_s in range(round(last_s)):
        short, exact = at(steps, at_s), at(whole, at_s)
        if exact.limit_mw is not None and (len(steps) > most or at_s <= horizon_s):
            assert short.limit_mw is not None and short.limit_mw <= exact.limit_mw
        if exact.emergency_mw is not None and (len(steps) > most or at_s <= horizon_s):
            assert short.emergency_mw is not None and short.emergency_mw <= exact.emergency_mw
    if told_end:
        assert at(whole, last_s).limit_mw is None
    elif whole[-1].limit_mw is None:
        assert steps[-1].limit_mw is None


def test_an_end_beyond_the_horizon_is_told_and_the_lowest_until_then() -> None:
    later = limit((-60, 20 * KW), (5000, 15 * KW), (6000, 18 * KW), (7000, None), (9000, KW), (9100, None))
    steps = schedule([later], NOW, 3600, 10)
    assert [(s.starts_in_s, s.limit_mw) for s in steps] == [(0.0, 20 * KW), (3601.0, 15 * KW), (7000.0, None)]
    assert schedule([limit((-60, 20 * KW), (5000, 15 * KW))], NOW, 3600, 10) == (
        ScheduleStep(0.0, 20 * KW, None),
    )


def test_a_time_that_no_calendar_has_is_refused() -> None:
    with pytest.raises(LimitError, match="no time"):
        check_limit(limit((1e300, KW)))


def test_those_limits_bind_that_are_as_low_as_the_lowest_within_the_lead() -> None:
    many = (
        limit((-60, 9 * KW), (60, 5 * KW), limit_id="falls"),
        limit((-60, 8 * KW), limit_id="low"),
        limit((-60, 8 * KW), (-30, None), limit_id="over"),
        limit((5, 8 * KW), limit_id="soon"),
        limit((30, 4 * KW), limit_id="later"),
    )
    assert binding_ids(many, NOW, lead_s=0) == ("low",)
    assert binding_ids(many, NOW, lead_s=10) == ("low", "soon")
    assert binding_ids(many, NOW, lead_s=40) == ("later",)
    assert binding_ids(many[2:3], NOW, lead_s=10) == ()
