"""Hooks with one thing broken at a time, run by a real slurmd: the job runs, no node drains, one line tells of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from testbed import mounts
from testbed.cluster import Cluster, ClusterOptions, wait_until
from testbed.processes import processes_naming
from testbed.site import Site

from ..conftest import left_by_ended_jobs
from ..site_fixture import hook_faults, small_site

pytestmark = pytest.mark.cluster

# What slurmd itself was started with is not to matter to its hooks.
HOSTILE = {
    "ENV": "/nowhere/startup",
    "BASH_ENV": "/nowhere/startup",
    "IFS": "/0",
    "state_dir": "/nowhere",
    "LC_ALL": "xx",
}
CLUSTER_OPTIONS = ClusterOptions(nodes=4, slurmd_env=HOSTILE)
DEADLINE_S = 6.0  # the hooks' own


def new_lines(cluster: Cluster, seen: int) -> list[str]:
    return cluster.layout.hook_log.read_text().splitlines()[seen:]


def run_a_job(cluster: Cluster, *arguments: str, timeout_s: float = 60) -> int:
    """A job on n1 that prints a word; returns once its epilog is done and the node takes the next."""
    job = cluster.sbatch("#!/bin/sh\necho ran\n", "--nodelist=n1", "--gres=gpu:1", *arguments)
    cluster.wait_job_state(job, "COMPLETED", timeout_s=timeout_s)
    cluster.wait_nodes_idle()
    assert cluster.job_output(job) == "ran\n"
    assert cluster.drained_nodes() == {}
    return job


@contextlib.contextmanager
def moved_away(path: Path) -> Iterator[None]:
    aside = path.with_name("aside")
    path.rename(aside)
    try:
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        aside.rename(path)


@contextlib.contextmanager
def no_folder(node: Path) -> Iterator[None]:
    with moved_away(node):
        yield


@contextlib.contextmanager
def file_for_folder(node: Path) -> Iterator[None]:
    with moved_away(node):
        node.write_text("")
        yield


@contextlib.contextmanager
def symlink_for_folder(node: Path) -> Iterator[None]:
    with moved_away(node):
        node.symlink_to(node.with_name("aside"))
        yield


@contextlib.contextmanager
def symlink_without_target(node: Path) -> Iterator[None]:
    with moved_away(node):
        node.symlink_to(node.with_name("absent"))
        yield


@contextlib.contextmanager
def read_only(node: Path) -> Iterator[None]:
    with mounts.read_only(node / "jobs"):
        yield


@contextlib.contextmanager
def disk_full(node: Path) -> Iterator[None]:
    with mounts.full(node / "jobs"):
        yield


@contextlib.contextmanager
def nothing_executable(node: Path) -> Iterator[None]:
    """Of the folder's mode nothing is left; root does not need it, and hooks are root's."""
    node.chmod(0)
    try:
        yield
    finally:
        node.chmod(0o755)


@pytest.mark.parametrize(
    ("broken", "by_prolog", "by_epilog"),
    [
        (no_folder, "", ""),  # which it makes: a job before the agent's first start is not lost
        (nothing_executable, "", ""),
        (file_for_folder, "cannot be made", ""),
        (symlink_for_folder, "is a symbolic link", "is a symbolic link"),
        (symlink_without_target, "is a symbolic link", "is a symbolic link"),
        (read_only, "cannot be written", ""),
        (disk_full, "cannot be written", ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_thing_broken(
    module_cluster: Cluster,
    broken: Callable[[Path], AbstractContextManager[None]],
    by_prolog: str,
    by_epilog: str,
) -> None:
    seen = len(new_lines(module_cluster, 0))
    with broken(module_cluster.state_dir / "n1"):
        job = run_a_job(module_cluster)
    expected = [(word, text) for word, text in (("prolog", by_prolog), ("epilog", by_epilog)) if text]
    lines = new_lines(module_cluster, seen)
    assert len(lines) == len(expected), lines
    for line, (word, text) in zip(lines, expected, strict=True):
        assert f"slurm-pfi-{word}[" in line
        assert f"job {job}: " in line
        assert text in line
    run_a_job(module_cluster)  # mended, nothing is said any more
    assert new_lines(module_cluster, seen) == lines


def test_a_file_system_that_never_answers(module_cluster: Cluster) -> None:
    seen = len(new_lines(module_cluster, 0))
    jobs = module_cluster.state_dir / "n1/jobs"
    with mounts.hung(jobs):
        began = time.monotonic()
        job = run_a_job(module_cluster)
        took_s = time.monotonic() - began
    assert took_s >= 2 * (DEADLINE_S - 1.5), "both hooks waited"
    lines = new_lines(module_cluster, seen)
    assert [f"slurm-pfi-{word}[" in line for word, line in zip(("prolog", "epilog"), lines, strict=True)] == [
        True
    ] * 2
    assert all(f"job {job}: not done within 5 s" in line for line in lines)
    wait_until(lambda: hook_processes(module_cluster) == {}, 10, "no process of a hook is left")


def hook_processes(cluster: Cluster) -> dict[int, str]:
    return {
        pid: line
        for pid, line in processes_naming(cluster.layout.hooks).items()
        if str(cluster.layout.hooks) in line
    }


@pytest.mark.parametrize("what", ["gone", "a folder", "a pipe that nobody reads"])
def test_no_log_to_tell_it_to(module_cluster: Cluster, what: str) -> None:
    node = module_cluster.state_dir / "n1"
    log = module_cluster.layout.hook_log
    with moved_away(log), symlink_for_folder(node):
        if what == "a folder":
            log.mkdir()
        elif what != "gone":
            os.mkfifo(log)
        began = time.monotonic()
        run_a_job(module_cluster)
        assert time.monotonic() - began < 30
        assert log.exists() == (what != "gone"), "it makes no file where none was"


def test_a_log_on_a_full_disk(module_cluster: Cluster) -> None:
    """The log's folder is slurmd's too, which goes on as well."""
    node = module_cluster.state_dir / "n1"
    log = module_cluster.layout.hook_log
    with moved_away(log), symlink_for_folder(node):
        full = module_cluster.folder / "full"
        full.mkdir()
        with mounts.full(full):
            (full / "log").touch()
            log.symlink_to(full / "log")
            run_a_job(module_cluster)
            assert (full / "log").read_text() == ""


def test_a_hostile_user(module_cluster: Cluster) -> None:
    """All that a user controls and a hook sees, and names that would be dangerous without Slurm's prefix."""
    seen = len(new_lines(module_cluster, 0))
    mark = module_cluster.layout.out / "done-by-a-hook"
    evil = f"$(touch {mark})`touch {mark}`;touch {mark}\n|'\"\\ AdminComment=x \udcff"
    env = {
        f"SLURM_SPANK_{name}": evil
        for name in ("PFI_FLEX", "PATH", "ENV", "IFS", "state_dir", "BASH_FUNC_mv%%")
    }
    show = f"#!/bin/sh\ncat {module_cluster.state_dir}/n1/jobs/$SLURM_JOB_ID.0\n"
    env |= {"SLURMD_NODENAME": "..", "SLURM_JOB_GPUS": str(mark), "SLURM_JOB_RESTART_COUNT": "x"}
    texts = [f"--job-name={evil}", f"--comment={evil}"]
    job = module_cluster.sbatch(show, "--nodelist=n1", "--gres=gpu:2", "--power-flex=10%", *texts, env=env)
    module_cluster.wait_job_state(job, "COMPLETED")
    module_cluster.wait_nodes_idle()
    assert module_cluster.job_output(job).splitlines()[4:] == ["gpus 0,1", "flex 10%"]
    assert not mark.exists()
    assert new_lines(module_cluster, seen) == []


