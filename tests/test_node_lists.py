"""What the core makes of a list of GPUs that is not whole, and how each fault in it is told once."""

from __future__ import annotations

import asyncio
import re

import pytest

from slurm_pfi import __version__
from slurm_pfi.gpu.device import DeadlineError, LostError, NeedsResetError, UnknownDeviceError
from slurm_pfi.node import messages as m
from slurm_pfi.node.report import all_faults
from slurm_pfi.node.wording import device_fault, kind_of
from tests.fault_site import LoneNode, agent_on, site, until
from tests.node_world import S, World

__all__ = ["site"]


def test_after_a_map_that_could_not_be_read_it_is_asked_for_again_soon() -> None:
    """What is known goes on: the plan for a run is followed meanwhile."""
    world = World(3).start()
    run = world.begin_job(7, 1)
    assert world.window(200_000, {run: 450_000})
    world.advance(299 * S)
    world.map_fault = "no answer; positions stay as they were last read"
    world.advance(2 * S)
    assert world.state.faults["map"] == world.map_fault
    assert world.window(200_000, {run: 300_000})
    world.advance(S // 2)
    assert world.requested() == [200_000, 300_000, 200_000]
    world.map_fault = ""
    world.advance(3 * S)
    assert "map" not in world.state.faults


def test_a_lost_gpu_is_told_by_itself_alone() -> None:
    world = World(3).start()
    for what in ("sample", "list"):
        world.devices.fail(what, LostError("GPU-1: GPU is lost (code 15)", uuid="GPU-1", code=15))
    world.advance(10 * S)
    report = world.reports[-1]
    assert report.faults == ()
    assert [gpu.fault.partition(";")[0] for gpu in report.gpus] == ["", "off the bus (NVML code 15)", ""]


def test_a_gpu_that_is_read_but_not_listed_is_told_until_it_is() -> None:
    world = World(3).start()
    world.devices.fail(
        "list", UnknownDeviceError("GPU-1: nvmlDeviceGetName: odd (code 9)", uuid="GPU-1", code=9)
    )
    world.advance(301 * S)
    (told,) = world.reports[-1].faults
    assert told == "GPU-1: cannot be listed: UnknownDeviceError: nvmlDeviceGetName: odd (code 9)"
    world.devices.clear_faults()
    world.advance(31 * S)
    assert world.reports[-1].faults == ()


def test_a_gpu_that_another_start_of_the_driver_no_longer_has_leaves_no_fault() -> None:
    world = World(3).start()
    world.devices.fail("list", UnknownDeviceError("GPU-1: odd (code 9)", uuid="GPU-1", code=9))
    world.advance(301 * S)
    assert world.reports[-1].faults
    del world.devices.gpus["GPU-1"], world.positions[1]
    world.driver_start = "d2"
    world.event(world.result(m.ListDevices()))
    assert list(world.state.gpus) == ["GPU-0", "GPU-2"] and world.reports[-1].faults == ()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            LostError("GPU-1: nvmlDeviceGetName: GPU is lost (code 15)"),
            "off the bus (NVML code 15); its cap stays on record; look for Xid in dmesg, reset it or drain the node",
        ),
        (
            LostError("GPU-1: no longer listed"),
            "off the bus (no longer listed); its cap stays on record; "
            "look for Xid in dmesg, reset it or drain the node",
        ),
        (
            NeedsResetError("GPU-1: nvmlDeviceGetName: reset (code 16)"),
            "needs a reset (NVML code 16); its cap stays on record; "
            "drain the node and reset it: nvidia-smi --gpu-reset",
        ),
        (
            DeadlineError("GPU-1: no answer from NVML in 5 s"),
            "an NVML call hangs (5 s); its cap stays on record; tried again by itself; if it lasts: dmesg, reboot",
        ),
        (
            DeadlineError("GPU-1: a set is stuck in the driver (pid 7); reboot this node"),
            "DeadlineError: a set is stuck in the driver (pid 7); reboot this node",
        ),
    ],
)
def test_a_devices_failure_says_what_to_do(error: Exception, text: str) -> None:
    kind, message = type(error).__name__, str(error)
    assert device_fault("GPU-1", kind, message, capped=True) == text
    rested = device_fault("GPU-1", kind, message, capped=False)
    assert rested == text.replace("; its cap stays on record", "") and kind_of(rested) == kind_of(text)


def test_nothing_is_said_of_others_where_no_gpu_can_be_set() -> None:
    world = World(4)
    for gpu in world.devices.gpus.values():
        gpu.settable = False
    world.start()
    assert all_faults(world.state) == (
        "cannot enforce: no limit can be set on any of 4 GPUs, which count at the limits they have; "
        "run the agent as root with CAP_SYS_ADMIN; looked at again within 5 min",
    )
    world.devices.gpus["GPU-0"].settable = True
    world.start()
    (told,) = all_faults(world.state)
    assert told.startswith("partly enforceable: limits can be set on 1 of 4 GPUs, the others count")


def test_the_log_says_at_start_what_runs_on_what(site: LoneNode) -> None:
    async def story() -> None:
        async with agent_on(site) as (commander, _):
            await commander.until(lambda r: len(r.gpus) == 4, "listed")
            await until(lambda: "GPUs listed" in site.log.read_text(), "said")

    asyncio.run(story())
    text = site.log.read_text()
    (line,) = re.findall("^.*GPUs listed.*$", text, re.MULTILINE)
    assert line == (
        f'info GPUs listed gpus=4 mode="no plan" version={__version__} config={site.config} driver=simulated'
    )
    assert re.search("^warning controller not reached", text, re.MULTILINE) or "not reached" not in text
