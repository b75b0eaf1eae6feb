"""Sites for forecasts: a controller's core that was told what a test says, and a real control socket over it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from slurm_pfi.bus.control import ControlServer
from slurm_pfi.config import ControllerSection
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.answers.orders import Orders
from slurm_pfi.controller.knowledge import learn_runs
from slurm_pfi.controller.shell import Controller
from slurm_pfi.elasticity.evidence import Measurement, RunEvidence
from slurm_pfi.model import Run

from .test_controller_core import Site, W, gpu
from .world import job_info

H200 = "NVIDIA H200"


class ForecastSite(Site):
    """Three nodes of two GPUs and 100 W beside them, told on the real clock so that a server may answer for it."""

    def __init__(self, nodes: int = 3, gpus: int = 2, mode: Any = "enforce", **times: Any) -> None:
        times = {"node_answer_s": 3600.0, "node_silent_s": 3600.0, "baseline_s": 5.0, **times}
        super().__init__(nodes, gpus, mode, **times)
        self.now_ns = time.monotonic_ns()
        self.cycle()

    def seen(self, node: str, *gpus: Any, flex: str = "medium") -> None:
        """Report these GPUs often enough that the runs on them have a baseline."""
        for _ in range(4):
            self.hear(node, *gpus, flex=flex)
            self.wait(3)
        self.hear(node, *gpus, flex=flex)
        self.cycle()

    def train(self, node: str, job_id: int, draw_w: int, flex: str = "medium") -> Run:
        """A run on both GPUs of a node, seen uncapped at this draw."""
        run = Run("c", job_id)
        self.seen(node, *(gpu(f"{node}-{i}", run, draw_mw=draw_w * W) for i in range(2)), flex=flex)
        return run

    def idle(self, node: str, draw_w: int | None = 75) -> None:
        draw_mw = None if draw_w is None else draw_w * W
        self.hear(node, *(gpu(f"{node}-{i}", draw_mw=draw_mw) for i in range(2)))

    def job(self, run: Run, node: str, **changes: Any) -> None:
        """What Slurm says of the run."""
        self.tell(cs.JobRead(run=run, job=replace(job_info(run, (node,), "main"), **changes)))

    def learn(self, losses: dict[Run, float]) -> None:
        """What was measured: the loss of each run at a reduction of 15 %."""
        found = [
            (run, RunEvidence(H200, measurements=(Measurement(0.15, loss, 0.005),), baseline="seen"))
            for run, loss in losses.items()
        ]
        knowledge = learn_runs(self.core.science.prior, found, 1)
        self.state = msgspec.structs.replace(self.state, knowledge=knowledge)


@contextmanager
def served(site: Site, folder: Path) -> Iterator[Path]:
    """The config file of a real control socket that answers for this site."""
    section = ControllerSection(state_dir=str(folder / "state"), run_dir=str(folder / "run"))
    config = msgspec.structs.replace(site.config, controller=section)
    path = folder / "site.toml"
    path.write_text(f'cluster = "c"\n[controller]\nrun_dir = "{folder}/run"\n')
    (folder / "state").mkdir()
    (folder / "run").mkdir()
    controller = Controller(config, path)
    controller.limits.load(first_start=True)
    controller.state = site.state
    loop = asyncio.new_event_loop()
    server = ControlServer(folder / "run" / "control.sock", handler=Orders(controller).handle)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    try:
        yield path
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
        controller.audit.close()
