"""What the controller knows, and the events and actions of its core, as frozen values."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from ..elasticity.evidence import RunEvidence
from ..model import Flex, Frozen, GpuId, Limit, Mode, Plan, Report, Run
from ..slurm.backend import JobInfo
from ..slurm.tag import Tag
from ..store.rows import Kin
from .deadline import Deadline
from .knowledge import HeldCut, Knowledge
from .measuring.record import Record


class SentPlan(Frozen, frozen=True, kw_only=True):
    """A plan that a node may hold or may still receive."""

    plan: Plan
    sent_ns: int


class NodeView(Frozen, frozen=True, kw_only=True):
    """One node: what the site declares of it, its last report, and the plans that may be in force on it.

    ``outstanding`` holds every plan sent since the one that the report says is held, that one included.
    ``fenced`` is True once the node holds a plan of our own epoch: then no other commander's plan can act.
    ``priors`` are our answers for GPUs whose prior limit the agent does not know.
    """

    name: str
    gpus: int
    gpu_max_mw: int
    overhead_mw: int
    mode: Mode
    report: Report | None = None
    heard_ns: int = 0
    connected: bool = False
    outstanding: tuple[SentPlan, ...] = ()
    fenced: bool = False
    priors: dict[GpuId, int] = {}


RunPhase: TypeAlias = Literal["new", "waiting", "admitted", "refused", "gone"]
FlexSource: TypeAlias = Literal["flag", "comment", ""]


class RunView(Frozen, frozen=True, kw_only=True):
    """One run as the controller sees it, over all its nodes.

    ``waiting`` means waiting for power: known, but its floor does not fit yet. ``started_in_window`` runs are raised
    only out of budget. ``sent_mw`` is the cap last sent to each of its nodes. ``user_flex`` is the user's own word that
    counted, and ``flex_source`` where it stood; both are empty when there was none. ``shares``: other jobs have GPUs of
    it too, so that nothing is measured of it. ``kins``: what the history
    remembers of work of this name, until all its nodes have reported it; ``name_is_mixed``: that name was used for
    different work before. ``tag_text`` is our own record of its tag, whatever stands in Slurm; ``tag_failed``: tries in
    a row that failed; ``tag_trouble``: why the tag does not stand in Slurm, as far as that is known.

    ``ends_ns``: when Slurm's time limit ends it, None while that is not known or it has none; ``deadline``: how it
    stands to that, None while that cannot be told. ``given_s``: what its time limit was raised by so far, None while
    that is not known; ``raising``: it is with the worker; ``raise_note``: why it was not raised, or not by all.
    """

    run: Run
    first_seen_ns: int
    phase: RunPhase = "new"
    user_flex: str = ""
    flex_source: FlexSource = ""
    flex: Flex | None = None
    flex_note: str = ""
    job: JobInfo | None = None
    gpus: dict[str, tuple[GpuId, ...]] = {}
    started_in_window: bool = False
    read_due_ns: int | None = 0
    reading: bool = False
    refusal: str = ""
    record: Record = Record()
    shares: bool = False
    kins: tuple[Kin, ...] = ()
    name_is_mixed: bool = False
    sent_mw: dict[str, int] = {}
    target_cap_mw: int | None = None
    floor_mw: int | None = None
    expected_loss: float | None = None
    expected_loss_sd: float | None = None
    floor_passed: bool = False
    breach_told: bool = False
    tag_text: str = ""
    tag_due_ns: int | None = None
    tag_capped: bool = False
    tag_failed: int = 0
    tag_trouble: str = ""
    ends_ns: int | None = None
    deadline: Deadline | None = None
    given_s: int | None = None
    raising: bool = False
    raise_due_ns: int = 0
    raise_note: str = ""

    @property
    def max_loss(self) -> float | None:
        """The greatest loss (0..1) that an economic limit may cost it: by its flex, or less for its time limit.

        None while its flex is not known.
        """
        if self.flex is None or self.deadline is None:
            return None if self.flex is None else self.flex.max_loss
        return min(self.flex.max_loss, self.deadline.max_loss)

    @property
    def spec(self) -> str:
        """How Slurm's commands name its job: ``1234``, a task ``77_3``, a component ``80+1``."""
        return str(self.run.job_id) if self.job is None else self.job.spec


