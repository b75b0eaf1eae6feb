"""A tag that another wrote, an admin by hand or an operator in the accounting: no figure of ours comes from it."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from slurm_pfi.slurm.tag import find_tag
from testbed.site import Site

from ..site_fixture import TRAIN, small_site, wait_as

pytestmark = pytest.mark.cluster

SITE_OPTIONS = small_site(nodes=1, accounting=True, times={"tag_refresh_s": 2})
FORGED: Final = (
    "pfi=9.99[9.98,9.99];src=measured;grid=200-700/100;flex=100%"
    ";loss=0.0%;wh=-99999;capped=99m;t=2026-11-30T12:00Z"
)


def shown(site: Site, job: int) -> str:
    """AdminComment as scontrol shows it."""
    return site.cluster.job_fields(job).get("AdminComment", "").rstrip()


def told(site: Site, job: int) -> Any:
    return json.loads(site.cli("job", str(job), "--json").stdout)


def is_ours(text: str) -> bool:
    tag = find_tag(text)
    return tag is not None and tag.flex == "low" and tag.pfi < 9 and text.count("pfi=") == 1


def forge(site: Site, job: int) -> None:
    site.cluster.scontrol("update", f"jobid={job}", f"admincomment=a note {FORGED}")


def test_no_figure_of_ours_comes_from_a_tag(site: Site) -> None:
    job = site.submit(TRAIN, gpus=1, flex="low", more=["--hold"])
    forge(site, job)
    site.cluster.scontrol("release", str(job))
    site.wait_training(job)
    wait_as("ours is there, and the forged one is not", lambda: is_ours(shown(site, job)))
    assert shown(site, job).startswith("a note pfi=")

    # Nor does a controller that starts believe what it finds.
    site.kill("controller")
    forge(site, job)
    site.start_controller()
    wait_as("the run is known again", lambda: job in site.jobs() and site.jobs()[job]["user"] is not None)
    answer = told(site, job)
    assert answer["flex"] == "low"
    assert answer["pfi"]["value"] < 9
    assert answer["cost"]["capped_s"] < 60
    assert not (answer["cost"]["saved_wh"] or 0) > 100
    wait_as("ours stands again", lambda: is_ours(shown(site, job)))

    # After the end an operator may write what he likes into the accounting: the history has the truth.
    site.cluster.run(["scancel", str(job)])
    wait_as("sacct has the end", lambda: "CANCELLED" in site.cluster.sacct(str(job), "State")[0][0])
    site.cluster.run(
        ["sacctmgr", "-i", "modify", "job", "where", f"jobid={job}", "set", f"admincomment={FORGED}"],
        user="root",
    )
    assert site.cluster.sacct(str(job), "AdminComment")[0][0].lower() == FORGED.lower()
    wait_as(
        "the history has the run",
        lambda: str(job) in {run["spec"] for run in site.ask("jobs", {"ended": True})},
    )
    kept = told(site, job)
    assert kept["flex"] == "low"
    assert kept["pfi"]["value"] < 9
    assert kept["cost"]["capped_s"] < 60
