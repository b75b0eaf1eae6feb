"""A site whose controller answers over a real socket: the real orders, a real history, runs as the test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from slurm_pfi.bus.control import ControlServer
from slurm_pfi.config import Config, ControllerSection
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.answers.orders import Orders
from slurm_pfi.controller.measuring.levels import Level
from slurm_pfi.controller.measuring.record import Record, Tally
from slurm_pfi.controller.shell import CONTROL_SOCKET, Controller
from slurm_pfi.model import Run

HALF_HOUR_S = 1800.0


def record(**changes: Any) -> Record:
    """A run of four GPUs: 72 min watched, seen at 650 W and 1000 tokens/s, capped to 470 W for 30 min of it."""
    whole = Record(
        seen=True,
        top_mw=660_000,
        reporting=True,
        unit="tokens",
        levels=(
            Level(
                cap_mw=None,
                segment=0,
                last_ns=0,
                batches=(60.0, 60_000.0) * 16,
                count=16,
                draw_s=960.0,
                draw_mws=650e3 * 960,
            ),
            Level(
                cap_mw=480_000,
                segment=0,
                last_ns=0,
                batches=(60.0, 57_000.0) * 16,
                count=16,
                draw_s=HALF_HOUR_S,
                draw_mws=470e3 * HALF_HOUR_S,
            ),
        ),
        tally=Tally(
            known_s=4320.0,
            capped_s=HALF_HOUR_S,
            drawn_mws=4 * 600e3 * 4320,
            done=4.1e6,
            done_capped=1.72e6,
            work_s=HALF_HOUR_S,
            work_done=1.72e6,
            cut_gpu_s=4 * HALF_HOUR_S,
            cut_mws=4 * HALF_HOUR_S * 470e3,
        ),
    )
    return msgspec.structs.replace(whole, **changes)


def with_record(state: cs.State, run: Run, **changes: Any) -> cs.State:
    """The state with this record of a run."""
    view = msgspec.structs.replace(state.runs[run], record=record(**changes))
    return msgspec.structs.replace(state, runs={**state.runs, run: view})


@contextmanager
def answering(folder: Path, config: Config, state: cs.State) -> Iterator[Controller]:
    """A controller that answers in ``folder`` with this state, and writes ``site.toml`` there to find it by."""
    (folder / "site.toml").write_text(
        f'cluster = "{config.cluster}"\n[controller]\nrun_dir = "{folder}"\nstate_dir = "{folder}"\n'
    )
    places = ControllerSection(run_dir=str(folder), state_dir=str(folder))
    controller = Controller(msgspec.structs.replace(config, controller=places), folder / "site.toml")
    controller.state = state
    controller.history.start()
    up, ends = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = ControlServer(folder / CONTROL_SOCKET, handler=Orders(controller).handle)
        await server.start()
        up.set()
        await ends.wait()
        await server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert up.wait(10)
    try:
        yield controller
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(10)
        loop.close()
        controller.history.close()
        controller.audit.close()
