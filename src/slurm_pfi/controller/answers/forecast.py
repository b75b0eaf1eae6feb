"""What a limit would cost, without touching anything: the answer of ``slurm-pfi what-if``. Pure.

It asks the same ``share`` that a window asks, so the caps it shows are those that the limit would bring. Everything is
a figure of the site as it would be uncapped, also while a window is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ...allocation.problem import Policy
from ...allocation.rounding import lowest_cap_mw
from ...config import Config
from ...elasticity.curve import FloatArray, IntArray
from ...elasticity.posterior import Posterior
from ...model import Run
from ...store.limits import ScheduleStep
from ...units import Z95, watts_to_mw
from ..boards import GpuKey, gpus_of, shared_runs
from ..budget import Gpu, SiteView, look, node_answers
from ..knowledge import Knowledge
from ..ledger import default_worst_mw, missing_gpus_mw, prior_of
from ..science import Science
from ..shares import Candidate, Shares, candidates, share
from ..state import RunView, State
from .forecast_values import (
    Baseline,
    Certificate,
    Estimate,
    RunForecast,
    Standing,
    Target,
    UncappedDraw,
    WhatIf,
)

UNBOUND_SHARE: Final = 0.9
"""A GPU that draws less than this share of its limit is not held by it: what it draws is what it would draw."""

NOT_CUT: Final = 1e-9


@dataclass(frozen=True, eq=False)
class Basis:
    """The site as one forecast sees it, worked out once for all limits that are tried on it."""

    state: State
    config: Config
    site: SiteView
    knowledge: Knowledge
    asking: tuple[Candidate, ...]
    baselines: dict[Run, Baseline]
    uncapped: UncappedDraw
    draws_mw: dict[GpuKey, int]
    standing: Standing

    def shares(self, limit_mw: int, policy: Policy | None = None, *, emergency: bool = False) -> Shares:
        """What this limit alone would give each run."""
        step = ScheduleStep(0.0, limit_mw, limit_mw if emergency else None)
        return share(self.asking, policy or self.config.policy.name, self.site, step, self.knowledge)


@dataclass(frozen=True, eq=False)
class Cut:
    """What a limit does to the runs: arrays of shape (runs,), in the order of ``shares.demands``.

    ``draw_mw``: uncapped draw of one GPU; ``reduction``: of it, 0 where the cap does not bind.
    """

    shares: Shares
    rows: IntArray
    gpus: FloatArray
    draw_mw: FloatArray
    reduction: FloatArray
    posterior: Posterior

    @property
    def given_mw(self) -> FloatArray:
        """What each run gives up, all its GPUs together."""
        given: FloatArray = self.gpus * self.draw_mw * self.reduction
        return given


def what_if(state: State, config: Config, science: Science, target: Target, now_ns: int) -> WhatIf:
    """What this limit would do if it were in force now, and alone. Changes nothing."""
    basis = look_at(state, config, science, now_ns)
    total_mw = basis.uncapped.total_mw
    if target.limit_mw is not None:
        less_mw = total_mw - target.limit_mw
    elif target.less_mw is not None:
        less_mw = target.less_mw
    else:
        less_mw = round(total_mw * (target.share or 0.0))
    limit_mw = max(0, total_mw - less_mw)
    binds = limit_mw < basis.site.uncapped_worst_mw
    # A limit that opens no window leaves every cap where it is.
    shares = basis.shares(limit_mw if binds else basis.site.uncapped_worst_mw, emergency=target.emergency)
    missing_mw = shares.shortfall_mw + max(0, less_mw - total_mw) if binds else 0
    emergency_mw = None
    if missing_mw and not target.emergency:
        emergency_mw = basis.shares(limit_mw, emergency=True).shortfall_mw + max(0, less_mw - total_mw)
    made = cut_of(basis, shares)
    parked = _parked(basis, shares)
    waiting = tuple(one.members[-1] for one in _left_waiting(basis, shares)) if binds else ()
    return WhatIf(
        target=target,
        limit_mw=limit_mw,
        asked_less_mw=less_mw,
        uncapped=basis.uncapped,
        uncapped_mw=total_mw,
        worst_mw=basis.site.uncapped_worst_mw,
        binds=binds,
        feasible=not missing_mw and basis.site.uncapped_worst_mw > 0,
        shortfall_mw=missing_mw,
        least_limit_mw=limit_mw + shares.shortfall_mw
        if missing_mw
        else least_limit_mw(basis, emergency=target.emergency),
        emergency_shortfall_mw=emergency_mw,
        runs=_forecasts(basis, made) if binds else (),
        gpus=round(float(made.gpus.sum())),
        loss=total_loss(basis, made),
        waiting=tuple(str(run) for run in waiting),
        parked_gpus=len(parked),
        parked_mw=sum(gpu.park_mw for gpu in parked),
        parked_draw_mw=sum(basis.draws_mw[gpu.key] for gpu in parked),
        certificate=_certificate(basis, made, limit_mw, emergency=target.emergency) if binds else _UNCUT,
        standing=basis.standing,
        names=names_of(state, waiting),
    )


_UNCUT: Final = Certificate(informed=False, step=None, gain=None)


def names_of(state: State, runs: Iterable[Run]) -> dict[str, str]:
    """How Slurm's commands name those of the runs that are a task or a component, by run."""
    specs = ((run, state.runs[run].spec) for run in runs)
    return {str(run): spec for run, spec in specs if spec != str(run.job_id)}


