"""Policies on sites drawn from measured curves, whose library has not seen them: ``slurm-pfi study curves``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from ..allocation.solve import by_index
from ..elasticity.curve import FloatArray
from ..elasticity.library import Library, LibraryCurve
from ..elasticity.names import family_key, same_gpu
from ..elasticity.prior import NO_LIBRARY, Prior
from .gap import SAME, gap_closed
from .population import Member, Population
from .rounds import Conditions, Site, apply_rounds, make_site
from .workers import run_all

LeaveOut: TypeAlias = Literal["family", "gpu", "none"]
LEAVE_OUT: Final[tuple[LeaveOut, ...]] = ("gpu", "family", "none")

POLICIES: Final = ("equal", "pfi", "marginal", "oracle")
_ENOUGH: Final = 1 - 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """What is played: ``runs`` runs a site, plans 0..``last_round`` at each of ``reductions`` (shares of the draw)."""

    population: Population
    library: Library
    leave_out: LeaveOut
    conditions: Conditions
    runs: int
    last_round: int
    reductions: tuple[float, ...]
    names: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Played:
    """One site at one reduction: its value uncapped, and the value lost under each policy.

    ``marginal``: of plans 0 to the last round. ``shortfall``: what all runs at their deepest leave of the reduction,
    a share of the draw; above 0 nothing was planned and nothing is lost.
    """

    total: float
    equal: float = 0.0
    oracle: float = 0.0
    pfi: float = 0.0
    marginal: tuple[float, ...] = ()
    shortfall: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One result; shares of 1, see `gap.Gap`. ``round``: rounds measured before the plan.

    ``sets``: sites that count; ``infeasible``: sites that had less than the reduction, ``shortfall`` the worst of them
    as a share of the draw. Where none counts all results are None.
    """

    policy: str
    reduction: float
    round: int
    gap_closed: float | None
    ci_low: float | None
    ci_high: float | None
    gap_share_of_throughput: float | None
    below_equal: float | None
    worst_vs_equal: float | None
    lost: float | None
    lost_low: float | None
    lost_high: float | None
    sets: int
    infeasible: int
    shortfall: float


