"""Section 6 of arXiv 2609.11542 played: every policy on every set at every reduction, and what it lost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from ..allocation.solve import Shares, by_index, equal, marginal
from ..elasticity.curve import CurveStack, FloatArray, IntArray
from .gap import gap_closed
from .paper import Assumptions, Mix, Objective, Pool, draw_kinds, known_pfi, pool

POLICIES: Final = ("equal", "pfi", "moe-ft x2", "oracle")
REDUCTIONS: Final = tuple(step / 100 for step in range(0, 41, 5))


@dataclass(frozen=True, slots=True)
class Game:
    """One table to fill: which sets are drawn, and what they are asked for. Same seed, same sets.

    ``names``: runs of one job are known by its name to be the same work, for the policy that learns.
    """

    assumptions: Assumptions
    mix: Mix
    objective: Objective
    sets: int
    jobs: int
    seed: int
    reductions: tuple[float, ...] = REDUCTIONS
    names: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Sets:
    """The sets of a game: kinds (sets, jobs), the index that is known of each kind (sets, kinds), and the pool."""

    pool: Pool
    kinds: IntArray
    pfi: FloatArray
    value: FloatArray

    def shares(self, number: int) -> Shares:
        """One set as a problem of allocation."""
        kinds = self.kinds[number]
        watts = self.pool.watts[kinds]
        return Shares(
            watts=watts, value=self.value[kinds], start=np.zeros(kinds.size), end=self.pool.end[kinds]
        )

    def true_stack(self, number: int) -> CurveStack:
        """The true curves of one set."""
        return CurveStack([self.pool.curves[kind] for kind in self.kinds[number]])

    def lost(self, reduction: FloatArray) -> FloatArray:
        """Value lost, (..., sets), at reductions (..., sets, jobs)."""
        loss = np.empty(reduction.shape)
        for kind, curve in enumerate(self.pool.curves):
            here = self.kinds == kind
            loss[..., here] = curve.loss_at(reduction[..., here])
        result: FloatArray = (loss * self.value[self.kinds]).sum(axis=-1)
        return result

    @property
    def total(self) -> FloatArray:
        """Value of each set uncapped, (sets,)."""
        result: FloatArray = self.value[self.kinds].sum(axis=1)
        return result


@dataclass(frozen=True, slots=True)
class Row:
    """One result, as it is printed with ``--json``; shares of 1. See `gap.Gap`.

    ``round``: measured rounds before the plan. ``gained_per_job``: against equal, in the unit of the objective.
    """

    policy: str
    mix: str
    objective: str
    assumptions: str
    reduction: float
    round: int
    gap_closed: float | None
    ci_low: float | None
    ci_high: float | None
    gap_share_of_throughput: float
    below_equal: float
    worst_vs_equal: float
    lost: float
    lost_low: float
    lost_high: float
    gained_per_job: float
    sets: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_sets(game: Game) -> Sets:
    """The sets of a game. They depend on seed, mix and share of fine-tuning, not on the other assumptions."""
    assumptions = game.assumptions
    jobs = pool(assumptions)
    draws, errors = (np.random.default_rng([game.seed, stream]) for stream in (1, 2))
    return Sets(
        pool=jobs,
        kinds=draw_kinds(jobs, game.mix, assumptions.ft_share, sets=game.sets, size=game.jobs, rng=draws),
        pfi=known_pfi(jobs, assumptions, sets=game.sets, rng=errors),
        value=jobs.value(game.objective),
    )


def play(game: Game) -> list[Row]:
    """The policies that plan once, all of POLICIES, at every reduction asked for."""
    sets = make_sets(game)
    plan = np.zeros((len(POLICIES), len(game.reductions), game.sets, game.jobs))
    for number in range(game.sets):
        shares, stack = sets.shares(number), sets.true_stack(number)
        kinds = sets.kinds[number]
        alike = replace(shares, value=np.ones(game.jobs))
        for place, share in enumerate(game.reductions):
            if share == 0:
                continue
            need = share * float(shares.watts.sum())
            plan[:, place, number] = (
                equal(shares, need),
                by_index(shares, sets.pfi[number][kinds], need),
                by_index(alike, np.where(sets.pool.moe_ft[kinds], 2.0, 1.0), need),
                marginal(shares, stack, need),
            )
    lost = sets.lost(plan)
    return [
        row(
            game,
            policy,
            share,
            0,
            lost[p, r],
            equal_lost=lost[0, r],
            oracle_lost=lost[-1, r],
            total=sets.total,
        )
        for p, policy in enumerate(POLICIES)
        for r, share in enumerate(game.reductions)
    ]


def row(
    game: Game,
    policy: str,
    reduction: float,
    number: int,
    lost: FloatArray,
    *,
    equal_lost: FloatArray,
    oracle_lost: FloatArray,
    total: FloatArray,
) -> Row:
    """One result from the value lost in each set, all (sets,)."""
    gap = gap_closed(lost, equal_lost, oracle_lost, total)
    return Row(
        policy=policy,
        mix=game.mix,
        objective=game.objective,
        assumptions=game.assumptions.name,
        reduction=reduction,
        round=number,
        gap_closed=gap.closed,
        ci_low=gap.low,
        ci_high=gap.high,
        gap_share_of_throughput=gap.of_throughput,
        below_equal=gap.below_equal,
        worst_vs_equal=gap.worst,
        lost=gap.lost,
        lost_low=gap.lost_low,
        lost_high=gap.lost_high,
        gained_per_job=float((equal_lost - lost).mean()) / game.jobs,
        sets=lost.size,
    )
