"""Jobs of a federation, whose ids carry their cluster in the upper bits, on a whole site with accounting."""

from __future__ import annotations

import os
import pwd

import pytest

from testbed.site import Site

from ..shape_site import open_limit, runs, wait_capped, wait_nothing_known, wait_states, wait_tagged
from ..site_fixture import TRAIN, clear_limits, small_site, wait_as

pytestmark = pytest.mark.cluster

SITE_OPTIONS = small_site(nodes=1, times={"response_s": 4, "start_grace_s": 2}, accounting=True)
LOCAL_BITS = 26  # slurm.h: 6 bits of the cluster that a job came from above the 26 of its own number


def sacctmgr(site: Site, *words: str) -> None:
    site.cluster.run(["sacctmgr", "--immediate", *words], user=pwd.getpwuid(os.getuid()).pw_name)


def test_a_federated_id_is_an_id_like_any_other(site: Site) -> None:
    sacctmgr(site, "add", "cluster", "other")
    sacctmgr(site, "add", "federation", "both", f"clusters=other,{site.cluster.options.name}")
    wait_as("slurmctld knows of it", lambda: "both" in site.cluster.scontrol("show", "federation"))
    job = site.submit(TRAIN, gpus=1, flex="high")
    assert job >> LOCAL_BITS > 0
    array = site.submit(TRAIN, gpus=1, flex="high", more=["--array=0-1%1"])
    site.wait_training(job)
    wait_as("a task runs", lambda: len(runs(site)) == 2)
    (task,) = {name for name in runs(site) if name != f"{job}.0"}
    wait_states(site, {f"{job}.0": "admitted", task: "admitted"})
    wait_tagged(site, {str(job): "high", f"{array}_0": "high"})
    open_limit(site, 2500)  # two parked: 550 W for each of the others
    wait_capped(site, f"{job}.0", task)
    assert f"job {job} " in site.cli("job", str(job)).stdout
    assert f"{array}_0" in site.cli("job", f"{array}_0").stdout
    site.cluster.cancel_all()
    clear_limits(site)
    site.wait_restored()
    wait_nothing_known(site)
    wait_as("sacct has the tag", lambda: "pfi=" in site.cluster.sacct(str(job), "admincomment")[0][0])
