"""Who asks for watts, and what one limit step gives each: runs are admitted as far as the budget bears their floors.

Runs that share GPUs ask together, as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from ..allocation.guard import Certified, InForce
from ..allocation.policies import allocate
from ..allocation.problem import Allocation, Policy, Problem, RunDemand
from ..allocation.rounding import lowest_cap_mw
from ..allocation.solve import Shares as Cuts
from ..config import Config
from ..elasticity.curve import FloatArray, IntArray
from ..model import GpuReport, Run
from ..store.limits import ScheduleStep
from ..units import MW_PER_W
from .boards import GpuKey, confirmed, gpus_of, grouped
from .budget import Gpu, SiteView, commandable_gpus, gpus_on
from .dispatch import Caps
from .knowledge import Asked, HeldCut, Knowledge
from .ledger import prior_of
from .measuring.record import Record
from .runs import demand_of, run_gpus
from .science import GRID_W, Science
from .state import RunPhase, RunView, State


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run that a plan can reach, admitted or waiting for power; or runs that share GPUs, as if they were one.

    The same under every limit. ``members``: its runs, the one that it goes by in ``demand`` first; of one that is
    ``waiting``, the last is who waits, and ``joins`` names the groups (by their first) that have its GPUs and that
    it becomes one with; ``claims`` are all GPUs that it would have or share, to which no other may come in the same
    plan. ``gpus``: each board once. ``mean_draw_mw``: its baseline draw per GPU while it works; that of the demand
    where none is known.
    """

    waiting: bool
    members: tuple[Run, ...]
    gpus: tuple[Gpu, ...]
    demand: RunDemand
    park_mw: int
    floor_mw: int
    mean_draw_mw: int
    joins: tuple[Run, ...] = ()
    claims: frozenset[GpuKey] = frozenset()

    @property
    def asked(self) -> Asked:
        return self.demand.run, self.gpus[0].report.model


@dataclass(frozen=True, slots=True)
class Shares:
    """What one limit step gives each run: target caps, what they are expected to lose, and what is missing.

    ``members``: the runs of each demand: one, or a group that shares GPUs. ``loss`` (0..1) and ``loss_sd`` go by what
    was learned of each run. ``certified``: how far ``marginal`` went from the equal cut and why; None where nothing had
    to be decided, or by another policy. ``in_force``: the same for the next plan to hold on to.
    """

    demands: tuple[RunDemand, ...]
    members: tuple[tuple[Run, ...], ...]
    gpus: tuple[tuple[Gpu, ...], ...]
    allocation: Allocation
    loss: tuple[float, ...]
    loss_sd: tuple[float, ...]
    budget_mw: int
    shortfall_mw: int
    certified: Certified | None = None
    in_force: HeldCut | None = None


def candidates(state: State, config: Config, science: Science, site: SiteView) -> tuple[Candidate, ...]:
    """Those who ask, the admitted first, then the others as they came.

    A waiting run on GPUs of admitted ones asks for what both together need more, and only once Slurm has confirmed
    them all: the file of a run that ended may have stayed behind.
    """
    terms = _Terms(config, science, science.knowledge(state), site)
    groups = grouped(sorted(_of_phase(state, "admitted"), key=_admission_order))
    found = [one for views in groups if (one := terms.candidate(views)) is not None]
    if waiting := sorted(_of_phase(state, "waiting"), key=_admission_order):
        found.extend(_joining(terms, groups, waiting))
    return _indexed(found, terms.knowledge) if config.policy.name == "pfi" else tuple(found)


def _joining(
    terms: _Terms, groups: Sequence[list[RunView]], waiting: Sequence[RunView]
) -> Iterator[Candidate]:
    """Those who wait, each with the groups whose GPUs it has too."""
    group_of = {key: number for number, views in enumerate(groups) for view in views for key in gpus_of(view)}
    for view in waiting:
        met = sorted({group_of[key] for key in gpus_of(view) if key in group_of})
        whole = [one for number in met for one in groups[number]]
        if not all(confirmed(one) for one in whole):
            continue
        joining = terms.candidate(
            [*whole, view], waiting=True, joins=tuple(groups[number][0].run for number in met)
        )
        if joining is not None:
            claims = frozenset(key for one in (*whole, view) for key in gpus_of(one))
            yield replace(joining, claims=claims)


def _of_phase(state: State, phase: RunPhase) -> list[RunView]:
    return [view for view in state.runs.values() if view.phase == phase]


