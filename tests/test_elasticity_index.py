"""PFI by Eq. 1: the published values, the interval, and what may be compared."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.elasticity.curve import CurveError, ElasticityCurve
from slurm_pfi.elasticity.index import GridMismatchError, pfi, pfi_on_grid
from slurm_pfi.elasticity.sweep import curve_from_measurements

SWEEPS = Path(__file__).parent / "data" / "h200_model_sweeps.csv"
SIX_CAPS = (200.0, 300.0, 400.0, 500.0, 600.0, 700.0)


def model_sweeps(*, all_caps: bool) -> dict[str, list[dict[str, str]]]:
    jobs: dict[str, list[dict[str, str]]] = {}
    with SWEEPS.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if all_caps or row["headline_grid"] == "1":
                jobs.setdefault(row["job"], []).append(row)
    return jobs


def figures(rows: list[dict[str, str]]) -> tuple[list[float], list[float], list[float]]:
    cap_w, power_w, throughput = (
        [float(row[name]) for row in rows] for name in ("cap_w", "power_w_per_gpu", "throughput")
    )
    return cap_w, power_w, throughput


def test_headline_values_come_out_on_the_grid_they_were_measured_on() -> None:
    jobs = model_sweeps(all_caps=False)
    assert len(jobs) == 25
    for job, rows in jobs.items():
        value = pfi(*figures(rows), all_points=True, samples=10).value
        assert value == pytest.approx(float(rows[0]["published_pfi"]), abs=0.04), job


def test_points_under_one_per_cent_are_left_out_and_counted() -> None:
    rows = model_sweeps(all_caps=True)["oss FT 2k"]  # at 600 W it loses 0.2 %
    assert pfi(*figures(rows)).left_out == 1
    assert pfi(*figures(rows), all_points=True).left_out == 0
    assert pfi(*figures(rows)).used == 4
    idle = model_sweeps(all_caps=True)["Q30A3 FT x16"]  # draws 559 W: a cap of 600 W is 0/0
    assert pfi(*figures(idle), all_points=True).left_out == 1


def test_by_hand() -> None:
    made = pfi([400, 300, 200], [380, 304, 190], [2.0, 1.8, 1.0], gpu_model="A100")
    assert made.value == pytest.approx((0.2 / 0.1 + 0.5 / 0.5) / 2)
    assert (made.grid_w, made.used, made.source, made.gpu_model) == ((200, 300, 400), 2, "measured", "A100")


def test_the_interval_follows_the_noise() -> None:
    sweep = ([400, 300, 200], [380, 304, 190], [2.0, 1.8, 1.0])
    quiet = pfi(*sweep, power_cov=0, throughput_cov=0)
    assert quiet.low == pytest.approx(quiet.value)
    assert quiet.high == pytest.approx(quiet.value)
    usual, loud = pfi(*sweep), pfi(*sweep, power_cov=0.008, throughput_cov=0.01)
    assert loud.low < usual.low < usual.value < usual.high < loud.high
    # First order, by hand: the ratio at 300 W carries nearly all of it, sd about 0.085 of the mean of two.
    assert usual.high - usual.low == pytest.approx(4 * 0.085, rel=0.2)
    assert pfi(*sweep, seed=1).low == pytest.approx(usual.low, abs=0.02)
    assert pfi(*sweep) == usual


def test_no_point_that_lost_anything() -> None:
    with pytest.raises(CurveError, match="not defined"):
        pfi([400, 300], [300, 290], [1.0, 0.995])


def test_values_of_different_grids_or_gpu_models_are_not_compared() -> None:
    rows = model_sweeps(all_caps=True)
    cap_w, power_w, throughput = figures(rows["L70 FT nc"])
    six = pfi(cap_w, power_w, throughput, gpu_model="H200", samples=10)
    four = pfi(
        cap_w[:1] + cap_w[3:], power_w[:1] + power_w[3:], throughput[:1] + throughput[3:], gpu_model="H200"
    )
    other = pfi(cap_w, power_w, throughput, gpu_model="H100", samples=10)
    flexible = pfi(*figures(rows["oss FT 4k"]), gpu_model="H200", samples=10)
    assert six.grid_w == SIX_CAPS
    assert six < flexible
    assert sorted([flexible, six]) == [six, flexible]
    assert flexible.difference(six) == pytest.approx(2.7 - 1.234, abs=0.01)
    for wrong in (four, other):
        with pytest.raises(GridMismatchError):
            six.difference(wrong)
        with pytest.raises(GridMismatchError):
            assert six < wrong


def test_what_leaving_non_binding_points_out_changes() -> None:
    """Two jobs draw little more than 600 W: their headline values lean on a point of almost no loss."""
    jobs = model_sweeps(all_caps=False)
    for job, rows in jobs.items():
        sweep = figures(rows)
        every = pfi(*sweep, all_points=True, samples=10)
        deviation = pfi(*sweep, samples=10).difference(every)
        expected = {"Q30A3 FT": -0.24, "oss FT 2k": -0.20}.get(job, 0.0)
        assert deviation == pytest.approx(expected, abs=0.01), job


def test_values_of_the_four_cap_grid_come_out_but_for_the_known_exception() -> None:
    """arXiv 2609.11542, App. D.3: the jobs measured on six caps, indexed on 200/500/600/700 W."""
    published = {
        "L70 FT nc": 1.37, "L70 FT c": 1.44, "L70 PT c": 1.33, "L70 PT nc": 1.43, "Q32 PT nc": 1.42,
        "Q32 PT c": 1.67, "oss FT 2k": 1.98, "Q30A3 FT": 2.22, "oss FT 4k": 3.32, "oss PT EP1 c": 1.40,
        "Q30 PT EP1": 1.40, "oss PT EP8 c": 1.57, "oss PT EP4 c": 1.65, "Q30 PT EP8": 1.67, "oss PT EP8 nc": 1.66,
        "oss PT EP1 nc": 1.16,
    }  # fmt: skip
    far = set()
    for job, value in published.items():
        rows = [row for row in model_sweeps(all_caps=True)[job] if row["cap_w"] not in {"300", "400"}]
        made = pfi(*figures(rows), all_points=True, samples=10)
        assert made.grid_w == (200, 500, 600, 700)
        if abs(made.value - value) > 0.12:
            far.add(job)
    assert far == {"oss PT EP1 nc"}


def test_a_sweep_that_shows_only_noise_has_no_value() -> None:
    with pytest.raises(CurveError, match="lowered the draw"):
        pfi([400, 300, 200], [200, 201, 205], [1.0, 0.95, 0.9])


def test_from_one_grid_to_another_by_the_curve() -> None:
    rows = model_sweeps(all_caps=True)["Q32 PT c"]
    sweep = figures(rows)
    curve, _ = curve_from_measurements(*sweep)
    six = pfi_on_grid(curve, SIX_CAPS, 700, gpu_model="H200", samples=100)
    direct = pfi(*sweep, gpu_model="H200", samples=100)
    assert six.value == pytest.approx(direct.value, abs=1e-4)
    assert (six.low, six.high) == pytest.approx((direct.low, direct.high), abs=1e-3)
    four = pfi_on_grid(
        curve, (700, 200, 600, 500, 500), 700, source="predicted", gpu_model="H200", samples=10
    )
    assert four.grid_w == (200, 500, 600, 700)
    assert four.source == "predicted"
    assert four.value == pytest.approx(1.649, abs=0.002)
    with pytest.raises(GridMismatchError):
        four.difference(six)


def test_on_a_grid_the_job_draws_no_more_than_it_does() -> None:
    curve = ElasticityCurve(np.array([0, 0.25, 0.5]), np.array([0, 0.1, 0.5]))
    made = pfi_on_grid(curve, (200, 300, 500), 400, samples=10)  # 500 W does not bind
    assert made.value == pytest.approx((0.25 / 0.1 + 0.5 / 0.5) / 2)
    bound = pfi_on_grid(curve, (200, 300), 400, samples=10)  # 300 W does: the index is relative to it
    assert bound.value == pytest.approx((1 - 200 / 300) / (1 - 0.5 / 0.9))
    idle = pfi_on_grid(curve, (200, 450, 500), 400, samples=10)
    assert (idle.used, idle.left_out) == (1, 1)


def test_a_grid_deeper_than_the_curve_is_refused_or_pessimistic() -> None:
    curve = ElasticityCurve(np.array([0, 0.25, 0.5]), np.array([0, 0.1, 0.5]))
    with pytest.raises(CurveError, match="measured to 50"):
        pfi_on_grid(curve, (100, 400), 400)
    straight = ElasticityCurve(np.array([0, 0.25, 0.5]), np.array([0, 0.1, 0.2]))
    made = pfi_on_grid(straight, (160, 400), 400, extrapolate=True, samples=10)
    assert made.value < 0.6 / 0.24  # less than its slope would promise
    for grid, draw in (((400,), 400.0), ((400, -1), 400.0), ((400, 300), float("nan")), ((400, 300), 0.0)):
        with pytest.raises(CurveError):
            pfi_on_grid(curve, grid, draw)


def test_spellings_of_one_gpu_model_are_compared() -> None:
    sweep = ([400, 300, 200], [380, 304, 190], [2.0, 1.8, 1.0])
    one, other = (pfi(*sweep, gpu_model=name, samples=10) for name in ("A100", "NVIDIA A100-SXM4-80GB"))
    assert one.difference(other) == 0


@given(
    st.lists(
        st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.floats(1e-18, 1e18)), min_size=2, max_size=6
    ),
    st.booleans(),
)
def test_any_figures_that_a_file_may_hold_give_numbers_or_an_error(
    points: list[tuple[float, float, float]], all_points: bool
) -> None:
    try:
        made = pfi(*zip(*points, strict=True), all_points=all_points, samples=50)
    except CurveError:
        return
    assert np.isfinite([made.value, made.low, made.high]).all()
    assert made.low <= made.high
    assert made.used + made.left_out == len(made.grid_w) - 1
    assert made.used > 0
