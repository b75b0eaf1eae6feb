"""Time limits on a real cluster: a floor that tightens, minutes given back, and what bounds them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final

import pytest

from slurm_pfi.config import SlurmSection
from slurm_pfi.slurm.backend import Updated
from slurm_pfi.slurm.cli import SlurmCommands
from slurm_pfi.slurm.timelimit import Room, raised
from testbed.site import Site

from ..site_fixture import TRAIN, controller_audit, hold, set_limit, small_site, wait_as, wait_seen

pytestmark = [pytest.mark.cluster, pytest.mark.generations]

TIMES: Final = {
    "learn_s": 1,
    "baseline_s": 3,
    "activity_s": 3600,
    "tag_refresh_s": 600,
    "full_read_s": 2,
    "full_read_min_s": 2,
}
SITE_OPTIONS = replace(
    small_site(
        accounting=True, times=TIMES, policy={"compensate_time_limit": True, "time_limit_flex": "none"}
    ),
    conf=("PartitionName=short Nodes=ALL MaxTime=2 State=UP",),
)
PARKED_W: Final = 200
OVERHEAD_W: Final = 2000
GPUS: Final = 8


def told(site: Site, job: int) -> dict[str, Any]:
    """All that the controller answers of a job."""
    answer: dict[str, Any] = site.ask("job", {"job_id": job})
    return answer


def verdict(site: Site, job: int) -> str | None:
    deadline = told(site, job)["deadline"]
    return None if deadline is None else deadline["verdict"]


def floor_w(site: Site, job: int) -> float:
    return float(site.jobs()[job]["floor_mw"] or 0) / 1000


def limit_min(site: Site, job: int) -> str:
    return site.cluster.squeue("--jobs", str(job), "--Format", "TimeLimit:")[0].strip()


def said(site: Site, job: int) -> str:
    """What ``slurm-pfi job`` prints, in one line."""
    return " ".join(site.cli("job", str(job)).stdout.split())


def raises(site: Site) -> dict[str, dict[str, Any]]:
    """The last that the audit has of each run's time limit."""
    return {one["run"]: one for one in controller_audit(site, "time_limit")}


def cap(site: Site, watts: int, gpus: int, for_s: float | None = None) -> None:
    """A limit that leaves ``watts`` for each of so many GPUs; the others count at their park cap."""
    set_limit(site, OVERHEAD_W + (GPUS - gpus) * PARKED_W + gpus * watts, for_s=for_s)


def wait_known(site: Site, *jobs: int) -> None:
    """Wait until the uncapped rate of these jobs is known to a percent or so."""
    site.wait_training(*jobs)
    wait_seen(site, *jobs)
    wait_as("their rates are known", lambda: all(told(site, job)["baseline_sd"] < 0.01 for job in jobs), 30)


def test_a_floor_tightens_for_a_time_limit_and_loosens_with_it(site: Site) -> None:
    easy = site.submit(TRAIN, gpus=1, flex="high", work_s=60, more=["--time=20"])
    tight = site.submit(TRAIN, gpus=1, flex="high", work_s=270, more=["--time=5"])
    late = site.submit(TRAIN, gpus=1, flex="high", work_s=3600, more=["--time=5"])
    silent = site.submit(TRAIN, gpus=1, flex="high", more=["--time=5"])
    jobs = (easy, tight, late, silent)
    wait_known(site, *jobs)
    cap(site, 600, 4)
    wait_as("all is judged", lambda: [verdict(site, job) for job in jobs] == ["fits", "tight", "late", None])
    wait_as("its floor is the highest", lambda: floor_w(site, tight) > 1.1 * floor_w(site, easy))
    # Who cannot be saved, and who tells no total, have what their flex says.
    assert abs(floor_w(site, late) - floor_w(site, silent)) < 0.1 * floor_w(site, silent)
    assert "so its floor allows no more than" in said(site, tight)
    assert [one for one in controller_audit(site, "deadline") if one["run"] == f"pfi:{tight}.0"]
    before = site.jobs()[tight]["floor_mw"]
    site.cluster.scontrol("update", f"jobid={tight}", "timelimit=60")
    wait_as("the new limit is seen", lambda: verdict(site, tight) == "fits")
    wait_as("its floor is lower", lambda: site.jobs()[tight]["floor_mw"] < before)


