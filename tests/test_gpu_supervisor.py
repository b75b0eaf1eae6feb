"""Second tries: how a device that hung or brought the NVML process down comes back, and what that costs the others."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.gpu.device import (
    DeadlineError,
    DeviceError,
    DeviceFailure,
    DeviceSample,
    LibraryGoneError,
    UnknownDeviceError,
)
from slurm_pfi.gpu.process import NvmlProcess
from slurm_pfi.gpu.remote import RemoteGpuDevices
from slurm_pfi.gpu.wire import Frames, Reply, pack
from testbed.gpus import FaultKind, GpuModel, Node, create_node
from tests.gpu_rigs import child_environment

DEADLINE_S: Final = 0.5
LONG_S: Final = 30.0
SOON_S: Final = 0.05
SETTER: Final = "nvmlDeviceSetPowerManagementLimit"
READ: Final = "nvmlDeviceGetFieldValues"


@asynccontextmanager
async def opened(
    folder: Path,
    *,
    back_off_s: float,
    may_replace: Callable[[], bool] = lambda: True,
    deadline_s: float = DEADLINE_S,
) -> AsyncIterator[tuple[RemoteGpuDevices, Node, tuple[str, ...]]]:
    create_node(folder / "n1", gpus=4, model=GpuModel(effect_us=0))
    devices = RemoteGpuDevices(
        deadline_s=deadline_s,
        start_deadline_s=20.0,
        environment=child_environment(folder / "n1"),
        first_back_off_s=back_off_s,
        may_replace=may_replace,
    )
    with Node(folder / "n1") as node:
        try:
            yield devices, node, tuple(state.uuid for state in node.snapshot())
        finally:
            node.clear_faults()
            await devices.close()
    assert not children()


def children() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children() if "slurm_pfi.gpu.child" in " ".join(child.cmdline())
    ]


def kinds(samples: tuple[DeviceSample | DeviceFailure, ...]) -> list[str]:
    return [sample.kind if isinstance(sample, DeviceFailure) else "ok" for sample in samples]


async def until(reached: Callable[[], Awaitable[bool]], why: str) -> None:
    try:
        async with asyncio.timeout(30):
            while not await reached():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not in time: {why}") from None


async def fired(node: Node, times: int = 1) -> None:
    before = node.faults_fired()

    async def more() -> bool:
        return node.faults_fired() >= before + times

    await until(more, "the planted fault is met")


def test_the_process_is_replaced_without_a_gap(tmp_path: Path) -> None:
    """With persistence mode off a limit dies with the last client: there is always one."""

    async def test() -> None:
        async with opened(tmp_path, back_off_s=SOON_S) as (devices, node, uuids):
            node.poke("persistence", 0)
            await asyncio.gather(*(devices.set_limit(uuid, 400_000) for uuid in uuids))
            old = devices.pid
            node.fault(READ, FaultKind.HANG, gpu=1, count=1)
            assert kinds(await devices.sample(uuids)) == ["ok", "DeadlineError", "ok", "ok"]
            seen = []

            async def well_again() -> bool:
                seen.append(kinds(await devices.sample(uuids)))
                return seen[-1] == ["ok"] * 4

            await until(well_again, "the device is back")
            assert devices.pid != old
            assert {kind for one in seen for place, kind in enumerate(one) if place != 1} == {"ok"}
            assert [state.requested_mw for state in node.snapshot()] == [400_000] * 4

    asyncio.run(test())


def test_the_process_is_not_replaced_before_the_agent_agrees(tmp_path: Path) -> None:
    async def test() -> None:
        agreed = False
        async with opened(tmp_path, back_off_s=SOON_S, may_replace=lambda: agreed) as (devices, node, uuids):
            await devices.list_devices()
            old = devices.pid
            node.fault(READ, FaultKind.HANG, gpu=1, count=1)
            await devices.sample(uuids)

            async def is_over() -> bool:
                samples = await devices.sample(uuids)
                assert kinds(samples) == ["ok", "DeadlineError", "ok", "ok"]
                assert isinstance(samples[1], DeviceFailure)
                return "other GPUs" in samples[1].message

            await until(is_over, "its time to wait is over")
            assert devices.pid == old
            assert len(children()) == 1
            agreed = True

            async def well_again() -> bool:
                return kinds(await devices.sample(uuids)) == ["ok"] * 4

            await until(well_again, "the device is back")
            assert devices.pid != old

    asyncio.run(test())


def test_a_set_under_way_is_waited_for_before_the_process_is_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=SOON_S, deadline_s=3.0) as (devices, node, uuids):
            await devices.list_devices()
            old = devices.pid
            node.fault(READ, FaultKind.HANG, gpu=1, count=1)
            await devices.sample(uuids)
            node.fault(SETTER, FaultKind.DELAY, delay_s=2.0, gpu=0, count=1)
            setting = asyncio.create_task(devices.set_limit(uuids[0], 400_000))
            await fired(node)

            async def second_process() -> bool:
                await devices.sample(uuids[1:2])
                return setting.done() or len(children()) == 2

            await until(second_process, "the device is tried beside")

            async def replaced() -> bool:
                return devices.pid != old

            await until(replaced, "the other process serves")
            answered, _ = await asyncio.wait(
                {setting}, timeout=0.2
            )  # its answer may still be on its way to us
            assert answered
            assert (await setting).requested_mw == 400_000

    asyncio.run(test())


def test_a_hang_that_ends_by_itself_needs_no_new_process(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            await devices.list_devices()
            old = devices.pid
            node.fault(READ, FaultKind.HANG, gpu=1, count=1)
            assert kinds(await devices.sample(uuids)) == ["ok", "DeadlineError", "ok", "ok"]
            node.clear_faults()

            async def well_again() -> bool:
                return kinds(await devices.sample(uuids)) == ["ok"] * 4

            await until(well_again, "its late answer frees it")
            assert devices.pid == old

    asyncio.run(test())


def test_a_set_whose_turn_comes_too_late_is_not_begun(tmp_path: Path) -> None:
    """The agent was told that it failed, and may want something else by now."""

    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            await devices.list_devices()
            node.fault(READ, FaultKind.HANG, gpu=0, count=1)
            reading = asyncio.create_task(devices.sample(uuids[:1]))
            await fired(node)
            with pytest.raises(DeadlineError) as caught:
                await devices.set_limit(uuids[0], 400_000)
            assert caught.value.asked
            await reading
            node.clear_faults()

            async def well_again() -> bool:
                return kinds(await devices.sample(uuids)) == ["ok"] * 4

            await until(well_again, "its late answer frees it")
            assert node.snapshot()[0].requested_mw == 700_000

    asyncio.run(test())


def test_a_call_held_back_was_never_asked(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            node.fault(SETTER, FaultKind.HANG, gpu=0)
            for asked in (True, False):
                with pytest.raises(DeadlineError) as caught:
                    await devices.set_limit(uuids[0], 400_000)
                assert caught.value.asked is asked

    asyncio.run(test())


def test_a_set_that_is_stuck_in_the_driver_keeps_its_device_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process reads there is no last word: the set may be done after it. Stopped and not to be killed
    stands for a process that is stuck in the kernel."""

    async def test() -> None:
        async with opened(tmp_path, back_off_s=SOON_S) as (devices, node, uuids):
            await devices.list_devices()
            first = devices.pid
            assert first is not None
            node.fault(SETTER, FaultKind.HANG, gpu=0, count=1)
            with pytest.raises(DeadlineError):
                await devices.set_limit(uuids[0], 600_000)
            monkeypatch.setattr("subprocess.Popen.kill", lambda popen: None)
            os.kill(first, signal.SIGSTOP)

            async def replaced() -> bool:
                told = await devices.sample(uuids)
                return devices.pid != first and kinds(told)[1:] == ["ok"] * 3

            await until(replaced, "another process serves the others")

            async def known_to_be_stuck() -> bool:
                (told,) = await devices.sample(uuids[:1])
                return isinstance(told, DeviceFailure) and f"(pid {first})" in told.message

            await until(known_to_be_stuck, "the process that does not end")
            infos, failures = await devices.list_devices()
            assert [info.uuid for info in infos] == list(uuids[1:])
            assert [failure.uuid for failure in failures] == [uuids[0]]
            with pytest.raises(DeadlineError, match="may still be done") as caught:
                await devices.set_limit(uuids[0], 200_000)
            assert not caught.value.asked
            monkeypatch.undo()
            os.kill(first, signal.SIGKILL)

            async def back() -> bool:
                return kinds(await devices.sample(uuids[:1])) == ["ok"]

            await until(back, "the device, once that process has ended")

    asyncio.run(test())


