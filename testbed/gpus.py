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
import functools
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

BUILT_LIBRARY: Final = Path(__file__).resolve().parent.parent / "build/nvml_standin/libnvidia-ml.so.1"
MAX_GPUS: Final = 16
_UUID_NAMESPACE: Final = uuid.UUID("5d0c5f3e-5c42-4f0e-9a3b-9a4f6a1c7b11")


class FaultKind(IntEnum):
    """What a planted fault does to the call that meets it."""

    CODE = 0
    """Answer the code and do nothing."""
    SILENT = 1
    """Answer success and do nothing (setters only)."""
    APPLIED = 2
    """Do it, then answer the code."""
    DELAY = 3
    """Sleep first, then do it."""


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


# ------------------------------------------------------------------------------------------------ the C side


class _Spec(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_char * 48),
        ("pci", ctypes.c_char * 32),
        ("minor", ctypes.c_uint32),
        ("min_mw", ctypes.c_uint32),
        ("max_mw", ctypes.c_uint32),
        ("default_mw", ctypes.c_uint32),
        ("effect_us", ctypes.c_uint32),
        ("tau_ms", ctypes.c_uint32),
        ("idle_w", ctypes.c_double),
    )


class _View(ctypes.Structure):
    _fields_ = (
        ("mono_ns", ctypes.c_int64),
        ("uuid", ctypes.c_char * 48),
        ("job", ctypes.c_char * 64),
        ("minor", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
        ("requested_mw", ctypes.c_uint32),
        ("effective_mw", ctypes.c_uint32),
        ("default_mw", ctypes.c_uint32),
        ("bmc_mw", ctypes.c_uint32),
        ("owner_pid", ctypes.c_int32),
        ("demands", ctypes.c_uint32),
        ("draw_w", ctypes.c_double),
        ("energy_j", ctypes.c_double),
        ("work_s", ctypes.c_double),
        ("clock", ctypes.c_double),
    )


def library_path() -> Path:
    """The stand-in library: PFI_STANDIN_LIB, else the one that make built."""
    return Path(os.environ.get("PFI_STANDIN_LIB") or BUILT_LIBRARY)


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "the stand-in is not built; run `make native`", str(path))
    library = ctypes.CDLL(str(path), use_errno=True)
    text, handle, number = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "pfi_layout": (number, (ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32))),
        "pfi_create": (number, (text, text, text, ctypes.POINTER(_Spec), ctypes.c_uint32)),
        "pfi_open": (handle, (text,)),
        "pfi_close": (None, (handle,)),
        "pfi_snapshot": (number, (handle, ctypes.POINTER(_View), ctypes.c_uint32)),
        "pfi_poke": (number, (handle, number, text, ctypes.c_double)),
        "pfi_fault": (number, (handle, text, number, number, number, number, number, ctypes.c_int64)),
        "pfi_clear_faults": (number, (handle,)),
        "pfi_faults_fired": (ctypes.c_int64, (handle,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    spec_size, view_size = ctypes.c_uint32(), ctypes.c_uint32()
    library.pfi_layout(ctypes.byref(spec_size), ctypes.byref(view_size))
    if (spec_size.value, view_size.value) != (ctypes.sizeof(_Spec), ctypes.sizeof(_View)):
        raise OSError(errno.EINVAL, "the stand-in was built from other sources; run `make native`", str(path))
    return library


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
    specs = (_Spec * gpus)()
    for device in devices:
        spec = specs[device.index]
        spec.uuid, spec.pci, spec.minor = device.uuid.encode(), device.pci.encode(), device.minor
        spec.min_mw, spec.max_mw, spec.default_mw = model.min_mw, model.max_mw, model.default_mw
        spec.effect_us, spec.tau_ms, spec.idle_w = model.effect_us, model.tau_ms, model.idle_w
    library = _library(library_path())
    result = library.pfi_create(os.fsencode(node_dir), model.name.encode(), driver.encode(), specs, gpus)
    _check(result, node_dir, "make the simulated node")
    text = json.dumps([asdict(device) for device in devices], indent=1)
    (node_dir / "devices.json").write_text(text + "\n")
    return devices


def read_devices(node_dir: Path) -> tuple[Device, ...]:
    """The GPUs of a simulated node in gres.conf order."""
    return tuple(Device(**entry) for entry in json.loads((node_dir / "devices.json").read_text()))


def nvml_environment(node_dir: Path) -> dict[str, str]:
    """What a process needs in its environment from its start to meet this node through pynvml."""
    return {"LD_LIBRARY_PATH": str(library_path().parent), "PFI_STANDIN_DIR": str(node_dir)}


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
        self._library = _library(library_path())
        self._handle: int | None = self._library.pfi_open(os.fsencode(node_dir))
        if self._handle is None:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot open the simulated node: {os.strerror(code)}", str(node_dir))
        self._views = (_View * MAX_GPUS)()

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
        """All GPUs at one instant, in NVML order."""
        count = _check(
            self._library.pfi_snapshot(self._handle, self._views, MAX_GPUS), self.node_dir, "read the node"
        )
        return [_state(view) for view in self._views[:count]]

    def poke(self, what: str, value: float, *, gpu: str | int | None = None) -> None:
        """Change one quantity behind NVML's back.

        Of a GPU (UUID or NVML index; None: all): requested_mw (as a foreign writer would), bmc_mw (0: none), reset,
        min_mw, max_mw, default_mw, granularity_mw, effect_us, tau_ms, idle_w, clock_limit, persistence, sticky_code,
        hidden, mig. Of the node (gpu None): init_code, manual_ns (a clock that only tests turn), advance_ns.
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
    ) -> None:
        """Plant a fault in an NVML function (its C symbol, or ``*``): skip ``after`` calls, then fire ``count`` times
        (-1: for ever)."""
        result = self._library.pfi_fault(
            self._handle, function.encode(), self._slot(gpu), kind, code, after, count, round(delay_s * 1e6)
        )
        _check(result, self.node_dir, f"plant a fault in {function}")

    def clear_faults(self) -> None:
        """Remove planted faults, sticky codes, hidden GPUs and the init code. Limits stay as they are."""
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


def _state(view: _View) -> GpuState:
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
    """All GPUs of a node at one instant, in NVML order."""
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
