"""Daemons killed in mid-window: the limit holds throughout, and in the end nothing is left capped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from testbed.processes import processes_naming
from testbed.site import Site

from ..site_fixture import (
    DEFAULT_MW,
    PARK_MW,
    TRAIN,
    caps_mw,
    children,
    clear_limits,
    controller_audit,
    hold,
    node_audit,
    set_limit,
    site_mw,
    small_site,
    wait_as,
    wait_jobs,
    wait_seen,
    wait_within,
)

pytestmark = pytest.mark.cluster

SITE_OPTIONS = small_site(times={"response_s": 3})
LIMIT_MW = 6_000_000


def capped(site: Site, for_s: float | None = None) -> int:
    """A job on n2, and a window in which it is capped."""
    job = site.submit(TRAIN, gpus=4, flex="high", where="n2")
    site.wait_training(job)
    wait_seen(site, job)
    set_limit(site, 5200, for_s=for_s)
    wait_as("it is capped", lambda: PARK_MW < max(caps_mw(site, "n2")) < DEFAULT_MW)
    return job


def shown_state(site: Site, node: str) -> str:
    return str({shown["name"]: shown["state"] for shown in site.status()["nodes"]}[node])


def restorers(site: Site) -> list[int]:
    return [
        pid for pid, command in processes_naming(site.root).items() if "slurm_pfi.node.restorer" in command
    ]


def test_the_agent_is_killed(site: Site) -> None:
    capped(site)
    before = caps_mw(site, "n2")
    site.kill("n2")
    site.start_agent("n2")
    site.wait_heard("n1", "n2")
    assert caps_mw(site, "n2") == before
    assert any("4 GPUs hold limits of ours" in r["reason"] for r in node_audit(site, "n2", "adopted"))


def test_the_nvml_process_is_killed(site: Site) -> None:
    capped(site)
    (child,) = children(site.pid_of("n2"))
    os.kill(child, signal.SIGKILL)
    wait_as("a new one serves", lambda: children(site.pid_of("n2")) not in ([], [child]))
    set_limit(site, 5000)


def test_the_controller_is_killed(site: Site) -> None:
    job = capped(site)
    before = caps_mw(site)
    site.kill("controller")
    site.start_controller()
    site.wait_heard("n1", "n2")
    wait_jobs(site, {job: "admitted"})
    assert max(caps_mw(site, "n2")) <= max(before)
    epochs = [record["epoch"] for record in controller_audit(site, "leader")]
    assert epochs == sorted(set(epochs))
    set_limit(site, 5000)


def test_all_are_killed_at_once(site: Site) -> None:
    capped(site)
    before = caps_mw(site)
    names = ["controller", "n1", "n2"]
    nvml = [child for name in names[1:] for child in children(site.pid_of(name))]
    for name in names:
        site.send_signal(name, signal.SIGKILL)
    for name in names:
        site.kill(name)
    wait_as(
        "their NVML processes end with them", lambda: not any(Path(f"/proc/{pid}").exists() for pid in nvml)
    )
    assert caps_mw(site) == before
    for name in names[1:]:
        site.start_agent(name, wait=False)
    site.start_controller()
    site.wait_heard("n1", "n2")
    assert site_mw(site) <= LIMIT_MW


def test_a_stopped_agent_leaves_a_restorer_that_restores_in_time(site: Site) -> None:
    capped(site, for_s=4)
    before = caps_mw(site, "n2")
    assert site.kill("n2", signal.SIGTERM) == 0
    (stop,) = [record["reason"] for record in node_audit(site, "n2", "stopped")][-1:]
    assert "4 GPUs keep their limits; they are restored in" in stop
    wait_as("a restorer waits", lambda: len(restorers(site)) == 1, 5)
    assert caps_mw(site, "n2") == before
    wait_as("it restores", lambda: caps_mw(site, "n2") == [DEFAULT_MW] * 4, 12)
    wait_as("it ends", lambda: restorers(site) == [], 5)
    site.start_agent("n2")
    site.wait_heard("n2")


def test_a_new_agent_takes_over_from_a_restorer(site: Site) -> None:
    capped(site, for_s=30)
    before = caps_mw(site, "n2")
    site.kill("n2", signal.SIGTERM)
    wait_as("a restorer waits", lambda: len(restorers(site)) == 1, 5)
    site.start_agent("n2")
    assert restorers(site) == []
    site.wait_heard("n2")
    assert caps_mw(site, "n2") == before


def test_release_is_at_once_and_the_others_make_room(site: Site) -> None:
    capped(site)
    done = site.node_cli("n2", "release")
    assert "n2 released" in done.stdout
    assert caps_mw(site, "n2") == [DEFAULT_MW] * 4
    wait_as(
        "it is shown", lambda: {n["name"]: n["state"] for n in site.status()["nodes"]}["n2"] == "released"
    )
    hold(site, 1.5)
    assert caps_mw(site, "n2") == [DEFAULT_MW] * 4
    window = site.status()["window"]
    assert window["silent"] == ["n2"]
    assert window["shortfall_mw"] == max(0, 4 * (DEFAULT_MW + PARK_MW) + 2_000_000 - 5_200_000)
    # A new agent does not take back what the admin has taken.
    site.kill("n2")
    site.start_agent("n2")
    wait_as("it is heard as released", lambda: shown_state(site, "n2") == "released")
    hold(site, 1.5)
    assert caps_mw(site, "n2") == [DEFAULT_MW] * 4
    site.node_cli("n2", "resume")
    wait_within(site, 5_200_000)


def test_release_with_everything_else_dead(site: Site) -> None:
    capped(site)
    site.kill("n2")
    site.kill("controller")
    site.cluster.stop_slurmctld()
    try:
        done = site.node_cli("n2", "release")
        assert "released without an agent: 4 GPUs at the prior limit" in done.stdout
        assert caps_mw(site, "n2") == [DEFAULT_MW] * 4
    finally:
        # Released GPUs do not fit the limit: a commander says so within response_s, and needs no slurmctld for that.
        site.start_agent("n2", wait=False)
        site.start_controller()
        site.cluster.start_slurmctld()
    site.node_cli("n2", "resume")
    site.cluster.cancel_all()
    site.wait_heard("n1", "n2")


def test_slurmctld_is_down_in_a_window(site: Site) -> None:
    job = capped(site)
    site.cluster.stop_slurmctld()
    try:
        set_limit(site, 5000)
        assert site.jobs()[job]["state"] == "admitted"
        # A new controller has nobody to ask, and keeps what is: the run was raised, so somebody had admitted it.
        site.kill("controller")
        site.start_controller()
        site.wait_heard("n1", "n2")
        wait_as("Slurm is missed", lambda: "Slurm does not answer" in site.log_of("controller"))
        assert site.log_of("controller").count("Slurm does not answer") == 1
        assert site.jobs()[job]["state"] == "admitted"
        assert site_mw(site) <= 5_000_000
        clear_limits(site)
        site.wait_restored()
        set_limit(site, 5400)
    finally:
        site.cluster.start_slurmctld()
    late = site.submit(TRAIN, gpus=2, flex="high", where="n1")
    wait_jobs(site, {late: "admitted"}, 20)
    wait_as("Slurm's word on the first is there", lambda: site.jobs()[job]["user"] is not None)


def test_a_second_controller_and_a_second_agent_are_refused(site: Site) -> None:
    capped(site)
    before = caps_mw(site)
    pids = (site.pid_of("controller"), site.pid_of("n2"))
    second = site.cli("controller", check=False)
    assert second.returncode == 3
    assert f"in use by pid {pids[0]}" in second.stdout + second.stderr
    agent = site.node_cli("n2", "run", check=False)
    assert agent.returncode == 1
    assert f"runs already: {site.node_dir('n2')}/lock is held by pid {pids[1]}" in agent.stderr
    assert caps_mw(site) == before
    assert site.is_running("controller")
    assert site.is_running("n2")
    set_limit(site, 5000)
