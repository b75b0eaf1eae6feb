"""The control side of simulated GPUs: makes a node, looks at it and breaks it, without NVML.

A simulated node is a folder:

    state         what all processes share (see nvml_standin/state.h); mode 0666, as jobs register their demand in it
    trace.jsonl   every change of an effective limit and every kernel start
    devices.json  what the device cgroup and the CUDA runtime would know: which device file leads to which GPU

Without device cgroups Slurm 22.05 sets CUDA_VISIBLE_DEVICES to the same numbers as SLURM_JOB_GPUS: positions in
gres.conf, whatever the device files are called (seen with files nvidia7, 2, 5, 4 in that order: it said 0, 1, 2, 3).
On hardware the device cgroup then leaves the job only the files of these positions, and CUDA counts those in PCI order.
``devices.json`` lets a simulated job do the same, independently of any map that the product keeps.

Power is milliwatts, time CLOCK_MONOTONIC nanoseconds. Failures raise OSError with the folder and what was tried.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from .standin import FaultSpec, GpuSpec, GpuView, library_path, load

__all__ = [
    "GH200",
    "MAX_GPUS",
    "Device",
    "FaultKind",
    "GpuModel",
    "GpuState",
    "Node",
    "Pids",
    "TraceLine",
    "create_node",
    "job_environment",
    "library_path",
    "nvml_environment",
    "plan_devices",
    "planted",
    "read_devices",
    "read_trace",
    "snapshot",
    "write_devices",
]

MAX_GPUS: Final = 16
_UUID_NAMESPACE: Final = uuid.UUID("5d0c5f3e-5c42-4f0e-9a3b-9a4f6a1c7b11")


class FaultKind(IntEnum):
    """What a planted fault does to the call that meets it."""

    CODE = 0
    """Answer the code and do nothing."""
    SILENT = 1
    """Answer success and do nothing (setters only)."""
    APPLIED = 2
    """Do it, then answer the code (0: success), late by the delay or until the fault is cleared."""
    DELAY = 3
    """Sleep first, then do it."""
    CRASH = 4
    """SIGSEGV inside the call."""
    VALUE = 5
    """Answer success and this value (getters of one number; utilisation; fields of nvmlDeviceGetFieldValues)."""
    ENTRY = 6
    """One entry of a nvmlDeviceGetFieldValues that succeeds has the code."""
    HANG = 7
    """Sleep until the fault is cleared, at most for the delay if there is one, then do it."""


class Pids(IntEnum):
    """What the list of a GPU's processes shows instead of their pids (the quantity ``pids``)."""

    TRUE = 0
    ZERO = 1
    FOREIGN = 2
    """Numbers of another namespace, which no process here has."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU model's limits, and how the simulation answers to a set."""

    name: str = "NVIDIA H200"
    min_mw: int = 200_000
    max_mw: int = 700_000
    default_mw: int = 700_000
    effect_us: int = 30_000
    tau_ms: int = 60
    idle_w: float = 75.0


