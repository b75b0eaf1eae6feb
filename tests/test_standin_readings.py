"""Faults of what a GPU says, its sensor, its slices and its events, met through the real pynvml."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pfi.sim.standin import NodeGpus
from testbed.gpu_faults import Code, Reason, plant
from testbed.gpus import Node
from tests.standin_calls import (
    DEFAULT_MW,
    ENERGY,
    ENFORCED,
    FIELDS,
    PIDS,
    POWER,
    REASONS,
    SET,
    advance,
    code_of,
    job_on_first_gpu,
    still_node,
)
from tests.standin_client import NvmlError, NvmlProcess


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with still_node(tmp_path / "n1") as opened:
        yield opened


@pytest.fixture
def nvml(node: Node) -> Iterator[NvmlProcess]:
    with NvmlProcess(node.node_dir) as process:
        yield process


@pytest.fixture
def job(node: Node) -> Iterator[NodeGpus]:
    with job_on_first_gpu(node) as job:
        yield job


# ------------------------------------------------------------------------------------------------ readings


def test_31_32_33_garbage_comes_with_success(node: Node, nvml: NvmlProcess) -> None:
    advance(node, 100)
    plant(node, 31, gpu=1)
    assert nvml(POWER.format(1)) == 3_000_000
    assert nvml(FIELDS.format(1, [185, 186, 190])) == [[0, 3_000_000], [0, 3_000_000], [0, DEFAULT_MW]]
    before_mj = nvml(ENERGY.format(1))
    plant(node, 32, gpu=1)
    assert 0 < nvml(ENERGY.format(1)) < before_mj
    plant(node, 32, gpu=2, variant="missing")
    assert code_of(nvml, ENERGY.format(2)) == Code.NOT_SUPPORTED
    codes = [code for code, _ in nvml(FIELDS.format(2, [83, 191, 186]))]
    assert codes == [Code.NOT_SUPPORTED, Code.NOT_SUPPORTED, 0]
    plant(node, 33, gpu=3)
    assert nvml("N.nvmlDeviceGetUtilizationRates(h[3]).gpu") == 100
    assert nvml(PIDS.format(3)) == []


def test_34_pids_that_say_nothing(node: Node, nvml: NvmlProcess, job: NodeGpus) -> None:
    assert nvml(PIDS.format(0)) == [os.getpid()]
    plant(node, 34, gpu=0, variant="zero")
    assert nvml(PIDS.format(0)) == [0]
    plant(node, 34, gpu=0, variant="foreign")
    (foreign,) = nvml(PIDS.format(0))
    assert not Path(f"/proc/{foreign}").exists()
    plant(node, 34, gpu=1, variant="idle")
    assert nvml(PIDS.format(1)) == [1]
    assert nvml("N.nvmlDeviceGetUtilizationRates(h[1]).gpu") == 0
    assert nvml("N.nvmlDeviceGetMemoryInfo(h[1]).used") > 0


def test_35_mig_cuts_a_board_whose_power_stays_one(node: Node, nvml: NvmlProcess, job: NodeGpus) -> None:
    assert nvml("N.nvmlDeviceGetMigMode(h[0])") == [0, 0]
    assert code_of(nvml, "N.nvmlDeviceGetMigDeviceHandleByIndex(h[0], 0)") == 6
    plant(node, 35, gpu=0)
    assert nvml("N.nvmlDeviceGetMigMode(h[0])") == [1, 1]
    assert nvml("N.nvmlDeviceGetMaxMigDeviceCount(h[0])") == 7
    nvml("globals().update(m=[N.nvmlDeviceGetMigDeviceHandleByIndex(h[0], i) for i in range(2)])")
    uuids = nvml("[N.nvmlDeviceGetUUID(each) for each in m]")
    assert len({*uuids, node.snapshot()[0].uuid}) == 3
    assert all(each.startswith("MIG-") for each in uuids)
    for number, each in enumerate(uuids):
        assert nvml(f"N.nvmlDeviceGetUUID(N.nvmlDeviceGetHandleByUUID({each!r}))") == each
        assert nvml(f"N.nvmlDeviceGetIndex(m[{number}])") == number
        assert nvml(f"N.nvmlDeviceIsMigDeviceHandle(m[{number}]).value") == 1
    board = "N.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m[1])"
    assert nvml(f"N.nvmlDeviceGetUUID({board})") == node.snapshot()[0].uuid
    for call in (
        "GetPowerUsage(m[0])",
        "SetPowerManagementLimit(m[0], 400_000)",
        "GetEnforcedPowerLimit(m[0])",
    ):
        assert code_of(nvml, f"N.nvmlDevice{call}") == Code.NOT_SUPPORTED
    assert code_of(nvml, "N.nvmlDeviceGetUtilizationRates(h[0])") == Code.NOT_SUPPORTED
    assert nvml(POWER.format(0)) > 0
    assert nvml(PIDS.format(0)) == [os.getpid()]
    assert nvml("[len(N.nvmlDeviceGetComputeRunningProcesses(each)) for each in m]") == [1, 0]
    plant(node, 35, gpu=0, variant="off")
    assert code_of(nvml, "N.nvmlDeviceGetUUID(m[0])") == Code.INVALID_ARGUMENT


def test_37_a_slowdown_has_its_reasons(node: Node, nvml: NvmlProcess, job: NodeGpus) -> None:
    advance(node, 1)
    full_mhz = nvml("N.nvmlDeviceGetClockInfo(h[0], N.NVML_CLOCK_SM)")
    for variant, reason in (
        ("thermal", Reason.SW_THERMAL),
        ("hardware thermal", Reason.HW_THERMAL),
        ("power brake", Reason.HW_POWER_BRAKE),
    ):
        plant(node, 37, gpu=0, variant=variant)
        assert nvml(REASONS.format(0)) == reason
    assert nvml("N.nvmlDeviceGetClockInfo(h[0], N.NVML_CLOCK_SM)") < 0.6 * full_mhz


def test_38_the_draw_stays_above_a_cap_at_the_clock_floor(
    node: Node, nvml: NvmlProcess, job: NodeGpus
) -> None:
    nvml(SET.format(0, 250_000))
    advance(node, 2)
    assert nvml(POWER.format(0)) == pytest.approx(250_000, rel=1e-3)
    plant(node, 38, gpu=0)
    advance(node, 2)
    assert nvml(ENFORCED.format(0)) == 250_000
    assert nvml(POWER.format(0)) > 300_000


def test_39_an_entry_has_an_error_in_a_call_that_succeeds(node: Node, nvml: NvmlProcess) -> None:
    plant(node, 39, gpu=1, variant="instant")
    (average, instant) = nvml(FIELDS.format(1, [185, 186]))
    assert (average[0], instant[0]) == (0, Code.NOT_SUPPORTED)
    plant(node, 39, gpu=1)
    assert [code for code, _ in nvml(FIELDS.format(1, [185, 190]))] == [Code.NOT_SUPPORTED] * 2
    assert nvml(FIELDS.format(0, [190])) == [[0, DEFAULT_MW]]


def test_40_gpm_is_unsupported_or_its_window_too_short(node: Node, nvml: NvmlProcess, job: NodeGpus) -> None:
    nvml("globals().update(s=[N.nvmlGpmSampleAlloc() for _ in range(2)])")

    def measure(apart_s: float) -> float:
        nvml("N.nvmlGpmSampleGet(h[0], s[0])")
        advance(node, apart_s)
        nvml("N.nvmlGpmSampleGet(h[0], s[1])")
        nvml("globals().update(m=N.c_nvmlGpmMetricsGet_t())")
        nvml("m.__setattr__('version', N.NVML_GPM_METRICS_GET_VERSION)")
        nvml("[setattr(m, k, v) for k, v in zip(('sample1', 'sample2', 'numMetrics'), (*s, 1))]")
        nvml("setattr(m.metrics[0], 'metricId', N.NVML_GPM_METRIC_SM_UTIL)")
        nvml("N.nvmlGpmMetricsGet(m) and None")
        return float(nvml("m.metrics[0].value"))

    assert measure(0.2) == pytest.approx(97)
    with pytest.raises(NvmlError) as error:
        measure(0.05)
    assert error.value.code == Code.INVALID_ARGUMENT
    plant(node, 40, gpu=0, variant="zeroes")
    assert measure(0.2) == 0
    plant(node, 40, gpu=0)
    assert nvml("N.nvmlGpmQueryDeviceSupport(h[0]).isSupportedDevice") == 0
    with pytest.raises(NvmlError) as error:
        measure(0.2)
    assert error.value.code == Code.NOT_SUPPORTED


# ------------------------------------------------------------------------------------------------ sensor, events


def test_a_coarse_sensor_reads_in_steps(node: Node, nvml: NvmlProcess, job: NodeGpus) -> None:
    nvml(SET.format(0, 333_000))
    advance(node, 2)
    node.poke("sensor_step_mw", 25_000, gpu=0)
    assert nvml(POWER.format(0)) == 325_000
    assert nvml(FIELDS.format(0, [185, 186])) == [[0, 325_000], [0, 325_000]]


def test_a_sensor_that_looks_a_quarter_of_the_time_misses_the_rest(
    node: Node, nvml: NvmlProcess, job: NodeGpus
) -> None:
    """Draw alternates within the sensor's period, and the sensor sees one half only; the energy counter sees all."""
    now_ns = node.snapshot()[0].mono_ns
    node.poke("advance_ns", 100_000_000 - now_ns % 100_000_000)
    node.poke("sensor_period_ms", 100, gpu=0)
    node.poke("sensor_window_ms", 25, gpu=0)
    before_mj = nvml(ENERGY.format(0))
    for _ in range(12):
        node.poke("requested_mw", 600_000, gpu=0)
        advance(node, 0.050)
        node.poke("requested_mw", 300_000, gpu=0)
        advance(node, 0.050)
    assert nvml(POWER.format(0)) == pytest.approx(300_000, rel=1e-3)
    advance(node, 0.010)
    assert nvml(FIELDS.format(0, [186]))[0][1] == pytest.approx(300_000, rel=1e-3)
    node.poke("requested_mw", 500_000, gpu=0)
    advance(node, 0.080)
    assert nvml(FIELDS.format(0, [186]))[0][1] == pytest.approx(300_000, rel=1e-3)  # of the period before
    mean_mw = (nvml(ENERGY.format(0)) - before_mj - 300_000 * 0.010 - 500_000 * 0.080) / 1.2
    assert mean_mw == pytest.approx(450_000, rel=1e-3)


