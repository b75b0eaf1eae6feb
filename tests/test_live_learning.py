"""The controller learns from the runs it caps: both cores in a made-up world whose jobs train as the model jobs do.

Model jobs of arXiv 2609.11542, fitted to published figures; simulated, not measured.
"""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from slurm_pfi.controller import state as cs
from slurm_pfi.controller.measuring.activity import lost_by_activity
from slurm_pfi.model import LimitStep, Run
from slurm_pfi.sim.jobs import model_jobs

from .world import DEFAULT_MW, NS, Fate, World

GPUS = 4
NODES = 6
FLEXES = ("high", "high", "medium", "30%", "high", "20%")


def busy_world(seed: int, policy: str, flexes: tuple[str, ...] = FLEXES, fate: Fate | None = None) -> World:
    """A site of 24 GPUs, one job on every two, model jobs drawn by the seed; every baseline seen."""
    world = World(seed, nodes=NODES, gpus=GPUS, fate=fate, name=policy)
    world.run(2)
    draw = random.Random(seed)
    names = sorted(model_jobs())
    job_id = 0
    for node in sorted(world.nodes):
        for places in ([0, 1], [2, 3]):
            job_id += 1
            model = model_jobs()[draw.choice(names)]
            world.start_job(job_id, {node: places}, flex=draw.choice(flexes), model=model)
    world.run(40)
    return world


def kept(world: World, seconds: float) -> dict[Run, float]:
    """Share of its uncapped throughput that each job keeps over the coming seconds."""
    before = {}
    for run, trainee in world.training.items():
        trainee.advance(world.now_ns)
        before[run] = trainee.tokens
    began_ns = world.now_ns
    world.run(seconds)
    found = {}
    for run, trainee in world.training.items():
        trainee.advance(world.now_ns)
        full = trainee.tokens_per_s * (world.now_ns - began_ns) / NS
        found[run] = (trainee.tokens - before[run]) / full
    return found


def draw_w(world: World) -> float:
    return sum(
        world._draw_mw(device) for node in world.nodes.values() for device in node.devices.values()
    ) / 1000 + sum(s.overhead_w for s in world.config.node_set) * len(world.nodes)


def in_window(seed: int, policy: str) -> float:
    """Throughput kept by all under a limit 15 % below the draw, after some minutes in which to learn."""
    world = busy_world(seed, policy)
    world.set_limit(round(draw_w(world) * 850))
    world.run(200)
    found = kept(world, 60)
    assert not world.violations
    knowledge = world.controller.knowledge
    assert knowledge is not None
    assert all(knowledge.is_learned(run) for run in world.training)
    for run, share in found.items():
        flex = world.controller.runs[run].flex
        assert flex is not None
        assert share >= 1 - flex.max_loss, f"{run} was promised no more than {flex.max_loss:.0%}"
    return sum(found.values()) / len(found)


@pytest.mark.parametrize("seed", [1, 3])
def test_what_is_measured_in_a_window_moves_the_caps_to_where_they_cost_less(seed: int) -> None:
    equal, by_index, marginal = (in_window(seed, policy) for policy in ("equal", "pfi", "marginal"))
    assert marginal > equal + 0.001
    assert by_index > equal


def test_before_anything_is_measured_all_policies_cut_alike() -> None:
    caps = []
    for policy in ("equal", "marginal"):
        world = busy_world(4, policy)
        world.set_limit(round(draw_w(world) * 850))
        world.run(3)
        caps.append({run: world.cap_of(run) for run in world.training})
    assert caps[0] == caps[1]


