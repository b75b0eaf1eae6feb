"""The seam to GPUs: what a vendor's library must offer, in int milliwatts, keyed by UUID.

The protocol is asynchronous because a call may hang for a minute: the agent waits with a deadline and goes on with
the other devices. Every call raises a DeviceError of the matching kind; none returns a made-up value.
"""

from __future__ import annotations

from typing import Protocol

from ..model import Frozen, GpuId


class DeviceError(Exception):
    """A device or its library did not do as asked. ``uuid`` is empty when the library as a whole failed.

    ``asked`` is False where the call never left this process, so that nothing of it can have been done.
    """

    def __init__(
        self, message: str, *, uuid: GpuId = "", code: int | None = None, asked: bool = True
    ) -> None:
        super().__init__(message)
        self.uuid = uuid
        self.code = code
        self.asked = asked


class PermissionDeniedError(DeviceError):
    """The caller may not set limits."""


class UnsupportedError(DeviceError):
    """The device does not offer this."""


class RangeError(DeviceError):
    """The value lies outside what the device accepts."""


class LostError(DeviceError):
    """The device fell off the bus or is no longer listed."""


class NeedsResetError(DeviceError):
    """The device answers nothing until it is reset."""


class DeadlineError(DeviceError):
    """No answer in time; the device may or may not have done it."""


class LibraryGoneError(DeviceError):
    """The library or driver is missing, mismatched, or its process died."""


class UnknownDeviceError(DeviceError):
    """A return code that we do not know."""


class DeviceLimits(Frozen, frozen=True, kw_only=True):
    """Power limits of one device, milliwatts. Requested is what was asked in band; enforced is what rules.

    ``replaced_mw``: in the answer to a set, what was requested just before it; None when that could not be read.
    """

    min_mw: int
    max_mw: int
    default_mw: int
    requested_mw: int
    enforced_mw: int
    replaced_mw: int | None = None


class Capabilities(Frozen, frozen=True, kw_only=True):
    """What a device offers, found out without changing anything; None where it could not be told.

    ``settable``: the device has a settable limit and this process the right to set it. ``gpm``: activity counters.
    ``module_scope``: a limit of the whole module (GH200) may rule below the device's own.
    """

    settable: bool | None = None
    gpm: bool | None = None
    module_scope: bool | None = None


class DeviceInfo(Frozen, frozen=True, kw_only=True):
    """Identity of one device. ``minor`` is the N of /dev/nvidiaN; ``index`` is today's NVML order, for people only.

    ``mig``: whether the board is divided into slices now; None where that could not be told.
    """

    uuid: GpuId
    model: str
    pci: str
    minor: int
    index: int
    limits: DeviceLimits
    persistence: bool | None
    mig: bool | None = None
    sm_clock_max_mhz: int | None = None
    capabilities: Capabilities = Capabilities()


class DeviceSample(Frozen, frozen=True, kw_only=True):
    """A reading of one device. A quantity that the device did not give, or gave as nonsense, is None.

    ``draw_mw`` is the instant draw where the device has it, ``average_mw`` its own average of about 1 s. Activities are
    shares 0..1 of the time since the device's last reading with activity; ``copy_utilisation`` is that of memory.
    """

    uuid: GpuId
    monotonic_ns: int
    requested_mw: int | None
    enforced_mw: int | None
    draw_mw: int | None
    energy_mj: int | None
    utilisation: float | None
    sm_clock_mhz: int | None
    event_reasons: int | None
    average_mw: int | None = None
    copy_utilisation: float | None = None
    sm_active: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None


class DeviceFailure(Frozen, frozen=True, kw_only=True):
    """One device's answer in a batch when it failed: the error's class name and its message."""

    uuid: GpuId
    kind: str
    message: str


class GpuDevices(Protocol):
    """All GPUs of this node. Implementations: NVML in a child process, and memory (tests of the agent)."""

    async def list_devices(self) -> tuple[tuple[DeviceInfo, ...], tuple[DeviceFailure, ...]]:
        """Enumerate. A device that fails is reported beside the others, never instead of them."""

    async def set_limit(self, uuid: GpuId, cap_mw: int) -> DeviceLimits:
        """Ask for a limit and read it back at once. ``enforced_mw`` may still be on its way.

        What is replaced is read just before, so that another writer's limit does not go unseen.
        """

    async def sample(
        self, uuids: tuple[GpuId, ...], *, activity: bool = False, quick: bool = False, hurry: bool = False
    ) -> tuple[DeviceSample | DeviceFailure, ...]:
        """Read limits and draw of these devices, one answer each, in order, all devices at the same time.

        ``activity`` reads utilisation and the counters too; ``quick`` reads limits and instant draw alone. With
        ``hurry`` devices that take much longer than the others have no answer yet: one that hangs holds up nobody.
        """

    async def release(self) -> None:
        """Let go of every handle, so that a reset, a MIG change or a driver upgrade can go on."""
