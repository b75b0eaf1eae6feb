"""NVML through pynvml, as the calls of the seam: it reads, and it sets the power limit.

Persistence mode, clocks and modes are never touched. A call may hang or bring the process down, so only the NVML
process (child) uses this module. Calls for different devices may run at the same time.

The limit is set with the first version of the call. ``nvmlDeviceSetPowerManagementLimit_v2`` of nvidia-ml-py
12.535 to 13.615 discards the return code, so that a refused limit looks like one in force.
"""

from __future__ import annotations

import time
from typing import Final

import pynvml

from ..model import GpuId
from .activity import Activity, Shares
from .codes import WHOLE_DEVICE, Raw, Reader, call, text, within
from .device import (
    Capabilities,
    DeadlineError,
    DeviceError,
    DeviceInfo,
    DeviceLimits,
    DeviceSample,
    LibraryGoneError,
    LostError,
    PermissionDeniedError,
    RangeError,
    UnknownDeviceError,
    UnsupportedError,
)
from .power import (
    AVERAGE,
    ENERGY,
    ENFORCED,
    INSTANT,
    MAX,
    MAX_DRAW_MW,
    MAX_LIMIT_MW,
    MIN,
    REQUESTED,
    ROUNDING_MW,
    PowerReader,
    module_scope,
)
from .rights import may_set_limits

_MOST_CLOCK_MHZ: Final = 10_000
_NOTHING_ACTIVE: Final = Shares(0.0, 0.0, 0.0)


class _Board:
    """What is known of one device. One thread at a time uses it."""

    def __init__(self, uuid: GpuId, handle: Raw) -> None:
        self.uuid = uuid
        self.handle = handle
        self.power = PowerReader()
        self.activity = Activity()
        self.max_mw: int | None = None
        self.default_mw: int | None = None
        self.refused = False
        """The last set was refused for want of rights or support, so the device is not settable."""

    def reader(self) -> Reader:
        return Reader(self.uuid, self.handle)

    def most_draw_mw(self) -> int:
        return MAX_DRAW_MW if self.max_mw is None else min(MAX_DRAW_MW, 2 * self.max_mw)


