"""What a limit would cost and what the site can give: figures by hand, and the plans that a real limit then brings."""

from __future__ import annotations

import copy
import math
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pfi.controller import state as cs
from slurm_pfi.controller.answers.forecast import what_if
from slurm_pfi.controller.answers.forecast_values import Target, WhatIf
from slurm_pfi.controller.answers.offers import Offer, level_steps, offer, sustained
from slurm_pfi.controller.budget import look
from slurm_pfi.model import Run
from slurm_pfi.slurm.backend import Special

from .forecast_site import ForecastSite
from .test_controller_core import Site, W, gpu
from .world import NS, World

HOUR_S = 3600


def ask(site: Site, **target: object) -> WhatIf:
    return what_if(site.state, site.config, site.core.science, msgspec.convert(target, Target), site.now_ns)


def offered(site: Site, now_unix_s: float = 1e9) -> Offer:
    return offer(site.state, site.config, site.core.science, site.now_ns, now_unix_s)


def two_runs(loss: tuple[float, float] | None = None) -> ForecastSite:
    """Two runs alike, on two GPUs each that draw 650 W; 100 W beside each node: 2800 W in all."""
    site = ForecastSite(nodes=2)
    runs = [site.train("n1", 1, 650), site.train("n2", 2, 650)]
    if loss is not None:
        site.learn(dict(zip(runs, loss, strict=True)))
    return site


# ----------------------------------------------------------------------------------------------- by hand


def test_a_tenth_less_is_shared_alike_while_nothing_is_measured() -> None:
    found = ask(two_runs(), share=0.1)
    assert (found.uncapped_mw, found.limit_mw, found.asked_less_mw) == (2800 * W, 2520 * W, 280 * W)
    assert found.feasible and found.binds and not found.waiting
    # 2520 W less 200 W beside the GPUs, for four of them.
    assert [run.cap_mw for run in found.runs] == [580 * W] * 2
    for run in found.runs:
        assert run.reduction == pytest.approx(1 - 580 / 650)
        assert (run.draw_mw, run.baseline, run.measured) == (650 * W, "seen", False)
        assert 0 < run.loss.expected < run.loss.high
    assert not found.certificate.informed
    assert found.certificate.gain is not None and found.certificate.gain.expected == 0


def test_errors_that_runs_have_in_common_do_not_average_out_in_the_total() -> None:
    found = ask(two_runs(), share=0.1)
    one, total = found.runs[0].loss, found.loss
    assert total is not None
    assert total.expected == pytest.approx(one.expected)
    assert total.high - total.expected == pytest.approx(one.high - one.expected, rel=0.05)


def test_a_site_is_counted_by_how_each_part_is_known() -> None:
    site = ForecastSite(nodes=5)
    site.train("n1", 1, 650)
    site.hear("n2", *(gpu(f"n2-{i}", Run("c", 2), draw_mw=300 * W) for i in range(2)))
    site.idle("n3", 75)
    site.idle("n4", None)
    found = ask(site, limit_mw=5000 * W)
    parts = found.uncapped
    assert (parts.known_mw, parts.bounded_mw, parts.idle_mw) == (1300 * W, 1400 * W, 150 * W)
    assert (parts.unread_mw, parts.silent_mw, parts.beside_mw) == (1400 * W, 1400 * W, 500 * W)
    assert found.uncapped_mw == 6150 * W
    assert found.standing.silent == ("n5",)
    assert (found.parked_gpus, found.parked_mw, found.parked_draw_mw) == (4, 800 * W, 1550 * W)
    # 5000 W less 500 W beside, 1400 W of the silent node and 800 W of parked GPUs, for four GPUs of runs.
    assert sum(run.gpus * run.cap_mw for run in found.runs) <= 2300 * W
    bounded = next(run for run in found.runs if run.job_id == 2)
    assert (bounded.baseline, bounded.draw_mw) == ("bounded", 700 * W)


def test_the_reserve_is_kept_but_not_drawn() -> None:
    site = two_runs()
    policy = msgspec.structs.replace(site.config.policy, reserve_w=100.0)
    site.config = msgspec.structs.replace(site.config, policy=policy)
    found = ask(site, share=0.1)
    assert found.uncapped_mw == 2800 * W
    assert [run.cap_mw for run in found.runs] == [555 * W] * 2


