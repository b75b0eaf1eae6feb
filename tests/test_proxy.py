"""Throughput by tensor activity and clock: what it tells, what it contradicts, and what it says nothing of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.elasticity.proxy import CLOCK_SD, MODEL_SD, TOLERANCE, Ratio, estimate, judge
from slurm_pfi.sim.jobs import model_jobs
from slurm_pfi.sim.physics import Workload

NOISE = 0.002
SHARE = st.floats(0.05, 1.0)
SD = st.floats(0.0, 0.05)


def shown(workload: Workload, cap_w: float) -> tuple[float, float, float]:
    """Of a model job under a cap: throughput, tensor activity x clock and clock, as shares of those without."""
    clock, base = workload.clock_for_cap(cap_w), workload.clock_for_cap(700)

    def tensor(at: float) -> float:
        return workload.compute_share / at / workload.step_time(at) * at

    return workload.relative_throughput(cap_w), tensor(clock) / tensor(base), clock / base


@pytest.mark.parametrize("cap_w", [600, 500, 400, 300, 200])
@pytest.mark.parametrize("name", sorted(model_jobs()))
def test_the_model_jobs_are_believed_and_a_lie_of_5_percent_is_not(name: str, cap_w: float) -> None:
    true, tensor, clock = shown(model_jobs()[name].workload, cap_w)
    seen = Ratio(tensor, NOISE), Ratio(clock, CLOCK_SD)
    alone = estimate(*seen)
    assert alone is not None
    assert alone.value == pytest.approx(true, rel=1e-6)
    assert not judge(Ratio(true, NOISE), *seen).why
    for factor in (1 / 1.05, 1.05):
        found = judge(Ratio(true * factor, NOISE), *seen)
        assert found.why
        assert found.share == pytest.approx(true, rel=1e-6)


@given(SHARE, SD, SHARE, SD, SHARE)
def test_what_is_followed_lies_within_the_model_error_of_what_activity_says(
    told: float, told_sd: float, tensor: float, tensor_sd: float, clock: float
) -> None:
    seen = Ratio(tensor, tensor_sd), Ratio(clock, CLOCK_SD)
    alone = estimate(*seen)
    found = judge(Ratio(told, told_sd), *seen)
    if alone is None:
        return
    assert min(clock, 1.0) <= alone.value <= 1.0
    assert abs(found.share / alone.value - 1) <= MODEL_SD + 1e-9
    if found.why:
        assert abs(told / alone.value - 1) > TOLERANCE
        assert found.sd >= MODEL_SD


@given(SHARE, SD, SHARE)
def test_without_tensor_work_only_a_loss_beyond_the_clock_is_contradicted(
    told: float, told_sd: float, clock: float
) -> None:
    found = judge(Ratio(told, told_sd), None, Ratio(clock, CLOCK_SD))
    if found.why:
        assert told < clock * (1 - TOLERANCE)
        assert found.share == clock
    else:
        assert (found.share, found.sd) == (told, told_sd)
        assert told >= clock * (1 - TOLERANCE - 3 * (told_sd + CLOCK_SD))
    assert estimate(None, Ratio(clock, CLOCK_SD)) is None


def test_other_work_than_without_the_cap_tells_nothing() -> None:
    """Less tensor work than the clock took, or more than without a cap, is no loss by the cap."""
    clock = Ratio(0.9, CLOCK_SD)
    assert estimate(Ratio(0.7, NOISE), clock) is None
    assert estimate(Ratio(1.2, NOISE), clock) is None
    assert not judge(Ratio(0.92, NOISE), Ratio(0.7, NOISE), clock).why
    assert judge(Ratio(0.7, NOISE), Ratio(0.8, NOISE), clock).why, "nothing loses more than the clock"


@pytest.mark.parametrize("kept", [0.5, 0.7, 0.86, 0.9])
def test_a_job_that_waits_for_something_else_than_its_gpus_is_no_liar(kept: float) -> None:
    """Slow files or a slow network: its tensor pipes lost as much as it says, more than the clock. No cap's loss."""
    found = judge(Ratio(kept, NOISE), Ratio(kept * 1.01, NOISE), Ratio(0.9, CLOCK_SD))
    assert not found.why
    assert found.share == pytest.approx(0.9)


def test_without_telemetry_the_counter_is_taken_at_its_word() -> None:
    assert judge(Ratio(0.5, NOISE), None, None).share == 0.5
    assert not judge(Ratio(0.5, NOISE), None, None).why


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1])
def test_figures_that_are_none_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="says nothing"):
        Ratio(value, 0.01)
    with pytest.raises(ValueError, match="says nothing"):
        Ratio(0.5, value)
