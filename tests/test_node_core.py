"""The node agent's core, one rule at a time."""

from __future__ import annotations

import msgspec
import pytest

from slurm_pfi.gpu.device import DeadlineError, LibraryGoneError, LostError, PermissionDeniedError
from slurm_pfi.gpu.journal import JournalEntry
from slurm_pfi.model import PlanId, PlanStep, Run
from slurm_pfi.node import messages as m
from slurm_pfi.node.core import next_deadline_ns, step
from slurm_pfi.node.limits import Rest, Set, Wanted, decide, first_sight
from slurm_pfi.node.state import ceiling_mw
from tests.node_world import BOOT, MS, S, World, now, window_step

ALL = (700_000, 700_000, 700_000)


def entry(uuid: str, **changes: object) -> JournalEntry:
    made = JournalEntry(
        uuid=uuid,
        prior_mw=650_000,
        issued_mw=(300_000,),
        current_mw=300_000,
        run="",
        boot_id=BOOT,
        driver_start="d1",
        how="read",
    )
    return msgspec.structs.replace(made, **changes)


def test_without_a_plan_nothing_is_touched() -> None:
    world = World().start()
    world.begin_job(1, 0)
    world.advance(60 * S)
    assert world.devices.sets == []
    assert [gpu.prior_mw for gpu in world.reports[-1].gpus] == list(ALL)


def test_a_window_parks_what_has_no_run_and_caps_what_has_one() -> None:
    world = World().start()
    one, free = world.begin_job(1, 0), world.begin_job(2, 1)
    assert world.window(200_000, {one: 450_000, free: None})
    assert world.requested() == [450_000, 700_000, 200_000]
    world.begin_job(3, 2)
    world.advance(S)
    assert world.requested()[2] == 200_000, "a job that starts in the window is capped until it is admitted"


def test_a_job_file_that_was_written_again_counts_as_it_is_now() -> None:
    world = World().start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 450_000})
    assert world.begin_job(1, 1) == run
    world.advance(S)
    assert world.requested() == [200_000, 450_000, 200_000]
    assert len(world.said("run_seen")) == 2
    world.read_jobs()
    assert len(world.said("run_seen")) == 2, "the same again is no news"


def test_the_end_of_a_job_inside_the_window_parks_its_gpu() -> None:
    world = World().start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 450_000})
    world.end_job(run)
    assert world.requested()[0] == 200_000


def test_a_shared_board_takes_the_highest_of_its_runs() -> None:
    world = World().start()
    low, high = world.begin_job(1, 0), world.begin_job(2, 0)
    world.window(200_000, {low: 300_000, high: 500_000})
    assert world.requested()[0] == 500_000


def test_the_audit_record_and_the_journal_come_before_the_set() -> None:
    world = World(1).start()
    world.order.clear()
    world.window(200_000)
    world.advance(S)
    assert world.order.index("Audit") < world.order.index("WriteJournal") < world.order.index("SetLimit")
    kinds = [event for event, _ in world.audit]
    assert kinds.index("set") < kinds.index("readback")


def test_without_a_journal_nothing_is_set_and_later_it_is() -> None:
    world = World().start()
    world.journal_fails = True
    world.window(200_000)
    assert world.devices.sets == []
    assert len(world.said("set_failed")) == 3
    world.journal_fails = False
    world.advance(S)
    assert world.requested() == [200_000] * 3


def test_lowerings_are_in_force_before_anything_is_raised() -> None:
    world = World().start()
    a, b = world.begin_job(1, 0), world.begin_job(2, 1)
    world.window(200_000, {a: 600_000, b: 200_000})
    world.advance(S)
    world.devices.effect_delay_ns = 200 * MS
    world.window(200_000, {a: 300_000, b: 500_000})
    assert world.requested()[:2] == [300_000, 200_000]
    world.advance(150 * MS)
    assert world.requested()[1] == 200_000
    world.advance(200 * MS)
    assert world.requested()[1] == 500_000


def test_a_lowering_that_fails_holds_nobody_up_for_long() -> None:
    world = World().start()
    a, b = world.begin_job(1, 0), world.begin_job(2, 1)
    world.window(200_000, {a: 600_000, b: 300_000})
    world.advance(S)
    world.devices.fail("set", PermissionDeniedError("no", uuid="GPU-0"))
    world.window(200_000, {a: 300_000, b: 500_000})
    world.advance(S)
    assert world.requested()[:2] == [600_000, 500_000]
    assert "cannot be set" in world.reports[-1].gpus[0].fault
    assert world.reports[-1].gpus[0].ceiling_mw == 600_000


def test_the_ceiling_counts_what_is_under_way() -> None:
    world = World(2, instant=False).start()
    world.answer_all()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 450_000})
    world.advance(20 * MS)
    assert [gpu.ceiling_mw for gpu in world.reports[-1].gpus] == [700_000, 700_000]
    world.devices.effect_delay_ns = 100 * MS
    world.answer_all()
    world.advance(20 * MS)
    assert [gpu.ceiling_mw for gpu in world.reports[-1].gpus] == [700_000, 700_000]
    world.instant = True
    world.answer_all()
    world.advance(200 * MS)
    assert [gpu.ceiling_mw for gpu in world.reports[-1].gpus] == [450_000, 200_000]


