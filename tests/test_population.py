"""What a curve file gives to draw sites from, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest

from slurm_pfi.elasticity.curvefile import read_curves
from slurm_pfi.elasticity.index import pfi
from slurm_pfi.elasticity.library import Library
from slurm_pfi.sim.population import (
    FEWEST_CURVES,
    UNIT_COLUMN,
    Gathered,
    Objective,
    Population,
    PopulationError,
    gather,
    published,
)

HEADER = "curve_id,gpu,family,cap_w,power_w_per_gpu,power_basis,throughput,throughput_unit"
CAPS = (400.0, 300.0, 200.0, 150.0)
DRAWS = (390.0, 300.0, 200.0, 150.0)
RATES = (10.0, 9.5, 8.0, 6.0)


def rows(
    curve_id: str,
    gpu: str = "A100",
    family: str = "bert",
    *,
    caps: Sequence[float] = CAPS,
    draws: Sequence[float] = DRAWS,
    rates: Sequence[float] = RATES,
    basis: str = "measured mean",
    unit: str = "tokens/s",
) -> list[str]:
    return [
        f"{curve_id},{gpu},{family},{cap},{draw},{basis},{rate},{unit}"
        for cap, draw, rate in zip(caps, draws, rates, strict=True)
    ]


def gathered(*curves: list[str], objective: Objective = "progress") -> Gathered:
    text = "\n".join([HEADER, *(row for curve in curves for row in curve)])
    return gather(read_curves(text, origin="test.csv", keep=(UNIT_COLUMN,)), objective)


def five(gpu: str = "A100", **changed: object) -> list[list[str]]:
    return [rows(f"{gpu}-{place}", gpu, **changed) for place in range(FEWEST_CURVES)]  # type: ignore[arg-type]


def test_a_gpu_model_is_judged_from_five_curves_on() -> None:
    found = gathered(*five("A100"), *five("V100")[:-1])
    assert [one.gpu_model for one in found.members] == ["A100"] * 5
    assert [(one.gpu, one.family) for one in found.not_judged] == [("V100", "bert")] * 4
    assert "4 of 5 curves" in found.not_judged[0].reason


def test_curves_without_measured_draw_are_reported_and_do_not_count_as_curves_of_their_gpu() -> None:
    found = gathered(*five()[:-1], rows("guess", basis="cap (draw not reported)"))
    assert not found.members
    reasons = {one.curve_id: one.reason for one in found.not_judged}
    assert len(reasons) == 5
    assert "not measured" in reasons["guess"] and "4 of 5" in reasons["A100-0"]


def test_two_spellings_of_a_gpu_model_are_one_with_the_name_of_the_first() -> None:
    found = gathered(*five("NVIDIA A100-SXM4-80GB")[:3], *five("A100")[:2])
    assert {one.gpu_model for one in found.members} == {"NVIDIA A100-SXM4-80GB"}


def test_a_curve_that_no_cap_lowered_is_skipped_with_its_line() -> None:
    found = gathered(*five(), rows("flat", draws=(100.0,) * 4))
    assert [(one.curve_id, one.line) for one in found.skipped] == [("flat", 22)]
    assert len(found.members) == 5


def test_a_member_is_what_was_measured() -> None:
    one = gathered(*five()).members[0]
    assert one.draw_w == 390.0 and one.value == 1.0
    assert one.deepest == pytest.approx(1 - 150 / 390)
    assert one.curve.loss_at(1 - 200 / 390) == pytest.approx(0.2, abs=1e-5)
    assert one.pfi_reductions == pytest.approx((1 - 300 / 390, 1 - 200 / 390, 1 - 150 / 390))
    assert one.pfi == pytest.approx(pfi(CAPS, DRAWS, RATES).value)


def test_where_no_cap_lies_below_the_draw_nothing_is_told() -> None:
    """Such a sweep lowered the draw a little all the same: caps are never followed exactly."""
    found = gathered(*five(draws=(120.0, 118.0, 115.0, 110.0)))
    assert {(one.pfi, one.pfi_reductions) for one in found.members} == {(None, ())}


def test_caps_that_bind_and_cost_nothing_say_that_a_job_is_flat() -> None:
    found = gathered(*five(rates=(10.0, 10.0, 9.95, 9.91)))
    assert [one.pfi for one in found.members] == pytest.approx([(1 - 150 / 390) / 0.01] * 5)


def test_repairs_are_counted_for_the_members_alone() -> None:
    curve = rows("odd", rates=(10.0, 10.5, 8.0, 8.5))
    reordered = [curve[1], curve[0], *curve[2:], curve[3]]
    counts = gathered(*five(), reordered).repairs
    assert counts == {"unsorted": 1, "duplicates": 1, "not_binding": 0, "below_zero": 1, "raised": 1}
    assert not any(gathered(reordered).repairs.values())


def test_with_tokens_a_run_is_worth_its_uncapped_throughput() -> None:
    found = gathered(*five(), rows("fast", rates=(40.0, 38.0, 32.0, 24.0)), objective="tokens")
    assert [one.value for one in found.members] == [10.0] * 5 + [40.0]


@pytest.mark.parametrize(("unit", "says"), [("epochs/s", "epochs/s, tokens/s"), ("", "curve other has none")])
def test_tokens_of_unlike_units_are_an_error(unit: str, says: str) -> None:
    with pytest.raises(PopulationError, match=says):
        gathered(*five(), rows("other", unit=unit), objective="tokens")
    assert len(gathered(*five(), rows("other", unit=unit)).members) == 6


def test_a_curve_that_is_not_judged_does_not_decide_on_units() -> None:
    found = gathered(*five(), rows("other", "V100", unit="epochs/s"), objective="tokens")
    assert len(found.members) == 5


def test_families_are_drawn_alike_however_many_curves_they_have() -> None:
    many = [rows(f"b{place}", family="bert") for place in range(9)]
    population = Population(gathered(*many, rows("single", family="ncf")).members)
    drawn = population.draw(np.random.default_rng(1), 4000)
    count = np.bincount(drawn, minlength=10)
    assert count[9] == pytest.approx(2000, abs=130)
    assert count[:9] == pytest.approx(np.full(9, 2000 / 9), abs=60)


def test_a_population_of_one_gpu_model() -> None:
    population = Population(gathered(*five("A100"), *five("V100")).members)
    assert population.gpu_models == ("A100", "V100")
    assert {one.gpu_model for one in population.of_gpu("V100").members} == {"V100"}
    with pytest.raises(ValueError, match="at least one"):
        population.of_gpu("H100")


def test_doubts_are_handed_on() -> None:
    lower = rows("low", caps=(350.0, 300.0, 200.0, 150.0), draws=(345.0, 300.0, 200.0, 150.0))
    doubts = gathered(*five(), lower).doubts
    assert [curve_id for curve_id, _ in doubts] == ["low"] and "default_cap_w" in doubts[0][1]
    assert set(asdict(gathered(rows("x")).not_judged[0])) == {"curve_id", "gpu", "family", "reason"}


def test_a_job_that_no_cap_binds_can_be_fixed() -> None:
    file = published()
    as_measured, bound = gather(file).members, gather(file, bound_only=True).members
    assert not any(one.fixed for one in as_measured)
    fixed = [one for one in bound if one.fixed]
    assert len(fixed) == 37
    assert all(not one.pfi_reductions and one.deepest == 0.0 for one in fixed)
    assert [one.curve_id for one in bound] == [one.curve_id for one in as_measured]


def test_the_published_curves_are_those_of_the_library_and_more() -> None:
    file = published()
    ids = {one.curve_id for one in file.curves}
    assert {one.curve_id for one in Library.load_default().curves} < ids
    assert len(ids) + len(file.skipped) == 127
    (h100,) = [one for one in gather(file).not_judged if one.gpu == "H100"]
    assert "not measured" in h100.reason
