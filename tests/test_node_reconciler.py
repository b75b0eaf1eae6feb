"""What is wanted against what is read back: causes, back-off, other writers, sets that failed; the core alone."""

from __future__ import annotations

from itertools import pairwise

import pytest

from slurm_pfi.gpu.device import DeadlineError, LibraryGoneError, LostError, PermissionDeniedError
from slurm_pfi.gpu.journal import JournalEntry
from slurm_pfi.node import messages as m
from tests.node_world import MS, S, World, window_step


def in_window(gpus: int = 1, cap_mw: int = 300_000) -> World:
    """One GPU after another parked, acknowledged."""
    made = World(gpus).start()
    assert made.window(cap_mw)
    made.advance(2 * S)
    return made


# ------------------------------------------------------------------------------------------------ causes


@pytest.mark.parametrize(
    ("found_mw", "persistence", "counted"),
    [
        (700_000, True, {"default value": 1}),
        (700_000, False, {"default value": 1}),
        (650_000, True, {"another value": 1}),
        (250_000, True, {}),
        (300_900, True, {}),
    ],
)
def test_a_lifted_cap_is_counted_once_by_what_is_found_there(
    found_mw: int, persistence: bool, counted: dict[str, int]
) -> None:
    world = in_window()
    world.devices.gpus["GPU-0"].persistence = persistence
    world.event(
        m.DevicesListed(
            devices=world.result(m.ListDevices()).devices,  # type: ignore[union-attr]
            failures=(),
            journal={},
            positions=world.positions,
            driver_start="d1",
        )
    )
    world.devices.write_foreign("GPU-0", found_mw)
    world.advance(10 * S)
    assert world.state.reverted == counted
    assert world.requested() == [300_000 if counted else found_mw]
    falls = persistence is False
    assert len(world.said("reverted")) == (1 if falls else 0)
    assert len(world.said("conflict")) == (0 if falls or found_mw == 300_900 else 1)


def test_a_cap_that_falls_again_and_again_is_set_again_each_time() -> None:
    """Nobody writes there, so there is nobody to give way to."""
    world = World(1)
    world.devices.gpus["GPU-0"].persistence = False
    world.start()
    world.window(300_000)
    for _ in range(10):
        world.devices.write_foreign("GPU-0", 700_000)
        world.advance(2 * S)
        assert world.requested() == [300_000]
        assert world.reports[-1].gpus[0].ceiling_mw == 700_000
    assert world.state.reverted == {"default value": 10} and world.said("conflict") == []


def test_while_a_driver_is_loaded_anew_nothing_is_counted_twice() -> None:
    world = in_window(2)
    for uuid in world.devices.gpus:
        world.devices.fail("sample", LibraryGoneError("gone", uuid=uuid))
    world.devices.fail("list", LibraryGoneError("gone"))
    world.advance(5 * S)
    assert world.reports[-1].gpus[0].ceiling_mw == 300_000, "the last safe state for a while"
    world.advance(10 * S)
    assert [gpu.ceiling_mw for gpu in world.reports[-1].gpus] == [None, None]
    for uuid in world.devices.gpus:
        world.devices.reset(uuid)
        world.issued[uuid].clear()
    world.driver_start = "d2"
    world.devices.clear_faults()
    world.advance(31 * S)
    assert world.requested() == [300_000] * 2
    assert world.state.reverted == {"driver restart": 2}
    assert [said["cause"] for said in world.said("reverted")] == ["driver restart"] * 2


def test_a_gpu_that_fell_and_is_restored_goes_to_its_prior_limit_not_to_the_default() -> None:
    world = World(1).start()
    world.devices.write_foreign("GPU-0", 650_000)
    world.advance(6 * S)
    world.window(300_000)
    world.advance(2 * S)
    world.devices.gpus["GPU-0"].lost = True
    world.advance(2 * S)
    world.devices.reset("GPU-0")
    world.send(world.make_plan(window_step(None)))
    world.advance(8 * S)
    assert world.requested() == [650_000] and world.said("conflict") == []