def test_an_acknowledgement_comes_as_soon_as_the_limit_is_in_force() -> None:
    world = World().start()
    world.devices.effect_delay_ns = 120 * MS
    world.window(200_000)
    begun_ns = world.now_ns
    while world.reports[-1].gpus[0].ceiling_mw != 200_000:
        world.advance(10 * MS)
        assert world.now_ns - begun_ns < 250 * MS
    assert len(world.said("readback")) == 3


def test_a_lowering_that_overtakes_a_raise_is_acknowledged_only_when_that_cannot_come_any_more() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 300_000})
    world.advance(S)
    world.devices.effect_delay_ns = 300 * MS
    world.window(200_000, {run: 600_000})
    world.advance(50 * MS)
    world.window(200_000, {run: 300_000})
    count = len(world.said("readback"))
    world.advance(200 * MS)
    assert world.devices.gpus["GPU-0"].enforced_mw == 300_000
    assert world.reports[-1].gpus[0].ceiling_mw == 600_000 and len(world.said("readback")) == count
    world.advance(70 * MS)
    assert world.devices.gpus["GPU-0"].enforced_mw == 600_000, (
        "limits come into force in the order of their sets"
    )
    world.advance(3 * S)
    assert world.reports[-1].gpus[0].ceiling_mw == 300_000
    assert len(world.said("readback")) == count + 1


def test_a_lowering_to_a_new_value_that_overtakes_a_raise_is_acknowledged_once_it_is_in_force() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 300_000})
    world.advance(S)
    world.devices.effect_delay_ns = 300 * MS
    world.window(200_000, {run: 600_000})
    world.advance(50 * MS)
    world.window(200_000, {run: 400_000})
    world.advance(200 * MS)
    assert world.reports[-1].gpus[0].ceiling_mw == 600_000
    world.advance(200 * MS)
    assert world.devices.gpus["GPU-0"].enforced_mw == 400_000
    assert world.reports[-1].gpus[0].ceiling_mw == 400_000, "the raise came before it"


def test_of_three_overtaking_sets_a_value_seen_before_acknowledges_nothing() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 300_000})
    world.advance(S)
    world.devices.effect_delay_ns = 300 * MS
    for cap_mw in (400_000, 600_000, 400_000):
        world.window(200_000, {run: cap_mw})
        world.advance(40 * MS)
    world.advance(200 * MS)
    assert world.devices.gpus["GPU-0"].enforced_mw == 400_000, "that of the first"
    assert world.reports[-1].gpus[0].ceiling_mw == 600_000


def test_a_lowering_that_does_not_come_into_force_is_a_fault() -> None:
    world = World(1).start()
    world.devices.effect_delay_ns = 10 * S
    world.window(200_000)
    world.advance(3 * S)
    assert "still enforced" in world.reports[-1].gpus[0].fault
    assert world.said("readback") == []
    world.advance(10 * S)
    assert world.reports[-1].gpus[0].fault == ""
    assert len(world.said("readback")) == 1


def test_the_schedule_goes_on_without_a_controller() -> None:
    world = World().start()
    run = world.begin_job(1, 0)
    world.send(
        world.make_plan(
            window_step(300_000, {run: 500_000}),
            window_step(200_000, {run: 400_000}, 5.0),
            window_step(None, {}, 9.0),
        )
    )
    world.event(m.Connected(up=False))
    assert world.requested() == [500_000, 300_000, 300_000]
    world.advance(5 * S)
    assert world.requested() == [400_000, 200_000, 200_000]
    world.advance(4 * S)
    assert world.requested() == list(ALL)
    assert all(isinstance(e, JournalEntry) and e.current_mw is None for e in world.journal.values())


@pytest.mark.parametrize(("orphan", "left"), [("hold", 200_000), ("release", 700_000)])
def test_the_end_of_a_lease_is_taken_only_where_the_site_says_so(orphan: str, left: int) -> None:
    world = World(1, on_orphan="hold" if orphan == "hold" else "release").start()
    world.send(world.make_plan(window_step(200_000), window_step(None, {}, 60.0, lease=True)))
    world.advance(20 * MS)
    ends = world.reports[-1].window_ends_in_s
    assert (ends is None) == (orphan == "hold")
    world.advance(100 * S)
    assert world.requested() == [left]


# ------------------------------------------------------------------------------------------------- plans


def test_plans_that_are_not_ours_fresh_and_sound_change_nothing() -> None:
    world = World().start()
    run = world.begin_job(1, 0)
    world.advance(S)
    assert world.window(200_000, {run: 400_000}, id=PlanId(5, 10))
    world.advance(2 * S)
    good = world.make_plan(window_step(300_000), id=PlanId(5, 20))
    held = world.state.held
    assert held is not None
    answers = good.answers
    too_old = msgspec.structs.replace(answers, seq=held.plan.answers.seq - 1)
    bad: dict[str, dict[str, object]] = {
        "this is c/n1": {"node": "n2"},
        "is for d": {"cluster": "d"},
        "behind 5": {"id": PlanId(4, 99)},
        "held already": {"id": PlanId(5, 10)},
        "another boot": {"answers": msgspec.structs.replace(answers, boot_id="other")},
        "another agent": {"answers": msgspec.structs.replace(answers, agent_id="other")},
        "never sent": {"answers": msgspec.structs.replace(answers, seq=9999)},
        "the later": {"answers": too_old},
        "start at 0 s": {"steps": (window_step(300_000, {}, 1.0),)},
        "or there are more": {"steps": ()},
        "ascend": {
            "steps": (window_step(300_000), window_step(300_000, {}, 2.0), window_step(None, {}, 2.0))
        },
        "finite": {"steps": (window_step(300_000), window_step(None, {}, float("inf")))},
        "not start at a finite": {"steps": (window_step(300_000), window_step(None, {}, float("nan")))},
        "park cap 0 mW": {"steps": (window_step(0),)},
        "park cap 900000": {"steps": (window_step(900_000),)},
        f"cap of {run}": {"steps": (window_step(300_000, {run: 100_000}),)},
        "end of a lease": {"steps": (window_step(300_000, lease=True),)},
    }
    before = world.requested()
    for why, change in bad.items():
        assert not world.send(msgspec.structs.replace(good, **change)), why
        assert why in world.said("plan_refused")[-1]["reason"]
        world.advance(50 * MS)
        assert why in world.reports[-1].refused or any(why in r.refused for r in world.reports[-3:])
    assert world.requested() == before and world.state.held == held
    assert world.send(world.make_plan(window_step(300_000), id=PlanId(5, 20)))


