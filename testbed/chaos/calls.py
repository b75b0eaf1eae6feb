"""SIGKILL at every fsync, rename, link and unlink in turn, by strace.

A life is a fixed story of one agent: start, first set, raise, restore, release, resume. It is lived once to count the
calls of each kind, then once for each of them on a node of its own, and the kernel kills the agent as it makes that
call. Another agent, which nobody kills, has to bring everything to rest.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from .commander import Commander
from .judge import Violation, judge
from .node import FOREVER_NS, AgentEndedError, ChaosError, ChaosNode, wait_until
from .record import Step

CALLS: Final = (
    "fsync",
    "fdatasync",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "unlink",
    "unlinkat",
)
PRIORS_MW: Final = (700_000, 650_000)
_SIDE_BY_SIDE: Final = 2
_LINE: Final = re.compile(r"(\d+) +(\w+)\(")
_ENDS_NS: Final = 5_000_000_000
"""A window's end: later than the agent's death in it, also on a loaded machine, which is all it has to be."""

Point: TypeAlias = tuple[str, str, int]
"""The life, the call, and which of that kind it is in that life."""
Life: TypeAlias = Callable[[Commander, tuple[str, ...]], Awaitable[None]]


@dataclass
class Killed:
    """What the kills led to. ``missed``: points that a life did not reach this time."""

    kills: dict[str, int] = field(default_factory=dict)
    missed: list[Point] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    took_s: float = 0.0


def check_strace() -> None:
    """Raises ChaosError that names what is missing: strace itself, or the right to trace."""
    if shutil.which("strace") is None:
        raise ChaosError("strace is not installed; make setup installs it (Debian: apt-get install strace)")
    tried = subprocess.run(
        ["strace", "-qqq", "-o", "/dev/null", "true"], check=False, capture_output=True, text=True, timeout=30
    )
    if tried.returncode != 0:
        raise ChaosError(
            f"ptrace is not allowed here, so no process can be killed at a system call: {tried.stderr.strip()}; "
            "allow it (in a container --cap-add=SYS_PTRACE, else sysctl kernel.yama.ptrace_scope=1)"
        )


def run(folder: Path, *, most: int | None = None) -> Killed:
    """Kill at every call, or at ``most`` of them spread evenly. Raises ChaosError when the rig itself fails."""
    check_strace()
    return asyncio.run(_run(folder, most))


async def _run(folder: Path, most: int | None) -> Killed:
    killed = Killed()
    began_s = time.monotonic()
    counted = await asyncio.gather(*(_count(folder, life) for life in LIVES))
    points = [point for points in counted for point in points]
    room = asyncio.Semaphore(_SIDE_BY_SIDE)

    async def one(number: int, point: Point) -> None:
        async with room:
            await _kill_at(folder / str(number), point, killed)

    async with asyncio.TaskGroup() as group:
        for number, point in enumerate(_spread(points, most)):
            group.create_task(one(number, point))
    killed.took_s = time.monotonic() - began_s
    return killed


def _spread(points: list[Point], most: int | None) -> list[Point]:
    if most is None or most >= len(points):
        return points
    return [points[place * len(points) // most] for place in range(most)]


@contextlib.asynccontextmanager
async def _under_command(folder: Path) -> AsyncIterator[Commander]:
    """A node of its own."""
    node = ChaosNode(folder, "n1", PRIORS_MW)
    try:
        async with Commander(node) as commander:
            yield commander
    finally:
        await node.close()


async def _count(folder: Path, life: str) -> list[Point]:
    """Live it once unharmed; every call that can be killed at."""
    trace = folder / f"{life}.strace"
    async with _under_command(folder / life) as commander:
        await LIVES[life](commander, _strace(trace))
        await _next_agent(commander)
    seen = collections.Counter(
        (found[1], found[2])
        for line in trace.read_text().splitlines()
        if (found := _LINE.match(line)) is not None
    )
    most = {call: max((n for (_, name), n in seen.items() if name == call), default=0) for call in CALLS}
    return [(life, call, nth) for call in CALLS for nth in range(1, most[call] + 1)]


async def _kill_at(folder: Path, point: Point, killed: Killed) -> None:
    """One life with its end, and the next agent's work."""
    life, call, nth = point
    async with _under_command(folder) as commander:
        node = commander.node
        try:
            await LIVES[life](commander, _strace(Path("/dev/null"), f"inject={call}:signal=KILL:when={nth}"))
            killed.missed.append(point)
        except AgentEndedError as error:
            if node.agent is None or node.agent.returncode != -signal.SIGKILL:
                raise ChaosError(f"{point}: it ended, but was not killed: {error}") from error
            name = f"{life}: {call}"
            killed.kills[name] = killed.kills.get(name, 0) + 1
        await _next_agent(commander)
    killed.violations += [*node.violations, *judge(node.record)]


