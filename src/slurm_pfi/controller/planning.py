"""One cycle: limits and reports in, plans out. Pure: everything it needs is in its arguments."""

from __future__ import annotations

import msgspec

from ..allocation.transition import HeldCap, next_caps
from ..config import Config
from ..model import Run
from ..store.limits import ScheduleStep, binding_ids, schedule
from ..units import format_power
from . import rebound
from .announce import admission_audits, floor_audits, late_starters
from .boards import GpuKey, gpus_of
from .budget import Gpu, SiteView, gpus_on, look
from .dispatch import Caps, CapsStep, dispatch
from .ledger import STEP_MARGIN_S
from .science import Science
from .shares import Shares, candidates, share, unreached_caps
from .state import Action, Audit, RunView, State, WindowView

HOLD_MARGIN_S = 10.0
SHORTFALL_STEP_MW = 1000  # a shortfall that shrinks is told anew by the watt, one that grows at once


def plan_cycle(
    state: State, config: Config, science: Science, now_ns: int, now_unix_s: float
) -> tuple[State, list[Action]]:
    """Work out every cap anew and the plans that lead there safely.

    With limits that could not be read nothing changes: the last plans stay in force on the nodes.
    """
    if not state.limits_known and not state.off:
        return state, []
    steps = (
        (ScheduleStep(starts_in_s=0.0, limit_mw=None, emergency_mw=None),)
        if state.off
        else schedule(
            # Short of the end of a lease, so that no step begins together with it.
            state.limits,
            now_unix_s,
            horizon_s=max(0.0, config.times.max_hold_s - HOLD_MARGIN_S),
            lead_s=config.times.response_s,
        )
    )
    site = look(state, config, now_ns, _early_s(state, config, now_unix_s))
    binding = [site.is_bound(step) for step in steps]
    ids = binding_ids(state.limits, now_unix_s, config.times.response_s) if binding[0] else ()
    held = _rebound(state, config, science, site, now_ns, window=binding[0])
    if held is not None and not (binding[0] and (steps[0].limit_mw or 0) < held.limit_mw):
        steps = rebound.steps_of(held, steps, binding, now_ns)
        return _open(state, config, science, site, steps, now_ns, held=held)
    if binding[0]:
        return _open(state, config, science, site, steps, now_ns, ids=ids)
    return _closed(state, config, science, site, steps, now_ns)


def _rebound(
    state: State, config: Config, science: Science, site: SiteView, now_ns: int, *, window: bool
) -> rebound.Hold | None:
    """The rebound that is under way or begins; a ``window`` that a limit opens begins none."""
    if state.off or config.times.rebound_s == 0:
        return None
    if state.rebound is None and (window or not rebound.begins(state, config, site)):
        return None
    return rebound.hold(state, config, site, candidates(state, config, science, site), now_ns)


def _early_s(state: State, config: Config, now_unix_s: float) -> float:
    """How long before a node raises by its own schedule the others must make room for it.

    The response time, for a node that did not hear that the limit, or the rebound after it, goes on; a moment, where it
    ends for all.
    """
    response_s = config.times.response_s
    then = schedule(state.limits, now_unix_s + response_s, horizon_s=0.0, lead_s=0.0)[0]
    ends = then.limit_mw is None and config.times.rebound_s == 0
    return STEP_MARGIN_S if state.off or ends else response_s


# ------------------------------------------------------------------------------------------------ no window


def _closed(
    state: State,
    config: Config,
    science: Science,
    site: SiteView,
    steps: tuple[ScheduleStep, ...],
    now_ns: int,
) -> tuple[State, list[Action]]:
    actions = _ended(state) + rebound.told(state.rebound, None, now_ns)[1]
    # Without a window whoever waits for power, waits no longer.
    runs = {
        run: msgspec.structs.replace(
            _uncommanded(view),
            phase="admitted" if view.phase == "waiting" else view.phase,
            started_in_window=False,
            breach_told=False,
        )
        for run, view in state.runs.items()
    }
    actions.extend(admission_audits(state.runs, runs))
    state = msgspec.structs.replace(
        state, window=None, cut=None, rebound=None, runs=runs, infeasible_said=(0, ())
    )
    if config.times.rebound_s:
        state = rebound.observe_draws(state, config, now_ns)
    now = CapsStep(0.0, {}, parked=False)
    ahead = _steps_ahead(state, config, science, site, steps, now)
    state, sent = dispatch(state, config, (now, *ahead), "no window", now_ns)
    return state, actions + sent