@pytest.mark.parametrize(
    ("target", "limit_w"),
    [({"limit_mw": 2600 * W}, 2600), ({"less_mw": 200 * W}, 2600), ({"share": 0.25}, 2100)],
)
def test_three_ways_to_say_a_target(target: dict[str, object], limit_w: int) -> None:
    assert ask(two_runs(), **target).limit_mw == limit_w * W


def test_a_limit_above_all_caps_binds_nothing_and_one_above_the_draw_slows_nobody() -> None:
    site = two_runs()
    above = ask(site, limit_mw=3000 * W)
    assert not above.binds and above.feasible and not above.runs
    assert above.loss is not None and above.loss.expected == 0
    between = ask(site, limit_mw=2900 * W)
    assert between.binds and all(run.reduction == 0 for run in between.runs)
    assert between.asked_less_mw == -100 * W


def test_what_cannot_be_held_says_what_can() -> None:
    site = two_runs()
    found = ask(site, share=0.5)
    assert not found.feasible
    floors_mw = sum(run.gpus * -(-run.floor_mw // W) * W for run in found.runs)
    assert found.least_limit_mw == floors_mw + 200 * W
    assert found.shortfall_mw == found.least_limit_mw - 1400 * W
    assert all(run.at_floor and not run.floor_passed for run in found.runs)
    # Four GPUs at 200 W and 200 W beside them: an emergency limit could hold 1000 W.
    assert found.emergency_shortfall_mw == 0
    assert ask(site, limit_mw=900 * W).emergency_shortfall_mw == 100 * W
    emergency = ask(site, share=0.5, emergency=True)
    assert emergency.feasible and all(run.floor_passed for run in emergency.runs)
    assert emergency.least_limit_mw == 1000 * W


def test_more_than_the_site_draws_is_missed_in_full() -> None:
    found = ask(two_runs(), less_mw=4800 * W)
    assert not found.feasible and found.limit_mw == 0
    assert found.shortfall_mw == found.least_limit_mw + 2000 * W


def test_runs_of_flex_none_and_runs_that_no_plan_reaches_are_told() -> None:
    site = ForecastSite(nodes=3)
    first = site.train("n1", 1, 650)
    none = site.train("n2", 2, 650, flex="none")
    site.job(none, "n2", partition="urgent")
    away = site.train("n3", 3, 650)
    site.tell(cs.NodeLost(node="n3"))
    found = ask(site, less_mw=100 * W)
    assert found.standing.silent == ("n3",) and found.standing.unreached == (str(away),)
    assert {run.run: run.reduction > 0 for run in found.runs} == {str(first): True, str(none): False}
    assert found.gpus == 4


def test_sites_without_runs_or_nodes_have_no_loss() -> None:
    idle = ForecastSite(nodes=2)
    for node in ("n1", "n2"):
        idle.idle(node)
    found = ask(idle, share=0.1)
    # 300 W are drawn by four idle GPUs, and none goes below 200 W by a cap.
    assert (found.uncapped_mw, found.least_limit_mw) == (500 * W, 1000 * W)
    assert not found.feasible and found.loss is None and not found.runs
    assert offered(idle).levels == ()
    empty = ForecastSite(nodes=1)
    empty.state = msgspec.structs.replace(empty.state, nodes={})
    found = ask(empty, share=0.1)
    assert (found.uncapped_mw, found.feasible, found.loss) == (0, False, None)
    assert offered(empty).levels == ()


# ------------------------------------------------------------------------------------------ what was learned


def test_who_loses_less_is_cut_deeper_and_the_gain_is_the_difference_of_the_two_cuts() -> None:
    site = two_runs((0.02, 0.12))
    found = ask(site, share=0.1)
    first, second = found.runs
    assert first.cap_mw < second.cap_mw and first.measured and second.measured
    certificate = found.certificate
    assert certificate.informed and certificate.step and certificate.gain is not None
    policy = msgspec.structs.replace(site.config.policy, name="equal")
    site.config = msgspec.structs.replace(site.config, policy=policy)
    alike = ask(site, share=0.1)
    assert alike.certificate.step is None
    assert [run.cap_mw for run in alike.runs] == [580 * W] * 2
    assert alike.loss is not None and found.loss is not None
    assert certificate.gain.expected == pytest.approx(alike.loss.expected - found.loss.expected, abs=2e-3)
    assert certificate.gain.low < certificate.gain.expected < certificate.gain.high


def test_what_is_only_asked_pushes_no_cut_out_of_the_controllers_memory() -> None:
    site = two_runs((0.02, 0.12))
    assert ask(site, share=0.1).certificate.informed and offered(site).levels
    assert site.state.knowledge is not None and not site.state.knowledge._cuts


def test_the_total_is_what_the_runs_lose_each_gpu_alike() -> None:
    site = ForecastSite(nodes=3)
    big = Run("c", 1)
    for _ in range(5):
        for node in ("n1", "n2"):
            site.hear(node, *(gpu(f"{node}-{i}", big, draw_mw=650 * W) for i in range(2)))
        site.wait(3)
    small = site.train("n3", 2, 650)
    site.learn({big: 0.03, small: 0.1})
    found = ask(site, share=0.1)
    assert found.loss is not None
    by_job = {run.job_id: run for run in found.runs}
    assert (by_job[1].gpus, by_job[2].gpus) == (4, 2)
    assert found.loss.expected == pytest.approx(
        (4 * by_job[1].loss.expected + 2 * by_job[2].loss.expected) / 6
    )


# ------------------------------------------------------------------------------------------------- offers


def test_levels_are_even_shares_and_the_most() -> None:
    assert level_steps(1000 * W, 202 * W) == [*(25 * W * n for n in range(1, 9)), 202 * W]
    assert level_steps(1000 * W, 200 * W) == [*(20 * W * n for n in range(1, 10)), 200 * W]
    assert level_steps(1000 * W, 0) == level_steps(1000 * W, -5) == level_steps(0, 5) == []
    assert all(len(level_steps(10**9, most)) <= 11 for most in range(10**6, 10**9, 10**7))


def test_the_offer_rises_to_all_that_floors_allow() -> None:
    site = two_runs((0.02, 0.12))
    found = offered(site)
    assert found.uncapped_mw == 2800 * W and found.most_mw == found.uncapped_mw - found.least_limit_mw > 0
    last = found.levels[-1]
    assert (last.less_mw, last.limit_mw, last.at_floor) == (found.most_mw, found.least_limit_mw, 2)
    assert last.price_per_kw is None and last.measured_mw == last.seen_mw and last.bounded_mw == 0
    losses = [level.loss.expected for level in found.levels if level.loss is not None]
    prices = [level.price_per_kw for level in found.levels if level.price_per_kw is not None]
    assert losses == sorted(losses) and prices == sorted(prices) and len(losses) == len(prices) + 1
    for level in found.levels:
        same = ask(site, limit_mw=level.limit_mw)
        assert same.feasible and same.loss == level.loss
        given_mw = sum(run.gpus * max(0, run.draw_mw - run.cap_mw) for run in same.runs)
        assert level.seen_mw == given_mw >= level.less_mw
        # Four GPUs of 650 W, known to 0.5 %: 1.645 of these deviations is 21.4 W; what is not cut gives nothing.
        assert given_mw - 21_385 - 1 <= level.sure_mw <= given_mw


def test_the_supply_curve_is_in_order_of_price_and_ends_at_the_floors() -> None:
    found = offered(two_runs((0.02, 0.12)))
    steps = found.supply
    assert list(steps.price_per_kw) == sorted(steps.price_per_kw)
    assert steps.run[0] == "c:1.0", "who loses less comes first"
    assert steps.given_mw[-1] == pytest.approx(found.levels[-1].seen_mw, abs=2)
    deepest = dict(zip(steps.run, steps.reduction, strict=True))
    lowest = ask(two_runs((0.02, 0.12)), share=0.9)
    assert deepest == pytest.approx({run.run: run.reduction for run in lowest.runs})
    # Loss per kW times watts, step by step, is the loss.
    before, total = 0, 0.0
    for given_mw, price in zip(steps.given_mw, steps.price_per_kw, strict=True):
        total += (given_mw - before) / 1e6 * price
        before = given_mw
    assert total == pytest.approx(steps.loss[-1], rel=1e-3)


def test_runs_never_seen_uncapped_are_offered_as_such() -> None:
    site = ForecastSite(nodes=1)
    site.hear("n1", *(gpu(f"n1-{i}", Run("c", 1), draw_mw=300 * W) for i in range(2)))
    last = offered(site).levels[-1]
    assert last.bounded_mw > 0 and last.seen_mw == last.sure_mw == last.measured_mw == 0


def test_an_offer_lasts_as_long_as_runs_that_can_give_it() -> None:
    site = two_runs()
    for number, (node, limit_s) in enumerate({"n1": HOUR_S, "n2": 3 * HOUR_S}.items(), 1):
        end_s = int(1e9) + limit_s
        site.job(Run("c", number), node, end_unix_s=end_s, limit_s=limit_s)
    levels = offered(site).levels
    # Half of the most is what the second run alone can give.
    ends = {level.until_unix_s for level in levels if level.seen_mw * 2 > levels[-1].seen_mw}
    assert ends == {1e9 + HOUR_S}
    assert levels[0].until_unix_s == 1e9 + 3 * HOUR_S
    site.job(Run("c", 2), "n2", limit_s=Special.UNLIMITED)
    found = offered(site)
    assert (found.levels[0].lasts, found.levels[-1].lasts, found.endless_runs) == ("unlimited", "until", 1)
    site.job(Run("c", 1), "n1", end_unix_s=Special.NOT_SET, limit_s=Special.NOT_SET)
    found = offered(site)
    assert (found.levels[0].lasts, found.levels[-1].lasts, found.unknown_end_runs) == (
        "unlimited",
        "unknown",
        1,
    )


def test_for_how_long_runs_can_give_together() -> None:
    runs = [(100.0, 50.0), (100.0, 80.0), (50.0, math.inf), (500.0, None)]
    assert sustained(250, runs, 0) == ("until", 50.0)
    assert sustained(150, runs, 0) == ("until", 80.0)
    assert sustained(50, runs, 0) == ("unlimited", None)
    assert sustained(251, runs, 0) == ("unknown", None)
    assert sustained(250, runs, 60) == ("until", 60), "it should have ended, and may at any moment"
    assert sustained(0, [], 0) == ("unlimited", None)


# ------------------------------------------------------------------------------------ against what really comes


def unchanged(state: cs.State) -> object:
    """All of a state that can be compared."""
    return copy.deepcopy(msgspec.structs.replace(state, knowledge=None))


@settings(max_examples=30, deadline=None)
@given(
    draws_w=st.lists(st.integers(210, 700), min_size=1, max_size=4),
    flexes=st.lists(st.sampled_from(["low", "medium", "high"]), min_size=4, max_size=4),
    losses=st.lists(st.floats(0.005, 0.3), min_size=4, max_size=4),
    learned=st.booleans(),
    share=st.floats(0.0, 1.2),
    emergency=st.booleans(),
)
def test_a_forecast_keeps_the_limit_and_changes_nothing(
    draws_w: list[int], flexes: list[str], losses: list[float], learned: bool, share: float, emergency: bool
) -> None:
    site = ForecastSite(nodes=len(draws_w) + 1)
    runs = [site.train(f"n{i}", i, draw_w, flexes[i - 1]) for i, draw_w in enumerate(draws_w, 1)]
    site.idle(f"n{len(draws_w) + 1}")
    if learned:
        site.learn(dict(zip(runs, losses, strict=False)))
    before, knowledge = unchanged(site.state), site.state.knowledge
    found = ask(site, share=share, emergency=emergency)
    offered(site)
    assert unchanged(site.state) == before and site.state.knowledge is knowledge
    view = look(site.state, site.config, site.now_ns)
    runs_mw = sum(run.gpus * run.cap_mw for run in found.runs)
    if found.feasible and found.binds:
        assert runs_mw + found.parked_mw + view.fixed_mw <= found.limit_mw
    assert ask(site, limit_mw=found.least_limit_mw, emergency=emergency).feasible
    assert not ask(site, limit_mw=found.least_limit_mw - 1, emergency=emergency).feasible
    for run in found.runs:
        assert run.cap_mw >= run.floor_mw or (emergency and run.floor_passed)
        assert 0 <= run.loss.low <= run.loss.expected <= run.loss.high <= 1
    if found.loss is not None:
        assert 0 <= found.loss.low <= found.loss.expected <= found.loss.high <= 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("emergency", [False, True])
def test_the_caps_are_those_that_the_limit_then_brings(seed: int, emergency: bool) -> None:
    world = World(seed, nodes=3)
    runs = [
        world.start_job(1, {"n1": [0, 1, 2, 3]}, flex="low", watts=650),
        world.start_job(2, {"n2": [0, 1], "n3": [0, 1]}, flex="high", watts=600),
        world.start_job(3, {"n2": [2, 3]}, watts=420 + 20 * seed),
    ]
    world.run(12)
    limits = [(0.08, 0.05), (0.02, 0.1), (0.05, 0.3), (0.3, 0.04)][seed]
    for share in limits:  # the second is asked inside the window of the first
        target = Target(share=share, emergency=emergency)
        found = what_if(world.controller, world.config, world.core.science, target, world.now_ns)
        assert found.uncapped.known_mw > 0 and found.uncapped.bounded_mw == 0
        world.set_limit(found.limit_mw, emergency=emergency)
        world.run(20)
        caps = {run.run: {run.cap_mw} for run in found.runs}
        assert caps == {str(run): world.cap_of(run) for run in runs}
        window = world.controller.window
        assert window is not None and window.shortfall_mw == found.shortfall_mw
        assert world.violations == []


def test_inside_a_window_the_answer_is_the_one_without_it_and_who_waits_is_told() -> None:
    world = World(1, nodes=2)
    world.start_job(1, {"n1": [0, 1, 2, 3]}, watts=650)
    world.run(12)

    def answer(**target: object) -> WhatIf:
        asked = msgspec.convert(target, Target)
        return what_if(world.controller, world.config, world.core.science, asked, world.now_ns)

    before = answer(less_mw=100 * W)
    world.set_limit(before.limit_mw)
    world.run(20)
    inside = answer(less_mw=100 * W)
    assert inside.standing.window_mw == before.limit_mw
    assert (inside.uncapped_mw, inside.limit_mw, inside.runs) == (
        before.uncapped_mw,
        before.limit_mw,
        before.runs,
    )
    late = world.start_job(2, {"n2": [0, 1, 2, 3]}, watts=690)
    world.run(5)
    assert answer(limit_mw=before.limit_mw).waiting == (str(late),)
    roomy = answer(limit_mw=6400 * W)
    assert roomy.waiting == () and {run.job_id for run in roomy.runs} == {1, 2}
    assert roomy.uncapped.bounded_mw == 4 * 700 * W
    assert world.now_ns > 30 * NS


# --------------------------------------------------------------------------------------------------- size


def test_a_thousand_runs_are_answered_in_half_a_second() -> None:
    site = ForecastSite(nodes=1000)
    for number in range(1, 1001):
        site.hear(f"n{number}", *(gpu(f"n{number}-{i}", Run("c", number), draw_mw=600 * W) for i in range(2)))
    site.wait(6)
    for number in range(1, 1001):
        site.hear(f"n{number}", *(gpu(f"n{number}-{i}", Run("c", number), draw_mw=600 * W) for i in range(2)))
    site.learn({Run("c", number): 0.02 + 0.1 * (number % 10) / 10 for number in range(1, 1001)})
    ask(site, share=0.1)
    began_s = time.thread_time()
    found = ask(site, share=0.1)
    took_s = time.thread_time() - began_s
    assert len(found.runs) == 1000 and found.certificate.informed
    assert took_s < 0.5, f"{took_s:.2f} s of a processor"