def _indexed(found: Sequence[Candidate], knowledge: Knowledge) -> tuple[Candidate, ...]:
    """The same with the PFI of each, all on one grid of caps."""
    indices = knowledge.indices([one.asked for one in found], [one.demand.draw_mw for one in found], GRID_W)
    return tuple(
        replace(one, demand=replace(one.demand, pfi=pfi)) for one, pfi in zip(found, indices, strict=True)
    )


def share(
    asking: Sequence[Candidate],
    policy: Policy,
    site: SiteView,
    step: ScheduleStep,
    knowledge: Knowledge,
    before: HeldCut | None = None,
) -> Shares:
    """Admit whom the budget of this limit step bears, and share it. Parked GPUs count at their park cap.

    To GPUs that others have or wait for comes one at a time: the first whose need fits, as with GPUs of one's own.

    ``marginal`` goes as far from the equal cut as what was learned certifies. ``before``: the cut that is in force;
    while the need is much the same it stays until another one is worth the move.
    """
    beside_mw = site.fixed_mw + site.constant_mw
    parked_mw = sum(gpu.park_mw for gpu in site.gpus.values() if gpu.commandable)
    budget_mw = (step.limit_mw or 0) - beside_mw - parked_mw
    hard_mw = None if step.emergency_mw is None else step.emergency_mw - beside_mw - parked_mw

    taken: dict[Run, Candidate] = {}
    claimed: set[GpuKey] = set()
    floors_mw = 0
    for asks in asking:
        if not claimed.isdisjoint(asks.claims):
            continue
        joined = [taken[run] for run in asks.joins if run in taken]
        one = _together(asks, joined)
        more_mw = one.floor_mw - sum(old.floor_mw for old in joined)
        # Once admitted its GPUs count at its own cap and no longer at the park cap.
        unparked_mw = one.park_mw - sum(old.park_mw for old in joined)
        if one.waiting and floors_mw + more_mw > budget_mw + unparked_mw:
            continue
        floors_mw += more_mw
        budget_mw += unparked_mw
        hard_mw = None if hard_mw is None else hard_mw + unparked_mw
        for old in joined:
            del taken[old.demand.run]
        taken[one.demand.run] = one
        claimed |= asks.claims

    admitted = tuple(taken.values())
    demands = tuple(one.demand for one in admitted)
    asked = [one.asked for one in admitted]

    certified: Certified | None = None
    in_force: HeldCut | None = None

    def cut(cuts: Cuts, need_mw: float, place: IntArray) -> FloatArray:
        nonlocal certified, in_force
        ordered = [asked[i] for i in place]
        runs = tuple(run for run, _ in ordered)
        held = None if before is None else before.of(runs)
        first = certified is None
        certified = knowledge.cut(ordered, cuts, need_mw, held)
        # An emergency cuts once more, past the floors: nothing to hold on to.
        in_force = HeldCut(runs, InForce(need_mw, certified)) if first else None
        return certified.reduction

    allocation = allocate(Problem(demands, budget_mw, hard_mw), policy, cut)
    # Curves are of mean draws, and so are the losses told; what is shared is counted with a margin above them.
    reductions = [1.0 - cap / one.mean_draw_mw for one, cap in zip(admitted, allocation.caps_mw, strict=True)]
    loss, loss_sd = knowledge.losses(asked, reductions)
    committed_mw = sum(d.gpus * cap for d, cap in zip(demands, allocation.caps_mw, strict=True))
    shortfall_mw = max(0, committed_mw - budget_mw)
    return Shares(
        demands=demands,
        members=tuple(one.members for one in admitted),
        gpus=tuple(one.gpus for one in admitted),
        allocation=allocation,
        loss=tuple(loss.tolist()),
        loss_sd=tuple(loss_sd.tolist()),
        budget_mw=budget_mw,
        shortfall_mw=shortfall_mw,
        certified=certified,
        in_force=in_force,
    )


def _together(asks: Candidate, joined: Sequence[Candidate]) -> Candidate:
    """Who asks, with no lower floor than the groups that it joins have: a rebound may have given them higher ones."""
    floor_mw = max((old.demand.floor_mw for old in joined), default=0)
    if floor_mw <= asks.demand.floor_mw:
        return asks
    demand = replace(asks.demand, floor_mw=floor_mw, draw_mw=max(asks.demand.draw_mw, floor_mw))
    return replace(asks, demand=demand, floor_mw=demand.gpus * _whole_watts_up(floor_mw))


