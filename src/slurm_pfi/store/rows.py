"""What the history keeps, as frozen values. Times are Unix seconds, power is int milliwatts; None is unknown."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from ..model import Frozen, LimitClass

Phase: TypeAlias = Literal["before", "window", "rebound", "after"]
BaselineSource: TypeAlias = Literal["seen", "recalled", "bounded"]


DRAW_BEFORE_S: Final = 15.0
"""A window is held against the mean draw of so long before it: short, so that a job's start is seldom in it."""


class WindowRow(Frozen, frozen=True, kw_only=True):
    """One window. ``closed_unix_s`` is None while it is open; ``ended`` says in words why it closed.

    ``limit_mw`` and ``limit_ids`` are those it opened with. ``draw_before_mw``: the site's mean draw over the last
    DRAW_BEFORE_S before. ``beside_mw``: what the site declares beside the GPUs, in every site figure and not measured.
    ``response_s``: a limit counts from so long after it came into force. ``mode`` is ``mixed`` where only some nodes
    enforce. ``simulated``: its GPUs were.
    """

    id: int
    cluster: str
    opened_unix_s: float
    closed_unix_s: float | None = None
    ended: str = ""
    policy: str
    class_: LimitClass = msgspec.field(name="class")
    mode: Literal["observe", "enforce", "mixed"]
    limit_mw: int
    limit_ids: tuple[str, ...]
    draw_before_mw: int | None
    beside_mw: int
    response_s: float
    simulated: bool = False


class SiteSample(Frozen, frozen=True, kw_only=True):
    """The site at one instant: the limit in force (None: none), its draw, and the sum of the caps aimed at.

    ``unmeasured_mw``: the most that GPUs without a reading could draw. It is part of ``draw_mw``, which is None where
    that part is too large to call the sum a measurement.
    """

    unix_s: float
    phase: Phase
    limit_mw: int | None
    draw_mw: int | None
    committed_mw: int | None
    unmeasured_mw: int = 0


class RunSample(Frozen, frozen=True, kw_only=True):
    """A run at one instant: its highest cap, its draw per GPU, its throughput as a share of its baseline.

    ``held_s``: the time that it stands for, for runs are sampled less often where there are many.
    """

    unix_s: float
    run: str
    cap_mw: int | None
    draw_mw: int | None
    share: float | None
    held_s: float = 1.0


class RunFacts(Frozen, frozen=True, kw_only=True):
    """What was known of a run in a window, the last word counts. Powers are per GPU.

    ``baseline_sd`` is relative. ``loss`` is the measured mean loss while capped, None where nobody measured it.
    ``spec`` is how Slurm's commands name its job; empty in rows of a controller that did not write it.
    """

    window: int
    run: str
    spec: str = ""
    uid: int | None = None
    user: str | None = None
    account: str | None = None
    partition: str | None = None
    name: str | None = None
    gpu_model: str | None = None
    gpus: int
    nodes: tuple[str, ...] = ()
    flex: str | None = None
    max_loss: float | None = None
    floor_mw: int | None = None
    baseline: BaselineSource = "bounded"
    baseline_draw_mw: int | None = None
    baseline_sd: float | None = None
    expected_loss: float | None = None
    loss: float | None = None


NODE_EVENT: Final = "node"
"""``kind`` of what a node says of its faults; the words may name runs."""


class EventRow(Frozen, frozen=True, kw_only=True):
    """Something that happened to the site (``run`` empty) or to a run, in plain words. ``kind`` is for programs."""

    unix_s: float
    run: str = ""
    kind: str
    text: str


class EndedRun(Frozen, frozen=True, kw_only=True):
    """A run that is over; ``value`` is its summary, as whoever ended it wrote it.

    ``spec`` is how Slurm's commands name its job: ``77_3`` a task, ``80+1`` a component. ``uid``: whose it was.
    """

    run: str
    job_id: int
    spec: str = ""
    uid: int | None = None
    ended_unix_s: float
    value: dict[str, Any]


class KinKey(Frozen, frozen=True, kw_only=True):
    """What makes two runs the same work: user, account, job name, GPU model and number of GPUs."""

    uid: int
    account: str
    name: str
    gpu_model: str
    gpus: int


class Kin(Frozen, frozen=True, kw_only=True):
    """What is remembered of a kind of work: uncapped draw of one GPU and rate, relative sd, points, and when.

    ``points`` are (reduction, loss, sd of the loss) as measured.
    """

    key: KinKey
    draw_mw: int | None
    rate_per_s: float | None
    sd: float
    points: tuple[tuple[float, float, float], ...] = ()
    unix_s: float


class KeptRecord(Frozen, frozen=True, kw_only=True):
    """What was measured of a run so far, as the controller encodes it, for its successor in the same boot."""

    run: str
    boot_id: str
    unix_s: float
    value: bytes


Row: TypeAlias = WindowRow | SiteSample | RunSample | RunFacts | EventRow | EndedRun | Kin | KeptRecord
