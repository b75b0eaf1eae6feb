"""Promised floors on GPU models that the library has not seen: they hold, and a smaller margin would not."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_pfi.cli.study.floors import floors
from slurm_pfi.elasticity.curvefile import read_curves
from slurm_pfi.elasticity.floors import FLOOR_SDS
from slurm_pfi.elasticity.library import MEASURED_FILE, Library
from slurm_pfi.sim.floors_study import ALLOWED, Row, Study, judged, play, steps
from slurm_pfi.sim.population import Population, gather
from slurm_pfi.sim.rounds import Conditions

SHIPPED = resources.files("slurm_pfi.elasticity").joinpath("data").joinpath(MEASURED_FILE).read_text("utf-8")
POPULATION = Population(gather(read_curves(SHIPPED, origin=MEASURED_FILE)).members)
JUDGED = ("A100", "Quadro RTX 6000")


def study(gpu: str, sds: float = FLOOR_SDS) -> Study:
    return Study(POPULATION.of_gpu(gpu), Library.load_default(), Conditions(), sets=2, seed=1, sds=sds)


def broken(rows: list[Row]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.gpu, []).append(row.broken)
    return {gpu: sum(shares) / len(shares) for gpu, shares in found.items()}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row for gpu in JUDGED for row in play(study(gpu))]


def test_promises_hold_on_the_worst_gpu_model_left_out(rows: list[Row]) -> None:
    assert set(broken(rows)) == set(JUDGED)
    assert max(broken(rows).values()) <= ALLOWED


def test_a_margin_of_one_standard_deviation_breaks_them() -> None:
    assert max(broken(play(study(JUDGED[1], sds=1.0))).values()) > ALLOWED


def test_measurements_let_more_of_the_true_floor_be_used(rows: list[Row]) -> None:
    for gpu in JUDGED:
        for limit in (0.05, 0.10, 0.20):
            used = {r.measurements: r.used for r in rows if r.gpu == gpu and r.limit == limit}
            assert used[0] < used[1] < used[2] <= used[4] + 0.02


def test_the_bound_lies_above_the_share(rows: list[Row]) -> None:
    assert all(row.upper95 is not None and row.upper95 >= row.broken - 1e-12 for row in rows)
    assert all(row.upper95_jobs is not None and row.upper95_jobs > row.broken for row in rows)
    assert all(row.worst_family_broken >= row.broken - 1e-12 for row in rows)


def test_every_step_is_told() -> None:
    told: list[None] = []
    one = Study(POPULATION.of_gpu("A100"), Library.load_default(), Conditions(), sets=2, seed=1)
    play(one, done=lambda: told.append(None))
    assert len(told) == steps(one) == 6


def test_a_job_that_no_cap_binds_is_promised_nothing() -> None:
    able, without = judged(POPULATION)
    assert len(able) + len(without) == len(POPULATION.members)
    assert all(one.pfi_reductions for one in able)
    assert not any(one.pfi_reductions for one in without)


def test_the_command_prints_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    path.write_text("\n".join(line for line in SHIPPED.splitlines() if "a100" in line or "curve_id" in line))
    asked = [str(path), "--sets", "2", "--seed", "3", "--workers", "1"]
    shown = CliRunner().invoke(floors, asked)
    assert shown.exit_code == 0, shown.output
    assert "worst average: A100" in shown.output
    data = json.loads(CliRunner().invoke(floors, [*asked, "--json"]).stdout)
    assert {"gpu", "limit", "measurements", "broken", "upper95", "used"} <= set(data["results"][0])
    assert len(data["results"]) == 18  # 3 limits, by the library alone and after 0 to 4 measurements
    assert data["seed"] == 3
    again = json.loads(CliRunner().invoke(floors, [*asked, "--json"]).stdout)
    assert again == data


def test_a_file_with_nothing_to_judge_is_said(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    path.write_text("\n".join(SHIPPED.splitlines()[:7]))
    answer = CliRunner().invoke(floors, [str(path)])
    assert answer.exit_code == 1
    assert "nothing to judge" in answer.output


def test_a_single_family_gives_no_bound_by_families() -> None:
    llama = Population([one for one in POPULATION.of_gpu("A100").members if one.family == "llama"])
    rows = play(Study(llama, Library.load_default(), Conditions(), sets=1, seed=1))
    for row in rows:
        assert row.upper95 is None
        assert row.upper95_jobs is not None
        assert row.upper95_jobs >= 1 - 0.05 ** (1 / 3) - 1e-9
