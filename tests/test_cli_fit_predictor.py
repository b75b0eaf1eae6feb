"""``slurm-pfi fit-predictor`` on synthetic sweeps: model curves with made-up counters. No public sweep has both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from slurm_pfi.cli.fit_predictor import fit_predictor
from slurm_pfi.cli.predictor_harm import CutHarm, FloorHarm, verdict
from slurm_pfi.elasticity.index import pfi
from slurm_pfi.elasticity.predictor import from_json
from tests.test_elasticity_index import SIX_CAPS, figures, model_sweeps

HEADER = (
    "curve_id,gpu,task,cluster,n_gpus,cap_w,power_w_per_gpu,throughput,dram_activity,memory_copy_utilisation"
)
SLOPE, START = 2.0, 1.0


def sweeps(*, noise: float = 0.0, slope: float = SLOPE, jobs: int = 25, seed: int = 1) -> list[str]:
    """Rows of the 25 model jobs; the counters are drawn so that PFI = START + slope x product + noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for job, points in list(model_sweeps(all_caps=True).items())[:jobs]:
        sweep = figures(points)
        middle = START if slope > 0 else 3.0
        product = (pfi(*sweep, samples=1).value - middle + noise * rng.standard_normal()) / slope
        dram = float(np.clip(np.sqrt(max(product, 0.0)), 0, 1))
        for cap, power, rate in zip(*sweep, strict=True):
            seen = dram if cap == 700 else dram * 0.5  # counters under a cap differ and do not count
            rows.append(f"{job},H200,,{points[0]['class']},8,{cap},{power},{rate},{seen:.6f},{seen:.6f}")
    return rows


def run(path: Path, rows: list[str], *options: str, header: str = HEADER) -> Result:
    file = path / "sweeps.csv"
    file.write_text("\n".join([header, *rows]), encoding="utf-8")
    return CliRunner().invoke(fit_predictor, [str(file), *options], env={"COLUMNS": "160"})