# ---------------------------------------------------------------------------------------------- back-off


def test_the_pause_before_a_writer_is_overruled_grows_and_a_quiet_minute_ends_it() -> None:
    world = in_window()
    at_s: list[float] = []
    for _ in range(240):
        before = len(world.devices.sets)
        world.devices.write_foreign("GPU-0", 650_000)
        world.advance(S)
        if len(world.devices.sets) > before:
            at_s.append(world.now_ns / S)
    pauses = [later - sooner for sooner, later in pairwise(at_s)]
    assert pauses == sorted(pauses) and pauses[0] <= 6 and 55 <= pauses[-1] <= 62
    assert any("another program keeps setting its limit" in fault for fault in world.reports[-1].faults)
    world.advance(200 * S)
    assert world.requested() == [300_000] and world.reports[-1].faults == ()
    world.devices.write_foreign("GPU-0", 650_000)
    world.advance(2 * S)
    assert world.requested() == [300_000], "at once again"


def test_a_writer_of_one_gpu_holds_up_no_other() -> None:
    world = in_window(2)
    for _ in range(20):
        world.devices.write_foreign("GPU-0", 650_000)
        world.advance(S)
    world.window(250_000)
    world.advance(2 * S)
    assert world.requested()[1] == 250_000


# ----------------------------------------------------------------------------------------- sets that failed


@pytest.mark.parametrize("again", [1, 5])
def test_a_set_that_surely_failed_leaves_nothing_of_ours_behind(again: int) -> None:
    """Nothing of it stands: what somebody writes is the limit before us, no conflict with a cap of ours."""
    world = World(1).start()
    world.devices.fail("set", PermissionDeniedError("no", uuid="GPU-0"))
    world.window(300_000)
    world.advance(again * 31 * S)
    entry = world.journal["GPU-0"]
    assert isinstance(entry, JournalEntry) and (entry.current_mw, entry.issued_mw) == (None, ())
    world.devices.write_foreign("GPU-0", 650_000)
    world.advance(6 * S)
    assert world.reports[-1].gpus[0].prior_mw == 650_000
    assert world.said("conflict") == [] and world.state.reverted == {}
    world.devices.clear_faults()
    world.advance(400 * S)
    assert world.requested() == [300_000]
    world.send(world.make_plan(window_step(None)))
    world.advance(2 * S)
    assert world.requested() == [650_000]


def test_a_new_order_that_surely_failed_leaves_the_old_one_standing() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 400_000})
    world.advance(2 * S)
    world.devices.fail("set", LostError("gone for a moment", uuid="GPU-0"), times=1)
    world.window(200_000, {run: 300_000})
    world.advance(200 * MS)
    gpu = world.state.gpus["GPU-0"]
    assert (gpu.current_mw, gpu.confirmed, gpu.undo) == (400_000, True, None)
    entry = world.journal["GPU-0"]
    assert isinstance(entry, JournalEntry) and entry.current_mw == 400_000
    world.advance(2 * S)
    assert world.requested() == [300_000]


def test_a_set_that_failed_and_was_done_all_the_same_stays_on_record() -> None:
    world = World(1).start()
    world.devices.fail_set_quietly("GPU-0", "applied_then_deadline")
    world.window(300_000)
    world.advance(20 * MS)
    world.start()
    assert world.reports[-1].gpus[0].prior_mw == 700_000
    world.devices.clear_faults()
    world.send(world.make_plan(window_step(None)))
    world.advance(10 * S)
    assert world.requested() == [700_000]
    assert all(isinstance(e, JournalEntry) and e.current_mw is None for e in world.journal.values())


# ---------------------------------------------------------------------------------------- what cannot be set