def test_when_every_device_hangs_the_process_is_replaced_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            await devices.list_devices()
            old = devices.pid
            node.fault(READ, FaultKind.HANG, count=4)
            assert kinds(await devices.sample(uuids)) == ["DeadlineError"] * 4
            assert kinds(await devices.sample(uuids)) == ["ok"] * 4
            assert devices.pid not in (None, old)

    asyncio.run(test())


def test_a_library_that_hangs_again_and_again_is_not_hurried(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            await devices.list_devices()
            node.fault(READ, FaultKind.HANG)
            assert kinds(await devices.sample(uuids)) == ["DeadlineError"] * 4
            assert kinds(await devices.sample(uuids)) == ["DeadlineError"] * 4
            samples = await devices.sample(uuids)
            assert kinds(samples) == ["LibraryGoneError"] * 4
            assert isinstance(samples[0], DeviceFailure)
            assert "next try in" in samples[0].message

    asyncio.run(test())


@pytest.mark.parametrize("function", [READ, SETTER])
def test_a_crash_holds_back_the_guilty_and_the_innocent_are_back_with_their_next_call(
    tmp_path: Path, function: str
) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            await devices.list_devices()
            node.fault(function, FaultKind.CRASH, gpu=2)

            async def everywhere() -> list[str]:
                if function == READ:
                    return kinds(await devices.sample(uuids))
                sets = (devices.set_limit(uuid, 400_000) for uuid in uuids)
                limits = await asyncio.gather(*sets, return_exceptions=True)
                return [type(one).__name__ if isinstance(one, DeviceError) else "ok" for one in limits]

            first, second = await everywhere(), await everywhere()
            assert (first[2], second[2]) == ("LibraryGoneError", "LibraryGoneError")
            assert all("ok" in (first[place], second[place]) for place in (0, 1, 3))
            pids = []
            for _ in range(3):
                assert await everywhere() == ["ok", "ok", "LibraryGoneError", "ok"]
                pids.append(devices.pid)
            assert len(set(pids)) == 1  # it is held back, and crashes nothing any more
            with pytest.raises(LibraryGoneError, match=r"signal 11.*next try in") as caught:
                await devices.set_limit(uuids[2], 400_000)
            assert not caught.value.asked

    asyncio.run(test())


def test_the_guilty_is_tried_again_beside_and_comes_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=SOON_S) as (devices, node, uuids):
            await devices.list_devices()
            node.fault(READ, FaultKind.CRASH, gpu=2)
            await devices.sample(uuids)
            assert kinds(await devices.sample(uuids)) == ["ok", "ok", "LibraryGoneError", "ok"]
            assert kinds(await devices.sample(uuids[:1])) == ["ok"]  # there is a process again
            pid = devices.pid
            tries = node.faults_fired()

            async def tried() -> bool:
                assert kinds(await devices.sample(uuids)) == ["ok", "ok", "LibraryGoneError", "ok"]
                return node.faults_fired() >= tries + 2

            await until(tried, "it is tried again and crashes")
            assert devices.pid == pid
            node.clear_faults()

            async def well_again() -> bool:
                return kinds(await devices.sample(uuids)) == ["ok"] * 4

            await until(well_again, "it is back")
            assert devices.pid == pid

    asyncio.run(test())