async def _next_agent(commander: Commander) -> None:
    """After the life an agent that nobody kills ends a release, closes the window, and all comes to rest."""
    node = commander.node
    if node.agent is not None and node.agent.poll() is None:
        node.kill_agent()
    await node.collect()
    commander.forget()
    node.look_at_the_dead()
    node.start()
    report = await commander.until(lambda report: report.gpus, "GPUs listed")
    if report.released:
        await _control(node, "resume")
    elif node.record.releases_ns:
        node.resumed()
    await _close(commander)
    await node.rest()


def _strace(output: Path, *inject: str) -> tuple[str, ...]:
    """Detached (-D), so that the process stays our own child and strace only watches it."""
    expressions = [word for expression in inject for word in ("-e", expression)]
    calls = ",".join(CALLS)
    return (
        "strace",
        "-D",
        "-f",
        "-qqq",
        "-e",
        f"trace={calls}",
        "-e",
        "signal=none",
        *expressions,
        "-o",
        str(output),
    )


# --------------------------------------------------------------------------------------------------------- lives


async def _window(commander: Commander, wrapper: tuple[str, ...]) -> None:
    """Agent start, first set, raise, restore, another window, release, resume. Raises AgentEndedError when killed."""
    node = commander.node
    first, second = (device.uuid for device in node.devices)
    node.start(wrapper=wrapper)
    await commander.until(lambda report: report.gpus, "GPUs listed")
    job = node.begin_job([0])
    await commander.until(lambda report: report.runs, "the run seen")
    for cap_mw in (400_000, 300_000, 500_000):
        await commander.order(Step(0, 200_000, {job.job_id: cap_mw}))
        await commander.promised({first: cap_mw, second: 200_000})
    node.end_job(job)
    await commander.promised({first: 200_000, second: 200_000})
    await _close(commander)
    await commander.order(Step(0, 250_000, {}))
    await commander.promised({first: 250_000, second: 250_000})
    await _control(node, "release")
    await _control(node, "resume")


async def _release(commander: Commander, wrapper: tuple[str, ...]) -> None:
    """The admin's release after the agent has died in a window. Raises AgentEndedError when that is killed."""
    await _die_in_window(commander, Step(0, 200_000, {}))
    commander.node.record.releases_ns.append((time.monotonic_ns(), FOREVER_NS))
    await _run_to_its_end(commander.node, "release", wrapper)


async def _restorer(commander: Commander, wrapper: tuple[str, ...]) -> None:
    """What a stopped agent leaves: it restores at the window's end. Raises AgentEndedError when that is killed."""
    await _die_in_window(commander, Step(0, 200_000, {}), Step(_ENDS_NS, None, {}))
    await _run_to_its_end(commander.node, "restorer", wrapper)


async def _die_in_window(commander: Commander, *steps: Step) -> None:
    node = commander.node
    node.start()
    await commander.order(*steps)
    await commander.promised(dict.fromkeys(node.record.priors, 200_000))
    node.kill_agent()
    await node.collect()
    commander.forget()


async def _run_to_its_end(node: ChaosNode, word: str, wrapper: tuple[str, ...]) -> None:
    node.start(word, wrapper=wrapper)
    process = node.agent
    assert process is not None
    await wait_until(lambda: process.poll() is not None, f"{node.name}: the end of {word}")
    if process.returncode != 0:
        raise AgentEndedError(f"{node.name}: {word} ended with {process.returncode}; see {node.log}")


LIVES: Final[dict[str, Life]] = {"window": _window, "release": _release, "restorer": _restorer}


async def _close(commander: Commander) -> None:
    await commander.order(Step(0, None, {}))
    await commander.promised(commander.node.record.priors)


async def _control(node: ChaosNode, word: str) -> None:
    """The admin's word to a living agent. Raises AgentEndedError when it is killed over it."""
    reply = await asyncio.to_thread(node.control, word)
    if reply is None:
        agent = node.agent
        await wait_until(lambda: agent is None or agent.poll() is not None, f"{node.name}: {word} answered")
        raise AgentEndedError(f"{node.name}: killed during {word}")
    if not reply.ok:
        raise ChaosError(f"{node.name}: {word}: {reply.message}")


def by_call(kills: dict[str, int]) -> Iterable[str]:
    """One line for people."""
    return (f"{name} {count}" for name, count in sorted(kills.items()))
