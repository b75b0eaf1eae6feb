"""The node agent's core: how a limit is set, acknowledged, fails, and is done late."""

from __future__ import annotations

import msgspec
import pytest

from slurm_pfi.gpu.device import DeadlineError, LibraryGoneError, LostError, PermissionDeniedError
from slurm_pfi.gpu.journal import JournalEntry
from slurm_pfi.node import messages as m
from slurm_pfi.node.core import step
from slurm_pfi.node.limits import Rest, Set, Wanted, decide, first_sight
from slurm_pfi.node.state import ceiling_mw
from tests.node_world import MS, S, World, entry, now, window_step


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
