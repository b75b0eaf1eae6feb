"""The stand-in's contract, met through the real pynvml in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.gpus import Device, FaultKind, GpuModel, Node, create_node, nvml_environment, planted, read_trace
from tests.standin_client import NvmlError, NvmlProcess, wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")

INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION = 2, 3, 4
NOT_FOUND, DRIVER_NOT_LOADED, TIMEOUT, GPU_IS_LOST = 6, 9, 10, 15


@pytest.fixture
def node_dir(tmp_path: Path) -> Path:
    return tmp_path / "n1"


@pytest.fixture
def devices(node_dir: Path) -> tuple[Device, ...]:
    return create_node(node_dir, gpus=4, scrambled=True, model=GpuModel(effect_us=0))


@pytest.fixture
def nvml(node_dir: Path, devices: tuple[Device, ...]) -> Iterator[NvmlProcess]:
    with NvmlProcess(node_dir) as process:
        yield process


def test_position_minor_and_index_all_differ_and_lead_to_one_gpu(
    nvml: NvmlProcess, devices: tuple[Device, ...]
) -> None:
    for device in devices:
        assert len({device.position, device.minor, device.index}) == 3
        assert nvml(f"N.nvmlDeviceGetUUID(h[{device.index}])") == device.uuid
        assert nvml(f"N.nvmlDeviceGetMinorNumber(h[{device.index}])") == device.minor
        assert nvml(f"N.nvmlDeviceGetPciInfo(h[{device.index}]).busId") == device.pci
        assert nvml(f"N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByUUID({device.uuid!r}))") == device.index
        assert (
            nvml(f"N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByPciBusId({device.pci.encode()!r}))")
            == device.index
        )
    by_index = sorted(devices, key=lambda device: device.index)
    assert [device.pci for device in by_index] == sorted(device.pci for device in devices)


def test_what_an_idle_gpu_says(nvml: NvmlProcess) -> None:
    assert nvml("N.nvmlSystemGetDriverVersion()") == "580.126.09"
    assert nvml("N.nvmlSystemGetNVMLVersion()") == "13.580.126.09"
    assert nvml("N.nvmlDeviceGetName(h[0])") == "NVIDIA H200"
    assert nvml("N.nvmlDeviceGetPowerManagementLimitConstraints(h[0])") == [200_000, 700_000]
    assert nvml("N.nvmlDeviceGetPowerManagementDefaultLimit(h[0])") == 700_000
    assert nvml("N.nvmlDeviceGetPowerManagementLimit(h[0])") == 700_000
    assert nvml("N.nvmlDeviceGetEnforcedPowerLimit(h[0])") == 700_000
    assert nvml("N.nvmlDeviceGetPersistenceMode(h[0])") == 1
    assert nvml("N.nvmlDeviceGetPowerUsage(h[0])") == pytest.approx(75_000, abs=1)
    assert nvml("N.nvmlDeviceGetComputeRunningProcesses(h[0])") == []
    assert nvml("N.nvmlDeviceGetUtilizationRates(h[0]).gpu") == 0
    assert nvml("N.nvmlDeviceGetCurrentClocksEventReasons(h[0])") == 1
    assert nvml("N.nvmlDeviceGetMigMode(h[0])") == [0, 0]
    assert nvml("N.nvmlDeviceGetMemoryInfo(h[0]).used") == 0
    assert nvml("N.nvmlDeviceGetCudaComputeCapability(h[0])") == [9, 0]
    assert nvml("N.nvmlDeviceGetTemperature(h[0], N.NVML_TEMPERATURE_GPU)") in range(26, 90)
    assert nvml("N.nvmlGpmQueryDeviceSupport(h[0]).isSupportedDevice") == 1


def test_field_values_carry_a_code_each(nvml: NvmlProcess) -> None:
    fields = [185, 186, 187, 188, 189, 190, 192, 1]
    values = nvml(f"[(v.nvmlReturn, v.value.uiVal) for v in N.nvmlDeviceGetFieldValues(h[0], {fields})]")
    assert [code for code, _ in values] == [0] * 7 + [NOT_SUPPORTED]
    assert [value for _, value in values[2:7]] == [200_000, 700_000, 700_000, 700_000, 700_000]
    assert [value for _, value in values[:2]] == pytest.approx([75_000, 75_000], abs=1)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("N.nvmlDeviceGetHandleByIndex(4)", INVALID_ARGUMENT),
        ("N.nvmlDeviceGetHandleByUUID('GPU-none')", NOT_FOUND),
        ("N.nvmlDeviceGetPowerUsage(N.c_nvmlDevice_t())", INVALID_ARGUMENT),
        (
            "N.nvmlDeviceSetPowerManagementLimit(h[0], 199_999)",
            INVALID_ARGUMENT,
        ),
        (
            "N.nvmlDeviceSetPowerManagementLimit(h[0], 700_001)",
            INVALID_ARGUMENT,
        ),
    ],
)
def test_wrong_use_has_its_code(nvml: NvmlProcess, call: str, code: int) -> None:
    with pytest.raises(NvmlError) as error:
        nvml(call)
    assert error.value.code == code


def test_a_set_is_read_back_by_another_process_and_traced(
    nvml: NvmlProcess, node_dir: Path, devices: tuple[Device, ...]
) -> None:
    uuid = min(devices, key=lambda device: device.index).uuid
    nvml("N.nvmlDeviceSetPowerManagementLimit(h[0], 400_000)")
    with NvmlProcess(node_dir) as other:
        assert other("N.nvmlDeviceGetPowerManagementLimit(h[0])") == 400_000
        assert other("N.nvmlDeviceGetEnforcedPowerLimit(h[0])") == 400_000
        other("N.nvmlDeviceSetPowerManagementLimit_v2(h[0], N.NVML_POWER_SCOPE_GPU, 350_000)")
        pids = [nvml.pid, other.pid]
    lines = [line for line in read_trace(node_dir) if line.uuid == uuid]
    assert [line.event for line in lines] == ["limit"] * 3
    assert [(line.effective_mw, line.requested_mw) for line in lines[1:]] == [
        (400_000, 400_000),
        (350_000, 350_000),
    ]
    assert [line.pid for line in lines[1:]] == pids
    assert len(read_trace(node_dir)) == 4 + 2


@needs_root
def test_only_root_sets_whatever_the_environment_says(node_dir: Path, devices: tuple[Device, ...]) -> None:
    with NvmlProcess(node_dir, env={"PFI_STANDIN_EUID": "1000"}) as user:
        for call in ("SetPowerManagementLimit(h[0], 400_000)", "SetPersistenceMode(h[0], 0)"):
            with pytest.raises(NvmlError) as error:
                user(f"N.nvmlDevice{call}")
            assert error.value.code == NO_PERMISSION
        assert user("N.nvmlDeviceGetPowerManagementLimit(h[0])") == 700_000
    with NvmlProcess(node_dir, env={"PFI_STANDIN_EUID": "0"}) as root:
        root("os.seteuid(65534)")
        with pytest.raises(NvmlError) as error:
            root("N.nvmlDeviceSetPowerManagementLimit(h[0], 400_000)")
        assert error.value.code == NO_PERMISSION


def test_the_lowest_of_requested_and_bmc_limit_rules(nvml: NvmlProcess, node_dir: Path) -> None:
    with Node(node_dir) as node:
        node.poke("bmc_mw", 300_000, gpu=0)
        assert nvml("N.nvmlDeviceGetPowerManagementLimit(h[0])") == 700_000
        assert nvml("N.nvmlDeviceGetEnforcedPowerLimit(h[0])") == 300_000
        node.poke("requested_mw", 250_000, gpu=0)
        assert nvml("N.nvmlDeviceGetEnforcedPowerLimit(h[0])") == 250_000
        node.poke("bmc_mw", 0, gpu=0)
        assert nvml("N.nvmlDeviceGetEnforcedPowerLimit(h[0])") == 250_000
    assert {line.pid for line in read_trace(node_dir)[4:]} == {os.getpid()}


def test_planted_faults(nvml: NvmlProcess, node_dir: Path) -> None:
    setter = "nvmlDeviceSetPowerManagementLimit"

    def limit(gpu: int) -> object:
        return nvml(f"N.nvmlDeviceGetPowerManagementLimit(h[{gpu}])")

    with planted(node_dir) as node:
        node.fault(setter, code=TIMEOUT, gpu=1, after=1, count=1)
        nvml(f"N.{setter}(h[0], 500_000)")
        nvml(f"N.{setter}(h[1], 500_000)")
        with pytest.raises(NvmlError) as error:
            nvml(f"N.{setter}(h[1], 400_000)")
        assert error.value.code == TIMEOUT
        assert limit(1) == 500_000
        nvml(f"N.{setter}(h[1], 400_000)")
        assert node.faults_fired() == 1

        node.fault(setter, FaultKind.SILENT, count=1)
        nvml(f"N.{setter}(h[2], 500_000)")
        assert limit(2) == 700_000

        node.fault(setter, FaultKind.APPLIED, code=TIMEOUT, count=1)
        with pytest.raises(NvmlError):
            nvml(f"N.{setter}(h[2], 500_000)")
        assert limit(2) == 500_000

        node.poke("sticky_code", GPU_IS_LOST, gpu=3)
        with pytest.raises(NvmlError) as error:
            limit(3)
        assert error.value.code == GPU_IS_LOST
        node.poke("hidden", 1, gpu=0)
        assert nvml("N.nvmlDeviceGetCount()") == 3
        node.poke("granularity_mw", 5_000, gpu=1)
        nvml(f"N.{setter}(h[1], 404_999)")
        assert limit(1) == 400_000
    assert limit(3) == 700_000
    assert nvml("N.nvmlDeviceGetCount()") == 4


def test_a_slow_call_holds_up_nobody_else(nvml: NvmlProcess, node_dir: Path) -> None:
    with planted(node_dir) as node, NvmlProcess(node_dir, init=False) as slow:
        slow("init()")
        node.fault("nvmlDeviceGetPowerUsage", FaultKind.DELAY, count=1, delay_s=600)
        assert slow._process.stdin is not None
        slow._process.stdin.write("N.nvmlDeviceGetPowerUsage(h[0])\n")
        slow._process.stdin.flush()
        wait_until(lambda: node.faults_fired() > 0, "the slow call has begun")
        assert nvml("N.nvmlDeviceGetPowerUsage(h[0])") > 0
        slow.kill()


@pytest.mark.parametrize("case", ["no variable", "no state", "garbage", "truncated", "init code"])
def test_no_usable_state_is_a_driver_that_is_not_loaded(node_dir: Path, case: str) -> None:
    create_node(node_dir, gpus=1)
    env = {}
    if case == "no variable":
        env["PFI_STANDIN_DIR"] = "/nonexistent"
    elif case == "no state":
        (node_dir / "state").unlink()
    elif case == "garbage":
        (node_dir / "state").write_bytes(b"\0" * (node_dir / "state").stat().st_size)
    elif case == "truncated":
        os.truncate(node_dir / "state", 4096)
    else:
        with Node(node_dir) as node:
            node.poke("init_code", DRIVER_NOT_LOADED)
    with NvmlProcess(node_dir, init=False, env=env) as process:
        with pytest.raises(NvmlError) as error:
            process("init()")
        assert error.value.code == DRIVER_NOT_LOADED


def test_without_the_directory_variable_there_is_no_driver(
    node_dir: Path, devices: tuple[Device, ...]
) -> None:
    code = "import pynvml\ntry: pynvml.nvmlInit()\nexcept pynvml.NVMLError as error: print(error.value)"
    env = {key: value for key, value in nvml_environment(node_dir).items() if key != "PFI_STANDIN_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == str(DRIVER_NOT_LOADED)


def test_a_forked_child_must_initialise_anew(node_dir: Path, devices: tuple[Device, ...]) -> None:
    code = """
import os, pynvml as N
N.nvmlInit()
child = os.fork()
if child == 0:
    try:
        N.nvmlDeviceGetCount()
    except N.NVMLError_Uninitialized:
        N.nvmlInit()
        os._exit(N.nvmlDeviceGetCount())
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    env = nvml_environment(node_dir)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "4"
