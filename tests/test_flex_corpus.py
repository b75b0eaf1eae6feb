"""One corpus, three readers: the SPANK plugin's C, the prolog's sh and slurm_pfi.flex agree on every value."""

from __future__ import annotations

import ast
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_pfi.flex import FlexError, parse_flex
from testbed.cluster_files import REPO, install_hook

CORPUS = Path(__file__).parent / "data/flex_corpus.tsv"


@dataclass(frozen=True)
class Row:
    value: bytes
    good: bool
    max_loss: float | None


def read_corpus() -> list[Row]:
    rows = []
    for line in CORPUS.read_text(encoding="ascii").splitlines():
        if line.startswith("#"):
            continue
        quoted, verdict, max_loss = line.split("\t")
        assert verdict in {"good", "bad"}, line
        value = ast.literal_eval("b" + quoted)
        assert isinstance(value, bytes)
        rows.append(Row(value, verdict == "good", None if max_loss == "-" else float(max_loss)))
    return rows


ROWS = read_corpus()


def test_corpus_has_both_kinds_and_no_row_twice() -> None:
    assert len({row.value for row in ROWS}) == len(ROWS)
    assert sum(row.good for row in ROWS) >= 15
    assert sum(not row.good for row in ROWS) >= 50
    assert all((row.max_loss is not None) == row.good for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: repr(row.value))
def test_python(row: Row) -> None:
    text = os.fsdecode(row.value)
    if row.good:
        flex = parse_flex(text)
        assert flex.text == text
        assert flex.max_loss == row.max_loss
    else:
        with pytest.raises(FlexError):
            parse_flex(text)


def test_c() -> None:
    subprocess.run(
        ["make", "--silent", "-C", str(REPO / "spank"), "../build/spank/flex_check"],
        check=True,
        capture_output=True,
    )
    done = subprocess.run(
        [str(REPO / "build/spank/flex_check")],
        input=b"".join(row.value + b"\0" for row in ROWS),
        capture_output=True,
        check=True,
    )
    verdicts = done.stdout.decode().split()
    assert len(verdicts) == len(ROWS)
    wrong = [
        (row.value, verdict)
        for row, verdict in zip(ROWS, verdicts, strict=True)
        if (verdict == "good") != row.good
    ]
    assert wrong == []


def test_sh(tmp_path: Path) -> None:
    prolog = tmp_path / "prolog"
    install_hook(REPO / "prolog/slurm-pfi-prolog", prolog, state_dir=tmp_path, log_file=tmp_path / "log")
    wrong = []
    for number, row in enumerate(ROWS, start=1):
        env = {
            b"SLURM_JOB_ID": b"%d" % number,
            b"SLURM_JOB_UID": b"20011",
            b"SLURMD_NODENAME": b"n1",
            b"SPANK_PFI_FLEX": row.value,
        }
        assert subprocess.run([str(prolog)], env=env, check=False).returncode == 0
        written = (tmp_path / f"n1/jobs/{number}.0").read_bytes().splitlines()[-1]
        if written != b"flex " + (row.value if row.good else b"invalid"):
            wrong.append((row.value, written))
    assert wrong == []
