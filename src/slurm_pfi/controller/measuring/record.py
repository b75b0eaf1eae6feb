"""What was measured of a run, as frozen values. How it comes about is in ``measured``."""

from __future__ import annotations

from math import hypot

from ...elasticity.evidence import LEAST_BASELINE_SD, LEAST_NOISE_SD, BaselineSource
from ...model import Frozen
from .levels import FEWEST_INTERVALS, IDLE, Active, Level

UNPRICED_SHARE = 0.1
"""A loss is not told when so much of the work under caps has no baseline to be held against."""

SILENT_S = 600.0

MOST_GAINED = 1.25
LOST_ANYWAY = 0.15
LOST_BY_DRAW = 2.5
SURE_SD = 3.0
"""Bounds of what is believed of a counter under a cap: share of the baseline rate; loss beside and per reduction."""

MW_S_PER_J = 1000.0
J_PER_WH = 3600.0


class Recalled(Frozen, frozen=True, kw_only=True):
    """What history knows of earlier runs of the same work: same user, account, job name, GPU model and count.

    ``draw_mw`` of one GPU; ``sd``: relative, of both; ``points``: (reduction, loss, sd of the loss) as measured then.
    """

    draw_mw: int
    rate_per_s: float | None
    sd: float
    points: tuple[tuple[float, float, float], ...] = ()


class Totals(Frozen, frozen=True, kw_only=True):
    """Since the run was first seen; power and energy of all its GPUs. None is unknown.

    ``known_s``: it was heard; ``capped_s``: under a cap that binds. ``saved_j``: baseline draw less draw while capped.
    ``done``: units of its counter; ``lost``: units that it would have done beside them without caps, with ``lost_sd``.
    Stalls (checkpoints, evaluation, start-up) count as time, but neither as saved nor as lost.
    """

    known_s: float
    capped_s: float
    drawn_j: float
    saved_j: float | None
    done: float
    lost: float | None
    lost_sd: float | None


class Tally(Frozen, frozen=True, kw_only=True):
    """Raw sums. ``work_*`` and ``cut_*``: counter and draw under caps in this segment, still without a price.

    ``past_*``: what was priced when earlier segments ended; ``unpriced_*`` had no baseline then. ``done_capped`` and
    ``past_expected`` hold the counter only. ``past_lost_s``: seconds without caps that ``past_lost`` would have taken.
    ``heard_s``: time between counters, and ``stalled_s`` of it in stalls, under caps or not.
    """

    known_s: float = 0.0
    capped_s: float = 0.0
    drawn_mws: float = 0.0
    done: float = 0.0
    done_capped: float = 0.0
    work_s: float = 0.0
    work_done: float = 0.0
    cut_gpu_s: float = 0.0
    cut_mws: float = 0.0
    past_work_s: float = 0.0
    past_lost: float = 0.0
    past_lost_sd: float = 0.0
    past_lost_s: float = 0.0
    past_cut_gpu_s: float = 0.0
    past_saved_mws: float = 0.0
    unpriced_s: float = 0.0
    unpriced_gpu_s: float = 0.0
    heard_s: float = 0.0
    stalled_s: float = 0.0


class Heard(Frozen, frozen=True, kw_only=True):
    """The counter when it last rose.

    ``capped``: whether a binding cap was there since; None: that is not known. ``low``: the draw was that of a stall.
    ``draw_s`` and ``draw_mws``: draw of one GPU since, and ``active`` what they did, which teaches the level once it
    is known to have been work. ``slowed``: heat or a power brake held it down.
    """

    counter: float
    ns: int
    unit: str
    node: str
    capped: bool | None
    low: bool = False
    slowed: bool = False
    draw_s: float = 0.0
    draw_mws: float = 0.0
    active: Active = IDLE


class Drift(Frozen, frozen=True, kw_only=True):
    """Work that may be no longer that of the level, in the block that runs now.

    ``before``: the level without it. ``strikes``: blocks in a row that were above (+1) or below (-1); ``past_*`` are
    theirs.
    """

    before: Level | None = None
    seconds: float = 0.0
    done: float = 0.0
    count: int = 0
    strikes: int = 0
    past_s: float = 0.0
    past_done: float = 0.0


