"""The library of measured curves: what it holds, and what it promises for jobs that it has never seen."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from slurm_pfi.elasticity import library as library_module
from slurm_pfi.elasticity.curve import CurveError
from slurm_pfi.elasticity.index import pfi, pfi_on_grid
from slurm_pfi.elasticity.library import Library, LibraryError, greatest_reduction
from slurm_pfi.elasticity.sweep import curve_from_measurements
from slurm_pfi.sim.model_curves import text as model_text
from tests.test_elasticity_index import SIX_CAPS, figures, model_sweeps

Points: TypeAlias = list[tuple[float, float, float]]
HEADER = "curve_id,gpu,family,workload,cap_w,power_w_per_gpu,throughput,source,licence"


@pytest.fixture(scope="module")
def library() -> Library:
    return Library.load_default()


def file_of(*curves: tuple[str, str, str, Points]) -> str:
    rows = [
        f"{name},{gpu},{family},w,{cap},{power},{throughput},s,l"
        for name, gpu, family, points in curves
        for cap, power, throughput in points
    ]
    return "\n".join([HEADER, *rows])


SOFT: Points = [(400, 400, 1.0), (300, 300, 0.9), (200, 200, 0.7), (100, 100, 0.4)]
HARD: Points = [(400, 400, 1.0), (300, 300, 0.8), (200, 200, 0.5), (100, 100, 0.1)]


def test_what_is_shipped(library: Library) -> None:
    assert library.gpu_models == ("A100", "Quadro RTX 6000", "V100")
    assert len(library.curves) == 88
    assert not library.left_out
    assert all(curve.source and curve.licence for curve in library.curves)
    assert all(curve.curve.reduction[-1] >= 0.2 for curve in library.curves)


def test_gpu_models_count_alike_and_then_families(library: Library) -> None:
    weight = library.weights()
    assert weight.sum() == pytest.approx(1)
    for model in library.gpu_models:
        mine = np.array([curve.gpu_model == model for curve in library.curves])
        assert weight[mine].sum() == pytest.approx(1 / 3)
        families = {curve.family for curve in library.curves if curve.gpu_model == model}
        for family in families:
            some = mine & np.array([curve.family == family for curve in library.curves])
            assert weight[some].sum() == pytest.approx(1 / 3 / len(families))


def test_mean_by_hand() -> None:
    made = Library.from_csv(
        file_of(("a", "A100", "x", SOFT), ("b", "A100", "y", HARD), ("c", "V100", "x", HARD)), origin="test"
    )
    # A100: half soft, half hard; V100: hard. So soft counts a quarter.
    assert float(made.mean().loss_at(0.5)) == pytest.approx(0.25 * 0.3 + 0.75 * 0.5, abs=1e-6)
    assert float(made.mean("NVIDIA A100-SXM4-80GB").loss_at(0.5)) == pytest.approx(0.4, abs=1e-6)
    assert made.mean("NVIDIA H200") is made.mean()


def test_the_mean_is_convex_and_pessimistic_where_nobody_measured(library: Library) -> None:
    for model in (None, *library.gpu_models):
        mean = library.mean(model)
        assert (np.diff(np.diff(mean.loss) / np.diff(mean.reduction)) > 0).all()
        assert mean.tail_slope >= (np.diff(mean.loss) / np.diff(mean.reduction)).max()
        assert float(mean.loss_at(1.0)) == pytest.approx(1.0)
    assert 0.02 < float(library.mean().loss_at(0.1)) < 0.06
    assert 0.25 < float(library.mean().loss_at(0.5)) < 0.5


def test_quantiles_ascend_and_lie_above_the_mean(library: Library) -> None:
    x = np.linspace(0.01, 0.6, 40)
    lower, upper, higher = (library.quantile(q).loss_at(x) for q in (0.5, 0.9, 0.977))
    assert (lower <= upper).all()
    assert (upper < higher + 1e-9).all()
    assert (upper > library.mean().loss_at(x)).all()
    assert library.quantile(0.9) is library.quantile(0.9)
    for q in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match="quantile"):
            library.quantile(q)


def test_greatest_reductions_are_useful_and_kept_on_an_unseen_gpu_model(library: Library) -> None:
    """H200 is not in the library. Five per cent is kept by every job, 15 and 30 % by 95 % of them."""
    jobs = {
        job: curve_from_measurements(*figures(rows))[0] for job, rows in model_sweeps(all_caps=True).items()
    }
    assert len(jobs) == 25
    for max_loss, useful in ((0.05, 0.03), (0.15, 0.15), (0.30, 0.30)):
        x = greatest_reduction(max_loss, library)
        broken = [job for job, curve in jobs.items() if float(curve.loss_at(x)) > max_loss]
        assert x > useful
        assert len(broken) <= (0 if max_loss == 0.05 else 1), (max_loss, x, broken)


def test_greatest_reductions_hold_on_every_gpu_model_left_out(library: Library) -> None:
    for model in library.gpu_models:
        rest = library.without([model])
        mine = library.without(set(library.gpu_models) - {model})
        for max_loss in (0.05, 0.15, 0.30):
            x = greatest_reduction(max_loss, rest)
            loss = np.array([float(some.curve.loss_at(x)) for some in mine.curves])
            assert x > 0.01
            assert mine.weights()[loss > max_loss].sum() <= 0.05, (model, max_loss)


def test_no_loss_allowed_means_no_reduction(library: Library) -> None:
    assert greatest_reduction(0.0, library) == 0
    assert greatest_reduction(0.15, library, is_none=True) == 0
    assert greatest_reduction(1.0, library) == 1


def test_default_pfi(library: Library) -> None:
    made = library.default_pfi(SIX_CAPS)
    assert made.source == "default"
    assert made.grid_w == SIX_CAPS
    assert 0.5 < made.low < made.value < made.high
    published = [float(rows[0]["published_pfi"]) for rows in model_sweeps(all_caps=False).values()]
    assert sum(made.low <= value <= made.high for value in published) >= 24
    with pytest.raises(CurveError):
        library.default_pfi([700])
    with pytest.raises(CurveError):
        library.default_pfi([700, 699.9])


def test_curves_that_say_nothing_are_left_out_by_name() -> None:
    shallow: Points = [(400, 100, 1.0), (300, 95, 0.99), (200, 92, 0.98), (100, 90, 0.97)]
    made = Library.from_csv(
        file_of(
            ("good", "A100", "x", SOFT), ("shallow", "A100", "x", shallow), ("few", "A100", "x", SOFT[:3])
        ),
        origin="test",
    )
    assert [curve.curve_id for curve in made.curves] == ["good"]
    assert [name for name, _ in made.left_out] == ["shallow", "few"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "test: the file is empty"),
        ("curve_id,gpu\na,b", "test: no column cap_w"),
        (HEADER, r"test adds nothing: no usable curve \(it has no rows\)"),
        (
            file_of(("a", "A100", "x", [(400.0, 400.0, 1.0), (300.0, -1.0, 0.9)])),
            r"^test adds nothing: no usable curve \(a, line 3: .*'-1.0'",
        ),
        (file_of(("a", "A100", "x", SOFT)).replace("0.9", "fast"), r"test .*\(a, line 3: .*fast"),
        (file_of(("a", "A100", "x", SOFT)) + "\na,A100", r"test .*\(a, line 6: 2 fields"),
    ],
)
def test_files_that_cannot_be_used(text: str, says: str) -> None:
    with pytest.raises(LibraryError, match=says):
        Library.from_csv(text, origin="test")


def test_one_bad_curve_does_not_lose_the_good_ones() -> None:
    text = file_of(("a", "A100", "x", SOFT), ("b", "A100", "x", [(400, 400, 0.0), (300, 300, 0.9)]))
    made = Library.from_csv(text, origin="test")
    assert [curve.curve_id for curve in made.curves] == ["a"]
    ((name, reason),) = made.left_out
    assert name == "b"
    assert "line 6: throughput '0.0'" in reason


def test_a_draw_that_nobody_measured_makes_no_library_curve() -> None:
    rows = file_of(("a", "H100", "x", SOFT)).splitlines()
    text = "\n".join([f"{rows[0]},power_basis", *(f"{row},cap (draw not reported)" for row in rows[1:])])
    with pytest.raises(LibraryError, match="draw was not measured"):
        Library.from_csv(text, origin="test")


def test_model_curves_only_when_asked_for(library: Library) -> None:
    assert {curve.basis for curve in library.curves} == {"measured"}
    both = Library.load_default(model_curves=True)
    model = [curve for curve in both.curves if curve.basis == "model"]
    assert len(model) == 25
    assert {curve.gpu_model for curve in model} == {"H200"}
    assert {curve.family for curve in model} == {"llama", "qwen", "gpt"}
    assert {curve.task for curve in model} == {"FT", "PT"}
    assert len(both.curves) == len(library.curves) + 25
    assert not both.left_out


def test_model_curves_are_those_of_the_model_and_give_its_index() -> None:
    shipped = Path(library_module.__file__).parent / "data" / "h200_model_curves.csv"
    assert shipped.read_text(encoding="utf-8") == model_text()
    curves = {curve.curve_id: curve for curve in Library.from_csv(model_text(), origin="model").curves}
    for job, rows in model_sweeps(all_caps=False).items():
        cap_w, power_w, throughput = figures(rows)
        made = curves["h200_model_" + "_".join(job.lower().replace("/", " ").split())]
        on_grid = pfi_on_grid(made.curve, cap_w, max(power_w), samples=10)
        assert on_grid.value == pytest.approx(pfi(cap_w, power_w, throughput, samples=10).value, abs=2e-3), (
            job
        )


def test_a_site_adds_its_own_curves(library: Library) -> None:
    text = file_of(("ours", "NVIDIA A100-SXM4-80GB", "llama_70b", SOFT), ("new", "NVIDIA B200", "x", HARD))
    made = library.extended(text, origin="site.csv")
    assert len(made.curves) == len(library.curves) + 2
    assert made.gpu_models == ("A100", "NVIDIA B200", "Quadro RTX 6000", "V100")
    weight = dict(zip((curve.curve_id for curve in made.curves), made.weights(), strict=True))
    assert sum(weight.values()) == pytest.approx(1)
    assert weight["new"] == pytest.approx(1 / 4)
    assert weight["ours"] == pytest.approx(
        1 / 4 / 2 / 4
    )  # llama and mpt on the A100; llama has three and this one
    with pytest.raises(LibraryError, match=r"site\.csv: curve ours, new is in the library"):
        made.extended(text, origin="site.csv")
    with pytest.raises(LibraryError, match="no column"):
        library.extended("a,b\n1,2", origin="site.csv")


def test_curves_are_left_out_whatever_the_spelling(library: Library) -> None:
    assert library.without(gpu_models=["NVIDIA A100-SXM4-80GB"]).gpu_models == ("Quadro RTX 6000", "V100")
    assert library.without(gpu_models="Quadro RTX6000").gpu_models == ("A100", "V100")
    assert library.without(gpu_models=["A10", "H100"]).gpu_models == library.gpu_models
    rest = library.without(families=["BERT-large", "ResNet-50"])
    assert {curve.family for curve in rest.curves} == {"deepspeech", "shufflenet", "llama", "mpt"}
    one = library.curves[3].curve_id
    assert one not in {curve.curve_id for curve in library.without(curve_ids=[one]).curves}
    assert len(library.without(curve_ids=[one, "nobody"]).curves) == len(library.curves) - 1


def test_an_empty_library_says_so_only_where_a_curve_is_needed(library: Library) -> None:
    empty = library.without(gpu_models=library.gpu_models)
    assert empty.curves == ()
    assert empty.gpu_models == ()
    assert empty.weights().shape == (0,)
    assert greatest_reduction(0.0, empty) == 0
    for needs in (
        empty.mean,
        empty.quantile,
        lambda: empty.default_pfi(SIX_CAPS),
        lambda: greatest_reduction(0.1, empty),
    ):
        with pytest.raises(LibraryError, match="holds no curve"):
            needs()


def test_a_gpu_model_is_not_taken_for_one_whose_name_it_begins_with() -> None:
    made = Library.from_csv(file_of(("a", "A10", "x", HARD), ("b", "V100", "x", SOFT)), origin="test")
    assert made.mean("NVIDIA A100-SXM4-80GB") is made.mean()
    assert float(made.mean("NVIDIA A10").loss_at(0.5)) == pytest.approx(0.5, abs=1e-6)


def test_below_the_lowest_measured_cap_a_watt_never_costs_less_than_above(library: Library) -> None:
    for entry in library.curves:
        x, y = entry.curve.reduction, entry.curve.loss
        steepest = (np.diff(y) / np.diff(x)).max()
        beyond = np.linspace(x[-1], 1.0, 20)[1:]
        loss = entry.curve.loss_at(beyond)
        assert (loss >= np.minimum(y[-1] + steepest * (beyond - x[-1]), 1.0) - 1e-12).all(), entry.curve_id
        assert loss[-1] == pytest.approx(1)
