"""What the agent knows, as frozen values. All times are CLOCK_MONOTONIC nanoseconds of this boot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from ..model import GpuId, PlanId, Run
from .plan import HeldPlan
from .telemetry import NOTHING_READ, Telemetry

NS_PER_S: Final = 1_000_000_000
TOLERANCE_MW: Final = 1000  # boards may round: a read-back within 1 W is the value asked for

LET_GO: Final = "released and let go of; 'slurm-pfi node resume' takes it up again"
"""In the place of why a GPU cannot be read, while its admin wants it so: no fault."""

Orphan = Literal["hold", "release"]

Cause = Literal["default value", "another value", "reset", "driver restart"]
"""Why a cap that was in force is no longer found: at the device's default or at another value, after the device had
been lost or in need of a reset, or after the driver started anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the config says to a node. ``*_ns`` are durations. ``simulated``: its GPUs are, and so every figure."""

    cluster: str
    node: str
    agent_id: str
    boot_id: str
    on_orphan: Orphan
    report_ns: int
    report_window_ns: int
    report_age_ns: int
    response_ns: int
    deadline_ns: int
    simulated: bool = False
    activity_ns: int = 5 * NS_PER_S
    settle_ns: int = 2 * NS_PER_S
    settle_step_ns: int = NS_PER_S // 20
    draw_settle_ns: int = 7 * NS_PER_S // 10
    reapply_ns: int = 5 * NS_PER_S
    reapply_most_ns: int = 60 * NS_PER_S
    relist_first_ns: int = 2 * NS_PER_S
    relist_ns: int = 30 * NS_PER_S
    survey_ns: int = 300 * NS_PER_S
    stop_ns: int = 3 * NS_PER_S
    release_ns: int = 15 * NS_PER_S
    report_gap_ns: int = NS_PER_S // 100

    @property
    def skip_lease(self) -> bool:
        """A lease that ran out leaves the limits as they are until a controller speaks again."""
        return self.on_orphan == "hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """What of ours was on a GPU before a set: the fields of ``Gpu`` that the set has changed ahead of its answer.

    ``requested_mw`` is what the device had then, whosever it was.
    """

    current_mw: int | None = None
    issued_mw: tuple[int, ...] = ()
    confirmed: bool = False
    requested_mw: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A set under way. ``before_mw`` is the limit that it replaces, ``ours`` what comes back if it is never made.

    ``settling``: the device took the value; the enforced limit, or the draw under it, is still awaited.
    """

    cap_mw: int
    reason: str
    run: str
    since_ns: int
    raises: bool
    restores: bool
    before_mw: int | None = None
    ours: Ours = Ours()
    settling: bool = False


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. ``current_mw`` is the value of ours that stands there now; None means that the GPU rests.

    ``issued_mw`` holds every cap that we issued in this boot, so that none is ever taken for a prior limit.
    ``confirmed``: ``current_mw`` was read back. ``doubt_mw``: a value whose set failed in a way that may still
    have done it. ``overtaken_mw``: a raise whose effect was still awaited when a lowering followed; until the given
    instant it may yet come into force for a moment. ``earlier_mw``: the limits that the device may show until then:
    another one is that of the lowering, and tells that the raise is over. ``blocked`` says why the GPU must not be
    touched at all.
    ``settable`` False: no limit can be set. ``persistence``: unless it is True the limit may fall to the default.
    ``undo``: a set failed, and comes off the record once the device shows that it changed nothing. ``made_mw``: what
    a coarse board has made of ``current_mw``. ``fell_mw``: where the limit fell to by itself. ``lost_mw``: caps whose
    set was never answered, which a call that hangs may still do long after. ``restored_mw``: our restore met
    somebody's new limit, which is to be put back. ``gone``: the device was lost or needed a reset when last read.
    ``driver_lost``: the library was gone since the GPU was last listed, so the driver may be another one, and our
    record not of its time. ``reapplied``: how often in a row somebody else's limit was replaced.
    """

    uuid: GpuId
    model: str
    position: int | None
    min_mw: int
    max_mw: int
    default_mw: int
    persistence: bool | None = None
    settable: bool | None = None
    prior_mw: int | None = None
    how: str = ""
    current_mw: int | None = None
    issued_mw: tuple[int, ...] = ()
    confirmed: bool = False
    requested_mw: int | None = None
    enforced_mw: int | None = None
    draw_mw: int | None = None
    sm_clock_max_mhz: int | None = None
    telemetry: Telemetry = NOTHING_READ
    read_ns: int = 0
    touched_ns: int = 0
    pending: Pending | None = None
    doubt_mw: int | None = None
    overtaken_mw: int = 0
    overtaken_until_ns: int = 0
    earlier_mw: tuple[int, ...] = ()
    failures: int = 0
    retry_at_ns: int = 0
    reapply_at_ns: int = 0
    reapplied: int = 0
    foreign_mw: int | None = None
    fell_mw: int | None = None
    restored_mw: int | None = None
    undo: Ours | None = None
    made_mw: int | None = None
    lost_mw: tuple[int, ...] = ()
    gone: bool = False
    driver_lost: bool = False
    blocked: str = ""
    read_fault: str = ""
    set_fault: str = ""

    def is_ours(self, limit_mw: int) -> bool:
        """Whether this value, as the device shows it, comes of a set of ours in this boot, or of nobody's."""
        if limit_mw in (self.fell_mw, self.restored_mw):
            return True
        return any(near(limit_mw, issued) for issued in self.issued_mw)

    @property
    def setting(self) -> bool:
        """A set was asked for and has not been answered."""
        return self.pending is not None and not self.pending.settling


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRun:
    """A run whose job file is there. ``unknown``: positions that lead to no GPU of ours."""

    run: Run
    uid: int
    flex: str
    positions: tuple[int, ...]
    gpus: tuple[GpuId, ...] = ()
    unknown: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A plan that changed nothing, and why; ``plan`` is ``epoch/seq``."""

    plan: str
    reason: str
    at_ns: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The whole agent. ``sent_ns`` holds the reports young enough to be answered by a plan.

    ``released``: an admin has taken the node from us; then the GPUs are restored, ``freed`` and left alone.
    ``reverted`` counts caps found lifted, by cause; ``relists`` how often in a row the GPUs were listed
    without a quiet time in between. ``refused`` is what the next report says, ``last_refused`` stays.
    """

    settings: Settings
    started_ns: int
    driver_start: str = ""
    gpus: dict[GpuId, Gpu] = {}
    positions: dict[int, GpuId] = {}
    runs: dict[Run, SeenRun] = {}
    jobs_read: bool = False
    held: HeldPlan | None = None
    held_from_file: bool = False
    highest_epoch: int = 0
    released: bool = False
    released_ns: int = 0
    freeing: bool = False
    freed: bool = False
    stopping_ns: int | None = None
    stopped: bool = False
    listed: bool = False
    relists: int = 0
    reverted: dict[Cause, int] = {}
    connected: bool = False
    seq: int = 0
    sent_ns: dict[int, int] = {}
    refused: str = ""
    last_refused: Refused | None = None
    faults: dict[str, str] = {}
    in_force: PlanId | None = None
    in_force_step: int = -1
    listing: bool = False
    list_asked_ns: int = 0
    relist_at_ns: int = 0
    sampling: bool = False
    sample_due_ns: int = 0
    activity_due_ns: int = 0
    quick_sampling: bool = False
    quick_due_ns: int | None = None
    report_due_ns: int = 0
    reported_ns: int | None = None

    @property
    def relist_pause_ns(self) -> int:
        """How long trouble waits from one list of GPUs to the next: the longer the more often it asked for one."""
        settings = self.settings
        return min(settings.relist_first_ns << min(self.relists, 10), settings.relist_ns)


def near(left_mw: int, right_mw: int) -> bool:
    """Equal as far as a board's rounding allows."""
    return abs(left_mw - right_mw) <= TOLERANCE_MW


def ceiling_mw(gpu: Gpu) -> int | None:
    """The most that the limit can be: requested, enforced and whatever may still take effect. None if unread.

    A lowering counts in full only when it has been confirmed, draw included: then others may have the watts. Without
    persistence mode a limit is gone as soon as no process holds the device, so the default counts.
    """
    if gpu.requested_mw is None or gpu.enforced_mw is None:
        return None
    asked = [gpu.pending.cap_mw] if gpu.pending else []
    if gpu.pending and gpu.pending.before_mw is not None:
        asked.append(gpu.pending.before_mw)
    doubted = [gpu.doubt_mw] if gpu.doubt_mw is not None else []
    fallback_mw = 0 if gpu.persistence is True else gpu.default_mw
    return max(gpu.requested_mw, gpu.enforced_mw, gpu.overtaken_mw, fallback_mw, *asked, *doubted)