def least_limit_mw(basis: Basis, *, emergency: bool = False) -> int:
    """The lowest limit that can be held: every run that is admitted now at its floor (emergency: its minimum)."""
    return basis.shares(0, emergency=emergency).shortfall_mw


# --------------------------------------------------------------------------------------------- the site uncapped


def look_at(state: State, config: Config, science: Science, now_ns: int) -> Basis:
    """Gather what every limit is judged by."""
    site = look(state, config, now_ns)
    # A copy with cuts of its own: what is only asked must not push out what the controller remembers of its windows.
    knowledge = replace(science.knowledge(state))
    asking = candidates(state, config, science, site)
    silent = tuple(node.name for node in state.nodes.values() if not node_answers(node, config, now_ns))
    running = [run for run, view in state.runs.items() if view.phase in ("admitted", "waiting")]
    shared = shared_runs(state)
    baselines = {run: ("bounded", None) if run in shared else _baseline(state.runs[run]) for run in running}
    draws_mw, uncapped = _uncapped(state, config, site, baselines, frozenset(silent))
    reached = {run for one in asking for run in one.members}
    unreached = tuple(run for run in running if run not in reached)
    standing = Standing(
        cluster=config.cluster,
        policy=config.policy.name,
        window_mw=None if state.window is None else state.window.limit_mw,
        off=state.off,
        limits_known=state.limits_known,
        enforces=any(node.mode == "enforce" for node in state.nodes.values()),
        simulated=config.simulated,
        silent=silent,
        unreached=tuple(str(run) for run in unreached),
        names=names_of(state, unreached),
    )
    return Basis(state, config, site, knowledge, asking, baselines, uncapped, draws_mw, standing)


def _baseline(view: RunView) -> Baseline:
    draw_mw = view.record.mean_draw_mw
    return ("bounded", None) if draw_mw is None else (view.record.source, draw_mw)


def _uncapped(
    state: State, config: Config, site: SiteView, baselines: dict[Run, Baseline], silent: frozenset[str]
) -> tuple[dict[GpuKey, int], UncappedDraw]:
    """The uncapped draw of every reported GPU, and the sums by how they are known."""
    of_run: dict[GpuKey, Baseline] = {}
    for run, known in baselines.items():
        for key in gpus_of(state.runs[run]):
            of_run.setdefault(key, known)
    draws_mw: dict[GpuKey, int] = {}
    sums = dict.fromkeys(("known", "bounded", "idle", "unread", "silent"), 0)
    for key, gpu in site.gpus.items():
        if gpu.node in silent:
            draws_mw[key] = max(prior_of(gpu.report), gpu.worst_mw)
            continue
        kind, draws_mw[key] = _uncapped_gpu(gpu, of_run.get(key))
        sums[kind] += draws_mw[key]
    for node in state.nodes.values():
        sums["silent"] += default_worst_mw(node) if node.name in silent else missing_gpus_mw(node)
    beside_mw = site.fixed_mw - watts_to_mw(config.policy.reserve_w)
    return draws_mw, UncappedDraw(
        known_mw=sums["known"],
        bounded_mw=sums["bounded"],
        idle_mw=sums["idle"],
        unread_mw=sums["unread"],
        silent_mw=sums["silent"],
        beside_mw=beside_mw,
    )


def _uncapped_gpu(gpu: Gpu, known: Baseline | None) -> tuple[str, int]:
    report, prior_mw = gpu.report, prior_of(gpu.report)
    if known is not None:
        _, draw_mw = known
        if draw_mw is None:
            return "bounded", prior_mw
        return "known", min(draw_mw, prior_mw)
    free = report.draw_mw is not None and (
        report.draw_mw < UNBOUND_SHARE * (report.enforced_mw or 0) or (report.enforced_mw or 0) >= prior_mw
    )
    return ("idle", report.draw_mw) if free and report.draw_mw is not None else ("unread", prior_mw)


# --------------------------------------------------------------------------------------------- what a limit does


