"""The 44 faults of a GPU node that the agent must survive, each by its number, and how the stand-in brings it about.

    plant(node, 19, gpu=3)                      # in its usual form
    plant(node, 32, gpu=3, variant="missing")   # in another
    nvml_environment(node_dir, library(1, folder))  # faults of the library file: before the process starts

``FAULTS[number].variants`` has the forms, the usual one first. A fault of the agent's own doing (``by_test``) says what
a test does instead. ``node.clear_faults()`` ends what can be ended; limits stay as they are, as on hardware.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Final, TypeAlias

from .gpus import FaultKind, Node, Pids, read_devices, write_devices
from .standin import (
    library_of_other_architecture,
    library_with_undefined_symbol,
    library_without,
    no_library,
    truncated_library,
)

SETTER: Final = "nvmlDeviceSetPowerManagementLimit"
SETTER_V2: Final = "nvmlDeviceSetPowerManagementLimit_v2"
GETTER: Final = "nvmlDeviceGetPowerManagementLimit"
LIMIT_GETTERS: Final = (
    GETTER,
    "nvmlDeviceGetPowerManagementDefaultLimit",
    "nvmlDeviceGetPowerManagementLimitConstraints",
    "nvmlDeviceGetEnforcedPowerLimit",
)
POWER: Final = "nvmlDeviceGetPowerUsage"
ENERGY: Final = "nvmlDeviceGetTotalEnergyConsumption"
FIELDS: Final = "nvmlDeviceGetFieldValues"
UTILISATION: Final = "nvmlDeviceGetUtilizationRates"
INIT: Final = "nvmlInit_v2"
"""Met by every initialisation."""

HANG_S: Final = 45.0
"""How long a call of a sick driver was seen to hang."""


class Code(IntEnum):
    """NVML's return codes that faults use."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    UNKNOWN = 999
    OF_A_LATER_DRIVER = 12345


class Field(IntEnum):
    """Field ids of nvmlDeviceGetFieldValues."""

    TOTAL_ENERGY = 83
    POWER_AVERAGE = 185
    POWER_INSTANT = 186
    ENERGY = 191


class Reason(IntEnum):
    """Clocks event reasons of a slowdown; the hardware's come with HW_SLOWDOWN."""

    SW_THERMAL = 0x20
    HW_THERMAL = 0x40 | 0x08
    HW_POWER_BRAKE = 0x80 | 0x08


Gpu: TypeAlias = str | int | None
"""A UUID, or a place in PCI order; None: every GPU."""

