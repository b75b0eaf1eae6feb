"""What counts as evidence, with how much noise, and how it is laid out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from slurm_pfi.elasticity.evidence import (
    LEAST_BASELINE_SD,
    LEAST_NOISE_SD,
    MOST_LENDERS,
    MOST_LENT,
    EvidenceError,
    Measurement,
    PfiEvidence,
    RunEvidence,
    loss_from_samples,
    pack,
    pool_kin,
)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: PfiEvidence(math.nan, 0.1, (0.1,)), "says nothing"),
        (lambda: PfiEvidence(1.5, -0.1, (0.1,)), "says nothing"),
        (lambda: PfiEvidence(1.5, math.inf, (0.1,)), "says nothing"),
        (lambda: PfiEvidence(1e6, 0.1, (0.1,)), "within -1000..1000, got 1000000"),
        (lambda: PfiEvidence(1.5, 0.1, ()), "the grid of a PFI"),
        (lambda: PfiEvidence(1.5, 0.1, (0.2, 1.2)), "the grid of a PFI"),
        (lambda: PfiEvidence(1.5, 0.1, (math.nan,)), "the grid of a PFI"),
        (lambda: Measurement(-0.1, 0.0, 0.01), "a reduction lies within 0..1, got -0.1"),
        (lambda: Measurement(math.nan, 0.0, 0.01), "a reduction lies within"),
        (lambda: Measurement(0.1, 1.1, 0.01), "a loss lies within -10..1, got 1.1"),
        (lambda: Measurement(0.1, -11.0, 0.01), "a loss lies within"),
        (lambda: Measurement(0.1, math.nan, 0.01), "a loss lies within"),
        (lambda: Measurement(0.1, 0.0, -1), "noise -1 or age"),
        (lambda: Measurement(0.1, 0.0, math.inf), "noise inf"),
        (lambda: Measurement(0.1, 0.0, 0.1, age_s=-1), "or age -1"),
        (lambda: Measurement(0.1, 0.0, 0.1, baseline_sd=math.nan), "baseline_sd is a number"),
        (lambda: Measurement(0.1, 0.0, 0.1, baseline_sd=-1.0), "baseline_sd is a number"),
        (lambda: RunEvidence("g", baseline_sd=math.inf), "a baseline's standard deviation"),
        (lambda: loss_from_samples([1.0, 1.0, 1.0], 1.0), "4 samples or more"),
        (lambda: loss_from_samples([1.0, 1.0, 1.0, math.nan], 1.0), "throughputs are numbers"),
        (lambda: loss_from_samples([1.0, 1.0, 1.0, -1.0], 1.0), "throughputs are numbers"),
        (lambda: loss_from_samples([1.0] * 4, 0.0), "a baseline throughput"),
        (lambda: loss_from_samples([1.0] * 4, math.nan), "a baseline throughput"),
    ],
)
def test_what_is_no_evidence_is_refused(made: Callable[[], object], says: str) -> None:
    with pytest.raises(EvidenceError) as error:
        made()
    assert says in str(error.value)


def test_a_baseline_is_never_surer_than_its_source() -> None:
    for source, least in LEAST_BASELINE_SD.items():
        assert RunEvidence("g", baseline=source).tau == least
        assert RunEvidence("g", baseline=source, baseline_sd=0.5).tau == 0.5


def test_the_loss_and_its_noise_come_from_the_samples() -> None:
    rng = np.random.default_rng(1)
    rate = 80.0 * (1 + 0.05 * rng.standard_normal((400, 64)))
    loss, sd = loss_from_samples(rate, np.full(400, 100.0))
    assert loss.mean() == pytest.approx(0.2, abs=0.001)
    assert sd.mean() == pytest.approx(loss.std(), rel=0.1)
    assert sd.mean() == pytest.approx(0.8 * 0.05 / 8, rel=0.1)


def test_samples_that_follow_each_other_do_not_count_as_many() -> None:
    rng = np.random.default_rng(2)
    white = rng.standard_normal((300, 256))
    slow = np.empty_like(white)
    slow[:, 0] = white[:, 0]
    for i in range(1, 256):
        slow[:, i] = 0.9 * slow[:, i - 1] + math.sqrt(1 - 0.81) * white[:, i]
    _, sd_white = loss_from_samples(1 + 0.05 * white, np.ones(300))
    loss, sd_slow = loss_from_samples(1 + 0.05 * slow, np.ones(300))
    assert sd_slow.mean() > 2.5 * sd_white.mean()
    assert sd_slow.mean() > 0.6 * loss.std()  # batches of 16 hide little of it


def test_no_measurement_is_believed_to_be_without_noise() -> None:
    loss, sd = loss_from_samples(np.ones(100), 2.0)
    assert (float(loss), float(sd)) == (0.5, LEAST_NOISE_SD)


def test_points_are_laid_out_with_their_noise_and_the_error_of_their_baseline() -> None:
    run = RunEvidence(
        "g",
        measurements=(
            Measurement(0.2, 0.1, 0.01, segment=1),
            Measurement(0.4, 0.3, 0.02, segment=1),
            Measurement(0.3, 0.2, 0.0, age_s=7200, segment=0),
            Measurement(0.3, 0.5, 0.01, segment=-1, baseline_sd=0.2),
        ),
        baseline="recalled",
    )
    batch = pack([RunEvidence("f"), run])
    assert batch.groups == ("f", "g")
    assert batch.real.tolist() == [[False] * 4, [True] * 4]
    older = math.hypot(0.03, 0.05)
    noise = np.array(
        [
            [0.01**2 + (0.03 * 0.9) ** 2, 0.03**2 * 0.9 * 0.7, 0, 0],
            [0.03**2 * 0.9 * 0.7, 0.02**2 + (0.03 * 0.7) ** 2, 0, 0],
            [0, 0, LEAST_NOISE_SD**2 + 0.01**2 + (older * 0.8) ** 2, 0],
            [0, 0, 0, 0.01**2 + (0.2 * 0.5) ** 2],
        ]
    )
    np.testing.assert_allclose(batch.noise_cov[1], noise, rtol=1e-12)
    np.testing.assert_allclose(batch.noise_cov[0], np.eye(4) * 1e6)


def test_runs_of_one_kin_are_counted_and_strangers_are_not() -> None:
    runs = [RunEvidence("g", kin="k"), RunEvidence("g"), RunEvidence("h", kin="k"), RunEvidence("g", kin="k")]
    batch = pack([*runs, RunEvidence("g")])
    assert batch.kin_size.tolist() == [2, 1, 1, 2, 1]
    assert batch.kin[0] == batch.kin[3]
    assert len(set(batch.kin.tolist())) == 4


def test_no_runs_make_an_empty_batch() -> None:
    batch = pack([])
    assert (batch.runs, batch.groups, batch.reduction.shape) == (0, (), (0, 0))


# -------------------------------------------------------------------------------------------------------- kin


def test_kin_are_lent_the_newest_segment_with_its_baseline() -> None:
    lender = RunEvidence(
        "g",
        kin="k",
        measurements=(Measurement(0.1, 0.05, 0.01, segment=3), Measurement(0.2, 0.2, 0.01, segment=2)),
        baseline="recalled",
    )
    own = Measurement(0.3, 0.2, 0.01, segment=5)
    borrower = RunEvidence("g", kin="k", measurements=(own,))
    elsewhere = RunEvidence("h", kin="k")
    unknown = RunEvidence("g")
    pooled = pool_kin([lender, borrower, elsewhere, unknown])
    assert pooled[1].measurements == (Measurement(0.1, 0.05, 0.01, segment=4, baseline_sd=0.03), own)
    assert pooled[0].measurements[0] == replace(own, segment=1, baseline_sd=0.1)
    assert pooled[2:] == [elsewhere, unknown]


def test_what_was_lent_or_recalled_keeps_the_error_it_came_with() -> None:
    point = Measurement(0.1, 0.05, 0.01, baseline_sd=0.4)
    pooled = pool_kin(
        [RunEvidence("g", kin="k", measurements=(point,), baseline="seen"), RunEvidence("g", kin="k")]
    )
    assert pooled[1].measurements[0].baseline_sd == 0.4


def test_a_great_kin_lends_the_surest_and_no_more_than_can_be_learned_from() -> None:
    runs = [
        RunEvidence(
            "g",
            kin="k",
            measurements=(Measurement(0.1, 0.001 * i, 0.01),),
            baseline="seen",
            baseline_sd=0.01 + 0.001 * i,
        )
        for i in range(200)
    ]
    pooled = pool_kin(runs)
    assert {len(run.measurements) for run in pooled} == {MOST_LENDERS + 1}
    lent = [point.loss for point in pooled[150].measurements[:-1]]
    assert lent == pytest.approx([0.001 * i for i in range(MOST_LENDERS)])
    assert 0.003 not in [point.loss for point in pooled[3].measurements[:-1]]
    segments = [point.segment for point in pooled[3].measurements]
    assert len(set(segments)) == len(segments)


@pytest.mark.parametrize(("lenders", "each"), [(1, 16), (3, 5), (8, 2), (30, 2)])
def test_the_more_lend_the_fewer_points_each_and_the_newest_ones(lenders: int, each: int) -> None:
    # By age the third newest of 20 comes first; the last two are of one age, and the last is the newest.
    ages = [60.0, *(float(3600 - 100 * i) for i in range(17)), 0.0, 0.0]
    points = tuple(Measurement(0.1, 0.01 * i, 0.01, age_s=age) for i, age in enumerate(ages))
    newest = [0.19, 0.18, 0.0, *(0.01 * i for i in range(17, 0, -1))]
    runs = [RunEvidence("g", kin="k"), *[RunEvidence("g", kin="k", measurements=points)] * lenders]
    lent = pool_kin(runs)[0].measurements
    assert len(lent) == each * min(lenders, MOST_LENDERS) <= MOST_LENT
    for segment in {point.segment for point in lent}:
        losses = [point.loss for point in lent if point.segment == segment]
        assert losses == pytest.approx(newest[:each])
