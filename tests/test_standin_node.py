"""A simulated node over time: limits, draw, work, trace, and processes that come, go and are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from slurm_pfi.sim.jobs import model_job
from slurm_pfi.sim.standin import NodeGpus
from testbed.gpus import Device, GpuModel, GpuState, Node, create_node, library_path, read_trace, snapshot
from tests.standin_client import NvmlError, NvmlProcess, wait_until

NS = 1_000_000_000
JOB = "7.0"
WORKLOAD = model_job("L70 FT nc").workload
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")


class Bench:
    """One node with a clock that only the test turns; GPU 0 is what the test looks at."""

    def __init__(self, node_dir: Path, devices: tuple[Device, ...]) -> None:
        self.node_dir = node_dir
        self.uuids = [device.uuid for device in sorted(devices, key=lambda device: device.index)]
        self.node = Node(node_dir)
        self.start_ns = time.monotonic_ns()
        self.node.poke("manual_ns", self.start_ns)
        self.job: NodeGpus | None = None

    def begin_job(self, *gpus: int) -> NodeGpus:
        self.job = NodeGpus(self.node_dir, JOB)
        for gpu in gpus:
            self.job.register(self.uuids[gpu], WORKLOAD)
        return self.job

    def advance(self, seconds: float) -> GpuState:
        self.node.poke("advance_ns", round(seconds * NS))
        return self.gpu()

    def gpu(self, index: int = 0) -> GpuState:
        return self.node.snapshot()[index]

    def limit_lines(self, index: int = 0) -> list[tuple[int, int, int]]:
        """(instant, effective, requested) of every limit after the first."""
        lines = [
            line
            for line in read_trace(self.node_dir)
            if line.uuid == self.uuids[index] and line.event == "limit"
        ]
        return [(line.mono_ns, line.effective_mw, line.requested_mw or 0) for line in lines[1:]]

    def close(self) -> None:
        if self.job is not None:
            self.job.close()
        self.node.close()


def _make_bench(node_dir: Path, model: GpuModel) -> Bench:
    return Bench(node_dir, create_node(node_dir, gpus=2, model=model))


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFI_STANDIN_LIB", str(library_path()))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = _make_bench(tmp_path / "n1", GpuModel())
    yield made
    made.close()


@pytest.fixture
def prompt_bench(tmp_path: Path) -> Iterator[Bench]:
    """Limits come into force and draw follows at once."""
    made = _make_bench(tmp_path / "n1", GpuModel(effect_us=0, tau_ms=0))
    yield made
    made.close()


# ------------------------------------------------------------------------------------------------ time and physics


def test_a_limit_comes_into_force_later_and_the_trace_has_that_instant(bench: Bench) -> None:
    bench.node.poke("requested_mw", 400_000, gpu=0)
    assert bench.advance(0.029).effective_mw == 700_000
    assert bench.gpu().requested_mw == 400_000
    assert bench.limit_lines() == []
    assert bench.advance(5.0).effective_mw == 400_000  # nobody looked for five seconds
    assert bench.limit_lines() == [(bench.start_ns + 30_000_000, 400_000, 400_000)]


def test_limits_come_into_force_in_the_order_of_the_sets(bench: Bench) -> None:
    bench.node.poke("requested_mw", 300_000, gpu=0)
    bench.advance(0.01)
    bench.node.poke("effect_us", 0, gpu=0)
    bench.node.poke("requested_mw", 600_000, gpu=0)
    assert bench.advance(1.0).effective_mw == 600_000
    due_ns = bench.start_ns + 30_000_000
    assert bench.limit_lines() == [(due_ns, 300_000, 300_000), (due_ns, 600_000, 600_000)]


def test_a_limit_that_changes_nothing_leaves_no_line(prompt_bench: Bench) -> None:
    prompt_bench.node.poke("requested_mw", 700_000, gpu=0)
    assert prompt_bench.limit_lines() == []


def test_late_readers_see_what_punctual_readers_see(bench: Bench, tmp_path: Path) -> None:
    """The state is advanced by whoever looks: looking often must not change anything."""
    late = _make_bench(tmp_path / "n2", GpuModel())
    try:
        start_mj = [each.gpu().energy_mj for each in (bench, late)]
        for each in (bench, late):
            each.begin_job(0)
            each.advance(1.0)
            each.node.poke("requested_mw", 350_000, gpu=0)
        for _ in range(99):
            bench.advance(0.01)
        punctual, unseen = bench.advance(0.01), late.advance(1.0)
        assert unseen.work_s == pytest.approx(punctual.work_s, rel=1e-9)
        assert unseen.energy_mj - start_mj[1] == pytest.approx(punctual.energy_mj - start_mj[0], abs=2)
        assert unseen.draw_mw == punctual.draw_mw
    finally:
        late.close()


def test_draw_relaxes_and_energy_is_its_integral(bench: Bench) -> None:
    bench.begin_job(0)
    bench.advance(10.0)
    assert bench.gpu().draw_mw == pytest.approx(700_000, abs=1)
    bench.node.poke("effect_us", 0)
    bench.node.poke("requested_mw", 400_000, gpu=0)
    before = bench.gpu()
    draws = [before.draw_mw]
    draws += [bench.advance(0.001).draw_mw for _ in range(300)]
    assert draws[60] == pytest.approx(400_000 + 300_000 * 0.36788, rel=1e-4)
    assert draws == sorted(draws, reverse=True)
    area_mj = sum((a + b) / 2 for a, b in pairwise(draws)) * 0.001
    assert bench.gpu().energy_mj - before.energy_mj == pytest.approx(area_mj, rel=1e-4)


@pytest.mark.parametrize("cap_w", [200, 250, 400, 600, 700])
def test_draw_and_work_follow_the_model(prompt_bench: Bench, cap_w: int) -> None:
    prompt_bench.begin_job(0)
    prompt_bench.node.poke("requested_mw", cap_w * 1000)
    before = prompt_bench.gpu()
    after = prompt_bench.advance(60.0)
    assert after.draw_mw == pytest.approx(WORKLOAD.draw_w(cap_w) * 1000, abs=1)
    assert after.work_s - before.work_s == pytest.approx(60 * WORKLOAD.relative_throughput(cap_w), rel=1e-6)
    assert after.energy_mj - before.energy_mj == pytest.approx(60 * after.draw_mw, rel=1e-6)
    idle = prompt_bench.gpu(1)
    assert (idle.draw_mw, idle.work_s) == (75_000, 0.0)


def test_nvml_says_what_a_busy_gpu_does(prompt_bench: Bench) -> None:
    prompt_bench.begin_job(0)
    with NvmlProcess(prompt_bench.node_dir) as nvml:
        nvml("globals().update(s=[N.nvmlGpmSampleAlloc() for _ in range(2)])")

        def activities() -> dict[int, float]:
            nvml("N.nvmlGpmSampleGet(h[0], s[0])")
            prompt_bench.advance(5.0)
            nvml("N.nvmlGpmSampleGet(h[0], s[1])")
            nvml("globals().update(m=N.c_nvmlGpmMetricsGet_t())")
            nvml("m.__setattr__('version', N.NVML_GPM_METRICS_GET_VERSION)")
            nvml("[setattr(m, k, v) for k, v in zip(('sample1', 'sample2', 'numMetrics'), (*s, 3))]")
            nvml("[setattr(m.metrics[i], 'metricId', k) for i, k in enumerate((2, 5, 10))]")
            nvml("N.nvmlGpmMetricsGet(m) and None")
            return dict(nvml("[(m.metrics[i].metricId, m.metrics[i].value) for i in range(3)]"))

        full = activities()
        full_clock = nvml("N.nvmlDeviceGetClockInfo(h[0], N.NVML_CLOCK_SM)")
        assert nvml("N.nvmlDeviceGetUtilizationRates(h[0]).gpu") == 100
        assert [p["pid"] for p in nvml("N.nvmlDeviceGetComputeRunningProcesses(h[0])")] == [os.getpid()]
        assert nvml("N.nvmlDeviceGetMemoryInfo(h[0]).used") > 10 << 30

        prompt_bench.node.poke("requested_mw", 400_000, gpu=0)
        prompt_bench.advance(0.25)
        average_w = 0.75 * 700 + 0.25 * 400  # of the last second
        assert nvml("N.nvmlDeviceGetPowerUsage(h[0])") == pytest.approx(average_w * 1000, rel=1e-4)
        assert nvml("N.nvmlDeviceGetFieldValues(h[0], [186])[0].value.uiVal") == pytest.approx(400_000, abs=1)
        capped = activities()
        clock = nvml("N.nvmlDeviceGetClockInfo(h[0], N.NVML_CLOCK_SM)")
        assert nvml("N.nvmlDeviceGetCurrentClocksEventReasons(h[0])") == 4
        loss = WORKLOAD.relative_throughput(400)
        # Throughput can be told from tensor activity and clock, and memory traffic follows it.
        assert capped[5] * clock / (full[5] * full_clock) == pytest.approx(loss, rel=2e-3)
        assert capped[10] / full[10] == pytest.approx(loss, rel=1e-3)
        assert capped[2] == pytest.approx(full[2])
        energy = nvml("N.nvmlDeviceGetTotalEnergyConsumption(h[0])")
        assert energy == pytest.approx(prompt_bench.gpu().energy_mj, abs=1)


def test_kernels_are_traced_with_the_limit_in_force(bench: Bench) -> None:
    job = bench.begin_job(0, 1)
    assert job.launch_kernel() == 2
    bench.node.poke("requested_mw", 300_000, gpu=0)
    job.launch_kernel()  # the limit is not in force yet
    bench.advance(0.03)
    job.launch_kernel()
    lines = read_trace(bench.node_dir)
    kernels = [line for line in lines if line.event == "kernel" and line.uuid == bench.uuids[0]]
    assert [line.effective_mw for line in kernels] == [700_000, 700_000, 300_000]
    assert {(line.job, line.pid) for line in kernels} == {(JOB, os.getpid())}
    assert lines[-3].event == "limit"  # written before the kernel that it governs


def test_a_job_that_shares_a_gpu_gets_half_of_it(prompt_bench: Bench) -> None:
    prompt_bench.begin_job(0)
    code = (
        "import sys, pathlib\n"
        "from slurm_pfi.sim.standin import NodeGpus\n"
        "from slurm_pfi.sim.physics import Workload\n"
        "NodeGpus(pathlib.Path(sys.argv[1]), '8.0').register(sys.argv[2], Workload(0.9, 400.0, 80.0))\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(prompt_bench.node_dir), prompt_bench.uuids[0]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert prompt_bench.gpu().job == "8.0"
        before = prompt_bench.gpu().work_s
        assert prompt_bench.advance(10.0).work_s - before == pytest.approx(5.0)
        other.kill()
    assert prompt_bench.advance(0.1).job == JOB  # the dead process no longer counts


# ------------------------------------------------------------------------------------------------ who holds a GPU


def test_a_limit_outlives_its_setter_with_persistence(bench: Bench) -> None:
    with NvmlProcess(bench.node_dir) as client:
        client("N.nvmlDeviceSetPowerManagementLimit(h[0], 400_000)")
        client.kill()
    bench.advance(1.0)
    with NvmlProcess(bench.node_dir) as client:
        assert client("N.nvmlDeviceGetEnforcedPowerLimit(h[0])") == 400_000


@pytest.mark.parametrize("leaves", ["shutdown", "killed"])
def test_without_persistence_the_last_client_takes_the_limit_along(prompt_bench: Bench, leaves: str) -> None:
    with NvmlProcess(prompt_bench.node_dir) as last:
        last("N.nvmlDeviceSetPersistenceMode(h[0], 0)")
        with NvmlProcess(prompt_bench.node_dir) as first:
            first("N.nvmlDeviceSetPowerManagementLimit(h[0], 400_000)")
            first("N.nvmlShutdown()")
        prompt_bench.advance(1.0)
        assert last("N.nvmlDeviceGetPowerManagementLimit(h[0])") == 400_000  # one client is still there
        if leaves == "shutdown":
            last("N.nvmlShutdown()")
        else:
            last.kill()  # and nobody looks until the next client comes
    with NvmlProcess(prompt_bench.node_dir) as later:
        assert later("N.nvmlDeviceGetPowerManagementLimit(h[0])") == 700_000
    assert [line[1] for line in prompt_bench.limit_lines()] == [400_000, 700_000]
    assert read_trace(prompt_bench.node_dir)[-1].pid == 0


def test_without_persistence_a_job_keeps_the_limit_as_long_as_it_runs(prompt_bench: Bench) -> None:
    job = prompt_bench.begin_job(0)
    prompt_bench.node.poke("requested_mw", 400_000, gpu=0)
    prompt_bench.node.poke("persistence", 0, gpu=0)
    assert prompt_bench.advance(1.0).effective_mw == 400_000
    job.close()
    assert prompt_bench.gpu().effective_mw == 700_000


def test_a_reset_clears_limit_and_fault(prompt_bench: Bench) -> None:
    prompt_bench.node.poke("requested_mw", 400_000, gpu=0)
    prompt_bench.node.poke("sticky_code", 16, gpu=0)
    with NvmlProcess(prompt_bench.node_dir, init=False) as nvml:
        with pytest.raises(NvmlError):
            nvml("init()")
        prompt_bench.node.poke("reset", 1, gpu=0)
        assert nvml("init()") == 2
        assert nvml("N.nvmlDeviceGetPowerManagementLimit(h[0])") == 700_000


# ------------------------------------------------------------------------------------------------ many processes


def test_a_holder_of_the_lock_that_is_killed_blocks_nobody(bench: Bench) -> None:
    code = (
        "import ctypes, os, signal, sys\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "library.pfi_open.restype = ctypes.c_void_p\n"
        "library.pfi_hold_lock(ctypes.c_void_p(library.pfi_open(sys.argv[2].encode())))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(library_path()), str(bench.node_dir)], timeout=30, check=False
    )
    assert done.returncode == -9
    bench.node.poke("requested_mw", 400_000, gpu=0)
    assert bench.advance(1.0).effective_mw == 400_000


def test_writers_at_once_leave_an_ordered_trace(tmp_path: Path) -> None:
    node_dir = tmp_path / "n1"
    create_node(node_dir, gpus=2, model=GpuModel(effect_us=500))
    code = (
        "import pathlib, sys\n"
        "from testbed.gpus import Node\n"
        "with Node(pathlib.Path(sys.argv[1])) as node:\n"
        "    for n in range(300):\n"
        "        node.poke('requested_mw', int(sys.argv[2]) + n * 1000, gpu=n % 2)\n"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(node_dir), str(base)], cwd=Path(__file__).parent.parent
        )
        for base in (200_000, 300_000)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    wait_until(
        lambda: all(gpu.effective_mw == gpu.requested_mw for gpu in snapshot(node_dir)),
        "the last limits in force",
    )
    lines = [json.loads(line) for line in (node_dir / "trace.jsonl").read_text().splitlines()]
    assert {line["pid"] for line in lines} == {os.getpid(), *(writer.pid for writer in writers)}
    for gpu in snapshot(node_dir):
        own = [line for line in lines if line["uuid"] == gpu.uuid]
        assert [line["mono_ns"] for line in own] == sorted(line["mono_ns"] for line in own)
        assert own[-1]["effective_mw"] == gpu.effective_mw


@needs_root
def test_a_user_may_work_on_a_gpu_but_not_control_it() -> None:
    with tempfile.TemporaryDirectory(prefix="pfi-standin-") as folder:
        public = Path(folder)
        public.chmod(0o755)
        create_node(public / "n1", gpus=1)
        code = (
            "import os, pathlib, sys\n"
            "from slurm_pfi.sim.standin import NodeGpus, Workload\n"
            "from testbed.gpus import Node\n"
            "node_dir = pathlib.Path(sys.argv[1])\n"
            "os.seteuid(65534)\n"
            "with Node(node_dir) as node:\n"
            "    job = NodeGpus(node_dir, '9.0')\n"
            "    job.register(node.snapshot()[0].uuid, Workload(1.0, 500.0, 80.0))\n"
            "    assert node.snapshot()[0].job == '9.0' and job.launch_kernel() == 1\n"
            "    for attempt in (lambda: node.poke('requested_mw', 300_000), node.clear_faults,\n"
            "                    lambda: node.fault('*')):\n"
            "        try:\n"
            "            attempt()\n"
            "        except PermissionError:\n"
            "            continue\n"
            "        sys.exit('a user changed the node')\n"
        )
        command = [sys.executable, "-c", code, str(public / "n1")]
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, timeout=30, check=False)
        assert done.returncode == 0
        wait_until(lambda: snapshot(public / "n1")[0].job == "", "the dead job is gone")


def test_wrong_use_is_refused(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        create_node(bench.node_dir)
    with pytest.raises(OSError, match="no GPU GPU-none"):
        bench.node.poke("requested_mw", 1, gpu="GPU-none")
    with pytest.raises(OSError, match="poke colour=1"):
        bench.node.poke("colour", 1)
    with pytest.raises(OSError, match="cannot open"):
        Node(tmp_path / "none")
    with pytest.raises(ValueError, match="1 to 16"):
        create_node(tmp_path / "n3", gpus=17)