def test_two_hundred_at_once(module_cluster: Cluster) -> None:
    """All start in one pass of the scheduler and end together, so slurmd has their hooks under way together."""
    seen = len(new_lines(module_cluster, 0))

    def job_files() -> int:
        return sum(
            len(list((module_cluster.state_dir / node / "jobs").iterdir()))
            for node in module_cluster.node_names
        )

    job = module_cluster.sbatch(
        "#!/bin/sh\nexec sleep 600\n", "--array=1-200", "--hold", "--output=/dev/null"
    )
    module_cluster.scontrol("release", str(job))
    wait_until(lambda: job_files() == 200, 60, "200 job files")
    module_cluster.cancel_all(timeout_s=60)
    wait_until(lambda: job_files() == 0, 10, "no job file is left")
    assert new_lines(module_cluster, seen) == []
    assert module_cluster.drained_nodes() == {}


def test_what_a_hook_leaves_behind_would_be_found(module_cluster: Cluster) -> None:
    """Else the check after each test could not fail."""
    job = run_a_job(module_cluster)
    env = {**module_cluster.client_env, "SLURM_JOB_ID": str(job)}
    with subprocess.Popen(["sleep", "600"], env=env) as left:
        assert left_by_ended_jobs(module_cluster) == ["sleep 600"]
        left.kill()
    assert left_by_ended_jobs(module_cluster) == []


def test_an_agent_that_is_stopped_or_gone() -> None:
    """No hook waits for the agent. A module of its own would cost a cluster as well."""
    with Site(small_site(nodes=1, gpus=2)) as site:
        site.send_signal("n1", signal.SIGSTOP)
        run_a_job(site.cluster)
        site.kill("n1")
        run_a_job(site.cluster)
        site.start_agent("n1")
        assert hook_faults(site) == []