def test_events_tell_of_an_xid(node: Node, nvml: NvmlProcess) -> None:
    wait = (
        "(lambda e: (N.nvmlDeviceGetIndex(e.device), e.eventType, e.eventData))(N.nvmlEventSetWait_v2(s, {}))"
    )
    plain = "(lambda e: (e.eventType, e.eventData))(N.nvmlEventSetWait_v2(s, {}))"
    assert nvml("N.nvmlDeviceGetSupportedEventTypes(h[0])") & 8
    node.poke("xid", 13, gpu=1)  # before anybody listens
    nvml("globals().update(s=N.nvmlEventSetCreate())")
    nvml("[N.nvmlDeviceRegisterEvents(each, N.nvmlEventTypeXidCriticalError, s) for each in h[:3]] and None")
    assert code_of(nvml, plain.format(0)) == Code.TIMEOUT
    nvml.send(wait.format(30_000))
    assert not nvml.has_answered(0.05)
    node.poke("xid", 31, gpu=3)  # not registered
    node.poke("xid", 43, gpu=2)
    assert nvml.receive() == [2, 8, 43]
    plant(node, 19, gpu=1)
    assert nvml(plain.format(1_000)) == [8, 79]
    assert code_of(nvml, plain.format(0)) == Code.TIMEOUT
    nvml("N.nvmlEventSetFree(s)")