def test_an_answer_to_an_old_report_is_refused() -> None:
    world = World(1).start()
    late = world.make_plan(window_step(200_000))
    world.advance(31 * S)
    assert not world.send(late)
    assert world.devices.sets == []


def test_observe_is_held_and_reported_but_sets_nothing() -> None:
    world = World().start()
    assert world.window(200_000, mode="observe")
    world.advance(10 * S)
    assert world.devices.sets == []
    held = world.reports[-1].held
    assert held is not None and held.seq == world.seq


def test_going_back_to_observe_leaves_no_cap_behind() -> None:
    world = World().start()
    world.window(200_000)
    world.advance(S)
    world.window(200_000, mode="observe")
    world.advance(S)
    assert world.requested() == list(ALL)


def test_gone_removes_the_job_file_of_that_run_only() -> None:
    world = World().start()
    old, other = world.begin_job(1, 0), world.begin_job(2, 1)
    world.advance(S)
    world.window(200_000, {}, gone=(old, Run("c", 77), Run("other", 2)))
    assert list(world.jobs) == ["2.0"]
    assert world.said("run_gone")[-1]["reason"] == "controller"
    assert other in world.state.runs


def test_a_newer_run_of_a_job_replaces_the_older() -> None:
    world = World().start()
    world.begin_job(1, 0)
    new = world.begin_job(1, 1, restart=1)
    assert list(world.jobs) == ["1.1"]
    assert list(world.state.runs) == [new]
    assert world.said("run_gone")[-1]["reason"] == "newer run"


# ------------------------------------------------------------------------------------------- prior limits


def test_a_limit_before_us_comes_back_exactly() -> None:
    world = World()
    world.journal["GPU-0"] = entry("GPU-0", current_mw=None, issued_mw=(), how="controller")
    world.devices.write_foreign("GPU-0", 650_000)
    world.start()
    assert world.reports[-1].gpus[0].prior_mw == 650_000
    world.window(200_000)
    world.send(world.make_plan(window_step(None)))
    world.advance(S)
    assert world.requested() == [650_000, 700_000, 700_000]


def test_an_unknown_prior_limit_is_left_alone_until_the_controller_knows_it() -> None:
    world = World(2)
    world.devices.write_foreign("GPU-0", 650_000)
    world.start()
    assert world.reports[-1].gpus[0].prior_mw is None
    world.window(200_000)
    assert world.requested() == [650_000, 200_000]
    world.window(200_000, priors={"GPU-0": 650_000, "GPU-1": 500_000, "GPU-9": 1})
    world.advance(S)
    assert world.requested() == [200_000, 200_000]
    assert [said for said in world.said("prior") if said["how"] == "controller"] == [
        {"uuid": "GPU-0", "prior_mw": 650_000, "how": "controller"}
    ]
    world.send(world.make_plan(window_step(None)))
    world.advance(S)
    assert world.requested() == [650_000, 700_000]


def test_a_cap_whose_record_was_lost_never_becomes_the_prior_that_the_controller_told() -> None:
    """The journal went with its folder in a window: the ratchet, by way of the next reading."""
    world = World(1).start()
    world.window(200_000)
    assert world.requested() == [200_000]
    world.journal.clear()
    world.plan_file = None
    world.start()
    assert world.reports[-1].gpus[0].prior_mw is None
    world.window(200_000, priors={"GPU-0": 700_000})
    world.advance(3 * S)  # readings
    assert world.reports[-1].gpus[0].prior_mw == 700_000
    assert world.requested() == [200_000]
    world.send(world.make_plan(window_step(None)))
    world.advance(S)
    assert world.requested() == [700_000]


def test_a_quick_reading_says_nothing_of_gpus_that_it_did_not_ask() -> None:
    world = World(2).start()
    state = msgspec.structs.replace(
        world.state,
        gpus={uuid: msgspec.structs.replace(gpu, read_ns=0) for uuid, gpu in world.state.gpus.items()},
    )
    state, _ = step(state, m.Sampled(samples=(), quick=True), world.now_ns)
    assert [ceiling_mw(gpu) for gpu in state.gpus.values()] == [700_000, 700_000]
    state, _ = step(state, m.Sampled(samples=()), world.now_ns)
    assert [ceiling_mw(gpu) for gpu in state.gpus.values()] == [None, None]


def test_a_limit_above_the_prior_that_the_controller_told_is_somebody_elses() -> None:
    world = World(1)
    world.devices.write_foreign("GPU-0", 600_000)
    world.start()
    world.send(world.make_plan(window_step(None), priors={"GPU-0": 500_000}))
    world.advance(6 * S)
    assert (world.requested(), world.reports[-1].gpus[0].prior_mw) == ([600_000], 600_000)


