"""What the tests of faults share: the real agent on a simulated node, with short times, and somebody who breaks it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
import pytest

from slurm_pfi.gpu.journal import Journal, JournalEntry
from slurm_pfi.model import GpuReport, PlanStep, Report
from slurm_pfi.sim.jobs import model_job
from slurm_pfi.sim.standin import NodeGpus
from testbed import gpus
from testbed.gpus import FaultKind, Node
from testbed.lone_node import Commander, LoneNode, ceilings
from tests.node_world import window_step

ALL: Final = [700_000] * 4
PARK_MW: Final = 200_000
PARKED: Final = [PARK_MW] * 4
RESPONSE_S: Final = 3.0
HANG_S: Final = 45.0
WORKLOAD: Final = model_job("L70 FT nc").workload
SET: Final = "nvmlDeviceSetPowerManagementLimit"
NO_PERMISSION, NOT_SUPPORTED, TIMEOUT, GPU_IS_LOST, NEEDS_RESET = 4, 3, 10, 15, 16


def short_times(site: LoneNode, **times: float) -> LoneNode:
    """Readings age in seconds, so that a test sees what becomes of a GPU that cannot be read."""
    given = {
        "response_s": RESPONSE_S,
        "device_deadline_s": 1.5,
        "node_answer_s": 1.5,
        "report_s": 1.0,
        "activity_s": 1.0,
        **times,
    }
    with site.config.open("a") as config:
        config.write("[times]\n" + "".join(f"{name} = {value}\n" for name, value in given.items()))
    return site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoneNode]:
    """Four GPUs whose three numberings differ; nothing runs yet."""
    monkeypatch.setenv("PFI_STANDIN_LIB", str(gpus.library_path()))
    made = short_times(LoneNode(tmp_path))
    try:
        yield made
    finally:
        made.close()


@asynccontextmanager
async def agent_on(site: LoneNode, **environment: str) -> AsyncIterator[tuple[Commander, Node]]:
    """The agent, its commander and the levers of its GPUs. At the end no fault is left planted."""
    async with Commander(site) as commander:
        with gpus.planted(site.sim) as node:
            await asyncio.to_thread(lambda: site.start(**environment))
            yield commander, node


@asynccontextmanager
async def window_on(site: LoneNode, *steps: PlanStep) -> AsyncIterator[tuple[Commander, Node]]:
    """As ``agent_on``, with every GPU parked and acknowledged (or the steps given, held)."""
    async with agent_on(site) as (commander, node):
        await commander.plan(*(steps or (window_step(PARK_MW),)))
        if not steps:
            await commander.ceilings(*PARKED)
        yield commander, node


async def ends(commander: Commander, *wanted_mw: int) -> Report:
    """The window is over: every GPU is where it was, or as said, and the journal holds nothing of ours."""
    await commander.plan(window_step(None))
    report = await commander.ceilings(*(wanted_mw or ALL))
    await until(lambda: commander.site.limits() == list(wanted_mw or ALL), "every limit is back in force")
    await until(lambda: journal_rests(commander.site), "nothing left in the journal")
    return report


def journal(site: LoneNode) -> dict[str, JournalEntry]:
    """The entries of this boot that can be read, by UUID."""
    boot_id = (site.folder / "id" / site.name / "boot_id").read_text().strip()
    driver = (site.folder / "id" / site.name / "driver_start").read_text().strip()
    found = Journal(site.paths.journal, boot_id, driver).read_all()
    return {uuid: entry for uuid, entry in found.items() if isinstance(entry, JournalEntry)}


def journal_rests(site: LoneNode) -> bool:
    return all(entry.current_mw is None for entry in journal(site).values())


async def until(reached: Callable[[], object], why: str, deadline_s: float = 15.0) -> None:
    """Wait for what only files and processes can tell."""
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            while not reached():
                await asyncio.sleep(0.02)
            return
    raise AssertionError(f"not within {deadline_s:g} s: {why}")


@contextmanager
def busy(site: LoneNode, *uuids: str) -> Iterator[None]:
    """A training job draws full power on these GPUs."""
    job = NodeGpus(site.sim, "7.0")
    try:
        for uuid in uuids:
            job.register(uuid, WORKLOAD)
        yield
    finally:
        job.close()


def gpu(report: Report, uuid: str) -> GpuReport:
    (found,) = [one for one in report.gpus if one.uuid == uuid]
    return found


def others(report: Report, uuid: str) -> list[int | None]:
    """The ceilings of all GPUs but this one."""
    return [one.ceiling_mw for one in report.gpus if one.uuid != uuid]


def limit_of(site: LoneNode, uuid: str) -> int:
    """The limit in force on the simulated GPU itself."""
    return next(state.effective_mw for state in gpus.snapshot(site.sim) if state.uuid == uuid)


def nvml_children(site: LoneNode) -> list[psutil.Process]:
    """The NVML processes of the newest agent."""
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(site.started[-1].pid).children(recursive=True)
        return [child for child in below if "slurm_pfi.gpu.child" in " ".join(child.cmdline())]
    return []


def changed_by_us(site: LoneNode) -> list[gpus.TraceLine]:
    """The limits that came into force by a set of an agent's, in their order."""
    return [
        line
        for line in gpus.read_trace(site.sim)
        if line.event == "limit" and line.pid not in (0, os.getpid())
    ]


__all__ = [
    "ALL",
    "GPU_IS_LOST",
    "HANG_S",
    "NEEDS_RESET",
    "NOT_SUPPORTED",
    "NO_PERMISSION",
    "PARKED",
    "PARK_MW",
    "RESPONSE_S",
    "SET",
    "TIMEOUT",
    "Commander",
    "FaultKind",
    "LoneNode",
    "Node",
    "agent_on",
    "busy",
    "ceilings",
    "changed_by_us",
    "ends",
    "gpu",
    "journal",
    "journal_rests",
    "limit_of",
    "nvml_children",
    "others",
    "short_times",
    "site",
    "until",
    "window_on",
    "window_step",
]
