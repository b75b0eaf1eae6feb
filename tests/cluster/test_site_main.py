"""The main path on a whole site: economic limit, emergency limit, clear; as root and with SlurmUser=slurm."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from testbed.cluster import ClusterError
from testbed.site import Site

from ..site_fixture import (
    DEFAULT_MW,
    TRAIN,
    caps_mw,
    controller_audit,
    hold,
    prove,
    site_mw,
    small_site,
    wait_as,
    wait_seen,
    wait_within,
)

pytestmark = pytest.mark.cluster

ADMIN_MW = 650_000
SITE_OPTIONS = small_site(times={"response_s": 3}, admin_limits={"n2": {1: ADMIN_MW / 1000}})
AS_SLURM = dataclasses.replace(SITE_OPTIONS, slurm_user="slurm")
UNCAPPED_MW = 7 * DEFAULT_MW + ADMIN_MW + 2_000_000


@pytest.mark.parametrize(
    "site",
    [
        pytest.param(SITE_OPTIONS, id="ourselves"),
        pytest.param(
            AS_SLURM, id="SlurmUser=slurm", marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root")
        ),
    ],
    indirect=True,
)
class TestMainPath:
    """One story in four tests, on one site each."""

    def test_an_economic_limit_holds_and_keeps_the_floors(self, site: Site, tmp_path: Path) -> None:
        free = site.submit(TRAIN, gpus=1, flex="none", partition="urgent", where="n1")
        low = site.submit(TRAIN, gpus=1, flex="none", where="n1")
        five = site.submit(TRAIN, gpus=2, flex="5%", where="n1")
        high = site.submit(TRAIN, gpus=4, flex="high", where="n2")
        site.wait_training(free, low, five, high)
        wait_seen(site, free, low, five, high)
        shown = site.jobs()
        assert shown[free]["flex"] == "none"
        assert (shown[low]["flex"], shown[low]["note"]) == ("low", "none is not allowed here; read as low")
        limit_mw = 6_700_000
        assert limit_mw < UNCAPPED_MW
        site.cli("limit", "set", "6.7kW")
        wait_within(site, limit_mw)
        wait_as(
            "caps are told",
            lambda: all(job["target_cap_mw"] == job["cap_mw"] for job in site.jobs().values()),
        )
        shown = site.jobs()
        assert shown[free]["cap_mw"] == DEFAULT_MW
        for job in (low, five, high):
            assert shown[job]["cap_mw"] >= shown[job]["floor_mw"]
            assert not shown[job]["floor_passed"]
        assert shown[high]["cap_mw"] < shown[five]["cap_mw"] <= DEFAULT_MW
        # The same promise is the same share of each job's own draw, to the rounding of both to milliwatts.
        shares = [shown[job]["floor_mw"] / shown[job]["baseline_draw_mw"] for job in (low, five)]
        assert shares[0] == pytest.approx(shares[1], rel=3e-6)
        assert site.of_window("shortfall_mw") == 0
        assert controller_audit(site, "infeasible") == []
        text = site.cli("jobs").stdout
        assert f"{low}: none is not allowed here; read as low" in text
        hold(site, 3.5)  # the checker judges what comes later than response_s
        prove(site, tmp_path / "economic", "1", "9", "placement")

        # An emergency may pass the floors; that is announced and audited.
        site.cli("limit", "set", "5.4kW", "--emergency")
        wait_within(site, 5_400_000)
        wait_as("floors are passed", lambda: site.jobs()[high]["floor_passed"])
        told = controller_audit(site, "floor_passed")
        assert {record["run"] for record in told} >= {f"pfi:{high}.0"}
        assert all(record["cap_mw"] < record["floor_mw"] for record in told)
        assert "past floor" in site.cli("jobs").stdout
        hold(site, 3.5)  # the checker judges what comes later than response_s
        prove(site, tmp_path / "emergency", "1")

        # A job that ends leaves its GPUs at the park cap, and the others get what it had.
        site.cluster.run(["scancel", str(five)])
        wait_as("its GPUs are parked", lambda: caps_mw(site, "n1").count(200_000) == 2)
        assert site_mw(site) <= 5_400_000

        site.cli("limit", "clear")
        site.wait_restored()
        assert sorted(caps_mw(site))[0] == ADMIN_MW
        assert caps_mw(site).count(DEFAULT_MW) == 7
        wait_as("all are free", lambda: all(node["capped"] == 0 for node in site.status()["nodes"]))
        assert site.status()["window"] is None
        prove(site, tmp_path / "restored", "1", "2", "3", "9", "placement")

    def test_what_is_wrong_on_the_command_line_is_said_and_changes_nothing(self, site: Site) -> None:
        for words, code, text in (
            (("limit", "set", "18.5"), 2, "unit"),
            (("limit", "set", "--", "-3kW"), 2, "-3kW"),
            (("limit", "set", "5kW", "--for", "2h", "--until", "18:00"), 2, "not both"),
            (("limit", "clear", "nosuch"), 1, "no limit 'nosuch'"),
        ):
            done = site.cli(*words, check=False)
            assert (done.returncode, text in done.stderr) == (code, True), (words, done)
        assert json.loads(site.cli("limit", "show", "--json").stdout)["limits"] == []
        with pytest.raises(ClusterError, match="power-flex=most"):
            site.submit(TRAIN, gpus=1, flex="most")
