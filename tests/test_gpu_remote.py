"""The NVML process: a library that hangs, dies or is not there costs as little as it can."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import psutil
import pytest

from slurm_pfi.gpu.codes import within as _within
from slurm_pfi.gpu.device import DeadlineError, DeviceFailure, DeviceSample, LibraryGoneError
from slurm_pfi.gpu.power import MAX_DRAW_MW as _MAX_DRAW_MW
from slurm_pfi.gpu.power import MAX_ENERGY_MJ as _MAX_ENERGY_MJ
from slurm_pfi.gpu.remote import RemoteGpuDevices
from testbed.gpus import FaultKind, GpuModel, Node, create_node
from tests.gpu_rigs import child_environment

DEADLINE_S: Final = 0.3
HANG_S: Final = 60.0
READ: Final = "nvmlDeviceGetFieldValues"


@asynccontextmanager
async def _open(folder: Path, *, back_off_s: float = 30.0) -> AsyncIterator[tuple[RemoteGpuDevices, Node]]:
    create_node(folder / "n1", gpus=4, model=GpuModel(effect_us=0))
    devices = RemoteGpuDevices(
        deadline_s=DEADLINE_S, environment=child_environment(folder / "n1"), first_back_off_s=back_off_s
    )
    with Node(folder / "n1") as node:
        try:
            yield devices, node
        finally:
            await devices.close()


def _kinds(samples: tuple[DeviceSample | DeviceFailure, ...]) -> list[str]:
    return [sample.kind if isinstance(sample, DeviceFailure) else "ok" for sample in samples]


def _run(
    tmp_path: Path, test: Callable[[RemoteGpuDevices, Node], Awaitable[None]], *, back_off_s: float = 30.0
) -> None:
    async def inside() -> None:
        async with _open(tmp_path, back_off_s=back_off_s) as (devices, node):
            await test(devices, node)

    asyncio.run(inside())
    assert not _our_children()


def _our_children() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children() if "slurm_pfi.gpu.child" in " ".join(child.cmdline())
    ]


def _all_uuids(node: Node) -> tuple[str, ...]:
    return tuple(state.uuid for state in node.snapshot())


def test_a_device_that_is_always_slower_than_the_others_is_heard(tmp_path: Path) -> None:
    """In a hurry its answer comes one reading later; it must not be thrown away each time."""

    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        slow, *others = _all_uuids(node)
        await devices.list_devices()
        node.fault(READ, FaultKind.DELAY, gpu=slow, delay_s=0.15)
        asked_ns = time.monotonic_ns()
        first = await devices.sample((slow, *others), hurry=True)
        assert [sample.uuid for sample in first] == others
        (said,) = await devices.sample((slow,))  # its thread is free again
        assert isinstance(said, DeviceSample)
        again = await devices.sample((slow, *others), hurry=True)
        assert _kinds(again) == ["ok"] * 4
        assert isinstance(again[0], DeviceSample)
        assert asked_ns < again[0].monotonic_ns < said.monotonic_ns

    _run(tmp_path, test)


def test_it_starts_with_the_first_call_and_is_isolated(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        assert devices.pid is None
        await devices.list_devices()
        assert devices.pid is not None
        process = psutil.Process(devices.pid)
        assert process.ppid() == os.getpid()
        assert "-I" in process.cmdline()
        assert process.cwd() == "/"

    _run(tmp_path, test)


def test_a_device_that_hangs_costs_itself_only(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        uuids = _all_uuids(node)
        await devices.list_devices()
        first = devices.pid
        node.fault(READ, FaultKind.DELAY, gpu=1, delay_s=HANG_S)
        assert _kinds(await devices.sample(uuids)) == ["ok", "DeadlineError", "ok", "ok"]
        assert devices.pid == first  # the others go on where they are
        started_s = time.monotonic()
        samples = await devices.sample(uuids)
        assert _kinds(samples) == ["ok", "DeadlineError", "ok", "ok"]
        assert isinstance(samples[1], DeviceFailure)
        assert "next try in" in samples[1].message
        infos, failures = await devices.list_devices()
        assert len(infos) == 3
        assert [(failure.uuid, failure.kind) for failure in failures] == [(uuids[1], "DeadlineError")]
        assert (await devices.set_limit(uuids[0], 400_000)).requested_mw == 400_000
        with pytest.raises(DeadlineError):
            await devices.set_limit(uuids[1], 400_000)
        assert time.monotonic() - started_s < DEADLINE_S  # nobody waited for it again
        assert devices.pid == first

    _run(tmp_path, test)


def test_a_device_is_tried_again_and_comes_back(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        uuids = _all_uuids(node)
        node.fault(READ, FaultKind.DELAY, gpu=1, delay_s=HANG_S, count=1)
        assert _kinds(await devices.sample(uuids)) == ["ok", "DeadlineError", "ok", "ok"]
        async with asyncio.timeout(10):
            while _kinds(await devices.sample(uuids)) != ["ok"] * 4:
                await asyncio.sleep(0.01)

    _run(tmp_path, test, back_off_s=0.05)


def test_a_hanging_set_is_a_deadline_and_the_process_is_replaced(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        uuids = _all_uuids(node)
        node.fault("nvmlDeviceSetPowerManagementLimit", FaultKind.DELAY, gpu=0, delay_s=HANG_S)
        started_s = time.monotonic()
        with pytest.raises(DeadlineError, match=r"no answer from NVML in 0\.3 s") as caught:
            await devices.set_limit(uuids[0], 400_000)
        assert caught.value.uuid == uuids[0]
        assert time.monotonic() - started_s < DEADLINE_S + 5
        assert (await devices.set_limit(uuids[1], 400_000)).requested_mw == 400_000

    _run(tmp_path, test)


def test_a_device_that_hangs_while_it_is_listed_is_named_by_elimination(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        uuids = _all_uuids(node)
        await devices.list_devices()
        node.fault("nvmlDeviceGetHandleByIndex_v2", FaultKind.DELAY, gpu=2, delay_s=HANG_S)
        infos, failures = await devices.list_devices()
        assert len(infos) == 3
        assert [(failure.uuid, failure.kind) for failure in failures] == [(uuids[2], "DeadlineError")]

    _run(tmp_path, test)


def test_a_process_that_dies_in_a_call_is_library_gone(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        uuids = _all_uuids(node)
        await devices.list_devices()
        assert devices.pid is not None
        node.fault(READ, FaultKind.DELAY, gpu=0, delay_s=HANG_S, count=1)
        pid, fired = devices.pid, node.faults_fired()
        asked = asyncio.create_task(devices.sample(uuids))
        async with asyncio.timeout(10):
            while node.faults_fired() == fired:
                await asyncio.sleep(0.001)
        os.kill(pid, signal.SIGSEGV)
        samples = await asked
        assert isinstance(samples[0], DeviceFailure)
        assert samples[0].kind == "LibraryGoneError"
        assert "died of signal 11" in samples[0].message
        assert _kinds(await devices.sample(uuids)) == ["ok"] * 4

    _run(tmp_path, test)


def test_a_process_killed_between_calls_is_replaced_unnoticed(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        await devices.list_devices()
        assert devices.pid is not None
        victim = devices.pid
        os.kill(victim, signal.SIGKILL)
        os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
        assert _kinds(await devices.sample(_all_uuids(node))) == ["ok"] * 4
        assert devices.pid != victim

    _run(tmp_path, test)


def test_signals_to_the_group_do_not_touch_it(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        await devices.list_devices()
        assert devices.pid is not None
        pid = devices.pid
        for noise in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, noise)
        assert _kinds(await devices.sample(_all_uuids(node))) == ["ok"] * 4
        assert devices.pid == pid

    _run(tmp_path, test)


def test_without_a_library_every_call_says_so_and_none_hurries(tmp_path: Path) -> None:
    async def test() -> None:
        environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
        devices = RemoteGpuDevices(environment=environment, first_back_off_s=30.0)
        try:
            with pytest.raises(LibraryGoneError, match="NVML does not start") as caught:
                await devices.list_devices()
            assert caught.value.code == 12
            for _ in range(3):
                with pytest.raises(LibraryGoneError, match="next try in"):
                    await devices.list_devices()
                assert devices.pid is None
            assert _kinds(await devices.sample(("GPU-1",))) == ["LibraryGoneError"]
        finally:
            await devices.close()

    asyncio.run(test())


def test_a_driver_that_comes_back_is_found(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        node.poke("init_code", 9)
        with pytest.raises(LibraryGoneError, match="code 9"):
            await devices.list_devices()
        node.poke("init_code", 0)
        async with asyncio.timeout(10):
            while True:
                try:
                    infos, _ = await devices.list_devices()
                    break
                except LibraryGoneError:
                    await asyncio.sleep(0.01)
        assert len(infos) == 4

    _run(tmp_path, test, back_off_s=0.05)


def test_a_driver_upgraded_under_us_gets_a_new_process(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        uuids = _all_uuids(node)
        await devices.list_devices()
        node.fault(READ, code=18)
        assert _kinds(await devices.sample(uuids)) == ["LibraryGoneError"] * 4
        assert devices.pid is None
        node.clear_faults()
        async with asyncio.timeout(10):
            while _kinds(await devices.sample(uuids)) != ["ok"] * 4:
                await asyncio.sleep(0.01)

    _run(tmp_path, test, back_off_s=0.05)


@pytest.mark.parametrize(
    ("code", "kind"), [(16, "NeedsResetError"), (999, "UnknownDeviceError"), (77, "UnknownDeviceError")]
)
def test_codes_of_one_device_stay_with_it(tmp_path: Path, code: int, kind: str) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        node.poke("sticky_code", code, gpu=3)
        assert _kinds(await devices.sample(_all_uuids(node))) == ["ok", "ok", "ok", kind]

    _run(tmp_path, test)


def test_a_device_that_drops_off_the_list_is_counted_once(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        uuids = _all_uuids(node)
        await devices.list_devices()
        node.poke("hidden", 1, gpu=1)
        infos, failures = await devices.list_devices()
        assert [info.uuid for info in infos] == [uuids[0], uuids[2], uuids[3]]
        assert [(failure.uuid, failure.kind) for failure in failures] == [(uuids[1], "LostError")]
        assert (await devices.set_limit(uuids[2], 400_000)).requested_mw == 400_000
        assert [state.requested_mw for state in node.snapshot()] == [700_000, 700_000, 400_000, 700_000]

    _run(tmp_path, test)


def test_a_board_that_rounds_is_believed_within_one_watt(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        node.poke("granularity_mw", 1000)
        limits = await devices.set_limit(_all_uuids(node)[0], 400_700)
        assert limits.requested_mw == 400_000

    _run(tmp_path, test)


def test_a_call_given_up_half_way_does_not_mix_up_answers(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        uuids = _all_uuids(node)
        await devices.list_devices()
        node.fault(READ, FaultKind.DELAY, gpu=0, delay_s=HANG_S, count=1)
        asked = asyncio.create_task(devices.sample(uuids))
        fired = node.faults_fired()
        async with asyncio.timeout(10):
            while node.faults_fired() == fired:
                await asyncio.sleep(0.001)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        samples = await devices.sample(uuids)
        assert _kinds(samples) == ["DeadlineError", "ok", "ok", "ok"]  # GPU 0 hangs, whoever asked
        assert tuple(sample.uuid for sample in samples) == uuids

    _run(tmp_path, test)


def test_calls_at_the_same_time_get_their_own_answers(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        uuids = _all_uuids(node)
        sets = [devices.set_limit(uuid, 300_000 + 1000 * place) for place, uuid in enumerate(uuids)]
        limits, samples, _ = await asyncio.gather(
            asyncio.gather(*sets), devices.sample(uuids), devices.list_devices()
        )
        assert [limit.requested_mw for limit in limits] == [300_000, 301_000, 302_000, 303_000]
        assert tuple(sample.uuid for sample in samples) == uuids

    _run(tmp_path, test)


def test_closed_means_closed(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        await devices.list_devices()
        await devices.close()
        assert devices.pid is None
        with pytest.raises(LibraryGoneError, match="closed"):
            await devices.list_devices()

    _run(tmp_path, test)


PARENT: Final = """
import asyncio, os, sys
from pathlib import Path
from slurm_pfi.gpu.remote import RemoteGpuDevices

