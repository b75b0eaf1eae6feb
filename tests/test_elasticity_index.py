"""PFI by Eq. 1: the published values, the interval, and what may be compared."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from slurm_pfi.elasticity.curve import CurveError
from slurm_pfi.elasticity.index import GridMismatchError, pfi

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
