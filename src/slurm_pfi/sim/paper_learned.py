"""The learned policy on the sets of the paper: it is told what ``pfi`` is told, and then sees what its plans cost."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

from ..allocation.guard import guarded_beyond
from ..elasticity.curve import FloatArray
from ..elasticity.evidence import PfiEvidence, RunEvidence
from ..elasticity.library import Library, LibraryCurve
from ..elasticity.prior import Prior
from ..elasticity.sweep import Repairs
from .jobs import model_jobs
from .paper import IN_SAMPLE_RMSE, Assumptions, caps_of, pool
from .paper_play import Game, Row, Sets, make_sets, row
from .rounds import Applied, Conditions, Site, apply_rounds

GPU_MODEL: Final = "H200"
ROUNDS: Final = 4
CONDITIONS: Final = Conditions(pfi_sd=IN_SAMPLE_RMSE)
"""The index has the published error; measurements have 0.6 % noise, baselines an error of 1 %."""


@cache
def prior_of(assumptions: Assumptions) -> tuple[Prior, FloatArray]:
    """A prior of the 25 curves, and the log weights of its candidates for each kind, (kinds, candidates).

    For its own kind a curve weighs nothing: nobody is told the answer.
    """
    jobs = pool(assumptions)
    curves = [
        LibraryCurve(
            curve_id=job.name,
            gpu_model=GPU_MODEL,
            family=job.job_class,
            workload=job.name,
            curve=curve,
            repairs=Repairs(),
            source="model of arXiv 2609.11542",
            licence="",
        )
        for job, curve in zip(jobs.jobs, jobs.curves, strict=True)
    ]
    prior = Prior(Library(curves))
    weights = [prior.only(lambda one, own=job.name: one.curve_id != own) for job in jobs.jobs]  # type: ignore[misc]
    return prior, np.array(weights)


def learned_rounds(game: Game) -> list[Row]:
    """The policy ``marginal`` on every set of a game, plans 0 to ROUNDS, at every reduction above 0."""
    sets = make_sets(game)
    rows: list[Row] = []
    for share in game.reductions:
        if share <= 0:
            continue
        applied = [_learn_one(game, sets, number, share) for number in range(game.sets)]
        for after in range(ROUNDS + 1):
            plans = [rounds[after] for rounds in applied]
            lost, equal, oracle, total = np.array(
                [(one.loss, one.equal, one.oracle, one.value) for one in plans]
            ).T
            rows.append(
                row(game, "marginal", share, after, lost, equal_lost=equal, oracle_lost=oracle, total=total)
            )
    return rows


def _learn_one(game: Game, sets: Sets, number: int, share: float) -> list[Applied]:
    """The rounds of one set at one reduction."""
    prior, weights = prior_of(game.assumptions)
    rng = np.random.default_rng([game.seed, 3, number, round(1000 * share)])
    kinds = sets.kinds[number]
    grids = _grid_reductions()
    told = {
        kind: RunEvidence(
            GPU_MODEL,
            kin=sets.pool.jobs[kind].name,
            pfi=PfiEvidence(float(sets.pfi[number, kind]), CONDITIONS.pfi_sd, grids[kind]),
            baseline="seen",
            baseline_sd=CONDITIONS.baseline_error,
        )
        for kind in set(kinds.tolist())
    }
    site = Site(
        shares=sets.shares(number),
        truth=sets.true_stack(number),
        evidence=tuple(told[kind] for kind in kinds.tolist()),
        log_weight=weights[kinds],
        baseline=1.0 + CONDITIONS.baseline_error * rng.standard_normal(kinds.size),
    )
    return apply_rounds(prior, site, share, ROUNDS, CONDITIONS, rng, guard=guarded_beyond, pool=game.names)


@cache
def _grid_reductions() -> tuple[tuple[float, ...], ...]:
    """For each kind: what the caps of its own grid take from its draw; the published PFI are on those grids."""
    found = []
    for job in model_jobs().values():
        caps = caps_of(job)
        full = job.workload.draw_w(caps[-1])
        found.append(tuple(1.0 - job.workload.draw_w(cap) / full for cap in caps[:-1]))
    return tuple(found)
