"""What the site can give, at what loss and for how long: the answer of ``slurm-pfi offer``. Pure.

Each level of the table is a limit of its own, judged as ``what-if`` judges it. The supply curve beside it is the merit
order of the runs on what was learned of them, within their floors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import numpy as np

from ...allocation.guard import expected_curves
from ...allocation.rounding import lowest_cap_mw
from ...allocation.solve import Shares as Givers
from ...allocation.supply import SupplyCurve, supply
from ...config import Config
from ...elasticity.curve import FloatArray
from ...elasticity.evidence import LEAST_BASELINE_SD
from ...model import Frozen
from ...slurm.backend import JobInfo, Special
from ...units import MW_PER_W, Z95_ONE_SIDED
from ..science import Science
from ..state import State
from .forecast import Basis, Cut, cut_of, least_limit_mw, look_at, total_loss
from .forecast_values import Estimate, Standing, UncappedDraw

STEPS_PERCENT: Final = (0.5, 1.0, 2.0, 2.5, 5.0, 10.0, 20.0)
MOST_LEVELS: Final = 10
ROUNDING: Final = 1e-9
DIGITS: Final = 9
"""Of the shares in the supply curve: a large site has tens of thousands of steps."""

Lasts: TypeAlias = Literal["until", "unlimited", "unknown"]


class Level(Frozen, frozen=True, kw_only=True):
    """One limit of the table; powers of the whole site in mW.

    ``less_mw``: below the uncapped draw. ``price_per_kw``: what the next kW costs by merit order, as a share of all
    throughput; None at the end. ``seen_mw``, ``bounded_mw``: what runs with a seen or recalled baseline give up, and
    the most that the others do; ``measured_mw``: what of the former comes from runs whose curve was measured.
    ``sure_mw``: what is drawn less with 95 % confidence, from the baselines alone. ``lasts``: whether the runs that run
    now can give it ``until_unix_s``, for as long as they like, or nobody knows.
    """

    less_mw: int
    share: float
    limit_mw: int
    loss: Estimate | None
    price_per_kw: float | None
    seen_mw: int
    measured_mw: int
    bounded_mw: int
    sure_mw: int
    at_floor: int
    lasts: Lasts
    until_unix_s: float | None


class Steps(Frozen, frozen=True, kw_only=True):
    """The supply curve, each entry one step: cheapest first. ``given_mw`` and ``loss`` (share of all throughput) are
    sums after the step; ``price_per_kw`` is a share of all throughput; ``run`` gives it, down to ``reduction``
    (empty: a run that the reader may not see)."""

    given_mw: tuple[int, ...]
    loss: tuple[float, ...]
    price_per_kw: tuple[float, ...]
    run: tuple[str, ...]
    reduction: tuple[float, ...]


class Offer(Frozen, frozen=True, kw_only=True):
    """The whole answer; without a run it has no ``levels``, whatever bounds of other draws would seem to give.

    ``most_mw``: the greatest reduction that floors allow, zero or less where there is none;
    ``notice_s``: from an order to the reduction where its start was not announced, and ``ramp_s``: within which all
    caps are lowered."""

    uncapped: UncappedDraw
    uncapped_mw: int
    least_limit_mw: int
    most_mw: int
    notice_s: float
    ramp_s: float
    gpus: int
    runs: int
    endless_runs: int
    unknown_end_runs: int
    levels: tuple[Level, ...]
    supply: Steps
    informed: bool
    standing: Standing


def offer(state: State, config: Config, science: Science, now_ns: int, now_unix_s: float) -> Offer:
    """The levels up to what floors allow, and the supply curve. Changes nothing."""
    basis = look_at(state, config, science, now_ns)
    total_mw = basis.uncapped.total_mw
    least_mw = least_limit_mw(basis)
    lowest = cut_of(basis, basis.shares(least_mw))
    curve = _supply(basis, lowest)
    ends = [end_of(basis.state.runs[demand.run].job) for demand in lowest.shares.demands]
    levels = [
        _level(basis, lowest, curve, ends, total_mw - less_mw, now_unix_s)
        for less_mw in (level_steps(total_mw, total_mw - least_mw) if lowest.gpus.size else ())
    ]
    return Offer(
        uncapped=basis.uncapped,
        uncapped_mw=total_mw,
        least_limit_mw=least_mw,
        most_mw=total_mw - least_mw,
        notice_s=config.times.response_s,
        ramp_s=config.times.response_s,
        gpus=round(float(lowest.gpus.sum())),
        runs=lowest.gpus.size,
        endless_runs=sum(1 for end in ends if end == math.inf),
        unknown_end_runs=sum(1 for end in ends if end is None),
        levels=tuple(levels),
        supply=_steps(curve, lowest),
        informed=lowest.posterior.informed,
        standing=basis.standing,
    )


def level_steps(total_mw: int, most_mw: int) -> list[int]:
    """Reductions in even shares of the uncapped draw, ten at most, and the greatest there is; none where it is none."""
    if most_mw <= 0 or total_mw <= 0:
        return []
    fine = (share for share in STEPS_PERCENT if most_mw / total_mw * 100 <= share * MOST_LEVELS)
    step = next(fine, STEPS_PERCENT[-1]) / 100
    even = [round(total_mw * step * n) for n in range(1, MOST_LEVELS + 1)]
    return [*(less_mw for less_mw in even if less_mw < most_mw), most_mw]


def _level(
    basis: Basis,
    lowest: Cut,
    curve: SupplyCurve,
    ends: Sequence[float | None],
    limit_mw: int,
    now_unix_s: float,
) -> Level:
    made = cut_of(basis, basis.shares(limit_mw))
    given_mw = made.given_mw
    runs = [demand.run for demand in made.shares.demands]
    sources = [basis.baselines[run][0] for run in runs]
    seen = np.array([source != "bounded" for source in sources], dtype=bool)
    measured = np.array([basis.knowledge.is_learned(run) for run in runs], dtype=bool)
    sd = np.array([LEAST_BASELINE_SD[source] for source in sources], dtype=np.float64)
    # Errors of baselines may be one error: they add up here and do not average out.
    sure_mw = np.maximum(given_mw - Z95_ONE_SIDED * sd * made.gpus * made.draw_mw, 0.0)
    need_w = float(given_mw.sum()) / MW_PER_W
    step = curve.next_step(min(need_w, curve.most))
    whole = float(made.gpus.sum())
    lasts, until_unix_s = sustained(
        float(given_mw.sum()), [*zip(lowest.given_mw.tolist(), ends, strict=True)], now_unix_s
    )
    bottoms_mw = [lowest_cap_mw(demand) for demand in made.shares.demands]
    caps = zip(made.shares.allocation.caps_mw, bottoms_mw, made.reduction, strict=True)
    return Level(
        less_mw=basis.uncapped.total_mw - limit_mw,
        share=1 - limit_mw / basis.uncapped.total_mw,
        limit_mw=limit_mw,
        loss=total_loss(basis, made),
        price_per_kw=None if step is None or not whole else float(curve.price[step]) * 1000 / whole,
        seen_mw=round(float(given_mw[seen].sum())),
        measured_mw=round(float(given_mw[seen & measured].sum())),
        bounded_mw=round(float(given_mw[~seen].sum())),
        sure_mw=round(float(sure_mw[seen].sum())),
        at_floor=sum(1 for cap, bottom, reduction in caps if cap <= bottom and reduction > 0),
        lasts=lasts,
        until_unix_s=until_unix_s,
    )


# -------------------------------------------------------------------------------------------- supply and time


def _supply(basis: Basis, lowest: Cut) -> SupplyCurve:
    """The merit order of these runs from uncapped down to their floors: watts, and loss in GPUs' whole throughput."""
    end = lowest.reduction
    givers = Givers(
        watts=lowest.gpus * lowest.draw_mw / MW_PER_W,
        value=lowest.gpus,
        start=np.zeros_like(end),
        end=end,
    )
    return supply(givers, expected_curves(basis.knowledge.mean[lowest.rows], end))


