"""The two implementations of the GPU seam behind one set of levers, for the contract that both keep."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

from slurm_pfi.gpu.device import GpuDevices, PermissionDeniedError, UnsupportedError
from slurm_pfi.gpu.memory import MemoryGpu, MemoryGpuDevices
from slurm_pfi.gpu.remote import RemoteGpuDevices
from slurm_pfi.sim.physics import Workload
from slurm_pfi.sim.standin import NodeGpus
from testbed.gpus import FaultKind, GpuModel, Node, create_node, library_path, nvml_environment

EFFECT_NS: Final = 50_000_000
HANG_DEADLINE_S: Final = 1.0
NO_PERMISSION, NOT_SUPPORTED, TIMEOUT, GPU_IS_LOST = 4, 3, 10, 15


class Rig(Protocol):
    """Eight H200 in NVML order, limits 200..700 W, default 700 W; time stands still but for ``advance``."""

    devices: GpuDevices
    uuids: tuple[str, ...]

    def advance(self, nanoseconds: int) -> None: ...
    def lose(self, uuid: str) -> None: ...
    def ignore_sets(self, uuid: str) -> None: ...
    def apply_then_time_out(self, uuid: str) -> None: ...
    def forbid_sets(self) -> None: ...
    def support_no_sets(self, uuid: str) -> None: ...
    def write_foreign(self, uuid: str, cap_mw: int) -> None: ...
    def limit_by_bmc(self, uuid: str, cap_mw: int) -> None: ...
    def hide_draw(self, uuid: str) -> None: ...
    def hang(self, uuid: str) -> None: ...
    def divide(self, uuid: str) -> None: ...
    def hide_counters(self, uuid: str) -> None: ...
    def work(self) -> None: ...


class MemoryRig:
    def __init__(self) -> None:
        gpus = [MemoryGpu(uuid=f"GPU-{index:04x}", minor=7 - index, index=index) for index in range(8)]
        self.memory = MemoryGpuDevices(gpus, effect_delay_ns=EFFECT_NS)
        self.memory.deadline_s = HANG_DEADLINE_S
        self.devices: GpuDevices = self.memory
        self.uuids = tuple(gpu.uuid for gpu in gpus)

    def advance(self, nanoseconds: int) -> None:
        self.memory.advance(nanoseconds)

    def lose(self, uuid: str) -> None:
        self.memory.gpus[uuid].lost = True

    def ignore_sets(self, uuid: str) -> None:
        self.memory.fail_set_quietly(uuid, "ignored")

    def apply_then_time_out(self, uuid: str) -> None:
        self.memory.fail_set_quietly(uuid, "applied_then_deadline")

    def forbid_sets(self) -> None:
        self.memory.fail("set", PermissionDeniedError("no permission", code=NO_PERMISSION))

    def support_no_sets(self, uuid: str) -> None:
        self.memory.fail("set", UnsupportedError("not supported", uuid=uuid, code=NOT_SUPPORTED))

    def write_foreign(self, uuid: str, cap_mw: int) -> None:
        self.memory.write_foreign(uuid, cap_mw)

    def limit_by_bmc(self, uuid: str, cap_mw: int) -> None:
        self.memory.set_bmc_limit(uuid, cap_mw)

    def hide_draw(self, uuid: str) -> None:
        self.memory.gpus[uuid].demand_mw = None

    def hang(self, uuid: str) -> None:
        self.memory.hanging.add(uuid)

    def divide(self, uuid: str) -> None:
        self.memory.gpus[uuid].mig = True

    def hide_counters(self, uuid: str) -> None:
        self.memory.gpus[uuid].gpm = False

    def work(self) -> None:
        for gpu in self.memory.gpus.values():
            gpu.demand_mw = 650_000


class RemoteRig:
    def __init__(self, node: Node, devices: GpuDevices) -> None:
        self.node = node
        self.devices = devices
        self.job: NodeGpus | None = None
        self.uuids = tuple(state.uuid for state in node.snapshot())

    def advance(self, nanoseconds: int) -> None:
        self.node.poke("advance_ns", nanoseconds)

    def lose(self, uuid: str) -> None:
        self.node.poke("sticky_code", GPU_IS_LOST, gpu=uuid)

    def ignore_sets(self, uuid: str) -> None:
        self.node.fault("nvmlDeviceSetPowerManagementLimit", FaultKind.SILENT, gpu=uuid)

    def apply_then_time_out(self, uuid: str) -> None:
        self.node.fault("nvmlDeviceSetPowerManagementLimit", FaultKind.APPLIED, code=TIMEOUT, gpu=uuid)

    def forbid_sets(self) -> None:
        self.node.fault("nvmlDeviceSetPowerManagementLimit", code=NO_PERMISSION)

    def support_no_sets(self, uuid: str) -> None:
        self.node.fault("nvmlDeviceSetPowerManagementLimit", code=NOT_SUPPORTED, gpu=uuid)

    def write_foreign(self, uuid: str, cap_mw: int) -> None:
        self.node.poke("requested_mw", cap_mw, gpu=uuid)

    def limit_by_bmc(self, uuid: str, cap_mw: int) -> None:
        self.node.poke("bmc_mw", cap_mw, gpu=uuid)

    def hide_draw(self, uuid: str) -> None:
        for function in ("nvmlDeviceGetFieldValues", "nvmlDeviceGetPowerUsage"):
            self.node.fault(function, code=NOT_SUPPORTED, gpu=uuid)

    def hang(self, uuid: str) -> None:
        self.node.fault("*", FaultKind.HANG, gpu=uuid)

    def divide(self, uuid: str) -> None:
        self.node.poke("mig", 2, gpu=uuid)

    def hide_counters(self, uuid: str) -> None:
        self.node.poke("no_gpm", 1, gpu=uuid)

    def work(self) -> None:
        os.environ.setdefault("PFI_STANDIN_LIB", str(library_path()))
        self.job = NodeGpus(self.node.node_dir, "1.0")
        for uuid in self.uuids:
            self.job.register(uuid, Workload(compute_share=0.9, kappa_w=500.0, memory_w=80.0))

    def close(self) -> None:
        self.node.clear_faults()
        if self.job is not None:
            self.job.close()


def child_environment(node_dir: Path) -> Mapping[str, str]:
    return {**os.environ, **nvml_environment(node_dir)}


@asynccontextmanager
async def open_rig(kind: str, folder: Path) -> AsyncIterator[Rig]:
    if kind == "memory":
        yield MemoryRig()
        return
    create_node(folder / "n1", gpus=8, model=GpuModel(effect_us=EFFECT_NS // 1000))
    devices = RemoteGpuDevices(environment=child_environment(folder / "n1"), deadline_s=HANG_DEADLINE_S)
    with Node(folder / "n1") as node:
        node.poke("manual_ns", time.monotonic_ns())
        rig = RemoteRig(node, devices)
        try:
            yield rig
        finally:
            rig.close()
            await devices.close()
