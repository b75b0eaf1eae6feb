"""Nodes that cannot do what they should: no agent, no library, no permission, no room for a journal, odd job files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import gpus
from testbed.cluster import ClusterError
from testbed.site import Site

from ..site_fixture import (
    DEFAULT_MW,
    PARK_MW,
    TRAIN,
    caps_mw,
    clear_limits,
    controller_audit,
    hold,
    node_audit,
    set_limit,
    site_mw,
    small_site,
    wait_as,
    wait_jobs,
    wait_logged,
    wait_seen,
)

pytestmark = pytest.mark.cluster

SITE_OPTIONS = small_site(agentless=("n2",), times={"response_s": 3, "device_deadline_s": 1})
# 2 kW beside the GPUs, n2 at its maximum, n1 parked.
LEAST_MW = 2_000_000 + 4 * DEFAULT_MW + 4 * PARK_MW
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


def node(site: Site, name: str) -> dict[str, object]:
    """A node as the status shows it."""
    return next(dict(shown) for shown in site.status()["nodes"] if shown["name"] == name)


def too_low(site: Site, short_mw: int = 600_000) -> None:
    """A limit that cannot be held: everything goes as low as it may, and the shortfall is said in watts."""
    site.cli("limit", "set", f"{(LEAST_MW - short_mw) // 1000}W")
    wait_as("n1 is parked", lambda: caps_mw(site, "n1") == [PARK_MW] * 4)
    wait_as("the shortfall is said", lambda: site.of_window("shortfall_mw") == short_mw)


def test_a_node_without_an_agent_counts_at_its_maximum(site: Site) -> None:
    job = site.submit(TRAIN, gpus=1, flex="high", where="n1")
    site.wait_training(job)
    set_limit(site, 6000)
    assert caps_mw(site, "n2") == [DEFAULT_MW] * 4
    window = site.status()["window"]
    assert (window["silent"], window["shortfall_mw"]) == (["n2"], 0)
    assert node(site, "n2")["state"] == "never heard"
    assert "counted at their worst, as they do not answer or take no plan: n2" in site.cli("status").stdout
    site.cluster.cancel_all()
    too_low(site)
    assert "INFEASIBLE: 600 W short" in site.cli("status").stdout
    (told,) = [r for r in controller_audit(site, "infeasible") if r["shortfall_mw"] == 600_000]
    assert told["silent"] == ["n2"]
    clear_limits(site)


def test_no_nvml_library(site: Site) -> None:
    site.start_agent("n2", environment={"PFI_STANDIN_DIR": str(site.sim_dir("n2"))})
    try:
        wait_as("it is heard", lambda: node(site, "n2")["state"] == "ok")
        wait_as("it says why", lambda: "GPUs cannot be listed" in str(node(site, "n2")["faults"]))
        too_low(site)
        assert "GPUs cannot be listed" in site.cli("status").stdout
        assert "GPUs cannot be listed" in site.node_cli("n2", "status").stdout
        hold(site, 2.0)
        assert site.log_of("n2").count("GPUs cannot be listed") <= 3
        assert site.is_running("n2")
        clear_limits(site)
    finally:
        site.kill("n2", signal.SIGTERM)


@needs_root
def test_no_permission(site: Site) -> None:
    environment = {**gpus.nvml_environment(site.sim_dir("n2")), "PFI_STANDIN_EUID": "1000"}
    sets = len(node_audit(site, "n2", "set"))
    site.start_agent("n2", environment=environment)
    try:
        site.wait_heard("n2")
        job = site.submit(TRAIN, gpus=2, flex="high", where="n2")
        site.wait_training(job)
        too_low(site)
        wait_as("it says why", lambda: str(node(site, "n2")["faults"]).count("PermissionDeniedError") == 4)
        hold(site, 3.0)
        assert caps_mw(site, "n2") == [DEFAULT_MW] * 4
        assert len(node_audit(site, "n2", "set")) - sets == 4  # tried once each, and not again every moment
        site.cluster.cancel_all()
        clear_limits(site)
        wait_as("nothing of ours is thought to stand", lambda: node(site, "n2")["capped"] == 0)
    finally:
        site.kill("n2", signal.SIGTERM)


def test_the_missing_agent_comes_in_the_window(site: Site) -> None:
    too_low(site)
    site.start_agent("n2")
    wait_as("n2 is parked", lambda: caps_mw(site, "n2") == [PARK_MW] * 4)
    wait_as("nothing is short", lambda: site.of_window("shortfall_mw") == 0)
    assert site_mw(site) <= LEAST_MW - 600_000


@pytest.fixture
def full_journal(site: Site) -> Iterator[Path]:
    """The journal of n2 on a file system of its own, full; yields the file that fills it."""
    journal = site.node_dir("n2") / "journal"
    site.kill("n2", signal.SIGTERM)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0755", "tmpfs", str(journal)], check=True)
    try:
        site.start_agent("n2")
        site.wait_heard("n2")
        filler = journal / ".filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        yield filler
    finally:
        clear_limits(site)
        site.wait_restored()
        site.kill("n2", signal.SIGTERM)
        subprocess.run(["umount", "-l", str(journal)], check=True)
        site.start_agent("n2")
        site.wait_heard("n2")


@needs_root
def test_no_room_for_the_journal(site: Site, full_journal: Path) -> None:
    before = site.log_of("n2").count("No space left")
    site.cli("limit", "set", f"{(LEAST_MW - 600_000) // 1000}W")
    wait_as("the shortfall is said", lambda: site.of_window("shortfall_mw") == 600_000)
    assert caps_mw(site, "n2") == [DEFAULT_MW] * 4  # nothing is set that could not be taken back
    assert "No space left" in site.cli("status").stdout
    hold(site, 2.0)
    assert site.log_of("n2").count("No space left") - before < 40
    full_journal.unlink()
    wait_as("it caps by itself", lambda: caps_mw(site, "n2") == [PARK_MW] * 4, 20)


def test_garbage_in_the_job_folder(site: Site) -> None:
    jobs = site.node_dir("n1") / "jobs"
    good = "pfi-job 1\njob_id {0}\nrestart 0\nuid 65534\ngpus 0-3\nflex none\n"
    new = site.node_dir("n1") / "new"
    new.mkdir()
    (new / "70001.0").write_text(good.format(70001)[:30])
    (new / "70002.0").write_bytes(bytes(1 << 20))
    (new / "70003.0").symlink_to("/etc/passwd")
    os.mkfifo(new / "70004.0")
    (new / "70005.0").write_text(good.format(70005))
    (new / "70005.0").chmod(0o666)
    (new / "70006.0").write_text(good.format(1))
    (new / "70007.0").mkdir()
    (new / "note.txt").write_text("x")
    names = ["70001.0", "70002.0", "70003.0", "70004.0", "70005.0", "70006.0", "70007.0", "note.txt"]
    if os.getuid() == 0:
        (new / "70008.0").write_text(good.format(70008))
        os.chown(new / "70008.0", 65534, 65534)
        names.append("70008.0")
    for name in names:
        (new / name).rename(jobs / name)
    new.rmdir()
    for name in names:
        wait_logged(site, "n1", rf"job file ignored.*{name}")
    job = site.submit(TRAIN, gpus=1, flex="medium", where="n1")
    site.wait_training(job)
    wait_jobs(site, {job: "admitted"})
    set_limit(site, 6000)
    hold(site, 4.0)  # two rescans
    for name in names:
        assert (
            sum("job file ignored" in line and name in line for line in site.log_of("n1").splitlines()) == 1
        )
    assert list(site.jobs()) == [job]
    for name in names:
        path = jobs / name
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    clear_limits(site)


def test_job_files_of_jobs_that_are_not_here_go(site: Site) -> None:
    """A job that Slurm never had, and one that ended while its file stayed behind: neither keeps a GPU from others."""
    jobs = site.node_dir("n1") / "jobs"
    ended = site.submit(TRAIN, gpus=4, flex="medium", where="n1", seconds=1)
    wait_as("its file is there", (jobs / f"{ended}.0").exists)
    stale = (jobs / f"{ended}.0").read_text()
    site.cluster.wait_job_state(ended, "COMPLETED")
    wait_as("its file is gone", lambda: not (jobs / f"{ended}.0").exists())
    job = site.submit(TRAIN, gpus=4, flex="medium", where="n1")
    site.wait_training(job)
    set_limit(site, 5300)
    for name, text in (
        (f"{ended}.0", stale),
        ("4000000.0", stale.replace(f"job_id {ended}", "job_id 4000000")),
    ):
        fresh = jobs / f".{name}.new"
        fresh.write_text(text)
        fresh.rename(jobs / name)
        wait_as(f"{name} is removed", lambda name=name: not (jobs / name).exists())  # type: ignore[misc]
    wait_as("only the true one is left", lambda: list(site.jobs()) == [job])
    wait_as("it is capped again", lambda: max(caps_mw(site, "n1")) < DEFAULT_MW)


def test_a_stray_job_file_lifts_no_cap_while_slurm_is_silent(site: Site) -> None:
    """It names the GPUs of a running job, and nobody can say whose they are: the caps stay what they are."""
    jobs = site.node_dir("n1") / "jobs"
    job = site.submit(TRAIN, gpus=4, flex="high", where="n1")
    site.wait_training(job)
    wait_seen(site, job)
    set_limit(site, 4900)
    capped = caps_mw(site)
    site.cluster.stop_slurmctld()
    try:
        fresh = jobs / ".new"
        fresh.write_text((jobs / f"{job}.0").read_text().replace(f"job_id {job}\n", "job_id 4000001\n"))
        fresh.rename(jobs / "4000001.0")
        wait_as("both are known", lambda: sorted(site.jobs()) == [job, 4000001])
        hold(site, 1.5)
        assert caps_mw(site) == capped
        assert site.of_window("shortfall_mw") == 0
    finally:
        site.cluster.start_slurmctld()
    wait_as("it is removed once Slurm answers", lambda: not (jobs / "4000001.0").exists())
    assert caps_mw(site) == capped


def test_a_foreign_hand_in_the_window(site: Site) -> None:
    """Raised above ours: reported and re-applied. Lowered below ours: left alone, also at the window's end."""
    set_limit(site, 5000)
    wait_as("all are parked", lambda: caps_mw(site) == [PARK_MW] * 8)
    clear_limits(site)
    site.wait_restored()
    job = site.submit(TRAIN, gpus=4, flex="high", where="n1")
    site.wait_training(job)
    set_limit(site, 5000)
    wait_as("it is capped", lambda: PARK_MW < max(caps_mw(site, "n1")) < DEFAULT_MW)

    def found() -> list[tuple[int, bool]]:
        """(value found, ours was below 690 W) of each conflict."""
        return [(r["found_mw"], r["ours_mw"] < 690_000) for r in node_audit(site, "n1", "conflict")]

    # Within milliseconds of a set of ours the agent may see the value before it is in force: the event is its word.
    site.foreign_write("n1", 0, 690)
    wait_as("it is reported", lambda: found() == [(690_000, True)])
    wait_as("it is re-applied", lambda: max(caps_mw(site, "n1")) < 690_000 and site_mw(site) <= 5_000_000)
    site.foreign_write("n1", 0, 310)
    wait_as("it is reported", lambda: (310_000, True) in found())
    hold(site, 1.5)
    assert caps_mw(site, "n1")[0] == 310_000
    clear_limits(site)
    left = {gpu["uuid"]: gpu["effective_mw"] for gpu in site.before}
    left[gpus.read_devices(site.sim_dir("n1"))[0].uuid] = 310_000
    site.wait_restored(left)
    site.foreign_write("n1", 0, DEFAULT_MW / 1000)