# ------------------------------------------------------------------------------------------------ a window


def _open(
    state: State,
    config: Config,
    science: Science,
    site: SiteView,
    steps: tuple[ScheduleStep, ...],
    now_ns: int,
    *,
    ids: tuple[str, ...] = (),
    held: rebound.Hold | None = None,
) -> tuple[State, list[Action]]:
    """``ids``: the limits that bind. ``held``: the rebound in their place, never short: it promised nothing."""
    asking = candidates(state, config, science, site) if held is None else held.asking
    # A rebound gives back by loss per watt, second by second: there is nothing to hold on to.
    before = state.cut if held is None else None
    shares = share(asking, config.policy.name, site, steps[0], science.knowledge(state), before)
    caps = _safe_caps(state, site, shares)
    limit_mw = steps[0].limit_mw or 0
    last = state.window
    window = WindowView(
        limit_mw=limit_mw,
        limit_ids=ids,
        budget_mw=limit_mw - site.fixed_mw,
        committed_mw=_committed(site, shares),
        shortfall_mw=shares.shortfall_mw,
        silent=site.silent,
        opened_ns=now_ns if last is None or last.rebound != (held is not None) else last.opened_ns,
        rebound=held is not None,
        until_ns=None if held is None else held.rebound.until_ns,
        rebound_mw=None if held is None else held.before_mw,
    )
    under_way, told = rebound.told(state.rebound, held, now_ns)
    actions = told if held is None else _ended(state) + told
    known = None if last is None or last.rebound else (last.limit_mw, last.limit_ids)
    if held is None and known != (window.limit_mw, window.limit_ids):
        fields: dict[str, object] = {
            "open": True,
            "limit_mw": window.limit_mw,
            "budget_mw": window.budget_mw,
            "committed_mw": window.committed_mw,
        }
        actions.append(Audit(event="window", fields=fields))
    runs = _runs_after(state, shares, caps, held)
    actions.extend(admission_audits(state.runs, runs))
    said, told = _shortfall_told(state.infeasible_said, shares, site, told=held is None)
    actions.extend(told)
    actions.extend(floor_audits(state.runs, runs))
    runs, breaches = late_starters(runs, config, now_ns)
    actions.extend(breaches)
    state = msgspec.structs.replace(
        state,
        window=window,
        cut=shares.in_force,
        rebound=under_way,
        draws=(),
        draw_before=rebound.draw_before(state),
        runs=runs,
        infeasible_said=said,
    )
    first = CapsStep(0.0, {**unreached_caps(state, config, science, site), **caps}, parked=True)
    ahead = _steps_ahead(state, config, science, site, steps, first)
    reason = f"limit {format_power(limit_mw)}" if held is None else "rebound after a window"
    state, sent = dispatch(state, config, (first, *ahead), reason, now_ns)
    return state, actions + sent


def _ended(state: State) -> list[Action]:
    """What the audit is told when no limit binds any more."""
    open_until_now = state.window is not None and not state.window.rebound
    return [Audit(event="window", fields={"open": False})] if open_until_now else []


def _shortfall_told(
    said: tuple[int, tuple[str, ...]], shares: Shares, site: SiteView, *, told: bool
) -> tuple[tuple[int, tuple[str, ...]], list[Action]]:
    """What is missing now, and the audit's words for it where it has changed; with ``told`` False never any."""
    short_mw = shares.shortfall_mw if told else 0
    if not short_mw:
        return (0, ()), [Audit(event="feasible", fields={})] if told and said[0] else []
    if site.silent == said[1] and said[0] - SHORTFALL_STEP_MW <= short_mw <= said[0]:
        return said, []
    fields: dict[str, object] = {"shortfall_mw": short_mw, "silent": list(site.silent)}
    return (short_mw, site.silent), [Audit(event="infeasible", fields=fields)]


