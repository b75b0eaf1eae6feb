"""Array tasks, components of heterogeneous jobs, steps, srun and salloc: each task and component is a run."""

from __future__ import annotations

import json

import pytest

from testbed import gpus
from testbed.site import Site

from ..shape_site import (
    as_submitter,
    caps_of,
    comments,
    gpus_of,
    idle_caps,
    open_limit,
    runs,
    wait_capped,
    wait_for,
    wait_nothing_known,
    wait_states,
    wait_tagged,
)
from ..site_fixture import DEFAULT_MW, PARK_MW, TRAIN, clear_limits, node_audit, small_site, wait_as

pytestmark = [pytest.mark.cluster, pytest.mark.generations]

SITE_OPTIONS = small_site(times={"response_s": 4, "start_grace_s": 2})


def task_ids(site: Site, array: int) -> dict[int, int]:
    """Job ids of the tasks that run, by number of the task."""
    lines = site.cluster.squeue("-t", "RUNNING", "-O", "ArrayJobID,ArrayTaskID,JobID")
    rows = [[int(word) for word in line.split()] for line in lines if line.split()[1].isdigit()]
    return {task: job for of, task, job in rows if of == array}


def test_each_running_task_is_a_run_and_the_waiting_group_is_none(site: Site) -> None:
    stern = site.submit(TRAIN, gpus=1, flex="none", partition="urgent", where="n1")
    array = site.submit(TRAIN, gpus=1, flex="high", more=["--array=0-4%2"])
    wait_as("two tasks run", lambda: len(task_ids(site, array)) == 2)
    ids = task_ids(site, array)
    assert sorted(ids) == [0, 1]
    site.wait_training(stern, *ids.values())
    wait_tagged(site, {str(stern): "none", f"{array}_0": "high", f"{array}_1": "high"})
    assert comments(site)[f"{array}_[2-4%2]"] == ""
    first, second = (f"{ids[task]}.0" for task in (0, 1))
    assert [runs(site)[name]["spec"] for name in (first, second)] == [f"{array}_0", f"{array}_1"]

    open_limit(site, 4800)  # 2 kW beside the GPUs, 700 W for none, five are parked: 550 W for each task
    wait_capped(site, first, second)
    assert caps_of(site, f"{stern}.0") == [DEFAULT_MW]
    wait_as("the others are parked", lambda: set(idle_caps(site, first, second, f"{stern}.0")) == {PARK_MW})

    # The next task starts in the window, and only it takes the place.
    site.cluster.run(["scancel", f"{array}_0"])
    wait_as("the next task runs", lambda: sorted(task_ids(site, array)) == [1, 2])
    third = f"{task_ids(site, array)[2]}.0"
    wait_states(site, {f"{stern}.0": "admitted", second: "admitted", third: "admitted"})
    wait_capped(site, second, third)
    wait_tagged(site, {str(stern): "none", f"{array}_1": "high", f"{array}_2": "high"})

    # What is asked of the whole array is answered with its parts, as Slurm names them.
    several = site.cli("job", str(array), check=False)
    assert (several.returncode, f"{array}_1" in several.stderr) == (1, True), several
    assert f"{array}_2" in site.cli("job", f"{array}_2").stdout
    shown = site.cli("what-if", "4.8kW").stdout
    assert f"{array}_1" in shown and f"{array}_2" in shown, shown

    site.cluster.run(["scancel", str(array)])
    wait_states(site, {f"{stern}.0": "admitted"})
    site.cluster.cancel_all()
    clear_limits(site)
    site.wait_restored()
    wait_nothing_known(site)
    specs = {str(stern), *(f"{array}_{task}" for task in range(3))}
    wait_for("runs in the report", specs, lambda: reported(site))


def reported(site: Site) -> set[str]:
    """How the last window's report names its runs; the history is written a moment after the fact."""
    told = json.loads(site.cli("report", "--json").stdout)
    return {run["facts"]["spec"] for run in told["runs"]}


def test_tasks_one_after_the_other_each_have_their_own_tag(site: Site) -> None:
    """Also the last, whose own job id is that of the array: to Slurm that id means all tasks."""
    open_limit(site, 4000)
    array = site.submit(TRAIN, gpus=1, flex="high", seconds=6, more=["--array=0-2%1"])
    seen = []
    for task in range(3):
        wait_for("tasks that run", [task], lambda: list(task_ids(site, array)), 30)
        name = f"{task_ids(site, array)[task]}.0"
        wait_as("it is raised", lambda name=name: min(caps_of(site, name), default=0) > PARK_MW)  # type: ignore[misc]
        wait_tagged(site, {f"{array}_{task}": "high"})
        seen.append(int(name.removesuffix(".0")))
    assert seen[-1] == array
    assert len(set(seen)) == 3
    wait_nothing_known(site, 30)
    wait_as("the last is kept", lambda: site.cli("job", f"{array}_2", check=False).returncode == 0)
    for task in range(3):
        assert f"{array}_{task}" in site.cli("job", f"{array}_{task}").stdout


