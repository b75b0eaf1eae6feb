"""Time limits in the core: which runs get a tighter floor, which limits are to be raised, and what is told of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from slurm_pfi.config import PolicySection
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.audit_words import audit_event
from slurm_pfi.controller.core import Core
from slurm_pfi.controller.measuring.record import Heard
from slurm_pfi.model import Run
from slurm_pfi.slurm.backend import JobInfo, Special

from .site_answers import with_record
from .test_controller_core import NOW_S, RUN, S, Site, gpu
from .world import job_info

HOUR_S = 3600.0
RATE = 1000.0
"""Units a second of the run that ``with_record`` makes."""


def site(**policy: Any) -> Site:
    """One node with one GPU and one run, whose uncapped draw and rate are known."""
    made = Site(nodes=1, gpus=1)
    policy = {"none_partitions": ("urgent",), "time_limit_flex": "none", **policy}
    made.config = msgspec.structs.replace(made.config, policy=PolicySection(**policy))
    made.core = Core(made.config, made.core.science)
    made.hear("n1", gpu("A", RUN, draw_mw=600_000))
    return made


def of_job(left_s: float | None, made: Site, **changes: Any) -> JobInfo:
    """The run's job, with so much time left; None: it has no limit."""
    now_unix_s = NOW_S + made.now_ns / S
    ends = {"limit_s": Special.UNLIMITED, "end_unix_s": Special.NOT_SET}
    if left_s is not None:
        ends = {"limit_s": 24 * 3600, "end_unix_s": round(now_unix_s + left_s)}  # type: ignore[dict-item]
    return dataclasses.replace(job_info(RUN, ("n1",), "main"), **{**ends, **changes})


def read(made: Site, left_s: float | None, given_s: int | None = None, **changes: Any) -> None:
    made.tell(
        cs.JobRead(
            run=RUN,
            job=of_job(left_s, made, **changes),
            read_unix_s=NOW_S + made.now_ns / S,
            given_s=given_s,
        )
    )


def works(made: Site, hours_left: float | None, **record: Any) -> None:
    """So much work is left, uncapped; None: it tells no total. It was heard just now."""
    heard = Heard(counter=4.1e6, ns=made.now_ns, unit="tokens", node="n1", capped=False)
    total = None if hours_left is None else 4.1e6 + hours_left * HOUR_S * RATE
    made.state = with_record(made.state, RUN, **{"heard": heard, "total": total, **record})
    made.state = msgspec.structs.replace(made.state, deadlines_due_ns=0)


def view(made: Site) -> cs.RunView:
    return made.state.runs[RUN]


def judged(made: Site) -> tuple[str, float] | None:
    found = view(made).deadline
    return None if found is None else (found.verdict, round(found.max_loss, 3))


def story(
    left_s: float | None, hours_left: float | None, limit_s: float | None = None, **record: Any
) -> Site:
    """A run with so much time and work left, under a limit of so long; one cycle has gone by."""
    made = site()
    read(made, left_s)
    works(made, hours_left, **record)
    made.limit(600, ends_in_s=limit_s)
    made.cycle()
    return made


def words(made: Site, event: str) -> list[str]:
    """What people read of the audit's entries."""
    rows = (audit_event(event, fields, 0.0) for fields in made.audits(event))
    return [row.text for row in rows if row is not None]


# ---------------------------------------------------------------------------------------------------- floors


# Of ten hours 2 % are kept for the end. Nine hours of work take 9.07 at the lowest rate that 95 % confidence allows.
# What is left, 0.73 h, may be lost: 7.4 % of all that time, 12.1 % of six hours.


def test_a_run_that_would_not_be_done_in_time_gets_a_tighter_floor() -> None:
    easy, tight = story(10 * HOUR_S, 4.0), story(10 * HOUR_S, 9.0)
    assert judged(easy) == ("fits", 0.15) and view(easy).max_loss == 0.15
    assert judged(tight) == ("tight", 0.07)
    easy_mw, tight_mw = view(easy).floor_mw, view(tight).floor_mw
    assert easy_mw is not None and tight_mw is not None and tight_mw > easy_mw
    assert [(one["verdict"], one["max_loss"], one["flex_loss"]) for one in tight.audits("deadline")] == [
        ("tight", pytest.approx(0.07), 0.15)
    ]
    assert easy.audits("deadline") == []
    assert words(tight, "deadline") == [
        "its floor allows no more than 7.0 % for its time limit: 10 h 00 min left for 9 h 00 min of work"
    ]


