"""Jobs that have a node in their own way: unevenly, whole, beside others, without a GPU, in parts, or stopped."""

from __future__ import annotations

import pytest

from testbed import gpus
from testbed.site import Site

from ..shape_site import (
    caps_of,
    comments,
    gpus_of,
    idle_caps,
    runs,
    wait_capped,
    wait_nothing_known,
    wait_states,
    wait_tagged,
)
from ..site_fixture import DEFAULT_MW, PARK_MW, TRAIN, clear_limits, hold, set_limit, small_site, wait_as

pytestmark = pytest.mark.cluster

SITE_OPTIONS = small_site(
    times={"response_s": 4, "start_grace_s": 2, "full_read_s": 4, "full_read_min_s": 2}, parts={"shard": 16}
)


def limits_of(site: Site, name: str, began: dict[str, int]) -> set[int]:
    """Every limit that was in force on a run's GPUs since the traces had so many lines."""
    return {
        line.effective_mw
        for node, uuids in gpus_of(site, name).items()
        for line in gpus.read_trace(site.sim_dir(node))[began[node] :]
        if line.uuid in uuids
    }


def test_one_run_unevenly_on_two_nodes_beside_others(site: Site) -> None:
    """One GPU on n1, beside a job that agreed to nothing and one without GPUs, and three on n2: one cap for all."""
    began = {node: len(gpus.read_trace(site.sim_dir(node))) for node in site.node_names}
    stern = site.submit(TRAIN, gpus=3, flex="none", partition="urgent", where="n1")
    plain = site.cluster.sbatch(
        "#!/bin/sh\nexec sleep 600\n", "--power-flex=high", "--nodelist=n1", "--ntasks=4"
    )
    site.wait_training(stern)
    script = f"#!/bin/sh\nexec srun --ntasks-per-node=1 {site.training(TRAIN)}\n"
    spread = ["--nodes=2", "--gpus=4", "--ntasks-per-node=1", "--power-flex=high"]
    job = site.cluster.sbatch(script, *spread)
    site.wait_training(job)
    name, free = f"{job}.0", f"{stern}.0"
    wait_states(site, {free: "admitted", name: "admitted"})
    assert {node: len(uuids) for node, uuids in gpus_of(site, name).items()} == {"n1": 1, "n2": 3}
    wait_tagged(site, {str(job): "high", str(stern): "none"})
    assert site.cluster.job_file("n1", plain).read_text().splitlines()[4:] == ["gpus -", "flex high"]
    assert comments(site)[str(plain)] == ""
    told = site.cli("job", str(plain), check=False)
    assert (told.returncode, "no run of it has a GPU" in told.stderr) == (1, True), told

    set_limit(site, 6300)  # 2 kW beside the GPUs, 2.1 kW for none, one parked: 500 W for each of the four
    wait_capped(site, name)
    assert idle_caps(site, name, free) == [PARK_MW]
    site.cluster.run(["scancel", str(plain)])
    hold(site, 1.5)
    assert caps_of(site, free) == [DEFAULT_MW] * 3
    clear_limits(site)
    site.wait_restored()
    assert limits_of(site, free, began) == {DEFAULT_MW}, "its neighbours' caps never touched it"
    site.cluster.cancel_all()
    wait_nothing_known(site)


def test_an_exclusive_job_has_every_gpu_of_its_node(site: Site) -> None:
    job = site.submit(TRAIN, gpus=1, flex="high", where="n2", more=["--exclusive"])
    site.wait_training(job)
    name = f"{job}.0"
    wait_states(site, {name: "admitted"})
    (place,) = gpus_of(site, name).values()
    trains = {gpu["uuid"] for gpu in site.snapshot() if gpu["job"] == name}
    assert trains <= place, "whatever this version of Slurm gives it, its agent knows"
    assert len(place) == runs(site)[name]["gpus"] in (1, 4)
    late = site.submit(TRAIN, gpus=1, flex="high", where="n2")
    set_limit(site, 2000 + 200 * (8 - len(place)) + 500 * len(place))
    wait_capped(site, name)
    assert set(idle_caps(site, name)) == {PARK_MW}
    assert site.cluster.job_state(late) == "PENDING"
    site.cluster.run(["scancel", str(job)])
    site.wait_training(late)
    wait_states(site, {f"{late}.0": "admitted"})
    wait_as("the next job has its GPU", lambda: min(caps_of(site, f"{late}.0")) > PARK_MW)
    site.cluster.cancel_all()
    wait_nothing_known(site)


def test_jobs_on_parts_of_one_gpu_beside_a_whole_one(site: Site) -> None:
    """Three runs, three tags; the shared board stands at the cap of who allows least."""
    first = site.submit(TRAIN, gres="shard:1", flex="high", where="n1")
    second = site.submit(TRAIN, gres="shard:1", flex="low", where="n1")
    whole = site.submit(TRAIN, gpus=1, flex="high", where="n1")
    site.wait_training(first, second, whole)
    names = [f"{job}.0" for job in (first, second, whole)]
    wait_states(site, dict.fromkeys(names, "admitted"))
    assert gpus_of(site, names[0]) == gpus_of(site, names[1]) != gpus_of(site, names[2])
    wait_tagged(site, {str(first): "high", str(second): "low", str(whole): "high"})
    set_limit(site, 4450)  # six parked: 550 W for the whole GPU, 700 W at most for the shared one
    wait_capped(site, names[2])
    wait_as("the shared board is at its floor", lambda: min(caps_of(site, names[0])) > 650_000)
    assert caps_of(site, names[0]) == caps_of(site, names[1])
    assert set(idle_caps(site, *names)) == {PARK_MW}
    site.cluster.cancel_all()
    wait_nothing_known(site)


def test_a_suspended_job_keeps_its_cap_and_loses_nothing_by_it(site: Site) -> None:
    job = site.submit(TRAIN, gpus=2, flex="high", where="n1")
    other = site.submit(TRAIN, gpus=2, flex="high", where="n2")
    site.wait_training(job, other)
    name = f"{job}.0"
    wait_as("its rate is known", lambda: bool(runs(site).get(name, {}).get("baseline_rate_per_s")))
    set_limit(site, 4800)  # four parked: 500 W for each of the others
    wait_capped(site, name, f"{other}.0")
    # The first figure after a change of caps is of a moment; what the cap costs shows over some seconds.
    wait_as("its loss is known", lambda: (runs(site)[name]["loss"] or 0.0) > 0.1)
    hold(site, 4.0)
    before = runs(site)[name]
    site.cluster.scontrol("suspend", str(job))
    wait_as("its GPUs idle", lambda: (runs(site)[name]["draw_mw"] or 10**9) < 200_000)
    hold(site, 6.0)  # longer than Slurm is read as a whole
    resting = runs(site)[name]
    for figure in ("target_cap_mw", "floor_mw", "baseline_draw_mw", "state"):
        assert resting[figure] == before[figure], figure
    wait_capped(site, name, f"{other}.0")
    at_rest = site.tokens(job)[-1]
    site.cluster.scontrol("resume", str(job))
    wait_as("it makes tokens again", lambda: site.tokens(job)[-1][1] > at_rest[1] + 1000)
    wait_as("its loss is known again", lambda: runs(site)[name]["loss"] is not None)
    after = runs(site)[name]
    assert after["baseline_draw_mw"] == before["baseline_draw_mw"]
    assert after["disputed"] == ""
    assert after["loss"] == pytest.approx(before["loss"], abs=0.05)
    wait_capped(site, name)
    site.cluster.cancel_all()
    wait_nothing_known(site)