def test_a_gpu_that_no_reading_tells_of_becomes_unknown() -> None:
    """What was read last is no acknowledgement for ever: its cap may have fallen since."""
    world = World(2).start()
    world.window(200_000)
    world.advance(2 * S)
    world.devices.hanging.add("GPU-0")  # in a hurry it is left out
    world.devices.fail("list", DeadlineError("no answer", uuid="GPU-0"))
    world.advance(8 * S)
    assert [gpu.ceiling_mw for gpu in world.reports[-1].gpus] == [200_000, 200_000]
    world.devices.write_foreign("GPU-0", 700_000)
    world.advance(5 * S)
    told = world.reports[-1].gpus
    assert [gpu.ceiling_mw for gpu in told] == [None, 200_000]
    assert told[0].fault


def test_a_new_limit_of_an_admin_becomes_the_prior_while_the_gpu_rests() -> None:
    world = World(1).start()
    world.devices.write_foreign("GPU-0", 650_000)
    world.advance(6 * S)
    assert world.said("prior")[-1] == {"uuid": "GPU-0", "prior_mw": 650_000, "how": "read"}
    world.window(200_000)
    world.send(world.make_plan(window_step(None)))
    world.advance(S)
    assert world.requested() == [650_000]


def test_a_value_of_ours_is_never_taken_for_a_prior_limit() -> None:
    world = World(1).start()
    world.window(300_000)
    world.send(world.make_plan(window_step(None)))
    world.advance(S)
    world.devices.write_foreign("GPU-0", 300_000)
    world.advance(6 * S)
    assert world.reports[-1].gpus[0].prior_mw == 700_000
    world.start()
    assert world.reports[-1].gpus[0].prior_mw == 700_000


def test_an_unreadable_entry_costs_its_gpu_only() -> None:
    world = World()
    world.journal["GPU-1"] = "filled with NUL bytes"
    world.start()
    world.window(200_000)
    world.advance(S)
    assert world.requested() == [200_000, 700_000, 200_000]
    report = world.reports[-1].gpus[1]
    assert report.prior_mw is None and "NUL bytes" in report.fault


def test_limits_die_with_the_driver() -> None:
    world = World(1).start()
    world.window(200_000)
    world.send(world.make_plan(window_step(None)))
    world.advance(S)
    world.devices.write_foreign("GPU-0", 200_000)
    world.driver_start = "d2"
    world.devices.reset("GPU-0")
    world.issued["GPU-0"].clear()
    world.start()
    assert world.reports[-1].gpus[0].prior_mw == 700_000


# ------------------------------------------------------------------------------------------ other writers


def test_a_foreign_raise_in_the_window_is_taken_back_but_not_in_a_loop() -> None:
    world = World(1).start()
    world.window(200_000)
    for _ in range(60):
        world.devices.write_foreign("GPU-0", 700_000)
        world.advance(S)
    assert 3 <= len(world.said("conflict")) <= 5, "the longer it goes on, the longer it is waited"
    assert any("another program keeps setting" in fault for fault in world.reports[-1].faults)
    assert world.said("conflict")[0] == {"uuid": "GPU-0", "ours_mw": 200_000, "found_mw": 700_000}
    world.advance(61 * S)
    assert world.requested() == [200_000]
    world.advance(130 * S)
    assert world.reports[-1].faults == ()


def test_a_lower_foreign_limit_stays_and_is_not_restored() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 400_000})
    world.devices.write_foreign("GPU-0", 310_000)
    world.advance(10 * S)
    world.window(200_000, {run: 500_000})
    world.advance(10 * S)
    assert world.requested() == [310_000]
    assert len(world.said("conflict")) == 1
    world.send(world.make_plan(window_step(None)))
    world.advance(10 * S)
    assert world.requested() == [310_000]
    assert world.said("conflict")[-1]["found_mw"] == 310_000
    assert world.reports[-1].gpus[0].prior_mw == 310_000


@pytest.mark.parametrize("at", ["before our set", "before its answer", "before its effect", "after it"])
@pytest.mark.parametrize("foreign_mw", [690_000, 450_000, 250_000])
@pytest.mark.parametrize("then_mw", [500_000, 550_000, 400_000, None])
def test_a_foreign_write_that_meets_a_set_of_ours_is_reported(
    at: str, foreign_mw: int, then_mw: int | None
) -> None:
    """A raise from 300 to 500 W is under way; ``then_mw`` is what the next plan wants, None the window's end."""
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 300_000})
    world.advance(2 * S)
    world.instant, world.devices.effect_delay_ns = False, 100 * MS
    world.window(200_000, {run: 500_000})
    (ours,) = [question for question in world.open_questions if isinstance(question, m.SetLimit)]
    world.open_questions.remove(ours)
    if at == "before our set":
        world.devices.write_foreign("GPU-0", foreign_mw)
    answer = world.result(ours)
    if at == "before its answer":
        world.devices.write_foreign("GPU-0", foreign_mw)
    world.event(answer)
    world.instant = True
    world.answer_all()
    if at == "after it":
        world.advance(3 * S)
    if at in ("before its effect", "after it"):
        world.devices.write_foreign("GPU-0", foreign_mw)
    if then_mw is not None:
        world.window(200_000, {run: then_mw})
        world.advance(8 * S)
        # A lower value stays, unless the plan came before anybody could see it: then it is replaced, and that is said.
        assert world.requested()[0] <= then_mw and world.requested()[0] in (foreign_mw, then_mw)
    world.send(world.make_plan(window_step(None)))
    world.advance(8 * S)
    assert world.requested()[0] in (foreign_mw, 700_000)
    conflicts = world.said("conflict")
    assert {said["found_mw"] for said in conflicts} == {foreign_mw}
    assert {said["ours_mw"] for said in conflicts} <= {500_000, 550_000, 400_000}
    assert all(said["prior_mw"] in (700_000, foreign_mw) for said in world.said("prior"))


