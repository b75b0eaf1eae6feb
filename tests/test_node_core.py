"""The node agent's core, one rule at a time: windows and plans, restart and stop, release, time."""

from __future__ import annotations

import msgspec
import pytest

from slurm_pfi.gpu.device import LibraryGoneError, PermissionDeniedError
from slurm_pfi.gpu.journal import JournalEntry
from slurm_pfi.model import PlanId, PlanStep, Run
from slurm_pfi.node import messages as m
from slurm_pfi.node.core import next_deadline_ns, step
from tests.node_world import MS, S, World, window_step

ALL = (700_000, 700_000, 700_000)


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