class Record(Frozen, frozen=True, kw_only=True):
    """All that was measured of one run.

    ``seen``: it has run uncapped long enough in this segment, since ``since_ns``. ``top_mw``: mean of the highest tenth
    of ``draws`` (packed int32, mW). ``segment``: number of the stretch in which its work did not change. ``doubt``: why
    its counter is not believed, empty if it is; ``unlikely``: nor is the loss that it told, by the curves of its like;
    ``disputed``: what it told of a cap, and what its activity told; then that rules. ``shared``: it had GPUs together
    with others while caps held them down: what that cost nobody knows. ``paced_ns``: up to when its
    activity is known; ``stalled_ns``: when it was last found to have stalled.
    ``total``: what its counter will be when its work is done, by its own word; None where it does not tell it.
    ``rate_now``: of the last seconds. ``cap_mw`` with ``cap_known``: the
    level that it is at since ``changed_ns``; ``bound``: that cap lowers its draw, as caps have
    done since ``capped_since_ns``.
    """

    recalled: Recalled | None = None
    seen: bool = False
    since_ns: int | None = None
    draws: bytes = b""
    top_mw: int | None = None
    least_top_mw: int = 0
    segment: int = 0
    levels: tuple[Level, ...] = ()
    unit: str = ""
    total: float | None = None
    reporting: bool = False
    doubt: str = ""
    unlikely: bool = False
    disputed: str = ""
    shared: bool = False
    rate_now: float | None = None
    tally: Tally = Tally()

    last_ns: int | None = None
    gpus: int = 0
    prior_mw: int | None = None
    cap_known: bool = False
    cap_mw: int | None = None
    bound: bool = False
    capped_since_ns: int | None = None
    changed_ns: int = 0
    heard: Heard | None = None
    drift: Drift = Drift()
    slump: Drift = Drift()
    jumps: int = 0
    jumped: float = 0.0
    jumped_s: float = 0.0
    surges: int = 0
    paced_ns: int = 0
    stalled_ns: int = 0

    # ------------------------------------------------------------------------------------------- baseline

    @property
    def source(self) -> BaselineSource:
        """Where the baseline comes from; ``bounded``: there is none but the prior limit."""
        return "seen" if self.seen else "bounded" if self.recalled is None else "recalled"

    @property
    def draw_mw(self) -> int | None:
        """Baseline draw of one GPU, for floors: the mean of its highest tenth. None: bounded by the prior limit."""
        if self.seen:
            return self.top_mw
        return None if self.recalled is None else self.recalled.draw_mw

    @property
    def mean_draw_mw(self) -> int | None:
        """Baseline draw of one GPU, for reductions and energy: the mean while it trains."""
        if self.seen:
            free = [
                level.draw_mw for level in self.levels if level.cap_mw is None and level.draw_mw is not None
            ]
            return (
                self.top_mw if not free else free[-1] if self.top_mw is None else min(free[-1], self.top_mw)
            )
        return None if self.recalled is None else self.recalled.draw_mw

    @property
    def rate_per_s(self) -> float | None:
        """Baseline rate of the counter while it trains."""
        free = self._seen_rate()
        if free is not None:
            return free.rate_per_s
        return None if self.recalled is None else self.recalled.rate_per_s

    @property
    def baseline_sd(self) -> float:
        """Relative standard deviation of the baseline rate, not below what its source allows."""
        free = self._seen_rate()
        if free is not None:
            return max(LEAST_BASELINE_SD["seen"], free.rate_sd or 0.0)
        if self.recalled is not None:
            return max(LEAST_BASELINE_SD["recalled"], self.recalled.sd)
        return LEAST_BASELINE_SD["bounded"]

    @property
    def rate_source(self) -> BaselineSource:
        """Where the baseline rate comes from: a draw may be seen while the counter is not."""
        if self._seen_rate() is not None:
            return "seen"
        return "bounded" if self.recalled is None or self.recalled.rate_per_s is None else "recalled"

    def _seen_rate(self) -> Level | None:
        free = self.level(None) if self.seen else None
        return free if free is not None and free.count >= FEWEST_INTERVALS and free.rate_per_s else None

    @property
    def doubted(self) -> bool:
        """Whether what its counter told of caps is not believed."""
        return bool(self.doubt) or self.unlikely or bool(self.disputed)

    # ------------------------------------------------------------------------------------------- levels

    def level(self, cap_mw: int | None) -> Level | None:
        """The level of exactly this cap in the present segment."""
        for level in self.levels:
            if level.cap_mw == cap_mw and level.segment == self.segment:
                return level
        return None

    def binding(self) -> tuple[Level, ...]:
        """Levels of the present segment, with a known rate, whose cap lies below the baseline draw."""
        draw_mw = self.draw_mw
        if draw_mw is None:
            return ()
        return tuple(
            level
            for level in self.levels
            if level.segment == self.segment
            and level.cap_mw is not None
            and level.cap_mw < draw_mw
            and level.count >= FEWEST_INTERVALS
        )

    def implausible(self, level: Level) -> str:
        """Why no run can have this rate at this draw, in plain words; empty if it may.

        Nobody gains from a cap, and nobody loses far more than the draw gave up.
        """
        base, rate, base_mw, draw_mw = self.rate_per_s, level.rate_per_s, self.mean_draw_mw, level.draw_mw
        if base is None or rate is None or base_mw is None or draw_mw is None:
            return ""
        share, reduction = rate / base, max(0.0, 1 - draw_mw / base_mw)
        least = 1 - LOST_ANYWAY - LOST_BY_DRAW * reduction
        if least <= share <= MOST_GAINED or (rate_sd := level.rate_sd) is None:
            return ""
        margin = SURE_SD * hypot(self.baseline_sd, rate_sd)
        if share * (1 - margin) > MOST_GAINED:
            return f"its counter rose {share:.3g} times as fast under a cap as without one"
        if share * (1 + margin) < least:
            return f"its counter fell by {100 * (1 - share):.0f} % while its draw fell by {100 * reduction:.0f} %"
        return ""

    @property
    def measured(self) -> bool:
        """Whether a cap that binds was measured beside a seen or recalled baseline, by a counter that is believed."""
        if self.doubted or self.rate_per_s is None:
            return False
        return any(not self.implausible(level) for level in self.binding())

    # ------------------------------------------------------------------------------------------- totals

    @property
    def totals(self) -> Totals:
        """What it comes to so far, at the baseline as it is known now."""
        tally = self.tally
        lost, lost_sd = self._lost()
        return Totals(
            known_s=tally.known_s,
            capped_s=tally.capped_s,
            drawn_j=tally.drawn_mws / MW_S_PER_J,
            saved_j=self._saved_j(),
            done=tally.done,
            lost=lost,
            lost_sd=lost_sd,
        )

    def _lost(self) -> tuple[float | None, float | None]:
        tally, rate = self.tally, self.rate_per_s
        unpriced_s = tally.unpriced_s + (tally.work_s if rate is None else 0.0)
        work_s = tally.past_work_s + tally.work_s + tally.unpriced_s
        unheard = tally.capped_s > 0 and work_s <= 0
        if (
            self.doubted
            or self.shared
            or not self.reporting
            or unheard
            or self._silent()
            or unpriced_s > UNPRICED_SHARE * work_s
        ):
            return None, None
        expected = 0.0 if rate is None else rate * tally.work_s
        noise = LEAST_NOISE_SD if expected > 0 else 0.0
        sd = tally.past_lost_sd + expected * hypot(self.baseline_sd, noise)
        return tally.past_lost + (expected - tally.work_done if expected > 0 else 0.0), sd

    @property
    def lost_s(self) -> float | None:
        """How long, without caps, it would work on what they cost it; None while that loss is not known."""
        rate = self.rate_per_s
        if self._lost()[0] is None:
            return None
        tally = self.tally
        return tally.past_lost_s + (0.0 if not rate else tally.work_s - tally.work_done / rate)

    @property
    def stalled(self) -> float:
        """Share of the time since its counter was first heard in which it stalled."""
        return self.tally.stalled_s / self.tally.heard_s if self.tally.heard_s > 0 else 0.0

    def _silent(self) -> bool:
        """Whether its counter has not been heard for so long under a cap that what it lost cannot be told."""
        heard = self.heard
        if heard is None or self.last_ns is None or not (self.bound or heard.capped):
            return False
        return self.last_ns - heard.ns > 1e9 * max(SILENT_S, UNPRICED_SHARE * self.tally.capped_s)

    def _saved_j(self) -> float | None:
        tally, draw_mw = self.tally, self.mean_draw_mw
        unpriced_s = tally.unpriced_gpu_s + (tally.cut_gpu_s if draw_mw is None else 0.0)
        gpu_s = tally.past_cut_gpu_s + tally.cut_gpu_s + tally.unpriced_gpu_s
        if self.shared or (tally.capped_s > 0 and gpu_s <= 0) or unpriced_s > UNPRICED_SHARE * gpu_s:
            return None
        saved_mws = 0.0 if draw_mw is None else draw_mw * tally.cut_gpu_s - tally.cut_mws
        return (tally.past_saved_mws + saved_mws) / MW_S_PER_J

    @property
    def loss(self) -> float | None:
        """Share of its throughput that caps have cost it since it was first seen; None while unknown."""
        lost, done = self._lost()[0], self.tally.done
        return None if lost is None or done + lost <= 0 else lost / (done + lost)

    @property
    def loss_capped(self) -> float | None:
        """Share of its throughput lost while capped; None while unknown, and for a run that never was."""
        lost, done = self._lost()[0], self.tally.done_capped
        return None if lost is None or self.tally.capped_s <= 0 or done + lost <= 0 else lost / (done + lost)

    @property
    def energy_wh(self) -> float | None:
        """Energy that caps have cost: negative is saved."""
        saved_j = self._saved_j()
        return None if saved_j is None else -saved_j / J_PER_WH