def test_a_foreign_write_that_meets_a_new_lower_order_is_reported_once() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 500_000})
    world.advance(2 * S)
    world.devices.write_foreign("GPU-0", 690_000)
    world.event(m.Sampled(samples=now(world.devices.sample(("GPU-0",))), quick=True))
    world.devices.write_foreign("GPU-0", 680_000)
    world.window(200_000, {run: 400_000})
    world.advance(10 * S)
    assert world.requested() == [400_000]
    assert [said["found_mw"] for said in world.said("conflict")] == [690_000, 680_000]


def test_a_limit_set_just_before_the_window_is_the_one_that_comes_back() -> None:
    """The last reading of a resting GPU may be seconds old when the first set comes."""
    world = World(2).start()
    world.advance(6 * S)
    world.devices.write_foreign("GPU-0", 650_000)
    world.window(200_000)
    assert world.said("prior")[-1] == {"uuid": "GPU-0", "prior_mw": 650_000, "how": "read"}
    entry_now = world.journal["GPU-0"]
    assert isinstance(entry_now, JournalEntry)
    assert (entry_now.prior_mw, entry_now.current_mw) == (650_000, 200_000)
    world.advance(3 * S)
    world.send(world.make_plan(window_step(None)))
    world.advance(S)
    assert world.requested() == [650_000, 700_000]


def test_a_bmc_limit_below_ours_is_no_fault_and_its_end_is_reported() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.devices.set_bmc_limit("GPU-0", 250_000)
    world.window(200_000, {run: 400_000})
    world.advance(3 * S)
    report = world.reports[-1].gpus[0]
    assert (report.enforced_mw, report.ceiling_mw, report.fault) == (250_000, 400_000, "")
    world.devices.set_bmc_limit("GPU-0", None)
    world.advance(1100 * MS)
    assert world.reports[-1].gpus[0].enforced_mw == 400_000


# ------------------------------------------------------------------------------------------------- faults


def test_each_gpu_fails_on_its_own_and_is_tried_again() -> None:
    world = World().start()
    world.devices.fail("set", LostError("off the bus", uuid="GPU-1"))
    world.window(200_000)
    world.advance(20 * S)
    assert world.requested() == [200_000, 700_000, 200_000]
    tried = len([1 for uuid, _ in world.devices.sets if uuid == "GPU-1"])
    assert 4 <= tried <= 9, "tried again, with growing pauses"
    world.devices.clear_faults()
    world.advance(6 * S)
    assert world.requested() == [200_000] * 3


def test_a_set_whose_answer_was_lost_counts_at_the_most_it_can_be() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 300_000})
    world.advance(S)
    world.devices.fail("set", DeadlineError("no answer", uuid="GPU-0"), times=1)
    world.window(200_000, {run: 600_000})
    world.advance(20 * MS)
    assert world.reports[-1].gpus[0].ceiling_mw == 600_000
    assert world.reports[-1].gpus[0].requested_mw == 300_000


def test_of_two_sets_whose_answers_were_lost_the_higher_counts() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 300_000})
    world.advance(S)
    world.devices.fail("set", DeadlineError("no answer", uuid="GPU-0"), times=2)
    world.window(200_000, {run: 600_000})
    world.advance(20 * MS)
    world.window(200_000, {run: 250_000})
    world.advance(S)
    assert world.devices.sets[-2:] == [("GPU-0", 600_000), ("GPU-0", 250_000)]
    assert world.reports[-1].gpus[0].ceiling_mw == 600_000


def test_a_restore_whose_answer_was_lost_is_not_taken_for_somebody_elses_write() -> None:
    world = World(1).start()
    world.window(200_000)
    world.advance(S)
    world.devices.fail_set_quietly("GPU-0", "applied_then_deadline")
    world.send(world.make_plan(window_step(None), window_step(300_000, None, 3.0)))
    world.advance(2 * S)
    assert world.requested() == [700_000] and world.said("set_failed")
    world.advance(4 * S)
    assert world.requested() == [300_000], (
        "the next window's limit does not wait for somebody else to give way"
    )
    assert world.said("conflict") == []
    world.devices.clear_faults()
    world.advance(6 * S)
    world.devices.write_foreign("GPU-0", 680_000)
    world.advance(2 * S)
    assert world.said("conflict") == [{"uuid": "GPU-0", "ours_mw": 300_000, "found_mw": 680_000}]


def test_a_set_that_the_journal_kept_back_leaves_the_gpu_at_rest() -> None:
    """Nothing of ours stands there: what somebody writes is the limit before us, not a conflict with a cap of ours."""
    world = World(1).start()
    world.journal_fails = True
    world.window(200_000)
    gpu = world.state.gpus["GPU-0"]
    assert (gpu.current_mw, gpu.issued_mw, gpu.confirmed) == (None, (), False)
    world.devices.write_foreign("GPU-0", 650_000)
    world.advance(6 * S)
    assert world.devices.sets == []
    world.journal_fails = False
    world.advance(6 * S)
    assert world.requested() == [200_000] and world.said("conflict") == []
    entry_now = world.journal["GPU-0"]
    assert isinstance(entry_now, JournalEntry) and entry_now.prior_mw == 650_000
    world.send(world.make_plan(window_step(None)))
    world.advance(S)
    assert world.requested() == [650_000]


