"""NVML through pynvml: the one place where its return codes and surprises become the typed errors of the seam.

It reads, and it sets the power limit; persistence mode, clocks and modes are never touched. A call may hang or bring
the process down, so only the NVML process (child) uses this module.

The limit is set with the first version of the call. ``nvmlDeviceSetPowerManagementLimit_v2`` of nvidia-ml-py
12.535 to 13.615 discards the return code, so that a refused limit looks like one in force.
"""

from __future__ import annotations

import time
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import pynvml

from ..model import GpuId
from .device import (
    DeadlineError,
    DeviceError,
    DeviceInfo,
    DeviceLimits,
    DeviceSample,
    LibraryGoneError,
    LostError,
    NeedsResetError,
    PermissionDeniedError,
    RangeError,
    UnknownDeviceError,
    UnsupportedError,
)

ROUNDING_MW: Final = 1000
"""Boards may round a limit; a read-back within 1 W is what was asked for."""

_MAX_DRAW_MW: Final = 2_000_000
"""No board draws 2 kW (the largest today is 1.4 kW); such a reading is garbage that came with SUCCESS."""

_MAX_LIMIT_MW: Final = 10_000_000
_MAX_ENERGY_MJ: Final = 2_000_000 * 86_400 * 365 * 30
"""2 kW for 30 years, above which an energy counter is a sentinel or garbage. mW x s = mJ."""

_KINDS: Final[dict[int, type[DeviceError]]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: LibraryGoneError,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: RangeError,
    pynvml.NVML_ERROR_NOT_SUPPORTED: UnsupportedError,
    pynvml.NVML_ERROR_NO_PERMISSION: PermissionDeniedError,
    pynvml.NVML_ERROR_NOT_FOUND: LostError,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: LibraryGoneError,
    pynvml.NVML_ERROR_TIMEOUT: DeadlineError,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: LibraryGoneError,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: UnsupportedError,
    pynvml.NVML_ERROR_GPU_IS_LOST: LostError,
    pynvml.NVML_ERROR_RESET_REQUIRED: NeedsResetError,
    pynvml.NVML_ERROR_OPERATING_SYSTEM: PermissionDeniedError,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: LibraryGoneError,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: UnsupportedError,
    28: LostError,  # NVML_ERROR_GPU_NOT_FOUND, which older bindings do not name
}
_WHOLE_DEVICE: Final = (LostError, NeedsResetError, LibraryGoneError, DeadlineError)
"""After one of these nothing else of the device can be had either."""

_T = TypeVar("_T", int, float)
_Raw: TypeAlias = Any
"""What the binding hands out: it ships no types."""


