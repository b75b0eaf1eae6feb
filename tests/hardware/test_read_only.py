"""Every quantity of the GPUs of this machine, read as the agent reads it. Nothing is written.

``make hardware-checks`` runs this where there is a GPU and prints what docs/hardware-checks.md keeps. Without one it
fails and says so: a check that was not made is not passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pynvml
import pytest

from slurm_pfi.gpu.device import DeviceFailure, DeviceInfo, DeviceSample
from slurm_pfi.gpu.identity import read_identity
from slurm_pfi.gpu.remote import RemoteGpuDevices

pytestmark = pytest.mark.gpu

APART_S = 1.0
"""Between two readings: an energy difference over less says nothing (counters move every 20 to 100 ms)."""

T = TypeVar("T")


def settings_of_the_machine() -> list[dict[str, Any]]:
    """What a check of ours could have changed, read without code of ours; an error stands for what is not offered."""

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, function)(*arguments)
        except pynvml.NVMLError as error:
            return f"{error}"

    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    clocks = (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)
    return [
        {
            "uuid": ask("nvmlDeviceGetUUID", handle),
            "requested_mw": ask("nvmlDeviceGetPowerManagementLimit", handle),
            "persistence": ask("nvmlDeviceGetPersistenceMode", handle),
            "compute mode": ask("nvmlDeviceGetComputeMode", handle),
            "MIG": ask("nvmlDeviceGetMigMode", handle),
            "application clocks": [ask("nvmlDeviceGetApplicationsClock", handle, clock) for clock in clocks],
        }
        for handle in handles
    ]


def no_library() -> str:
    """Why NVML does not start here; empty where it does."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def _nothing_is_changed() -> Iterator[None]:
    missing = no_library()
    if missing:  # outside of any except, so that this line is all that is shown
        pytest.fail(f"there is no NVIDIA GPU to check on this machine: {missing}", pytrace=False)
    before = settings_of_the_machine()
    yield
    assert settings_of_the_machine() == before
    pynvml.nvmlShutdown()


def with_devices(work: Callable[[RemoteGpuDevices], Awaitable[T]]) -> T:
    async def run() -> T:
        devices = RemoteGpuDevices()
        try:
            return await work(devices)
        finally:
            await devices.close()

    return asyncio.run(run())


async def _listed(devices: RemoteGpuDevices) -> tuple[DeviceInfo, ...]:
    infos, failures = await devices.list_devices()
    assert failures == ()
    assert infos
    return infos


def _show(title: str, value: msgspec.Struct) -> None:
    print(f"\n{title}")
    for name, text in msgspec.to_builtins(value).items():
        print(f"  {name:18} {text}")


def test_identity_of_the_driver() -> None:
    identity = read_identity()
    print(f"\nboot id {'known' if identity.boot_id else 'unknown'}, driver start {identity.driver_start}")
    print(f"driver {pynvml.nvmlSystemGetDriverVersion()}, NVML {pynvml.nvmlSystemGetNVMLVersion()}")


def test_devices_are_listed_with_limits_and_capabilities() -> None:
    for info in with_devices(_listed):
        _show(f"{info.model}, index {info.index}", info)
        limits = info.limits
        assert limits.min_mw <= limits.default_mw <= limits.max_mw
        assert limits.enforced_mw <= limits.max_mw
        assert info.uuid.startswith("GPU-")


def test_readings_agree_with_one_another() -> None:
    async def twice(devices: RemoteGpuDevices) -> list[tuple[DeviceSample, DeviceSample, DeviceInfo]]:
        infos = await _listed(devices)
        uuids = tuple(info.uuid for info in infos)
        first = await devices.sample(uuids, activity=True)
        await asyncio.sleep(APART_S)
        second = await devices.sample(uuids, activity=True)
        assert not any(isinstance(one, DeviceFailure) for one in (*first, *second)), (first, second)
        return list(zip(first, second, infos, strict=True))  # type: ignore[arg-type]

    for first, second, info in with_devices(twice):
        _show(f"{info.model}, index {info.index}, {APART_S:g} s after a first reading", second)
        assert second.requested_mw == info.limits.requested_mw
        assert second.draw_mw is not None and 0 < second.draw_mw <= 1.5 * info.limits.max_mw
        if first.energy_mj is not None and second.energy_mj is not None:
            over_s = (second.monotonic_ns - first.monotonic_ns) / 1e9
            mean_mw = (second.energy_mj - first.energy_mj) / over_s
            print(f"  mean draw by energy {mean_mw / 1000:.1f} W, instant {second.draw_mw / 1000:.1f} W")
            assert 0 < mean_mw <= 1.5 * info.limits.max_mw


def test_a_reading_takes_how_long() -> None:
    async def timed(devices: RemoteGpuDevices) -> list[float]:
        uuids = tuple(info.uuid for info in await _listed(devices))
        clock = asyncio.get_running_loop()
        took_ms = []
        for _ in range(20):
            began_s = clock.time()
            await devices.sample(uuids)
            took_ms.append((clock.time() - began_s) * 1000)
        return sorted(took_ms)

    took_ms = with_devices(timed)
    print(f"\nall GPUs once: median {took_ms[10]:.2f} ms, worst of 20 {took_ms[-1]:.2f} ms")
