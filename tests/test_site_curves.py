"""A site's own curves: they join the library of the controller, and a bad file is said before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_pfi.cli.root import root
from slurm_pfi.config import parse_config
from slurm_pfi.controller.science import Science, site_library
from slurm_pfi.controller.shell import run_controller
from slurm_pfi.elasticity.library import Library, LibraryError
from slurm_pfi.model import Run

NODES = '[[node_set]]\nnames = "g1"\ngpus = 8\ngpu_max_w = 700\noverhead_w = 100\n'
OWN = """curve_id,gpu,family,cap_w,power_w_per_gpu,throughput
own,B300,mine,1200,1200,1.0
own,B300,mine,1000,1000,0.97
own,B300,mine,800,800,0.9
own,B300,mine,600,600,0.7
"""


def text(curves: Path, tmp_path: Path) -> str:
    return (
        f'cluster = "c"\n{NODES}[controller]\ncurves = "{curves}"\n'
        f'state_dir = "{tmp_path}/state"\nrun_dir = "{tmp_path}/run"\n'
    )


def test_own_curves_add_to_those_of_the_package(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(OWN)
    library = site_library(parse_config(text(path, tmp_path), origin="t"))
    assert len(library.curves) == len(Library.load_default().curves) + 1
    assert "B300" in library.gpu_models
    assert Science(library).ignorance.greatest_reduction(Run("c", 1), "NVIDIA H200", 0.1) > 0


def test_without_own_curves_the_library_is_the_packages() -> None:
    library = site_library(parse_config(f'cluster = "c"\n{NODES}', origin="t"))
    assert len(library.curves) == len(Library.load_default().curves)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("curve_id,gpu\nx,B300\n", "column"),
        (OWN.replace("1000,1000,0.97", "1000,1000,fast"), "usable"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "own.csv"
    if content is not None:
        path.write_text(content)
    config_file = tmp_path / "c.toml"
    config_file.write_text(text(path, tmp_path))
    config = parse_config(config_file.read_text(), origin="t")
    with pytest.raises(LibraryError, match=says):
        site_library(config)
    assert run_controller(config, config_file) == 2
    answer = CliRunner().invoke(root, ["--config", str(config_file), "config", "check"])
    assert answer.exit_code == 2
    assert str(path) in answer.output
    asked = ["--config", str(config_file), "config", "check", "--for", "node"]
    assert CliRunner().invoke(root, asked).exit_code == 0, "a node does not read that file"


def test_config_check_says_which_curves_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(OWN + "short,B300,mine,1200,1200,1.0\nshort,B300,mine,1000,1000,0.9\n")
    config_file = tmp_path / "c.toml"
    config_file.write_text(text(path, tmp_path))
    answer = CliRunner().invoke(root, ["--config", str(config_file), "config", "check"])
    assert answer.exit_code == 0, answer.output
    assert answer.stderr == ""
    assert answer.stdout.splitlines()[0] == (
        f"{path}: 1 of 2 curves joins the library (own, B300). short does not: "
        "1 cap lowered the draw by more than 1 %, 3 are needed: measure lower caps."
    )
    assert "fine." in answer.stdout
    told = CliRunner().invoke(root, ["--config", str(config_file), "config", "check", "--json"])
    assert json.loads(told.stdout)["controller"]["curves"] == str(path)
    assert "1 of 2 curves joins" in told.stderr


def test_config_check_names_each_of_several_curves_that_do_not_join(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    shallow = "".join(f"flat,B300,mine,{cap},{cap},{cap / 1200}\n" for cap in (1200, 1150, 1100, 1000))
    path.write_text(OWN + OWN.split("\n", 1)[1].replace("own", "two") + shallow + "bad,B300,mine,1200,x,1\n")
    config_file = tmp_path / "c.toml"
    config_file.write_text(text(path, tmp_path))
    answer = CliRunner().invoke(root, ["--config", str(config_file), "config", "check"])
    assert answer.stdout.splitlines()[:3] == [
        f"{path}: 2 of 4 curves join the library (own, B300; two, B300).",
        "  bad does not: line 14: power_w_per_gpu 'x' is no number above zero.",
        "  flat does not: its deepest reduction is 16 %, 20 % is needed: measure lower caps.",
    ]


def test_a_relative_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absolute"):
        parse_config(f'cluster = "c"\n{NODES}[controller]\ncurves = "own.csv"\n', origin="t")