def test_a_process_killed_from_outside_blames_nobody(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            await devices.list_devices()
            for _ in range(3):
                assert devices.pid is not None
                node.fault(READ, FaultKind.HANG, gpu=0, count=1)
                reading = asyncio.create_task(devices.sample(uuids))
                await fired(node)
                os.kill(devices.pid, signal.SIGKILL)
                assert kinds(await reading)[0] == "LibraryGoneError"
                assert kinds(await devices.sample(uuids)) == ["ok"] * 4

    asyncio.run(test())


def test_init_that_hangs_is_given_up_and_tried_again(tmp_path: Path) -> None:
    async def test() -> None:
        create_node(tmp_path / "n1", gpus=2)
        devices = RemoteGpuDevices(
            start_deadline_s=1.0, environment=child_environment(tmp_path / "n1"), first_back_off_s=SOON_S
        )
        with Node(tmp_path / "n1") as node:
            node.fault("nvmlInit_v2", FaultKind.HANG)
            with pytest.raises(LibraryGoneError, match=r"not ready within 1 s") as caught:
                await devices.list_devices()
            assert not caught.value.asked
            assert not children()
            node.clear_faults()

            async def listed() -> bool:
                try:
                    return len((await devices.list_devices())[0]) == 2
                except LibraryGoneError:
                    return False

            await until(listed, "the GPUs are listed")
            await devices.close()

    asyncio.run(test())


def test_release_frees_the_handles_also_of_a_process_that_hangs(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            await devices.list_devices()
            node.fault(READ, FaultKind.HANG, gpu=1)
            await devices.sample(uuids)
            await devices.release()
            assert devices.pid is None
            assert not children()
            node.clear_faults()
            assert kinds(await devices.sample(uuids)) == ["ok"] * 4

    asyncio.run(test())


def test_release_ends_calls_under_way_and_blames_nobody(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S, deadline_s=20.0) as (devices, node, uuids):
            await devices.list_devices()
            node.fault(READ, FaultKind.HANG, gpu=1, count=1)
            reading = asyncio.create_task(devices.sample(uuids))
            await fired(node)
            await devices.release()
            assert kinds(await reading)[1] == "LibraryGoneError"
            assert kinds(await devices.sample(uuids)) == ["ok"] * 4

    asyncio.run(test())


def test_calls_left_hanging_by_a_killed_client_end_by_themselves(tmp_path: Path) -> None:
    """The next process meets them, and is left to wait for its answer."""

    async def test() -> None:
        async with opened(tmp_path, back_off_s=SOON_S) as (devices, node, uuids):
            await devices.list_devices()
            node.poke("orphan_hang_ms", 1500, gpu=1)
            node.fault(READ, FaultKind.HANG, gpu=1, count=1)
            reading = asyncio.create_task(devices.sample(uuids))
            await fired(node)
            assert devices.pid is not None
            os.kill(devices.pid, signal.SIGKILL)
            assert kinds(await reading)[1] == "LibraryGoneError"
            node.clear_faults()
            seen = []

            async def well_again() -> bool:
                seen.append(kinds(await devices.sample(uuids)))
                return seen[-1] == ["ok"] * 4

            await until(well_again, "the device is back")
            assert {kind for one in seen for place, kind in enumerate(one) if place != 1} == {"ok"}

    asyncio.run(test())


def test_a_limit_that_cannot_be_read_back_is_in_doubt(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            await devices.list_devices()
            node.fault(READ, code=999, gpu=0, after=1)
            node.fault("nvmlDeviceGetPowerManagementLimit", code=3, gpu=0)
            with pytest.raises(UnknownDeviceError, match="accepted but cannot be read back"):
                await devices.set_limit(uuids[0], 400_000)

    asyncio.run(test())


def test_a_set_without_rights_is_a_device_that_is_not_settable(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            node.fault(SETTER, code=4, gpu=1)
            with pytest.raises(DeviceError):
                await devices.set_limit(uuids[1], 400_000)
            infos, _ = await devices.list_devices()
            assert infos[1].capabilities.settable is False
            assert infos[0].capabilities.settable is not False

    asyncio.run(test())


@pytest.mark.parametrize("number", [190, 192])
def test_a_limit_by_number_is_believed_only_where_it_says_what_the_function_says(
    tmp_path: Path, number: int
) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            node.fault(READ, FaultKind.VALUE, gpu=0, value=200_000, field=number)
            await devices.list_devices()
            (sample,) = await devices.sample(uuids[:1])
            assert isinstance(sample, DeviceSample)
            assert (sample.requested_mw, sample.enforced_mw) == (700_000, 700_000)

    asyncio.run(test())


@pytest.mark.parametrize("code", [3, 999])
def test_an_entry_that_fails_is_asked_of_the_function(tmp_path: Path, code: int) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            await devices.list_devices()
            node.fault(READ, FaultKind.ENTRY, gpu=0, code=code)
            (sample,) = await devices.sample(uuids[:1])
            assert isinstance(sample, DeviceSample)
            assert (sample.requested_mw, sample.enforced_mw) == (700_000, 700_000)
            assert sample.draw_mw == pytest.approx(75_000, abs=1_000)
            assert sample.energy_mj is not None

    asyncio.run(test())


def test_garbage_with_success_is_unknown(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, back_off_s=LONG_S) as (devices, node, uuids):
            await devices.list_devices()
            node.fault(READ, FaultKind.VALUE, gpu=0, value=4_000_000_000)
            (sample,) = await devices.sample(uuids[:1])
            assert isinstance(sample, DeviceSample)
            assert (sample.requested_mw, sample.enforced_mw) == (None, None)
            assert (sample.draw_mw, sample.average_mw) == (None, None)

    asyncio.run(test())


@given(st.lists(st.integers(0, 2**31), max_size=20), st.integers(1, 50))
def test_frames_are_put_together_whatever_the_pieces(numbers: list[int], size: int) -> None:
    stream = b"".join(pack(Reply(number=number)) for number in numbers)
    frames, bodies = Frames(), []
    for start in range(0, len(stream), size):
        bodies += frames.feed(stream[start : start + size])
    assert bodies == [pack(Reply(number=number))[4:] for number in numbers]


def test_a_frame_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        Frames().feed(b"\xff\xff\xff\xff")


def test_processes_that_even_the_kernel_cannot_end_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in an uninterruptible sleep cannot be had in a test: here none is ever seen to be gone."""

    async def test() -> None:
        async with opened(tmp_path, back_off_s=0.001) as (devices, node, uuids):
            node.fault(READ, FaultKind.HANG)
            monkeypatch.setattr(NvmlProcess, "has_ended", property(lambda _: False))
            monkeypatch.setattr("slurm_pfi.gpu.process._END_S", 0.01)

            async def given_up() -> bool:
                samples = await devices.sample(uuids)
                assert isinstance(samples[0], DeviceFailure)
                return "reboot this node" in samples[0].message

            await until(given_up, "no more processes are started")
            monkeypatch.undo()
            node.clear_faults()

            async def well_again() -> bool:
                return kinds(await devices.sample(uuids)) == ["ok"] * 4

            await until(well_again, "they ended after all")

    asyncio.run(test())