def _safe_caps(state: State, site: SiteView, shares: Shares) -> Caps:
    """The caps to send now: lowerings in full, raises only into what acknowledged lowerings have freed.

    Each node of a run steps on its own towards the run's one cap: a node that reports late stays parked until there
    is room for it. Where nothing is enforced anywhere, the targets themselves are shown.
    """
    if all(node.mode == "observe" for node in state.nodes.values()):
        return _targets(state, shares)
    parts: dict[tuple[int, str, int | None], list[Gpu]] = {}
    for i, (runs, gpus) in enumerate(zip(shares.members, shares.gpus, strict=True)):
        alone = state.runs[runs[0]].sent_mw if len(runs) == 1 else None
        for gpu in gpus:
            last_mw = _sent_mw(state, runs, gpu) if alone is None else alone.get(gpu.node)
            parts.setdefault((i, gpu.node, last_mw), []).append(gpu)
    of_runs = {gpu.key for gpus in shares.gpus for gpu in gpus}
    others_mw = sum(
        max(gpu.worst_mw, gpu.park_mw)
        for key, gpu in site.gpus.items()
        if gpu.commandable and key not in of_runs
    )
    held: list[HeldCap] = []
    constant_mw = 0
    for (i, node, last_mw), reached in parts.items():
        sent_mw = last_mw
        if sent_mw is None:
            sent_mw = max(gpu.report.requested_mw or gpu.report.max_mw for gpu in reached)
        # A faulty GPU beside them is counted among the constants; but it may recover, and then follows this cap too.
        near = (gpu for run in shares.members[i] for gpu in gpus_on(state.runs[run], node, site))
        beside = {gpu.key: gpu for gpu in near if not gpu.commandable}
        constant_mw += sum(gpu.worst_mw for gpu in beside.values())
        worst_mw = tuple(gpu.worst_mw for gpu in (*reached, *beside.values()))
        held.append(HeldCap(shares.demands[i].run, worst_mw, shares.allocation.caps_mw[i], sent_mw))
    # share() left the runs' own park caps in its budget; what remains beside them are the others, at their worst.
    parked_mw = sum(gpu.park_mw for gpu in site.gpus.values() if gpu.commandable) - sum(
        gpu.park_mw for gpus in shares.gpus for gpu in gpus
    )
    budget_mw = shares.budget_mw + shares.shortfall_mw + parked_mw - others_mw + constant_mw
    made: Caps = {}
    of_gpu: dict[GpuKey, int] = {}
    for ((i, node, _), reached), cap_mw in zip(parts.items(), next_caps(held, budget_mw), strict=True):
        if len(shares.members[i]) == 1:
            made[shares.members[i][0], node] = cap_mw
        else:
            of_gpu.update((gpu.key, cap_mw) for gpu in reached)
    # A GPU stands at the highest cap of its runs: so each run has the lowest that any GPU of its may stand at now.
    made.update(
        ((run, node), min(caps))
        for runs in shares.members
        if len(runs) > 1
        for run in runs
        for node, uuids in state.runs[run].gpus.items()
        if (caps := [of_gpu[node, uuid] for uuid in uuids if (node, uuid) in of_gpu])
    )
    return made


def _sent_mw(state: State, runs: tuple[Run, ...], gpu: Gpu) -> int | None:
    """The highest cap that was sent last for this GPU, as one of these runs'; None if there was none."""
    views = (state.runs[run] for run in runs)
    here = (view for view in views if gpu.report.uuid in view.gpus.get(gpu.node, ()))
    sent = (view.sent_mw.get(gpu.node) for view in here)
    return max((cap_mw for cap_mw in sent if cap_mw is not None), default=None)