class WindowView(Frozen, frozen=True, kw_only=True):
    """The window that is open, or the rebound after it (``rebound``), as the last cycle saw it.

    ``limit_ids``: the limits that bind now, none in a rebound. ``until_ns``: until when a rebound holds the site at
    ``rebound_mw``, what it drew before or its contract's demand; both None in a window, the latter also when unknown.
    """

    limit_mw: int
    limit_ids: tuple[str, ...]
    budget_mw: int
    committed_mw: int
    shortfall_mw: int
    silent: tuple[str, ...]
    opened_ns: int
    rebound: bool = False
    until_ns: int | None = None
    rebound_mw: int | None = None


class DrawSample(Frozen, frozen=True, kw_only=True):
    """What nodes without any cap of ours drew with all their GPUs; a node of which that is unknown is not in it."""

    at_ns: int
    by_node: dict[str, int]


class Rebound(Frozen, frozen=True, kw_only=True):
    """The time after a window, in which caps rise slowly and the site makes no new peak.

    The synthetic limit rises by ``rise_mw_per_s`` from ``from_mw``, the limit that ended or what caps took more, up to
    the draw before it, is that until ``until_ns``, and goes on until nothing is held, at ``ends_ns`` at the latest.
    ``counted_mw``: what each GPU that could be commanded had of it, ``spare_mw`` what nobody had. ``caps_mw``: the cap
    per GPU that each run had at the end; the rebound takes no run below it. ``inherited``: a new controller found it
    so. ``told``: what the audit has of it (site, mW): where it rises to, and the least that it allows.
    """

    began_ns: int
    until_ns: int
    ends_ns: int
    from_mw: int
    spare_mw: int
    counted_mw: dict[tuple[str, GpuId], int]
    rise_mw_per_s: int
    caps_mw: dict[Run, int]
    inherited: bool = False
    told: tuple[int | None, int] | None = None


class State(Frozen, frozen=True, kw_only=True):
    """All of it. ``off`` is the red button: nothing is commanded and every cap is given back.

    ``planned`` is False until the first planning cycle: before it nobody knows whether a window is open. ``cut``: what
    the plan of this window goes by.
    ``draws``: the last minute without a window, empty inside one; ``draw_before``: the mean (mW by node) that it had as
    the window opened, None if unknown. ``held_until_ns``: until when a predecessor would have held the site at it.
    ``knowledge``: what was last learned of the runs' curves; ``learned_from``: the evidence that is with the learner or
    was last; ``learn_due_ns``: not to be asked again before. ``deadlines_due_ns``, ``raises_due_ns``: when to look
    again at the time limits of all runs.
    ``strangers``: (cluster, node, reason) of reports refused and told of. ``epoch_due_ns``: no new epoch before.
    """

    epoch: int
    started_ns: int
    next_seq: int = 1
    planned: bool = False
    off: bool = False
    limits: tuple[Limit, ...] = ()
    limits_known: bool = True
    nodes: dict[str, NodeView] = {}
    runs: dict[Run, RunView] = {}
    window: WindowView | None = None
    cut: HeldCut | None = None
    draws: tuple[DrawSample, ...] = ()
    draw_before: dict[str, int] | None = None
    held_until_ns: int | None = None
    rebound: Rebound | None = None
    infeasible_said: tuple[int, tuple[str, ...]] = (0, ())
    strangers: frozenset[tuple[str, str, str]] = frozenset()
    epoch_due_ns: int = 0
    full_read_due_ns: int = 0
    reading_all: bool = False
    knowledge: Knowledge | None = None
    learning: bool = False
    learned_from: tuple[tuple[Run, RunEvidence], ...] = ()
    learn_due_ns: int = 0
    deadlines_due_ns: int = 0
    raises_due_ns: int = 0


# ------------------------------------------------------------------------------------------------------ events


class Cycle(Frozen, frozen=True, kw_only=True):
    """Time to look at everything again. The wall clock is for limits, which people and grids set in it."""

    now_unix_s: float


