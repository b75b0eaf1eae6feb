"""The measuring commands that need a cluster run, and what they write has what it should; no time is judged here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import intervals, sdiag, slurm_load, start_latency
from testbed.cluster_files import REPO

FOUND = REPO / "build/bench/quick"

SDIAG = """\
*******************************************************
sdiag output at Mon Nov 30 18:27:33 2026 (1796063253)
*******************************************************
Server thread count:  3

Main schedule statistics (microseconds):
\tLast cycle:   277

Remote Procedure Call statistics by message type
\tREQUEST_JOB_INFO_SINGLE                 ( 2021) count:10     ave_time:208    total_time:2089
\tREQUEST_STATS_INFO                      ( 2035) count:2      ave_time:186    total_time:372

Remote Procedure Call statistics by user
\troot            (       0) count:22     ave_time:193    total_time:4247

Pending RPC statistics
\tREQUEST_JOB_INFO_SINGLE                 ( 2021) count:99
"""


def result(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.cluster
def test_the_load_is_told_apart_by_user(capsys: pytest.CaptureFixture[str]) -> None:
    slurm_load.main(["--quick"])
    found = result(FOUND / "slurm_load.json")
    for part in (found["steady"], found["window"]):
        assert part["poller"]["polls"] >= 3
        assert part["poller"]["read_ms"] > 0
        assert part["ours"]["full_reads"] >= 1
        assert part["ours"]["reads"] >= 2 * part["ours"]["full_reads"]
        assert part["ratio"] == pytest.approx(part["poller"]["read_ms"] / part["ours"]["read_ms"], abs=0.06)
        assert part["jobs_started"] == slurm_load.QUICK.starts
    assert found["ratio"] == found["steady"]["ratio"]
    assert found["window"]["tag_writes"]["count"] > 0
    assert found["memory"]["reads"] == slurm_load.QUICK.reads
    assert len(capsys.readouterr().out.splitlines()) >= 4


@pytest.mark.cluster
def test_the_start_of_jobs_is_timed_in_all_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    start_latency.main(["--quick"])
    found = result(FOUND / "start_latency.json")
    serial, together = found["hooks"]["serial"], found["hooks"]["together"]
    for name in ("ours_prolog_ms", "ours_epilog_ms", "empty_prolog_ms", "empty_epilog_ms"):
        assert 0 < serial[name]["median"] <= serial[name]["p99"] <= serial[name]["max"]
    assert len(together["ours_total_ms"]) == together["rounds"]
    assert together["ratio"] > 0
    for since in ("since_submit", "since_allocation"):
        for arm in ("hooks", "all"):
            later = found["first_kernel"][since][f"{arm}_later"]
            low, high = later["interval_95_ms"]
            assert low <= later["ms"] <= high
    assert 0 < found["first_raise"]["since_seen_s"]["median"] <= found["first_raise_max_s"]
    assert "first raise" in capsys.readouterr().out


def test_sdiag_is_read_by_its_tables() -> None:
    served = sdiag.parse(SDIAG)
    assert served.of_type("REQUEST_JOB_INFO_SINGLE") == sdiag.Calls(10, 2089)
    assert served.of_user("root") - served.of_type("REQUEST_STATS_INFO") == sdiag.Calls(20, 3875)
    assert served.of_user("daemon") == sdiag.Calls()
    with pytest.raises(ValueError, match="no calls by type and by user"):
        sdiag.parse("")


def test_the_99th_percentile_of_200_is_the_198th() -> None:
    values = [float(number) for number in range(200, 0, -1)]
    assert intervals.quantile(values, 0.99) == 198
    assert intervals.quantile(values[:2], 0.99) == 200
    low, high = intervals.interval(values, max)
    assert 190 < low <= high == 200
