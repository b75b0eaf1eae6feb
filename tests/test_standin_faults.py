"""Faults of library, presence, limits and hanging calls, planted by number and met through the real pynvml."""

from __future__ import annotations

import ctypes
import errno
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pfi.sim.standin import NodeGpus
from testbed.gpu_faults import FAULTS, Code, library, plant
from testbed.gpus import GH200, FaultKind, Node, create_node, read_devices
from tests.standin_calls import (
    COUNT,
    DEFAULT_MW,
    ENERGY,
    ENFORCED,
    FIELDS,
    PIDS,
    POWER,
    REASONS,
    REQUESTED,
    SET,
    advance,
    code_of,
    job_on_first_gpu,
    still_node,
)
from tests.standin_client import NvmlDiedError, NvmlError, NvmlProcess, wait_until


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


# ------------------------------------------------------------------------------------------------ the table


def test_the_table_has_all_44_and_each_can_be_brought_about() -> None:
    assert sorted(FAULTS) == list(range(1, 45))
    for fault in FAULTS.values():
        assert fault.variants or fault.libraries or fault.by_test, fault


@pytest.mark.parametrize(
    ("number", "variant"),
    [(fault.number, variant) for fault in FAULTS.values() for variant in fault.variants],
)
def test_every_variant_is_planted_on_one_gpu_and_on_all(node: Node, number: int, variant: str) -> None:
    plant(node, number, gpu=1, variant=variant)
    node.clear_faults()
    plant(node, number, variant=variant)
    node.clear_faults()
    assert len(node.snapshot()) == 4


def test_clearing_leaves_a_healthy_node(node: Node) -> None:
    for number in (2, 4, 10, 20, 24, 26, 31, 33, 34, 39, 42):
        plant(node, number)
    node.clear_faults()
    with NvmlProcess(node.node_dir) as nvml:
        assert nvml(COUNT) == 4
        nvml(SET.format(1, 400_000))
        assert nvml(REQUESTED.format(1)) == 400_000
        assert nvml("N.nvmlDeviceGetUtilizationRates(h[1]).gpu") == 0
        assert nvml(PIDS.format(1)) == []
        assert nvml(POWER.format(1)) == pytest.approx(75_000, abs=1)


# ------------------------------------------------------------------------------------------------ library, driver


@pytest.mark.parametrize("variant", list(FAULTS[1].libraries))
def test_1_no_usable_library(node: Node, tmp_path: Path, variant: str) -> None:
    folder = library(1, tmp_path / "lib", variant=variant)
    with NvmlProcess(node.node_dir, init=False, env={"LD_LIBRARY_PATH": str(folder)}) as nvml:
        assert code_of(nvml, "init()") == Code.LIBRARY_NOT_FOUND


def test_1_only_a_whole_library_of_this_machine_loads(tmp_path: Path) -> None:
    """What ctypes says of each, so that the variants are the ones that their names say."""
    said = {}
    for variant in ("wrong architecture", "undefined symbol", "truncated"):
        path = library(1, tmp_path / variant, variant=variant) / "libnvidia-ml.so.1"
        with pytest.raises(OSError, match=r"libnvidia-ml") as error:
            ctypes.CDLL(str(path))
        said[variant] = str(error.value)
    assert "undefined symbol: pthread_mutexattr_setrobusX" in said["undefined symbol"]
    assert "too short" in said["truncated"]
    assert "undefined" not in said["wrong architecture"]


@pytest.mark.parametrize(("number", "code"), [(2, Code.DRIVER_NOT_LOADED), (3, Code.LIB_RM_VERSION_MISMATCH)])
def test_2_3_init_is_refused(node: Node, number: int, code: Code) -> None:
    plant(node, number)
    with NvmlProcess(node.node_dir, init=False) as nvml:
        assert code_of(nvml, "init()") == code


