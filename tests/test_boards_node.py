"""Boards that several runs share, as a node sees them: the highest of their caps, no run below what it has alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.config import parse_config
from slurm_pfi.gpu.identity import HostIdentity
from slurm_pfi.gpu.mapping import slices_sign
from slurm_pfi.gpu.memory import MemoryGpu, MemoryGpuDevices
from slurm_pfi.model import PlanStep, Run
from slurm_pfi.node import messages as m
from slurm_pfi.node.hardware import Hardware
from slurm_pfi.node.setup import gres_files, map_sign

from .node_world import S, World

PRIOR_MW = 700_000
PARK_MW = 200_000


def sliced_world() -> World:
    """Position 0 is the whole GPU-0; positions 1 to 3 are slices of GPU-1."""
    world = World(2)
    world.positions = {0: "GPU-0", 1: "GPU-1", 2: "GPU-1", 3: "GPU-1"}
    return world.start()


def test_a_run_with_several_slices_has_their_board_once() -> None:
    world = sliced_world()
    run = world.begin_job(1, 1, 3)
    world.advance(6 * S)
    assert world.reports[-1].runs[0].gpus == ("GPU-1",)
    assert world.reports[-1].gpus[1].runs == (run,)
    assert world.reports[-1].gpus[1].position == 1


def test_a_tenant_that_did_not_agree_keeps_the_board_uncapped() -> None:
    """The whole GPU is capped, the board with the slices is not: one of its tenants allows nothing."""
    world = sliced_world()
    whole, slice_, stern = world.begin_job(1, 0), world.begin_job(2, 1), world.begin_job(3, 3, flex="none")
    world.window(PARK_MW, {whole: 300_000, slice_: 250_000, stern: None})
    assert world.requested() == [300_000, PRIOR_MW]
    assert [fields["uuid"] for fields in world.said("set")] == ["GPU-0"], "it was never touched"
    world.end_job(stern)
    assert world.requested() == [300_000, 250_000]


def test_a_board_follows_the_highest_cap_as_its_runs_come_and_go() -> None:
    world = sliced_world()
    a, b = world.begin_job(1, 1), world.begin_job(2, 2)
    world.window(PARK_MW, {a: 300_000, b: 450_000})
    assert world.requested()[1] == 450_000
    world.end_job(b)
    assert world.requested()[1] == 300_000
    world.end_job(a)
    assert world.requested()[1] == PARK_MW


def test_a_run_that_is_not_admitted_has_the_park_cap_at_least() -> None:
    """Alone on the GPU it would have the park cap: no neighbour's plan takes it below."""
    world = sliced_world()
    admitted = world.begin_job(1, 1)
    world.window(400_000, {admitted: 300_000})
    assert world.requested() == [400_000, 300_000]
    newcomer = world.begin_job(2, 2)
    world.advance(S)
    assert world.requested()[1] == 400_000
    world.end_job(newcomer)
    assert world.requested()[1] == 300_000
    world.window(PARK_MW, {admitted: 300_000})
    world.begin_job(3, 2)
    assert world.requested()[1] == 300_000, "nor does it lift a cap above the park cap"


def test_slices_that_vanish_under_their_job_leave_the_board_alone() -> None:
    """The board is no longer divided: whose it is cannot be told, so nothing is set on it until its cap must go."""
    world = sliced_world()
    run = world.begin_job(1, 2)
    world.window(PARK_MW, {run: 300_000})
    sets = len(world.devices.sets)
    world.positions, world.map_fault = {0: "GPU-0"}, "gres.conf does not lead to every GPU: position 2"
    world.advance(301 * S)
    assert world.reports[-1].runs[0].gpus == ()
    assert "may use it" in world.reports[-1].gpus[1].fault
    world.window(PARK_MW, {run: 500_000})
    assert world.requested()[1] == 300_000
    assert len(world.devices.sets) == sets
    world.send(world.make_plan(no_window()))
    assert world.requested()[1] == PRIOR_MW