def cut_of(basis: Basis, shares: Shares) -> Cut:
    """The caps as reductions of what each run would draw."""
    draws: list[int] = []
    for demand, gpus in zip(shares.demands, shares.gpus, strict=True):
        _, known_mw = basis.baselines[demand.run]
        prior_mw = max(prior_of(gpu.report) for gpu in gpus)
        draws.append(prior_mw if known_mw is None else max(1, min(known_mw, prior_mw)))
    draw_mw = np.array(draws, dtype=np.float64)
    caps = np.array(shares.allocation.caps_mw, dtype=np.float64)
    rows = np.array(
        [
            basis.knowledge.row(demand.run, gpus[0].report.model)
            for demand, gpus in zip(shares.demands, shares.gpus, strict=True)
        ],
        dtype=np.intp,
    )
    return Cut(
        shares=shares,
        rows=rows,
        gpus=np.array([demand.gpus for demand in shares.demands], dtype=np.float64),
        draw_mw=draw_mw,
        reduction=np.clip(1.0 - caps / draw_mw, 0.0, 1.0),
        posterior=basis.knowledge.sharing.take(rows),
    )


def losses(basis: Basis, made: Cut) -> tuple[FloatArray, FloatArray]:
    """Expected loss of each run and its standard deviation, (runs,)."""
    asked = [(d.run, g[0].report.model) for d, g in zip(made.shares.demands, made.shares.gpus, strict=True)]
    return basis.knowledge.losses(asked, made.reduction.tolist())


def total_loss(basis: Basis, made: Cut) -> Estimate | None:
    """Loss of all throughput, each GPU-hour alike. Errors that runs have in common do not average out in it."""
    if not made.gpus.size:
        return None
    mean, _ = losses(basis, made)
    _, sd = made.posterior.gain(made.reduction, np.zeros_like(made.reduction), made.gpus)
    whole = float(made.gpus.sum())
    return _within(float((made.gpus * mean).sum()) / whole, sd / whole)


def _within(mean: float, sd: float) -> Estimate:
    """A share with its interval, which ends where shares end."""
    low, high = mean - Z95 * sd, mean + Z95 * sd
    return Estimate(expected=mean, low=max(0.0, low), high=min(1.0, high))


def _forecasts(basis: Basis, made: Cut) -> tuple[RunForecast, ...]:
    mean, sd = (values.tolist() for values in losses(basis, made))
    passed = frozenset(made.shares.allocation.floor_passed)
    caps_mw, draws_mw, reductions = (
        made.shares.allocation.caps_mw,
        made.draw_mw.tolist(),
        made.reduction.tolist(),
    )
    found: list[RunForecast] = []
    each = ((i, run) for i, members in enumerate(made.shares.members) for run in members)
    for i, run in each:
        demand, view, source = made.shares.demands[i], basis.state.runs[run], basis.baselines[run][0]
        found.append(
            RunForecast(
                run=str(run),
                spec=view.spec,
                job_id=run.job_id,
                restart=run.restart,
                user=None if view.job is None else view.job.user_name,
                flex=None if view.flex is None else view.flex.text,
                gpus=demand.gpus if len(made.shares.members[i]) == 1 else len(gpus_of(view)),
                baseline=source,
                measured=not view.shares and basis.knowledge.is_learned(run),
                draw_mw=round(draws_mw[i]),
                cap_mw=caps_mw[i],
                floor_mw=demand.floor_mw,
                reduction=reductions[i],
                loss=_within(mean[i], sd[i]),
                at_floor=caps_mw[i] <= lowest_cap_mw(demand),
                floor_passed=demand.run in passed,
            )
        )
    return tuple(found)


def _certificate(basis: Basis, made: Cut, limit_mw: int, *, emergency: bool) -> Certificate:
    if not made.gpus.size or made.reduction.max() < NOT_CUT:
        return _UNCUT
    certified, informed = made.shares.certified, made.posterior.informed
    whole = float(made.gpus.sum())
    if certified is not None and not emergency:
        return Certificate(
            informed=informed,
            step=certified.step,
            gain=_gain(certified.gain / whole, certified.gain_sd / whole),
        )
    alike = cut_of(basis, basis.shares(limit_mw, "equal", emergency=emergency))
    saved, sd = 0.0, 0.0
    if made.shares.allocation.caps_mw != alike.shares.allocation.caps_mw:
        saved, sd = made.posterior.gain(alike.reduction, made.reduction, made.gpus)
    return Certificate(
        informed=informed,
        step=None if certified is None else certified.step,
        gain=_gain(saved / whole, sd / whole),
    )


def _gain(mean: float, sd: float) -> Estimate:
    return Estimate(expected=mean, low=mean - Z95 * sd, high=mean + Z95 * sd)


def _left_waiting(basis: Basis, shares: Shares) -> Sequence[Candidate]:
    """Runs that wait for power and whose floor this limit does not bear either."""
    admitted = {run for members in shares.members for run in members}
    return [one for one in basis.asking if one.members[-1] not in admitted]


def _parked(basis: Basis, shares: Shares) -> list[Gpu]:
    """GPUs that the limit would hold at their park cap."""
    of_runs = {gpu.key for gpus in shares.gpus for gpu in gpus}
    return [gpu for key, gpu in basis.site.gpus.items() if gpu.commandable and key not in of_runs]
