"""The simulated training job as Slurm would start it: its GPUs, its tokens, its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pfi.sim.job import Training
from slurm_pfi.sim.jobs import model_job
from slurm_pfi.sim.standin import SimulationError, visible_uuids
from testbed.gpus import Device, GpuModel, Node, create_node, job_environment, read_trace, snapshot
from tests.site_fixture import stopped
from tests.standin_client import wait_until

JOB = model_job("L70 FT nc")
Jobs = list[subprocess.Popen[str]]


@pytest.fixture
def sim_dir(tmp_path: Path) -> Path:
    return tmp_path / "sim"


@pytest.fixture
def devices(sim_dir: Path) -> dict[str, tuple[Device, ...]]:
    model = GpuModel(effect_us=0, tau_ms=0)
    return {name: create_node(sim_dir / name, gpus=4, scrambled=True, model=model) for name in ("n1", "n2")}


@pytest.fixture
def started() -> Iterator[Jobs]:
    jobs: Jobs = []
    yield jobs
    for job in jobs:
        if job.poll() is None:
            job.kill()
        job.communicate(timeout=10)


def start(
    started: Jobs, sim_dir: Path, *args: str, node: str = "n1", gpus: str = "0,2", **slurm: str
) -> subprocess.Popen[str]:
    environment = {
        "PATH": os.environ["PATH"],
        **job_environment(sim_dir),
        "SLURMD_NODENAME": node,
        "SLURM_JOB_ID": "41",
        "CUDA_VISIBLE_DEVICES": gpus,
        **slurm,
    }
    command = [sys.executable, "-m", "slurm_pfi.sim.job", "--workload", JOB.name, *args]
    job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    started.append(job)
    return job


def busy(sim_dir: Path, node: str, job: str = "41.0") -> set[str]:
    return {gpu.uuid for gpu in snapshot(sim_dir / node) if gpu.job == job}


def read_log(path: Path) -> list[tuple[int, float]]:
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(entry["mono_ns"], entry["tokens"]) for entry in entries]


def test_it_uses_the_gpus_behind_the_files_that_slurm_gave(
    started: Jobs, sim_dir: Path, devices: dict[str, tuple[Device, ...]]
) -> None:
    job = start(started, sim_dir, SLURM_RESTART_COUNT="2")
    expected = {device.uuid for device in devices["n1"] if device.position in (0, 2)}
    wait_until(lambda: busy(sim_dir, "n1", "41.2") == expected, "the job is on its GPUs")

    def kernels() -> list[str]:
        return [
            line.uuid for line in read_trace(sim_dir / "n1") if line.event == "kernel" and line.job == "41.2"
        ]

    wait_until(lambda: len(kernels()) >= 4, "a second step")
    assert set(kernels()) == expected
    assert busy(sim_dir, "n2", "41.2") == set()
    job.send_signal(signal.SIGTERM)
    assert job.wait(10) == 143
    assert busy(sim_dir, "n1", "41.2") == set()


def test_a_killed_job_leaves_its_gpus_idle(
    started: Jobs, sim_dir: Path, devices: dict[str, tuple[Device, ...]]
) -> None:
    job = start(started, sim_dir)
    wait_until(lambda: len(busy(sim_dir, "n1")) == 2, "the job is on its GPUs")
    job.kill()
    job.wait(10)
    wait_until(lambda: busy(sim_dir, "n1") == set(), "the GPUs are idle")
    assert {gpu.draw_mw for gpu in snapshot(sim_dir / "n1")} == {75_000}


def test_tokens_follow_the_cap_of_the_slowest_gpu_and_are_reported(
    started: Jobs, sim_dir: Path, devices: dict[str, tuple[Device, ...]], tmp_path: Path
) -> None:
    log = tmp_path / "tokens.jsonl"
    with Node(sim_dir / "n1") as node, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "progress.sock"))
        agent.settimeout(10)
        node.poke("requested_mw", 400_000, gpu=devices["n1"][2].uuid)
        job = start(
            started,
            sim_dir,
            *("--seconds", "1.2", "--report-interval-s", "0.2", "--log", str(log)),
            SLURM_PFI_PROGRESS=str(tmp_path / "progress.sock"),
        )
        assert job.wait(20) == 0
        reports = []
        agent.setblocking(False)  # all was sent before the job ended
        while True:
            try:
                reports.append(agent.recv(256))
            except BlockingIOError:
                break
    entries = read_log(log)
    assert [float(report.split()[2]) for report in reports] == pytest.approx(
        [tokens for _, tokens in entries]
    )
    assert len(entries) >= 5
    assert entries[0][1] == 0.0
    (first_ns, _), (last_ns, tokens) = entries[0], entries[-1]
    rate = tokens / ((last_ns - first_ns) / 1e9)
    assert rate == pytest.approx(JOB.tokens_per_s / 4 * JOB.workload.relative_throughput(400), rel=1e-6)


def test_rank_zero_of_two_nodes_runs_at_the_slowest_gpu_of_both(
    started: Jobs, sim_dir: Path, devices: dict[str, tuple[Device, ...]], tmp_path: Path
) -> None:
    log = tmp_path / "tokens.jsonl"
    with Node(sim_dir / "n2") as other:
        other.poke("requested_mw", 300_000, gpu=devices["n2"][1].uuid)
    arguments = ("--log", str(log), "--report-interval-s", "0.1")
    start(started, sim_dir, *arguments, SLURM_PROCID="0", SLURM_STEP_NUM_NODES="2")
    wait_until(lambda: len(busy(sim_dir, "n1")) == 2, "rank 0 is on its GPUs")
    assert read_log(log) == []  # it waits for the other node
    start(started, sim_dir, *arguments, node="n2", gpus="1,3", SLURM_PROCID="1", SLURM_STEP_NUM_NODES="2")
    # Two seconds, so that a busy machine's hundredths between reading the one node and the other do not count.
    logs = (log, tmp_path / "tokens.jsonl.1")
    wait_until(lambda: all(len(read_log(path)) >= 21 for path in logs), "tokens")
    for path, gpus in ((log, 4), (tmp_path / "tokens.jsonl.1", 2)):
        entries = read_log(path)
        seconds = (entries[-1][0] - entries[0][0]) / 1e9
        expected = JOB.tokens_per_s_on(gpus) * JOB.workload.relative_throughput(300) * seconds
        assert entries[-1][1] == pytest.approx(
            expected, rel=0.02
        )  # the two nodes are read one after the other
    stopped = started[1]
    stopped.kill()
    stopped.wait(10)
    wait_until(lambda: busy(sim_dir, "n2") == set(), "rank 1 is gone")
    known = len(read_log(log))
    wait_until(lambda: len(read_log(log)) >= known + 4, "more reports")
    assert read_log(log)[-1][1] == read_log(log)[known + 1][1]  # a synchronous job stalls


def test_a_suspended_job_leaves_its_gpus_idle_and_goes_on_when_it_is_resumed(
    started: Jobs, sim_dir: Path, devices: dict[str, tuple[Device, ...]], tmp_path: Path
) -> None:
    """As Slurm does it: SIGTSTP, then SIGSTOP; and later SIGCONT."""
    log = tmp_path / "tokens.jsonl"
    job = start(started, sim_dir, "--log", str(log), "--report-interval-s", "0.1")
    wait_until(lambda: len(read_log(log)) >= 3, "tokens")
    took = busy(sim_dir, "n1")
    job.send_signal(signal.SIGTSTP)
    wait_until(lambda: stopped(job.pid), "it has stopped")
    assert busy(sim_dir, "n1") == set()
    job.send_signal(signal.SIGSTOP)
    at_rest = read_log(log)
    job.send_signal(signal.SIGCONT)
    wait_until(lambda: busy(sim_dir, "n1") == took, "it has them again")
    wait_until(lambda: len(read_log(log)) >= len(at_rest) + 3, "more tokens")
    assert read_log(log)[-1][1] > at_rest[-1][1]
    assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    assert job.wait(10) == 143


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "ask Slurm for GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "0,9"}, "names no GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "names no GPUs"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID not set"),
        ({"SLURMD_NODENAME": "n9"}, "PFI_SIM_DIR"),
        ({"SLURM_LOCALID": "1"}, "one task per node"),
        ({"PFI_STANDIN_LIB": ""}, "make native"),
    ],
)
def test_wrong_surroundings_are_said_plainly(
    started: Jobs,
    sim_dir: Path,
    devices: dict[str, tuple[Device, ...]],
    changes: dict[str, str],
    message: str,
) -> None:
    job = start(started, sim_dir, **changes)
    _, errors = job.communicate(timeout=20)
    assert job.returncode == 2
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_visible_gpus_come_in_cuda_order(sim_dir: Path, devices: dict[str, tuple[Device, ...]]) -> None:
    uuids = visible_uuids(sim_dir / "n1", {"CUDA_VISIBLE_DEVICES": "3, 0,1"})
    expected = sorted((d for d in devices["n1"] if d.position in (0, 1, 3)), key=lambda device: device.index)
    assert uuids == tuple(device.uuid for device in expected)
    assert visible_uuids(sim_dir / "n1", {"CUDA_VISIBLE_DEVICES": uuids[0]}) == (uuids[0],)
    with pytest.raises(SimulationError):
        visible_uuids(sim_dir / "n1", {})


def test_training_counts_the_least_increment() -> None:
    training = Training(JOB)
    training.begin({("n1", 0): 5.0, ("n1", 1): 100.0})
    training.advance({("n1", 0): 6.0, ("n1", 1): 100.5, ("n1", 2): 9.0})
    assert training.tokens == pytest.approx(0.5 * JOB.tokens_per_s / 4)
    training.advance({("n1", 0): 7.0})
    assert training.tokens == pytest.approx(0.5 * JOB.tokens_per_s / 4)


def test_the_job_loads_neither_nvml_nor_numpy() -> None:
    code = "import slurm_pfi.sim.job, sys; print({'pynvml', 'numpy', 'msgspec', 'click'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "set()"
