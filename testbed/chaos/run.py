"""A whole rig: several nodes side by side, each under its commander, and the sum of what was found."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .commander import Commander
from .judge import Violation, fallen, judge, read_journal, rises
from .node import ChaosNode, Persistence
from .story import Story

PRIORS_MW: Final = (700_000, 650_000, 700_000, 612_000)
"""Two GPUs whose limit was not the default before us: what a careless restore would get wrong."""
DEFAULTS_MW: Final = (700_000,) * 4


@dataclass
class Outcome:
    """What so many kills led to. ``after`` counts kills by the last event of the audit log before each.

    ``rises`` is how many rises of an effective limit were judged, ``fallen`` how many caps fell to the default because
    nobody held the GPU. ``journal_entries`` is how many entries still hold a cap at the end.
    """

    seed: int
    kills: int
    took_s: float
    violations: list[Violation]
    what: dict[str, int]
    after: dict[str, int]
    reports: int
    plans: int
    rises: int
    fallen: int
    journal_entries: int
    ended_by_themselves: int
    faults: list[str] = field(default_factory=list)
    doctor: str = ""

    def count(self, kind: str) -> int:
        return sum(violation.kind == kind for violation in self.violations)


def run(folder: Path, *, seed: int, kills: int, nodes: int = 1, persistence: Persistence = "on") -> Outcome:
    """Play ``kills`` SIGKILLs on ``nodes`` nodes in all. Raises ChaosError when the rig itself fails."""
    return asyncio.run(_run(folder, seed, kills, nodes, persistence))


async def _run(folder: Path, seed: int, kills: int, count: int, persistence: Persistence) -> Outcome:
    began_s = time.monotonic()
    priors_mw = DEFAULTS_MW if persistence == "off" else PRIORS_MW
    nodes = [ChaosNode(folder, f"n{number}", priors_mw, persistence) for number in range(1, count + 1)]
    doctor = ""
    try:
        async with contextlib.AsyncExitStack() as commanders:
            stories = [
                Story(await commanders.enter_async_context(Commander(node)), seed * 1000 + number)
                for number, node in enumerate(nodes)
            ]
            shares = [kills // count + (number < kills % count) for number in range(count)]
            async with asyncio.TaskGroup() as group:
                for story, share in zip(stories, shares, strict=True):
                    group.create_task(story.play(share))
            if persistence != "on":
                doctor = await asyncio.to_thread(nodes[0].doctor)
    finally:
        for node in nodes:
            await node.close()
    outcome = _sum_up(seed, stories, time.monotonic() - began_s)
    outcome.doctor = next((line.strip() for line in doctor.splitlines() if " persistence " in line), "")
    return outcome


def _sum_up(seed: int, stories: list[Story], took_s: float) -> Outcome:
    nodes = [story.node for story in stories]
    violations = [found for node in nodes for found in (*node.violations, *judge(node.record))]
    kills = [kill for node in nodes for kill in node.record.kills]
    entries = [entry for node in nodes for entry in read_journal(node.folder / "journal")[0].values()]
    return Outcome(
        seed=seed,
        kills=len(kills),
        took_s=took_s,
        violations=violations,
        what=dict(collections.Counter(kill.what for kill in kills)),
        after=dict(collections.Counter(kill.after for kill in kills)),
        reports=sum(len(node.record.heard) for node in nodes),
        plans=sum(len(node.record.orders) for node in nodes),
        rises=sum(rises(node.record) for node in nodes),
        fallen=sum(fallen(node.record) for node in nodes),
        journal_entries=sum(entry.current_mw is not None for entry in entries),
        ended_by_themselves=sum(node.ended_by_itself for node in nodes),
        faults=[fault for story in stories for fault in story.commander.faults],
    )