def test_a_new_order_that_the_journal_kept_back_leaves_the_old_one_standing() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 400_000})
    world.advance(S)
    world.journal_fails = True
    world.window(200_000, {run: 300_000})
    gpu = world.state.gpus["GPU-0"]
    assert (gpu.current_mw, gpu.issued_mw, gpu.confirmed) == (400_000, (400_000,), True)
    world.devices.write_foreign("GPU-0", 500_000)
    world.advance(6 * S)
    said = world.said("conflict")
    assert said == [{"uuid": "GPU-0", "ours_mw": 400_000, "found_mw": 500_000}]
    world.journal_fails = False
    world.advance(6 * S)
    assert world.requested() == [300_000]


def test_success_without_effect_is_not_believed() -> None:
    world = World(1).start()
    world.devices.fail_set_quietly("GPU-0", "ignored")
    world.window(200_000)
    world.advance(2 * S)
    assert world.said("readback") == [] and world.said("conflict") == []
    assert world.reports[-1].gpus[0].ceiling_mw == 700_000
    world.devices.clear_faults()
    world.advance(6 * S)
    assert world.requested() == [200_000]


def test_no_library_leaves_the_agent_up_and_trying() -> None:
    world = World(1)
    world.devices.fail("list", LibraryGoneError("libnvidia-ml.so.1 is missing"))
    world.start()
    world.advance(100 * S)
    assert any("libnvidia-ml" in fault for fault in world.reports[-1].faults)
    assert 5 <= world.devices.calls.count("list") <= 8, "slower and slower"
    world.devices.clear_faults()
    world.advance(31 * S)
    assert len(world.reports[-1].gpus) == 1


def test_a_gpu_that_cannot_be_read_becomes_unknown_and_not_empty() -> None:
    world = World(2).start()
    world.window(200_000)
    world.devices.fail("sample", DeadlineError("hangs", uuid="GPU-0"))
    world.devices.fail("list", DeadlineError("hangs", uuid="GPU-0"))
    world.advance(3 * S)
    assert world.reports[-1].gpus[0].ceiling_mw == 200_000, "the last safe state holds for a while"
    world.advance(15 * S)
    report = world.reports[-1].gpus[0]
    assert report.ceiling_mw is None and report.requested_mw is None and "hangs" in report.fault
    assert world.reports[-1].gpus[1].ceiling_mw == 200_000


def test_an_absurd_draw_is_unknown() -> None:
    world = World(1).start()
    gpu = world.devices.gpus["GPU-0"]
    gpu.demand_mw, gpu.enforced_mw = 2_500_000, 2_600_000
    world.advance(6 * S)
    assert world.reports[-1].gpus[0].draw_mw is None
    assert any("not believed" in fault for fault in world.reports[-1].faults)


def test_a_run_at_an_unknown_position_touches_no_other_gpu() -> None:
    world = World()
    del world.positions[2]
    world.start()
    run = world.begin_job(1, 2)
    assert world.window(200_000, {run: 300_000})
    world.advance(S)
    assert world.requested() == [200_000, 200_000, 700_000]
    assert any("position 2" in fault for fault in world.reports[-1].faults)
    assert world.reports[-1].runs[0].gpus == ()
    assert world.reports[-1].gpus[2].fault
    world.end_job(run)
    assert world.requested()[2] == 200_000, "a GPU that no job can have is parked"


# --------------------------------------------------------------------------------------- restart and stop


def test_a_restarted_agent_adopts_and_raises_nothing() -> None:
    world = World().start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 400_000})
    sets = len(world.devices.sets)
    world.start(connected=False)
    world.advance(60 * S)
    assert len(world.devices.sets) == sets
    assert world.said("adopted")
    assert world.state.highest_epoch == 1


def test_a_restarted_agent_goes_on_with_the_schedule() -> None:
    world = World().start()
    world.send(world.make_plan(window_step(200_000), window_step(None, {}, 30.0)))
    world.start(connected=False)
    world.advance(29 * S)
    assert world.requested() == [200_000] * 3
    world.advance(2 * S)
    assert world.requested() == list(ALL)


def test_an_agent_killed_between_plan_and_set_lowers_but_does_not_raise() -> None:
    world = World(2, instant=False).start()
    world.answer_all()
    up, down = world.begin_job(1, 0), world.begin_job(2, 1)
    world.window(200_000, {up: 300_000, down: 600_000})
    world.answer_all()
    world.advance(S)
    world.answer_all()
    world.window(200_000, {up: 500_000, down: 300_000})
    world.instant = True
    world.start(connected=False)
    world.advance(10 * S)
    assert world.requested() == [300_000, 300_000]


def test_caps_without_a_plan_file_stay_until_a_plan_comes() -> None:
    world = World(1).start()
    world.window(200_000)
    world.plan_file = None
    world.start()
    world.advance(60 * S)
    assert world.requested() == [200_000]
    world.send(world.make_plan(window_step(None)))
    world.advance(S)
    assert world.requested() == [700_000]


