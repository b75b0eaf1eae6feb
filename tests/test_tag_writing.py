"""Tags on their way into Slurm: what is kept of others, how fast they go, and what comes of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.cli.status import tag_lines
from slurm_pfi.config import Config, TagSection
from slurm_pfi.controller.state import Event, TagWritten, WriteTag
from slurm_pfi.controller.worker.pace import FIRST_PAUSE_S, MOST_PAUSE_S, SLOW_S, Pace
from slurm_pfi.controller.worker.slurm_worker import SlurmWorker
from slurm_pfi.model import Run
from slurm_pfi.slurm.backend import JobGone, Unavailable
from slurm_pfi.slurm.tag import find_tag, format_tag
from slurm_pfi.slurm.tagwrite import TagWrite, write_tag

from .slurm_memory import SlurmInMemory, VirtualLoop
from .slurm_samples import BARE_TAG, slurm_job

TAG = replace(BARE_TAG, loss=0.01, energy_wh=-40, capped_s=300.0)
RATE_PER_S = 20.0
JS1 = "JS1:H4sIAAAAAAACA6tWSi8oLVayUjDSUVDKy09JBbGrlfIMwVQyRM6ktrYWAG0MhPMpAAAA"


# ---------------------------------------------------------------------------------------------- one write


def put(slurm: SlurmInMemory, known: str | None = None, *, restart: int = 0, job_id: int = 1) -> TagWrite:
    return asyncio.run(write_tag(slurm, slurm_job(job_id, restart=restart), TAG, known))


def test_a_text_that_reads_the_same_in_two_ways_is_kept_and_looked_at_twice_only_once() -> None:
    slurm = SlurmInMemory(texts={1: JS1})
    first = put(slurm)
    assert first == TagWrite("written")
    assert slurm.texts[1] == f"{JS1} {format_tag(TAG)}" == first.text
    slurm.texts[1] = slurm.texts[1].replace("loss=1.0%", "loss=2.0%")
    put(slurm, known=slurm.texts[1])
    assert slurm.confirmed == 1
    slurm.texts[1] += " more"
    put(slurm, known=first.text)
    assert slurm.confirmed == 2
    assert slurm.texts[1] == f"{JS1} more {format_tag(TAG)}"


@pytest.mark.parametrize(
    "loss",
    [
        lambda text: text.replace("\n", " "),
        lambda text: text[:64],
        lambda text: text.encode("ascii", "replace").decode(),
    ],
    ids=["newline", "cut", "not ASCII"],
)
def test_text_that_does_not_survive_reading_is_never_rewritten(loss: Callable[[str], str]) -> None:
    text = "note: ключ\nsecond line " + "x" * 100
    slurm = SlurmInMemory(texts={1: text}, loss=loss)
    done = put(slurm)
    assert done.outcome == "not_rewritable"
    assert "reads differently" in done.why
    assert slurm.writes == []
    assert slurm.texts[1] == text


def test_another_writer_right_behind_us_is_seen_and_stays() -> None:
    slurm = SlurmInMemory(texts={1: ""}, rival=lambda _ours: JS1)
    done = put(slurm)
    assert (done.outcome, slurm.texts[1]) == ("raced", JS1)


def test_a_text_that_is_changed_while_it_is_read_is_no_text_that_cannot_be_kept() -> None:
    class Changing(SlurmInMemory):
        async def confirms_comment(self, job_spec: str, text: str) -> bool | JobGone | Unavailable:
            self.texts[1] += "!"
            return await super().confirms_comment(job_spec, text)

    slurm = Changing(texts={1: "note"})
    assert put(slurm).outcome == "raced"
    assert (slurm.writes, slurm.texts[1]) == ([], "note!")


def test_a_job_that_was_requeued_meanwhile_does_not_get_the_old_runs_tag() -> None:
    slurm = SlurmInMemory(texts={1: "note"}, restarts={1: 1})
    assert put(slurm, restart=0).outcome == "gone"
    assert slurm.writes == []
    assert put(slurm, restart=1).outcome == "written"


def test_the_same_tag_is_not_written_twice() -> None:
    slurm = SlurmInMemory(texts={1: f"note {format_tag(TAG)}"})
    assert put(slurm) == TagWrite("written")
    assert slurm.writes == []


# ---------------------------------------------------------------------------------------------- the pace


@given(
    st.lists(st.tuples(st.floats(0, 20), st.booleans(), st.floats(0, 1)), max_size=60), st.floats(0.1, 1000)
)
def test_writes_never_come_faster_than_the_rate_whatever_happened(
    writes: list[tuple[float, bool, float]], rate_per_s: float
) -> None:
    pace, began = Pace(rate_per_s), []
    for took_s, ok, chance in writes:
        began.append(pace.next_s)
        pace = pace.after(pace.next_s, pace.next_s + took_s, ok=ok, chance=chance)
        assert pace.next_s - began[-1] <= max(1 / rate_per_s, took_s + MOST_PAUSE_S) * (1 + 1e-9)
    for first, second in pairwise(began):
        assert second - first >= 1 / rate_per_s * (1 - 1e-9)


def test_each_failure_doubles_the_pause_and_one_good_quick_write_ends_it() -> None:
    pace, pauses = Pace(RATE_PER_S), []
    for _ in range(12):
        began_s = pace.next_s
        pace = pace.after(began_s, began_s, ok=False, chance=1.0)
        pauses.append(pace.next_s - began_s)
    assert pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == MOST_PAUSE_S
    good = pace.after(pace.next_s, pace.next_s + 0.01, ok=True, chance=1.0)
    assert good.next_s == pytest.approx(pace.next_s + 1 / RATE_PER_S)


def test_slurmctld_is_left_alone_for_as_long_as_the_last_write_took() -> None:
    assert Pace(RATE_PER_S).after(0.0, 0.5, ok=True, chance=0.0) == Pace(RATE_PER_S, next_s=1.0)


def test_a_slow_slurmctld_is_spared_like_one_that_fails_and_chance_spreads_the_pauses() -> None:
    slow_s, pace = SLOW_S * 1.5, Pace(RATE_PER_S, strained=4)
    pauses = [pace.after(0, slow_s, ok=True, chance=chance).next_s - slow_s for chance in (0.0, 1.0)]
    assert pauses == [FIRST_PAUSE_S * 8, FIRST_PAUSE_S * 16]


# ---------------------------------------------------------------------------------------------- many runs


@dataclass
class Rig:
    """A worker over a Slurm in memory, in virtual time. ``ended``: runs that are over."""

    slurm: SlurmInMemory
    ended: set[int] = field(default_factory=set)
    told: list[TagWritten] = field(default_factory=list)

    def play(self, story: Callable[[SlurmWorker], Coroutine[Any, Any, None]]) -> SlurmWorker:
        """Let the story happen while the worker works."""
        loop = VirtualLoop()
        config = Config(cluster="c", tag=TagSection(max_writes_per_s=RATE_PER_S))
        worker = SlurmWorker(
            self.slurm,
            config,
            self._take,
            is_alive=lambda run: run.job_id not in self.ended,
            clock=loop.time,
            chance=lambda: 1.0,
        )

        async def scenario() -> None:
            working = asyncio.create_task(worker.run())
            await story(worker)
            working.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(working, 1.0)

        try:
            loop.run_until_complete(scenario())
        finally:
            loop.close()
        return worker

    def _take(self, event: Event) -> None:
        assert isinstance(event, TagWritten)
        self.told.append(event)


def order(job_id: int, loss: float = 0.0) -> WriteTag:
    tag = replace(TAG, loss=loss)
    return WriteTag(run=Run(cluster="c", job_id=job_id, restart=0), job=slurm_job(job_id), tag=tag)


def test_a_backlog_never_bursts_beyond_the_rate_when_slurmctld_comes_back() -> None:
    rig = Rig(SlurmInMemory(texts=dict.fromkeys(range(1, 401), "note"), takes_s=0.002, down=True))
    back_s: list[float] = []

    async def story(worker: SlurmWorker) -> None:
        for job_id in rig.slurm.texts:
            worker.write_tag(order(job_id))
        await asyncio.sleep(600)
        assert rig.slurm.calls < 60, "ten minutes of outage cost slurmctld a few questions"
        assert worker.tag_view()["trouble"] == "slurmctld is down"
        assert 0 < worker.tag_view()["retry_in_s"] <= MOST_PAUSE_S
        rig.slurm.down = False
        back_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(120)

    worker = rig.play(story)
    at_s = [written_s for written_s, _, _ in rig.slurm.writes]
    failed = worker.tag_view()["unavailable"]
    assert at_s[0] - back_s[0] <= MOST_PAUSE_S + 1
    assert len(at_s) == 400 - failed, "those that failed are the core's to ask for again"
    for first in range(len(at_s)):
        within = [one for one in at_s[first:] if one < at_s[first] + 1 - 1e-6]
        assert len(within) <= RATE_PER_S
    assert at_s[-1] - at_s[0] < 400 / RATE_PER_S + 2, "and it does go at the rate"
    assert (worker.tag_view()["waiting"], worker.tag_view()["trouble"]) == (0, "")
    assert sum(not event.ok for event in rig.told) == failed


def test_the_newest_tag_of_a_run_wins_and_a_run_that_ended_is_dropped() -> None:
    rig = Rig(SlurmInMemory(texts=dict.fromkeys((1, 2, 3), ""), down=True))

    async def story(worker: SlurmWorker) -> None:
        worker.write_tag(order(1))
        await asyncio.sleep(0.1)  # its failure makes the others wait
        for loss in (0.01, 0.02, 0.03):
            worker.write_tag(order(2, loss))
            worker.write_tag(order(3, loss))
        rig.ended.add(3)
        rig.slurm.down = False
        await asyncio.sleep(60)

    worker = rig.play(story)
    written = {job_id: find_tag(text) for _, job_id, text in rig.slurm.writes}
    assert [job_id for _, job_id, _ in rig.slurm.writes] == [2]
    assert written[2] is not None
    assert written[2].loss == 0.03
    counts = worker.tag_view()
    assert (counts["written"], counts["unavailable"], counts["gone"]) == (1, 1, 1)
    assert [event.run.job_id for event in rig.told] == [1, 2]


def test_one_job_whose_tag_is_refused_does_not_hold_up_the_others() -> None:
    rig = Rig(SlurmInMemory(texts=dict.fromkeys(range(1, 101), ""), refused={1}))

    async def story(worker: SlurmWorker) -> None:
        for job_id in rig.slurm.texts:
            worker.write_tag(order(job_id))
        await asyncio.sleep(100 / RATE_PER_S + 2)

    worker = rig.play(story)
    assert worker.tag_view()["written"] == 99
    assert rig.told[0].trouble == "unavailable: Access/permission denied"
    assert not rig.told[0].ok


def test_a_new_rate_holds_from_the_next_write_on() -> None:
    rig = Rig(SlurmInMemory(texts=dict.fromkeys(range(1, 101), "")))

    async def story(worker: SlurmWorker) -> None:
        worker.set_rate(1.0)
        for job_id in rig.slurm.texts:
            worker.write_tag(order(job_id))
        await asyncio.sleep(10.5)

    rig.play(story)
    assert len(rig.slurm.writes) == 11


def test_shutdown_does_not_wait_for_a_slurmctld_that_hangs() -> None:
    rig = Rig(SlurmInMemory(texts={1: ""}, takes_s=1e6))

    async def story(worker: SlurmWorker) -> None:
        worker.write_tag(order(1))
        await asyncio.sleep(5)

    rig.play(story)  # it asserts that the worker ends within a second
    assert (rig.told, rig.slurm.calls) == ([], 1)


# ---------------------------------------------------------------------------------------------- told


def test_status_tells_of_tags_only_what_is_not_as_it_should_be() -> None:
    fine = {"written": 1234, "raced": 0, "not_rewritable": 0, "gone": 7, "unavailable": 0}
    idle = {"waiting": 0, "retry_in_s": None, "trouble": ""}
    assert tag_lines(None) == tag_lines({**fine, **idle}) == []
    assert tag_lines({**fine, **idle, "raced": 3, "unavailable": 2}) == [
        "tags: 1,234 written, 3 overwritten by others at once, 2 tries failed"
    ]
    stuck = {"unavailable": 1, "waiting": 12, "retry_in_s": 7.6, "trouble": "no answer"}
    assert tag_lines({**fine, **stuck})[1] == "tags cannot be written: 12 wait, next try in 8 s: no answer"
