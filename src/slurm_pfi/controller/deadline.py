"""Whether what a run has left to do fits its time limit, and how much caps may cost it so that it does. Pure.

Uncapped, a run does ``rate`` units of its counter a second while it works, and nothing while it stalls (checkpoints,
evaluation). Caps may last for a part of the time left. The greatest loss is the one at which the work is done in time
with 95 % confidence, should caps last that long and cost so much throughout. No clock is read here: time left comes in
as seconds.
"""

from __future__ import annotations

from math import ceil, floor, hypot
from typing import Final, Literal, NamedTuple, TypeAlias

from ..model import Frozen
from ..slurm.numbers import MINUTE_S
from ..units import Z95_ONE_SIDED

END_SHARE: Final = 0.02
"""Share of the time left that is kept for what a counter does not tell: saving the result, taking the job down."""

STALL_SD: Final = 0.5
"""How sure the share of stalls is, as a share of it: checkpoints and evaluations seen so far are few."""

MOST_STALLED: Final = 0.95

STEP: Final = 0.005
"""A greatest loss is told and used in steps of half a point, rounded down."""

LOOSER_BY: Final = 0.01
"""A bound that was told is loosened by a point or not at all, so that noise moves no caps; it tightens at once."""

Verdict: TypeAlias = Literal["fits", "tight", "late"]


class Work(NamedTuple):
    """What is left: ``left`` units of the counter, at ``rate_per_s`` uncapped while it works.

    ``rate_sd``: relative standard deviation of the rate; ``stalled``: share of the time that it stalls, 0..1.
    """

    left: float
    rate_per_s: float
    rate_sd: float
    stalled: float


class Ahead(NamedTuple):
    """Seconds until Slurm ends the run, and of these the most that caps may last."""

    left_s: float
    capped_s: float


class Deadline(Frozen, frozen=True, kw_only=True):
    """How a run stands to its time limit. ``left_s``, ``needed_s`` (uncapped, as expected) are of when it was judged.

    ``fits``: at the flex as it is. ``tight``: only if caps cost it at most ``max_loss`` (0..1) while they bind.
    ``late``: with 95 % confidence it is not done in time even without caps; no floor saves it, and its flex counts.
    """

    verdict: Verdict
    max_loss: float
    left_s: float
    needed_s: float


def greatest_loss(work: Work, ahead: Ahead) -> float:
    """The greatest loss (0..1) over all the time that caps may last at which the work is done in time.

    95 % sure; 0 where it is not even without a loss, 1 where nothing is left to do or no cap can come.
    """
    slow = _pace(work, -Z95_ONE_SIDED)
    if work.left <= 0:
        return 1.0
    if slow <= 0:
        return 0.0
    time_s = max(0.0, ahead.left_s) * (1 - END_SHARE)
    spare_s = time_s - work.left / slow
    capped_s = min(max(0.0, ahead.capped_s), time_s)
    if spare_s <= 0:
        return 0.0
    return 1.0 if spare_s >= capped_s else spare_s / capped_s


def needed_s(work: Work) -> float:
    """How long the rest takes without caps, as expected."""
    return max(0.0, work.left) / _pace(work, 0.0)


def judge(work: Work, ahead: Ahead, max_loss: float, tightest: float, before: Deadline | None) -> Deadline:
    """How a run stands whose flex allows ``max_loss``, and that may be tightened to ``tightest`` (0..1) at most.

    ``before``: what was said of it last. A bound is tightened at once and loosened by a point or more; a late run is
    no longer so only once it is expected to be done in time.
    """
    expected_s = needed_s(work)
    time_s = max(0.0, ahead.left_s) * (1 - END_SHARE)
    quick = _pace(work, Z95_ONE_SIDED)
    was_late = before is not None and before.verdict == "late"
    if work.left > 0 and (work.left / quick > time_s or (was_late and expected_s > time_s)):
        return Deadline(verdict="late", max_loss=max_loss, left_s=ahead.left_s, needed_s=expected_s)
    bound = max(tightest, round(floor(greatest_loss(work, ahead) / STEP + 1e-9) * STEP, 3))
    if (
        before is not None
        and before.verdict == "tight"
        and before.max_loss < bound < before.max_loss + LOOSER_BY
    ):
        bound = before.max_loss
    verdict: Verdict = "fits" if bound >= max_loss else "tight"
    return Deadline(verdict=verdict, max_loss=min(max_loss, bound), left_s=ahead.left_s, needed_s=expected_s)


def _pace(work: Work, sds: float) -> float:
    """Units a second over long, stalls included, ``sds`` standard deviations above what is expected; 0 at least."""
    stalled = min(MOST_STALLED, max(0.0, work.stalled))
    sd = hypot(work.rate_sd, STALL_SD * stalled / (1 - stalled))
    return work.rate_per_s * (1 - stalled) * max(0.0, 1 + sds * sd)


# --------------------------------------------------------------------------------------------- time given back

NEAR_END_S: Final = 600.0
"""So near to its end a run gets every minute that it has lost; Slurm's time limits count in minutes."""

LAST_S: Final = 120.0
LEAST_S: Final = 5.0
"""In the last two minutes it gets a minute for so few lost seconds too."""

BATCH_S: Final = 600.0
"""While caps go on, and the end is far, so much is gathered first: each change has the scheduler plan anew."""


def owed_s(lost_s: float, given_s: int) -> int:
    """Whole minutes, in seconds, that a run may still be given: what it lost, rounded up, less what it has."""
    return max(0, ceil(max(0.0, lost_s) / MINUTE_S) * MINUTE_S - given_s)


def is_due(lost_s: float, given_s: int, left_s: float, *, capped: bool) -> bool:
    """Whether it is time to raise a time limit: seldom while caps go on, at once when they are over or the end is near.

    ``given_s``: what it has been given in all; ``left_s`` until Slurm ends it.
    """
    open_s = lost_s - given_s
    if left_s <= LAST_S:
        return open_s >= LEAST_S
    if left_s <= NEAR_END_S or not capped:
        return open_s >= MINUTE_S
    return open_s >= BATCH_S
