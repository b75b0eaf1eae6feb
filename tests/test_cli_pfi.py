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
    note = "job: at 600 W it draws and does exactly the same as uncapped: 0/0, left out\n"
    assert note in run(tmp_path, rows, "--all-points").stdout
    assert "0/0" not in run(tmp_path, rows).stdout
    for other in ("600,599,1.0", "600,600,0.999"):
        differs = rows.replace("600,600,1.0\n", f"{other}\n", 1)
        assert differs != rows
        assert "0/0" not in run(tmp_path, differs, "--all-points").stdout


def test_a_curve_without_a_value_leaves_out_all_its_capped_points(tmp_path: Path) -> None:
    rows = FLAT + "flat,A100,250,200,2.0\nflat,A100,220,200,2.0\n"
    (entry,) = json_of(run(tmp_path, rows, "--json"))["curves"]
    assert (entry["pfi"], entry["used"], entry["left_out"]) == (None, 0, 3)
    assert run(tmp_path, rows).stdout.splitlines()[1].split()[:6] == ["flat", "A100", "-", "-", "0", "3"]


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
    lost = (
        "flat: no capped point lost throughput of 1 % or more: the PFI is not defined: measure lower caps\n"
    )
    assert lost in shown.stdout
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
    assert "REPAIRS counts points: d duplicates (of one cap, averaged).\n" in shown
    assert "low: its highest cap, 300 W" in shown


LONG = "NVIDIA H100 80GB HBM3"
USABLE = "".join(f"usable,{LONG},{cap},{cap},{cap / 100 - 0.5}\n" for cap in (700, 600, 500, 400))


def test_each_curve_says_whether_it_would_join_the_library(tmp_path: Path) -> None:
    taken = "".join(
        f"a100_ft_llama_8b_p3,A100,{cap},{cap},{cap / 100 - 0.5}\n" for cap in (400, 300, 200, 100)
    )
    data = json_of(run(tmp_path, USABLE + GOOD + taken, "--json"))
    told = {entry["curve_id"]: (entry["library"], entry["library_reason"]) for entry in data["curves"]}
    few = "2 caps lowered the draw by more than 1 %, 3 are needed: measure lower caps"
    assert told["usable"] == (True, "")
    assert told["good"] == (False, few)
    assert told["a100_ft_llama_8b_p3"][0] is False
    assert "curve of that curve_id" in told["a100_ft_llama_8b_p3"][1]
    shown = run(tmp_path, USABLE + GOOD).stdout
    lines = shown.splitlines()
    assert "LIBRARY" in lines[0]
    assert " yes " in lines[1]
    assert " no " in lines[2]
    assert f"not in the library: good: {few}\n" in shown
    assert "PFI 1: as much throughput lost as power saved, in shares; 2: half as much; higher" in shown
    assert "REPAIRS" not in shown


def test_weak_values_are_marked(tmp_path: Path) -> None:
    rows = "weak,A100,400,400,2.0\nweak,A100,350,350,1.999\nweak,A100,300,300,1.8\n"
    shown = run(tmp_path, rows).stdout
    assert "2.50*" in shown
    assert "weak: its PFI rests on one point (*)" in shown
    assert "crosses 0" not in shown
    everything = run(tmp_path, rows, "--all-points").stdout
    assert "weak: its interval crosses 0: a point without measurable loss is in it\n" in everything
    assert "IF <1 % OUT: how the PFI changes if points under 1 % of loss are left out" in everything
    assert "*" not in everything


def test_only_small_losses_point_to_the_option(tmp_path: Path) -> None:
    rows = "small,A100,400,400,2.0\nsmall,A100,350,350,1.999\n"
    assert "measure lower caps, or use --all-points" in run(tmp_path, rows).stderr


def test_on_80_columns_gpu_names_stay_whole_and_other_columns_go(tmp_path: Path) -> None:
    long = USABLE.replace("usable", "a_name_of_a_job_that_is_rather_long")
    (tmp_path / "sweeps.csv").write_text(f"{HEADER}\n{long}", encoding="utf-8")
    for options in ([], ["--all-points"]):
        call = [str(tmp_path / "sweeps.csv"), *options]
        shown = CliRunner().invoke(pfi, call, env={"COLUMNS": "80"}).stdout.splitlines()
        assert f" {LONG} " in shown[1]
        assert max(len(line) for line in shown[:2]) <= 80
        assert any(line.startswith("not shown on 80 columns: CAPS (W)") for line in shown)


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