def test_what_caps_cost_is_given_back_as_far_as_there_is_room(site: Site) -> None:
    free = site.submit(TRAIN, gpus=1, flex="90%", where="n1", more=["--time=2"])
    short = site.submit(TRAIN, gpus=1, flex="90%", where="n1", partition="short", more=["--time=2"])
    ahead = site.submit(TRAIN, gpus=1, flex="90%", where="n2", more=["--time=2"])
    jobs = (free, short, ahead)
    site.wait_training(*jobs)
    maintenance = ["ReservationName=maint", "StartTime=now+2minutes", "Duration=10", "Nodes=n2", "Users=root"]
    site.cluster.scontrol("create", "reservation", *maintenance)
    try:
        wait_known(site, *jobs)
        cap(site, 320, 3)
        wait_as("the limit is raised", lambda: limit_min(site, free) == "3:00", 45)
        wait_as("every job was looked at", lambda: len(raises(site)) == 3)
        assert (limit_min(site, short), limit_min(site, ahead)) == ("2:00", "2:00")
    finally:
        site.cluster.scontrol("delete", "reservation=maint")
    change = raises(site)[f"pfi:{free}.0"]
    assert (change["old_s"], change["new_s"], change["given_s"]) == (120, 180, 60)
    assert 5 <= change["lost_s"] <= 60
    for job, why in ((short, "partition short allows 2 min"), (ahead, "reservation maint has its nodes")):
        left = raises(site)[f"pfi:{job}.0"]
        assert (left["new_s"], left["given_s"], left["why"]) == (None, 0, why)
        assert why in said(site, job)
    assert told(site, free)["given_s"] == 60
    assert "time limit raised by 1 min for what caps have cost it" in said(site, free)
    # What was given is known to the next controller: it gives no more for the same loss.
    site.kill("controller")
    site.start_controller()
    wait_as("it is known", lambda: free in site.jobs() and told(site, free)["given_s"] == 60)
    hold(site, 6)
    assert limit_min(site, free) == "3:00"


def test_an_array_task_and_a_component_get_their_own_limit_within_their_qos(site: Site) -> None:
    for words in ("add qos brief set MaxWall=9", "modify user nobody set qos=normal,brief"):
        site.cluster.run(["sacctmgr", "--immediate", *words.split()], user="root")
    script = "#!/bin/sh\nexec sleep 100\n"
    array = site.cluster.sbatch(script, "--time=5", "--gres=gpu:1", "--qos=normal", "--array=3,7")
    het = site.cluster.sbatch(
        script, "--time=5", "--gres=gpu:1", "--qos=normal", ":", "--time=5", "--gres=gpu:1", "--qos=brief"
    )
    site.cluster.wait_job_state(het, "RUNNING")
    slurm = SlurmCommands(SlurmSection(conf=str(site.cluster.slurm_conf)), timeout_s=30)

    async def limits() -> dict[str, object]:
        jobs = await slurm.jobs()
        assert isinstance(jobs, tuple)
        return {job.spec: job for job in jobs if job.state == "RUNNING"}

    async def story() -> None:
        names = (f"{array}_3", f"{array}_7", f"{het}+0", f"{het}+1")
        for number, name in enumerate(names, 1):
            job: Any = (await limits())[name]
            room = await slurm.room(job)
            assert isinstance(room, Room)
            assert (job.qos, room.qos) == (
                ("brief", (("brief", 540),)) if name == f"{het}+1" else ("normal", ())
            )
            found = raised(job, number * 120, room)
            assert found.limit_s is not None
            assert await slurm.set_time_limit(job.spec, found.limit_s) == Updated()
        after: dict[str, Any] = await limits()
        assert [after[name].limit_s for name in names] == [420, 540, 660, 540]

    asyncio.run(story())
