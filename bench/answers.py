"""How long a question to the controller takes with 1,000 runs known: ``python -m bench.answers``.

A controller with 1,000 runs on 400 nodes, in a window, answers over its real socket. Writes build/bench/answers.json.
For each question, asked five times: ``reply_ms``, the longest time until the whole reply is here; ``reply_kib``, its
size; ``command_ms``, the median time of the whole command line from the start of its process to its end; and
``command_cpu_ms``, what of it the process spent computing, which a busy machine changes less.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from slurm_pfi.bus.asking import NO, ask
from slurm_pfi.config import Config, NodeSet, TimesSection
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.core import Core
from slurm_pfi.controller.nodes import declared_nodes
from slurm_pfi.controller.science import Science
from slurm_pfi.controller.shell import CONTROL_SOCKET
from slurm_pfi.elasticity.library import Library
from slurm_pfi.model import Limit, LimitStep, Report, Run
from slurm_pfi.slurm.backend import JobInfo, Special
from slurm_pfi.store.rows import EventRow
from tests.site_answers import answering

from .controller import report

OUT = Path(__file__).resolve().parent.parent / "build/bench/answers.json"
NODES = 400
RUNS = 1000
TIMES = 5
EVENTS = 200
QUESTIONS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "job": ("job", {"job_id": 601}, ["job", "601"]),
    "jobs": ("jobs", {}, ["jobs"]),
    "status": ("status", {}, ["status"]),
    "top": ("status", {}, ["top", "--once"]),
    "what-if": ("what_if", {"share": 0.2}, ["what-if", "20%"]),
    "version": ("status", {}, ["--version"]),
}
"""What is asked over the socket, and on the command line. ``version`` asks nothing: the start of a process alone."""


def job_of(one: Report, run: Run) -> JobInfo:
    """Slurm's record of a made-up run."""
    return JobInfo(
        job_id=run.job_id,
        array_job_id=None,
        array_task_id=None,
        het_job_id=None,
        het_offset=None,
        restart=0,
        user_id=1000,
        user_name=f"user{run.job_id % 40}",
        account="physics",
        partition="gpu",
        qos="normal",
        state="RUNNING",
        nodes=(one.node,),
        start_unix_s=Special.NOT_SET,
        end_unix_s=Special.NOT_SET,
        limit_s=Special.UNLIMITED,
        name=f"train-{run.job_id % 90}",
    )


def make_site() -> tuple[Config, cs.State]:
    """A site whose controller has heard all nodes and Slurm, with a window open."""
    config = Config(
        cluster="bench",
        mode="enforce",
        node_set=(NodeSet(names=f"n[1-{NODES}]", gpus=8, gpu_max_w=700, overhead_w=1000),),
        times=TimesSection(start_settle_s=0.001),
    )
    core = Core(config, Science(Library.load_default()))
    now_ns = time.monotonic_ns()
    state = cs.State(epoch=1, started_ns=now_ns, nodes=declared_nodes(config))

    def tell(event: cs.Event) -> None:
        nonlocal state
        state, _ = core.step(state, event, now_ns)

    for number, name in enumerate(state.nodes, start=1):
        heard = report(name, number, 1)
        tell(cs.ReportCame(report=heard))
        for one in heard.runs:
            tell(cs.JobRead(run=one.run, job=job_of(heard, one.run)))
    step = LimitStep(start_unix_s=time.time(), limit_mw=round(NODES * (1000 + 8 * 700) * 1000 * 0.9))
    limit = Limit(id="m", revision=1, source="bench", class_="economic", steps=(step,))
    tell(cs.LimitsChanged(limits=(limit,)))
    now_ns += 10**9
    tell(cs.Cycle(now_unix_s=time.time()))
    if len(state.runs) != RUNS or state.window is None:
        raise RuntimeError(f"{len(state.runs)} runs, window {state.window}: this measures something else")
    return config, state


@contextmanager
def site_socket(folder: Path) -> Iterator[Path]:
    """The controller's socket, with a job that has much to tell in its history."""
    with answering(folder, *make_site()) as controller:
        controller.history.add(
            EventRow(unix_s=time.time(), run="bench:601.0", kind="capped", text="capped to 480 W a GPU")
            for _ in range(EVENTS)
        )
        controller.history.flush()
        yield folder / CONTROL_SOCKET


def measure(socket: Path, command: str, args: dict[str, Any], line: list[str]) -> dict[str, float]:
    """Medians for one question."""
    environment = {**os.environ, "SLURM_PFI_CONF": str(socket.parent / "site.toml"), "COLUMNS": "80"}
    replies: list[float] = []
    commands: list[float] = []
    cpus: list[float] = []
    for _ in range(TIMES):
        began_s = time.perf_counter()
        reply = ask(socket, command, args)
        replies.append(time.perf_counter() - began_s)
        if not reply.ok:
            raise RuntimeError(reply.message)
        began_s, began_cpu_s = time.perf_counter(), _children_cpu_s()
        done = subprocess.run(
            [sys.executable, "-m", "slurm_pfi", *line],
            env=environment,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        # That a limit cannot be held is an answer, and the longest to work out.
        if done.returncode not in (0, NO):
            raise RuntimeError(f"slurm-pfi {' '.join(line)}: exit {done.returncode}")
        commands.append(time.perf_counter() - began_s)
        cpus.append(_children_cpu_s() - began_cpu_s)
    return {
        "reply_ms": round(max(replies) * 1000, 1),
        "reply_kib": round(len(msgspec.json.encode(reply)) / 1024, 1),
        "command_ms": round(statistics.median(commands) * 1000, 1),
        "command_cpu_ms": round(statistics.median(cpus) * 1000, 1),
    }


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    """Measure, print and write."""
    with tempfile.TemporaryDirectory() as folder, site_socket(Path(folder)) as socket:
        found = {name: measure(socket, *question) for name, question in QUESTIONS.items()}
    for name, figures in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in figures.items()))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    whole = {"nodes": NODES, "runs": RUNS, "events_of_the_job": EVENTS, "questions": found}
    OUT.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