GH200: Final = GpuModel(name="NVIDIA GH200 480GB", min_mw=100_000, max_mw=900_000, default_mw=900_000)
"""Its module has a limit of its own, which leaves the GPU less: poke ``module_mw`` and ``module_rest_mw``."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU's names: position in gres.conf, device file and its minor number, NVML (PCI) index, UUID, PCI address."""

    position: int
    file: str
    minor: int
    index: int
    uuid: str
    pci: str


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU at one instant. ``draw_mw`` is instant draw; ``work_s`` counts seconds at the job's uncapped speed."""

    mono_ns: int
    uuid: str
    minor: int
    index: int
    requested_mw: int
    effective_mw: int
    default_mw: int
    bmc_mw: int
    draw_mw: int
    energy_mj: int
    work_s: float
    clock: float
    job: str
    owner_pid: int


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One line of the trace. ``pid`` is who set the limit (0: the driver) or who started the kernel."""

    mono_ns: int
    event: Literal["limit", "kernel"]
    uuid: str
    effective_mw: int
    pid: int
    requested_mw: int | None = None
    job: str = ""


# ------------------------------------------------------------------------------------------------ making a node


def plan_devices(node: str, gpus: int, device_dir: Path, *, scrambled: bool = False) -> tuple[Device, ...]:
    """Name the GPUs of a node, in gres.conf order.

    On a scrambled node of three GPUs or more, position, minor number and NVML index differ for every GPU.
    """
    if not 1 <= gpus <= MAX_GPUS:
        raise ValueError(f"a simulated node has 1 to {MAX_GPUS} GPUs, not {gpus}")
    devices = []
    for position in range(gpus):
        minor = (position + 1) % gpus if scrambled else position
        index = (position - 1) % gpus if scrambled else position
        devices.append(
            Device(
                position=position,
                file=str(device_dir / f"nvidia{minor}"),
                minor=minor,
                index=index,
                uuid=f"GPU-{uuid.uuid5(_UUID_NAMESPACE, f'{node}/{index}')}",
                pci=f"00000000:{0x10 + 8 * index:02X}:00.0",
            )
        )
    return tuple(devices)


def create_node(
    node_dir: Path,
    *,
    gpus: int = 8,
    device_dir: Path | None = None,
    scrambled: bool = False,
    model: GpuModel | None = None,
    driver: str = "580.126.09",
) -> tuple[Device, ...]:
    """Make a simulated node named after its folder; returns its GPUs in gres.conf order.

    The folder must be new or empty of a node. ``device_dir`` only names where the cluster has its device files.
    """
    model = model or GpuModel()
    node_dir.mkdir(parents=True, exist_ok=True)
    devices = plan_devices(node_dir.name, gpus, device_dir or node_dir / "dev", scrambled=scrambled)
    specs = (GpuSpec * gpus)()
    for device in devices:
        spec = specs[device.index]
        spec.uuid, spec.pci, spec.minor = device.uuid.encode(), device.pci.encode(), device.minor
        spec.min_mw, spec.max_mw, spec.default_mw = model.min_mw, model.max_mw, model.default_mw
        spec.effect_us, spec.tau_ms, spec.idle_w = model.effect_us, model.tau_ms, model.idle_w
    library = load(library_path())
    result = library.pfi_create(os.fsencode(node_dir), model.name.encode(), driver.encode(), specs, gpus)
    _check(result, node_dir, "make the simulated node")
    write_devices(node_dir, devices)
    return devices


def write_devices(node_dir: Path, devices: Sequence[Device]) -> None:
    """Say anew which device file leads to which GPU."""
    text = json.dumps([asdict(device) for device in devices], indent=1)
    (node_dir / "devices.json").write_text(text + "\n")


def read_devices(node_dir: Path) -> tuple[Device, ...]:
    """The GPUs of a simulated node in gres.conf order."""
    return tuple(Device(**entry) for entry in json.loads((node_dir / "devices.json").read_text()))


def nvml_environment(node_dir: Path, library_dir: Path | None = None) -> dict[str, str]:
    """What a process needs in its environment from its start to meet this node through pynvml.

    ``library_dir``: where another libnvidia-ml.so.1 is to be found than the one that make built.
    """
    folder = library_dir or library_path().parent
    return {"LD_LIBRARY_PATH": str(folder), "PFI_STANDIN_DIR": str(node_dir)}


def job_environment(sim_dir: Path) -> dict[str, str]:
    """What ``slurm_pfi.sim.job`` needs; ``sim_dir`` holds one folder per node, named after SLURMD_NODENAME."""
    return {"PFI_STANDIN_LIB": str(library_path()), "PFI_SIM_DIR": str(sim_dir)}


# ------------------------------------------------------------------------------------------------ looking and breaking


def _check(result: int, node_dir: Path, action: str) -> int:
    if result < 0:
        raise OSError(-result, f"cannot {action}: {os.strerror(-result)}", str(node_dir))
    return result


class Node:
    """A simulated node, open. Close it or use it in a ``with``; one instance serves one thread."""

    def __init__(self, node_dir: Path) -> None:
        self.node_dir = node_dir
        self._library = load(library_path())
        self._handle: int | None = self._library.pfi_open(os.fsencode(node_dir))
        if self._handle is None:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot open the simulated node: {os.strerror(code)}", str(node_dir))
        self._views = (GpuView * MAX_GPUS)()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._handle is not None:
            self._library.pfi_close(self._handle)
            self._handle = None

    def snapshot(self) -> list[GpuState]:
        """All GPUs at one instant, in PCI order: NVML's, unless a test turned that."""
        count = _check(
            self._library.pfi_snapshot(self._handle, self._views, MAX_GPUS), self.node_dir, "read the node"
        )
        return [_state(view) for view in self._views[:count]]

    def poke(self, what: str, value: float, *, gpu: str | int | None = None) -> None:
        """Change one quantity behind NVML's back.

        Of a GPU (UUID or place in PCI order; None: all):

        - limits: requested_mw (as a foreign writer would), bmc_mw (0: none), module_mw (limit of the module, 0: no
          module scope), module_rest_mw, min_mw, max_mw, default_mw, granularity_mw, effect_us, reset, persistence
        - draw and clock: tau_ms, idle_w, clock_limit and clock_floor (shares of the greatest clock), slowdown (the
          clocks event reasons of a clock_limit below 1)
        - sensor: sensor_step_mw, sensor_period_ms and sensor_window_ms (it looks for the last window_ms of each
          period_ms), energy_offset_mj (added to the energy counter)
        - presence: sticky_code (every call answers it; 15 and 16 post an Xid), hidden, xid (post one), mig (slices),
          minor, orphan_hang_ms (how long every call hangs after a client was killed while it slept inside one)
        - activity: pids (see Pids), resident_pid (a process that only holds memory), no_gpm, gpm_window_ms (samples
          that are closer make no metric), gpm_zeroes (they make zeroes instead of an error)

        Of the node (gpu None): init_code, rotation (turns the NVML order for who initialises from now on), manual_ns
        (a clock that only tests turn), advance_ns.
        """
        result = self._library.pfi_poke(self._handle, self._slot(gpu), what.encode(), float(value))
        _check(result, self.node_dir, f"poke {what}={value}")

    def fault(
        self,
        function: str,
        kind: FaultKind = FaultKind.CODE,
        *,
        code: int = 0,
        gpu: str | int | None = None,
        after: int = 0,
        count: int = -1,
        delay_s: float = 0.0,
        value: float = 0.0,
        field: int = 0,
    ) -> None:
        """Plant a fault in an NVML function (its C symbol, or ``*``): skip ``after`` calls, then fire ``count`` times
        (-1: for ever). A call meets all that match, up to one that ends it.

        ``value`` and ``field`` (a field id of nvmlDeviceGetFieldValues, 0: all) are of the kinds VALUE and ENTRY.
        """
        spec = FaultSpec(
            function=function.encode(),
            gpu=self._slot(gpu),
            kind=kind,
            code=code,
            after=after,
            count=count,
            field=field,
            delay_us=round(delay_s * 1e6),
            value=value,
        )
        result = self._library.pfi_fault(self._handle, ctypes.byref(spec))
        _check(result, self.node_dir, f"plant a fault in {function}")

    def reset(self, gpu: str | int) -> None:
        """Reset a GPU as ``nvidia-smi --gpu-reset`` does. OSError EBUSY while an NVML client or a job holds it."""
        _check(self._library.pfi_reset(self._handle, self._slot(gpu)), self.node_dir, f"reset GPU {gpu}")

    def set_mig(self, gpu: str | int, slices: int) -> None:
        """Cut a GPU into slices (0: none). OSError EBUSY while an NVML client or a job holds it."""
        result = self._library.pfi_set_mig(self._handle, self._slot(gpu), slices)
        _check(result, self.node_dir, f"switch MIG on GPU {gpu}")

    def replace(self, gpu: str | int, uuid: str) -> None:
        """Put another board into a GPU's slot: new UUID, default limit. Handles of the old one are lost for good."""
        slot = self._slot(gpu)
        result = self._library.pfi_replace(self._handle, slot, uuid.encode())
        _check(result, self.node_dir, f"replace GPU {gpu}")
        devices = [
            replace(device, uuid=uuid) if device.index == slot else device
            for device in read_devices(self.node_dir)
        ]
        write_devices(self.node_dir, devices)

    def clear_faults(self) -> None:
        """Remove planted faults and all that makes a GPU answer wrongly: sticky codes, hidden, init code, pids,
        resident_pid, energy_offset_mj, no_gpm, gpm_zeroes, orphan_hang_ms. What a GPU is (limits, MIG, clocks, sensor,
        order) stays. Calls that hang come back."""
        _check(self._library.pfi_clear_faults(self._handle), self.node_dir, "clear faults")

    def faults_fired(self) -> int:
        """How often planted faults were met since the last clear."""
        return int(self._library.pfi_faults_fired(self._handle))

    def _slot(self, gpu: str | int | None) -> int:
        if gpu is None:
            return -1
        if isinstance(gpu, int):
            return gpu
        for state in self.snapshot():
            if state.uuid == gpu:
                return state.index
        raise OSError(errno.ENODEV, f"no GPU {gpu} on the simulated node", str(self.node_dir))


