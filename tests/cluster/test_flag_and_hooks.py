"""From ``--power-flex`` to the job file, on a real cluster: submission, prolog, epilog, requeue."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from testbed.cluster import Cluster, ClusterOptions, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.generations]

CLUSTER_OPTIONS = ClusterOptions(nodes=2)
SHOW = '#!/bin/sh\n{directives}cat "{state_dir}/$SLURMD_NODENAME/jobs/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}"\n'
ALLOWED = "not one of: none, low, medium, high, auto or a whole percentage from 1% to 100%"


def submitter_uid() -> int:
    return pwd.getpwnam("nobody").pw_uid if os.getuid() == 0 else os.getuid()


def show(cluster: Cluster, *directives: str) -> str:
    """A script that prints its own job file."""
    lines = "".join(f"#SBATCH {directive}\n" for directive in directives)
    return SHOW.format(directives=lines, state_dir=cluster.state_dir)


def job_files(cluster: Cluster) -> list[Path]:
    return [path for node in cluster.node_names for path in (cluster.state_dir / node / "jobs").iterdir()]


def output_of(cluster: Cluster, job: int) -> dict[str, str]:
    """What the job printed of its own file, once its epilogs are done and no file is left."""
    cluster.wait_job_state(job, "COMPLETED")
    wait_until(lambda: job_files(cluster) == [], 10, "no job file is left")
    return dict(line.split(" ", 1) for line in cluster.job_output(job).splitlines())


def test_the_directive_reaches_the_job_file(module_cluster: Cluster) -> None:
    job = module_cluster.sbatch(show(module_cluster, "--power-flex=10%", "--gres=gpu:3"))
    assert output_of(module_cluster, job) == {
        "pfi-job": "1",
        "job_id": str(job),
        "restart": "0",
        "uid": str(submitter_uid()),
        "gpus": "0,1,2",
        "flex": "10%",
    }


def test_the_command_line_beats_the_directive_and_the_environment(module_cluster: Cluster) -> None:
    script = show(module_cluster, "--power-flex=10%")
    job = module_cluster.sbatch(script, "--power-flex=none", env={"PFI_FLEX": "high"})
    shown = output_of(module_cluster, job)
    assert shown["flex"] == "none"
    assert shown["gpus"] == "-"


def test_the_directive_beats_the_environment(module_cluster: Cluster) -> None:
    job = module_cluster.sbatch(show(module_cluster, "--power-flex=10%"), env={"PFI_FLEX": "high"})
    assert output_of(module_cluster, job)["flex"] == "10%"


def test_the_environment_counts_without_a_flag(module_cluster: Cluster) -> None:
    job = module_cluster.sbatch(show(module_cluster), env={"PFI_FLEX": "high"})
    assert output_of(module_cluster, job)["flex"] == "high"


def test_no_flex_is_said_as_none_given(module_cluster: Cluster) -> None:
    job = module_cluster.sbatch(
        show(module_cluster), env={"SLURM_SPANK_PFI_FLEX": "$(reboot)", "SPANK_PFI_FLEX": "low"}
    )
    assert output_of(module_cluster, job)["flex"] == "-"


def test_other_positions_for_a_second_job(module_cluster: Cluster) -> None:
    first = module_cluster.sbatch("#!/bin/sh\nsleep 60\n", "--gres=gpu:2", "--nodelist=n2")
    module_cluster.wait_job_state(first, "RUNNING")
    second = module_cluster.sbatch(show(module_cluster), "--gres=gpu:4", "--nodelist=n2")
    module_cluster.wait_job_state(second, "COMPLETED")
    assert "\ngpus 2,3,4,5\n" in module_cluster.job_output(second)
    assert module_cluster.job_file("n2", first).read_text().splitlines()[4] == "gpus 0,1"
    module_cluster.cancel_all()
    assert job_files(module_cluster) == []


def test_a_job_on_two_nodes_has_a_file_on_each(module_cluster: Cluster) -> None:
    script = (
        show(module_cluster).replace("cat", "srun cat").replace('"', "'").replace("$SLURMD_NODENAME", "%N")
    )
    script = f"#!/bin/sh\nsrun sh -c 'cat {module_cluster.state_dir}/$SLURMD_NODENAME/jobs/$SLURM_JOB_ID.0'\n"
    job = module_cluster.sbatch(script, "--nodes=2", "--gres=gpu:8", "--power-flex=auto")
    module_cluster.wait_job_state(job, "COMPLETED")
    lines = module_cluster.job_output(job).splitlines()
    assert lines.count("gpus 0,1,2,3,4,5,6,7") == 2
    assert lines.count("flex auto") == 2
    wait_until(lambda: job_files(module_cluster) == [], 10, "no job file is left")


@pytest.mark.parametrize("command", ["srun", "salloc"])
def test_srun_and_salloc(module_cluster: Cluster, command: str) -> None:
    inner = [] if command == "srun" else ["srun"]
    read = f"cat {module_cluster.state_dir}/$SLURMD_NODENAME/jobs/$SLURM_JOB_ID.0"
    done = module_cluster.run([command, "--gres=gpu:2", "--power-flex=low", *inner, "sh", "-c", read])
    assert done.stdout.splitlines()[3:] == [f"uid {submitter_uid()}", "gpus 0,1", "flex low"]
    wait_until(lambda: job_files(module_cluster) == [], 10, "no job file is left")


def test_a_step_says_that_its_flag_has_no_effect(module_cluster: Cluster) -> None:
    step = ["srun", "--power-flex=low", "sh", "-c", f"cat {module_cluster.state_dir}/*/jobs/$SLURM_JOB_ID.0"]
    done = module_cluster.run(["salloc", "--gres=gpu:1", "--power-flex=high", *step])
    assert "--power-flex=low has no effect on a step: the flex of its job stands" in done.stderr
    assert done.stdout.splitlines()[-1] == "flex high"
    quiet = module_cluster.run(["salloc", "--power-flex=high", "srun", "true"])
    assert "no effect" not in quiet.stderr


@pytest.mark.parametrize("value", ["", "0%", "101%", "5.5%", "Low", "10"])
@pytest.mark.parametrize("command", ["sbatch", "srun", "salloc"])
def test_a_bad_value_is_refused_at_submission(module_cluster: Cluster, command: str, value: str) -> None:
    before = sorted(module_cluster.squeue("--states=all", "-o", "%A"))
    what = ["--wrap=true"] if command == "sbatch" else ["true"]
    done = module_cluster.run([command, f"--power-flex={value}", *what], check=False)
    assert done.returncode != 0
    assert f"--power-flex={value}: {ALLOWED}" in done.stderr
    by_environment = module_cluster.run([command, *what], env={"PFI_FLEX": value}, check=False)
    assert by_environment.returncode != 0
    assert f"PFI_FLEX={value} in the environment: {ALLOWED}" in by_environment.stderr
    assert sorted(module_cluster.squeue("--states=all", "-o", "%A")) == before


def test_a_bad_directive_is_refused_at_submission(module_cluster: Cluster) -> None:
    script = "#!/bin/sh\n#SBATCH --power-flex=most\n"
    done = module_cluster.run(["sbatch"], stdin=script, check=False)
    assert done.returncode != 0
    assert f"--power-flex=most: {ALLOWED}" in done.stderr


@pytest.mark.parametrize("command", ["sbatch", "srun", "salloc"])
def test_help_names_the_option(module_cluster: Cluster, command: str) -> None:
    assert "--power-flex=FLEX" in module_cluster.run([command, "--help"]).stdout


def test_a_requeued_job_is_run_1_and_only_that(module_cluster: Cluster) -> None:
    job = module_cluster.sbatch("#!/bin/sh\nsleep 600\n", "--gres=gpu:2", "--power-flex=5%", "--nodelist=n1")
    module_cluster.wait_job_state(job, "RUNNING")
    wait_until(module_cluster.job_file("n1", job, 0).exists, 10, "the file of run 0")
    module_cluster.requeue(job)
    wait_until(module_cluster.job_file("n1", job, 1).exists, 10, "the file of run 1")
    assert [path.name for path in job_files(module_cluster)] == [f"{job}.1"]
    text = module_cluster.job_file("n1", job, 1).read_text()
    assert text.splitlines()[2:] == ["restart 1", f"uid {submitter_uid()}", "gpus 0,1", "flex 5%"]
    # Requeued and cancelled before it runs again: the epilog that says 2 ends run 1.
    module_cluster.scontrol("requeuehold", str(job))
    wait_until(lambda: job_files(module_cluster) == [], 10, "no job file is left")
    module_cluster.cancel_all()


def test_a_node_that_failed_ends_its_run(module_cluster: Cluster) -> None:
    job = module_cluster.sbatch("#!/bin/sh\nsleep 600\n", "--gres=gpu:1", "--nodes=2", "--requeue")
    module_cluster.wait_job_state(job, "RUNNING")
    wait_until(lambda: len(job_files(module_cluster)) == 2, 10, "a job file on both nodes")
    module_cluster.scontrol("update", "node=n2", "state=down", "reason=test")
    wait_until(lambda: job_files(module_cluster) == [], 10, "the job files of the failed run are gone")
    assert module_cluster.job_fields(job)["Restarts"] == "1"
    module_cluster.cancel_all()
    wait_until(lambda: module_cluster.drained_nodes() == {}, 20, "n2 is back")


def test_heterogeneous_job(module_cluster: Cluster) -> None:
    read = f"cat {module_cluster.state_dir}/*/jobs/*.0"
    script = f"#!/bin/sh\n{read}\n"
    job = module_cluster.sbatch(script, "--gres=gpu:1", "--power-flex=10%", ":", "--gres=gpu:2")
    module_cluster.wait_job_state(job, "COMPLETED", timeout_s=60)
    lines = module_cluster.job_output(job).splitlines()
    assert {"gpus 0", "gpus 0,1"} <= set(lines)
    assert lines.count("flex 10%") == 2
    wait_until(lambda: job_files(module_cluster) == [], 10, "no job file is left")


def test_users_cannot_write_where_job_files_lie(module_cluster: Cluster) -> None:
    if os.getuid() != 0:
        pytest.skip("here jobs run as the user who owns the cluster")
    folder = module_cluster.state_dir / "n1/jobs"
    script = f"#!/bin/sh\ntouch {folder}/9.0 || echo refused\nmv {folder} {folder}2 || echo refused\n"
    job = module_cluster.sbatch(script, "--nodelist=n1")
    module_cluster.wait_job_state(job, "COMPLETED")
    assert module_cluster.job_output(job).splitlines().count("refused") == 2
    wait_until(lambda: job_files(module_cluster) == [], 10, "no job file is left")


def test_broken_hooks_drain_no_node(module_cluster: Cluster) -> None:
    """The folder of a node is gone for good: the job runs, the node stays, and the log has one line for each hook."""
    node_folder = module_cluster.state_dir / "n2"
    aside = module_cluster.state_dir / "aside"
    log = module_cluster.layout.hook_log
    seen = len(log.read_text().splitlines())
    node_folder.rename(aside)
    node_folder.symlink_to(aside)
    try:
        job = module_cluster.sbatch("#!/bin/sh\necho ran\n", "--nodelist=n2", "--gres=gpu:1")
        module_cluster.wait_job_state(job, "COMPLETED")
        module_cluster.cancel_all()
    finally:
        node_folder.unlink()
        aside.rename(node_folder)
    assert module_cluster.job_output(job) == "ran\n"
    lines = log.read_text().splitlines()[seen:]
    assert len(lines) == 2
    assert all(f"job {job}: {node_folder} is a symbolic link" in line for line in lines)
    assert module_cluster.drained_nodes() == {}
