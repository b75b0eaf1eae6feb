"""Sites under a limit, round by round: plan, apply, measure, learn, plan again. What counts is what was applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ..allocation.guard import Certified, guarded
from ..allocation.solve import Shares, equal, marginal
from ..elasticity.curve import CurveStack, FloatArray, IntArray
from ..elasticity.evidence import Measurement, PfiEvidence, RunEvidence, loss_from_samples, pool_kin
from ..elasticity.learner import learn
from ..elasticity.posterior import Posterior
from ..elasticity.prior import Prior
from .population import Population

SAMPLES = 16
"""Throughput samples behind one measurement."""

_LEAST_BASELINE: Final = 0.1
"""No site takes a run's T_max for less than this share of what it is, whatever the error drawn."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """How well a site knows its runs. All relative standard deviations.

    ``noise``: of the mean throughput of a measurement. ``baseline_error``: of T_max, drawn once for each run.
    """

    pfi_sd: float = 0.3
    noise: float = 0.006
    baseline_error: float = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One drawn site: its runs as shares, the truth, and what is known before the first plan."""

    shares: Shares
    truth: CurveStack
    evidence: tuple[RunEvidence, ...]
    log_weight: FloatArray
    baseline: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """One applied plan. ``loss``: true loss of value, as ``equal`` and ``oracle`` lose at the same need."""

    reduction: float
    round: int
    loss: float
    equal: float
    oracle: float
    certified: Certified
    value: float


def make_site(
    population: Population,
    drawn: IntArray,
    prior_weight: Sequence[FloatArray],
    conditions: Conditions,
    rng: np.random.Generator,
) -> Site:
    """``prior_weight``: log weights of the prior's candidates for each member of the population."""
    runs = drawn.size
    shares = Shares(
        watts=population.column("draw_w", drawn),
        value=population.column("value", drawn),
        start=np.zeros(runs),
        end=population.column("deepest", drawn),
    )
    baseline = np.maximum(1.0 + conditions.baseline_error * rng.standard_normal(runs), _LEAST_BASELINE)
    evidence = []
    for i, error in zip(drawn, conditions.pfi_sd * rng.standard_normal(runs), strict=True):
        member = population.members[i]
        told = None
        if member.pfi is not None:
            value = member.pfi + error
            told = PfiEvidence(value, conditions.pfi_sd, member.pfi_reductions)
        evidence.append(
            RunEvidence(
                member.gpu_model,
                kin=member.curve_id,
                pfi=told,
                baseline="seen",
                baseline_sd=conditions.baseline_error,
            )
        )
    weight = np.array([prior_weight[i] for i in drawn])
    return Site(shares, population.curves(drawn), tuple(evidence), weight, baseline)


def measure(
    site: Site, reduction: FloatArray, noise: float, rng: np.random.Generator
) -> list[Measurement | None]:
    """What each run shows at its reduction, from samples of its throughput; None where nothing was cut."""
    left = 1.0 - site.truth.loss_at(reduction)
    rate = left[:, None] * (1.0 + noise * np.sqrt(SAMPLES) * rng.standard_normal((left.size, SAMPLES)))
    loss, sd = loss_from_samples(np.maximum(rate, 0.0), site.baseline)
    return [
        Measurement(x, min(y, 1.0), s) if x > 0 else None
        for x, y, s in zip(reduction.tolist(), loss.tolist(), sd.tolist(), strict=True)
    ]


def apply_rounds(
    prior: Prior,
    site: Site,
    share: float,
    rounds: int,
    conditions: Conditions,
    rng: np.random.Generator,
    guard: Callable[[Shares, Posterior, FloatArray, float], Certified] = guarded,
    *,
    pool: bool = False,
) -> list[Applied]:
    """Plans 0..rounds at a cut of ``share`` of the draw, each made from what the ones before have shown.

    ``pool``: runs of one kin are known to be the same work, as job names tell, and learn from each other's
    measurements. Without it they only count as erring together.
    """
    shares = site.shares
    need = share * float(shares.watts.sum())
    even = equal(shares, need)
    best = marginal(shares, site.truth, need)

    def lost(reduction: FloatArray) -> float:
        return float(shares.value @ site.truth.loss_at(reduction))

    evidence = list(site.evidence)
    found: list[Applied] = []
    for number in range(rounds + 1):
        known = pool_kin(evidence) if pool else evidence
        posterior = learn(prior, known, log_weight=site.log_weight)
        deepest = np.array([one.deepest for one in evidence])
        plan = guard(shares, posterior, deepest, need)
        found.append(
            Applied(
                share, number, lost(plan.reduction), lost(even), lost(best), plan, float(shares.value.sum())
            )
        )
        if number == rounds:
            break
        for i, point in enumerate(measure(site, plan.reduction, conditions.noise, rng)):
            if point is not None:
                evidence[i] = replace(evidence[i], measurements=(*evidence[i].measurements, point))
    return found