def test_a_gpu_that_cannot_be_set_is_known_at_once_and_tried_seldom() -> None:
    world = World(2)
    world.devices.gpus["GPU-0"].settable = False
    world.devices.fail("set", PermissionDeniedError("no", uuid="GPU-0"))
    world.start()
    assert "cannot be set" in world.reports[-1].gpus[0].fault
    assert any(
        fault.startswith("partly enforceable: limits can be set on 1 of 2")
        for fault in world.reports[-1].faults
    )
    world.window(300_000)
    world.advance(240 * S)
    assert world.requested() == [700_000, 300_000]
    assert [uuid for uuid, _ in world.devices.sets] == ["GPU-1"]
    world.advance(700 * S)
    assert 1 <= len([uuid for uuid, _ in world.devices.sets if uuid == "GPU-0"]) <= 3
    world.devices.clear_faults()
    world.devices.gpus["GPU-0"].settable = True
    world.advance(700 * S)
    assert world.requested() == [300_000] * 2 and world.reports[-1].faults == ()


# ------------------------------------------------------------------------------------------------- release


def test_a_release_gives_up_what_cannot_be_read_and_frees_the_gpus_all_the_same() -> None:
    world = in_window(2)
    world.devices.gpus["GPU-0"].lost = True
    world.advance(2 * S)
    world.event(m.ReleaseAsked())
    world.advance(5 * S)
    assert world.requested()[1] == 700_000 and not world.state.freed, "it may come back"
    world.advance(20 * S)
    assert world.state.freed and "FreeDevices" in world.order
    calls = len(world.devices.calls)
    world.advance(600 * S)
    assert len(world.devices.calls) == calls, "nothing takes them up again"
    assert [gpu.ceiling_mw for gpu in world.reports[-1].gpus] == [None, None]
    assert world.reports[-1].released and all(gpu.fault == "" for gpu in world.reports[-1].gpus)
    world.devices.reset("GPU-0")
    world.event(m.ResumeAsked())
    world.advance(2 * S)
    assert [gpu.ceiling_mw for gpu in world.reports[-1].gpus] == [700_000, 700_000]
    assert world.window(250_000)
    world.advance(2 * S)
    assert world.requested() == [250_000] * 2


# --------------------------------------------------------------------------------------------------- lists


def test_gpus_are_listed_now_and_then_though_nothing_is_wrong() -> None:
    """Persistence mode, MIG, the range: nobody tells of their change."""
    world = in_window()
    count = world.devices.calls.count("list")
    world.devices.gpus["GPU-0"].persistence = False
    world.advance(world.state.settings.survey_ns + 2 * S)
    assert world.devices.calls.count("list") == count + 1
    assert world.reports[-1].gpus[0].ceiling_mw == 700_000


def test_one_that_only_does_not_answer_in_a_list_keeps_its_last_safe_state() -> None:
    world = in_window(2)
    world.devices.fail("list", DeadlineError("slow", uuid="GPU-0"))
    world.devices.fail("set", LostError("for a moment", uuid="GPU-1"), times=1)
    count = world.devices.calls.count("list")
    world.window(250_000)
    world.advance(5 * S)
    assert world.devices.calls.count("list") > count
    assert [gpu.ceiling_mw for gpu in world.reports[-1].gpus] == [250_000, 250_000]


def test_one_that_does_not_answer_in_a_list_stays_its_runs_gpu() -> None:
    """Else its run would pass for one without a GPU, and the GPU be parked under it."""
    world = World(2).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 500_000})
    world.advance(2 * S)
    world.devices.fail("list", DeadlineError("hangs", uuid="GPU-0"))
    world.devices.fail("set", DeadlineError("hangs", uuid="GPU-0"), times=1)
    world.window(200_000, {run: 600_000})
    world.advance(8 * S)
    assert world.devices.calls.count("list") > 1
    assert world.reports[-1].runs[0].gpus == ("GPU-0",)
    assert world.requested() == [600_000, 200_000]
    assert not any(cap_mw == 200_000 for uuid, cap_mw in world.devices.sets if uuid == "GPU-0")