def test_both_components_of_a_heterogeneous_job_are_runs(site: Site) -> None:
    train = [site.training(TRAIN).replace(".jsonl", f".{group}.jsonl") for group in (0, 1)]
    script = (
        "#!/bin/sh\n" + "".join(f"srun --het-group={group} {train[group]} &\n" for group in (0, 1)) + "wait\n"
    )
    more = ["--gres=gpu:1", "--nodelist=n1", "--power-flex=high", ":", "--gres=gpu:3", "--nodelist=n2"]
    job = site.cluster.sbatch(script, *more)
    names = (f"{job}.0", f"{job + 1}.0")
    wait_states(site, dict.fromkeys(names, "admitted"), 40)
    wait_as("both tell a counter", lambda: all(runs(site)[name]["rate_per_s"] for name in names))
    assert [runs(site)[name]["spec"] for name in names] == [f"{job}+0", f"{job}+1"]
    assert [runs(site)[name]["gpus"] for name in names] == [1, 3]
    wait_as("both are seen", lambda: all(runs(site)[name]["baseline_rate_per_s"] for name in names))
    wait_tagged(site, {f"{job}+0": "high", f"{job}+1": "high"})
    # Each component trains on the GPUs that its own agent gives it.
    for node, name in zip(("n1", "n2"), names, strict=True):
        trains = {gpu["uuid"] for gpu in site.snapshot() if gpu["job"] and gpu["node"] == node}
        assert gpus_of(site, name) == {node: trains}

    open_limit(site, 5000)  # four parked: 550 W for each of the others
    wait_capped(site, *names)
    assert set(idle_caps(site, *names)) == {PARK_MW}
    several = site.cli("job", str(job), check=False)
    assert (several.returncode, f"{job}+1" in several.stderr) == (1, True), several
    assert f"{job}+1" in site.cli("job", f"{job}+1").stdout
    wait_as(
        "the loss of both is known",
        lambda: all(runs(site)[name]["loss"] is not None for name in names),
    )
    site.cluster.run(["scancel", str(job)])
    wait_nothing_known(site)


def test_several_steps_in_one_job_are_one_run(site: Site) -> None:
    """One after the other, whose counters begin anew, then two at once, each on a part of the GPUs."""
    step = f"srun --ntasks=1 {site.training(TRAIN, seconds=4)}"
    part = "srun --exact --ntasks=1 --gres=gpu:1"
    parts = [site.training(TRAIN).replace(".jsonl", f".{number}.jsonl") for number in (1, 2)]
    script = (
        "#!/bin/sh\n" + f"{step}\n{step}\n" + "".join(f"{part} {train} &\n" for train in parts) + "wait\n"
    )
    job = site.cluster.sbatch(script, "--gres=gpu:2", "--ntasks=2", "--nodelist=n2", "--power-flex=high")
    name = f"{job}.0"
    wait_states(site, {name: "admitted"})
    (place,) = gpus_of(site, name).values()
    assert len(place) == 2
    open_limit(site, 4300)
    wait_capped(site, name)
    began = len(node_audit(site, "n2", "run_seen"))
    wait_as("both steps train at once", lambda: len(started(site, name)) == 4)
    assert {uuid for uuid, _ in started(site, name)} == place
    assert {job["run"] for job in site.ask("jobs")} == {f"pfi:{name}"}
    assert len(node_audit(site, "n2", "run_seen")) == began, "steps begin and end, the run is the same"
    wait_capped(site, name)
    wait_tagged(site, {str(job): "high"})
    site.cluster.cancel_all()
    wait_nothing_known(site)


def started(site: Site, name: str) -> set[tuple[str, int]]:
    """(GPU, pid) of every process of a job that ran a kernel."""
    lines = [line for node in site.node_names for line in gpus.read_trace(site.sim_dir(node))]
    return {(line.uuid, line.pid) for line in lines if line.event == "kernel" and line.job == name}


@pytest.mark.parametrize("command", ["srun", "salloc"])
def test_jobs_without_a_script(site: Site, command: str) -> None:
    """An allocation counts from its prolog on, also while nothing runs in it."""
    words = [command, "--gres=gpu:2", "--nodelist=n2", "--power-flex=high", "--job-name=by-hand"]
    train = ["sh", "-c", f"exec {site.training(TRAIN)}"]
    with as_submitter(site, [*words, *train] if command == "srun" else [*words, "srun", *train]):
        wait_as("it is known", lambda: len(runs(site)) == 1)
        (name,) = runs(site)
        job = int(name.partition(".")[0])
        site.wait_training(job)
        wait_tagged(site, {str(job): "high"})
        open_limit(site, 4300)
        wait_capped(site, name)
        assert runs(site)[name]["nodes"] == ["n2"]
        site.cluster.run(["scancel", str(job)])
    wait_nothing_known(site)
