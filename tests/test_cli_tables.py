"""Tables keep one line for each row on every width: shorter words, then cut texts, then fewer columns."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from slurm_pfi.cli.jobs import COLUMNS as JOBS
from slurm_pfi.cli.status import NODE_COLUMNS as STATUS
from slurm_pfi.cli.tables import Column, show_table


def shown(columns: Any, rows: Any, width: int) -> list[str]:
    out = Console(file=io.StringIO(), width=width, highlight=False)
    show_table(out, columns, rows)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


def job(**more: Any) -> dict[str, Any]:
    return {
        "job_id": 1234567,
        "restart": 0,
        "user": "mustermann",
        "state": "waiting for power",
        "note": "",
        "nodes": ["gpu01", "gpu02", "gpu03", "gpu07"],
        "gpus": 32,
        "user_flex": "none",
        "flex": "medium",
        "cap_mw": 700_000,
        "target_cap_mw": 700_000,
        "floor_mw": 612_000,
        "floor_passed": False,
        "draw_mw": 32 * 699_000,
        "rate_per_s": 123_456.0,
        "loss": 0.123,
        **more,
    }


def test_a_wide_terminal_shows_everything() -> None:
    lines = shown(JOBS, [job(), job(floor_passed=True, state="admitted")], 200)
    assert len(lines) == 3
    for text in ("mustermann", "waiting for power", "gpu[01-03,07]", "none -> medium", "123,456/s", "12.3 %"):
        assert text in lines[1]
    assert "running, past floor" in lines[2]


def test_80_columns_show_one_line_for_each_run_and_say_what_is_left_out() -> None:
    rows = [job(), job(job_id=12, floor_passed=True), job(job_id=13, nodes=[], rate_per_s=None, loss=None)]
    lines = shown(JOBS, rows, 80)
    assert len(lines) == 1 + len(rows) + 1
    assert all(len(line) <= 80 for line in lines)
    for text in ("1234567", "waiting", "medium", "700 W", "699 W", "12.3 %"):
        assert text in lines[1]
    assert "past floor" in lines[2]
    assert lines[-1].startswith("not shown on 80 columns: ")
    assert "USER" in lines[-1]


def test_status_fits_80_columns_with_ordinary_names() -> None:
    node = {
        "name": "gpu0123.cluster.example.org",
        "state": "never heard",
        "mode": "enforce",
        "age_s": 3601.0,
        "gpus": 7,
        "gpus_declared": 8,
        "capped": 8,
        "enforced_mw": 12_345_000,
        "draw_mw": None,
    }
    lines = shown(STATUS, [node], 80)
    assert len(lines) == 2, "no column had to go"
    assert len(lines[1]) <= 80
    for text in ("never heard", "60 min", "7/8", "12.35 kW", "?"):
        assert text in lines[1]


@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 81, 100, 120])
def test_no_figure_is_ever_cut(width: int) -> None:
    lines = shown(JOBS, [job()], width)
    for heading, figure in (("CAP", "700 W"), ("DRAW", "699 W"), ("LOSS", "12.3 %")):
        if width >= 60:
            assert heading in lines[0]
            assert figure in lines[1]


def test_text_of_users_is_shown_as_it_is() -> None:
    assert "[red]x[/red]" in shown(JOBS, [job(user="[red]x[/red]")], 200)[1]


@given(
    rows=st.lists(st.lists(st.text("abc[]/ ", max_size=30), min_size=3, max_size=3), max_size=4),
    width=st.integers(20, 120),
)
def test_rows_never_wrap(rows: list[list[str]], width: int) -> None:
    columns = [
        Column("ONE", lambda row: str(row[0]), clip=4),
        Column("TWO", lambda row: str(row[1]), clip=4, drop=1),
        Column("THREE", lambda row: str(row[2]), short=lambda row: str(row[2])[:3]),
    ]
    lines = shown(columns, rows, width)
    assert len(lines) in (1 + len(rows), 2 + len(rows), 3 + len(rows))  # with the note on what is left out
    assert all(len(line) <= width for line in lines)
