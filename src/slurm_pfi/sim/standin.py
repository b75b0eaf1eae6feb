"""A training job's view of the simulated GPUs of one node: register, launch, count work. ctypes, no NVML, no numpy."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from .physics import Workload

MAX_GPUS: Final = 16


class SimulationError(RuntimeError):
    """The simulated hardware cannot be used; the message says what to do."""


def visible_uuids(node_dir: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that this process may use, in CUDA order, as the CUDA runtime would count them.

    Slurm without device cgroups names positions in gres.conf in CUDA_VISIBLE_DEVICES. The device files of these
    positions are what a device cgroup would leave the job; CUDA then counts what is left in PCI order. The map from
    position to file to GPU is the simulated node's own ``devices.json``.
    """
    path = node_dir / "devices.json"
    try:
        devices = json.loads(path.read_text())
    except OSError as error:
        raise SimulationError(f"cannot read {path}: {error.strerror}; is PFI_SIM_DIR right?") from error
    words = [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    allowed = [device for device in devices if str(device["position"]) in words or device["uuid"] in words]
    if not words or len(allowed) != len(words):
        raise SimulationError(
            f"CUDA_VISIBLE_DEVICES={','.join(words)!r} names no GPUs of {node_dir.name}; "
            "ask Slurm for GPUs, for example with --gres=gpu:2"
        )
    return tuple(device["uuid"] for device in sorted(allowed, key=lambda device: int(device["index"])))


@cache
def _library() -> ctypes.CDLL:
    path = os.environ.get("PFI_STANDIN_LIB")
    if not path:
        raise SimulationError(
            "PFI_STANDIN_LIB is not set: it names the stand-in library that `make native` builds"
        )
    try:
        library = ctypes.CDLL(path, use_errno=True)
    except OSError as error:
        raise SimulationError(f"cannot load PFI_STANDIN_LIB={path}: {error}") from error
    text, handle, number = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_double
    doubles, instant = ctypes.POINTER(ctypes.c_double), ctypes.POINTER(ctypes.c_int64)
    library.pfi_open.restype = handle
    library.pfi_open.argtypes = (text,)
    library.pfi_close.argtypes = (handle,)
    library.pfi_register.argtypes = (handle, text, number, number, number, text)
    library.pfi_unregister.argtypes = (handle,)
    library.pfi_kernel.argtypes = (handle, text)
    library.pfi_work.argtypes = (handle, text, doubles, ctypes.c_uint32, instant)
    return library


class NodeGpus:
    """The GPUs of one simulated node, open for one job. ``job`` is ``<job id>.<restart>``."""

    def __init__(self, node_dir: Path, job: str) -> None:
        self.node_dir = node_dir
        self._job = job.encode("ascii")
        self._library = _library()
        self._work = (ctypes.c_double * MAX_GPUS)()
        self._at_ns = ctypes.c_int64()
        self._handle: int | None = self._library.pfi_open(os.fsencode(node_dir))
        if self._handle is None:
            reason = os.strerror(ctypes.get_errno())
            raise SimulationError(f"cannot open the simulated node {node_dir}: {reason}")

    def register(self, uuid: str, workload: Workload) -> None:
        """Start to use a GPU: from now on it draws and works as the workload does under its limit."""
        result = self._library.pfi_register(
            self._handle,
            uuid.encode(),
            workload.compute_share,
            workload.kappa_w,
            workload.memory_w,
            self._job,
        )
        if result < 0:
            raise SimulationError(f"cannot use {uuid} on {self.node_dir.name}: {os.strerror(-result)}")

    def leave(self) -> None:
        """Use none of the GPUs any more, until they are registered again."""
        self._library.pfi_unregister(self._handle)

    def launch_kernel(self) -> int:
        """Begin a step on every GPU in use: one trace line each."""
        return int(self._library.pfi_kernel(self._handle, self._job))

    def work(self) -> tuple[int, dict[int, float]]:
        """The instant (CLOCK_MONOTONIC ns), and the work so far of each GPU that works for the job, by NVML index.

        Work is in seconds at the job's uncapped speed.
        """
        self._library.pfi_work(self._handle, self._job, self._work, MAX_GPUS, ctypes.byref(self._at_ns))
        work = {index: self._work[index] for index in range(MAX_GPUS)}
        return self._at_ns.value, {index: done for index, done in work.items() if not math.isnan(done)}

    def close(self) -> None:
        """Leave all GPUs in use."""
        if self._handle is not None:
            self._library.pfi_unregister(self._handle)
            self._library.pfi_close(self._handle)
            self._handle = None
