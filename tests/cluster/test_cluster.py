"""The cluster itself: where it listens, what its jobs get, and that nothing is left of it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from testbed import cluster_files
from testbed.cluster import Cluster, ClusterError, ClusterOptions, Gpu, wait_until
from testbed.processes import processes_naming

pytestmark = pytest.mark.cluster

CLUSTER_OPTIONS = ClusterOptions(
    nodes=2,
    gres={"n2": [Gpu(minor=5), Gpu(minor=0), Gpu(minor=3)]},
    job_env={"PFI_STANDIN_DIR": "/some where/%n/it's"},
)
LOOPBACK = "0100007F"


def listening(pid: int) -> set[str]:
    """Local addresses, hexadecimal as in /proc/net/tcp, of the sockets on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = str(link.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.add(columns[1])
    return found


def test_daemons_listen_on_loopback_only(module_cluster: Cluster) -> None:
    for name in module_cluster.daemon_names:
        addresses = listening(module_cluster.daemon_pid(name))
        assert len(addresses) == (0 if name == "munged" else 1), f"{name}: {addresses}"
        assert {address.split(":")[0] for address in addresses} <= {LOOPBACK}, f"{name}: {addresses}"


def test_positions_map_to_the_minors_that_were_asked_for(module_cluster: Cluster) -> None:
    shown = subprocess.run(
        [cluster_files.find_program("slurmd"), "-G", "-N", "n2"],
        env=module_cluster.client_env,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [word.rsplit("/", 1)[1] for word in shown.stderr.split() if word.startswith("File=")]
    assert files == ["nvidia5", "nvidia0", "nvidia3"]
    device = module_cluster.layout.device("n2", 5)
    if not device.is_symlink():
        assert stat.S_ISCHR(device.stat().st_mode)
        assert os.minor(device.stat().st_rdev) == 5
        assert os.major(device.stat().st_rdev) == 195


def test_device_files_without_the_right_to_make_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.mknod", refuse)
    with Cluster(ClusterOptions(nodes=1, hooks=False, plugin=False)) as cluster:
        assert str(cluster.layout.device("n1", 7).readlink()) == "/dev/null"
        job = cluster.sbatch("#!/bin/sh\necho $SLURM_JOB_GPUS\n", "--gres=gpu:8")
        cluster.wait_job_state(job, "COMPLETED")
        assert cluster.job_output(job) == "0,1,2,3,4,5,6,7\n"


def test_jobs_run_as_an_ordinary_user_with_the_nodes_environment(module_cluster: Cluster) -> None:
    script = '#!/bin/sh\nid -u\necho "$PFI_STANDIN_DIR"\nsrun sh -c \'echo "$PFI_STANDIN_DIR"\'\n'
    job = module_cluster.sbatch(script, "--gres=gpu:1", "--nodelist=n2", "--partition=urgent")
    module_cluster.wait_job_state(job, "COMPLETED")
    uid, *folders = module_cluster.job_output(job).splitlines()
    assert int(uid) == (65534 if os.getuid() == 0 else os.getuid())
    assert folders == ["/some where/n2/it's"] * 2
    fields = module_cluster.job_fields(job)
    assert fields["Partition"] == "urgent"
    assert fields["NodeList"] == "n2"


def test_waiting_for_a_state_that_cannot_come_ends_at_once(module_cluster: Cluster) -> None:
    job = module_cluster.sbatch("#!/bin/sh\necho about to fail\nexit 3\n")
    with pytest.raises(ClusterError, match=r"is FAILED .*about to fail"):
        module_cluster.wait_job_state(job, "COMPLETED")


def test_two_clusters_side_by_side_one_of_them_as_user_slurm(module_cluster: Cluster) -> None:
    user = "slurm" if os.getuid() == 0 else None
    with Cluster(ClusterOptions(nodes=1, name="other", slurm_user=user)) as other:
        if user is not None:
            owner = Path(f"/proc/{other.daemon_pid('slurmctld')}").stat().st_uid
            assert owner == other.options.slurm_account.pw_uid != 0
        jobs = [
            cluster.sbatch("#!/bin/sh\necho $SLURM_CLUSTER_NAME\n") for cluster in (module_cluster, other)
        ]
        for cluster, job, name in zip((module_cluster, other), jobs, ("pfi", "other"), strict=True):
            cluster.wait_job_state(job, "COMPLETED")
            assert cluster.job_output(job) == f"{name}\n"
        folder = other.folder
        pids = [other.daemon_pid(name) for name in other.daemon_names]
        with pytest.raises(ClusterError, match="exit 1"):
            other.run(["scontrol", "no-such-thing"])
    assert not folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert processes_naming(folder) == {}
    assert Cluster.stopped[-1].clean


def test_stopping_ends_running_jobs_and_names_what_was_left() -> None:
    cluster = Cluster(ClusterOptions(nodes=1)).start()
    job = cluster.sbatch("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 1; done\n", "--gres=gpu:1")
    cluster.wait_job_state(job, "RUNNING")
    wait_until(lambda: cluster.job_file("n1", job).exists(), 10, "the job file")
    stray = subprocess.Popen(["sleep", "600"], env=cluster.client_env)
    report = cluster.stop()
    assert stray.wait(10) == -signal.SIGKILL
    assert report.leftovers == [f"{stray.pid} sleep 600"]
    assert report.drained == {}
    Cluster.stopped.remove(report)  # what was left here was left on purpose


def test_stop_works_after_slurmctld_was_killed() -> None:
    cluster = Cluster(ClusterOptions(nodes=1)).start()
    job = cluster.sbatch("#!/bin/sh\nsleep 600\n")
    cluster.wait_job_state(job, "RUNNING")
    cluster.stop_slurmctld(signal.SIGKILL)
    assert cluster.stop().leftovers == []


def test_a_daemon_that_cannot_start_is_an_error_with_its_log() -> None:
    stopped = len(Cluster.stopped)
    with pytest.raises(ClusterError, match=r"(?s)slurm.*NoSuchKey"):
        Cluster(ClusterOptions(nodes=1, conf=["NoSuchKey=1"], hooks=False, plugin=False)).start()
    assert len(Cluster.stopped) == stopped + 1
    assert not Cluster.stopped[-1].folder.exists()


def test_a_folder_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with pytest.raises(ClusterError, match="shorter parent folder"):
        Cluster(ClusterOptions(nodes=1, parent=deep)).start()


def test_without_slurm_the_error_names_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster_files, "SEARCH_PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="apt-get install --no-install-recommends slurmctld slurmd"):
        Cluster().start()
