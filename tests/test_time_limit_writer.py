"""Raising a time limit in Slurm: nothing twice, nothing beyond what was lost, whatever fails between."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pfi.controller.state import RaiseTimeLimit, TimeLimitRaised
from slurm_pfi.controller.worker.time_limit_writer import TimeLimitWriter
from slurm_pfi.model import Run
from slurm_pfi.slurm.backend import JobGone, JobInfo, Special, Unavailable, Updated
from slurm_pfi.slurm.timelimit import Room
from slurm_pfi.store.given import KEEP_S, GivenStore
from slurm_pfi.store.sealed import UnreadableError, write_sealed

from .world import job_info

RUN = Run("c", 7)
START_S = 1_796_000_000
HOUR_S = 3600
FREE = Room(partition_s=Special.UNLIMITED, reservations=(), own="")
DOWN = Unavailable("slurmctld is down")


@dataclass
class Limits:
    """A Slurm with one job, for ways of failing that a real one cannot be told to.

    ``loses``: answers to a change that do not come though it was made; ``refuses``: changes that are not made, and of
    which no answer comes either; ``down``: no answer to any question.
    """

    limit_s: int = HOUR_S
    restart: int = 0
    room_: Room | Unavailable = FREE
    loses: int = 0
    refuses: int = 0
    down: bool = False
    ended: bool = False
    user_id: int | None = None
    writes: list[tuple[str, int]] = field(default_factory=list)

    async def job(self, job_id: int) -> JobInfo | JobGone | Unavailable:
        if self.down:
            return DOWN
        run = Run("c", job_id, self.restart)
        info = job_info(run, ("n1",), "main")
        return dataclasses.replace(
            info,
            user_id=info.user_id if self.user_id is None else self.user_id,
            array_job_id=5,
            array_task_id=2,
            start_unix_s=START_S,
            end_unix_s=START_S + self.limit_s,
            limit_s=self.limit_s,
        )

    async def room(self, job: JobInfo) -> Room | JobGone | Unavailable:
        return DOWN if self.down else self.room_

    async def set_time_limit(self, job_spec: str, limit_s: int) -> Updated | JobGone | Unavailable:
        if self.ended:
            return JobGone("Job has already finished")
        if self.refuses:
            self.refuses -= 1
            return DOWN
        self.writes.append((job_spec, limit_s))
        self.limit_s = limit_s
        if self.loses:
            self.loses -= 1
            return DOWN
        return Updated()


def store(folder: Path) -> GivenStore:
    made = GivenStore(folder / "time_given.json")
    made.load()
    return made


def give(slurm: Limits, folder: Path, lost_s: float, run: Run = RUN) -> TimeLimitRaised:
    """By a controller that has just started."""
    order = RaiseTimeLimit(run=run, job=job_info(run, ("n1",), "main"), lost_s=lost_s)
    return asyncio.run(TimeLimitWriter(slurm, store(folder)).raise_time_limit(order))


def test_lost_minutes_are_given_once_rounded_up_over_restarts_of_the_controller(tmp_path: Path) -> None:
    slurm = Limits()
    done = give(slurm, tmp_path, 80)
    assert (done.old_s, done.new_s, done.given_s, done.again) == (HOUR_S, HOUR_S + 120, 120, False)
    assert slurm.writes == [("5_2", HOUR_S + 120)], "an array's task by its own name"
    again = give(slurm, tmp_path, 110)
    assert (again.new_s, again.given_s, again.why) == (None, 120, "")
    more = give(slurm, tmp_path, 200)
    assert (more.old_s, more.new_s, more.given_s) == (HOUR_S + 120, HOUR_S + 240, 240)
    assert len(slurm.writes) == 2


def test_what_the_user_or_an_admin_set_since_is_where_it_goes_on_from(tmp_path: Path) -> None:
    slurm = Limits()
    give(slurm, tmp_path, 60)
    slurm.limit_s = 7200
    assert give(slurm, tmp_path, 120).new_s == 7260


@pytest.mark.parametrize("made", [True, False])
def test_an_answer_that_does_not_come_is_no_second_gift(tmp_path: Path, made: bool) -> None:
    slurm = Limits(loses=1) if made else Limits(refuses=1)
    lost = give(slurm, tmp_path, 80)
    assert (lost.new_s, lost.again, lost.given_s) == (None, True, 120), "it may have been made"
    found = give(slurm, tmp_path, 80)
    assert slurm.limit_s == HOUR_S + 120 and found.given_s == 120
    assert found.new_s == (None if made else HOUR_S + 120)


def test_a_change_by_somebody_else_meanwhile_counts_as_made(tmp_path: Path) -> None:
    slurm = Limits(refuses=1)
    give(slurm, tmp_path, 80)
    slurm.limit_s = 2 * HOUR_S
    assert give(slurm, tmp_path, 80).new_s is None
    assert slurm.limit_s == 2 * HOUR_S


def test_a_job_that_has_ended_was_given_nothing(tmp_path: Path) -> None:
    done = give(Limits(ended=True), tmp_path, 80)
    assert (done.new_s, done.given_s, done.again) == (None, 0, False)
    assert store(tmp_path).under_way(RUN) is None


@pytest.mark.parametrize(
    ("slurm", "again", "why"),
    [
        (Limits(down=True), True, "slurmctld is down"),
        (Limits(room_=DOWN), True, "slurmctld is down"),
        (Limits(room_=Room(HOUR_S, (), "")), False, "partition main allows 60 min"),
        (Limits(restart=1), False, "Slurm runs restart 1 of it"),
        (Limits(user_id=31_337), False, "Slurm has a job of another user under its id"),
    ],
)
def test_without_room_or_an_answer_nothing_is_changed(
    tmp_path: Path, slurm: Limits, again: bool, why: str
) -> None:
    done = give(slurm, tmp_path, 80)
    assert (done.new_s, done.given_s, done.again, done.why) == (None, 0, again, why)
    assert slurm.writes == []


def test_a_requeued_run_still_has_what_its_job_was_given_before(tmp_path: Path) -> None:
    slurm = Limits()
    give(slurm, tmp_path, 60)
    slurm.restart = 1
    after = Run("c", 7, 1)
    assert store(tmp_path).of(after) == 60
    assert give(slurm, tmp_path, 30, after).new_s is None
    assert give(slurm, tmp_path, 90, after).new_s == HOUR_S + 120
    assert (store(tmp_path).of(RUN), store(tmp_path).of(after)) == (60, 120)


def test_what_cannot_be_put_on_record_is_not_done(tmp_path: Path) -> None:
    slurm = Limits()
    writer = TimeLimitWriter(slurm, GivenStore(tmp_path / "missing" / "time_given.json"))
    order = RaiseTimeLimit(run=RUN, job=job_info(RUN, ("n1",), "main"), lost_s=80)
    done = asyncio.run(writer.raise_time_limit(order))
    assert done.new_s is None and done.given_s is None and slurm.writes == []
    known = GivenStore(tmp_path / "missing" / "time_given.json")
    known.load()
    done = asyncio.run(TimeLimitWriter(slurm, known).raise_time_limit(order))
    assert done.new_s is None and done.again and "cannot be put on record" in done.why and slurm.writes == []


def test_no_plan_waits_for_the_disk_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def write(path: Path, body: object, *, mode: int) -> None:
        threads.append(threading.current_thread())
        write_sealed(path, body, mode=mode)

    monkeypatch.setattr("slurm_pfi.store.given.write_sealed", write)
    assert give(Limits(loses=1), tmp_path, 80).again
    assert give(Limits(), tmp_path, 80).new_s == HOUR_S + 120
    assert len(threads) == 4, "begun; then found not to be made, begun again and ended"
    assert threading.main_thread() not in threads


def test_a_damaged_record_gives_nothing(tmp_path: Path) -> None:
    give(Limits(), tmp_path, 80)
    path = tmp_path / "time_given.json"
    path.write_text(path.read_text().replace('"given_s":120', '"given_s":60'))
    damaged = GivenStore(path)
    with pytest.raises(UnreadableError, match="damaged"):
        damaged.load()
    assert damaged.of(RUN) is None
    order = RaiseTimeLimit(run=RUN, job=job_info(RUN, ("n1",), "main"), lost_s=800)
    slurm = Limits()
    done = asyncio.run(TimeLimitWriter(slurm, damaged).raise_time_limit(order))
    assert done.new_s is None and done.given_s is None and slurm.writes == []


def test_runs_long_gone_are_forgotten(tmp_path: Path) -> None:
    made = store(tmp_path)
    old, alive, new = Run("c", 1), Run("c", 2), Run("c", 3)
    for run, at_s in ((old, 0.0), (alive, 0.0), (new, KEEP_S + 1)):
        made.begin(run, 600, 660, at_s, lambda run: run == alive)
        made.end(run, done=True)
    kept = store(tmp_path)
    assert [kept.of(run) for run in (old, alive, new)] == [0, 60, 60]


@given(
    steps=st.lists(
        st.tuples(
            st.floats(0, 5000),
            st.sampled_from(["well", "loses", "refuses", "down", "full", "raised", "lowered"]),
        ),
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_never_more_than_was_lost_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, str]]
) -> None:
    folder = tmp_path_factory.mktemp("given")
    begin_s = 1000 * HOUR_S
    slurm, lost_s, others_s = Limits(begin_s), 0.0, 0
    for more_s, what in steps:
        lost_s += more_s
        slurm.loses, slurm.refuses, slurm.down = int(what == "loses"), int(what == "refuses"), what == "down"
        slurm.room_ = Room(slurm.limit_s + 60, (), "") if what == "full" else FREE
        changed_s = {"raised": 600, "lowered": -20 * HOUR_S}.get(what, 0)
        slurm.limit_s += changed_s
        others_s += changed_s
        before_s = slurm.limit_s
        give(slurm, folder, lost_s)
        assert slurm.limit_s >= before_s
        assert slurm.limit_s - begin_s - others_s <= lost_s + 60