@dataclass(frozen=True, slots=True)
class Tally:
    """All plans of ``marginal`` that were applied, those below equal, and the upper 95 % bound of their rate.

    The bound takes plans as independent, though those of one site are related: ``sets`` and ``below_equal_sets``
    count sites of which any plan was below, and ``below_equal_sets_upper95`` is the bound of that rate.
    """

    plans: int
    below_equal_plans: int
    below_equal_rate_upper95: float | None
    worst_vs_equal: float | None
    sets: int
    below_equal_sets: int
    below_equal_sets_upper95: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What the sites of a study came to. ``lacking``: members for which leaving out left no library."""

    study: Study
    rows: tuple[Row, ...]
    tally: Tally
    lacking: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"results": [asdict(row) for row in self.rows], **asdict(self.tally)}


# -------------------------------------------------------------------------------------------------- what is known


def candidates(study: Study) -> tuple[Prior, dict[str, FloatArray], tuple[str, ...]]:
    """The prior, the log weights of its candidates for each member by curve_id, and members without a library.

    Those are left with what stands for an empty library, and keep their equal cut.
    """
    members = study.population.members
    library, groups = study.library, {_group(study, one): one for one in members}
    kept = {name: [one for one in library.curves if _counts(study, one, own)] for name, own in groups.items()}
    if not all(kept.values()):
        library = Library((*library.curves, NO_LIBRARY))
    prior = Prior(library)
    ids = {name: {id(one) for one in curves or library.curves[-1:]} for name, curves in kept.items()}
    weight = {name: prior.only(lambda one, own=own: id(one) in own) for name, own in ids.items()}  # type: ignore[misc]
    lacking = tuple(one.curve_id for one in members if not kept[_group(study, one)])
    return prior, {one.curve_id: weight[_group(study, one)] for one in members}, lacking


def _group(study: Study, member: Member) -> str:
    """Members of one group have one library."""
    match study.leave_out:
        case "gpu":
            return member.gpu_model
        case "family":
            return member.family
        case "none":
            return ""


def _counts(study: Study, curve: LibraryCurve, member: Member) -> bool:
    match study.leave_out:
        case "gpu":
            return not same_gpu(curve.gpu_model, member.gpu_model)
        case "family":
            return family_key(curve.family) != family_key(member.family)
        case "none":
            return True


# ------------------------------------------------------------------------------------------------------- one site


def play_set(task: tuple[Study, int]) -> list[Played]:
    """One site at every reduction; ``task`` is the study and the number of the site.

    The site depends on seed and number alone, what is measured on the reduction too: not on what else is asked for.
    """
    study, number = task
    prior, weight, _ = candidates(study)
    population = study.population
    rng = np.random.default_rng([study.seed, number])
    weights = [weight[one.curve_id] for one in population.members]
    site = make_site(population, population.draw(rng, study.runs), weights, study.conditions, rng)
    return [_play_one(study, prior, site, number, share) for share in study.reductions]


def _play_one(study: Study, prior: Prior, site: Site, number: int, share: float) -> Played:
    shares = site.shares
    draw = float(shares.watts.sum())
    total, need = float(shares.value.sum()), share * draw
    if need * _ENOUGH > shares.most:
        return Played(total, shortfall=(need - shares.most) / draw)
    rng = np.random.default_rng([study.seed, number, 1, round(1e6 * share)])
    plans = apply_rounds(prior, site, share, study.last_round, study.conditions, rng, pool=study.names)
    index = by_index(shares, told_index(site), need)
    return Played(
        total=total,
        equal=plans[0].equal,
        oracle=plans[0].oracle,
        pfi=float(shares.value @ site.truth.loss_at(index)),
        marginal=tuple(plan.loss for plan in plans),
    )


def told_index(site: Site) -> FloatArray:
    """The PFI that Eq. 2 is told of each run, (runs,); where nobody knows one, the median of the others."""
    told = np.array([np.nan if one.pfi is None else one.pfi.value for one in site.evidence])
    known = told[np.isfinite(told)]
    return np.where(np.isfinite(told), told, np.median(known) if known.size else 1.0)


def play(study: Study, sets: int, workers: int) -> Iterator[tuple[int, list[Played]]]:
    """Every site as it is done, with its number, in processes of their own with one thread each."""
    tasks: list[tuple[Callable[[tuple[Study, int]], list[Played]], tuple[Study, int]]] = [
        (play_set, (study, number)) for number in range(sets)
    ]
    yield from run_all(tasks, workers, apart=True)


def of_one_gpu(study: Study) -> Mapping[str, Study]:
    """The study on sites with one GPU model only, by GPU model."""
    population = study.population
    return {name: replace(study, population=population.of_gpu(name)) for name in population.gpu_models}


# -------------------------------------------------------------------------------------------------------- results


def outcome_of(study: Study, rounds: Sequence[int], played: Sequence[Sequence[Played]]) -> Outcome:
    """All results; ``played`` by site, as ``play`` gives them, in order."""
    return Outcome(study, tuple(results(study, rounds, played)), tally(played), candidates(study)[2])


def results(study: Study, rounds: Sequence[int], played: Sequence[Sequence[Played]]) -> list[Row]:
    """A row for each policy and reduction, of ``marginal`` one for each of ``rounds``; ``played`` by site."""
    rows: list[Row] = []
    for place, share in enumerate(study.reductions):
        here = [site[place] for site in played]
        done = [one for one in here if one.shortfall == 0]
        worst = max(one.shortfall for one in here)
        for policy in POLICIES:
            for number in rounds if policy == "marginal" else (0,):
                lost = [
                    one.marginal[number] if policy == "marginal" else getattr(one, policy) for one in done
                ]
                rows.append(_row(policy, share, number, lost, done, len(here) - len(done), worst))
    return rows


def _row(
    policy: str,
    share: float,
    number: int,
    lost: Sequence[float],
    done: Sequence[Played],
    infeasible: int,
    shortfall: float,
) -> Row:
    if not done:
        nothing = (None,) * 9
        return Row(policy, share, number, *nothing, sets=0, infeasible=infeasible, shortfall=shortfall)
    even, best, total = np.array([(one.equal, one.oracle, one.total) for one in done]).T
    gap = gap_closed(np.array(lost), even, best, total)
    return Row(
        policy=policy,
        reduction=share,
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
        sets=len(done),
        infeasible=infeasible,
        shortfall=shortfall,
    )


def tally(played: Sequence[Sequence[Played]]) -> Tally:
    """All plans of ``marginal``, also those of rounds that are not shown."""
    by_site = [
        np.array([(one.equal - lost) / one.total for one in site for lost in one.marginal]) for site in played
    ]
    gains = np.concatenate(by_site)
    planned = [some for some in by_site if some.size]
    below = int((gains < -SAME).sum())
    below_sets = sum(bool((some < -SAME).any()) for some in planned)
    return Tally(
        plans=gains.size,
        below_equal_plans=below,
        below_equal_rate_upper95=rate_upper95(below, gains.size),
        worst_vs_equal=float(gains.min()) if gains.size else None,
        sets=len(planned),
        below_equal_sets=below_sets,
        below_equal_sets_upper95=rate_upper95(below_sets, len(planned)),
    )


def rate_upper95(events: int, trials: int) -> float | None:
    """Upper limit of a rate, one-sided 95 %, after Clopper and Pearson: 1 - 0.05^(1/n) for no event in n trials.

    None without a trial. Raises ValueError when there are more events than trials, or fewer than none.
    """
    if not 0 <= events <= trials:
        raise ValueError(f"{events} events in {trials} trials")
    if trials == 0:
        return None
    if events == trials:
        return 1.0
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        if _at_most(events, trials, middle) > 0.05:
            low = middle
        else:
            high = middle
    return high


def _at_most(events: int, trials: int, rate: float) -> float:
    """Chance of so many events or fewer, 0 < rate < 1."""
    log, other = math.log(rate), math.log1p(-rate)
    terms = [
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * log
        + (trials - k) * other
        for k in range(events + 1)
    ]
    top = max(terms)
    return math.exp(top) * math.fsum(math.exp(term - top) for term in terms)
