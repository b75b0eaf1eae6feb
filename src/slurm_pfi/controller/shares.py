"""Who asks for watts, and what one limit step gives each: runs are admitted as far as the budget bears their floors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..allocation.guard import Certified, InForce
from ..allocation.policies import allocate
from ..allocation.problem import Allocation, Policy, Problem, RunDemand
from ..allocation.rounding import lowest_cap_mw
from ..allocation.solve import Shares as Cuts
from ..config import Config
from ..elasticity.curve import FloatArray, IntArray
from ..model import GpuReport, Run
from ..store.limits import ScheduleStep
from .budget import Gpu, GpuKey, SiteView, commandable_gpus, gpus_of, gpus_on
from .dispatch import Caps
from .knowledge import Asked, HeldCut, Knowledge
from .ledger import prior_of
from .runs import demand_of
from .science import GRID_W, Science
from .state import RunView, State


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run that a plan can reach, admitted or waiting for power. The same under every limit.

    ``mean_draw_mw``: its baseline draw per GPU while it works; that of the demand where none is known.
    """

    waiting: bool
    gpus: tuple[Gpu, ...]
    demand: RunDemand
    park_mw: int
    floor_mw: int
    mean_draw_mw: int

    @property
    def asked(self) -> Asked:
        return self.demand.run, self.gpus[0].report.model


@dataclass(frozen=True, slots=True)
class Shares:
    """What one limit step gives each run: target caps, what they are expected to lose, and what is missing.

    ``loss`` (0..1) and ``loss_sd`` go by what was learned of each run. ``certified``: how far ``marginal`` went from
    the equal cut and why; None where nothing had to be decided, or by another policy. ``in_force``: the same for the
    next plan to hold on to.
    """

    demands: tuple[RunDemand, ...]
    gpus: tuple[tuple[Gpu, ...], ...]
    allocation: Allocation
    loss: tuple[float, ...]
    loss_sd: tuple[float, ...]
    budget_mw: int
    shortfall_mw: int
    certified: Certified | None = None
    in_force: HeldCut | None = None


def candidates(state: State, config: Config, science: Science, site: SiteView) -> tuple[Candidate, ...]:
    """Those who ask, the admitted first, then the others as they came. A waiting run on another's GPU does not ask."""
    knowledge = science.knowledge(state)
    found: list[Candidate] = []
    claimed: set[GpuKey] = set()
    for view in state.runs.values():
        if view.phase == "admitted":
            claimed |= gpus_of(view)
    asking = (view for view in state.runs.values() if view.phase in ("admitted", "waiting"))
    for view in sorted(asking, key=_admission_order):
        gpus = tuple(commandable_gpus(view, site))
        if not gpus:
            continue
        keys = gpus_of(view)
        waiting = view.phase == "waiting"
        if waiting:
            if not claimed.isdisjoint(keys):
                continue  # they are another's still: it runs under that one's cap
            claimed |= keys
        demand = _demand(view, gpus, config, science, knowledge)
        park_mw = sum(gpu.park_mw for gpu in gpus)
        floor_mw = demand.gpus * _whole_watts_up(demand.floor_mw)
        mean_draw_mw = view.record.mean_draw_mw or demand.draw_mw
        found.append(Candidate(waiting, gpus, demand, park_mw, floor_mw, mean_draw_mw))
    return _indexed(found, knowledge) if config.policy.name == "pfi" else tuple(found)


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

    ``marginal`` goes as far from the equal cut as what was learned certifies. ``before``: the cut that is in force;
    while the need is much the same it stays until another one is worth the move.
    """
    taken_mw = site.fixed_mw + site.constant_mw
    parked_mw = sum(gpu.park_mw for gpu in site.gpus.values() if gpu.commandable)
    budget_mw = (step.limit_mw or 0) - taken_mw - parked_mw
    hard_mw = None if step.emergency_mw is None else step.emergency_mw - taken_mw - parked_mw

    admitted: list[Candidate] = []
    floors_mw = 0
    for one in asking:
        # Once admitted its GPUs count at its own cap and no longer at the park cap.
        if one.waiting and floors_mw + one.floor_mw > budget_mw + one.park_mw:
            continue
        floors_mw += one.floor_mw
        budget_mw += one.park_mw
        hard_mw = None if hard_mw is None else hard_mw + one.park_mw
        admitted.append(one)

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
        gpus=tuple(one.gpus for one in admitted),
        allocation=allocation,
        loss=tuple(loss.tolist()),
        loss_sd=tuple(loss_sd.tolist()),
        budget_mw=budget_mw,
        shortfall_mw=shortfall_mw,
        certified=certified,
        in_force=in_force,
    )


def unreached_caps(state: State, config: Config, science: Science, site: SiteView) -> Caps:
    """Caps for admitted runs on GPUs that cannot be relied on: what was sent before, else their floor.

    Such GPUs are counted at their worst. A plan that came through all the same must not park the run.
    """
    caps: Caps = {}
    for view in state.runs.values():
        if view.phase != "admitted":
            continue
        for node in view.gpus:
            gpus = gpus_on(view, node, site)
            if gpus and not any(gpu.commandable for gpu in gpus):
                cap_mw = view.sent_mw.get(node)
                if cap_mw is None:
                    cap_mw = lowest_cap_mw(_demand(view, gpus, config, science, science.knowledge(state)))
                # Never a raise: no more than what each of these GPUs is counted at already.
                bounds_mw = (gpu.worst_mw for gpu in gpus if gpu.worst_mw < prior_of(gpu.report))
                caps[view.run, node] = min(cap_mw, *bounds_mw, cap_mw)
    return caps


def _demand(
    view: RunView, gpus: Sequence[Gpu], config: Config, science: Science, knowledge: Knowledge
) -> RunDemand:
    reports: list[GpuReport] = [gpu.report for gpu in gpus]
    reduction = 0.0
    if view.flex is not None:
        reduction = knowledge.greatest_reduction(view.run, reports[0].model, view.flex.max_loss)
    return demand_of(view, reports, science.mean, reduction, config.policy.draw_margin)


def _admission_order(view: RunView) -> tuple[bool, int, Run]:
    return (view.phase == "waiting", view.first_seen_ns, view.run)


def _whole_watts_up(power_mw: int) -> int:
    return -(-power_mw // 1000) * 1000
