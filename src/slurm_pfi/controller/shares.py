"""Who asks for watts, and what one limit step gives each: runs are admitted as far as the budget bears their floors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..allocation.policies import allocate
from ..allocation.problem import Allocation, Policy, Problem, RunDemand
from ..allocation.rounding import lowest_cap_mw
from ..config import Config
from ..model import GpuReport, Run
from ..store.limits import ScheduleStep
from .budget import Gpu, GpuKey, SiteView, commandable_gpus, gpus_of, gpus_on
from .dispatch import Caps
from .ledger import prior_of
from .runs import demand_of
from .science import Science
from .state import RunView, State


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run that a plan can reach, admitted or waiting for power. The same under every limit."""

    waiting: bool
    gpus: tuple[Gpu, ...]
    demand: RunDemand
    park_mw: int
    floor_mw: int


@dataclass(frozen=True, slots=True)
class Shares:
    """What one limit step gives each run: target caps, and what is missing."""

    demands: tuple[RunDemand, ...]
    gpus: tuple[tuple[Gpu, ...], ...]
    allocation: Allocation
    budget_mw: int
    shortfall_mw: int


def candidates(state: State, config: Config, science: Science, site: SiteView) -> tuple[Candidate, ...]:
    """Those who ask, the admitted first, then the others as they came. A waiting run on another's GPU does not ask."""
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
        demand = _demand(view, gpus, config, science)
        park_mw = sum(gpu.park_mw for gpu in gpus)
        floor_mw = demand.gpus * _whole_watts_up(demand.floor_mw)
        found.append(Candidate(waiting, gpus, demand, park_mw, floor_mw))
    return tuple(found)


def share(asking: Sequence[Candidate], policy: Policy, site: SiteView, step: ScheduleStep) -> Shares:
    """Admit whom the budget of this limit step bears, and share it. Parked GPUs count at their park cap."""
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
    allocation = allocate(Problem(demands, budget_mw, hard_mw), policy)
    committed_mw = sum(d.gpus * cap for d, cap in zip(demands, allocation.caps_mw, strict=True))
    shortfall_mw = max(0, committed_mw - budget_mw)
    return Shares(demands, tuple(one.gpus for one in admitted), allocation, budget_mw, shortfall_mw)


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
                    cap_mw = lowest_cap_mw(_demand(view, gpus, config, science))
                # Never a raise: no more than what each of these GPUs is counted at already.
                bounds_mw = (gpu.worst_mw for gpu in gpus if gpu.worst_mw < prior_of(gpu.report))
                caps[view.run, node] = min(cap_mw, *bounds_mw, cap_mw)
    return caps


def _demand(view: RunView, gpus: Sequence[Gpu], config: Config, science: Science) -> RunDemand:
    reports: list[GpuReport] = [gpu.report for gpu in gpus]
    reduction = 0.0 if view.flex is None else science.greatest_reduction(view.flex.max_loss)
    return demand_of(view, reports, science.mean, reduction, config.policy.draw_margin)


def _admission_order(view: RunView) -> tuple[bool, int, Run]:
    return (view.phase == "waiting", view.first_seen_ns, view.run)


def _whole_watts_up(power_mw: int) -> int:
    return -(-power_mw // 1000) * 1000