def test_a_saved_plan_without_steps_is_said_and_not_used() -> None:
    world = World(1).start()
    world.window(200_000)
    assert world.plan_file is not None
    plan = msgspec.structs.replace(world.plan_file.plan, steps=())
    world.plan_file = msgspec.structs.replace(world.plan_file, plan=plan)
    world.start()
    world.advance(20 * S)
    assert world.requested() == [200_000] and world.reports[-1].held is None
    assert any("plan saved" in fault for fault in world.reports[-1].faults)


def test_before_job_files_are_read_nobody_is_parked() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 400_000})
    held = world.plan_file
    world.start()
    state = msgspec.structs.replace(world.state, jobs_read=False, runs={})
    _, actions = step(state, m.Tick(), world.now_ns)
    assert held is not None and not [a for a in actions if isinstance(a, m.SetLimit)]


def test_sigterm_in_a_window_holds_and_leaves_a_restorer_for_its_end() -> None:
    world = World().start()
    world.send(world.make_plan(window_step(200_000), window_step(None, {}, 30.0)))
    end_ns = world.now_ns + 30 * S
    world.advance(10 * S)
    world.event(m.StopAsked())
    assert world.exited and world.restore_at_ns == end_ns
    assert world.requested() == [200_000] * 3
    assert "3 GPUs keep" in world.said("stopped")[0]["reason"]


def test_sigterm_without_caps_just_ends() -> None:
    world = World().start()
    world.event(m.StopAsked())
    assert world.exited and world.restore_at_ns is None


def test_sigterm_waits_for_a_set_under_way_but_not_for_ever() -> None:
    world = World(1, instant=False).start()
    world.answer_all()
    world.window(200_000)
    world.event(m.StopAsked())
    assert not world.exited
    world.advance(4 * S)
    assert world.exited


def test_a_restart_under_a_plan_that_caps_nothing_ends_the_restores_that_were_due() -> None:
    world = World(1).start()
    world.window(200_000)
    world.devices.fail("set", PermissionDeniedError("not now", uuid="GPU-0"))
    world.send(world.make_plan(window_step(200_000), mode="observe"))
    assert world.requested() == [200_000]
    world.devices.clear_faults()
    world.start(connected=False)
    world.advance(S)
    assert world.requested() == [700_000]


# ------------------------------------------------------------------------------------------------ release


def test_release_lets_go_of_gpus_that_cannot_be_listed() -> None:
    """The driver is gone: who loads another one must not find us there."""
    world = World(1)
    world.devices.fail("list", LibraryGoneError("no driver"))
    world.start()
    world.event(m.ReleaseAsked())
    world.advance(14 * S)
    assert not world.state.freed
    world.advance(2 * S)
    assert world.state.freed
    world.devices.calls.clear()
    world.advance(600 * S)
    assert not world.devices.calls
    world.devices.clear_faults()
    world.event(m.ResumeAsked())
    world.advance(S)
    assert world.state.listed and not world.state.freed


def test_release_tells_the_controller_first_then_restores_all() -> None:
    world = World().start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 400_000})
    world.order.clear()
    count = len(world.reports)
    world.event(m.ReleaseAsked())
    assert world.order.index("SendReport") < world.order.index("SetLimit")
    assert world.reports[count].released
    assert world.requested() == list(ALL)
    assert world.plan_file is None
    world.advance(S)
    assert not world.window(200_000)
    assert world.requested() == list(ALL)
    world.event(m.ResumeAsked())
    world.advance(S)
    assert world.requested() == list(ALL), "nothing happens until a plan comes"
    assert world.window(200_000)
    assert world.requested() == [200_000] * 3


# --------------------------------------------------------------------------------------------------- time


def test_reports_come_every_second_in_a_window_and_every_five_otherwise() -> None:
    world = World(1).start()
    world.advance(S)
    count = len(world.reports)
    world.advance(60 * S)
    assert 10 <= len(world.reports) - count <= 14
    world.window(200_000)
    world.advance(S)
    count = len(world.reports)
    world.advance(60 * S)
    assert 55 <= len(world.reports) - count <= 65


def test_the_core_is_not_woken_without_need() -> None:
    world = World(3).start()
    world.advance(S)
    wakes = 0
    ends_ns = world.now_ns + 60 * S
    while (due_ns := next_deadline_ns(world.state, world.now_ns)) <= ends_ns:
        world.devices.advance(max(1, due_ns - world.now_ns))
        world.event(m.Tick())
        wakes += 1
    assert wakes <= 40


def test_steps_are_kept_as_instants() -> None:
    world = World(1).start()
    world.send(world.make_plan(PlanStep(starts_in_s=0.0, park_cap_mw=200_000), window_step(None, {}, 12.0)))
    world.advance(4 * S)
    assert world.reports[-1].window_ends_in_s == pytest.approx(8.0, abs=1.1)


def test_a_plan_for_boards_of_differing_ranges_is_taken_and_kept_within_each() -> None:
    world = World(2)
    small = world.devices.gpus["GPU-1"]
    small.min_mw, small.max_mw, small.default_mw = 100_000, 300_000, 300_000
    small.requested_mw = small.enforced_mw = 300_000
    world.start()
    run = world.begin_job(1, 0, 1)
    assert world.window(200_000, {run: 500_000})
    assert world.requested() == [500_000, 300_000]
    assert not world.window(150_000, {run: 500_000}), "below what one of them can do"
    world.end_job(run)
    world.advance(S)
    assert world.requested() == [200_000, 200_000]