def test_3_a_running_client_is_told_too_or_only_the_next(node: Node, nvml: NvmlProcess) -> None:
    plant(node, 3, variant="next init")
    assert nvml(COUNT) == 4
    plant(node, 3, variant="running")
    assert code_of(nvml, COUNT) == Code.LIB_RM_VERSION_MISMATCH
    assert code_of(nvml, REQUESTED.format(2)) == Code.LIB_RM_VERSION_MISMATCH


def test_5_use_before_init(node: Node) -> None:
    with NvmlProcess(node.node_dir, init=False) as nvml:
        assert code_of(nvml, "N._LoadNvmlLibrary() or N.nvmlDeviceGetCount()") == Code.UNINITIALIZED


def test_25_init_hangs_until_it_is_released(node: Node) -> None:
    plant(node, 25)
    with NvmlProcess(node.node_dir, init=False) as nvml:
        nvml.send("init()")
        wait_until(lambda: node.faults_fired() == 1, "init has begun")
        assert not nvml.has_answered(0.05)
        node.clear_faults()
        assert nvml.receive() == 4


def test_26_the_library_crashes_inside_a_call_and_blocks_nobody(node: Node, nvml: NvmlProcess) -> None:
    plant(node, 26, gpu=1)
    with NvmlProcess(node.node_dir) as other:
        assert other(SET.format(0, 500_000)) is None
        with pytest.raises(NvmlDiedError) as died:
            other(SET.format(1, 400_000))
    assert died.value.exit_code == -signal.SIGSEGV
    assert nvml(REQUESTED.format(1)) == DEFAULT_MW
    assert code_of(nvml, SET.format(1, 400_000)) is None  # it fired once


@pytest.mark.parametrize(
    ("variant", "lacking", "working"),
    [
        ("field values", FIELDS.format(0, [186]), POWER.format(0)),
        ("power usage", POWER.format(0), ENERGY.format(0)),
        ("event reasons", REASONS.format(0), "N.nvmlDeviceGetCurrentClocksThrottleReasons(h[0])"),
        ("GPM", "N.nvmlGpmQueryDeviceSupport(h[0])", POWER.format(0)),
        ("setter", SET.format(0, 400_000), REQUESTED.format(0)),
    ],
)
def test_36_an_older_library_lacks_a_function(
    node: Node, tmp_path: Path, variant: str, lacking: str, working: str
) -> None:
    folder = library(36, tmp_path / "lib", variant=variant)
    with NvmlProcess(node.node_dir, env={"LD_LIBRARY_PATH": str(folder)}) as nvml:
        assert code_of(nvml, lacking) == Code.FUNCTION_NOT_FOUND
        assert code_of(nvml, working) is None


# ------------------------------------------------------------------------------------------------ a device that is gone


@pytest.mark.parametrize(
    ("number", "code"), [(4, Code.UNKNOWN), (19, Code.GPU_IS_LOST), (21, Code.RESET_REQUIRED)]
)
def test_4_19_21_every_call_on_the_device_has_one_answer(
    node: Node, nvml: NvmlProcess, number: int, code: Code
) -> None:
    plant(node, number, gpu=2)
    for call in (SET.format(2, 400_000), REQUESTED.format(2), POWER.format(2), FIELDS.format(2, [186])):
        assert code_of(nvml, call) == code
    assert code_of(nvml, "N.nvmlDeviceGetHandleByIndex(2)") == code
    assert nvml(COUNT) == 4
    assert code_of(nvml, SET.format(1, 400_000)) is None


def test_20_the_count_drops(node: Node, nvml: NvmlProcess) -> None:
    plant(node, 20, gpu=1)
    assert nvml(COUNT) == 3
    assert code_of(nvml, REQUESTED.format(1)) == Code.GPU_IS_LOST
    uuids = [state.uuid for state in node.snapshot()]
    assert nvml("N.nvmlDeviceGetUUID(N.nvmlDeviceGetHandleByIndex(1))") == uuids[2]


