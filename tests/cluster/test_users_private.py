"""What users are told of each other by a real controller, beside what their own squeue shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest

from testbed.site import Site

from ..site_fixture import TRAIN, set_limit, small_site, wait_as, wait_seen
from ..user_commands import other_user, slurm_pfi

pytestmark = pytest.mark.cluster

# A change of PrivateData is soon seen.
SITE_OPTIONS = small_site(times={"full_read_s": 2, "full_read_min_s": 1})
NAME: Final = "hidden-work"
COMMANDS: Final = (
    ("jobs", "--ended"),
    ("status",),
    ("top", "--json"),
    ("what-if", "10%"),
    ("offer",),
    ("report",),
)


@pytest.fixture(autouse=True)
def _private_for_nobody(site: Site) -> Iterator[None]:
    yield
    set_private(site, "none")


def set_private(site: Site, words: str) -> None:
    """slurm.conf's PrivateData, in force in slurmctld."""
    conf = site.cluster.slurm_conf
    text = re.sub(r"(?m)^PrivateData=.*\n", "", conf.read_text())
    conf.write_text(f"{text.rstrip()}\nPrivateData={words}\n")
    site.cluster.scontrol("reconfigure")


def jobs_of(site: Site, user: str | None) -> set[int]:
    """The jobs that the controller tells this user of."""
    done = slurm_pfi(site.cluster, "jobs", "--json", user=user, config=site.config_file)
    assert done.returncode == 0, done.stderr
    return {row["job_id"] for row in json.loads(done.stdout)}


def queue_of(site: Site, user: str | None) -> set[int]:
    """The jobs that Slurm tells this user of."""
    return {int(word) for word in site.cluster.run(["squeue", "-h", "-o", "%A"], user=user).stdout.split()}


def everything(site: Site, user: str | None) -> str:
    """All that this user is told, for people and for programs, in one text."""
    told = []
    for command in COMMANDS:
        asked = {command, (*command, "--json") if "--json" not in command else command}
        for words in sorted(asked):
            done = slurm_pfi(site.cluster, *words, user=user, config=site.config_file)
            assert done.returncode in (0, 1), (words, done.stderr)
            told.append(done.stdout + done.stderr)
    page = slurm_pfi(site.cluster, "report", "--html", "-", user=user, config=site.config_file)
    return "\n".join([*told, page.stdout])


def two_jobs(site: Site) -> tuple[int, int]:
    """One of who submits by default, one of somebody else; both in a window that has a report."""
    mine = site.submit(TRAIN, gpus=1, flex="high")
    script = "#!/bin/sh\nexec sleep 600\n"
    other = site.cluster.sbatch(
        script, "--gres=gpu:1", f"--job-name={NAME}", "--power-flex=30%", user=other_user()
    )
    wait_seen(site, mine)
    wait_as(
        "both are read", lambda: all(row["user"] for row in site.jobs().values()) and len(site.jobs()) == 2
    )
    set_limit(site, 5000)
    wait_as("the window has a report", lambda: bool(site.ask("windows")))
    return mine, other


def test_others_are_told_as_far_as_slurm_tells_of_them(site: Site) -> None:
    mine, other = two_jobs(site)
    set_private(site, "none")
    wait_as("an open site tells all to all", lambda: jobs_of(site, None) == {mine, other})
    assert queue_of(site, None) == {mine, other}
    assert NAME in everything(site, None)

    set_private(site, "jobs")
    wait_as("only one's own is told", lambda: jobs_of(site, None) == {mine})
    assert queue_of(site, None) == {mine}
    assert jobs_of(site, other_user()) == queue_of(site, other_user()) == {other}
    assert jobs_of(site, "root") == {mine, other}

    told = everything(site, None)
    assert NAME not in told
    assert other_user() not in told
    assert not re.search(rf":{other}\.0\b", told)
    assert f":{mine}.0" in told
    refused = slurm_pfi(site.cluster, "job", str(other), config=site.config_file)
    assert (refused.returncode, refused.stdout) == (1, "")
    unknown = slurm_pfi(site.cluster, "job", "999999", config=site.config_file)
    assert refused.stderr.replace(str(other), "N") == unknown.stderr.replace("999999", "N")
    assert slurm_pfi(site.cluster, "job", str(mine), config=site.config_file).returncode == 0
    assert NAME in slurm_pfi(site.cluster, "job", str(other), user="root", config=site.config_file).stdout

    whole: dict[str, Any] = site.ask("what_if", {"share": 0.05})
    shown = json.loads(slurm_pfi(site.cluster, "what-if", "5%", "--json", config=site.config_file).stdout)
    assert [run["job_id"] for run in shown["runs"]] == [mine]
    assert (shown["runs_hidden"], shown["gpus"], shown["uncapped"].keys()) == (
        1,
        whole["gpus"],
        whole["uncapped"].keys(),
    )
    words = slurm_pfi(site.cluster, "what-if", "5%", config=site.config_file).stdout
    assert "1 run of others (PrivateData in slurm.conf)" in " ".join(words.split())


def test_an_ended_job_of_another_stays_hidden(site: Site) -> None:
    mine, other = two_jobs(site)
    set_private(site, "jobs,usage")
    wait_as("only one's own is told", lambda: jobs_of(site, None) == {mine})
    site.cluster.cancel_all()
    wait_as("both are over", lambda: site.jobs() == {}, timeout_s=60)
    told = everything(site, None)
    assert NAME not in told
    assert not re.search(rf":{other}\.0\b", told)
    ended = slurm_pfi(site.cluster, "jobs", "--ended", "--json", config=site.config_file)
    assert mine in {row["job_id"] for row in json.loads(ended.stdout)}
    assert other not in {row["job_id"] for row in json.loads(ended.stdout)}
    all_ended = {row["job_id"] for row in site.ask("jobs", {"ended": True})}
    assert {mine, other} <= all_ended


def test_a_controller_that_cannot_ask_tells_users_of_their_own_jobs_alone(site: Site) -> None:
    mine, other = two_jobs(site)
    wait_as("both are told", lambda: jobs_of(site, None) == {mine, other})
    site.cluster.stop_slurmctld()
    site.kill("controller")
    try:
        site.start_controller()
        site.wait_heard(*site.node_names)
        assert jobs_of(site, None) <= {mine}
    finally:
        site.cluster.start_slurmctld()
    wait_as("both are told again", lambda: jobs_of(site, None) == {mine, other}, timeout_s=60)