def has_its_floor(view: RunView, state: State, config: Config, science: Science) -> bool:
    """Whether each of its GPUs stands at its floor or above, as it would be for a run of which nothing was seen."""
    reports = run_gpus(view, state.nodes)
    if not reports:
        return False
    least_mw = _of_stranger(view, reports, config, science).floor_mw - MW_PER_W
    return all(gpu.enforced_mw is not None and gpu.enforced_mw >= least_mw for gpu in reports)


def unreached_caps(state: State, config: Config, science: Science, site: SiteView) -> Caps:
    """Caps for admitted runs on GPUs that cannot be relied on: what was sent before, else their floor.

    Such GPUs are counted at their worst. A plan that came through all the same must not park the run.
    """
    caps: Caps = {}
    lost = {gpu.node for gpu in site.gpus.values() if not gpu.commandable}
    if not lost:
        return caps
    terms = _Terms(config, science, science.knowledge(state), site)
    for views in grouped(_of_phase(state, "admitted")):
        for view in views:
            for node in view.gpus.keys() & lost:
                gpus = gpus_on(view, node, site)
                if gpus and not any(gpu.commandable for gpu in gpus):
                    cap_mw = view.sent_mw.get(node)
                    if cap_mw is None:
                        cap_mw = lowest_cap_mw(terms.demand(views, gpus))
                    # Never a raise: no more than what each of these GPUs is counted at already.
                    bounds_mw = (gpu.worst_mw for gpu in gpus if gpu.worst_mw < prior_of(gpu.report))
                    caps[view.run, node] = min(cap_mw, *bounds_mw, cap_mw)
    return caps


@dataclass(frozen=True, slots=True)
class _Terms:
    """By what runs are counted in one cycle."""

    config: Config
    science: Science
    knowledge: Knowledge
    site: SiteView

    def candidate(
        self, views: Sequence[RunView], *, waiting: bool = False, joins: tuple[Run, ...] = ()
    ) -> Candidate | None:
        """These runs as one that asks; None where no plan reaches a GPU of theirs."""
        gpus = tuple({gpu.key: gpu for view in views for gpu in commandable_gpus(view, self.site)}.values())
        if not gpus:
            return None
        demand = self.demand(views, gpus)
        mean_draw_mw = views[0].record.mean_draw_mw if len(views) == 1 else None
        return Candidate(
            waiting=waiting,
            members=tuple(view.run for view in views),
            gpus=gpus,
            demand=demand,
            park_mw=sum(gpu.park_mw for gpu in gpus),
            floor_mw=demand.gpus * _whole_watts_up(demand.floor_mw),
            mean_draw_mw=mean_draw_mw or demand.draw_mw,
            joins=joins,
        )

    def demand(self, views: Sequence[RunView], gpus: Sequence[Gpu]) -> RunDemand:
        """What they need of these GPUs. Runs that share GPUs: the highest floor of all, none below the prior limit.

        What a board draws is no one run's, and what a run lost alone says little of what it loses beside others: so
        each counts as one of which nothing was seen.
        """
        reports = [gpu.report for gpu in gpus]
        if len(views) == 1:
            return _demand(views[0], reports, self.config, self.science, self.knowledge)
        demands = [_of_stranger(view, reports, self.config, self.science) for view in views]
        floor_mw = max(demand.floor_mw for demand in demands)
        return replace(demands[0], floor_mw=floor_mw, flex_none=any(demand.flex_none for demand in demands))


def _of_stranger(view: RunView, reports: list[GpuReport], config: Config, science: Science) -> RunDemand:
    """What it needs of these GPUs as a run of which nothing was seen."""
    return _demand(structs.replace(view, record=Record()), reports, config, science, science.ignorance)


def _demand(
    view: RunView, reports: list[GpuReport], config: Config, science: Science, knowledge: Knowledge
) -> RunDemand:
    reduction = 0.0
    if view.max_loss is not None:
        reduction = knowledge.greatest_reduction(view.run, reports[0].model, view.max_loss)
    return demand_of(view, reports, science.mean, reduction, config.policy.draw_margin)


def _admission_order(view: RunView) -> tuple[bool, int, Run]:
    return (view.phase == "waiting", view.first_seen_ns, view.run)


def _whole_watts_up(power_mw: int) -> int:
    return -(-power_mw // 1000) * 1000
