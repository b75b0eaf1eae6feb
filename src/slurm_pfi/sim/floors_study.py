"""Whether promised floors hold on GPU models that the library has not seen: ``slurm-pfi study floors``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np

from ..elasticity.curve import FloatArray, IntArray
from ..elasticity.floors import FLOOR_SDS, greatest_reductions
from ..elasticity.learner import learn
from ..elasticity.library import Library, greatest_reduction
from ..elasticity.names import same_gpu
from ..elasticity.prior import Prior
from ..elasticity.process import FLOORS
from .curves_study import rate_upper95
from .population import Member, Population
from .rounds import Conditions, make_site, measure
from .workers import run_all

Rule: TypeAlias = Literal["library", "learned"]

LIMITS: Final = (0.05, 0.10, 0.20)
MOST_MEASUREMENTS: Final = 4
ALLOWED: Final = 0.05
"""Of the promises, so many may be broken: floors are promised with 95 % confidence."""

_RESAMPLES: Final = 2000
_UPPER: Final = 0.95
_SAME: Final = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """``sets``: how often every job of a GPU model is tried, with new errors and noise. ``sds``: see FLOOR_SDS."""

    population: Population
    library: Library
    conditions: Conditions
    sets: int
    seed: int
    sds: float = FLOOR_SDS


@dataclass(frozen=True, slots=True)
class Row:
    """Promises of one GPU model under one limit after some measurements. Families of workloads count alike.

    ``rule``: "learned" floors, or those of the "library" alone, as the controller makes them for every run today.

    ``broken``: share of promises that were; ``upper95``: its one-sided 95 % bound when families are drawn anew, None
    with a single one; ``upper95_jobs``: the exact bound if jobs were drawn one by one, which few jobs keep wide;
    ``used``: share of the true greatest reduction that was given; ``worst_family`` and the share that it broke.
    """

    gpu: str
    rule: Rule
    limit: float
    measurements: int
    promises: int
    jobs: int
    families: int
    broken: float
    upper95: float | None
    upper95_jobs: float | None
    used: float
    worst_family: str
    worst_family_broken: float


def judged(population: Population) -> tuple[list[Member], list[Member]]:
    """Members to whom a promise means something, and the others: no cap lies below what those draw.

    What they lose at a cap that does nothing is noise, and no floor of theirs is ever in the way.
    """
    able = [one for one in population.members if one.pfi_reductions]
    return able, [one for one in population.members if not one.pfi_reductions]


@dataclass(frozen=True, slots=True, eq=False)
class _Try:
    """One site of all judged members of a GPU model, under one promise."""

    study: Study
    members: tuple[Member, ...]
    limit: float
    number: int


def play(study: Study, workers: int = 1, done: Callable[[], None] = lambda: None) -> list[Row]:
    """All rows, GPU model by GPU model. ``done`` is called after each of ``steps(study)`` steps."""
    cells = _cells(study)
    tasks = [
        (_given, _Try(study, members, limit, number))
        for members, limit in cells
        for number in range(study.sets)
    ]
    given: list[FloatArray] = [np.empty(0)] * len(tasks)
    for place, result in run_all(tasks, workers):
        given[place] = result
        done()
    rows: list[Row] = []
    for place, (members, limit) in enumerate(cells):
        tries = np.array(given[place * study.sets : (place + 1) * study.sets])
        library = _library(study, members)
        if library.curves:
            alone = greatest_reduction(limit, library)
            fixed = np.minimum(alone, [one.deepest for one in members])
            rows += _rows(study, "library", members, limit, fixed[None, None])
        rows += _rows(study, "learned", members, limit, tries)
    return rows


def steps(study: Study) -> int:
    """How often ``play`` calls ``done``."""
    return len(_cells(study)) * study.sets


def _cells(study: Study) -> list[tuple[tuple[Member, ...], float]]:
    """The judged members of each GPU model, with each limit."""
    able, _ = judged(study.population)
    of_gpu = [tuple(one for one in able if one.gpu_model == gpu) for gpu in study.population.gpu_models]
    return [(members, limit) for members in of_gpu if members for limit in LIMITS]


def _given(task: _Try) -> FloatArray:
    """Reductions given after 0..MOST_MEASUREMENTS, (measurements + 1, members).

    Each is measured at the floor that it was promised last, which is as deep as a site may go to learn.
    """
    study, members, limit = task.study, task.members, task.limit
    prior = Prior(_library(study, members))
    rng = np.random.default_rng([study.seed, task.number, round(1000 * limit)])
    everyone = np.arange(len(members), dtype=np.intp)
    weights = [prior.log_weight] * len(members)
    site = make_site(Population(members), everyone, weights, study.conditions, rng)
    evidence = list(site.evidence)
    given = np.empty((MOST_MEASUREMENTS + 1, len(members)))
    for count in range(MOST_MEASUREMENTS + 1):
        posterior = learn(prior, evidence, spreads=FLOORS)
        given[count] = np.minimum(greatest_reductions(posterior, limit, sds=study.sds), site.shares.end)
        for i, point in enumerate(measure(site, given[count], study.conditions.noise, rng)):
            if point is not None:
                evidence[i] = replace(evidence[i], measurements=(*evidence[i].measurements, point))
    return given


def _library(study: Study, members: Sequence[Member]) -> Library:
    """What is left of the library without the members' GPU model."""
    own = members[0].gpu_model
    return Library([one for one in study.library.curves if not same_gpu(one.gpu_model, own)])


def without_library(study: Study) -> list[str]:
    """GPU models for which no curve is left: their floors come from a straight line, which is a guess."""
    cells = dict.fromkeys(members for members, _ in _cells(study))
    return [members[0].gpu_model for members in cells if not _library(study, members).curves]


def _rows(study: Study, rule: Rule, members: Sequence[Member], limit: float, given: FloatArray) -> list[Row]:
    """``given``: (sets, measurements + 1, members)."""
    loss = np.stack([one.curve.loss_at(given[..., i]) for i, one in enumerate(members)], axis=-1)
    most = np.array([min(one.curve.greatest_reduction(limit), one.deepest) for one in members])
    broken = (loss > limit + _SAME).mean(axis=0)
    used = np.minimum(given / np.maximum(most, _SAME), 1.0).mean(axis=0)
    families = sorted({one.family for one in members})
    of_family = np.array([[one.family == name for one in members] for name in families], dtype=np.float64)
    of_family /= of_family.sum(axis=1, keepdims=True)
    by_family, used_by_family = broken @ of_family.T, used @ of_family.T
    rng = np.random.default_rng([study.seed, 1])
    drawn = rng.integers(len(families), size=(_RESAMPLES, len(families)))
    found = []
    for count in range(given.shape[1]):
        worst = int(np.argmax(by_family[count]))
        found.append(
            Row(
                gpu=members[0].gpu_model,
                rule=rule,
                limit=limit,
                measurements=count,
                promises=given.shape[0] * len(members),
                jobs=len(members),
                families=len(families),
                broken=float(by_family[count].mean()),
                upper95=_upper(by_family[count], drawn),
                upper95_jobs=rate_upper95(round(float(broken[count].sum())), len(members)),
                used=float(used_by_family[count].mean()),
                worst_family=families[worst],
                worst_family_broken=float(by_family[count][worst]),
            )
        )
    return found


def _upper(by_family: FloatArray, drawn: IntArray) -> float | None:
    """One-sided bound of the mean over families, (families,), each resample of ``drawn`` (resamples, families)."""
    if by_family.size < 2:
        return None
    return float(np.quantile(by_family[drawn].mean(axis=1), _UPPER))