def json_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def test_a_line_that_is_there_is_found_and_written(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    data = json_of(run(tmp_path, sweeps(), "--json", "--out", str(out)))
    made = from_json(out.read_text(encoding="utf-8"), origin="x")
    assert made.slope == pytest.approx(SLOPE, rel=1e-3)
    assert made.intercept == pytest.approx(START, abs=1e-3)
    assert (made.n, made.gpu_model, made.grid_w) == (25, "H200", SIX_CAPS)
    assert len(made.source_sha256) == 64
    assert data["calibration"]["slope"] == made.slope
    assert data["evaluation"]["leave_cluster_out"]["r2"] > 0.99
    assert data["evaluation"]["clusters"] == 4
    assert data["skipped"] == []


def test_harm_is_nothing_for_a_perfect_line_and_grows_with_its_errors(tmp_path: Path) -> None:
    exact = json_of(run(tmp_path, sweeps(), "--json"))["harm"]
    loose = json_of(run(tmp_path, sweeps(noise=0.5), "--json"))["harm"]
    assert [cut["cut"] for cut in exact["cuts"]] == [0.2, 0.3]
    for good, bad in zip(exact["cuts"], loose["cuts"], strict=True):
        assert good["through_prediction"] == pytest.approx(0, abs=1e-9)
        assert good["oracle"] < good["measured"] < good["equal"]
        assert bad["through_prediction"] > 0.001
        assert bad["predicted"] - bad["measured"] == pytest.approx(bad["through_prediction"])
        assert not good["shortfall"]
    for good, bad in zip(exact["floors"], loose["floors"], strict=True):
        assert bad["used_by_predicted"] < good["used_by_predicted"] <= 1
        assert bad["used_by_measured"] == good["used_by_measured"]
        assert bad["broken_by_predicted"] <= 3
        assert (
            good["broken_by_predicted"] > 3
        )  # no interval, and another job's curve: a promise without a margin
    assert {floor["jobs"] for floor in loose["floors"]} == {25}


def test_what_people_read(tmp_path: Path) -> None:
    result = run(tmp_path, sweeps(noise=0.2))
    assert result.exit_code == 0
    for text in ("PFI = ", "from 25 jobs on H200, caps 200/300/400/500/600/700 W", "each job left out",
                 "each of 4 clusters left out", "SPEARMAN", "PREDICTED - MEASURED", "DRAM copy product",
                 "Floors", "not written"):  # fmt: skip
        assert text in result.stdout, text
    assert result.stderr == ""
    last = result.stdout.splitlines()[-1]
    assert last.startswith(
        "verdict: sharing by the predicted PFI loses more than equal at 20 % (12.0 against "
    )
    assert " of 75 (" in last
    told = run(tmp_path, sweeps(noise=0.2), "--json", "--out", str(tmp_path / "c.json"))
    assert json_of(told)["verdict"]["text"] == last.removeprefix("verdict: ")
    written = run(tmp_path, sweeps(noise=0.2), "--out", str(tmp_path / "c.json")).stdout
    assert "c.json; no part of slurm-pfi reads that file yet" in written


def cuts(*, equal: float = 0.10, shortfall: bool = False) -> list[CutHarm]:
    return [CutHarm(cut, equal, 0.08, 0.07, 0.06, shortfall) for cut in (0.2, 0.3)]


@pytest.mark.parametrize(
    ("made", "broken", "warned", "use", "says"),
    [
        (cuts(), 1, False, (True, True, True), "loses less than equal at 20 % (8.0 against 10.0 %)"),
        (cuts(), 1, False, (True, True, True), "floors broken 1 of 20 (5 %) against 5 % allowed; so: use it"),
        (cuts(), 2, False, (False, True, False), "so: use it to share cuts, do not use it for floors"),
        (cuts(equal=0.07), 0, False, (False, False, True), "loses more than equal at 30 %"),
        (cuts(equal=0.0801), 0, False, (False, False, True), "loses as much as equal at 30 %"),
        ([*cuts()[:1], *cuts(equal=0.07)[1:]], 0, False, (False, False, True), "so: do not use it"),
        (cuts(shortfall=True), 0, False, (False, False, True), "cannot be judged at 20 %"),
        (cuts(), 0, True, (False, False, False), "the line has a warning; so: do not use it"),
    ],
)
def test_the_verdict(
    made: list[CutHarm], broken: int, warned: bool, use: tuple[bool, bool, bool], says: str
) -> None:
    told = verdict(made, [FloorHarm(0.1, 20, broken, 0.5, 0, 0.6)], warned=warned)
    assert (told.use, told.sharing, told.floors) == use
    assert says in told.text
    assert told.text.endswith("so: use it") == told.use


def test_a_line_that_falls_is_written_with_a_warning(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    result = run(tmp_path, sweeps(slope=-3.0), "--out", str(out))
    assert result.exit_code == 0
    assert "slurm-pfi: warning: the slope is negative" in result.stderr
    assert "the slope is negative" in json.loads(out.read_text(encoding="utf-8"))["warnings"][0]


def test_without_clusters_families_and_tasks_are_taken(tmp_path: Path) -> None:
    rows = []
    for row in sweeps():
        name, gpu, _, _, *rest = row.split(",")
        family = {"L70": "llama", "Q32": "qwen", "Q30": "qwen", "oss": "gpt"}[name[:3]]
        rows.append(",".join([f"{family} {name}", gpu, "FT" if " FT" in name else "PT", "", *rest]))
    data = json_of(run(tmp_path, rows, "--json"))
    assert data["evaluation"]["clusters"] == 6


def test_jobs_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    rows = sweeps(noise=0.1)
    bad_counter = [row.replace("L70 FT x16,", "per cent,").rsplit(",", 2)[0] + ",55,0.5" for row in rows[:6]]
    no_counter = [row.replace("L70 FT x16,", "none,").rsplit(",", 2)[0] + ",,0.5" for row in rows[:6]]
    no_count = [row.replace("L70 FT x16,", "gpus,").replace(",8,", ",many,", 1) for row in rows[:6]]
    flat = ["flat,H200,,DF,8,700,300,1,0.1,0.1", "flat,H200,,DF,8,200,200,1,0.1,0.1"]
    result = run(tmp_path, rows + bad_counter + no_counter + no_count + flat, "--json")
    data = json_of(result)
    assert data["calibration"]["n"] == 25
    reasons = {one["curve_id"]: one["reason"] for one in data["skipped"]}
    assert "within 0..1" in reasons["per cent"]
    assert "dram_activity '' at the uncapped point" in reasons["none"]
    assert "n_gpus 'many'" in reasons["gpus"]
    assert "not defined" in reasons["flat"]
    assert result.stderr.count("skipped") == 4


def test_a_cut_that_the_lowest_caps_do_not_reach_is_marked(tmp_path: Path) -> None:
    rows = [row for row in sweeps() if float(row.split(",")[5]) >= 500]
    data = json_of(run(tmp_path, rows, "--json"))
    assert [cut["shortfall"] for cut in data["harm"]["cuts"]] == [False, True]
    deepest = data["harm"]["cuts"][1]
    assert deepest["equal"] == pytest.approx(deepest["oracle"])


@pytest.mark.parametrize(
    ("rows", "header", "code", "says"),
    [
        (sweeps(jobs=3), HEADER, 1, "3 usable jobs"),
        (sweeps()[:-1], HEADER, 1, "fit one file for each GPU model and grid of caps"),
        (
            [row.replace("H200", "H100") if row.startswith("oss") else row for row in sweeps()],
            HEADER,
            1,
            "GPU model",
        ),
        (
            [",".join(row.split(",")[:-2]) + ",0.5,0.5" for row in sweeps()],
            HEADER,
            1,
            "same DRAM copy product",
        ),
        ([], HEADER, 1, "0 usable jobs"),
        ([], HEADER.replace(",dram_activity", ""), 2, "no column dram_activity"),
    ],
)
def test_files_that_give_no_line(tmp_path: Path, rows: list[str], header: str, code: int, says: str) -> None:
    out = tmp_path / "calibration.json"
    result = run(tmp_path, rows, "--out", str(out), header=header)
    assert result.exit_code == code
    assert says in result.stderr
    assert "sweeps.csv" in result.stderr
    assert not out.exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    result = run(tmp_path, sweeps(), "--out", str(tmp_path / "nowhere" / "c.json"))
    assert result.exit_code == 1
    assert "cannot be written: No such file" in result.stderr
