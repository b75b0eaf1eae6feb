"""Two jobs on one GPU, as Slurm gives it to them by shard or by MPS: real daemons, simulated GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testbed import gpus
from testbed.site import Site, SiteOptions

from ..site_fixture import (
    DEFAULT_MW,
    PARK_MW,
    TRAIN,
    clear_limits,
    controller_audit,
    hold,
    small_site,
    wait_as,
    wait_jobs,
)

pytestmark = pytest.mark.cluster


def sharing(**parts: int) -> SiteOptions:
    """One node of three GPUs, each with another position, minor number and index: 1 kW beside 2.1 kW of caps."""
    options = small_site(nodes=1, gpus=3, times={"response_s": 4, "start_grace_s": 2}, parts=parts)
    return replace(options, scrambled=("n1",))


by_shard_and_mps = pytest.mark.parametrize(
    ("site", "part"),
    [
        pytest.param(sharing(shard=12), "shard:1", id="shard"),
        pytest.param(sharing(mps=300), "mps:30", id="mps"),
    ],
    indirect=["site"],
)


def two_jobs(site: Site, part: str, first: str, second: str) -> tuple[int, int, str]:
    """Both in training on one GPU; their ids and the GPU's UUID."""
    jobs = [
        site.submit(TRAIN, gres=part, flex=flex, partition="urgent" if flex == "none" else "main")
        for flex in (first, second)
    ]
    site.wait_training(*jobs)
    wait_as("both are known", lambda: all((site.jobs().get(job) or {}).get("user") for job in jobs))
    places = {site.cluster.job_file("n1", job).read_text().split("\ngpus ")[1].split()[0] for job in jobs}
    assert len(places) == 1, "Slurm has put them on one GPU, and says so in its own numbers"
    (place,) = places
    return jobs[0], jobs[1], gpus.read_devices(site.sim_dir("n1"))[int(place)].uuid


def limit(site: Site, watts: int) -> None:
    """Without waiting for it to be kept: it may be less than floors need."""
    order = {"id": "manual", "class": "economic", "limit_mw": watts * 1000, "end_unix_s": None}
    site.ask("limit_set", order)


def cap_mw(site: Site, uuid: str) -> int:
    found: int = next(gpu["effective_mw"] for gpu in site.snapshot() if gpu["uuid"] == uuid)
    return found


@by_shard_and_mps
def test_a_shared_gpu_is_held_at_the_higher_floor_and_counted_once(site: Site, part: str) -> None:
    high, low, uuid = two_jobs(site, part, "high", "low")
    assert "its GPU with other jobs" in site.cli("job", str(low)).stdout
    limit(site, 2000)  # 600 W for the GPU, two are parked
    wait_as("it is short", lambda: (site.of_window("shortfall_mw") or 0) > 0)
    floor_mw = site.jobs()[low]["floor_mw"]
    wait_as("the GPU is at the floor of who allows least", lambda: cap_mw(site, uuid) < DEFAULT_MW)
    hold(site, 3.0)
    at_mw = cap_mw(site, uuid)
    assert 0 <= at_mw - floor_mw < 1000 and floor_mw > 0.95 * DEFAULT_MW
    shown = site.status()
    assert shown["window"]["committed_mw"] == at_mw + 2 * PARK_MW
    assert shown["window"]["shortfall_mw"] == at_mw - 600_000
    assert {job["draw_mw"] for job in site.jobs().values()} == {None}, (
        "of one draw nobody can say whose it is"
    )
    real_mw = sum(gpu["draw_mw"] for gpu in site.snapshot())
    assert shown["draw"]["gpus_mw"] == pytest.approx(real_mw, rel=0.2)

    site.cluster.run(["scancel", str(low)])
    wait_as("the other alone goes further down", lambda: cap_mw(site, uuid) <= 600_000)
    wait_as("and is enough", lambda: site.of_window("shortfall_mw") == 0)
    assert site.jobs()[high]["floor_mw"] <= 600_000


@by_shard_and_mps
def test_who_agreed_to_nothing_is_not_slowed_by_a_neighbour(site: Site, part: str) -> None:
    began = len(gpus.read_trace(site.sim_dir("n1")))
    flexible, stern, uuid = two_jobs(site, part, "high", "none")
    limit(site, 2200)
    wait_as(
        "the two others are parked", lambda: [g["effective_mw"] for g in site.snapshot()].count(PARK_MW) == 2
    )
    hold(site, 3.0)
    wait_jobs(site, {flexible: "admitted", stern: "admitted"})
    clear_limits(site)
    site.wait_restored()
    limits = {line.effective_mw for line in gpus.read_trace(site.sim_dir("n1"))[began:] if line.uuid == uuid}
    assert limits == {DEFAULT_MW}, "it was never lower, nor for a moment"


@by_shard_and_mps
def test_who_comes_in_a_window_waits_until_both_fit(site: Site, part: str) -> None:
    first = site.submit(TRAIN, gres=part, flex="high")
    site.wait_training(first)
    wait_as("it is known", lambda: bool((site.jobs().get(first) or {}).get("user")))
    limit(site, 1900)
    wait_as("it is capped", lambda: max(gpu["effective_mw"] for gpu in site.snapshot()) <= 500_000)
    stern = site.submit(TRAIN, gres=part, flex="none", partition="urgent")
    site.wait_training(stern)
    wait_jobs(site, {stern: "waiting for power"})
    name = f"pfi:{stern}.0"
    wait_as("it is told", lambda: any(r["run"] == name for r in controller_audit(site, "floor_breach")))
    assert max(gpu["effective_mw"] for gpu in site.snapshot()) <= 500_000
    assert site.of_window("shortfall_mw") == 0
    limit(site, 2300)
    wait_jobs(site, {stern: "admitted"})
    wait_as("it has all it needs", lambda: max(gpu["effective_mw"] for gpu in site.snapshot()) == DEFAULT_MW)
    assert [r["run"] for r in controller_audit(site, "admitted")].count(name) == 1