class Nvml:
    """The library from ``open`` on. Methods raise DeviceErrors.

    There is no way to close it: the end of the process lets go of every handle, also of a sick library.
    """

    def __init__(self) -> None:
        self._handles: dict[GpuId, _Raw] = {}
        self._max_mw: dict[GpuId, int] = {}

    def open(self) -> None:
        """Load and initialise the library, once. Whatever goes wrong here is a LibraryGoneError."""
        try:
            _call("nvmlInit")
        except DeviceError as error:
            raise LibraryGoneError(
                f"NVML does not start: {error}; check that the driver is loaded and that libnvidia-ml.so.1 is of "
                "the same version",
                code=error.code,
            ) from error

    def count(self) -> int:
        """How many devices are listed now."""
        return int(_call("nvmlDeviceGetCount"))

    def describe(self, index: int) -> DeviceInfo:
        """Identity and limits of device ``index``. The error carries its UUID once that is known."""
        handle = _call("nvmlDeviceGetHandleByIndex", index)
        uuid = _text(_call("nvmlDeviceGetUUID", handle))
        self._handles[uuid] = handle
        limits = self._limits(uuid, handle)
        self._max_mw[uuid] = limits.max_mw
        return DeviceInfo(
            uuid=uuid,
            model=_text(_call("nvmlDeviceGetName", handle, uuid=uuid)),
            pci=_text(_call("nvmlDeviceGetPciInfo", handle, uuid=uuid).busId),
            minor=int(_call("nvmlDeviceGetMinorNumber", handle, uuid=uuid)),
            index=index,
            limits=limits,
            persistence=self._persistence(uuid, handle),
        )

    def set_limit(self, uuid: GpuId, cap_mw: int) -> DeviceLimits:
        """Ask for a limit and read it back; the answer also says what it replaced.

        The range is read from the device each time, because it can change. Raises RangeError outside of it, and
        UnknownDeviceError when the call succeeds but the limit asked for is not the one that is then requested.
        """
        handle = self._handle(uuid)
        found = _text(_call("nvmlDeviceGetUUID", handle, uuid=uuid))
        if found != uuid:
            self._handles.pop(uuid, None)
            raise LostError(f"{uuid}: its handle now leads to {found}; nothing was set", uuid=uuid)
        min_mw, max_mw = self._range(uuid, handle)
        if not min_mw <= cap_mw <= max_mw:
            raise RangeError(f"{uuid}: {cap_mw} mW is outside {min_mw}..{max_mw} mW", uuid=uuid)
        found_mw = _Reader(uuid, handle).get("nvmlDeviceGetPowerManagementLimit")
        _call("nvmlDeviceSetPowerManagementLimit", handle, cap_mw, uuid=uuid)
        limits = self._limits(uuid, handle)
        if abs(limits.requested_mw - cap_mw) > ROUNDING_MW:
            raise UnknownDeviceError(
                f"{uuid}: set {cap_mw} mW was accepted but {limits.requested_mw} mW is read back", uuid=uuid
            )
        return msgspec.structs.replace(limits, replaced_mw=_within(found_mw, 1, _MAX_LIMIT_MW))

    def sample(self, uuid: GpuId) -> DeviceSample:
        """Read one device. What it does not give, or gives as nonsense, is None; if nothing is left it raises."""
        handle = self._handle(uuid)
        reader = _Reader(uuid, handle)
        monotonic_ns = time.monotonic_ns()
        sample = DeviceSample(
            uuid=uuid,
            monotonic_ns=monotonic_ns,
            requested_mw=_within(reader.get("nvmlDeviceGetPowerManagementLimit"), 1, _MAX_LIMIT_MW),
            enforced_mw=_within(reader.get("nvmlDeviceGetEnforcedPowerLimit"), 1, _MAX_LIMIT_MW),
            draw_mw=_within(reader.draw_mw(), 0, self._most_draw_mw(uuid)),
            energy_mj=_within(reader.get("nvmlDeviceGetTotalEnergyConsumption"), 0, _MAX_ENERGY_MJ),
            utilisation=_within(reader.utilisation(), 0.0, 1.0),
            sm_clock_mhz=_within(reader.get("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM), 0, 10_000),
            event_reasons=reader.event_reasons(),
        )
        if reader.first_error is not None and not reader.any_answer:
            raise reader.first_error
        return sample

    def _handle(self, uuid: GpuId) -> _Raw:
        if uuid not in self._handles:
            try:
                self._handles[uuid] = _call("nvmlDeviceGetHandleByUUID", uuid, uuid=uuid)
            except RangeError as error:
                raise LostError(f"{uuid}: no such device", uuid=uuid, code=error.code) from error
        return self._handles[uuid]

    def _most_draw_mw(self, uuid: GpuId) -> int:
        return min(_MAX_DRAW_MW, 2 * self._max_mw.get(uuid, _MAX_DRAW_MW))

    @staticmethod
    def _range(uuid: GpuId, handle: _Raw) -> tuple[int, int]:
        low, high = _call("nvmlDeviceGetPowerManagementLimitConstraints", handle, uuid=uuid)
        min_mw, max_mw = int(low), int(high)
        if not 0 < min_mw <= max_mw <= _MAX_LIMIT_MW:
            raise UnknownDeviceError(f"{uuid}: absurd range {min_mw}..{max_mw} mW", uuid=uuid)
        return min_mw, max_mw

    def _limits(self, uuid: GpuId, handle: _Raw) -> DeviceLimits:
        min_mw, max_mw = self._range(uuid, handle)
        read = {}
        for name, function in (
            ("default", "nvmlDeviceGetPowerManagementDefaultLimit"),
            ("requested", "nvmlDeviceGetPowerManagementLimit"),
            ("enforced", "nvmlDeviceGetEnforcedPowerLimit"),
        ):
            value = int(_call(function, handle, uuid=uuid))
            if not 0 < value <= _MAX_LIMIT_MW:
                raise UnknownDeviceError(f"{uuid}: absurd {name} limit {value} mW", uuid=uuid)
            read[name] = value
        return DeviceLimits(
            min_mw=min_mw,
            max_mw=max_mw,
            default_mw=read["default"],
            requested_mw=read["requested"],
            enforced_mw=read["enforced"],
        )

    @staticmethod
    def _persistence(uuid: GpuId, handle: _Raw) -> bool | None:
        try:
            return bool(_call("nvmlDeviceGetPersistenceMode", handle, uuid=uuid))
        except (UnsupportedError, PermissionDeniedError, UnknownDeviceError):
            return None


class _Reader:
    """Quantities of one device, each on its own: one that is not offered does not hide the others."""

    def __init__(self, uuid: GpuId, handle: _Raw) -> None:
        self._uuid = uuid
        self._handle = handle
        self.first_error: DeviceError | None = None
        self.any_answer = False

    def get(self, function: str, *args: object) -> _Raw:
        """The value, or None when the device does not give it. Raises when the device as a whole is gone."""
        try:
            value = _call(function, self._handle, *args, uuid=self._uuid)
        except _WHOLE_DEVICE:
            raise
        except DeviceError as error:
            self.first_error = self.first_error or error
            return None
        self.any_answer = True
        return value

    def draw_mw(self) -> int | None:
        """The instant draw; where a board has no such field, its average of about 1 s."""
        fields = self.get("nvmlDeviceGetFieldValues", [pynvml.NVML_FI_DEV_POWER_INSTANT])
        # A call that succeeds may still carry an error in its entry.
        if fields is not None and fields[0].nvmlReturn == pynvml.NVML_SUCCESS:
            return int(fields[0].value.uiVal)
        average = self.get("nvmlDeviceGetPowerUsage")
        return None if average is None else int(average)

    def utilisation(self) -> float | None:
        rates = self.get("nvmlDeviceGetUtilizationRates")
        return None if rates is None else int(rates.gpu) / 100

    def event_reasons(self) -> int | None:
        reasons = self.get("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # the name before driver 535
            reasons = self.get("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if reasons is None else int(reasons)


def _within(value: _T | None, low: _T, high: _T) -> _T | None:
    return value if value is not None and low <= value <= high else None


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _call(function: str, *args: object, uuid: GpuId = "") -> _Raw:
    """Call a function of pynvml. Raises a DeviceError for everything that it can raise."""
    where = f"{uuid}: {function}" if uuid else function
    try:
        return getattr(pynvml, function)(*args)
    except pynvml.NVMLError as error:
        code = int(error.value)
        kind = _KINDS.get(code, UnknownDeviceError)
        raise kind(f"{where}: {_code_text(error, code)}", uuid=uuid, code=code) from error
    except pynvml.NVMLLibraryMismatchError as error:  # not an NVMLError
        raise LibraryGoneError(f"{where}: library and driver do not match: {error}", uuid=uuid) from error
    except AttributeError as error:  # the binding has no such function
        raise UnsupportedError(f"{where}: {error}", uuid=uuid) from error
    except Exception as error:
        raise UnknownDeviceError(f"{where}: {type(error).__name__}: {error}", uuid=uuid) from error


def _code_text(error: Exception, code: int) -> str:
    try:
        return f"{error} (code {code})"
    except Exception:  # the text of an unknown code is asked of the library itself
        return f"code {code}"
