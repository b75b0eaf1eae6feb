"""What was learned of runs, as the controller asks for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pfi.allocation.guard import TRUST_FEW, InForce
from slurm_pfi.allocation.policies import allocate
from slurm_pfi.allocation.problem import Problem, RunDemand
from slurm_pfi.allocation.solve import Shares, equal
from slurm_pfi.controller.knowledge import KEPT_CUTS, HeldCut, Knowledge, learn_runs
from slurm_pfi.controller.science import GRID_W, Science
from slurm_pfi.elasticity.evidence import Measurement, RunEvidence
from slurm_pfi.elasticity.library import Library
from slurm_pfi.model import Run

SCIENCE = Science(Library.load_default())
H200 = "NVIDIA H200"
W = 1000


def run(number: int) -> Run:
    return Run("c", number)


def site_shares(runs: int, end: float = 0.3) -> Shares:
    ones = np.ones(runs)
    return Shares(watts=650.0 * ones, value=ones, start=0.0 * ones, end=end * ones)


def shown(runs: int) -> list[tuple[Run, RunEvidence]]:
    """Runs that were all cut by 5 and by 10 %: the even ones lost 3 and 8 %, the odd ones 0.5 and 1 %."""
    return [
        (
            run(i),
            RunEvidence(
                H200,
                kin=f"k{i}",
                baseline="seen",
                baseline_sd=0.005,
                measurements=tuple(
                    Measurement(x, flexible if i % 2 else rigid, 0.003)
                    for x, flexible, rigid in ((0.05, 0.005, 0.03), (0.10, 0.01, 0.08))
                ),
            ),
        )
        for i in range(runs)
    ]


def measured(runs: int) -> Knowledge:
    return learn_runs(SCIENCE.prior, shown(runs), 1)


KNOWLEDGE = measured(10)
ASKED = [(run(i), H200) for i in range(10)]


@settings(max_examples=25)
@given(
    ends=st.lists(st.floats(0.0, 0.6), min_size=1, max_size=8),
    share=st.floats(0.0, 1.0),
)
def test_while_nothing_is_known_the_cut_is_the_equal_one(ends: list[float], share: float) -> None:
    n = len(ends)
    shares = Shares(watts=np.full(n, 600.0), value=np.ones(n), start=np.zeros(n), end=np.array(ends))
    need = share * shares.most
    cut = SCIENCE.ignorance.cut([(run(i), H200) for i in range(n)], shares, need)
    assert np.array_equal(cut.reduction, equal(shares, need))
    assert cut.step == 0


def test_who_was_measured_to_lose_little_gives_more_and_no_more_than_trust_allows() -> None:
    shares = site_shares(10)
    need = 0.1 * 6500
    cut = KNOWLEDGE.cut(ASKED, shares, need)
    assert cut.step > 0
    assert cut.gain > 0
    assert float(shares.watts @ cut.reduction) == pytest.approx(need)
    assert cut.reduction[1::2].min() > 0.11
    assert cut.reduction[0::2].max() < 0.09
    assert cut.reduction.max() <= 0.10 + TRUST_FEW + 1e-9


def test_a_run_that_came_after_the_learning_stands_for_its_gpu_model() -> None:
    new = (run(99), H200)
    mean, sd = KNOWLEDGE.losses([*ASKED, new], [0.1] * 11)
    assert mean[1] < mean[10] < mean[0]
    assert sd[10] > sd[:10].max()
    assert not KNOWLEDGE.is_learned(run(99))
    assert KNOWLEDGE.is_learned(run(1))
    assert list(KNOWLEDGE.expected(H200, 0.1)) == pytest.approx([mean[10], sd[10]])
    cut = KNOWLEDGE.cut([*ASKED, new, (run(98), "some other GPU")], site_shares(12), 0.1 * 12 * 650)
    assert float(cut.reduction.sum() * 650) == pytest.approx(0.1 * 12 * 650)


def test_a_floor_follows_what_was_measured_and_never_allows_where_no_loss_is() -> None:
    flexible, rigid, unknown = run(1), run(0), run(99)
    reach = {one: KNOWLEDGE.greatest_reduction(one, H200, 0.05) for one in (flexible, rigid, unknown)}
    assert reach[rigid] < 0.07 < reach[flexible]
    assert reach[unknown] < reach[rigid], "what is not known allows least"
    for one in (flexible, rigid, unknown):
        limits = [KNOWLEDGE.greatest_reduction(one, H200, limit) for limit in (0.0, 0.05, 0.1, 0.3, 1.0)]
        assert limits[0] == 0
        assert limits == sorted(limits)


def test_no_reduction_costs_nothing_for_sure() -> None:
    mean, sd = KNOWLEDGE.losses(ASKED, [0.0] * 10)
    assert not mean.any()
    assert not sd.any()


def test_indices_order_runs_as_their_losses_do_and_are_none_where_no_cap_binds() -> None:
    flexible, rigid, idle = KNOWLEDGE.indices(
        [ASKED[1], ASKED[0], ASKED[2]], [650 * W, 650 * W, 150 * W], GRID_W
    )
    assert flexible is not None
    assert rigid is not None
    assert flexible > rigid
    assert idle is None
    assert KNOWLEDGE.indices([], [], GRID_W) == []


def test_the_same_question_is_answered_once_and_memory_is_bounded() -> None:
    knowledge = measured(4)
    shares = site_shares(4)
    assert knowledge.cut(ASKED[:4], shares, 200.0) is knowledge.cut(ASKED[:4], shares, 200.0)
    for need in range(3 * KEPT_CUTS):
        knowledge.cut(ASKED[:4], shares, float(need))
    assert len(knowledge._cuts) == KEPT_CUTS


def test_the_allocation_takes_the_certified_cut_in_the_order_of_its_problem() -> None:
    order = [7, 0, 3, 9, 1, 2, 8, 5, 4, 6]
    demands = tuple(
        RunDemand(
            run=run(i),
            gpus=1,
            ceiling_mw=700 * W,
            draw_mw=650 * W,
            floor_mw=455 * W,
            device_min_mw=200 * W,
            curve=SCIENCE.mean,
        )
        for i in order
    )
    asked = [(demand.run, H200) for demand in demands]
    done = allocate(
        Problem(demands, 10 * 585 * W),
        "marginal",
        lambda shares, need, place: KNOWLEDGE.cut([asked[i] for i in place], shares, need).reduction,
    )
    caps = dict(zip(order, done.caps_mw, strict=True))
    assert max(caps[i] for i in range(1, 10, 2)) < min(caps[i] for i in range(0, 10, 2))
    assert sum(caps.values()) <= 10 * 585 * W
    equally = allocate(Problem(demands, 10 * 585 * W), "equal", lambda *_: pytest.fail("equal asks nobody"))
    assert len(set(equally.caps_mw)) == 1


def test_who_tells_more_than_can_be_is_neither_spared_nor_cut_deeper_and_its_index_is_not_told_as_measured() -> (
    None
):
    """Else a job that slows its counter under a cap is given its watts back, and others pay for it."""
    (first, honest), *others = shown(10)
    knowledge = learn_runs(SCIENCE.prior, [(first, replace(honest, unlikely=True)), *others], 2)
    shares = site_shares(10)
    need = 0.1 * 6500
    cut = knowledge.cut(ASKED, shares, need)
    even = equal(shares, need)
    assert cut.step > 0
    assert cut.reduction[0] == pytest.approx(even[0], rel=1e-12)
    assert KNOWLEDGE.cut(ASKED, shares, need).reduction[0] < 0.9 * even[0]
    assert knowledge.is_unlikely(run(0))
    assert not knowledge.is_learned(run(0))
    assert not knowledge.is_unlikely(run(1))
    assert not knowledge.is_unlikely(run(99))


def test_a_stranger_is_expected_to_be_as_the_runs_of_its_gpu_model_were_however_the_driver_spells_it() -> (
    None
):
    rigid = tuple(Measurement(x, x, 0.003) for x in (0.05, 0.10))
    evidence = RunEvidence("", baseline="seen", baseline_sd=0.005, measurements=rigid)
    names = (H200, "NVIDIA H200 SXM")
    found = [(run(i), replace(evidence, gpu_model=names[i % 2], kin=f"k{i}")) for i in range(8)]
    knowledge = learn_runs(SCIENCE.prior, found, 1)
    known, _ = knowledge.expected("H200", 0.1)
    unknown, _ = knowledge.expected("NVIDIA A100-SXM4-80GB", 0.1)
    assert known > unknown + 0.005
    assert knowledge.expected(names[1], 0.1) == knowledge.expected(H200, 0.1)


def test_lie_half_a_site_that_gains_under_caps_lowers_nobody_elses_floor() -> None:
    ahead = tuple(Measurement(x, -0.5 * x, 0.003) for x in (0.05, 0.10, 0.15))
    liars = [
        (run(i), RunEvidence(H200, f"k{i}", measurements=ahead, baseline="seen", baseline_sd=0.005))
        for i in range(6)
    ]
    knowledge = learn_runs(SCIENCE.prior, [*liars, (run(6), RunEvidence(H200))], 1)
    for limit in (0.05, 0.15, 0.3):
        unknown = SCIENCE.ignorance.greatest_reduction(run(6), H200, limit)
        assert knowledge.greatest_reduction(run(6), H200, limit) <= unknown
        assert knowledge.greatest_reduction(run(99), H200, limit) <= unknown
        assert knowledge.greatest_reduction(run(0), H200, limit) > unknown, "who told it is taken at its word"
    mean, _ = knowledge.losses([(run(6), H200)], [0.1])
    before, _ = SCIENCE.ignorance.losses([(run(6), H200)], [0.1])
    assert mean[0] < before[0], "the shares go by what its like have shown"


def test_the_cut_in_force_is_known_by_run_whoever_came_or_went() -> None:
    cut = KNOWLEDGE.cut(ASKED[:3], site_shares(3), 200.0)
    held = HeldCut(tuple(run(i) for i in range(3)), InForce(200.0, cut))
    assert held.of(held.runs) is held.cut
    other = held.of((run(7), run(2), run(0)))
    assert np.isnan(other.cut.reduction[0])
    assert other.cut.reduction[1:].tolist() == cut.reduction[[2, 0]].tolist()
    assert np.isfinite(KNOWLEDGE.cut(ASKED[:3], site_shares(3), 200.0, other).reduction).all()
