"""SIGKILL at any instant leaves no cap behind, lifts none early and loses no prior limit.

A failure prints its seed; ``python -m bench.chaos --seed N --kills 100`` draws the same again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from testbed.chaos import calls, run
from testbed.chaos.judge import judge, judge_journal, judge_rest
from testbed.chaos.node import ChaosError, Persistence
from testbed.chaos.record import Heard, Job, Order, Record, Step

SEED = 20261130
S = 1_000_000_000
pytestmark = pytest.mark.timeout(900)  # judged by the order of events: on a busy machine it may take long


@pytest.mark.cluster
def test_a_hundred_kills_leave_no_cap_behind_and_lift_none_early(tmp_path: Path) -> None:
    outcome = run.run(tmp_path, seed=SEED, kills=100, nodes=4)
    assert outcome.violations == [], f"seed {SEED}"
    assert outcome.kills >= 100 and outcome.journal_entries == 0
    assert {"agent", "child"} <= set(outcome.what) and outcome.rises > 20
    assert {"set", "plan_accepted"} <= set(outcome.after), "kills hit sets under way and plans just taken"


@pytest.mark.cluster
def test_killed_at_its_own_writes_the_agent_leaves_nothing_behind(tmp_path: Path) -> None:
    killed = calls.run(tmp_path, most=8)
    assert killed.violations == []
    assert sum(killed.kills.values()) >= 7, killed
    assert {"window: fsync", "window: renameat"} <= set(killed.kills), killed.kills


@pytest.mark.cluster
@pytest.mark.parametrize(("persistence", "kills"), [("held", 6), ("off", 16)])
def test_without_persistence_mode_the_default_is_counted_and_doctor_says_so(
    tmp_path: Path, persistence: Persistence, kills: int
) -> None:
    outcome = run.run(tmp_path, seed=SEED, kills=kills, nodes=2, persistence=persistence)
    assert outcome.violations == [], f"seed {SEED}"
    assert "persistence mode is off on 4 GPUs" in outcome.doctor
    assert (outcome.fallen > 0) == (persistence == "off")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "strace is not installed"),
        ("echo 'strace: ptrace: Operation not permitted' >&2; exit 1", "ptrace is not allowed here"),
    ],
)
def test_where_nothing_can_be_traced_it_fails_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
) -> None:
    if script is not None:
        (tmp_path / "strace").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "strace").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ChaosError, match=said):
        calls.run(tmp_path)


# ------------------------------------------------------------------------------------- the judge is no pushover


CLOSED = Step(0, None, {})
WINDOW = Step(0, 200_000, {7: 400_000})


class Told:
    """A node's story as it could have been written down: one GPU, prior 650 W, instants in seconds."""

    def __init__(self, folder: Path) -> None:
        self.record = Record("n1", folder, folder, {"GPU-a": 650_000}, effect_ns=0)
        self.record.spawns_ns.append(S)
        self.folder = folder
        self.audit("started", 1)
        (folder / "trace.jsonl").touch()

    def audit(self, event: str, at_s: float, **fields: object) -> None:
        with (self.folder / "audit.jsonl").open("a") as file:
            file.write(json.dumps({"mono_ns": round(at_s * S), "event": event, **fields}) + "\n")

    def plan(self, seq: int, at_s: float, *steps: Step) -> Told:
        self.record.orders.append(Order(seq, round(at_s * S), steps))
        self.audit("plan_accepted", at_s + 0.001, epoch=1, seq=seq)
        return self

    def limit(self, at_s: float, mw: int) -> Told:
        line = {"mono_ns": round(at_s * S), "event": "limit", "uuid": "GPU-a", "effective_mw": mw, "pid": 1}
        with (self.folder / "trace.jsonl").open("a") as file:
            file.write(json.dumps({**line, "requested_mw": mw}) + "\n")
        return self

    def heard(self, at_s: float, seq: int | None, ceiling_mw: int | None) -> Told:
        self.record.heard.append(Heard(round(at_s * S), seq, {"GPU-a": ceiling_mw}))
        return self

    def entry(self, **changes: object) -> Told:
        raw = {"uuid": "GPU-a", "prior_mw": 650_000, "issued_mw": [200_000], "current_mw": 200_000, **changes}
        text = json.dumps(raw)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        (self.folder / "journal").mkdir(exist_ok=True)
        (self.folder / "journal" / "GPU-a.json").write_text(f'{{"entry":{text},"sha256":"{sha256}"}}')
        return self

    def kinds(self) -> list[str]:
        return [violation.kind for violation in judge(self.record)]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_a_window_that_was_ordered_and_ended_is_no_violation(told: Told) -> None:
    told.plan(1, 2, WINDOW).limit(2.1, 200_000).heard(2.2, 1, 200_000)
    told.plan(2, 3, CLOSED).limit(3.1, 650_000).heard(3.2, 2, 650_000)
    assert told.kinds() == []