@pytest.mark.parametrize("liars", [{1}, {1, 2, 3, 4, 5, 6}])
def test_lie_who_slows_its_counter_under_a_cap_is_not_let_off(liars: set[int]) -> None:
    """Told loss far beyond what can be, by one run or by half the site: it is cut as everybody is, learning or not.

    Where GPUs do not tell what they do; where they do, no lie gets so far.
    """
    world = busy_world(4, "marginal", flexes=("medium",), fate=Fate(activity=False))
    true = world.told_tokens
    base: dict[Run, float] = {}

    def told(run: Run) -> float:
        base.setdefault(run, true(run))
        return base[run] + (true(run) - base[run]) / 1.3 if run.job_id in liars else true(run)

    world.set_limit(round(draw_w(world) * 850))
    world.told_tokens = told  # type: ignore[method-assign]
    world.run(240)
    knowledge = world.controller.knowledge
    assert knowledge is not None
    for run in world.training:
        assert knowledge.is_unlikely(run) == (run.job_id in liars)
        assert knowledge.is_learned(run) == (run.job_id not in liars)
        assert (world.controller.runs[run].record.loss is None) == (run.job_id in liars)
    equal = busy_world(4, "equal", flexes=("medium",))
    equal.set_limit(round(draw_w(equal) * 850))
    equal.run(240)
    stranger = Run("world", 99, 0)
    for run in world.training:
        if run.job_id in liars:
            draw_mw = world.controller.runs[run].record.draw_mw
            assert draw_mw is not None
            floor_mw = draw_mw * (1 - knowledge.greatest_reduction(stranger, "NVIDIA H200", 0.15))
            assert max(world.cap_of(run)) <= max(floor_mw, *equal.cap_of(run)) * 1.03
    found = kept(world, 60)
    assert min(found.values()) >= 1 - 0.15
    even = kept(equal, 60)
    assert sum(found.values()) >= sum(even.values()) - 0.003 * len(even)


def with_a_liar(factor: float) -> World:
    """A site under a limit whose first job tells so many times what it does, while a cap slows it."""
    world = busy_world(10, "marginal", flexes=("medium", "high"), fate=Fate(noise=0.01))
    liar, true = Run("world", 1, 0), world.told_tokens
    was = said = true(liar)

    def told(run: Run) -> float:
        nonlocal was, said
        if run != liar:
            return true(run)
        now = true(run)
        slowed = min(device.enforced_mw for device in world.training[run].devices) < DEFAULT_MW
        said, was = said + (now - was) * (factor if slowed else 1.0), now
        return said

    world.set_limit(round(draw_w(world) * 850))
    world.told_tokens = told  # type: ignore[method-assign]
    world.run(240)
    assert not world.violations
    return world


@pytest.mark.parametrize("factor", [1 / 1.05, 1.05])
def test_lie_of_5_percent_that_any_curve_allows_bears_its_share(factor: float) -> None:
    """By what its GPUs did it gets about the cap of an honest twin; without that it would be let off, or starved."""
    liar = Run("world", 1, 0)
    honest, lied = with_a_liar(1.0), with_a_liar(factor)
    assert [run for run, view in honest.controller.runs.items() if view.record.disputed] == []
    assert [run for run, view in lied.controller.runs.items() if view.record.disputed] == [liar]
    (fair_mw,), (cap_mw,) = honest.cap_of(liar), lied.cap_of(liar)
    assert abs(cap_mw - fair_mw) <= 0.05 * fair_mw
    record = lied.controller.runs[liar].record
    assert record.loss is None
    tag = lied.tags[liar][-1][1]
    assert tag.source == "default"
    shown = lost_by_activity(record)
    assert shown is not None
    true_loss = 1 - lied.training[liar].workload.relative_throughput(cap_mw / 1000)
    assert abs(shown.loss - true_loss) < 0.02


def test_of_many_steps_to_come_only_the_next_takes_a_certificate_and_all_keep_their_limit() -> None:
    world = busy_world(1, "marginal")
    full_mw = draw_w(world) * 1000
    world.set_limit(round(full_mw * 0.85))
    world.run(60)
    steps = tuple(
        LimitStep(start_unix_s=world.unix_s + 300 * i, limit_mw=round(full_mw * (0.9 - 0.005 * i)))
        for i in range(12)
    )
    world.limits = (replace(world.limits[0], revision=2, steps=steps),)
    before = world.controller.knowledge
    assert before is not None
    before._cuts.clear()
    world.tell(cs.LimitsChanged(limits=world.limits))
    world.tell(cs.Cycle(now_unix_s=world.unix_s))
    assert world.controller.knowledge is before
    assert 1 <= len(before._cuts) <= 4, "now, fresh and as it is in force, and the next step"
    plans = [view.outstanding[-1].plan for view in world.controller.nodes.values()]
    for place in range(12):
        caps_mw = 0
        for plan in plans:
            then = [step for step in plan.steps if step.starts_in_s <= 300 * place][-1]
            jobs = world.nodes[plan.node].jobs
            caps_mw += sum((cap.cap_mw or 0) * len(jobs[cap.run].gpus) for cap in then.caps)
        assert 0 < caps_mw + NODES * 500_000 <= steps[place].limit_mw  # type: ignore[operator]
