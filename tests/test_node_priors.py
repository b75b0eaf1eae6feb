"""The node agent's core: limits before us, and limits of others."""

from __future__ import annotations

import pytest

from slurm_pfi.gpu.journal import JournalEntry
from slurm_pfi.node import messages as m
from tests.node_world import MS, S, World, entry, now, window_step

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


def test_a_limit_above_the_prior_that_the_controller_told_is_somebody_elses() -> None:
    world = World(1)
    world.devices.write_foreign("GPU-0", 600_000)
    world.start()
    world.send(world.make_plan(window_step(None), priors={"GPU-0": 500_000}))
    world.advance(6 * S)
    assert (world.requested(), world.reports[-1].gpus[0].prior_mw) == ([600_000], 600_000)


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
