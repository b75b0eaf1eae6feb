"""``job`` and ``jobs`` on a host with nothing but Slurm's commands: what the tags tell, and where it came from.

The controller runs, as ever; but who asks knows neither its config nor its socket.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_pfi.slurm.sacct import job_in_accounting
from slurm_pfi.slurm.tagged import JobName, UserCommands
from testbed.site import Site

from ..site_fixture import TRAIN, set_limit, small_site, wait_as, wait_seen
from ..user_commands import other_user, slurm_pfi

pytestmark = [pytest.mark.cluster, pytest.mark.generations]

SITE_OPTIONS = small_site(accounting=True, times={"tag_refresh_s": 2})
SQUEUE, SACCT = "from Slurm's AdminComment (squeue)", "from Slurm's accounting (sacct)"


@pytest.fixture(autouse=True)
def _no_config_here() -> Iterator[None]:
    if Path("/etc/slurm-pfi/slurm-pfi.toml").exists():
        pytest.skip("this host has a config of its own")
    yield


def ask(site: Site, *arguments: str, user: str | None = None) -> Any:
    done = slurm_pfi(site.cluster, *arguments, "--json", user=user)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def say(site: Site, *arguments: str, user: str | None = None) -> list[str]:
    done = slurm_pfi(site.cluster, *arguments, user=user)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def refused(site: Site, *arguments: str) -> tuple[int, str]:
    done = slurm_pfi(site.cluster, *arguments)
    assert done.stdout == ""
    return done.returncode, done.stderr


def wait_tag(site: Site, *specs: str) -> None:
    def tagged() -> bool:
        shown = {row["spec"]: row for row in ask(site, "jobs", "--me")}
        return all(spec in shown and shown[spec]["tag"] for spec in specs)

    wait_as(f"tags of {specs}", tagged)


def wait_accounted(site: Site, spec: str, runs: int = 1) -> None:
    def over() -> bool:
        rows = site.cluster.sacct(spec, "State", "End")
        return len(rows) >= runs and all(row[1] != "Unknown" for row in rows)

    wait_as(f"sacct knows the end of {spec}", over)


def forget(site: Site) -> None:
    """slurmctld forgets the jobs that ended, as it does some minutes after their end."""
    conf = site.cluster.slurm_conf
    text = conf.read_text()
    conf.write_text(text.replace("MinJobAge=600", "MinJobAge=2"))
    site.cluster.scontrol("reconfigure")
    wait_as("the queue is forgotten", lambda: site.cluster.squeue("--states=all") == [], timeout_s=90)
    conf.write_text(text)
    site.cluster.scontrol("reconfigure")


def test_a_running_job_by_its_tag_then_by_the_accounting(site: Site) -> None:
    job = site.submit(TRAIN, gpus=2, flex="high")
    wait_seen(site, job)
    wait_tag(site, str(job))
    set_limit(site, 4300)
    wait_as("the tag tells of a cap", lambda: ask(site, "job", str(job))["cost"]["capped_s"] > 0)
    told = ask(site, "job", str(job))
    known = site.ask("job", {"job_id": job})
    assert (told["source"], told["slurm_state"], told["restart"]) == ("squeue", "RUNNING", 0)
    for key in ("run", "job_id", "spec", "user", "partition", "name", "flex", "nodes", "gpus"):
        assert told[key] == known[key], key
    assert told["max_loss"] == known["max_loss"] == 0.3
    assert told["cap_mw"] is None
    assert told["events"] is None
    lines = say(site, "job", str(job))
    assert lines[-1] == SQUEUE
    assert f"job {job} of {told['user']}: running" in lines[0]
    assert "2 GPUs on " in lines[1]
    assert any("caps held it down for" in line for line in lines)
    # With the controller at hand it says so.
    here = slurm_pfi(site.cluster, "job", str(job), config=site.config_file)
    assert here.stdout.splitlines()[-1] == "from the controller"

    site.cluster.run(["scancel", str(job)])
    wait_accounted(site, str(job))
    just_ended = ask(site, "job", str(job))
    assert (just_ended["source"], just_ended["state"]) == ("squeue", "ended")
    forget(site)
    told = ask(site, "job", str(job))
    assert (told["source"], told["state"], told["slurm_state"]) == ("sacct", "ended", "CANCELLED")
    assert told["tag"] == just_ended["tag"]
    assert told["cost"]["capped_s"] > 0
    assert told["ended_unix_s"] >= told["start_unix_s"]
    assert say(site, "job", str(job))[-1] == SACCT
    assert refused(site, "job", f"{job}.3") == (
        1,
        f"slurm-pfi: job {job} has no known restart 3; known: {job}.0\n",
    )


def test_parts_and_restarts_are_found_by_the_names_that_slurm_gives_them(site: Site) -> None:
    array = site.submit(TRAIN, gpus=1, flex="low", more=["--array=0-1"])
    again = site.submit(TRAIN, gpus=1, flex="high", more=["--requeue"])
    wait_tag(site, f"{array}_0", f"{array}_1", str(again))
    rows = {row["spec"]: row for row in ask(site, "jobs", "--me")}
    assert set(rows) == {f"{array}_0", f"{array}_1", str(again)}
    assert {row["source"] for row in rows.values()} == {"squeue"}
    task = ask(site, "job", f"{array}_1")
    assert (task["spec"], task["flex"]) == (f"{array}_1", "low"), "its tag may be newer by now"
    assert task["tag_unix_s"] >= rows[f"{array}_1"]["tag_unix_s"]
    code, error = refused(site, "job", str(array))
    assert code == 1
    assert f"job {array} has several parts: {array}_0, {array}_1" in error

    first = ask(site, "job", str(again))
    site.cluster.requeue(again)
    wait_as("it runs again", lambda: site.cluster.job_fields(again)["Restarts"] == "1", timeout_s=30)
    told = ask(site, "job", f"{again}.0")
    assert (told["source"], told["restart"], told["slurm_state"]) == ("sacct", 0, "REQUEUED")
    assert (told["flex"], told["start_unix_s"]) == ("high", first["start_unix_s"])
    now = ask(site, "job", f"{again}.1")
    assert (now["source"], now["restart"]) == ("squeue", 1)
    site.cluster.run(["scancel", str(array), str(again)])
    for spec, runs in ((f"{array}_0", 1), (f"{array}_1", 1), (str(again), 2)):
        wait_accounted(site, spec, runs)
    commands = UserCommands(conf=str(site.cluster.slurm_conf))
    kept = job_in_accounting(commands, JobName(again))
    assert isinstance(kept, tuple)
    assert [run.restart for run in kept] == [0, 1]
    ended = {(row["spec"], row["slurm_state"]) for row in ask(site, "jobs", "--me", "--ended")}
    assert {(f"{array}_0", "CANCELLED"), (str(again), "REQUEUED")} <= ended
    lines = say(site, "jobs", "--me", "--ended")
    assert "USER" not in lines[0]
    assert lines[-1] == SACCT


def test_a_heterogeneous_job_by_its_components(site: Site) -> None:
    script = "#!/bin/sh\nsleep 300\n"
    job = site.cluster.sbatch(script, "--gres=gpu:1", "--power-flex=20%", ":", "--gres=gpu:2")
    wait_tag(site, f"{job}+0", f"{job}+1")
    assert (ask(site, "job", f"{job}+1")["gpus"], ask(site, "job", f"{job}+0")["gpus"]) == (2, 1)
    site.cluster.run(["scancel", str(job)])
    wait_accounted(site, f"{job}+1")
    forget(site)
    told = ask(site, "job", f"{job}+1")
    assert (told["source"], told["spec"], told["flex"]) == ("sacct", f"{job}+1", "20%")


def test_what_users_write_poses_as_nothing(site: Site) -> None:
    """A name and notes full of separators, another's tag and bytes that are no UTF-8 move no field."""
    name = 'x|y\n7|7|<end> AdminComment=pfi=9.99 "'
    fake = "pfi=9.99;src=measured;grid=200-700/100;flex=none;loss=0.0%;wh=-9;capped=1m;t=2026-01-01T00:00Z"
    names = [f"--job-name={name}", f"--comment={fake}"]
    job = site.submit(TRAIN, gpus=1, flex="low", more=["--hold", *names])
    site.cluster.scontrol("update", f"jobid={job}", f'admincomment=note |<x>|{fake}x "Zoë"')
    site.cluster.scontrol("release", str(job))
    wait_tag(site, str(job))
    told = ask(site, "job", str(job))
    assert (told["job_id"], told["flex"], told["name"]) == (job, "low", name)
    assert told["pfi"]["value"] != 9.99
    assert all(line.isprintable() for line in say(site, "job", str(job)))
    # A note that overwrites the tag is told as such: there is no tag then, or a newer one beside the note.
    site.cluster.scontrol("update", f"jobid={job}", os.fsdecode(b"admincomment=note \xff\xfe\n<x>"))
    told = ask(site, "job", str(job))
    assert (told["job_id"], told["name"], told["gpus"]) == (job, name, 1)
    site.cluster.run(["scancel", str(job)])
    wait_accounted(site, str(job))
    forget(site)
    kept = ask(site, "job", str(job))
    assert (kept["source"], kept["job_id"], kept["gpus"]) == ("sacct", job, 1)
    assert kept["name"][:-1] == name[:-1]  # Slurm's accounting writes another sign for a quote
    assert kept["flex"] in ("low", None)


def test_nothing_is_told_that_slurm_does_not_say(site: Site) -> None:
    code, error = refused(site, "job", "999999")
    assert code == 1
    assert "job 999999 is not known to Slurm, or you may not see it" in error
    assert "Slurm shows no job of yours" in say(site, "jobs", "--me", user=other_user())[0]
    site.cluster.stop_slurmctld()
    try:
        code, error = refused(site, "jobs", "--me")
        assert code == 3
        assert "the controller cannot be reached (this host has no /etc/slurm-pfi/slurm-pfi.toml" in error
        assert "squeue" in error
    finally:
        site.cluster.start_slurmctld()
        site.cluster.wait_nodes_idle(60)


def test_rows_say_where_they_came_from(site: Site) -> None:
    job = site.submit(TRAIN, gpus=1)
    wait_tag(site, str(job))
    kept = {row["spec"]: row for row in ask(site, "jobs", "--me")}[str(job)]
    assert (kept["job_id"], kept["gpus"], kept["cap_mw"]) == (job, 1, None)
    rows = json.loads(slurm_pfi(site.cluster, "jobs", "--json", config=site.config_file).stdout)
    assert {row["source"] for row in rows} == {"controller"}