def test_a_job_on_a_new_slice_has_the_gpus_listed_anew() -> None:
    world = World(2)
    world.positions = {0: "GPU-0", 1: "GPU-1"}
    world.start()
    world.advance(60 * S)
    world.positions = {0: "GPU-0", 1: "GPU-1", 2: "GPU-1"}
    run = world.begin_job(1, 2)
    world.advance(3 * S)
    assert world.reports[-1].runs[0].gpus == ("GPU-1",)
    assert world.said("run_seen")[-1] == {"run": str(run), "gpus": ["GPU-1"], "reason": "GPUs found"}


def test_gres_conf_written_or_a_board_divided_anew_has_the_gpus_listed_anew(tmp_path: Path) -> None:
    proc, conf = tmp_path / "proc", tmp_path / "slurm.conf"
    config = parse_config(f'cluster = "c"\n[slurm]\nconf = "{conf}"\n', origin="test")
    (tmp_path / "gres.conf").write_text(f"Name=gpu File={tmp_path}/nvidia0\n")
    (tmp_path / "nvidia0").symlink_to("/dev/null")
    hardware = Hardware(
        devices=MemoryGpuDevices([MemoryGpu(uuid="GPU-0", minor=0, index=0)]),
        journal_folder=tmp_path / "journal",
        identity=lambda: HostIdentity(boot_id="b", driver_start="1"),
        gres_files=lambda: gres_files(config, "n1"),
        map_sign=lambda: (map_sign(config), slices_sign(proc)),
    )

    async def seen() -> list[bool]:
        """Whether a reading says that the map has changed, before and after the GPUs are listed again."""
        found = [(await hardware.sample(("GPU-0",), quick=False)).map_changed]
        listed = await hardware.look()
        assert isinstance(listed, m.DevicesListed)
        return [*found, (await hardware.sample(("GPU-0",), quick=False)).map_changed]

    assert asyncio.run(seen())[1] is False
    (tmp_path / "gres.conf").write_text(f"Name=gpu File={tmp_path}/nvidia0 # the same\n")
    assert asyncio.run(seen()) == [True, False]
    (proc / "driver/nvidia/capabilities/gpu0/mig/gi7").mkdir(parents=True)
    assert asyncio.run(seen()) == [True, False]
    (proc / "driver/nvidia/capabilities/gpu0/mig/gi7").rmdir()
    assert asyncio.run(seen()) == [True, False]
    assert asyncio.run(seen()) == [False, False]


def test_a_changed_map_is_read_at_once_and_not_again_and_again() -> None:
    world = World(1).start()
    world.advance(60 * S)
    before = world.order.count("ListDevices")
    for _ in range(20):
        world.event(m.Sampled(samples=(), map_changed=True))
        world.advance(S // 10)
    assert 1 <= world.order.count("ListDevices") - before <= 2


def no_window() -> PlanStep:
    return PlanStep(starts_in_s=0.0, park_cap_mw=None)


CAPS = st.one_of(st.none(), st.integers(200, 700).map(lambda watts: watts * 1000))


@given(
    park_w=st.integers(200, 500),
    jobs=st.lists(
        st.tuples(st.sets(st.integers(0, 5), min_size=1, max_size=3), st.one_of(st.just("unknown"), CAPS)),
        min_size=1,
        max_size=5,
    ),
)
def test_no_run_is_below_its_own_cap_and_no_board_above_the_highest(
    park_w: int, jobs: list[tuple[set[int], int | str | None]]
) -> None:
    world = World(3)
    world.positions = {0: "GPU-0", 1: "GPU-1", 2: "GPU-1", 3: "GPU-2", 4: "GPU-2", 5: "GPU-2"}
    world.start()
    park_mw = park_w * 1000
    allowed: dict[str, list[int]] = {uuid: [] for uuid in world.devices.gpus}
    caps: dict[Run, int | None] = {}
    for job_id, (positions, cap) in enumerate(jobs, 1):
        run = world.begin_job(job_id, *sorted(positions))
        if not isinstance(cap, str):
            caps[run] = cap
        own_mw = park_mw if isinstance(cap, str) else PRIOR_MW if cap is None else cap
        for uuid in {world.positions[position] for position in positions}:
            allowed[uuid].append(own_mw)
    assert world.window(park_mw, caps)
    for uuid, limit_mw in zip(allowed, world.requested(), strict=True):
        assert limit_mw == max(allowed[uuid], default=park_mw)