Plant: TypeAlias = Callable[[Node, Gpu], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: ``variants`` plant it in a running node, ``libraries`` make the file of libnvidia-ml.so.1 into a
    folder, and ``by_test`` says what a test does where neither is it."""

    number: int
    name: str
    variants: Mapping[str, Plant] = field(default_factory=dict)
    libraries: Mapping[str, Callable[[Path], Path]] = field(default_factory=dict)
    by_test: str = ""


def plant(node: Node, number: int, gpu: Gpu = None, *, variant: str | None = None) -> None:
    """Plant a fault by its number. Raises KeyError for one that is not planted in a node, or has no such variant."""
    variants = FAULTS[number].variants
    variants[next(iter(variants), "") if variant is None else variant](node, gpu)


def library(number: int, folder: Path, *, variant: str | None = None) -> Path:
    """Make the library of a fault into a folder, and return the folder. Raises KeyError as ``plant`` does."""
    libraries = FAULTS[number].libraries
    return libraries[next(iter(libraries), "") if variant is None else variant](folder)


# ------------------------------------------------------------------------------------------------ kinds of plants


def _slots(node: Node, gpu: Gpu) -> list[int]:
    return [state.index for state in node.snapshot() if gpu in (None, state.index, state.uuid)]


def _poke(*quantities: tuple[str, float]) -> Plant:
    def plant(node: Node, gpu: Gpu) -> None:
        for what, value in quantities:
            node.poke(what, value, gpu=gpu)

    return plant


def _poke_node(what: str, value: float) -> Plant:
    return lambda node, _gpu: node.poke(what, value)


def _answer(code: Code, *functions: str) -> Plant:
    def plant(node: Node, gpu: Gpu) -> None:
        for function in functions:
            node.fault(function, code=code, gpu=gpu)

    return plant


def _meet(
    function: str,
    kind: FaultKind,
    *,
    code: int = 0,
    count: int = -1,
    delay_s: float = 0.0,
    value: float = 0.0,
    field: int = 0,
) -> Plant:
    """For ``*``: calls on the GPU, none on the system as a whole."""

    def plant(node: Node, gpu: Gpu) -> None:
        for slot in _slots(node, gpu):
            node.fault(
                function, kind, code=code, gpu=slot, count=count, delay_s=delay_s, value=value, field=field
            )

    return plant


def _meet_init(kind: FaultKind, *, delay_s: float = 0.0) -> Plant:
    return lambda node, _gpu: node.fault(INIT, kind, delay_s=delay_s)


def _all(*plants: Plant) -> Plant:
    def plant(node: Node, gpu: Gpu) -> None:
        for each in plants:
            each(node, gpu)

    return plant


# ------------------------------------------------------------------------------------------------ plants of their own


def _move_minors(node: Node, _gpu: Gpu) -> None:
    """After a boot every device file leads to the next GPU."""
    states = node.snapshot()
    minors = [state.minor for state in states]
    moved = dict(zip([state.uuid for state in states], [*minors[1:], minors[0]], strict=True))
    for uuid_, minor in moved.items():
        node.poke("minor", minor, gpu=uuid_)
    by_minor = {moved[state.uuid]: state for state in states}
    devices = read_devices(node.node_dir)
    pci = {device.uuid: device.pci for device in devices}
    write_devices(
        node.node_dir,
        [
            replace(device, uuid=now.uuid, index=now.index, pci=pci[now.uuid])
            for device in devices
            for now in (by_minor[device.minor],)
        ],
    )


def _replace_board(node: Node, gpu: Gpu) -> None:
    for slot in _slots(node, gpu):
        node.replace(slot, f"GPU-{uuid.uuid4()}")


def _energy_backwards(node: Node, gpu: Gpu) -> None:
    for state in node.snapshot():
        if gpu in (None, state.index, state.uuid):
            node.poke("energy_offset_mj", -state.energy_mj / 2, gpu=state.index)


_ABSURD_MW: Final = 3_000_000
_GARBAGE_POWER: Final = _all(
    _meet(POWER, FaultKind.VALUE, value=_ABSURD_MW),
    _meet(FIELDS, FaultKind.VALUE, value=_ABSURD_MW, field=Field.POWER_AVERAGE),
    _meet(FIELDS, FaultKind.VALUE, value=_ABSURD_MW, field=Field.POWER_INSTANT),
)
_NO_ENERGY: Final = _all(
    _answer(Code.NOT_SUPPORTED, ENERGY),
    _meet(FIELDS, FaultKind.ENTRY, code=Code.NOT_SUPPORTED, field=Field.TOTAL_ENERGY),
    _meet(FIELDS, FaultKind.ENTRY, code=Code.NOT_SUPPORTED, field=Field.ENERGY),
)


def _slowdown(reason: Reason) -> Plant:
    return _poke(("slowdown", reason), ("clock_limit", 0.5))


# ------------------------------------------------------------------------------------------------ the table

_TABLE: Final = (
    Fault(
        1,
        "no usable library",
        libraries={
            "missing": no_library,
            "wrong architecture": library_of_other_architecture,
            "undefined symbol": library_with_undefined_symbol,
            "truncated": truncated_library,
        },
    ),
    Fault(2, "driver not loaded", {"init": _poke_node("init_code", Code.DRIVER_NOT_LOADED)}),
    Fault(
        3,
        "driver upgraded under us",
        {
            "running": _all(
                _poke_node("init_code", Code.LIB_RM_VERSION_MISMATCH),
                lambda node, _gpu: node.fault("*", code=Code.LIB_RM_VERSION_MISMATCH),
            ),
            "next init": _poke_node("init_code", Code.LIB_RM_VERSION_MISMATCH),
        },
    ),
    Fault(4, "device taken from our cgroup", {"unknown": _poke(("sticky_code", Code.UNKNOWN))}),
    Fault(
        5,
        "use before init or after fork",
        {"answered": _answer(Code.UNINITIALIZED, GETTER, SETTER, FIELDS)},
        by_test="call before nvmlInit, or in a forked child: the library answers Uninitialized by itself",
    ),
    Fault(
        6,
        "not privileged",
        {"set": _answer(Code.NO_PERMISSION, SETTER, SETTER_V2)},
        by_test="or start the client with PFI_STANDIN_EUID=1000",
    ),
    Fault(
        7,
        "set unsupported",
        {
            "set": _answer(Code.NOT_SUPPORTED, SETTER, SETTER_V2),
            "no power management": _answer(Code.NOT_SUPPORTED, SETTER, SETTER_V2, *LIMIT_GETTERS),
        },
    ),
    Fault(
        8,
        "out of range, or the range shrank",
        {
            "maximum": _poke(("max_mw", 500_000)),
            "minimum": _poke(("min_mw", 400_000)),
            "refused": _answer(Code.INVALID_ARGUMENT, SETTER, SETTER_V2),
        },
    ),
    Fault(9, "the second setter hides the error", {"set": _answer(Code.NO_PERMISSION, SETTER_V2)}),
    Fault(10, "success but not applied", {"set": _meet(SETTER, FaultKind.SILENT)}),
    Fault(
        11,
        "applied, then an error or a timeout",
        {
            "timeout": _meet(SETTER, FaultKind.APPLIED, code=Code.TIMEOUT),
            "unknown": _meet(SETTER, FaultKind.APPLIED, code=Code.UNKNOWN),
            "hangs": _meet(SETTER, FaultKind.APPLIED, delay_s=HANG_S),
            "applied late": _meet(SETTER, FaultKind.DELAY, delay_s=5.0),
        },
    ),
    Fault(
        12,
        "rounded",
        {"5 W": _poke(("granularity_mw", 5_000)), "1 W": _poke(("granularity_mw", 1_000))},
    ),
    Fault(13, "takes effect late", {"2 s": _poke(("effect_us", 2_000_000))}),
    Fault(14, "BMC cap lower", {"300 W": _poke(("bmc_mw", 300_000))}),
    Fault(15, "BMC cap lifted", {"lifted": _poke(("bmc_mw", 0))}),
    Fault(
        16,
        "another agent re-sets",
        {"650 W": _poke(("requested_mw", 650_000)), "250 W": _poke(("requested_mw", 250_000))},
    ),
    Fault(
        17,
        "persistence off: back to default",
        {
            "fell back": _poke(("persistence", 0), ("reset", 1)),
            "off": _poke(("persistence", 0)),
        },
    ),
    Fault(18, "GPU reset", {"reset": _poke(("reset", 1))}),
    Fault(19, "off the bus, Xid 79", {"lost": _poke(("sticky_code", Code.GPU_IS_LOST))}),
    Fault(20, "lost without an Xid: the count drops", {"hidden": _poke(("hidden", 1))}),
    Fault(21, "reset required", {"sticky": _poke(("sticky_code", Code.RESET_REQUIRED))}),
    Fault(22, "indices shift at the next init", {"by one": _poke_node("rotation", 1)}),
    Fault(
        23,
        "minor differs from index",
        {"moved": _move_minors},
        by_test="or create_node(..., scrambled=True)",
    ),
    Fault(
        24,
        "a call hangs",
        {
            "every call": _meet("*", FaultKind.HANG, delay_s=HANG_S),
            "set": _meet(SETTER, FaultKind.HANG, delay_s=HANG_S),
            "read": _meet(FIELDS, FaultKind.HANG, delay_s=HANG_S),
        },
    ),
    Fault(25, "init hangs", {"init": _meet_init(FaultKind.HANG, delay_s=HANG_S)}),
    Fault(
        26,
        "SIGSEGV inside the library",
        {
            "set": _meet(SETTER, FaultKind.CRASH, count=1),
            "read": _meet(FIELDS, FaultKind.CRASH, count=1),
            "every set": _meet(SETTER, FaultKind.CRASH),
            "init": _meet_init(FaultKind.CRASH),
        },
    ),
    Fault(27, "daemon killed between record and set", by_test="SIGKILL at the write or the call"),
    Fault(
        28,
        "a killed client leaves calls hanging",
        {
            "every call": _all(_poke(("orphan_hang_ms", HANG_S * 1000)), _meet("*", FaultKind.HANG, count=1)),
            "set": _all(_poke(("orphan_hang_ms", HANG_S * 1000)), _meet(SETTER, FaultKind.HANG, count=1)),
        },
        by_test="then kill the client that hangs",
    ),
    Fault(29, "reboot with a stale record", by_test="a record of another boot; poke reset for the limits"),
    Fault(30, "GPU replaced", {"new board": _replace_board}),
    Fault(31, "garbage power with success", {"3 kW": _GARBAGE_POWER}),
    Fault(32, "energy missing or running backwards", {"backwards": _energy_backwards, "missing": _NO_ENERGY}),
    Fault(33, "utilisation stuck", {"100 %": _meet(UTILISATION, FaultKind.VALUE, value=100)}),
    Fault(
        34,
        "idle job, or pids of another namespace",
        {
            "foreign": _poke(("pids", Pids.FOREIGN)),
            "zero": _poke(("pids", Pids.ZERO)),
            "idle": _poke(("resident_pid", 1)),
        },
    ),
    Fault(35, "MIG switched mid-job", {"two slices": _poke(("mig", 2)), "off": _poke(("mig", 0))}),
    Fault(
        36,
        "missing symbol",
        {"answered": _answer(Code.FUNCTION_NOT_FOUND, FIELDS)},
        {
            "field values": library_without(FIELDS),
            "power usage": library_without(FIELDS, POWER),
            "event reasons": library_without("nvmlDeviceGetCurrentClocksEventReasons"),
            "GPM": library_without("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"),
            "setter": library_without(SETTER),
        },
    ),
    Fault(
        37,
        "thermal or power-brake slowdown",
        {
            "thermal": _slowdown(Reason.SW_THERMAL),
            "hardware thermal": _slowdown(Reason.HW_THERMAL),
            "power brake": _slowdown(Reason.HW_POWER_BRAKE),
        },
    ),
    Fault(38, "draw above the cap at the clock floor", {"floor": _poke(("clock_floor", 0.8))}),
    Fault(
        39,
        "an entry's error in a field-value call that succeeds",
        {
            "every field": _meet(FIELDS, FaultKind.ENTRY, code=Code.NOT_SUPPORTED),
            "instant": _meet(FIELDS, FaultKind.ENTRY, code=Code.NOT_SUPPORTED, field=Field.POWER_INSTANT),
            "unknown": _meet(FIELDS, FaultKind.ENTRY, code=Code.UNKNOWN),
        },
    ),
    Fault(
        40,
        "GPM unsupported or window too short",
        {
            "unsupported": _poke(("no_gpm", 1)),
            "too short": _poke(("gpm_window_ms", 3_600_000)),
            "zeroes": _poke(("gpm_window_ms", 3_600_000), ("gpm_zeroes", 1)),
        },
    ),
    Fault(
        41,
        "our handle blocks a reset",
        by_test="node.reset and node.set_mig raise OSError EBUSY while any client holds the GPUs",
    ),
    Fault(
        42,
        "unknown new code",
        {
            "set": _answer(Code.OF_A_LATER_DRIVER, SETTER, SETTER_V2),
            "read": _answer(Code.OF_A_LATER_DRIVER, GETTER, FIELDS),
            "init": _poke_node("init_code", Code.OF_A_LATER_DRIVER),
        },
    ),
    Fault(
        43,
        "the module's cap binds the GPU",
        {"450 W left": _poke(("module_rest_mw", 150_000), ("module_mw", 600_000))},
        by_test="on create_node(..., model=GH200)",
    ),
    Fault(44, "state file unreadable, disk full", by_test="write the file so; a full tmpfs for the disk"),
)

FAULTS: Final[dict[int, Fault]] = {fault.number: fault for fault in _TABLE}
"""All 44, by number."""
