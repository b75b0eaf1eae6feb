"""A run that Slurm has suspended keeps its cap, its baseline and its loss, however long its GPUs idle."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from slurm_pfi.controller import state as cs
from slurm_pfi.model import Progress

from .test_controller_core import RUN, Site, W, gpu, msgspec_job

FREE_W, HELD_W, IDLE_W = 650, 500, 75


class Watched(Site):
    """One GPU, one run that counts its steps; Slurm is read as a whole every minute."""

    def __init__(self) -> None:
        super().__init__(nodes=1, gpus=1, baseline_s=20.0, full_read_s=60.0, full_read_min_s=10.0)
        self.steps = 0.0
        self.suspended = False
        self.seconds(120, FREE_W)
        self.identify(RUN, "n1")
        self.seconds(60, FREE_W)

    def seconds(self, count: int, draw_w: int, limit_w: int = 700, step_s: int = 5) -> None:
        for _ in range(count // step_s):
            self.wait(step_s)
            self.steps += 0 if draw_w == IDLE_W else step_s * (1.0 if draw_w == FREE_W else 0.9)
            report = self.report("n1", gpu("G1", RUN, limit_w=limit_w, draw_mw=draw_w * W))
            told = Progress(counter=self.steps, unit="steps", rate_per_s=None, age_s=0.0)
            (run,) = report.runs
            if draw_w != IDLE_W:
                report = msgspec.structs.replace(report, runs=(msgspec.structs.replace(run, progress=told),))
            seen = len(self.actions)
            self.tell(cs.ReportCame(report=report))
            self.cycle()
            if any(isinstance(action, cs.ReadAllJobs) for action in self.actions[seen:]):
                state = "SUSPENDED" if self.suspended else "RUNNING"
                job = replace(msgspec_job(RUN, ("n1",)), state=state)
                self.tell(cs.AllJobsRead(jobs=(job,)))


def test_hours_without_work_move_no_baseline() -> None:
    site = Watched()
    record = site.state.runs[RUN].record
    assert record.draw_mw == FREE_W * W
    site.suspended = True
    site.seconds(3 * 3600, IDLE_W, step_s=15)
    site.suspended = False
    assert site.state.runs[RUN].record.draw_mw == FREE_W * W
    site.seconds(120, FREE_W)
    after = site.state.runs[RUN].record
    assert after.draw_mw == FREE_W * W
    assert record.rate_per_s is not None and after.rate_per_s is not None
    assert abs(after.rate_per_s / record.rate_per_s - 1) < 0.01
    assert not after.doubt and not after.disputed


def test_a_suspended_run_in_a_window_keeps_its_floor_and_what_caps_cost_it() -> None:
    site = Watched()
    site.limit(600)
    site.seconds(300, HELD_W, HELD_W)
    before = site.state.runs[RUN]
    assert before.record.loss_capped is not None and abs(before.record.loss_capped - 0.1) < 0.02
    site.suspended = True
    site.seconds(3600, IDLE_W, HELD_W)
    resting = site.state.runs[RUN]
    assert (resting.floor_mw, resting.target_cap_mw) == (before.floor_mw, before.target_cap_mw)
    site.suspended = False
    site.seconds(300, HELD_W, HELD_W)
    after = site.state.runs[RUN]
    assert after.floor_mw == before.floor_mw
    assert after.record.loss_capped is not None
    assert abs(after.record.loss_capped - 0.1) < 0.02


def test_what_draws_has_been_resumed_whatever_slurm_said_last() -> None:
    site = Watched()
    site.suspended = True
    site.seconds(120, IDLE_W)
    known_s = site.state.runs[RUN].record.totals.known_s
    site.seconds(50, FREE_W)
    assert site.state.runs[RUN].record.totals.known_s >= known_s + 40