def test_22_indices_shift_at_the_next_init_only(node: Node, nvml: NvmlProcess) -> None:
    everyone = "[N.nvmlDeviceGetUUID(N.nvmlDeviceGetHandleByIndex(i)) for i in range(4)]"
    uuids = [state.uuid for state in node.snapshot()]
    plant(node, 22)
    assert nvml(everyone) == uuids
    with NvmlProcess(node.node_dir) as later:
        assert later(everyone) == [uuids[3], *uuids[:3]]
        assert later("[N.nvmlDeviceGetIndex(each) for each in h]") == [0, 1, 2, 3]
        later(SET.format(0, 400_000))
    assert nvml(REQUESTED.format(3)) == 400_000


def test_23_device_files_lead_to_other_gpus(node: Node, nvml: NvmlProcess) -> None:
    plant(node, 23)
    minors = {
        nvml(f"N.nvmlDeviceGetUUID(h[{i}])"): nvml(f"N.nvmlDeviceGetMinorNumber(h[{i}])") for i in range(4)
    }
    for device in read_devices(node.node_dir):
        assert device.minor == device.position != device.index
        assert minors[device.uuid] == device.minor


def test_30_a_replaced_gpu_has_another_uuid_and_its_old_handle_is_lost(node: Node, nvml: NvmlProcess) -> None:
    nvml(SET.format(2, 400_000))
    old = node.snapshot()[2].uuid
    plant(node, 30, gpu=2)
    new = node.snapshot()[2].uuid
    assert new != old
    assert code_of(nvml, REQUESTED.format(2)) == Code.GPU_IS_LOST
    with NvmlProcess(node.node_dir) as later:
        assert later("N.nvmlDeviceGetUUID(h[2])") == new
        assert later(REQUESTED.format(2)) == DEFAULT_MW
        assert code_of(later, f"N.nvmlDeviceGetHandleByUUID({old!r})") == 6
    assert new in [device.uuid for device in read_devices(node.node_dir)]


def test_41_an_open_client_blocks_reset_and_mig(node: Node) -> None:
    with NvmlProcess(node.node_dir) as nvml:
        nvml(SET.format(1, 400_000))
        with pytest.raises(OSError, match="reset GPU 1") as refused:
            node.reset(1)
        assert refused.value.errno == errno.EBUSY
        with pytest.raises(OSError, match="MIG on GPU 1") as refused:
            node.set_mig(1, 2)
        assert refused.value.errno == errno.EBUSY
        assert nvml(REQUESTED.format(1)) == 400_000
        nvml("N.nvmlShutdown()")
        node.reset(1)
        assert nvml("init()") == 4
        assert nvml(REQUESTED.format(1)) == DEFAULT_MW
        nvml.kill()
        node.set_mig(1, 2)  # a dead client holds nothing


def test_41_a_job_blocks_its_gpu_only(node: Node, job: NodeGpus) -> None:
    node.reset(1)
    with pytest.raises(OSError, match="reset GPU 0") as error:
        node.reset(0)
    assert error.value.errno == errno.EBUSY
    job.close()
    node.reset(0)


# ------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize(
    ("number", "code"), [(6, Code.NO_PERMISSION), (7, Code.NOT_SUPPORTED), (42, Code.OF_A_LATER_DRIVER)]
)
def test_6_7_42_the_set_is_refused(node: Node, nvml: NvmlProcess, number: int, code: Code) -> None:
    plant(node, number, gpu=1)
    assert code_of(nvml, SET.format(1, 400_000)) == code
    assert nvml(REQUESTED.format(1)) == DEFAULT_MW
    assert code_of(nvml, SET.format(0, 400_000)) is None


def test_42_a_code_without_a_name_is_a_plain_error(node: Node, nvml: NvmlProcess) -> None:
    plant(node, 42, gpu=1)
    with pytest.raises(NvmlError) as error:
        nvml(SET.format(1, 400_000))
    assert (error.value.name, error.value.code) == ("NVMLError", 12345)


