"""GPUs in memory: the second implementation of the seam, for tests of what stands on it.

Time moves only by ``advance``; faults are set by the test. It keeps the same contract as NVML in its child process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from ..model import GpuId
from .device import (
    Capabilities,
    DeadlineError,
    DeviceError,
    DeviceFailure,
    DeviceInfo,
    DeviceLimits,
    DeviceSample,
    LostError,
    RangeError,
    UnknownDeviceError,
)

Operation: TypeAlias = Literal["list", "set", "sample"]
SetFault: TypeAlias = Literal["ignored", "applied_then_deadline"]


@dataclass
class MemoryGpu:
    """One simulated board; a test may change any of it. ``bmc_mw`` is a lower limit from out of band."""

    uuid: GpuId
    minor: int
    index: int
    model: str = "NVIDIA H200"
    min_mw: int = 200_000
    max_mw: int = 700_000
    default_mw: int = 700_000
    requested_mw: int = 700_000
    enforced_mw: int = 700_000
    bmc_mw: int | None = None
    persistence: bool | None = True
    demand_mw: int | None = 600_000
    energy_mj: int | None = 0
    lost: bool = False
    pending: list[tuple[int, int]] = field(default_factory=list)
    mig: bool | None = False
    settable: bool | None = True
    gpm: bool = True
    shares: tuple[float, float, float] = (0.9, 0.5, 0.4)
    """Activity of SMs, tensor cores and memory."""
    snapshot_ns: int | None = None

    def ruling_mw(self, requested_mw: int) -> int:
        return requested_mw if self.bmc_mw is None else min(requested_mw, self.bmc_mw)


@dataclass
class _Fault:
    error: DeviceError
    left: int | None


class MemoryGpuDevices:
    """Implements GpuDevices. ``sets`` is every set that was asked for, ``calls`` every call, in order."""

    def __init__(self, gpus: Iterable[MemoryGpu], *, effect_delay_ns: int = 0, now_ns: int = 1) -> None:
        self.gpus = {gpu.uuid: gpu for gpu in gpus}
        self.effect_delay_ns = effect_delay_ns
        self.hanging: set[GpuId] = set()
        """Devices whose calls are not answered within ``deadline_s`` of real time."""
        self.deadline_s = 0.2
        self.now_ns = now_ns
        self.sets: list[tuple[GpuId, int]] = []
        self.calls: list[str] = []
        self.released = 0
        self._faults: dict[tuple[GpuId, Operation], _Fault] = {}
        self._set_faults: dict[GpuId, SetFault] = {}

    def fail(self, operation: Operation, error: DeviceError, *, times: int | None = None) -> None:
        """From now on ``operation`` raises ``error`` for the GPU it names (an empty UUID: for all of them)."""
        self._faults[error.uuid, operation] = _Fault(error, times)

    def fail_set_quietly(self, uuid: GpuId, fault: SetFault) -> None:
        """``ignored``: a set succeeds, changes nothing. ``applied_then_deadline``: it works, its answer is lost."""
        self._set_faults[uuid] = fault

    def clear_faults(self) -> None:
        self._faults.clear()
        self._set_faults.clear()

    def advance(self, nanoseconds: int) -> None:
        """Let time pass: limits come into force and energy is used."""
        end_ns = self.now_ns + nanoseconds
        for gpu in self.gpus.values():
            draw_mw = _draw_mw(gpu)
            if gpu.energy_mj is not None and draw_mw is not None:
                gpu.energy_mj += draw_mw * nanoseconds // 10**9
            self._apply_due(gpu, end_ns)
        self.now_ns = end_ns

    def write_foreign(self, uuid: GpuId, cap_mw: int) -> None:
        """Somebody else sets the limit."""
        self._request(self.gpus[uuid], cap_mw)

    def set_bmc_limit(self, uuid: GpuId, cap_mw: int | None) -> None:
        """The BMC lowers the limit out of band, or lifts its own."""
        gpu = self.gpus[uuid]
        gpu.bmc_mw = cap_mw
        self._request(gpu, gpu.requested_mw)

    def reset(self, uuid: GpuId) -> None:
        """The device starts anew: the default limit is in force."""
        gpu = self.gpus[uuid]
        gpu.pending.clear()
        gpu.requested_mw = gpu.default_mw
        gpu.enforced_mw = gpu.ruling_mw(gpu.default_mw)
        gpu.lost = False

    async def list_devices(self) -> tuple[tuple[DeviceInfo, ...], tuple[DeviceFailure, ...]]:
        self.calls.append("list")
        self._raise_fault("", "list")
        infos: list[DeviceInfo] = []
        failures: list[DeviceFailure] = []
        for gpu in sorted(self.gpus.values(), key=lambda gpu: gpu.index):
            try:
                self._check(gpu.uuid, "list")
                await self._wait(gpu.uuid)
                infos.append(_info(gpu))
            except DeviceError as error:
                failures.append(_failure(gpu.uuid, error))
        return tuple(infos), tuple(failures)

    async def set_limit(self, uuid: GpuId, cap_mw: int) -> DeviceLimits:
        self.calls.append(f"set {uuid} {cap_mw}")
        self.sets.append((uuid, cap_mw))
        await self._wait(uuid)
        gpu = self._check(uuid, "set")
        if not gpu.min_mw <= cap_mw <= gpu.max_mw:
            raise RangeError(
                f"{uuid}: {cap_mw} mW is outside {gpu.min_mw}..{gpu.max_mw} mW", uuid=uuid, code=2
            )
        replaced_mw = gpu.requested_mw
        fault = self._set_faults.get(uuid)
        if fault != "ignored":
            self._request(gpu, cap_mw)
        if fault == "applied_then_deadline":
            raise DeadlineError(f"{uuid}: no answer in time", uuid=uuid)
        if abs(gpu.requested_mw - cap_mw) > 1000:
            raise UnknownDeviceError(
                f"{uuid}: set {cap_mw} mW was accepted but {gpu.requested_mw} mW is read back", uuid=uuid
            )
        return msgspec.structs.replace(_limits(gpu), replaced_mw=replaced_mw)

    async def sample(
        self, uuids: tuple[GpuId, ...], *, activity: bool = False, quick: bool = False, hurry: bool = False
    ) -> tuple[DeviceSample | DeviceFailure, ...]:
        self.calls.append("sample")
        self._raise_fault("", "sample")
        if hurry:
            uuids = tuple(uuid for uuid in uuids if uuid not in self.hanging)
        if self.hanging.isdisjoint(uuids):
            return tuple(self._sample(uuid, activity=activity, quick=quick) for uuid in uuids)
        return tuple(
            await asyncio.gather(*(self._sample_late(uuid, activity=activity, quick=quick) for uuid in uuids))
        )

    async def release(self) -> None:
        self.calls.append("release")
        self.released += 1

    async def _sample_late(self, uuid: GpuId, *, activity: bool, quick: bool) -> DeviceSample | DeviceFailure:
        try:
            await self._wait(uuid)
        except DeviceError as error:
            return _failure(uuid, error)
        return self._sample(uuid, activity=activity, quick=quick)

    def _sample(self, uuid: GpuId, *, activity: bool, quick: bool) -> DeviceSample | DeviceFailure:
        try:
            gpu = self._check(uuid, "sample")
        except DeviceError as error:
            return _failure(uuid, error)
        draw_mw = _draw_mw(gpu)
        busy = activity and draw_mw is not None
        since_ns = None if gpu.snapshot_ns is None else self.now_ns - gpu.snapshot_ns
        shares: tuple[float | None, ...] = (None, None, None)
        if busy and gpu.gpm and (since_ns is None or since_ns >= 100_000_000):
            gpu.snapshot_ns = self.now_ns
            shares = shares if since_ns is None else gpu.shares
        return DeviceSample(
            uuid=uuid,
            monotonic_ns=self.now_ns,
            requested_mw=gpu.requested_mw,
            enforced_mw=gpu.enforced_mw,
            draw_mw=draw_mw,
            energy_mj=None if quick else gpu.energy_mj,
            utilisation=1.0 if busy else None,
            sm_clock_mhz=None if quick else 1980,
            event_reasons=None if quick else 0,
            average_mw=None if quick else draw_mw,
            copy_utilisation=0.5 if busy else None,
            sm_active=shares[0],
            tensor_active=shares[1],
            dram_active=shares[2],
        )

    async def _wait(self, uuid: GpuId) -> None:
        if uuid in self.hanging:
            await asyncio.sleep(self.deadline_s)
            raise DeadlineError(f"{uuid}: no answer in {self.deadline_s:g} s", uuid=uuid)

    def _request(self, gpu: MemoryGpu, cap_mw: int) -> None:
        gpu.requested_mw = cap_mw
        gpu.pending.append((self.now_ns + self.effect_delay_ns, gpu.ruling_mw(cap_mw)))
        self._apply_due(gpu, self.now_ns)

    @staticmethod
    def _apply_due(gpu: MemoryGpu, now_ns: int) -> None:
        while gpu.pending and gpu.pending[0][0] <= now_ns:
            gpu.enforced_mw = gpu.pending.pop(0)[1]

    def _check(self, uuid: GpuId, operation: Operation) -> MemoryGpu:
        self._raise_fault("", operation)
        self._raise_fault(uuid, operation)
        gpu = self.gpus.get(uuid)
        if gpu is None:
            raise LostError(f"{uuid}: no such device", uuid=uuid, code=6)
        if gpu.lost:
            raise LostError(f"{uuid}: the GPU is lost", uuid=uuid, code=15)
        return gpu

    def _raise_fault(self, uuid: GpuId, operation: Operation) -> None:
        fault = self._faults.get((uuid, operation))
        if fault is None:
            return
        if fault.left is not None:
            fault.left -= 1
            if fault.left <= 0:
                del self._faults[uuid, operation]
        raise fault.error


def _draw_mw(gpu: MemoryGpu) -> int | None:
    return None if gpu.demand_mw is None else min(gpu.demand_mw, gpu.enforced_mw)


def _limits(gpu: MemoryGpu) -> DeviceLimits:
    return DeviceLimits(
        min_mw=gpu.min_mw,
        max_mw=gpu.max_mw,
        default_mw=gpu.default_mw,
        requested_mw=gpu.requested_mw,
        enforced_mw=gpu.enforced_mw,
    )


def _info(gpu: MemoryGpu) -> DeviceInfo:
    return DeviceInfo(
        uuid=gpu.uuid,
        model=gpu.model,
        pci=f"00000000:{0x10 + gpu.index:02X}:00.0",
        minor=gpu.minor,
        index=gpu.index,
        limits=_limits(gpu),
        persistence=gpu.persistence,
        mig=gpu.mig,
        sm_clock_max_mhz=1980,
        capabilities=Capabilities(settable=gpu.settable, gpm=gpu.gpm, module_scope=False),
    )


def _failure(uuid: GpuId, error: DeviceError) -> DeviceFailure:
    return DeviceFailure(uuid=uuid, kind=type(error).__name__, message=str(error))
