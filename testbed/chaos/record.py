"""What the commander ordered and heard, written down as it happened; the judge reads nothing else of ours.

All times are CLOCK_MONOTONIC nanoseconds, all power is milliwatts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Step:
    """From ``starts_ns`` after the plan's receipt on. Without a park cap no window is open. ``caps`` by job id."""

    starts_ns: int
    park_mw: int | None
    caps: dict[int, int | None]


@dataclass(frozen=True, slots=True)
class Order:
    """A plan that was handed to the node's connection."""

    seq: int
    sent_ns: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Heard:
    """A report: the plan held, and the most that each limit may be by the node's own word (None: it cannot tell)."""

    received_ns: int
    held: int | None
    ceilings: dict[str, int | None]


@dataclass(slots=True)
class Job:
    """A run: when its job file came, when it went (None: it is there)."""

    job_id: int
    uuids: tuple[str, ...]
    begin_ns: int
    end_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """A SIGKILL. ``after`` is the last event of the audit log at that moment."""

    at_ns: int
    what: str
    after: str


@dataclass(slots=True)
class Record:
    """One node's story. ``priors`` is what every limit was before anything of ours ran.

    ``falls``: persistence mode is off and nobody else holds the GPUs, so that their limits fall back to the default
    (which is the prior limit there) as soon as no process of ours lives.
    """

    node: str
    sim: Path
    folder: Path
    priors: dict[str, int]
    effect_ns: int
    falls: bool = False
    orders: list[Order] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    spawns_ns: list[int] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    releases_ns: list[tuple[int, int]] = field(default_factory=list)
    """Begin of each ``node release`` and end of the ``resume`` after it."""