def test_8_the_range_shrinks(node: Node, nvml: NvmlProcess) -> None:
    plant(node, 8, gpu=1)
    plant(node, 8, gpu=2, variant="minimum")
    assert nvml("N.nvmlDeviceGetPowerManagementLimitConstraints(h[1])") == [200_000, 500_000]
    assert code_of(nvml, SET.format(1, 600_000)) == Code.INVALID_ARGUMENT
    assert code_of(nvml, SET.format(2, 300_000)) == Code.INVALID_ARGUMENT
    assert code_of(nvml, SET.format(1, 500_000)) is None


def test_9_the_second_setter_of_the_binding_hides_the_refusal(node: Node, nvml: NvmlProcess) -> None:
    plant(node, 9, gpu=1)
    call = "N.nvmlDeviceSetPowerManagementLimit_v2(h[1], N.NVML_POWER_SCOPE_GPU, 400_000)"
    assert code_of(nvml, call) is None
    assert node.faults_fired() == 1
    assert nvml(REQUESTED.format(1)) == DEFAULT_MW


def test_10_11_12_13_what_became_of_a_set(node: Node, nvml: NvmlProcess) -> None:
    for gpu, number in enumerate((10, 11, 12, 13)):
        plant(node, number, gpu=gpu)
    codes = [code_of(nvml, SET.format(gpu, 404_999)) for gpu in range(4)]
    assert codes == [None, Code.TIMEOUT, None, None]
    assert [nvml(REQUESTED.format(gpu)) for gpu in range(4)] == [DEFAULT_MW, 404_999, 400_000, 404_999]
    assert [nvml(ENFORCED.format(gpu)) for gpu in range(4)] == [DEFAULT_MW, 404_999, 400_000, DEFAULT_MW]
    advance(node, 2.0)
    assert nvml(ENFORCED.format(3)) == 404_999


def test_11_a_set_is_applied_and_the_answer_does_not_come(node: Node, nvml: NvmlProcess) -> None:
    plant(node, 11, gpu=1, variant="hangs")
    with NvmlProcess(node.node_dir) as stuck:
        stuck.send(SET.format(1, 400_000))
        wait_until(lambda: node.faults_fired() == 1, "the set has begun")
        wait_until(lambda: bool(nvml(REQUESTED.format(1)) == 400_000), "it is applied")
        assert not stuck.has_answered(0.05)
        node.clear_faults()
        assert stuck.receive() is None


def test_7_a_device_without_power_management(node: Node, nvml: NvmlProcess) -> None:
    plant(node, 7, gpu=1, variant="no power management")
    for call in (SET.format(1, 400_000), REQUESTED.format(1), ENFORCED.format(1)):
        assert code_of(nvml, call) == Code.NOT_SUPPORTED
    assert nvml(POWER.format(1)) > 0


def test_a_value_that_does_not_fit_is_all_ones(node: Node, nvml: NvmlProcess) -> None:
    for function in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption"):
        node.fault(function, FaultKind.VALUE, gpu=1, value=-1)
    assert nvml(POWER.format(1)) == 2**32 - 1
    assert nvml(ENERGY.format(1)) == 2**64 - 1


def test_spent_faults_make_room_and_still_count(node: Node, nvml: NvmlProcess) -> None:
    for number in range(200):
        node.fault("nvmlDeviceGetPowerUsage", code=Code.UNKNOWN, gpu=1, count=1)
        assert code_of(nvml, POWER.format(1)) == Code.UNKNOWN, number
    assert node.faults_fired() == 200
    with pytest.raises(OSError, match="plant a fault"):
        for _ in range(65):
            node.fault("nvmlDeviceGetPowerUsage")


def test_14_15_16_others_limit_too(node: Node, nvml: NvmlProcess) -> None:
    nvml(SET.format(1, 400_000))
    plant(node, 14, gpu=1)
    assert (nvml(REQUESTED.format(1)), nvml(ENFORCED.format(1))) == (400_000, 300_000)
    plant(node, 15, gpu=1)
    assert nvml(ENFORCED.format(1)) == 400_000
    plant(node, 16, gpu=1)
    assert (nvml(REQUESTED.format(1)), nvml(ENFORCED.format(1))) == (650_000, 650_000)


