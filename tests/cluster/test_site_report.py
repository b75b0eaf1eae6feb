"""A window on a real site, afterwards: what the report says against what the simulated GPUs really drew."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from testbed.cluster import wait_until
from testbed.site import Site

from ..site_fixture import TRAIN, clear_limits, hold, set_limit, small_site, wait_seen, wait_within

pytestmark = pytest.mark.cluster
SITE_OPTIONS = small_site()


def test_a_window_is_told_afterwards_as_text_page_and_csv(site: Site, tmp_path: Path) -> None:
    jobs = [site.submit(TRAIN, gpus=4, flex="medium", where=node) for node in ("n1", "n2")]
    for job in jobs:
        site.wait_training(job)
        wait_seen(site, job)
    hold(site, 16)  # the draw before is a mean of 15 s
    limit_w = 7000
    set_limit(site, limit_w)
    wait_until(lambda: site.ask("status")["window"] is not None, 10, "a window")
    number = site.ask("status")["window"]["id"]
    wait_within(site, limit_w * 1000)
    hold(site, 12)
    assert json.loads(site.cli("report", "--json").stdout)["window"]["closed_unix_s"] is None
    clear_limits(site)
    wait_until(lambda: site.ask("windows")[0]["closed_unix_s"] is not None, 10, "the end of the window")

    html, folder = tmp_path / "window.html", tmp_path / "csv"
    text = site.cli("report", str(number), "--html", str(html), "--csv", str(folder)).stdout
    assert "The limit was kept" in text
    assert "its limit was cleared" in text
    assert "were simulated" in text
    told = json.loads(site.cli("report", str(number), "--json").stdout)
    assert told["compliance"]["above_s"] == 0
    assert told["compliance"]["counted_s"] > 5
    runs = {run["facts"]["run"].rpartition(":")[2]: run for run in told["runs"]}
    assert set(runs) == {f"{job}.0" for job in jobs}
    for run in runs.values():
        assert run["reduction"] == pytest.approx(
            1 - run["draw_mw"] / run["facts"]["baseline_draw_mw"], abs=1e-3
        )
        assert 0.02 < run["reduction"] < 0.5
    gave_mw = told["delivered"]["bottom_up_mw"]
    assert gave_mw == pytest.approx(told["delivered"]["top_down_mw"], rel=0.2)
    ET.fromstring(html.read_text().removeprefix("<!DOCTYPE html>\n"))
    assert len(list(folder.glob("*.csv"))) == 4
