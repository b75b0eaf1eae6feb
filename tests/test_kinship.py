"""What a run is told of earlier runs of its work."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import pytest

from slurm_pfi.controller.kinship import (
    MIXED_SD,
    MOST_KINDS,
    kin_labels,
    kin_name,
    kin_of,
    with_kin_points,
    with_recalled,
)
from slurm_pfi.controller.learning import gather
from slurm_pfi.controller.measuring.record import Recalled, Record
from slurm_pfi.controller.science import Science
from slurm_pfi.elasticity.evidence import Measurement, RunEvidence
from slurm_pfi.elasticity.library import Library
from slurm_pfi.model import Run
from slurm_pfi.sim.jobs import model_job
from slurm_pfi.store.rows import Kin

from .world import World, job_info

NAME = "finetune-70b"
RUN = Run("world", 1, 0)


def start(world: World, job_id: int, node: str, name: str = NAME) -> Run:
    run = world.start_job(job_id, {node: [0, 1]}, flex="high", model=model_job("L70 FT nc"))
    world.slurm[run] = replace(world.slurm[run], name=name)
    return run


@cache
def trained() -> tuple[World, Kin]:
    """One run that was seen uncapped and then measured in a window, and what is remembered of it."""
    world = World(5)
    world.run(2)
    start(world, 1, "n1")
    world.run(60)
    world.set_limit(4_650_000)  # 3 x 500 W of overhead, ten parked GPUs of 200 W, 575 W for each of its own
    world.run(90)
    state = world.controller
    kin = kin_of(state.runs[RUN], state.nodes, world.now_ns, 1000.0)
    assert kin is not None
    return world, kin


def test_what_was_seen_of_a_run_is_remembered_under_its_name() -> None:
    world, kin = trained()
    assert (kin.key.uid, kin.key.name, kin.key.gpu_model, kin.key.gpus) == (1000, NAME, "NVIDIA H200", 2)
    model = model_job("L70 FT nc")
    assert kin.draw_mw == pytest.approx(model.workload.draw_w(700) * 1000, rel=0.01)
    assert kin.rate_per_s == pytest.approx(model.tokens_per_s_on(2), rel=0.01)
    assert len(kin.points) == 1
    reduction, loss, sd = kin.points[0]
    cap_w = next(iter(world.cap_of(RUN))) / 1000
    assert reduction == pytest.approx(1 - cap_w / model.workload.draw_w(700), abs=0.01)
    assert loss == pytest.approx(1 - model.workload.relative_throughput(cap_w), abs=0.01)
    assert 0 < sd < 0.02


def test_the_next_run_of_that_work_begins_with_it_and_is_not_bounded() -> None:
    world, kin = trained()
    state = world.controller
    view = msgspec.structs.replace(state.runs[RUN], record=Record(), kins=(kin,))
    told = with_recalled(view, state.nodes)
    assert told.kins == ()
    assert told.record.source == "recalled"
    assert told.record.draw_mw == kin.draw_mw
    assert told.record.baseline_sd >= 0.03


@pytest.mark.parametrize(
    "other", [{"gpus": 4}, {"gpu_model": "NVIDIA A100"}, {"uid": 7}, {"account": "b"}, {"name": "x"}]
)
def test_other_work_tells_it_nothing(other: dict[str, object]) -> None:
    world, kin = trained()
    state = world.controller
    stranger = msgspec.structs.replace(kin, key=msgspec.structs.replace(kin.key, **other))
    view = msgspec.structs.replace(state.runs[RUN], record=Record(), kins=(stranger,))
    assert with_recalled(view, state.nodes).record.source == "bounded"


def test_it_is_told_only_when_all_its_nodes_are_known_for_their_number_tells_which_work_it_is() -> None:
    world, kin = trained()
    state = world.controller
    view = state.runs[RUN]
    assert view.job is not None
    wide = msgspec.structs.replace(
        view, record=Record(), kins=(kin,), job=replace(view.job, nodes=("n1", "n2"))
    )
    assert with_recalled(wide, state.nodes) == wide


def test_a_run_seen_uncapped_keeps_its_own_baseline() -> None:
    world, kin = trained()
    state = world.controller
    view = msgspec.structs.replace(state.runs[RUN], kins=(kin,))
    assert with_recalled(view, state.nodes).record == view.record


@pytest.mark.parametrize("name", ["", "bash", "Wrap", "interactive", "job.sh"])
def test_a_name_that_says_nothing_is_no_name(name: str) -> None:
    assert kin_name(replace(job_info(RUN, ("n1",), "main"), name=name)) == ""
    world, _ = trained()
    view = world.controller.runs[RUN]
    assert view.job is not None
    nameless = msgspec.structs.replace(view, job=replace(view.job, name=name))
    assert kin_of(nameless, world.controller.nodes, world.now_ns, 0.0) is None


def test_points_of_earlier_runs_keep_the_error_of_their_own_baseline() -> None:
    own = RunEvidence("H200", measurements=(Measurement(0.1, 0.05, 0.003, segment=2),), baseline="recalled")
    recalled = Recalled(
        draw_mw=650_000, rate_per_s=1.0, sd=0.01, points=((0.2, 0.1, 0.004), (1.7, 0.1, 0.004))
    )
    both = with_kin_points(own, Record(recalled=recalled))
    assert both.measurements[1] == own.measurements[0]
    assert (both.measurements[0].segment, both.measurements[0].baseline_sd) == (1, 0.03)
    assert len(both.measurements) == 2, "a point that cannot be is left out"
    assert with_kin_points(own, Record()) is own


def test_runs_of_one_name_are_kin_only_where_their_baselines_agree() -> None:
    world = World(6, nodes=2)
    world.run(2)
    same = [start(world, 1, "n1"), start(world, 2, "n2")]
    other = world.start_job(3, {"n1": [2, 3]}, flex="high", model=model_job("oss FT 4k"))
    world.slurm[other] = replace(world.slurm[other], name=NAME)
    nameless = world.start_job(4, {"n2": [2, 3]}, flex="high", model=model_job("L70 FT nc"))
    world.slurm[nameless] = replace(world.slurm[nameless], name="sbatch")
    world.run(5)
    assert kin_labels(world.controller.runs.values()) == {}, "nothing was seen of anyone yet"
    world.run(60)
    labels = kin_labels(world.controller.runs.values())
    assert labels[same[0]] == labels[same[1]] != labels[other]
    assert nameless not in labels


def test_kin_are_told_nothing_of_a_run_whose_counter_its_gpus_contradict() -> None:
    world, _ = trained()
    state = world.controller
    view = state.runs[RUN]
    science = Science(Library.load_default())
    assert dict(gather(state, science, world.now_ns))[RUN].kin
    liar = msgspec.structs.replace(
        view, record=msgspec.structs.replace(view.record, disputed="at a cap of 480 W it kept ...")
    )
    assert kin_of(liar, state.nodes, world.now_ns, 1000.0) is None
    state = msgspec.structs.replace(state, runs={**state.runs, RUN: liar})
    assert not dict(gather(state, science, world.now_ns))[RUN].kin


def test_a_name_that_was_used_for_different_work_is_not_believed_again() -> None:
    world, kin = trained()
    state = world.controller
    view = state.runs[RUN]
    assert kin.draw_mw is not None
    wrong = Recalled(draw_mw=round(kin.draw_mw * 0.7), rate_per_s=kin.rate_per_s, sd=0.01)
    surprised = msgspec.structs.replace(view, record=msgspec.structs.replace(view.record, recalled=wrong))
    remembered = kin_of(surprised, state.nodes, world.now_ns, 0.0)
    assert remembered is not None
    assert remembered.sd >= MIXED_SD
    following = msgspec.structs.replace(view, record=Record(), kins=(remembered,))
    told = with_recalled(following, state.nodes)
    assert told.record.source == "bounded"
    again = kin_of(
        msgspec.structs.replace(view, name_is_mixed=told.name_is_mixed), state.nodes, world.now_ns, 0.0
    )
    assert again is not None
    assert again.sd >= MIXED_SD, "it stays so"


def test_a_name_for_thousands_of_kinds_of_work_costs_no_time_and_the_rest_of_them_are_alone() -> None:
    """An array whose every task is other work: each run is held against a few others and not against all."""
    world, _ = trained()
    view = world.controller.runs[RUN]
    free = next(level for level in view.record.levels if level.cap_mw is None)
    faster = 1.08
    views = []
    for number in range(MOST_KINDS + 20):
        batches = tuple(
            figure * (faster**number if place % 2 else 1.0) for place, figure in enumerate(free.batches)
        )
        level = msgspec.structs.replace(free, batches=batches)
        for twin in (0, 1):
            views.append(
                msgspec.structs.replace(
                    view,
                    run=Run("world", 10 + number, twin),
                    record=msgspec.structs.replace(view.record, levels=(level,)),
                )
            )
    labels = kin_labels(views)
    assert len(set(labels.values())) == MOST_KINDS
    assert len(labels) == 2 * MOST_KINDS
    for number in range(10, 10 + MOST_KINDS):
        assert labels[Run("world", number, 0)] == labels[Run("world", number, 1)]
