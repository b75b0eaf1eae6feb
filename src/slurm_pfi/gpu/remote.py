"""The GPUs of this node through NVML in a supervised process: a library that hangs or crashes costs one device.

Calls for all devices run at the same time, each with its own deadline; ``supervisor`` says what becomes of a device
that hangs or brings the process down. While the library itself does not start, each try waits longer than the one
before, and calls in between fail at once with what went wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ..model import GpuId
from .backoff import FIRST_BACK_OFF_S
from .device import (
    DeviceError,
    DeviceFailure,
    DeviceInfo,
    DeviceLimits,
    DeviceSample,
    LibraryGoneError,
    LostError,
)
from .process import Ask, Outcome, PendingError
from .supervisor import Supervisor
from .wire import Count, Describe, Reply, SetLimit, TakeSample


class RemoteGpuDevices:
    """Implements GpuDevices. Starts its process at the first call; ``close`` it in the end.

    ``deadline_s`` is for one call on one device, ``start_deadline_s`` for a new process to load its code.
    ``environment`` is that of the process, by default our own. ``may_replace`` says whether now is a moment in which
    the process may be replaced for the sake of one device: the others have their caps, or cannot have them.
    """

    def __init__(
        self,
        *,
        deadline_s: float = 5.0,
        start_deadline_s: float = 10.0,
        environment: Mapping[str, str] | None = None,
        first_back_off_s: float = FIRST_BACK_OFF_S,
        may_replace: Callable[[], bool] = lambda: True,
    ) -> None:
        self._supervisor = Supervisor(
            deadline_s=deadline_s,
            start_deadline_s=start_deadline_s,
            environment=environment,
            first_back_off_s=first_back_off_s,
            may_replace=may_replace,
        )
        self._listing = asyncio.Lock()
        self._uuid_at: dict[tuple[int | None, int, int], GpuId] = {}
        self._known: dict[GpuId, None] = {}

    @property
    def pid(self) -> int | None:
        """The process that serves now; None when there is none."""
        return self._supervisor.pid

    async def list_devices(self) -> tuple[tuple[DeviceInfo, ...], tuple[DeviceFailure, ...]]:
        """As the protocol says. A device seen before and missing now is reported by its UUID, once.

        Raises LibraryGoneError or DeadlineError when nothing at all can be said.
        """
        async with self._listing:
            count = (await self._ask(Ask(Count()))).count or 0
            # Indices are those of one process: a new one may find the devices in another order.
            pid = self.pid
            places = [(pid, count, index) for index in range(count)]
            outcomes = await self._supervisor.ask([self._describe(place) for place in places])
        infos: list[DeviceInfo] = []
        failures: list[DeviceFailure] = []
        error: DeviceError | None = None
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, DeviceError):
                error = outcome
                failures.append(_failure(error, where=f"device {index} of {count}: "))
            elif isinstance(outcome, Reply) and outcome.info is not None:
                if stuck := self._supervisor.stuck_set(outcome.info.uuid):
                    failures.append(_failure(stuck))
                else:
                    infos.append(outcome.info)
                self._uuid_at[places[index]] = outcome.info.uuid
        if isinstance(error, LibraryGoneError) and not infos:
            raise error
        self._known.update(dict.fromkeys(info.uuid for info in infos))
        return tuple(infos), tuple(self._name_the_missing(infos, failures))

    async def set_limit(self, uuid: GpuId, cap_mw: int) -> DeviceLimits:
        """As the protocol says. After DeadlineError or LibraryGoneError the limit may or may not be in force.

        Raises UnknownDeviceError when the set was accepted but is not what is then requested (within 1 W).
        """
        reply = await self._ask(Ask(SetLimit(uuid=uuid, cap_mw=cap_mw), device=uuid))
        if reply.limits is None:
            raise LibraryGoneError(f"{uuid}: the NVML process gave no limits", uuid=uuid)
        return reply.limits

    async def sample(
        self, uuids: tuple[GpuId, ...], *, activity: bool = False, quick: bool = False, hurry: bool = False
    ) -> tuple[DeviceSample | DeviceFailure, ...]:
        """As the protocol says; it never raises a DeviceError."""
        asks = [Ask(TakeSample(uuid=uuid, activity=activity, quick=quick), device=uuid) for uuid in uuids]
        outcomes = await self._supervisor.ask(asks, hurry=hurry)
        return tuple(
            _sample(uuid, outcome)
            for uuid, outcome in zip(uuids, outcomes, strict=True)
            if not isinstance(outcome, PendingError)
        )

    async def release(self) -> None:
        """End the process: that lets go of every handle. The next call starts a new one."""
        await self._supervisor.release()

    async def close(self) -> None:
        """Release for good. A process that is stuck in the driver is left to the kernel."""
        await self._supervisor.close()

    def _describe(self, place: tuple[int | None, int, int]) -> Ask:
        # A device that hangs cannot say who it is; then the one that was there last time is held back.
        _, count, index = place
        return Ask(Describe(index=index), device=self._uuid_at.get(place, ""), place=f"{index} of {count}")

    async def _ask(self, ask: Ask) -> Reply:
        (outcome,) = await self._supervisor.ask([ask])
        if isinstance(outcome, Reply):
            return outcome
        raise outcome

    def _name_the_missing(
        self, infos: list[DeviceInfo], failures: list[DeviceFailure]
    ) -> list[DeviceFailure]:
        """Known devices that are not there stand for as many failures without a name: each is counted once."""
        named = [failure for failure in failures if failure.uuid]
        nameless = [failure for failure in failures if not failure.uuid]
        there = {info.uuid for info in infos} | {failure.uuid for failure in named}
        missing = [uuid for uuid in self._known if uuid not in there]
        if len(missing) == len(nameless) == 1:
            old = nameless[0]
            return [*named, DeviceFailure(uuid=missing[0], kind=old.kind, message=old.message)]
        lost = [
            DeviceFailure(uuid=uuid, kind=LostError.__name__, message=f"{uuid}: no longer listed")
            for uuid in missing
        ]
        return [*named, *lost, *nameless[len(missing) :]]


def _sample(uuid: GpuId, outcome: Outcome) -> DeviceSample | DeviceFailure:
    if isinstance(outcome, DeviceError):
        return _failure(outcome, uuid=uuid)
    if outcome.sample is None:
        return _failure(LibraryGoneError("the NVML process gave no sample"), uuid=uuid)
    return outcome.sample


def _failure(error: DeviceError, *, uuid: GpuId = "", where: str = "") -> DeviceFailure:
    return DeviceFailure(uuid=uuid or error.uuid, kind=type(error).__name__, message=where + str(error))
