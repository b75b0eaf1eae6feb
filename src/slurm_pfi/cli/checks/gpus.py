"""This node's GPUs: positions, device files, NVML. Nothing is ever set."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ...gpu.device import DeviceError, DeviceFailure, DeviceInfo
from ...gpu.mapping import Unresolved, board_minor, resolve
from ...gpu.remote import RemoteGpuDevices
from ...node.setup import gres_files
from ...units import format_power
from .finding import Facts, Finding
from .slurm import whoami

_CAP_SYS_ADMIN: Final = 21  # linux/capability.h
_NVML_START_S: Final = 8.0
_NVML_WHOLE_S: Final = 15.0


def gpus(facts: Facts) -> Iterator[Finding]:
    """All about the GPUs of this node; on a host that is none it says so."""
    if not facts.is_node:
        yield Finding(
            "gpus",
            "unseen",
            f"{facts.node} is in no node set and not in slurm.conf: its GPUs were not looked at",
            "run doctor on a GPU node, or give --node-name",
        )
        return
    if facts.declared.get(facts.node) == 0:
        yield Finding("gpus", "ok", f"{facts.node} has no GPUs by its node set")
        return
    found = _devices(facts)
    if isinstance(found, str):
        yield no_nvml_finding(found, os.geteuid())
    else:
        yield from _nvml(facts, *found)
    yield from position_findings(
        facts.node, gres_files(facts.config, facts.node), None if isinstance(found, str) else found[0]
    )
    yield privilege_finding(os.geteuid(), _status_text())


def _devices(facts: Facts) -> tuple[tuple[DeviceInfo, ...], tuple[DeviceFailure, ...]] | str:
    """What NVML lists, asked in a process of its own that is ended in time."""
    deadline_s = min(5.0, facts.config.times.device_deadline_s)

    async def ask() -> tuple[tuple[DeviceInfo, ...], tuple[DeviceFailure, ...]]:
        devices = RemoteGpuDevices(deadline_s=deadline_s, start_deadline_s=_NVML_START_S)
        try:
            async with asyncio.timeout(_NVML_WHOLE_S):
                return await devices.list_devices()
        finally:
            await devices.close()

    try:
        return asyncio.run(ask())
    except DeviceError as error:
        return str(error)
    except TimeoutError:
        return f"NVML did not list its GPUs within {_NVML_WHOLE_S:g} s"


def _nvml(
    facts: Facts, infos: tuple[DeviceInfo, ...], failures: tuple[DeviceFailure, ...]
) -> Iterator[Finding]:
    models = ", ".join(sorted({info.model for info in infos}))
    said = f"{len(infos)} GPUs ({models})" if infos else "NVML lists no GPU"
    declared = facts.declared.get(facts.node)
    if failures:
        yield Finding(
            "nvml",
            "fail",
            f"{said}; {len(failures)} do not answer: {'; '.join(failure.message for failure in failures)}",
            "see the kernel's log for Xid messages",
        )
    elif declared is not None and declared != len(infos):
        yield Finding(
            "nvml",
            "fail" if len(infos) > declared else "warn",
            f"{said}, the node set says {declared}",
            "correct gpus of the node set, or see what became of the missing ones",
        )
    else:
        yield Finding(
            "nvml", "ok" if infos else "fail", said, "" if infos else "see whether the driver is loaded"
        )
    if infos:
        low, high = min(i.limits.min_mw for i in infos), max(i.limits.max_mw for i in infos)
        yield limits_finding(infos, f"from {format_power(low)} to {format_power(high)}")
        most = max(info.limits.max_mw for info in infos)
        yield from _gpu_max(facts, most)
        yield persistence_finding(infos)


def _gpu_max(facts: Facts, most_mw: int) -> Iterator[Finding]:
    """A node set that declares less than the device can draw makes the worst case too small."""
    from ...controller.nodes import declared_nodes

    view = declared_nodes(facts.config).get(facts.node)
    if view is not None and view.gpu_max_mw < most_mw:
        yield Finding(
            "gpu_max_w",
            "fail",
            f"a GPU here can be set to {format_power(most_mw)}, the node set counts {format_power(view.gpu_max_mw)}",
            f"set gpu_max_w = {most_mw / 1000:g} for {facts.node}",
        )


def limits_finding(infos: tuple[DeviceInfo, ...], span: str) -> Finding:
    """Whether limits can be set, as far as that is found out without setting one."""
    name = "power limits"
    fixed = [info.uuid for info in infos if info.capabilities.settable is False]
    if len(fixed) == len(infos):
        return Finding(
            name,
            "fail",
            f"{span}, but on none of {len(infos)} GPUs can a limit be set: nothing here can be capped",
            "run the agent as root with CAP_SYS_ADMIN; boards that offer no limit count at the most they can draw",
        )
    if fixed:
        return Finding(
            name,
            "warn",
            f"{span}; on {len(fixed)} of {len(infos)} GPUs none can be set ({fixed[0]} the first)",
            "they count at the limits they have, and their jobs are not capped",
        )
    return Finding(name, "ok", f"settable {span}")


def persistence_finding(infos: tuple[DeviceInfo, ...]) -> Finding:
    """Whether a cap outlives the last program that holds the GPU."""
    name, todo = "persistence", "run nvidia-persistenced, which NVIDIA advises"
    off = [info.uuid for info in infos if info.persistence is False]
    unknown = [info.uuid for info in infos if info.persistence is None]
    lost = "a cap is lost when the last program lets go of the GPU, so they count at their default limits"
    if off:
        return Finding(name, "warn", f"persistence mode is off on {len(off)} GPUs: {lost}", todo)
    if unknown:
        text = f"{len(unknown)} GPUs do not tell their persistence mode: perhaps {lost}"
        return Finding(name, "warn", text, todo)
    return Finding(name, "ok", "on")


def no_nvml_finding(why: str, euid: int) -> Finding:
    """NVML gave no list. A user who may not look has seen nothing; root has seen a fault."""
    if euid != 0 and "permission" in why.lower():
        return Finding("nvml", "unseen", f"{why} (asked as {whoami()})", "run doctor as root")
    todo = "install the driver with its libnvidia-ml.so.1, and see whether nvidia-smi answers"
    return Finding("nvml", "fail", why, todo)


def position_findings(
    node: str, files: dict[int, str] | str, infos: tuple[DeviceInfo, ...] | None
) -> Iterator[Finding]:
    """Each position that Slurm counts by must lead to one GPU. ``infos``: None when NVML could not be asked."""
    name = "gpu positions"
    if isinstance(files, str):
        yield Finding(name, "fail", files, "give File= for each GPU of this node, with AutoDetect=off")
        return
    if not files:
        yield Finding(name, "warn", f"gres.conf names no GPU of {node}", "give File= for each of them")
        return
    found = (
        resolve(files, infos) if infos is not None else {p: board_minor(file) for p, file in files.items()}
    )
    lost = [f"{place}: {to.reason}" for place, to in found.items() if isinstance(to, Unresolved)]
    if lost:
        yield Finding(
            name,
            "fail",
            f"{len(lost)} of {len(found)} positions of {node} lead to no GPU: {'; '.join(lost[:4])}"
            + ("; ..." if len(lost) > 4 else ""),
            "make File= in gres.conf name the device files of this node (/dev/nvidia0, ...)",
        )
    elif infos is None:
        yield Finding(
            name, "unseen", f"all {len(found)} of {node} are device files; NVML was not asked whose"
        )
    else:
        yield Finding(name, "ok", f"all {len(found)} positions of {node} lead to a GPU")


def privilege_finding(euid: int, status_text: str | None) -> Finding:
    """Whether a process such as this one may set limits. ``status_text``: /proc/self/status."""
    name = "privilege"
    held = (
        None if status_text is None else re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", status_text, re.MULTILINE)
    )
    capable = None if held is None else bool(int(held[1], 16) >> _CAP_SYS_ADMIN & 1)
    if euid != 0 and not capable:
        return Finding(
            name,
            "unseen",
            f"{whoami()} may not set limits; the agent runs as root and may",
            "run doctor as root",
        )
    if capable is False:
        return Finding(
            name,
            "warn",
            "root here lacks CAP_SYS_ADMIN (a container?): the driver may refuse to set limits",
            "run the agent outside of the container, or give it CAP_SYS_ADMIN",
        )
    return Finding(name, "ok", f"{whoami()} may set limits")


def _status_text() -> str | None:
    try:
        return Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
