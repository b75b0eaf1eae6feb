"""Field cases of power limits (docs/faults.md): what has gone wrong at other sites and with other tools.

C4, C6 and C9 are ours, of the same kind: two writers at once, a cap of the whole module, a limit before us that is not
the default.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pfi.gpu.device import LibraryGoneError
from slurm_pfi.gpu.identity import HostIdentity
from slurm_pfi.gpu.memory import MemoryGpu, MemoryGpuDevices
from slurm_pfi.gpu.rights import may_set_limits
from slurm_pfi.node.hardware import Hardware
from slurm_pfi.node.messages import DevicesListed
from slurm_pfi.units import parse_power_mw
from testbed import gpus
from testbed.gpu_faults import plant
from tests.fault_site import (
    ALL,
    NO_PERMISSION,
    PARK_MW,
    PARKED,
    SET,
    FaultKind,
    LoneNode,
    agent_on,
    ceilings,
    changed_by_us,
    ends,
    gpu,
    journal,
    journal_rests,
    limit_of,
    nvml_children,
    others,
    short_times,
    site,
    until,
    window_on,
    window_step,
)
from tests.node_world import S, World
from tests.node_world import window_step as step_of

__all__ = ["site"]
MODE = "nvmlDeviceGetPowerManagementMode"


def kill(site: LoneNode) -> None:
    site.started[-1].kill()
    site.started[-1].wait()


# ---------------------------------------------------------------------------------------- C1: no right to set


def test_c1_no_right_is_found_at_start_without_trying(site: LoneNode) -> None:
    async def story() -> None:
        with gpus.Node(site.sim) as node:
            node.fault(MODE, FaultKind.VALUE, value=0)
        async with agent_on(site) as (commander, _):
            report = await commander.until(lambda r: len(r.gpus) == 4, "the first report")
            assert any(fault.startswith("cannot enforce") for fault in report.faults)
            assert all("cannot be set" in one.fault for one in report.gpus)
            await commander.plan(window_step(PARK_MW))
            await asyncio.sleep(2)
            assert ceilings(commander.reports[-1]) == ALL, "the node counts at its full draw"
            assert site.audit("set") == [], "no storm of tries"
            assert all(one.draw_mw for one in commander.reports[-1].gpus), "it goes on for its telemetry"

    asyncio.run(story())


def test_c1_a_process_without_the_right_says_so_at_its_first_list(tmp_path: Path) -> None:
    """Root in a container, a unit with DynamicUser: no capability, and nothing is tried to find that out."""
    status = tmp_path / "status"
    status.write_text("Name:\tx\nCapEff:\t00000000a80425fb\n")  # what a container's root has by default
    assert not may_set_limits(status)
    status.write_text("CapEff:\t000001ffffffffff\n")
    assert may_set_limits(status)
    devices = MemoryGpuDevices([MemoryGpu(uuid="GPU-0", minor=0, index=0)])
    hardware = Hardware(
        devices=devices,
        journal_folder=tmp_path / "journal",
        identity=lambda: HostIdentity(boot_id="b", driver_start="d"),
        gres_files=dict,
        may_set=False,
    )
    listed = asyncio.run(hardware.look())
    assert isinstance(listed, DevicesListed)
    assert listed.devices[0].capabilities.settable is False
    assert devices.sets == []


def test_c1_no_right_is_found_by_the_first_set(site: LoneNode) -> None:
    async def story() -> None:
        async with agent_on(site) as (commander, node):
            node.fault(SET, code=NO_PERMISSION)
            await commander.plan(window_step(PARK_MW))
            await commander.until(lambda r: any(f.startswith("cannot enforce") for f in r.faults), "said")
            assert ceilings(commander.reports[-1]) == ALL and len(site.audit("set")) == 4
            await until(lambda: journal_rests(site), "nothing of ours on record that was never in force")

    asyncio.run(story())


# ------------------------------------------------------------------------------- C2: the range belongs to the device

RANGES_W = ((200, 700, 700), (100, 350, 350), (150, 400, 320), (200, 1400, 1400), (170, 210, 210))


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[LoneNode]:
    """Five boards of five kinds, in gres.conf order."""
    made = short_times(LoneNode(tmp_path, n_gpus=5))
    with gpus.Node(made.sim) as node:
        for device, (min_w, max_w, default_w) in zip(made.devices, RANGES_W, strict=True):
            for what, value_w in (
                ("max_mw", max_w),
                ("min_mw", min_w),
                ("default_mw", default_w),
                ("reset", 1),
            ):
                node.poke(what, value_w if what == "reset" else value_w * 1000, gpu=device.uuid)
    try:
        yield made
    finally:
        made.close()


def test_c2_each_board_is_kept_within_its_own_range(mixed: LoneNode) -> None:
    async def story() -> None:
        async with agent_on(mixed) as (commander, _):
            runs = [mixed.job(10 + place, str(place)) for place in range(5)]
            report = await commander.until(lambda r: len(r.runs) == 5 and len(r.gpus) == 5, "all runs")
            by_place = sorted(report.gpus, key=lambda one: one.position or 0)
            found = [(g.min_mw // 1000, g.max_mw // 1000, g.default_mw // 1000) for g in by_place]
            assert tuple(found) == RANGES_W, "read from each device"
            assert [g.prior_mw for g in by_place] == [w * 1000 for _, _, w in RANGES_W]
            # Exactly the least limit, the default that is not the greatest, no table of models, the greatest.
            caps = (200_000, 100_000, 320_000, 1_000_000, 210_000)
            await commander.plan(window_step(PARK_MW, dict(zip(runs, caps, strict=True))))
            await commander.ceilings(*caps)
            for name in list(mixed.paths.jobs.iterdir()):
                name.unlink()
            run = mixed.job(20, "0-4")
            await commander.until(lambda r: [one.run for one in r.runs] == [run], "a run on all of them")
            await commander.plan(window_step(PARK_MW, {run: 500_000}))
            await commander.ceilings(500_000, 350_000, 320_000, 500_000, 210_000)
            await commander.plan(window_step(None))
            await commander.ceilings(*[w * 1000 for _, _, w in RANGES_W])

    asyncio.run(story())


@pytest.mark.parametrize("cap_mw", [50_000, 199_999, 900_000, 2**40, -1, 0])
def test_c2_a_cap_out_of_range_is_refused_with_its_reason(cap_mw: int) -> None:
    world = World(2).start()
    run = world.begin_job(1, 0)
    assert not world.window(200_000, {run: cap_mw})
    world.advance(S)
    assert "200000..700000 mW of GPU-0" in world.said("plan_refused")[-1]["reason"]
    assert any("200000..700000" in report.refused for report in world.reports[-3:])
    assert world.devices.sets == []


def test_c2_rounding_goes_to_the_legal_side_and_the_read_back_counts() -> None:
    assert parse_power_mw("333.3333W") == 333_333, (
        "a third of a milliwatt more would be no cap that was allowed"
    )
    assert math.ceil(210_000 * 0.8) < 170_000, "80 % of the default lies below what the board can do"
    world = World(1)
    board = world.devices.gpus["GPU-0"]
    board.min_mw, board.max_mw, board.default_mw = 170_000, 210_000, 210_000
    board.requested_mw = board.enforced_mw = 210_000
    world.start()
    run = world.begin_job(1, 0)
    world.send(world.make_plan(step_of(170_000, {run: 170_000})))
    board.requested_mw = board.enforced_mw = 170_900  # the board rounds up
    world.advance(2 * S)
    assert world.reports[-1].gpus[0].ceiling_mw == 170_900, "the value really set, not the one asked for"
    assert world.said("conflict") == []


# ------------------------------------------------------------------------------ C3: the limit falls back by itself


def test_c3_a_cap_that_fell_back_is_set_again_and_counted(site: LoneNode) -> None:
    loose = site.devices[0].uuid

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            node.poke("persistence", 0, gpu=loose)
            await commander.plan(window_step(300_000))
            await until(lambda: limit_of(site, loose) == 300_000, "capped")
            plant(node, 17, loose, variant="fell back")
            await until(lambda: limit_of(site, loose) == 300_000, "set again", 5.0)
            await until(lambda: site.audit("reverted") or site.audit("conflict"), "told")
            await ends(commander)

    asyncio.run(story())


@pytest.mark.parametrize("driver", ["d1", "d2"])
def test_c3_reset_and_driver_reload_are_counted_apart(driver: str) -> None:
    world = World(2).start()
    world.window(300_000)
    world.advance(2 * S)
    if driver == "d2":
        world.driver_start = driver
        for uuid in world.devices.gpus:
            world.devices.reset(uuid)
            world.issued[uuid].clear()
        for uuid in world.devices.gpus:
            world.devices.fail("sample", LibraryGoneError("reloaded", uuid=uuid), times=1)
    else:
        world.devices.gpus["GPU-0"].lost = True
        world.advance(2 * S)
        assert world.reports[-1].gpus[0].ceiling_mw is None
        world.devices.reset("GPU-0")
    world.advance(5 * S)
    assert world.requested() == [300_000] * 2
    wanted = {"driver restart": 2} if driver == "d2" else {"reset": 1}
    assert world.state.reverted == wanted
    assert world.said("conflict") == []
    world.send(world.make_plan(step_of(None)))
    world.advance(2 * S)
    assert world.requested() == [700_000] * 2


# -------------------------------------------------------------------------------- C4: two writers at one instant


@pytest.mark.parametrize("foreign_mw", [250_000, 650_000])
def test_c4_a_write_that_our_set_replaced_unseen(foreign_mw: int) -> None:
    """Nobody could have read it: a lower one is put back, a higher one gives way; each is told, once."""
    world = World(1).start()
    run = world.begin_job(1, 0)
    world.window(200_000, {run: 500_000})
    world.advance(2 * S)
    world.devices.write_foreign("GPU-0", foreign_mw)
    world.window(200_000, {run: 400_000})
    world.advance(2 * S)
    assert world.requested() == [250_000 if foreign_mw == 250_000 else 400_000]
    assert [said["found_mw"] for said in world.said("conflict")] == [foreign_mw]
    world.send(world.make_plan(step_of(None)))
    world.advance(2 * S)
    assert world.requested() == [250_000 if foreign_mw == 250_000 else 700_000]


def test_c4_a_write_just_before_our_restore_is_put_back() -> None:
    world = World(2).start()
    world.window(200_000)
    world.advance(2 * S)
    world.devices.write_foreign("GPU-0", 450_000)
    world.send(world.make_plan(step_of(None)))
    world.advance(2 * S)
    assert world.requested() == [450_000, 700_000]
    assert [said["found_mw"] for said in world.said("conflict")] == [450_000]
    assert world.reports[-1].gpus[0].prior_mw == 450_000
    sets = len(world.devices.sets)
    world.advance(60 * S)
    assert len(world.devices.sets) == sets


# ------------------------------------------------------------------------------ C5: one GPU without power readings


def test_c5_partly_enforceable(site: LoneNode) -> None:
    """One as usual, one that can neither be read nor set, one whose reading is unknown: no 0 W, no loop of errors."""
    mobile, silent = site.devices[1].uuid, site.devices[2].uuid

    async def story() -> None:
        with gpus.Node(site.sim) as node:
            node.fault(MODE, FaultKind.VALUE, value=0, gpu=mobile)
            for each in (mobile, silent):
                node.fault("nvmlDeviceGetPowerUsage", code=3, gpu=each)
                for number in (185, 186, 83):
                    node.fault("nvmlDeviceGetFieldValues", FaultKind.ENTRY, code=3, field=number, gpu=each)
                node.fault("nvmlDeviceGetTotalEnergyConsumption", code=3, gpu=each)
        async with agent_on(site) as (commander, _):
            await commander.plan(window_step(PARK_MW))
            report = await commander.ceilings(PARK_MW, 700_000, PARK_MW, PARK_MW)
            assert any(
                fault.startswith("partly enforceable: limits can be set on 3 of 4") for fault in report.faults
            )
            await asyncio.sleep(2)
            report = commander.reports[-1]
            assert gpu(report, mobile).draw_mw is None and gpu(report, silent).draw_mw is None
            assert gpu(report, mobile).mean_mw is None and gpu(report, silent).mean_mw is None
            assert gpu(report, silent).fault == "" and gpu(report, mobile).fault
            assert not site.audit("set_failed")
            await ends(commander)

    asyncio.run(story())


def test_c5_a_board_without_any_limit_leaves_the_others_alone(site: LoneNode) -> None:
    bare = site.devices[3].uuid

    async def story() -> None:
        with gpus.Node(site.sim) as node:
            node.fault("nvmlDeviceGetPowerManagementLimitConstraints", code=3, gpu=bare)
        async with agent_on(site) as (commander, _):
            report = await commander.until(lambda r: r.gpus, "the others")
            assert len(report.gpus) == 3 and bare not in [one.uuid for one in report.gpus]
            assert any(bare in fault for fault in report.faults), (
                "missing is said; the controller counts it in full"
            )
            await commander.plan(window_step(PARK_MW))
            await commander.until(lambda r: others(r, bare) == [PARK_MW] * 3, "capped as usual")

    asyncio.run(story())


# --------------------------------------------------------------------------------- C6: a cap of the whole module


def test_c6_a_limit_of_the_module_is_not_taken_for_ours(site: LoneNode) -> None:
    """A module's limit is about twice that of its GPU: ours goes to the GPU, and the module's is never written."""
    bound = site.devices[0].uuid

    async def story() -> None:
        with gpus.Node(site.sim) as node:
            plant(node, 43, bound)
        async with agent_on(site) as (commander, node):
            report = await commander.until(lambda r: len(r.gpus) == 4, "listed")
            assert gpu(report, bound).max_mw == 700_000 and gpu(report, bound).enforced_mw == 450_000
            assert gpu(report, bound).ceiling_mw == 700_000, "the module's share may grow: the request counts"
            await commander.plan(window_step(PARK_MW))
            await commander.ceilings(*PARKED)
            node.poke("module_mw", 0, gpu=bound)
            await ends(commander)

    asyncio.run(story())


# ----------------------------------------------------------------------------------- C7: lost in the middle


def test_c7_one_lost_the_others_keep_their_caps_by_uuid(site: LoneNode) -> None:
    """It answers nothing and the list by index is shorter; then the agent starts anew, and knows three of four."""
    lost = site.devices[1].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            plant(node, 19, lost)
            plant(node, 20, lost)
            await commander.until(lambda r: gpu(r, lost).ceiling_mw is None, "unknown")
            assert len(commander.reports[-1].gpus) == 4, "counted once"
            kill(site)
            commander.reports.clear()
            await asyncio.to_thread(site.start)
            report = await commander.until(lambda r: len(r.gpus) == 3, "three are listed")
            assert [one.ceiling_mw for one in report.gpus] == [PARK_MW] * 3
            await commander.plan(window_step(300_000))
            await commander.until(
                lambda r: [one.ceiling_mw for one in r.gpus] == [300_000] * 3, "three follow"
            )
            assert limit_of(site, lost) == PARK_MW and journal(site)[lost].current_mw == PARK_MW
            node.clear_faults()
            await commander.until(lambda r: ceilings(r) == [300_000] * 4, "found again", deadline_s=45.0)
            await ends(commander)

    asyncio.run(story())


# ------------------------------------------------------------------------------ C8: units and absurd readings


def test_c8_a_reading_over_twice_the_boards_limit_is_rejected(site: LoneNode) -> None:
    mad = site.devices[0].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            for field in (185, 186):
                node.fault("nvmlDeviceGetFieldValues", FaultKind.VALUE, value=3_712_345, field=field, gpu=mad)
            node.fault("nvmlDeviceGetPowerUsage", FaultKind.VALUE, value=3_712_345, gpu=mad)
            await commander.until(lambda r: gpu(r, mad).draw_mw is None, "unknown")
            node.clear_faults()
            for field in (185, 186):
                node.fault("nvmlDeviceGetFieldValues", FaultKind.VALUE, value=85_000, field=field, gpu=mad)
            await commander.until(lambda r: gpu(r, mad).draw_mw == 85_000, "85.0 W")

    asyncio.run(story())


def test_c8_a_cap_in_the_wrong_unit_is_refused() -> None:
    world = World(1).start()
    run = world.begin_job(1, 0)
    for cap_mw in (300, 1_000, 300_000_000, 1):
        assert not world.window(200_000, {run: cap_mw}), "300 W as 300, 1 W, 300 kW"
    assert world.window(200_000, {run: 300_000})
    assert world.devices.sets == [("GPU-0", 300_000)]
    assert (parse_power_mw("120 kW"), parse_power_mw("300W")) == (120_000_000, 300_000)


# ------------------------------------------------------------- C9: a limit before us that is not the default


def test_c9_what_was_there_before_comes_back_not_the_default(site: LoneNode) -> None:
    """H100 NVL ships at 310 W of 400 W, and sites set their own: restored is what was there, through a restart too."""

    async def story() -> None:
        async with agent_on(site) as (commander, node):
            await commander.until(lambda r: len(r.gpus) == 4, "listed")
            node.poke("requested_mw", 510_000, gpu=site.devices[0].uuid)
            await commander.until(
                lambda r: gpu(r, site.devices[0].uuid).prior_mw == 510_000, "the site's own"
            )
            await commander.plan(window_step(PARK_MW))
            await commander.ceilings(*PARKED)
            kill(site)
            commander.reports.clear()
            await asyncio.to_thread(site.start)
            await commander.ceilings(*PARKED)
            await ends(commander, 510_000, *ALL[1:])

    asyncio.run(story())
    assert site.limits() == [510_000, *ALL[1:]]


def test_c9_no_cap_ever_lies_above_the_limit_before_us() -> None:
    world = World(1).start()
    world.devices.write_foreign("GPU-0", 310_000)
    world.advance(6 * S)
    run = world.begin_job(1, 0)
    assert world.window(200_000, {run: 600_000})
    world.advance(2 * S)
    assert world.requested() == [310_000] and world.devices.sets == []


# -------------------------------------------------------------------------- C10: driver upgrade under a running daemon


def test_c10_driver_upgraded_under_a_running_daemon(site: LoneNode) -> None:
    """Up without NVML, trying slowly, saying why; caps stay on record as set; after the reboot all is as new."""

    async def story() -> None:
        async with window_on(site) as (commander, node):
            plant(node, 3)
            kill(site)
            commander.reports.clear()
            agent = await asyncio.to_thread(site.start)
            report = await commander.until(lambda r: any("code 18" in fault for fault in r.faults), "why")
            assert report.gpus == () and site.limits() == PARKED
            assert {entry.current_mw for entry in journal(site).values()} == {PARK_MW}, (
                "recorded as still set"
            )
            await asyncio.sleep(3)
            assert agent.poll() is None and len(nvml_children(site)) <= 1
            assert site.log.read_text().count("code 18") <= 4, "slowly, and not said over and over"
            kill(site)  # the reboot
            node.clear_faults()
            for device in site.devices:
                node.poke("reset", 1, gpu=device.uuid)
            (site.folder / "id" / "n1" / "boot_id").write_text("boot-2\n")
            commander.reports.clear()
            await asyncio.to_thread(site.start)
            report = await commander.ceilings(*ALL)
            assert {one.prior_mw for one in report.gpus} == {700_000}
            await commander.plan(window_step(300_000))
            await commander.ceilings(*[300_000] * 4)
            await ends(commander)

    asyncio.run(story())


# ------------------------------------------------------------------------------------ D8: somebody else also writes


def confirmed(site: LoneNode, cap_mw: int) -> set[str]:
    """GPUs of which the agent has read back this limit."""
    return {record["uuid"] for record in site.audit("readback") if record["enforced_mw"] == cap_mw}


def test_d8_over_higher_under_lower_back_to_the_operators_value(site: LoneNode) -> None:
    shared = site.devices[0].uuid

    async def story() -> None:
        async with window_on(site) as (commander, node):
            await commander.plan(window_step(300_000))
            await commander.ceilings(*[300_000] * 4)
            # Before our own set is read back, the prior limit is also what a set without effect leaves.
            await until(lambda: len(confirmed(site, 300_000)) == 4, "read back")
            node.poke("requested_mw", 700_000, gpu=shared)
            await until(lambda: limit_of(site, shared) == 300_000, "re-applied", 5.0)
            await until(lambda: len(site.audit("conflict")) == 1, "one line")
            node.poke("requested_mw", 250_000, gpu=shared)
            await until(lambda: len(site.audit("conflict")) == 2, "one line")
            await asyncio.sleep(2.5)
            assert limit_of(site, shared) == 250_000, "lower than ours is left"
            await commander.plan(window_step(None))
            await commander.ceilings(250_000, *ALL[1:])
            assert len(site.audit("conflict")) <= 3
            await until(lambda: site.limits() == [250_000, *ALL[1:]], "the others are back")
            kill(site)
            commander.reports.clear()
            sets = len(changed_by_us(site))
            await asyncio.to_thread(site.start)
            await commander.until(lambda r: len(r.gpus) == 4, "listed")
            await asyncio.sleep(1.5)
            assert len(changed_by_us(site)) == sets, "no write without a window"

    asyncio.run(story())
    assert site.limits() == [250_000, *ALL[1:]]
