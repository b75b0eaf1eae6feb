"""Jobs that start, are requeued, end or wait inside a window, and daemons that hang or die meanwhile."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from testbed import gpus
from testbed.site import Site

from ..site_fixture import (
    DEFAULT_MW,
    PARK_MW,
    TRAIN,
    caps_mw,
    controller_audit,
    hold,
    node_audit,
    prove,
    set_limit,
    site_mw,
    small_site,
    wait_as,
    wait_jobs,
    wait_seen,
    wait_within,
)

pytestmark = pytest.mark.cluster

SITE_OPTIONS = small_site(times={"response_s": 4, "start_grace_s": 2})
# 2 kW beside the GPUs, 4 x 700 W for a full n1, 4 x 200 W parked on n2, and 1.4 kW for newcomers.
LIMIT_MW = 7_000_000


def open_window(site: Site, watts: int = 7000) -> None:
    set_limit(site, watts)
    wait_as("n2 is parked", lambda: caps_mw(site, "n2") == [PARK_MW] * 4)


def kernels(site: Site, job: int, node: str = "n2") -> list[gpus.TraceLine]:
    return [
        line
        for line in gpus.read_trace(site.sim_dir(node))
        if line.event == "kernel" and line.job.startswith(f"{job}.")
    ]


def admitted_ns(site: Site, job: int, restart: int = 0) -> int:
    """When the controller admitted the run; far ahead if it has not."""
    told = [r["mono_ns"] for r in controller_audit(site, "admitted") if r["run"] == f"pfi:{job}.{restart}"]
    return min(told, default=2**63)


def test_a_job_that_starts_in_a_window_is_parked_until_it_is_admitted(site: Site) -> None:
    open_window(site)
    job = site.submit(TRAIN, gpus=2, flex="medium", where="n2")
    site.wait_training(job)
    wait_jobs(site, {job: "admitted"})
    wait_as("it is raised", lambda: max(caps_mw(site, "n2")) > PARK_MW)
    early = [line for line in kernels(site, job) if line.mono_ns < admitted_ns(site, job)]
    assert all(line.effective_mw <= PARK_MW for line in early)
    assert caps_mw(site, "n2").count(PARK_MW) == 2
    assert site_mw(site) <= LIMIT_MW


def test_a_job_starts_while_the_agent_is_stopped(site: Site) -> None:
    open_window(site)
    site.send_signal("n2", signal.SIGSTOP)
    job = site.submit(TRAIN, gpus=2, flex="medium", where="n2")
    site.wait_training(job)
    wait_as("n2 does not answer", lambda: "n2" in (site.of_window("silent") or ()))
    assert job not in site.jobs()
    wait_as("steps", lambda: len(kernels(site, job)) > 6)
    assert {line.effective_mw for line in kernels(site, job)} == {PARK_MW}
    assert admitted_ns(site, job) == 2**63
    site.send_signal("n2", signal.SIGCONT)
    wait_jobs(site, {job: "admitted"})
    wait_as("it is raised", lambda: max(caps_mw(site, "n2")) > PARK_MW)


def test_a_job_starts_after_the_agent_was_killed(site: Site, tmp_path: Path) -> None:
    open_window(site)
    site.kill("n2")
    job = site.submit(TRAIN, gpus=2, flex="medium", where="n2")
    site.wait_training(job)
    # Its caps stay where they are, and after node_silent_s it counts at its default limits.
    wait_as("n2 counts at its worst", lambda: (site.of_window("committed_mw") or 0) > 4 * DEFAULT_MW, 15)
    assert {line.effective_mw for line in kernels(site, job)} == {PARK_MW}
    shown = {node["name"]: node for node in site.status()["nodes"]}
    assert shown["n2"]["state"] == "silent"
    site.start_agent("n2")
    wait_jobs(site, {job: "admitted"})
    wait_as("it is raised", lambda: max(caps_mw(site, "n2")) > PARK_MW)
    prove(site, tmp_path / "after", "1", "placement")


def test_a_job_whose_floor_does_not_fit_waits_and_does_not_break_the_limit(site: Site) -> None:
    first = site.submit(TRAIN, gpus=4, flex="low", where="n1")
    site.wait_training(first)
    wait_seen(site, first)
    open_window(site, 5600)
    job = site.submit(TRAIN, gpus=4, flex="low", where="n2")
    site.wait_training(job)
    wait_jobs(site, {job: "waiting for power"})
    wait_as(
        "it is told",
        lambda: any(r["run"] == f"pfi:{job}.0" for r in controller_audit(site, "floor_breach")),
    )
    assert site.of_window("shortfall_mw") == 0
    assert "waiting for power" in site.cli("jobs").stdout

    # A new commander does not forget that it waits.
    site.kill("controller")
    site.start_controller()
    site.wait_heard("n1", "n2")
    wait_as("it plans again", lambda: site.status()["window"] is not None)
    hold(site, 2.0)
    assert site.jobs()[job]["state"] == "waiting for power"
    assert site.of_window("shortfall_mw") == 0
    assert site_mw(site) <= 5_600_000

    site.cluster.run(["scancel", str(first)])
    wait_jobs(site, {job: "admitted"})
    wait_as("it gets what the other had", lambda: min(caps_mw(site, "n2")) > 600_000)


def test_a_requeued_job_is_a_new_run(site: Site) -> None:
    job = site.submit(TRAIN, gpus=2, flex="medium", where="n2")
    site.wait_training(job)
    wait_seen(site, job)
    set_limit(site, 6000)
    site.cluster.requeue(job)
    wait_as("run 1 is known", lambda: job in site.jobs() and site.jobs()[job]["restart"] == 1)
    wait_jobs(site, {job: "admitted"})
    assert [r["run"] for r in controller_audit(site, "ended")].count(f"pfi:{job}.0") == 1
    runs = [line for line in kernels(site, job) if line.job == f"{job}.1"]
    early = [line.effective_mw for line in runs if line.mono_ns < admitted_ns(site, job, 1)]
    assert all(cap_mw <= PARK_MW for cap_mw in early)
    assert {r["run"] for r in node_audit(site, "n2", "run_gone")} >= {f"pfi:{job}.0"}


def test_of_two_jobs_on_a_node_one_is_cancelled(site: Site) -> None:
    stays = site.submit(TRAIN, gpus=2, flex="medium", where="n2")
    goes = site.submit(TRAIN, gpus=2, flex="medium", where="n2")
    site.wait_training(stays, goes)
    wait_seen(site, stays, goes)
    set_limit(site, 6000)
    site.cluster.run(["scancel", str(goes)])
    wait_as("two GPUs are parked", lambda: caps_mw(site, "n2").count(PARK_MW) == 2)
    wait_as("the job is gone", lambda: goes not in site.jobs())
    assert max(caps_mw(site, "n2")) < DEFAULT_MW or site_mw(site) <= 6_000_000
    hold(site, 3.5)  # the checker judges what comes later than response_s


def test_a_limit_ends_by_time_without_the_controller(site: Site) -> None:
    job = site.submit(TRAIN, gpus=4, flex="medium", where="n2")
    site.wait_training(job)
    set_limit(site, 6000, for_s=4)
    site.kill("controller")
    assert site_mw(site) <= 6_000_000
    site.wait_restored(timeout_s=12)
    site.start_controller()
    site.wait_heard("n1", "n2")
    assert site.status()["window"] is None


def test_off_is_at_once_and_outlives_the_controller(site: Site) -> None:
    job = site.submit(TRAIN, gpus=4, flex="medium", where="n2")
    site.wait_training(job)
    set_limit(site, 6000)
    site.cli("off")
    site.wait_restored(timeout_s=5)
    assert "OFF" in site.cli("status").stdout
    site.kill("controller")
    site.start_controller()
    site.wait_heard("n1", "n2")
    hold(site, 3.0)
    assert site.status()["off"]
    site.wait_restored(timeout_s=1)
    site.cli("on")
    wait_within(site, 6_000_000)


def test_an_announced_window_comes_and_goes_without_the_controller(site: Site) -> None:
    """The nodes know the schedule: they are down when it starts and back when it ends, though nobody commands."""
    job = site.submit(TRAIN, gpus=4, flex="medium", where="n2")
    site.wait_training(job)
    held = len(node_audit(site, "n2", "plan_accepted"))
    site.cli("limit", "set", "6kW", "--from", "7s", "--for", "2s")
    start_ns = controller_audit(site, "limit")[-1]["steps"][0][0]
    wait_as("n2 holds it", lambda: len(node_audit(site, "n2", "plan_accepted")) > held)
    assert caps_mw(site, "n2") == [DEFAULT_MW] * 4  # the announced start is further away than response_s
    site.kill("controller")
    wait_as("they come down", lambda: site_mw(site) <= 6_000_000)
    assert time.monotonic_ns() <= start_ns + 100_000_000
    site.wait_restored(timeout_s=12)
    assert time.monotonic_ns() >= start_ns + 2_000_000_000
    site.start_controller()
    site.wait_heard("n1", "n2")


def test_a_limit_is_set_while_an_agent_hangs(site: Site) -> None:
    """The others make room within the response time; the hanging one comes down when it is back."""
    job = site.submit(TRAIN, gpus=4, flex="high", where="n1")
    site.wait_training(job)
    wait_seen(site, job)
    site.send_signal("n2", signal.SIGSTOP)
    try:
        set_limit(site, 7000)
        assert caps_mw(site, "n2") == [DEFAULT_MW] * 4
        assert max(caps_mw(site, "n1")) <= 550_000
        wait_as("it is named", lambda: site.of_window("silent") == ["n2"])
        assert site.of_window("shortfall_mw") == 0
    finally:
        site.send_signal("n2", signal.SIGCONT)
    wait_as("n2 is parked", lambda: caps_mw(site, "n2") == [PARK_MW] * 4)
    wait_as("n1 is raised", lambda: caps_mw(site, "n1") == [DEFAULT_MW] * 4)
