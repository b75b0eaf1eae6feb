"""When a run's tag is written, and what stands in it: both cores in a made-up world with jobs that train."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from slurm_pfi.model import Run
from slurm_pfi.sim.jobs import ModelJob, model_job
from slurm_pfi.slurm.tag import Tag, format_tag, parse_tag

from .world import NS, World

DENSE, SPARSE = model_job("L70 FT nc"), model_job("oss FT 4k")


def tagged_world(**times: float) -> tuple[World, Run, Run]:
    """Two jobs of four GPUs each on two nodes, seen uncapped for two minutes."""
    world = World(11, nodes=2)
    world.config = msgspec.structs.replace(
        world.config, times=msgspec.structs.replace(world.config.times, **times)
    )
    world.core = replace(world.core, config=world.config)
    world.run(2)
    dense, sparse = (
        world.start_job(number, {node: [0, 1, 2, 3]}, flex="high", model=model)
        for number, node, model in ((1, "n1", DENSE), (2, "n2", SPARSE))
    )
    world.run(120)
    return world, dense, sparse


def limit(world: World, cap_w: float) -> None:
    """Room for this cap on every GPU."""
    world.set_limit(round((2 * 500 + 8 * cap_w) * 1000))


def last(world: World, run: Run) -> Tag:
    return world.tags[run][-1][1]


def since(world: World, run: Run, at_ns: int) -> list[Tag]:
    return [tag for written_ns, tag in world.tags[run] if written_ns >= at_ns]


def true_loss(model: ModelJob, cap_w: float) -> float:
    return 1 - model.workload.relative_throughput(cap_w)


def test_before_a_window_it_says_the_librarys_default_and_is_not_written_again_for_nothing() -> None:
    world, dense, _ = tagged_world()
    world.run(1000)
    assert len(world.tags[dense]) <= 2, "once more when its counter was heard first"
    tag = last(world, dense)
    assert (tag.source, tag.loss, tag.energy_wh, tag.capped_s) == ("default", 0.0, 0, 0.0)


def test_a_window_makes_it_measured_and_what_it_cost_is_the_jobs_own() -> None:
    world, dense, sparse = tagged_world()
    began_ns = world.now_ns
    limit(world, 590)
    world.run(400)
    for run, model in ((dense, DENSE), (sparse, SPARSE)):
        tag = last(world, run)
        assert tag.source == "measured"
        assert tag.pfi_low is not None
        assert tag.pfi_high is not None
        assert tag.pfi_low <= tag.pfi <= tag.pfi_high
        assert (tag.grid_low_w, tag.grid_high_w, tag.grid_step_w) == (200, 700, 100)
        trainee = world.training[run]
        trainee.advance(world.now_ns)
        life_s = (world.now_ns - trainee.began_ns) / NS
        own = 1 - trainee.tokens / (model.tokens_per_s_on(4) * life_s)
        assert tag.loss == pytest.approx(own, abs=0.01)
        assert tag.energy_wh is not None
        assert tag.energy_wh < 0
        assert tag.capped_s == pytest.approx((world.now_ns - began_ns) / NS, abs=120)
        assert parse_tag(format_tag(tag)).source == "measured"
    assert last(world, sparse).pfi > last(world, dense).pfi


def test_early_in_a_window_it_is_fresh_for_slurm_keeps_what_stands_when_a_job_ends() -> None:
    world, dense, _ = tagged_world()
    began_ns = world.now_ns
    limit(world, 590)
    world.run(240)
    written = since(world, dense, began_ns)
    assert 4 <= len(written) <= 8, "at once, after half a minute, a minute, two minutes ..."
    assert written[-1].capped_s >= 120


def test_it_is_written_once_when_the_cap_is_lifted_and_then_only_for_a_reason() -> None:
    world, dense, _ = tagged_world()
    limit(world, 590)
    world.run(300)
    world.set_limit(None)
    cleared_ns = world.now_ns
    world.run(20)
    written = since(world, dense, cleared_ns)
    assert 1 <= len(written) <= 2
    capped_s = written[-1].capped_s
    world.run(1000)
    later = since(world, dense, cleared_ns)[len(written) :]
    assert len(later) <= 8, "its loss over the whole life falls as it runs on; half points of it count"
    assert last(world, dense).capped_s == pytest.approx(capped_s)
    assert later == [] or later[-1].loss is not None


def test_a_slow_release_does_not_write_tags_all_the_time() -> None:
    world, dense, _ = tagged_world(rebound_s=120.0)
    limit(world, 500)
    world.run(300)
    world.set_limit(None)
    cleared_ns = world.now_ns
    world.run(200)
    assert world.all_restored()
    assert len(since(world, dense, cleared_ns)) <= 6


def test_it_is_fresh_just_before_the_jobs_time_is_over() -> None:
    world, dense, _ = tagged_world()
    limit(world, 590)
    world.run(900)
    view = world.controller.runs[dense]
    assert view.job is not None
    end_unix_s = round(world.unix_s) + 400
    ending = msgspec.structs.replace(view, job=replace(view.job, end_unix_s=end_unix_s))
    world.controller = msgspec.structs.replace(
        world.controller, runs={**world.controller.runs, dense: ending}
    )
    world.run(400)
    at_ns, tag = world.tags[dense][-1]
    assert end_unix_s - 20 <= tag.at_unix_s <= end_unix_s - 10
    assert at_ns < world.now_ns


def test_a_tag_that_slurm_does_not_take_is_tried_again_less_often_each_time_and_stays_our_record() -> None:
    world, dense, _ = tagged_world()
    world.slurm_up = False
    began_ns = world.now_ns
    limit(world, 590)
    world.run(120)
    tries_s = [(at_ns - began_ns) / NS for at_ns, _ in world.tags[dense] if at_ns >= began_ns]
    assert 4 <= len(tries_s) <= 8, tries_s
    waits_s = [later - earlier for earlier, later in pairwise(tries_s)]
    assert waits_s[-1] > 2 * waits_s[0]
    view = world.controller.runs[dense]
    assert view.tag_failed >= 3
    assert parse_tag(view.tag_text).capped_s > 0, "what was worked out is not forgotten"
    world.slurm_up = True
    world.run(120)
    assert world.controller.runs[dense].tag_failed == 0
    assert last(world, dense).capped_s > 120


def test_of_a_requeued_job_the_last_runs_tag_is_replaced_at_once_and_ours_says_which_run_it_is_of() -> None:
    world, dense, _ = tagged_world(tag_after_s=30.0)
    assert last(world, dense).restart == 0
    world.end_job(dense)
    world.run(5)
    again = Run(cluster=dense.cluster, job_id=dense.job_id, restart=1)
    began_ns = world.now_ns
    world.start_job(1, {"n1": [0, 1, 2, 3]}, flex="high", model=DENSE, restart=1)
    world.run(15)
    at_ns, tag = world.tags[again][0]
    assert at_ns - began_ns < 15 * NS
    assert (tag.restart, tag.capped_s, tag.loss or 0.0) == (1, 0.0, 0.0)
    assert format_tag(tag).endswith(";restart=1")


def test_a_tag_of_a_site_with_simulated_gpus_says_so() -> None:
    world, dense, _ = tagged_world()
    assert not last(world, dense).simulated
    node = msgspec.structs.replace(world.config.node, identity_dir="/simulated")
    world.core = replace(world.core, config=msgspec.structs.replace(world.config, node=node))
    limit(world, 590)
    world.run(30)
    assert last(world, dense).simulated
