"""Which jobs a login node shows, by what Slurm tells of them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_pfi.cli.login import jobs_from_slurm
from slurm_pfi.cli.reach import NoControllerError
from slurm_pfi.slurm.tag import format_tag

from .slurm_samples import FULL_TAG as TAG
from .test_sacct import QUEUED, commands, says


def shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]
) -> list[tuple[int, int | None]]:
    """Job and GPUs of each row, with a squeue that prints these."""
    commands(tmp_path, squeue=says(*rows))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    told, trouble = jobs_from_slurm(NoControllerError("no config here", None), mine=True, ended=False)
    assert trouble == ""
    return [(row["job_id"], row["gpus"]) for row in told]


def row(job_id: int, tres: str, **changes: str) -> dict[str, str]:
    return {**QUEUED, "JobID": str(job_id), "tres-alloc": tres, **changes}


def test_a_site_that_does_not_count_gpus_has_all_its_jobs_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(1, "cpu=1"), row(2, "cpu=8"), row(3, "", State="PENDING", NodeList="")]
    assert shown(tmp_path, monkeypatch, *rows) == [(1, None), (2, None)]


def test_where_gpus_are_counted_a_job_without_a_count_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = format_tag(replace(TAG, flex="high", loss=None))  # no % for the printf of a shell
    rows = [
        row(1, "cpu=1"),
        row(2, "cpu=8,gres/gpu=2"),
        row(3, "cpu=1,gres/gpu=0"),
        row(4, "cpu=1", admin_comment=tag, StartTime="0"),
    ]
    assert shown(tmp_path, monkeypatch, *rows) == [(2, 2), (4, None)], "a tag is shown in any case"


def test_a_login_node_loads_nothing_that_only_a_controller_needs() -> None:
    code = "import sys, slurm_pfi.cli.login; print(sorted({'numpy', 'structlog'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