def test_a_lowering_that_comes_into_force_late_is_said_though_it_was_within_rounding() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 684_000})
    world.advance(S)
    world.devices.effect_delay_ns = 3 * S
    world.window(200_000, {run: 683_000})
    world.advance(2500 * MS)
    assert world.said("readback")[-1]["enforced_mw"] == 684_000
    world.advance(2 * S)
    assert world.said("readback")[-1]["enforced_mw"] == 683_000
    count = len(world.said("readback"))
    world.advance(5 * S)
    assert len(world.said("readback")) == count


def test_a_release_right_after_a_set_whose_answer_was_lost_leaves_no_cap_behind() -> None:
    world = World(1, instant=False).start()
    world.answer_all()
    world.window(200_000)
    world.devices.fail_set_quietly("GPU-0", "applied_then_deadline")
    while any(isinstance(question, m.SetLimit) for question in world.open_questions):
        world.answer()
    world.devices.clear_faults()
    assert world.requested() == [200_000]
    world.event(m.ReleaseAsked())
    world.instant = True
    world.answer_all()
    world.advance(20 * S)
    assert world.requested() == [700_000]
    entry_now = world.journal["GPU-0"]
    assert isinstance(entry_now, JournalEntry) and entry_now.current_mw is None


def test_a_set_of_an_earlier_agent_that_may_still_come_is_counted_and_leaves_no_cap_behind() -> None:
    world = World(1)
    device = world.devices.gpus["GPU-0"]
    infos, _ = now(world.devices.list_devices())
    lowered = first_sight(infos[0], 0, entry("GPU-0", prior_mw=700_000, current_mw=300_000), 0)
    back = decide(lowered, Wanted(cap_mw=700_000, reason="restore: window over"), 0)
    assert isinstance(back, Set) and back.restores and back.cap_mw == 700_000
    device.requested_mw = device.enforced_mw = 300_000
    infos, _ = now(world.devices.list_devices())
    raised = first_sight(infos[0], 0, entry("GPU-0", current_mw=500_000, issued_mw=(300_000, 500_000)), 0)
    assert ceiling_mw(raised) == 500_000
    device.requested_mw = device.enforced_mw = 333_000
    infos, _ = now(world.devices.list_devices())
    foreign = first_sight(infos[0], 0, entry("GPU-0", prior_mw=700_000, current_mw=300_000), 0)
    left = decide(foreign, Wanted(cap_mw=700_000, reason="restore: window over"), 0)
    assert left == Rest(conflict_mw=333_000), "somebody else's value stays, in doubt or not"


def test_a_gpu_whose_entry_was_put_right_is_taken_up_again() -> None:
    world = World(2)
    sound = entry("GPU-0")
    world.devices.gpus["GPU-0"].requested_mw = world.devices.gpus["GPU-0"].enforced_mw = 300_000
    world.journal["GPU-0"] = "empty"
    world.start()
    world.window(200_000)
    assert world.requested() == [300_000, 200_000]
    assert "unreadable" in world.reports[-1].gpus[0].fault
    world.journal["GPU-0"] = sound
    world.advance(31 * S)
    assert world.requested() == [200_000, 200_000]
    world.window(None)  # type: ignore[arg-type]
    assert world.requested() == [650_000, 700_000]


def test_caps_are_issued_in_whole_watts_so_that_their_list_stays_short() -> None:
    world = World(1).start()
    for cap_mw in (400_000, 400_001, 400_999, 401_000):
        world.window(cap_mw)
        world.advance(S)
    made = world.journal["GPU-0"]
    assert isinstance(made, JournalEntry) and made.issued_mw == (400_000, 401_000)


@pytest.mark.parametrize("gap_s", [1, 8, 40])
@pytest.mark.parametrize("restart", [False, True])
def test_a_set_that_hung_and_is_done_long_after_is_ours_and_goes(gap_s: int, restart: bool) -> None:
    """A call that hangs in the driver cannot be ended; what it does when it comes back is no limit of anybody else."""
    world = World(2).start()
    world.devices.fail("set", DeadlineError("no answer", uuid="GPU-0"))
    world.window(200_000)
    world.advance(gap_s * S)
    world.send(world.make_plan(window_step(None)))
    world.advance(S)
    world.devices.clear_faults()
    world.advance(40 * S)
    assert world.requested() == [700_000, 700_000]
    if restart:
        world.start()
    world.devices.write_foreign("GPU-0", 200_000)
    world.advance(60 * S)
    assert world.requested() == [700_000, 700_000]
    found = world.journal["GPU-0"]
    assert isinstance(found, JournalEntry)
    assert (found.prior_mw, found.current_mw, found.lost_mw) == (700_000, None, ())
    assert world.said("landed_late") and not world.said("conflict")
    world.devices.write_foreign("GPU-0", 200_000)
    world.advance(60 * S)
    assert world.requested() == [200_000, 700_000], "the second time it is somebody else"
    assert world.reports[-1].gpus[0].prior_mw == 700_000


def test_a_lost_set_that_was_done_at_once_waits_for_nothing() -> None:
    world = World(1).start()
    world.devices.fail_set_quietly("GPU-0", "applied_then_deadline")
    world.window(200_000)
    world.devices.clear_faults()
    world.advance(S)
    world.send(world.make_plan(window_step(None)))
    world.advance(10 * S)
    found = world.journal["GPU-0"]
    assert isinstance(found, JournalEntry) and (found.current_mw, found.lost_mw) == (None, ())