def _steps(curve: SupplyCurve, lowest: Cut) -> Steps:
    whole = max(float(lowest.gpus.sum()), 1.0)
    names = [str(demand.run) for demand in lowest.shares.demands]

    def shares(values: FloatArray) -> tuple[float, ...]:
        return tuple(np.round(values, DIGITS).tolist())

    return Steps(
        given_mw=tuple(np.rint(curve.watts[1:] * MW_PER_W).astype(int).tolist()),
        loss=shares(curve.loss[1:] / whole),
        price_per_kw=shares(curve.price * 1000 / whole),
        run=tuple(names[i] for i in curve.run.tolist()),
        reduction=shares(curve.last),
    )


def end_of(job: JobInfo | None) -> float | None:
    """When Slurm ends the job at the latest (Unix seconds), infinite without a time limit, None when not known."""
    if job is None:
        return None
    if job.limit_s is Special.UNLIMITED or job.end_unix_s is Special.UNLIMITED:
        return math.inf
    return None if isinstance(job.end_unix_s, Special) else float(job.end_unix_s)


def sustained(
    need_mw: float, givers: Sequence[tuple[float, float | None]], now_unix_s: float
) -> tuple[Lasts, float | None]:
    """For how long runs that give at most so much, and end at such times, can give ``need_mw`` together.

    The first end after which those that are left cannot. A run whose end is not known is not counted on.
    """
    known = sorted((end, most_mw) for most_mw, end in givers if end is not None)
    left_mw = sum(most_mw for _, most_mw in known)
    need_mw *= 1 - ROUNDING
    if left_mw < need_mw:
        return "unknown", None
    for end, most_mw in known:
        left_mw -= most_mw
        if left_mw < need_mw:
            return ("unlimited", None) if end == math.inf else ("until", max(end, now_unix_s))
    return "unlimited", None
