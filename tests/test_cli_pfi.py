"""``slurm-pfi pfi``: what it prints, and what it says of files that it cannot use."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from slurm_pfi.cli.pfi import pfi
from tests.test_elasticity_index import figures, model_sweeps

HEADER = "curve_id,gpu,cap_w,power_w_per_gpu,throughput"
GOOD = "good,A100,400,390,2.0\ngood,A100,300,300,1.8\ngood,A100,200,200,1.0\n"
FLAT = "flat,A100,400,200,2.0\nflat,A100,300,200,2.0\n"


def run(path: Path, rows: str, *options: str, header: str = HEADER) -> Result:
    file = path / "sweeps.csv"
    file.write_text(f"{header}\n{rows}", encoding="utf-8")
    return CliRunner().invoke(pfi, [str(file), *options], env={"COLUMNS": "200"})


def model_file(path: Path, *, all_caps: bool) -> Path:
    lines = [HEADER]
    for job, rows in model_sweeps(all_caps=all_caps).items():
        for cap, power, rate in zip(*figures(rows), strict=True):
            lines.append(f"{job},H200,{cap},{power},{rate}")
    file = path / "model.csv"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def json_of(result: Result) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def test_headline_values_with_all_points(tmp_path: Path) -> None:
    result = CliRunner().invoke(pfi, [str(model_file(tmp_path, all_caps=False)), "--all-points", "--json"])
    assert result.exit_code == 0
    made = {entry["curve_id"]: entry for entry in json_of(result)["curves"]}
    jobs = model_sweeps(all_caps=False)
    assert made.keys() == jobs.keys()
    for job, rows in jobs.items():
        entry = made[job]
        assert entry["pfi"] == pytest.approx(float(rows[0]["published_pfi"]), abs=0.04), job
        assert entry["grid_w"] == sorted(float(row["cap_w"]) for row in rows)
        assert entry["low"] < entry["pfi"] < entry["high"]
        assert entry["used"] + entry["left_out"] == len(rows) - 1
    far = {job: entry["deviation"] for job, entry in made.items() if abs(entry["deviation"]) > 0.01}
    assert far == pytest.approx({"Q30A3 FT": -0.245, "oss FT 2k": -0.195}, abs=0.01)
    shown = CliRunner().invoke(pfi, [str(tmp_path / "model.csv"), "--all-points"], env={"COLUMNS": "160"})
    line = next(line for line in shown.output.splitlines() if line.startswith("Q30A3 FT "))
    assert "2.01" in line
    assert "-0.25" in line


def test_without_the_option_points_of_no_loss_are_left_out(tmp_path: Path) -> None:
    result = CliRunner().invoke(pfi, [str(model_file(tmp_path, all_caps=True)), "--json"])
    made = {entry["curve_id"]: entry for entry in json_of(result)["curves"]}
    assert made["Q30A3 FT"]["pfi"] == pytest.approx(1.77, abs=0.01)
    assert made["Q30A3 FT"]["left_out"] == 1


def test_figures_rounded_until_a_point_is_zero_over_zero_lose_that_point(tmp_path: Path) -> None:
    """At 600 W the job draws what it draws uncapped, to the digit: Eq. 1 leaves the point out, with all points too."""
    rows = "".join(
        f"job,H200,{cap},{power},{rate}\n"
        for cap, power, rate in zip(
            (200, 300, 400, 500, 600, 700),
            (200, 300, 400, 500, 600, 600),
            (0.3761, 0.655, 0.8346, 0.9342, 1.0, 1.0),
            strict=True,
        )
    )
    (entry,) = json_of(run(tmp_path, rows, "--json", "--all-points"))["curves"]
    assert entry["pfi"] == pytest.approx(1.77, abs=0.01)
    assert (entry["used"], entry["left_out"], entry["repairs"]["not_binding"]) == (4, 1, 1)


def test_a_bad_curve_is_named_and_the_others_printed(tmp_path: Path) -> None:
    rows = GOOD + FLAT + "bad,A100,400,nan,2\nbad,A100,300,300,1\n"
    result = run(tmp_path, rows, "--json")
    assert result.exit_code == 0
    data = json_of(result)
    values = {entry["curve_id"]: entry["pfi"] for entry in data["curves"]}
    assert values["good"] == pytest.approx(((1 - 300 / 390) / 0.1 + (1 - 200 / 390) / 0.5) / 2)
    assert values["flat"] is None
    flat = data["curves"][1]
    assert "not defined" in flat["reason"]
    assert (flat["low"], flat["high"], flat["used"], flat["left_out"]) == (None, None, 0, 1)
    (skipped,) = data["skipped"]
    assert (skipped["curve_id"], skipped["line"]) == ("bad", 7)
    assert skipped["file"].endswith("sweeps.csv")
    says = "curve bad, line 7: power_w_per_gpu 'nan' is no number above zero"
    assert result.stderr == f"slurm-pfi: skipped {tmp_path / 'sweeps.csv'}: {says}\n"
    shown = run(tmp_path, rows)
    assert "flat: no capped point lost throughput" in shown.stdout
    assert "sweeps.csv: curve bad, line 7: " in shown.stderr


def test_repairs_and_doubts_are_printed(tmp_path: Path) -> None:
    rows = "low,A100,300,300,2\nlow,A100,200,200,1\nlow,A100,200,210,1\n" + GOOD
    result = run(tmp_path, rows, "--json")
    low = json_of(result)["curves"][0]
    assert low["repairs"]["duplicates"] == 1
    assert (low["uncapped_w"], low["uncapped_known"]) == (300, False)
    assert "other curves of A100 go to 400 W" in low["doubts"][0]
    shown = run(tmp_path, rows).stdout
    assert "1d" in shown
    assert "low: its highest cap, 300 W" in shown


@pytest.mark.parametrize(
    ("rows", "header", "code", "says"),
    [
        (FLAT, HEADER, 1, "no curve has a PFI: flat: "),
        ("bad,A100,400,400,1\n", HEADER, 1, "no curve has a PFI"),
        ("", HEADER, 1, "no curve has a PFI"),
        ("", "", 2, "the file is empty"),
        ("a,b", "curve_id,gpu", 2, "no column cap_w"),
    ],
)
def test_files_of_no_use(tmp_path: Path, rows: str, header: str, code: int, says: str) -> None:
    result = run(tmp_path, rows, header=header)
    assert result.exit_code == code
    assert says in result.stderr
    assert "sweeps.csv" in result.stderr


def test_a_missing_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(pfi, [str(tmp_path / "none.csv")])
    assert result.exit_code == 2
    assert "none.csv: cannot be read: No such file" in result.stderr


def test_many_curves_take_about_a_second(tmp_path: Path) -> None:
    caps = np.linspace(100, 250, 7)
    rows = "".join(
        f"c{number},V100,{cap:.0f},{cap:.1f},{1 - 0.8 * (1 - cap / 250) ** 1.5:.4f}\n"
        for number in range(127)
        for cap in caps
    )
    begin = time.process_time()
    result = run(tmp_path, rows, "--json")
    taken_s = time.process_time() - begin
    assert len(json_of(result)["curves"]) == 127
    assert taken_s < 3, taken_s
