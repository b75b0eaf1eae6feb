"""Observe mode: plans and reports, and not one limit written; nor by off and on."""

from __future__ import annotations

import pytest

from testbed import gpus
from testbed.site import Site

from ..site_fixture import (
    DEFAULT_MW,
    TRAIN,
    caps_mw,
    clear_limits,
    controller_audit,
    hold,
    node_audit,
    small_site,
    wait_as,
    wait_seen,
)

pytestmark = pytest.mark.cluster

SITE_OPTIONS = small_site(nodes=1, mode="observe", times={"response_s": 3})


def test_nothing_is_written(site: Site) -> None:
    job = site.submit(TRAIN, gpus=2, flex="medium")
    site.wait_training(job)
    wait_seen(site, job)
    site.cli("limit", "set", "2.7kW")
    wait_as("it is planned", lambda: (site.jobs()[job]["target_cap_mw"] or DEFAULT_MW) < DEFAULT_MW)
    assert "observe" in site.cli("status").stdout
    wait_as("the node holds the plan", lambda: len(node_audit(site, "n1", "plan_accepted")) > 1)
    hold(site, 2.5)
    late = site.submit(TRAIN, gpus=2, flex="low")
    site.wait_training(late)
    site.cli("off")
    site.cli("on")
    clear_limits(site)
    wait_as("the window is over", lambda: site.status()["window"] is None)
    assert {record["mode"] for record in controller_audit(site, "plan_sent")} == {"observe"}
    assert caps_mw(site) == [DEFAULT_MW] * 4
    limits = [line for line in gpus.read_trace(site.sim_dir("n1")) if line.event == "limit"]
    assert len(limits) == 4  # how the GPUs were made
    assert node_audit(site, "n1", "set") == []
