"""The predictor: its line, its interval, its judgement, what it says when it knows nothing. All jobs are made up."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from slurm_pfi.elasticity.index import GridMismatchError, Pfi
from slurm_pfi.elasticity.predictor import (
    Calibration,
    NoCalibration,
    Prediction,
    PredictorError,
    SweptJob,
    copy_product,
    evaluate,
    fit,
    from_json,
    predict,
    to_json,
)
from slurm_pfi.elasticity.student import t_quantile

GRID = (200.0, 300.0, 700.0)


def value(pfi: float, *, grid_w: tuple[float, ...] = GRID, gpu_model: str = "H200") -> Pfi:
    return Pfi(pfi, pfi, pfi, grid_w, len(grid_w) - 1, 0, "measured", gpu_model)


def jobs_of(x: list[float], y: list[float], clusters: str = "") -> list[SweptJob]:
    names = clusters or "abcdefghijklmnopqrstuvwxyz"
    return [
        SweptJob(f"job{place}", names[place % len(names)], feature, value(pfi))
        for place, (feature, pfi) in enumerate(zip(x, y, strict=True))
    ]


X = [0.05, 0.10, 0.20, 0.30, 0.40, 0.55, 0.60]
Y = [1.20, 1.15, 1.50, 1.40, 1.90, 2.00, 2.40]


def predicted(calibration: Calibration, feature: float) -> Prediction:
    made = predict(calibration, feature, 1.0, gpu_model="H200")
    assert isinstance(made, Prediction)
    return made


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 7, 10, 23, 100, 1001])
@pytest.mark.parametrize("probability", [0.0001, 0.025, 0.3, 0.5, 0.8, 0.975, 0.9995])
def test_student_quantiles_are_those_of_scipy(dof: int, probability: float) -> None:
    assert t_quantile(probability, dof) == pytest.approx(stats.t.ppf(probability, dof), rel=1e-9, abs=1e-12)


def test_student_quantiles_refuse_nonsense() -> None:
    for probability, dof in ((0.0, 3), (1.0, 3), (float("nan"), 3), (0.5, 0)):
        with pytest.raises(ValueError, match=r"lie|are"):
            t_quantile(probability, dof)


def test_line_and_interval_are_those_of_a_regression() -> None:
    made = fit(jobs_of(X, Y), source_sha256="abc")
    judge = stats.linregress(X, Y)
    assert (made.slope, made.intercept) == pytest.approx((judge.slope, judge.intercept))
    residual = np.array(Y) - judge.intercept - judge.slope * np.array(X)
    sd = np.sqrt((residual**2).sum() / 5)
    assert made.residual_sd == pytest.approx(sd)
    assert (made.n, made.grid_w, made.gpu_model, made.source_sha256) == (7, GRID, "H200", "abc")
    assert (made.x_low, made.x_high, made.warnings) == (0.05, 0.60, ())
    here = predicted(made, 0.25)
    away = (0.25 - np.mean(X)) ** 2 / ((np.array(X) - np.mean(X)) ** 2).sum()
    half = stats.t.ppf(0.975, 5) * sd * np.sqrt(1 + 1 / 7 + away)
    assert here.pfi.value == pytest.approx(judge.intercept + judge.slope * 0.25)
    assert (here.pfi.low, here.pfi.high) == pytest.approx((here.pfi.value - half, here.pfi.value + half))
    assert (here.pfi.source, here.pfi.grid_w, here.outside) == ("predicted", GRID, 0)


def test_intervals_hold_what_they_promise() -> None:
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(600):
        x = rng.uniform(0, 0.6, 12)
        y = 1.1 + 2 * x + rng.normal(0, 0.2, 12)
        made = predicted(fit(jobs_of(x[:-1].tolist(), y[:-1].tolist())), float(x[-1]))
        inside += made.pfi.low <= y[-1] <= made.pfi.high
    assert 0.92 <= inside / 600 <= 0.98


def test_outside_the_sweeps_a_prediction_is_flagged_and_wider() -> None:
    made = fit(jobs_of(X, Y))
    inside, beyond = predicted(made, 0.60), predicted(made, 0.80)
    assert beyond.outside == pytest.approx(0.20)
    assert predicted(made, 0.01).outside == pytest.approx(0.04)
    assert beyond.sd > inside.sd
    assert beyond.sd >= made.slope * 0.20
    assert beyond.pfi.high - beyond.pfi.low > inside.pfi.high - inside.pfi.low


def test_without_a_calibration_it_says_so() -> None:
    made = predict(None, 0.5, 0.5, gpu_model="H200")
    assert isinstance(made, NoCalibration)
    assert "library's prior stands" in made.reason
    assert "fit-predictor" in made.reason


def test_another_gpu_model_is_refused_whatever_the_spelling() -> None:
    made = fit(jobs_of(X, Y))
    assert isinstance(predict(made, 0.5, 0.5, gpu_model="NVIDIA H200 141GB HBM3e"), Prediction)
    for other in ("H100", "NVIDIA GH200 480GB", ""):
        with pytest.raises(GridMismatchError, match="calibration is for H200"):
            predict(made, 0.5, 0.5, gpu_model=other)


@pytest.mark.parametrize("wrong", [-0.01, 1.01, 50.0, float("nan"), float("inf")])
def test_counters_are_shares(wrong: float) -> None:
    assert copy_product(0.5, 0.4) == pytest.approx(0.2)
    for pair in ((wrong, 0.5), (0.5, wrong)):
        with pytest.raises(PredictorError, match=r"within 0\.\.1"):
            predict(None, *pair, gpu_model="H200")


def test_what_makes_no_line_is_refused() -> None:
    with pytest.raises(PredictorError, match="3 usable jobs"):
        fit(jobs_of(X[:3], Y[:3]))
    with pytest.raises(PredictorError, match="same DRAM copy product"):
        fit(jobs_of([0.3] * 5, Y[:5]))
    with pytest.raises(PredictorError, match="does not vary"):
        fit(jobs_of([0.3] * 4 + [0.4], Y[:5]))  # all hangs on one job
    other_grid = [*jobs_of(X, Y), SweptJob("odd", "z", 0.3, value(1.5, grid_w=(200, 700)))]
    with pytest.raises(GridMismatchError, match=r"odd and job0: .*fit one file for each"):
        fit(other_grid)
    other_gpu = [*jobs_of(X, Y), SweptJob("odd", "z", 0.3, value(1.5, gpu_model="A100"))]
    with pytest.raises(GridMismatchError, match="odd and job0"):
        fit(other_gpu)


def test_a_line_that_should_not_be_trusted_says_so() -> None:
    falling = fit(jobs_of(X, Y[::-1]))
    assert falling.slope < 0
    assert any("slope is negative" in text for text in falling.warnings)
    noise = fit(jobs_of(X, [1.2, 2.4, 1.3, 2.2, 1.1, 2.3, 1.4]))
    assert any("R2 of jobs left out is -" in text for text in noise.warnings)


def test_judged_as_in_the_paper() -> None:
    made = evaluate(jobs_of(X, Y, clusters="aabb"))
    x, y = np.array(X), np.array(Y)
    cluster = np.array([0, 0, 1, 1, 0, 0, 1])
    for groups, got, predictions in (
        (np.arange(7), made.leave_one_out, made.by_job),
        (cluster, made.leave_cluster_out, made.by_cluster),
    ):
        expected = np.empty(7)
        for group in set(groups.tolist()):
            out = groups == group
            line = stats.linregress(x[~out], y[~out])
            expected[out] = line.intercept + line.slope * x[out]
        assert predictions == pytest.approx(expected)
        assert got is not None
        assert got.r2 == pytest.approx(1 - ((y - expected) ** 2).sum() / ((y - y.mean()) ** 2).sum())
        assert got.rmse == pytest.approx(np.sqrt(((y - expected) ** 2).mean()))
        assert got.spearman == pytest.approx(stats.spearmanr(y, expected).statistic)
    judge = stats.linregress(x, y)
    assert made.in_sample.r2 == pytest.approx(judge.rvalue**2)
    assert made.clusters == 2


def test_one_cluster_cannot_be_left_out() -> None:
    made = evaluate(jobs_of(X, Y, clusters="a"))
    assert made.leave_cluster_out is None
    assert made.by_cluster is None
    assert "does not vary" in made.why_not


def test_equal_index_values_have_no_rank() -> None:
    made = evaluate(jobs_of(X, [1.5] * 7))
    assert made.in_sample.r2 is None
    assert made.in_sample.rmse == pytest.approx(0)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(-5, 20)), min_size=0, max_size=8))
def test_any_finite_sweeps_give_finite_figures_or_an_error(points: list[tuple[float, float]]) -> None:
    try:
        made = fit(jobs_of([x for x, _ in points], [y for _, y in points]))
    except PredictorError:
        return
    for feature in (0.0, 0.5, 1.0):
        given_value = predicted(made, feature)
        assert np.isfinite([given_value.pfi.low, given_value.pfi.value, given_value.pfi.high]).all()
        assert given_value.pfi.low <= given_value.pfi.value <= given_value.pfi.high
    assert from_json(to_json(made), origin="x") == made


def test_the_file_holds_the_whole_calibration() -> None:
    made = fit(jobs_of(X, Y[::-1]), source_sha256="f" * 64)
    body = json.loads(to_json(made))
    assert body["version"] == 1
    assert set(body) > {"grid_w", "gpu_model", "n", "slope", "intercept", "residual_sd", "x_mean", "sxx"}
    assert body["warnings"]
    assert from_json(to_json(made), origin="x") == made


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "no calibration of version 1"),
        ({"slope": "steep"}, "slope is no finite number"),
        ({"slope": float("nan")}, "slope is no finite number"),
        ({"n": 3}, "no fit gives"),
        ({"n": 5.5}, "no fit gives"),
        ({"sxx": 0.0}, "no fit gives"),
        ({"residual_sd": -1.0}, "no fit gives"),
        ({"grid_w": [700.0]}, "no fit gives"),
        ({"grid_w": 700.0}, "grid_w is no list"),
        ({"gpu_model": None}, "gpu_model is no text"),
        ({"x_low": 0.9}, "no fit gives"),
        ({"something": 1}, "fields something"),
    ],
)
def test_a_file_that_no_fit_wrote_is_refused(change: dict[str, object], says: str) -> None:
    body = {**json.loads(to_json(fit(jobs_of(X, Y)))), **change}
    with pytest.raises(PredictorError, match=f"site.json: .*{says}"):
        from_json(json.dumps(body), origin="site.json")


def test_files_that_are_no_calibration() -> None:
    short = json.loads(to_json(fit(jobs_of(X, Y))))
    del short["slope"]
    for text in ("", "{", "[]", "3", json.dumps(short)):
        with pytest.raises(PredictorError, match=r"site\.json"):
            from_json(text, origin="site.json")


def test_a_calibration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit(jobs_of(X, Y)).n = 3  # type: ignore[misc]