@pytest.mark.parametrize("number", [17, 18])
def test_17_18_back_to_the_default(node: Node, nvml: NvmlProcess, number: int) -> None:
    nvml(SET.format(1, 400_000))
    plant(node, number, gpu=1)
    assert (nvml(REQUESTED.format(1)), nvml(ENFORCED.format(1))) == (DEFAULT_MW, DEFAULT_MW)
    assert nvml("[N.nvmlDeviceGetPersistenceMode(each) for each in h]") == [1, int(number == 18), 1, 1]


def test_43_the_limit_of_the_module_binds_the_gpu(tmp_path: Path) -> None:
    create_node(tmp_path / "n1", gpus=2, model=GH200)
    with Node(tmp_path / "n1") as node, NvmlProcess(tmp_path / "n1") as nvml:
        module = [(185, 1), (187, 1), (188, 1), (190, 1), (192, 1)]
        assert [code for code, _ in nvml(FIELDS.format(0, module))] == [Code.NOT_SUPPORTED] * 5
        plant(node, 43, gpu=0)
        assert nvml(ENFORCED.format(0)) == 450_000
        assert nvml(REQUESTED.format(0)) == 900_000
        values = nvml(FIELDS.format(0, module))
        assert values[1:] == [[0, 200_000], [0, 1_000_000], [0, 600_000], [0, 600_000]]
        assert values[0][1] == pytest.approx(150_000 + 75_000, abs=1)
        nvml("N.nvmlDeviceSetPowerManagementLimit_v2(h[0], N.NVML_POWER_SCOPE_MODULE, 500_000)")
        assert nvml(ENFORCED.format(0)) == 350_000
        assert nvml(ENFORCED.format(1)) == 900_000


# ------------------------------------------------------------------------------------------------ calls that hang


def test_24_a_hang_holds_up_one_device_until_it_is_released(node: Node, nvml: NvmlProcess) -> None:
    plant(node, 24, gpu=1)
    with NvmlProcess(node.node_dir, init=False) as stuck:
        stuck.send("init()")
        wait_until(lambda: node.faults_fired() == 1, "the call hangs")
        assert nvml(POWER.format(0)) > 0
        assert not stuck.has_answered(0.05)
        node.clear_faults()
        assert stuck.receive() == 4


def test_24_a_hang_ends_by_itself(node: Node, nvml: NvmlProcess) -> None:
    node.fault("nvmlDeviceGetPowerUsage", FaultKind.HANG, gpu=1, delay_s=0.1)
    start_s = time.monotonic()
    assert nvml(POWER.format(1)) > 0
    assert time.monotonic() - start_s >= 0.1


def test_24_a_latency_on_every_call_leaves_the_other_faults(node: Node, nvml: NvmlProcess) -> None:
    node.fault("*", FaultKind.DELAY, delay_s=0.005)
    plant(node, 11, gpu=1)
    assert code_of(nvml, SET.format(1, 400_000)) == Code.TIMEOUT
    assert nvml(REQUESTED.format(1)) == 400_000
    assert node.faults_fired() == 3


def test_28_a_client_that_is_killed_in_a_call_leaves_the_calls_of_the_next_hanging(
    node: Node, nvml: NvmlProcess
) -> None:
    plant(node, 28, gpu=1, variant="set")
    with NvmlProcess(node.node_dir) as killed:
        killed.send(SET.format(1, 400_000))
        wait_until(lambda: node.faults_fired() == 1, "the call hangs")
        assert nvml(REQUESTED.format(1)) == DEFAULT_MW  # others are served while it lives
        killed.kill()
    nvml.send(REQUESTED.format(1))
    assert not nvml.has_answered(0.1)
    with NvmlProcess(node.node_dir, init=False) as other:
        other("N.nvmlInit()")
        assert other("N.nvmlDeviceGetPowerUsage(N.nvmlDeviceGetHandleByIndex(0))") > 0
        node.clear_faults()
        assert nvml.receive() == DEFAULT_MW
