"""The words of the project as frozen values: what travels between rooms and over the bus.

No behaviour of the world lives here: nothing reads a clock, a file or a socket. Power is int milliwatts.
Unknown is ``None`` and stays ``None``; it is never zero, empty or unlimited.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

GpuId: TypeAlias = str
"""An NVML UUID (``GPU-...``). Never an index: indices shift."""

LimitClass: TypeAlias = Literal["economic", "emergency"]
Mode: TypeAlias = Literal["observe", "enforce"]


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all values here: immutable, compared by content, unknown fields ignored on the wire."""


class Run(msgspec.Struct, frozen=True, order=True):
    """One execution of a job: the key of everything. A requeued job is another run of the same id."""

    cluster: str
    job_id: int
    restart: int = 0

    def __str__(self) -> str:
        return f"{self.cluster}:{self.job_id}.{self.restart}"


class Flex(Frozen, frozen=True, kw_only=True):
    """What the user allows: the word that was given and the greatest loss (0..1) that it means."""

    text: str
    max_loss: float

    @property
    def is_none(self) -> bool:
        return self.text == "none"


# ---------------------------------------------------------------------------------------------- site limits


class LimitStep(Frozen, frozen=True, kw_only=True):
    """From ``start_unix_s`` on the site may draw ``limit_mw``; None means that this limit no longer binds."""

    start_unix_s: float
    limit_mw: int | None


class Limit(Frozen, frozen=True, kw_only=True):
    """A site limit: a step schedule with an identity. Wall-clock times, because people and grids set them."""

    id: str
    revision: int
    source: str
    class_: LimitClass = msgspec.field(name="class")
    steps: tuple[LimitStep, ...]


# ------------------------------------------------------------------------------------------- node -> controller


class ReportId(Frozen, frozen=True, kw_only=True):
    """Names one report: the boot, the agent process of that boot, and its counter."""

    boot_id: str
    agent_id: str
    seq: int


class PlanId(msgspec.Struct, frozen=True, order=True):
    """Orders the plans for one node: first by epoch, then by the controller's counter."""

    epoch: int
    seq: int


class Progress(Frozen, frozen=True, kw_only=True):
    """What a job said of its own counter, as the agent saw it. ``rate_per_s`` is None until two reports differ.

    ``total``: what the counter will be when the job's work is done; None where the job does not tell it.
    """

    counter: float
    unit: str
    rate_per_s: float | None
    age_s: float
    total: float | None = None


class Activity(Frozen, frozen=True, kw_only=True):
    """What a GPU did in the ``over_s`` seconds that ended ``age_s`` before the report. Unknown is None.

    Shares of that time, 0..1: ``sm`` with work on its multiprocessors, ``tensor`` of their cycles with a tensor pipe
    at work, ``dram`` of its memory bandwidth, ``copy`` with memory in use, ``busy`` with any kernel.
    ``sm_clock_mhz``: mean of the readings.
    """

    over_s: float
    age_s: float
    sm: float | None = None
    tensor: float | None = None
    dram: float | None = None
    copy: float | None = None
    busy: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: int | None = None


class GpuReport(Frozen, frozen=True, kw_only=True):
    """One GPU as its agent knows it.

    ``ceiling_mw`` is the most that the limit can be until a newer report: the highest of requested, enforced and
    any set still under way. ``prior_mw`` is what the limit was before us; None means unknown, and then the agent
    leaves the GPU alone. ``position`` is the place in gres.conf that Slurm counts by. ``draw_mw`` is the draw now,
    ``mean_mw`` that since the reading before by the energy counter. ``slowed``: what holds its clock down, a word of
    ``node.telemetry``; empty for nothing, and where it is not known.
    """

    uuid: GpuId
    model: str
    position: int | None
    min_mw: int
    max_mw: int
    default_mw: int
    requested_mw: int | None
    enforced_mw: int | None
    ceiling_mw: int | None
    prior_mw: int | None
    draw_mw: int | None
    runs: tuple[Run, ...] = ()
    fault: str = ""
    mean_mw: int | None = None
    activity: Activity | None = None
    slowed: str = ""


class RunReport(Frozen, frozen=True, kw_only=True):
    """A run present on the node (its job file is there). ``flex`` is the word the user gave, empty if none."""

    run: Run
    uid: int
    flex: str
    gpus: tuple[GpuId, ...]
    progress: Progress | None = None


class Report(Frozen, tag="report", frozen=True, kw_only=True):
    """All that a controller knows of a node.

    ``held`` is the last plan accepted; ``refused`` says why a later one was not.
    """

    cluster: str
    node: str
    id: ReportId
    highest_epoch: int
    held: PlanId | None
    released: bool
    window_ends_in_s: float | None
    gpus: tuple[GpuReport, ...]
    runs: tuple[RunReport, ...]
    faults: tuple[str, ...] = ()
    refused: str = ""


# ------------------------------------------------------------------------------------------- controller -> node


class RunCap(Frozen, frozen=True, kw_only=True):
    """The cap of every GPU of a run; None means the prior limit of each (never trimmed, never cut)."""

    run: Run
    cap_mw: int | None


class PlanStep(Frozen, frozen=True, kw_only=True):
    """The caps from ``starts_in_s`` after receipt on, until the next step.

    With a ``park_cap_mw`` a window is open: every GPU without a run in ``caps`` is held at it. Without one there
    is no window: such GPUs go to their prior limit. ``lease`` marks a step that only ends an open-ended limit nobody
    renewed; a node with ``on_orphan = hold`` does not take it.
    """

    starts_in_s: float
    park_cap_mw: int | None
    caps: tuple[RunCap, ...] = ()
    lease: bool = False


class Plan(Frozen, tag="plan", frozen=True, kw_only=True):
    """The caps of one node. Accepted only as the answer to a fresh report of that very node and boot.

    ``steps`` starts at 0 s and ascends. ``priors`` answers "prior unknown" for single GPUs. ``gone`` names runs
    that slurmctld says are not on this node (any more): their job files may go. ``lines``: by run, what is to be said
    in its output at its end.
    """

    cluster: str
    node: str
    id: PlanId
    answers: ReportId
    mode: Mode
    reason: str
    steps: tuple[PlanStep, ...]
    priors: dict[GpuId, int] = {}
    gone: tuple[Run, ...] = ()
    lines: dict[str, str] = {}


BusMessage: TypeAlias = Report | Plan
