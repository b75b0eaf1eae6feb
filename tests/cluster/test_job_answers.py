"""What users ask of their jobs on a real site: while a cap holds, and after the end, from the history."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from testbed.cluster import wait_until
from testbed.site import Site

from ..site_fixture import TRAIN, clear_limits, hold, set_limit, small_site, wait_jobs, wait_seen

pytestmark = pytest.mark.cluster
SITE_OPTIONS = small_site()


def test_a_job_is_told_while_it_is_capped_and_after_its_end(site: Site, tmp_path: Path) -> None:
    job = site.submit(TRAIN, gpus=4, flex="medium", where="n1")
    site.wait_training(job)
    wait_seen(site, job)
    set_limit(site, 5300)
    hold(site, 8)
    running = site.cli("job", str(job)).stdout
    (tmp_path / "running.txt").write_text(running)
    flat = " ".join(running.split())
    assert f"job {job} of " in running
    assert ": running\n" in running
    assert "--power-flex=medium" in running
    assert "a GPU, seen on this run" in running
    assert "capped from 700 W to " in running
    assert "economic limit manual of 5300 W, policy marginal" in flat
    for command in (("job", str(job)), ("jobs",), ("status",), ("top", "--once"), ("what-if", "5%")):
        assert "SIMULATED GPUs" in site.cli(*command, check=False).stdout, command
    told = json.loads(site.cli("job", str(job), "--json").stdout)
    assert told["cost"]["capped_s"] > 4
    assert told["cost"]["saved_wh"] > 0
    assert told["target_cap_mw"] < 700_000

    clear_limits(site)
    wait_jobs(site, {job: "admitted"})
    site.cluster.run(["scancel", str(job)])
    wait_until(
        lambda: (
            job not in site.jobs()
            and f'"{job}"' in json.dumps([run["spec"] for run in site.ask("jobs", {"ended": True})])
        ),
        20,
        "the run is in the history",
    )
    ended = site.cli("job", str(job)).stdout
    (tmp_path / "ended.txt").write_text(ended)
    assert "ended " in ended.splitlines()[0]
    assert "capped from 700 W to " in ended
    assert "caps held it down for " in ended
    assert "its cap now" not in ended
    kept = json.loads(site.cli("job", str(job), "--json").stdout)
    assert kept["cost"]["capped_s"] >= told["cost"]["capped_s"]
    assert abs(kept["ended_unix_s"] - time.time()) < 60
    listed = site.cli("jobs", "--ended").stdout
    assert any(line.split()[:1] == [str(job)] and " ended " in line for line in listed.splitlines())


def test_a_job_that_nobody_knows(site: Site) -> None:
    done = site.cli("job", "999999", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "job 999999 is not known" in done.stderr
