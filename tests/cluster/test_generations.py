"""The whole way of a job on whatever Slurm is here: flag, tag, cap, restore, sacct. The same on every generation."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_pfi.slurm.tag import find_tag
from testbed.cluster_files import slurm_release
from testbed.site import Site

from ..site_fixture import (
    DEFAULT_MW,
    TRAIN,
    clear_limits,
    hold,
    prove,
    set_limit,
    site_mw,
    small_site,
    wait_as,
    wait_seen,
)

pytestmark = [pytest.mark.cluster, pytest.mark.generations]

SITE_OPTIONS = small_site(accounting=True, times={"response_s": 3, "tag_refresh_s": 2})


def test_a_job_from_its_flag_to_what_the_accounting_keeps_of_it(site: Site, tmp_path: Path) -> None:
    print(f"Slurm {slurm_release()}")  # noqa: T201
    asked = {"flexible": "high", "careful": "5%"}
    jobs = {
        name: site.submit(TRAIN, gpus=2, flex=flex, where="n2" if name == "flexible" else "n1")
        for name, flex in asked.items()
    }
    silent = site.submit(TRAIN, gpus=1, where="n1")
    site.wait_training(*jobs.values(), silent)
    wait_seen(site, *jobs.values(), silent)

    shown = site.jobs()
    assert {name: shown[job]["user_flex"] for name, job in jobs.items()} == asked
    assert shown[silent]["flex"] == "auto"
    for job in (*jobs.values(), silent):
        wait_as(f"job {job} has its tag", lambda job=job: find_tag(_admin_comment(site, job)) is not None)  # type: ignore[misc]
        assert find_tag(_admin_comment(site, job)).flex == shown[job]["flex"]  # type: ignore[union-attr]

    limit_w = 5600
    assert site_mw(site) > limit_w * 1000
    set_limit(site, limit_w)
    wait_as("the flexible job is capped", lambda: site.jobs()[jobs["flexible"]]["cap_mw"] < DEFAULT_MW)
    wait_as(
        "a cap is in the tag",
        lambda: (tag := find_tag(_admin_comment(site, jobs["flexible"]))) is not None and tag.capped_s > 0,
    )
    shown = site.jobs()
    assert shown[jobs["flexible"]]["cap_mw"] < shown[jobs["careful"]]["cap_mw"]
    assert shown[jobs["careful"]]["cap_mw"] >= shown[jobs["careful"]]["floor_mw"]
    hold(site, 3.5)  # the checker judges what comes later than response_s
    assert site_mw(site) <= limit_w * 1000

    clear_limits(site)
    site.wait_restored()
    prove(site, tmp_path / "proof", "1", "3", "9", "placement")

    last = _admin_comment(site, jobs["flexible"])
    for job in (*jobs.values(), silent):
        site.cluster.run(["scancel", str(job)])
    ended = str(jobs["flexible"])
    wait_as(
        "sacct knows of the end", lambda: site.cluster.sacct(ended, "State")[0][0].split()[0] == "CANCELLED"
    )
    kept = find_tag(site.cluster.sacct(ended, "AdminComment")[0][0])
    assert kept is not None
    assert kept.capped_s > 0
    assert kept.flex == "high"
    written = find_tag(last)
    assert written is not None
    assert kept.at_unix_s >= written.at_unix_s


def _admin_comment(site: Site, job: int) -> str:
    """The field as an admin reads it while the job runs."""
    return "".join(site.cluster.squeue("--jobs", str(job), "--Format", "admin_comment:.2000")).strip()