def test_a_rise_inside_the_window_is_found(told: Told) -> None:
    told.plan(1, 2, WINDOW).limit(2.1, 200_000).heard(2.2, 1, 200_000).limit(2.5, 650_000)
    assert told.kinds() == ["lifted_early"]


def test_a_plan_left_behind_excuses_nothing(told: Told) -> None:
    told.plan(1, 2, CLOSED).plan(2, 3, WINDOW).limit(3.1, 200_000)
    told.limit(3.2, 650_000).limit(3.25, 200_000)
    assert told.kinds() == [], "one set was on its way when the next plan came"
    told.heard(3.3, 2, 200_000).limit(3.4, 650_000)
    assert told.kinds() == ["lifted_early"]


def test_a_run_lifts_its_gpu_as_far_as_its_cap_while_it_is_there(told: Told) -> None:
    told.record.jobs.append(Job(7, ("GPU-a",), 2 * S, 4 * S))
    told.plan(1, 2, WINDOW).limit(2.1, 200_000).limit(2.2, 400_000).limit(2.3, 410_000).limit(2.4, 200_000)
    assert told.kinds() == ["lifted_early"]
    told.limit(20, 400_000)
    assert told.kinds() == ["lifted_early"] * 2


def test_a_known_end_lifts_at_that_instant_and_not_before(told: Told) -> None:
    told.plan(1, 2, WINDOW, Step(5 * S, None, {})).limit(2.1, 200_000).limit(6.9, 650_000)
    assert told.kinds() == ["lifted_early"]
    told.limit(6.95, 200_000).limit(7.1, 650_000)
    assert told.kinds() == ["lifted_early"]


def test_an_agent_that_was_started_later_raises_nothing_by_an_older_plan(told: Told) -> None:
    told.record.jobs.append(Job(7, ("GPU-a",), 2 * S))
    told.plan(1, 2, WINDOW).limit(2.1, 200_000)
    told.record.spawns_ns.append(3 * S)
    told.limit(3.5, 400_000)
    assert told.kinds() == ["unasked"]


def test_above_the_prior_limit_nothing_is_right(told: Told) -> None:
    told.plan(1, 2, WINDOW).limit(2.1, 200_000).plan(2, 3, CLOSED).limit(3.1, 700_000)
    assert told.kinds() == ["above_prior"]


def test_a_promise_that_the_trace_belies_is_found(told: Told) -> None:
    told.plan(1, 2, WINDOW).heard(2.2, 1, 200_000).limit(2.3, 200_000)
    assert told.kinds() == ["false_promise"]


def test_without_persistence_mode_a_ceiling_below_the_default_is_a_false_promise(told: Told) -> None:
    told.record.falls = True
    told.plan(1, 2, WINDOW).limit(2.1, 200_000).heard(2.2, 1, 650_000).heard(2.3, 1, 200_000)
    assert told.kinds() == ["false_promise"]


def test_our_own_cap_as_a_prior_limit_is_found(told: Told) -> None:
    told.audit("prior", 2, uuid="GPU-a", prior_mw=200_000, how="read")
    assert told.kinds() == ["ratchet"]
    found = judge_journal(told.entry(prior_mw=200_000).record, {"GPU-a": 200_000}, 0)
    assert [violation.kind for violation in found] == ["ratchet"]


@pytest.mark.parametrize("changes", [{"current_mw": None}, {"issued_mw": []}])
def test_a_limit_of_ours_that_is_not_written_down_is_found(told: Told, changes: dict[str, object]) -> None:
    assert judge_journal(told.entry().record, {"GPU-a": 200_000}, 0) == []
    found = judge_journal(told.entry(**changes).record, {"GPU-a": 200_000}, 0)
    assert [violation.kind for violation in found] == ["journal"]
    assert judge_journal(told.record, {"GPU-a": 650_000}, 0) == []


def test_an_entry_that_still_holds_a_cap_or_is_cut_is_found(told: Told) -> None:
    assert [violation.kind for violation in judge_rest(told.entry().record, [], 0)] == ["journal"]
    path = told.folder / "journal" / "GPU-a.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert [violation.kind for violation in judge_rest(told.record, [], 0)] == ["journal"]