class ReportCame(Frozen, frozen=True, kw_only=True):
    """A node's report, with what the store knows of the GPUs whose prior limit the agent does not know."""

    report: Report
    priors: dict[GpuId, int] = {}


class EpochTaken(Frozen, frozen=True, kw_only=True):
    """A higher epoch is ours, durably."""

    epoch: int


class NodeLost(Frozen, frozen=True, kw_only=True):
    """The connection of a node ended; the node may be well."""

    node: str


class JobRead(Frozen, frozen=True, kw_only=True):
    """Slurm's answer about one run: its job, None if Slurm says it is not there, or why there is no answer.

    ``kins``: what the history remembers of earlier runs of that user, account and job name; ``kept``: what an earlier
    controller measured of this very run. ``read_unix_s``: when it was read, by the clock that Slurm's times are of;
    ``given_s``: what its time limit was raised by so far, None while that is not known.
    """

    run: Run
    job: JobInfo | None
    unavailable: str = ""
    kins: tuple[Kin, ...] = ()
    kept: Record | None = None
    read_unix_s: float | None = None
    given_s: int | None = None


class AllJobsRead(Frozen, frozen=True, kw_only=True):
    """Slurm's answer about all jobs: None when there is none. ``read_unix_s``: when it was read."""

    jobs: tuple[JobInfo, ...] | None
    read_unix_s: float | None = None


class LimitsChanged(Frozen, frozen=True, kw_only=True):
    """``known`` is False when the limits could not be read: then nothing is raised."""

    limits: tuple[Limit, ...]
    known: bool = True


class OffChanged(Frozen, frozen=True, kw_only=True):
    """The red button. ``uid`` is who pressed it; None when a restart takes it over."""

    off: bool
    uid: int | None = None


class TagWritten(Frozen, frozen=True, kw_only=True):
    """What became of a tag. Not ``ok``: another try is wanted. ``trouble``: why it does not stand in Slurm."""

    run: Run
    ok: bool
    trouble: str = ""


class TimeLimitRaised(Frozen, frozen=True, kw_only=True):
    """What became of an order to raise a time limit.

    ``given_s``: what the run has been given in all by now; ``old_s`` and ``new_s``: the limit before and after, None
    where nothing was changed or it is not known. ``why`` it is not all of what was owed. ``again``: it may be tried
    again soon.
    """

    run: Run
    lost_s: float
    given_s: int | None
    old_s: int | None = None
    new_s: int | None = None
    why: str = ""
    again: bool = False


class CurvesLearned(Frozen, frozen=True, kw_only=True):
    """The learner has come to an end; None if it failed, and then what was known before stands."""

    knowledge: Knowledge | None


Event: TypeAlias = (
    Cycle
    | ReportCame
    | EpochTaken
    | NodeLost
    | JobRead
    | AllJobsRead
    | LimitsChanged
    | OffChanged
    | TagWritten
    | TimeLimitRaised
    | CurvesLearned
)


# ----------------------------------------------------------------------------------------------------- actions


class SendPlan(Frozen, frozen=True, kw_only=True):
    plan: Plan


class ReadJob(Frozen, frozen=True, kw_only=True):
    run: Run


class ReadAllJobs(Frozen, frozen=True, kw_only=True):
    pass


class WriteTag(Frozen, frozen=True, kw_only=True):
    run: Run
    job: JobInfo
    tag: Tag


class RaiseTimeLimit(Frozen, frozen=True, kw_only=True):
    """Give a run back the time that caps have cost it: ``lost_s`` in all, what it has been given included."""

    run: Run
    job: JobInfo
    lost_s: float


class LearnCurves(Frozen, frozen=True, kw_only=True):
    """Learn the curves of these runs; seconds of work on a large site, so not in the shell's own thread."""

    evidence: tuple[tuple[Run, RunEvidence], ...]
    number: int


class NeedEpoch(Frozen, frozen=True, kw_only=True):
    """A node has seen a higher epoch than ours: take one above it."""

    above: int


class Audit(Frozen, frozen=True, kw_only=True):
    event: str
    fields: dict[str, Any]


Action: TypeAlias = (
    SendPlan | NeedEpoch | ReadJob | ReadAllJobs | WriteTag | RaiseTimeLimit | LearnCurves | Audit
)
