"""slurmctld away in a window, stopped or hanging: the limit holds, no cap is lifted, tags are written afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Final

import pytest

from slurm_pfi.controller.worker.pace import MOST_PAUSE_S
from slurm_pfi.slurm.tag import Tag, find_tag
from testbed.processes import processes_naming
from testbed.site import Site

from ..site_fixture import (
    DEFAULT_MW,
    TRAIN,
    caps_mw,
    clear_limits,
    hold,
    prove,
    set_limit,
    site_mw,
    small_site,
    wait_as,
    wait_registered,
    wait_seen,
)
from .test_accounting import shown

pytestmark = pytest.mark.cluster

DOWN_S: Final = 60.0
HANGS_S: Final = 5.0
MOST_WRITES_PER_S: Final = 20
JOBS: Final = 4
REFRESH_S: Final = 5.0
SITE_OPTIONS = small_site(times={"tag_refresh_s": REFRESH_S})


def limit_w(jobs: int, cap_w: float) -> float:
    """A limit that leaves so much for each of some jobs of one GPU: 2 kW lie beside the GPUs, the others are parked."""
    return 2000 + (8 - jobs) * 200 + jobs * cap_w


def capped_jobs(site: Site, number: int) -> list[int]:
    """Jobs of one GPU each that are capped and have told so in their tags."""
    jobs = [site.submit(TRAIN, gpus=1, flex="high") for _ in range(number)]
    site.wait_training(*jobs)
    wait_seen(site, *jobs, timeout_s=30)
    set_limit(site, limit_w(number, 600))
    wait_as("their tags tell of caps", lambda: all(tag_of(site, job).capped_s > 0 for job in jobs), 60)
    return jobs


def tag_of(site: Site, job: int) -> Tag:
    tag = find_tag(shown(site, str(job)))
    assert tag is not None, f"job {job} has no tag"
    return tag


def end_by_itself(site: Site, job: int) -> None:
    """End the program of a job, as if its work were done: nobody need tell slurmctld."""
    found = [pid for pid, command in processes_naming(site.root).items() if f"/{job}.jsonl" in command]
    assert found, f"no program of job {job}"
    for pid in found:
        os.kill(pid, signal.SIGTERM)


def hold_and_watch(site: Site, seconds: float, limit: float) -> None:
    """For so long the limit holds, no GPU is back at what it was before, and every node is heard."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        assert site_mw(site) <= limit * 1000
        assert max(caps_mw(site)) < DEFAULT_MW
        assert {node["state"] for node in site.status()["nodes"]} == {"ok"}
        hold(site, 0.5)


def writes(site: Site) -> list[tuple[float, int]]:
    """When slurmctld took an AdminComment (Unix seconds) and of which job, by its own log."""
    log = (site.cluster.layout.log / "slurmctld.log").read_text(errors="replace")
    found = re.findall(r"(?m)^\[([0-9T:.-]+)\] _update_job: setting admin_comment .* for JobId=([0-9]+)", log)
    return [(datetime.fromisoformat(stamp).timestamp(), int(job)) for stamp, job in found]


@pytest.mark.timeout(300)
def test_a_minute_without_slurmctld_in_a_window(site: Site, tmp_path: Path) -> None:
    *stay, ends = jobs = capped_jobs(site, JOBS)
    limit, lower = limit_w(JOBS, 600), limit_w(JOBS, 540)
    done_before = {job: site.tokens(job)[-1][1] for job in jobs}
    site.cluster.stop_slurmctld()
    try:
        hold_and_watch(site, DOWN_S / 3, limit)
        end_by_itself(site, ends)
        # A limit is taken and held as ever.
        set_limit(site, lower)
        hold_and_watch(site, DOWN_S / 3, lower)
        tags = site.status()["tags"]
        assert tags["unavailable"] >= 1
        assert tags["waiting"] >= 1
        assert tags["trouble"]
        text = site.cli("status").stdout
        assert "tags cannot be written: " in text
        # Our own record goes on, and is what users are told.
        told = json.loads(site.cli("job", str(stay[0]), "--json").stdout)
        assert told["cost"]["capped_s"] > DOWN_S / 2
        assert told["tag_trouble"] or find_tag(told["tag"]) is not None
        hold_and_watch(site, DOWN_S / 3, lower)
        assert all(site.tokens(job)[-1][1] > done_before[job] for job in stay)
    finally:
        site.cluster.start_slurmctld()
    back_unix_s = time.time()

    def all_anew() -> bool:
        late = [job for at_s, job in writes(site) if at_s >= back_unix_s - 1]
        return set(stay) <= set(late)

    wait_as("tags are written anew", all_anew, MOST_PAUSE_S + 60)
    assert all(tag_of(site, job).capped_s >= DOWN_S for job in stay)
    wait_registered(site)
    wait_as("the job that ended meanwhile is gone", lambda: ends not in site.jobs(), 60)
    site.cluster.wait_job_state(ends, "COMPLETED", "FAILED", "CANCELLED", timeout_s=60)
    assert ends not in [job for at_s, job in writes(site) if at_s >= back_unix_s + MOST_PAUSE_S]
    kept = json.loads(site.cli("job", str(ends), "--json").stdout)
    assert kept["ended_unix_s"] is not None
    assert kept["cost"]["capped_s"] > DOWN_S / 3
    late = [at_s for at_s, _ in writes(site) if at_s >= back_unix_s - 1]
    assert all(sum(first <= at_s < first + 1 for at_s in late) <= MOST_WRITES_PER_S for first in late)
    wait_as("nothing is wrong any more", lambda: site.status()["tags"]["trouble"] == "")
    assert site_mw(site) <= lower * 1000
    verdict = prove(site, tmp_path / "down", "1", "9")
    print(verdict.text())  # noqa: T201


def test_a_slurmctld_that_hangs_holds_up_neither_limit_nor_orders_nor_the_controllers_end(
    site: Site, tmp_path: Path
) -> None:
    (job,) = capped_jobs(site, 1)
    limit, lower = limit_w(1, 600), limit_w(1, 540)
    ctld = site.cluster.daemon_pid("slurmctld")
    written = len(writes(site))
    os.kill(ctld, signal.SIGSTOP)
    try:
        set_limit(site, lower)
        hold_and_watch(site, HANGS_S, lower)
        wait_as("a tag was given up", lambda: site.status()["tags"]["unavailable"] > 0, 30)
        assert len(_asking(site)) <= 6, "no heap of commands that wait for it"
        clear_limits(site)
        site.wait_restored()
        set_limit(site, limit)
        began_s = time.monotonic()
        assert site.kill("controller", signal.SIGTERM) == 0
        assert time.monotonic() - began_s < 15
        assert _asking(site) == {}, "it leaves no command behind"
        assert site_mw(site) <= limit * 1000
        site.start_controller()
        site.wait_heard("n1", "n2")
        hold(site, 2)
        assert site_mw(site) <= limit * 1000
    finally:
        os.kill(ctld, signal.SIGCONT)
    wait_as("a tag is written", lambda: len(writes(site)) > written, MOST_PAUSE_S + 60)
    wait_as("Slurm has described the job", lambda: site.jobs()[job]["user"] is not None, 30)
    prove(site, tmp_path / "hung", "1", "9")


def _asking(site: Site) -> dict[int, str]:
    """Slurm's commands that the controller has under way."""
    return {
        pid: command
        for pid, command in processes_naming(site.root).items()
        if re.match(r"\S*(squeue|scontrol) ", command)
    }