def _state(view: GpuView) -> GpuState:
    return GpuState(
        mono_ns=view.mono_ns,
        uuid=view.uuid.decode(),
        minor=view.minor,
        index=view.index,
        requested_mw=view.requested_mw,
        effective_mw=view.effective_mw,
        default_mw=view.default_mw,
        bmc_mw=view.bmc_mw,
        draw_mw=round(view.draw_w * 1000),
        energy_mj=round(view.energy_j * 1000),
        work_s=view.work_s,
        clock=view.clock,
        job=view.job.decode(),
        owner_pid=view.owner_pid,
    )


def snapshot(node_dir: Path) -> list[GpuState]:
    """All GPUs of a node at one instant, in PCI order."""
    with Node(node_dir) as node:
        return node.snapshot()


@contextmanager
def planted(node_dir: Path) -> Iterator[Node]:
    """A node to plant faults in; they are cleared at the end."""
    with Node(node_dir) as node:
        try:
            yield node
        finally:
            node.clear_faults()


def read_trace(node_dir: Path) -> list[TraceLine]:
    """The trace so far, in the order of the file (per GPU that is the order of time)."""
    text = (node_dir / "trace.jsonl").read_text()
    complete = text[: text.rfind("\n") + 1]
    return [_trace_line(json.loads(line)) for line in complete.splitlines()]


def _trace_line(entry: Mapping[str, object]) -> TraceLine:
    return TraceLine(**entry)  # type: ignore[arg-type]  # a line with other keys is a TypeError, as it should be