class Nvml:
    """The library from ``open`` on. Methods raise DeviceErrors.

    There is no way to close it: the end of the process lets go of every handle, also of a sick library.
    """

    def __init__(self) -> None:
        self._boards: dict[GpuId, _Board] = {}

    def open(self) -> None:
        """Load and initialise the library, once. Whatever goes wrong here is a LibraryGoneError."""
        try:
            call("nvmlInit")
        except DeviceError as error:
            raise LibraryGoneError(
                f"NVML does not start: {error}; check that the driver is loaded and that libnvidia-ml.so.1 is of "
                "the same version",
                code=error.code,
            ) from error

    def count(self) -> int:
        """How many devices are listed now."""
        return int(call("nvmlDeviceGetCount"))

    def describe(self, index: int) -> DeviceInfo:
        """Identity, limits and capabilities of device ``index``. The error carries its UUID once that is known."""
        handle = call("nvmlDeviceGetHandleByIndex", index)
        uuid = text(call("nvmlDeviceGetUUID", handle))
        board = self._boards.setdefault(uuid, _Board(uuid, handle))
        board.handle = handle
        limits = self._learn(board)
        reader = board.reader()
        return DeviceInfo(
            uuid=uuid,
            model=text(call("nvmlDeviceGetName", handle, uuid=uuid)),
            pci=text(call("nvmlDeviceGetPciInfo", handle, uuid=uuid).busId),
            minor=int(call("nvmlDeviceGetMinorNumber", handle, uuid=uuid)),
            index=index,
            limits=limits,
            persistence=_flag(reader.get("nvmlDeviceGetPersistenceMode")),
            mig=_divided(reader),
            sm_clock_max_mhz=within(
                reader.get("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM), 1, _MOST_CLOCK_MHZ
            ),
            capabilities=_capabilities(board, reader),
        )

    def set_limit(self, uuid: GpuId, cap_mw: int, until_ns: int) -> DeviceLimits:
        """Ask for a limit and read it back; the answer also says what it replaced.

        The range is read from the device each time, because it can change. After ``until_ns`` (CLOCK_MONOTONIC)
        nothing is set any more: whoever asked has given up, and may have wanted something else since. Raises
        RangeError outside of the range, and UnknownDeviceError when the call succeeds but what is then requested is
        another limit.
        """
        board = self._board(uuid)
        reader = board.reader()
        found = text(call("nvmlDeviceGetUUID", board.handle, uuid=uuid))
        if found != uuid:
            self.forget(uuid)
            raise LostError(f"{uuid}: its handle now leads to {found}; nothing was set", uuid=uuid)
        before = board.power.read(reader, MIN, MAX, REQUESTED)
        min_mw, max_mw = _range(uuid, reader, before[MIN], before[MAX])
        default_mw = _known(uuid, reader, "default limit", board.default_mw)
        if not min_mw <= cap_mw <= max_mw:
            raise RangeError(f"{uuid}: {cap_mw} mW is outside {min_mw}..{max_mw} mW", uuid=uuid)
        if time.monotonic_ns() > until_ns:
            raise DeadlineError(f"{uuid}: too late for {cap_mw} mW; nothing was set", uuid=uuid)
        try:
            call("nvmlDeviceSetPowerManagementLimit", board.handle, cap_mw, uuid=uuid)
        except (PermissionDeniedError, UnsupportedError):
            board.refused = True
            raise
        board.refused = False
        after = board.power.read(reader, REQUESTED, ENFORCED)
        requested_mw, enforced_mw = after[REQUESTED], after[ENFORCED]
        if requested_mw is None or enforced_mw is None:
            raise UnknownDeviceError(
                f"{uuid}: set {cap_mw} mW was accepted but cannot be read back: {reader.first_error}",
                uuid=uuid,
            )
        if abs(requested_mw - cap_mw) > ROUNDING_MW:
            raise UnknownDeviceError(
                f"{uuid}: set {cap_mw} mW was accepted but {requested_mw} mW is read back", uuid=uuid
            )
        return DeviceLimits(
            min_mw=min_mw,
            max_mw=max_mw,
            default_mw=default_mw,
            requested_mw=requested_mw,
            enforced_mw=enforced_mw,
            replaced_mw=before[REQUESTED],
        )

    def sample(self, uuid: GpuId, *, activity: bool, quick: bool) -> DeviceSample:
        """Read one device. What it does not give, or gives as nonsense, is None; if nothing is left it raises.

        ``quick`` reads limits and instant draw only; ``activity`` adds utilisation and the counters.
        """
        board = self._board(uuid)
        reader = board.reader()
        monotonic_ns = time.monotonic_ns()
        wanted = (REQUESTED, ENFORCED, INSTANT) if quick else (REQUESTED, ENFORCED, INSTANT, AVERAGE, ENERGY)
        power = board.power.read(reader, *wanted)
        most_mw = board.most_draw_mw()
        busy = reader.get("nvmlDeviceGetUtilizationRates") if activity else None
        shares = board.activity.read(reader) if activity else Shares()
        if busy is not None and int(busy.gpu) > 0 and shares == _NOTHING_ACTIVE:
            shares = Shares()  # over too short a time some drivers count nothing and call that success
        sample = DeviceSample(
            uuid=uuid,
            monotonic_ns=monotonic_ns,
            requested_mw=power[REQUESTED],
            enforced_mw=power[ENFORCED],
            draw_mw=within(power[INSTANT], 0, most_mw),
            energy_mj=power.get(ENERGY),
            utilisation=None if busy is None else within(int(busy.gpu) / 100, 0.0, 1.0),
            sm_clock_mhz=None if quick else _sm_clock_mhz(reader),
            event_reasons=None if quick else _event_reasons(reader),
            average_mw=within(power.get(AVERAGE), 0, most_mw),
            copy_utilisation=None if busy is None else within(int(busy.memory) / 100, 0.0, 1.0),
            sm_active=shares.sm_active,
            tensor_active=shares.tensor_active,
            dram_active=shares.dram_active,
        )
        reader.check()
        return sample

    def forget(self, uuid: GpuId) -> None:
        """Look the device up anew at its next call: after a loss or a reset its handle may be stale."""
        self._boards.pop(uuid, None)

    def _board(self, uuid: GpuId) -> _Board:
        """The board, met for the first time or not."""
        board = self._boards.get(uuid)
        if board is None:
            try:
                handle = call("nvmlDeviceGetHandleByUUID", uuid, uuid=uuid)
            except RangeError as error:
                raise LostError(f"{uuid}: no such device", uuid=uuid, code=error.code) from error
            board = self._boards[uuid] = _Board(uuid, handle)
            try:
                self._learn(board)
            except WHOLE_DEVICE:
                del self._boards[uuid]
                raise
            except DeviceError:
                pass  # a board without limits can still be read
        return board

    @staticmethod
    def _learn(board: _Board) -> DeviceLimits:
        """Its limits by the functions that are made for them, and which of them it gives by number as well."""
        uuid, handle = board.uuid, board.handle
        pair = call("nvmlDeviceGetPowerManagementLimitConstraints", handle, uuid=uuid)
        reader = board.reader()
        min_mw, max_mw = _range(uuid, reader, int(pair[0]), int(pair[1]))
        read = {}
        for name, function in (
            ("default", "nvmlDeviceGetPowerManagementDefaultLimit"),
            ("requested", REQUESTED.function),
            ("enforced", ENFORCED.function),
        ):
            value = int(call(function, handle, uuid=uuid))
            if not 0 < value <= MAX_LIMIT_MW:
                raise UnknownDeviceError(f"{uuid}: absurd {name} limit {value} mW", uuid=uuid)
            read[name] = value
        board.max_mw, board.default_mw = max_mw, read["default"]
        known = {MIN: min_mw, MAX: max_mw, REQUESTED: read["requested"], ENFORCED: read["enforced"]}
        board.power.compare(reader, known)
        return DeviceLimits(
            min_mw=min_mw,
            max_mw=max_mw,
            default_mw=read["default"],
            requested_mw=read["requested"],
            enforced_mw=read["enforced"],
        )


def _range(uuid: GpuId, reader: Reader, low: int | None, high: int | None) -> tuple[int, int]:
    min_mw, max_mw = _known(uuid, reader, "least limit", low), _known(uuid, reader, "greatest limit", high)
    if not 0 < min_mw <= max_mw <= MAX_LIMIT_MW:
        raise UnknownDeviceError(f"{uuid}: absurd range {min_mw}..{max_mw} mW", uuid=uuid)
    return min_mw, max_mw


def _known(uuid: GpuId, reader: Reader, what: str, value: int | None) -> int:
    """A value without which there is no answer."""
    if value is None:
        raise reader.first_error or UnknownDeviceError(f"{uuid}: absurd {what}", uuid=uuid)
    return value


def _flag(value: Raw) -> bool | None:
    return None if value is None else bool(value)


def _sm_clock_mhz(reader: Reader) -> int | None:
    return within(reader.get("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM), 0, _MOST_CLOCK_MHZ)


def _event_reasons(reader: Reader) -> int | None:
    reasons = reader.get("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name before driver 535
        reasons = reader.get("nvmlDeviceGetCurrentClocksThrottleReasons")
    return None if reasons is None else int(reasons)


def _divided(reader: Reader) -> bool | None:
    """Whether the board is in MIG mode now. One that knows no MIG is not."""
    modes = reader.attempt("nvmlDeviceGetMigMode")
    if isinstance(modes, DeviceError):
        return False if isinstance(modes, UnsupportedError) else None
    return bool(modes[0])


def _capabilities(board: _Board, reader: Reader) -> Capabilities:
    board.activity.probe(reader)
    return Capabilities(
        settable=_settable(board, reader),
        gpm=board.activity.supported,
        module_scope=module_scope(reader),
    )


def _settable(board: _Board, reader: Reader) -> bool | None:
    """Whether the limit can be set, found without setting it. Without the right to, only a set would tell."""
    if board.refused or reader.get("nvmlDeviceGetPowerManagementMode") == pynvml.NVML_FEATURE_DISABLED:
        return False
    return True if may_set_limits() else None