def test_a_window_whose_end_is_known_may_cost_more() -> None:
    assert judged(story(10 * HOUR_S, 9.0)) == ("tight", 0.07)
    assert judged(story(10 * HOUR_S, 9.0, limit_s=6 * HOUR_S)) == ("tight", 0.12)
    assert judged(story(10 * HOUR_S, 9.0, limit_s=2 * HOUR_S)) == ("fits", 0.15)


def test_what_follows_a_window_counts_too() -> None:
    made = story(10 * HOUR_S, 9.0, limit_s=6 * HOUR_S)
    made.config = msgspec.structs.replace(
        made.config, times=msgspec.structs.replace(made.config.times, rebound_s=1800.0)
    )
    made.core = Core(made.config, made.core.science)
    made.limit(600, ends_in_s=6 * HOUR_S)
    made.cycle()
    assert judged(made) == ("tight", 0.11)


def test_a_run_that_no_floor_can_save_keeps_what_its_flex_says() -> None:
    made = story(10 * HOUR_S, 12.0)
    assert judged(made) == ("late", 0.15) and view(made).max_loss == 0.15
    assert words(made, "deadline") == [
        "its time limit is too short even without a cap: 10 h 00 min left for 12 h 00 min of work; its flex counts"
    ]


@pytest.mark.parametrize(
    ("left_s", "hours_left", "record"),
    [
        (None, 9.0, {}),
        (10 * HOUR_S, None, {}),
        (10 * HOUR_S, 9.0, {"levels": ()}),
        (10 * HOUR_S, 9.0, {"seen": False}),
        (10 * HOUR_S, 9.0, {"doubt": "it cannot be"}),
        (10 * HOUR_S, 9.0, {"disputed": "its GPUs say otherwise"}),
        (10 * HOUR_S, 9.0, {"unit": "steps"}),
        (10 * HOUR_S, 9.0, {"heard": None}),
    ],
)
def test_what_is_not_known_changes_nothing(
    left_s: float | None, hours_left: float | None, record: dict[str, Any]
) -> None:
    made = story(left_s, hours_left, **record)
    assert judged(made) is None and view(made).max_loss == 0.15
    assert made.audits("deadline") == []


@pytest.mark.parametrize(
    ("partition", "policy", "bound"),
    [
        ("main", "low", 0.05),
        ("main", "3%", 0.03),
        ("main", "none", 0.0),
        ("main", "100%", 0.15),
        ("urgent", "low", 0.0),
        ("urgent", "100%", 0.0),
    ],
)
def test_the_word_of_a_user_gives_no_more_than_the_site_allows(
    partition: str, policy: str, bound: float
) -> None:
    made = site(time_limit_flex=policy)
    read(made, 9.2 * HOUR_S, partition=partition)
    works(made, 9.0)
    made.limit(600)
    made.cycle()
    assert view(made).max_loss == bound


def test_a_limit_that_scontrol_changed_is_seen_at_the_next_reading_of_all_jobs() -> None:
    made = story(10 * HOUR_S, 9.0)
    assert judged(made) == ("tight", 0.07)
    made.tell(cs.AllJobsRead(jobs=(of_job(20 * HOUR_S, made),), read_unix_s=NOW_S + made.now_ns / S))
    made.cycle()
    assert judged(made) == ("fits", 0.15)
    job = view(made).job
    assert job is not None and isinstance(job.end_unix_s, int)
    assert job.end_unix_s == pytest.approx(NOW_S + made.now_ns / S + 20 * HOUR_S, abs=1)
    made.tell(cs.AllJobsRead(jobs=None))
    made.cycle()
    assert judged(made) == ("fits", 0.15), "no answer changes nothing"


def test_a_suspended_job_has_no_end_while_it_is() -> None:
    made = story(10 * HOUR_S, 9.0)
    suspended = of_job(10 * HOUR_S, made, state="SUSPENDED")
    made.tell(cs.AllJobsRead(jobs=(suspended,), read_unix_s=NOW_S + made.now_ns / S))
    made.cycle()
    assert judged(made) is None and view(made).max_loss == 0.15


def test_no_cap_moves_for_noise() -> None:
    """Once a minute its counter is off by a little, up and down: one bound, told once."""
    made = story(10 * HOUR_S, 9.0)
    told = set()
    for i in range(10):
        made.wait(60.0)
        left = 9.0 - (i + 1) / 60 + (0.01 if i % 2 else -0.01)
        works(made, left)
        made.hear("n1", gpu("A", RUN, draw_mw=600_000))
        works(made, left)
        made.cycle()
        told.add(judged(made))
    assert len(told) == 1 and len(made.audits("deadline")) <= 2