def test_a_gpu_whose_set_hangs_costs_only_itself(site: Site) -> None:
    uuid = gpus.read_devices(site.sim_dir("n1"))[2].uuid
    with gpus.planted(site.sim_dir("n1")) as simulated:
        simulated.fault(
            "nvmlDeviceSetPowerManagementLimit", gpus.FaultKind.DELAY, gpu=uuid, delay_s=600, count=-1
        )
        site.cli("limit", "set", "5kW")
        wait_as("the others are parked", lambda: caps_mw(site).count(PARK_MW) == 7, 20)
        wait_as("it counts at its maximum", lambda: site.of_window("shortfall_mw") == 0)
        assert site_mw(site) <= 5_000_000
        wait_as("it is said", lambda: uuid in str(node(site, "n1")["faults"]))
    wait_as("it follows again", lambda: caps_mw(site).count(PARK_MW) == 8, 40)


def test_a_limit_that_cannot_be_written_down_is_refused(site: Site) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root")
    state = site.root / "controller/state"
    aside = site.root / "controller/aside"
    shutil.copytree(state, aside)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,ro", "tmpfs", str(state)], check=True)
    try:
        with pytest.raises(ClusterError, match="nothing was changed"):
            site.cli("limit", "set", "5kW")
        assert site.status()["window"] is None
        # The red button works all the same, and says what it lacks.
        assert "forgotten when the controller restarts" in site.cli("off").stdout
        assert site.status()["off"]
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)
        site.cli("on")
