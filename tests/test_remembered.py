"""A controller that starts anew goes on with what its predecessor measured of the runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slurm_pfi.controller.measuring.record import Record
from slurm_pfi.controller.remembered import host_boot_id, kept_records, read_record, with_kept
from slurm_pfi.model import Run
from slurm_pfi.sim.jobs import model_job
from slurm_pfi.store.history import History
from slurm_pfi.store.rows import KeptRecord

from .world import NS, World

RUN = Run("world", 1, 0)


def capped_world() -> World:
    """One job, seen uncapped and then under a cap for a while."""
    world = World(8, nodes=2)
    world.run(2)
    world.start_job(1, {"n1": [0, 1, 2, 3]}, flex="high", model=model_job("L70 FT nc"))
    world.run(60)
    world.set_limit(2 * 500_000 + 4 * 200_000 + 4 * 580_000)
    world.run(120)
    return world


def test_a_restart_in_a_window_loses_no_baseline_and_no_loss(tmp_path: Path) -> None:
    world = capped_world()
    before = world.controller.runs[RUN].record
    assert before.source == "seen"
    assert before.loss_capped is not None
    history = History(tmp_path / "history.db", days=1, most_bytes=2**24, on_fault=print)
    history.start()
    try:
        kept_s = world.unix_s
        history.add(kept_records(world.controller.runs.values(), "boot", kept_s))
        assert history.flush()
        world.kill_controller()
        world.run(10)
        kept = read_record(history.kept_record(str(RUN), "boot"))
        assert read_record(history.kept_record(str(RUN), "another boot")) is None
        assert read_record(history.kept_record("world:2.0", "boot")) is None
        assert read_record(history.kept_record(str(RUN), "boot", kept_s)) == kept
        assert read_record(history.kept_record(str(RUN), "boot", kept_s + 1)) is None, "of a run before it"
    finally:
        history.close()
    assert kept == before
    world.kept[RUN] = kept
    world.start_controller()
    world.run(60)
    after = world.controller.runs[RUN].record
    assert after.source == "seen"
    assert after.draw_mw == before.draw_mw
    assert after.totals.capped_s == pytest.approx(before.totals.capped_s + 70, abs=15)
    assert after.loss_capped == pytest.approx(before.loss_capped, abs=0.01)
    trainee = world.training[RUN]
    trainee.advance(world.now_ns)
    own = 1 - trainee.tokens / (trainee.tokens_per_s * (world.now_ns - trainee.began_ns) / NS)
    assert after.loss == pytest.approx(own, abs=0.01)
    assert not world.violations


def test_what_another_version_wrote_or_a_run_that_is_younger_takes_nothing() -> None:
    world = capped_world()
    view = world.controller.runs[RUN]
    assert read_record(None) is None
    assert read_record(b'{"levels": 7}') is None
    assert read_record(b"\xff") is None
    assert with_kept(view, None) is view
    assert with_kept(view, Record()) is view
    assert with_kept(view, view.record) is view, "what was measured since it was first seen is newer"


def test_without_a_boot_id_nothing_is_kept_for_its_times_would_mean_nothing() -> None:
    world = capped_world()
    assert kept_records(world.controller.runs.values(), "", 0.0) == []
    (row,) = kept_records(world.controller.runs.values(), "boot", 7.0)
    assert isinstance(row, KeptRecord)
    assert (row.run, row.boot_id, row.unix_s) == (str(RUN), "boot", 7.0)
    waiting = msgspec.structs.replace(world.controller.runs[RUN], phase="gone")
    assert kept_records((waiting,), "boot", 7.0) == []
    assert host_boot_id()