# ------------------------------------------------------------------------------------------- minutes given back


def raising(
    lost_s: float = 80.0, left_s: float = HOUR_S, given_s: int | None = 0, *, on: bool = True, **record: Any
) -> tuple[Site, list[cs.RaiseTimeLimit]]:
    """A run that lost so much, and what is ordered for it."""
    made = site(compensate_time_limit=on)
    read(made, left_s, given_s)
    works(made, None, **record)
    tally = view(made).record.tally
    tally = msgspec.structs.replace(tally, work_done=RATE * (tally.work_s - lost_s))
    made.state = with_record(made.state, RUN, **{"tally": tally, **record})
    actions = made.cycle()
    return made, [one for one in actions if isinstance(one, cs.RaiseTimeLimit)]


def test_lost_time_is_given_back_once_caps_are_over() -> None:
    made, orders = raising()
    assert [(one.run, round(one.lost_s)) for one in orders] == [(RUN, 80)]
    assert view(made).raising
    assert not [one for one in made.cycle() if isinstance(one, cs.RaiseTimeLimit)], "it is with the worker"


@pytest.mark.parametrize(
    "changes",
    [
        {"on": False},
        {"lost_s": 50.0},
        {"lost_s": -400.0},
        {"given_s": 120},
        {"given_s": None},
        {"doubt": "it cannot be"},
        {"disputed": "its GPUs say otherwise"},
        {"unlikely": True},
        {"shared": True},
        {"reporting": False},
        {"levels": ()},
    ],
)
def test_nothing_is_given_for_what_is_not_owed_or_not_measured(changes: dict[str, Any]) -> None:
    assert raising(**changes)[1] == []


def test_while_caps_go_on_more_is_gathered_unless_the_end_is_near() -> None:
    def capped(lost_s: float, left_s: float) -> bool:
        return bool(raising(lost_s, left_s, capped_since_ns=1)[1])

    assert not capped(400, 10 * HOUR_S)
    assert capped(700, 10 * HOUR_S)
    assert capped(80, 500)
    assert capped(10, 100)


def answer(made: Site, **changes: Any) -> None:
    whole = cs.TimeLimitRaised(run=RUN, lost_s=80.0, given_s=0)
    made.tell(msgspec.structs.replace(whole, **changes))


def orders_after(made: Site, seconds: float) -> list[cs.Action]:
    made.wait(seconds)
    return [one for one in made.cycle() if isinstance(one, cs.RaiseTimeLimit)]


def test_a_raised_limit_is_told_and_its_end_is_later_at_once() -> None:
    made, _ = raising()
    before_ns = view(made).ends_ns
    answer(made, given_s=120, old_s=86_400, new_s=86_520)
    after = view(made)
    assert before_ns is not None and after.ends_ns == before_ns + 120 * S
    assert after.job is not None and after.job.limit_s == 86_520
    assert (after.given_s, after.raising) == (120, False)
    (told,) = made.audits("time_limit")
    assert told == {
        "run": str(RUN),
        "old_s": 86_400,
        "new_s": 86_520,
        "lost_s": 80.0,
        "given_s": 120,
        "why": "lost under caps",
    }
    assert words(made, "time_limit") == ["time limit raised from 1440 to 1442 min: caps have cost it 80 s"]
    assert orders_after(made, 700) == [], "all is given back"


def test_where_there_is_no_room_it_is_told_once_and_tried_again_seldom() -> None:
    made, _ = raising()
    for _ in range(3):
        answer(made, old_s=86_400, why="partition main allows 1440 min")
        assert orders_after(made, 300) == []
        assert len(orders_after(made, 301)) == 1
    assert words(made, "time_limit") == ["time limit not raised: partition main allows 1440 min"]


def test_without_an_answer_it_is_tried_again_soon() -> None:
    made, _ = raising()
    answer(made, why="slurmctld is down", again=True)
    assert len(orders_after(made, 31)) == 1


def test_an_answer_for_a_run_that_has_ended_is_still_told() -> None:
    made, _ = raising()
    gone = cs.TimeLimitRaised(run=Run("c", 9), lost_s=80.0, given_s=120, old_s=600, new_s=720)
    made.tell(gone)
    assert [one["run"] for one in made.audits("time_limit")] == ["c:9.0"]