async def main():
    devices = RemoteGpuDevices()
    await devices.list_devices()
    print(devices.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    create_node(tmp_path / "n1", gpus=1)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(child_environment(tmp_path / "n1")),
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=10)


def test_by_hand_it_explains_itself() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "slurm_pfi.gpu.child"], check=False, capture_output=True, text=True, timeout=30
    )
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert "the node agent starts this" in answer.stderr


def test_an_absurd_draw_is_unknown() -> None:
    """The stand-in gives no garbage with SUCCESS, so this asks the bounds themselves."""
    assert _within(3_712_345, 0, _MAX_DRAW_MW) is None
    assert _within(0xFFFFFFFF, 0, _MAX_DRAW_MW) is None
    assert _within(-1, 0, _MAX_DRAW_MW) is None
    assert _within(85_000, 0, _MAX_DRAW_MW) == 85_000
    assert _within(0, 0, _MAX_DRAW_MW) == 0
    assert _within(2**64 - 1, 0, _MAX_ENERGY_MJ) is None
    assert _within(None, 0, _MAX_DRAW_MW) is None


def test_a_board_without_limits_is_a_failure_of_its_own(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        node.fault("nvmlDeviceGetPowerManagementLimitConstraints", code=3, gpu=1)
        infos, failures = await devices.list_devices()
        assert [info.index for info in infos] == [0, 2, 3]
        assert [(failure.uuid, failure.kind) for failure in failures] == [
            (_all_uuids(node)[1], "UnsupportedError")
        ]

    _run(tmp_path, test)


def test_a_board_without_instant_draw_gives_its_average(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        node.fault("nvmlDeviceGetFieldValues", code=13)
        (sample,) = await devices.sample(_all_uuids(node)[:1])
        assert isinstance(sample, DeviceSample)
        assert sample.draw_mw == pytest.approx(75_000, abs=1_000)

    _run(tmp_path, test)


def test_a_board_that_answers_nothing_is_a_failure_and_not_a_row_of_nones(tmp_path: Path) -> None:
    async def test(devices: RemoteGpuDevices, node: Node) -> None:
        node.poke("sticky_code", 999, gpu=0)
        assert _kinds(await devices.sample(_all_uuids(node)[:2])) == ["UnknownDeviceError", "ok"]

    _run(tmp_path, test)


def test_the_code_of_the_agent_side_does_not_load_the_library() -> None:
    code = (
        "import sys, slurm_pfi.gpu.remote, slurm_pfi.gpu.journal, slurm_pfi.gpu.mapping, slurm_pfi.slurm.gresconf;"
        "sys.exit(bool({'pynvml', 'numpy', 'click', 'rich', 'ClusterShell'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