def _targets(state: State, shares: Shares) -> Caps:
    """The cap that each run comes to on each of its nodes that a plan can reach."""
    targets: Caps = {}
    for runs, gpus, cap_mw in zip(shares.members, shares.gpus, shares.allocation.caps_mw, strict=True):
        if len(runs) == 1:
            targets.update(((runs[0], gpu.node), cap_mw) for gpu in gpus)
            continue
        reached = {gpu.key for gpu in gpus}
        for run in runs:
            targets.update(((run, node), cap_mw) for node, _ in gpus_of(state.runs[run]) & reached)
    return targets


def _committed(site: SiteView, shares: Shares) -> int:
    """The sum of all caps that are aimed at, with everything that cannot be commanded at its worst."""
    of_runs = {gpu.key for gpus in shares.gpus for gpu in gpus}
    parked_mw = sum(gpu.park_mw for key, gpu in site.gpus.items() if gpu.commandable and key not in of_runs)
    runs_mw = sum(d.gpus * cap for d, cap in zip(shares.demands, shares.allocation.caps_mw, strict=True))
    return site.constant_mw + parked_mw + runs_mw


def _runs_after(state: State, shares: Shares, caps: Caps, held: rebound.Hold | None) -> dict[Run, RunView]:
    """The runs with what was planned. A rebound shares above higher floors than were promised: those are not told."""
    runs = dict(state.runs)
    sent: dict[Run, dict[str, int]] = {}
    for (run, node), cap_mw in caps.items():
        sent.setdefault(run, {})[node] = cap_mw
    place = {run: i for i, members in enumerate(shares.members) for run in members}
    for run, view in state.runs.items():
        i = place.get(run)
        if i is None:
            if view.phase == "waiting":
                runs[run] = _uncommanded(view)
            continue
        demand, members = shares.demands[i], shares.members[i]
        floor_mw = demand.floor_mw if held is None else held.floors_mw.get(members, demand.floor_mw)
        runs[run] = msgspec.structs.replace(
            view,
            phase="admitted",
            sent_mw={
                **{node: cap for node, cap in view.sent_mw.items() if node in view.gpus},
                **sent.get(run, {}),
            },
            target_cap_mw=shares.allocation.caps_mw[i],
            floor_mw=floor_mw,
            expected_loss=shares.loss[i],
            expected_loss_sd=shares.loss_sd[i],
            floor_passed=demand.run in shares.allocation.floor_passed,
        )
    return runs


def _uncommanded(view: RunView) -> RunView:
    """A run for which no cap of its own is planned."""
    return msgspec.structs.replace(
        view, sent_mw={}, target_cap_mw=None, expected_loss=None, floor_passed=False
    )


# ------------------------------------------------------------------------------------------------ what comes


def _steps_ahead(
    state: State,
    config: Config,
    science: Science,
    site: SiteView,
    steps: tuple[ScheduleStep, ...],
    first: CapsStep,
) -> tuple[CapsStep, ...]:
    """What a node does by itself when it hears nothing more: lower where the limit falls, release at its end.

    It never raises by itself inside a window: that needs acknowledgements. A limit without an end is a lease.
    The next step is shared by what was learned, those after it equally: they are planned anew before they come, and a
    certificate for each of 32 would take seconds on a great site.
    """
    ahead: list[CapsStep] = []
    last = first
    knowledge = science.knowledge(state)
    binding = any(site.is_bound(step) for step in steps[1:])
    asking = candidates(state, config, science, site) if binding else ()
    unreached = unreached_caps(state, config, science, site) if binding else {}
    for step in steps[1:]:
        if not site.is_bound(step):
            if last.parked:
                last = CapsStep(step.starts_in_s, {}, parked=False)
                ahead.append(last)
            continue
        shares = share(asking, config.policy.name, site, step, knowledge)
        knowledge = science.ignorance
        caps = {
            part: min(cap_mw, last.caps.get(part, cap_mw))
            for part, cap_mw in _targets(state, shares).items()
            if not last.parked or part in last.caps
        }
        caps = {**unreached, **caps}
        if last.parked and caps == last.caps:
            continue
        last = CapsStep(step.starts_in_s, caps, parked=True)
        ahead.append(last)
    if last.parked:
        ahead.append(CapsStep(config.times.max_hold_s, {}, parked=False, lease=True))
    return tuple(ahead)
