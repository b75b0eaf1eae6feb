"""The line in a job's own output: what it says, where the agent keeps it, what the plugin takes for one."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_pfi.controller.dispatch import CapsStep, dispatch
from slurm_pfi.controller.jobline import job_line
from slurm_pfi.controller.state import RunView
from slurm_pfi.node.joblines import JobLines
from slurm_pfi.slurm.tag import format_tag

from .slurm_samples import FULL_TAG as TAG
from .test_controller_core import RUN, Site, gpu, msgspec_job

CHECK = Path(__file__).resolve().parent.parent / "build/spank/line_check"


def line_of(*, simulated: bool = False, **changes: Any) -> str:
    view = RunView(run=RUN, first_seen_ns=0, job=msgspec_job(RUN, ("n1",)))
    view = msgspec.structs.replace(view, tag_text=format_tag(replace(TAG, **changes)))
    return job_line(view, simulated=simulated)


def test_a_capped_job_is_told_what_is_known_and_no_more() -> None:
    told = line_of()
    assert told.startswith(
        "caps held this job down for 52 min (flex 10%), cost 3.1 % of its throughput and saved 840 Wh; as of "
    )
    assert told.endswith(f" UTC, more: slurm-pfi job {RUN.job_id}")
    assert "at a cost not known and saved 840 Wh;" in line_of(loss=None)
    unknown = line_of(loss=None, energy_wh=None)
    assert "at a cost not known;" in unknown
    assert "Wh" not in unknown
    assert "took 12 Wh more;" in line_of(energy_wh=12)
    assert line_of(capped_s=0.0) == ""
    assert job_line(RunView(run=RUN, first_seen_ns=0), simulated=False) == ""
    assert "and saved 840 Wh (simulated GPUs); as of " in line_of(simulated=True)
    assert all(" " <= sign <= "~" for sign in told)
    assert len(told) <= 300


def plan_lines(*, job_line: bool) -> list[dict[str, str]]:
    """The lines of all plans that a site sends whose run has a tag."""
    site = Site(nodes=1, gpus=1)
    site.hear("n1", gpu("G", RUN, draw_mw=600_000))
    site.identify(RUN, "n1")
    site.cycle()
    view = msgspec.structs.replace(site.state.runs[RUN], tag_text=format_tag(TAG))
    state = msgspec.structs.replace(site.state, runs={RUN: view})
    nothing = CapsStep(0.0, {}, parked=False)
    tag = msgspec.structs.replace(site.config.tag, job_line=job_line)
    config = msgspec.structs.replace(site.config, tag=tag)
    _, actions = dispatch(state, config, (nothing,), "test", site.now_ns + 2_000_000_000)
    return [action.plan.lines for action in actions if hasattr(action, "plan")]


def test_nodes_are_told_where_the_site_switched_it_on() -> None:
    (lines,) = plan_lines(job_line=True)
    assert list(lines) == [str(RUN)]
    assert all(not lines for lines in plan_lines(job_line=False)), "off by default, no plan is sent for it"


def test_the_agent_keeps_lines_of_its_own_runs_alone(tmp_path: Path) -> None:
    kept = JobLines(tmp_path / "lines", "c")
    lines = {
        "c:12.0": "good",
        "c:13.0": "not here",
        "d:12.0": "another cluster",
        "c:../x": "no run",
        "c:14.0": "\n",
    }
    kept.keep(lines, {"12.0", "14.0", "../x"})
    assert {path.name: path.read_text() for path in (tmp_path / "lines").iterdir()} == {"12.0": "good"}
    assert (tmp_path / "lines").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "lines/12.0").stat().st_mode & 0o777 == 0o600
    kept.forget({"12.0"})
    kept.keep({"c:12.0": "newer"}, {"12.0"})
    assert (tmp_path / "lines/12.0").read_text() == "newer"
    JobLines(tmp_path / "lines", "c").forget(set())  # what an earlier agent left
    assert list((tmp_path / "lines").iterdir()) == []
    JobLines(tmp_path / "none", "c").forget(set())


def read(state_dir: Path, job: str = "12", restart: str = "0") -> str | None:
    done = subprocess.run(
        [CHECK, state_dir, job, restart], capture_output=True, text=True, check=False, timeout=10
    )
    assert done.returncode in (0, 1)
    return done.stdout.removesuffix("\n") if done.returncode == 0 else None


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    (tmp_path / "n1/lines").mkdir(parents=True)
    (tmp_path / "n0").mkdir()
    (tmp_path / "file").write_text("no node")
    return tmp_path


def test_the_plugin_reads_the_line_of_this_run(state_dir: Path) -> None:
    JobLines(state_dir / "n1/lines", "c").keep({"c:12.0": line_of(), "c:12.1": "second"}, {"12.0", "12.1"})
    assert read(state_dir) == line_of()
    assert read(state_dir, restart="1") == "second"
    assert read(state_dir, restart="2") is None
    assert read(state_dir, job="1") is None
    for odd in ("", "0/../../x", "../12.0", "00000000000"):
        assert read(state_dir, restart=odd) is None
    assert read(state_dir / "nowhere") is None
    assert read(state_dir / "file") is None


def test_the_plugin_takes_nothing_else_for_a_line(state_dir: Path) -> None:
    path = state_dir / "n1/lines/12.0"

    def with_bytes(data: bytes) -> str | None:
        path.write_bytes(data)
        path.chmod(0o600)
        return read(state_dir)

    assert with_bytes(b"x" * 300) == "x" * 300
    for data in (b"", b"x" * 301, b"two\nlines", b"\x1b[31m", b"\xff", b"a\0b"):
        assert with_bytes(data) is None, data
    assert with_bytes(b"good") == "good"
    path.chmod(0o622)
    assert read(state_dir) is None, "others may write it"
    path.unlink()
    target = state_dir / "target"
    target.write_text("elsewhere")
    path.symlink_to(target)
    assert read(state_dir) is None
    path.unlink()
    os.mkfifo(path)
    assert read(state_dir) is None, "a pipe is not waited for"
    path.unlink()
    path.mkdir()
    assert read(state_dir) is None
    if os.getuid() == 0:
        path.rmdir()
        assert with_bytes(b"good") == "good"
        os.chown(path, 65534, 65534)
        assert read(state_dir) is None, "another's file"


def test_the_folder_in_the_docs_is_the_default_one() -> None:
    text = (CHECK.parent.parent.parent / "etc/plugstack.conf").read_text()
    assert re.search(r"job_line=/run/slurm-pfi$", text, re.MULTILINE)
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        "optional /usr/lib/slurm-pfi/slurm_pfi.so"
    ]
