"""After a window: caps rise slowly, and the site makes no new peak. Pure.

The limit that ended is followed by one of our own, which rises to what the site drew before the window, or to the
demand of its contract, and holds for ``times.rebound_s``. Caps are shared below it as below any other, so their sum
bounds the draw whatever starts; only no run is taken below what the window left it, nor the site below its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from ..config import Config
from ..model import Run
from ..store.limits import ScheduleStep
from ..units import MW_PER_W, watts_to_mw
from .budget import Gpu, SiteView
from .dispatch import quick_s
from .ledger import NS_PER_S, prior_of
from .shares import Candidate
from .state import Action, Audit, DrawSample, NodeView, Rebound, State

SAMPLES: Final = 12
RAMP_STEPS: Final = 12  # a plan for every node each time


@dataclass(frozen=True, slots=True)
class Hold:
    """A rebound as one cycle sees it.

    ``limit_mw``: what the site may draw now; ``before_mw``: what it may come back to, None if unknown; ``least_mw``:
    what the window left it, which it may draw at once. ``asking``: who asks, with the caps that it left them as floors.
    ``floors_mw``: the floor per GPU that each of these was promised, by their members; None where a new controller does
    not know it yet.
    """

    rebound: Rebound
    asking: tuple[Candidate, ...]
    limit_mw: int
    before_mw: int | None
    least_mw: int
    floors_mw: dict[tuple[Run, ...], int | None]


# ------------------------------------------------------------------------------------------------ the draw before


def observe_draws(state: State, config: Config, now_ns: int) -> State:
    """Keep what the nodes draw while no window is open, every few seconds, for a minute."""
    record_ns = quick_s(config) * NS_PER_S
    if state.draws and now_ns - state.draws[-1].at_ns < record_ns / SAMPLES:
        return state
    drawn = {node.name: _draw_mw(node, config, now_ns) for node in state.nodes.values()}
    by_node = {name: mw for name, mw in drawn.items() if mw is not None}
    young = (old for old in state.draws if now_ns - old.at_ns <= record_ns)
    draws = (*young, DrawSample(at_ns=now_ns, by_node=by_node))
    # What an earlier window left is out of date as soon as something newer is known.
    return msgspec.structs.replace(state, draws=draws, draw_before=None if by_node else state.draw_before)


def draw_before(state: State) -> dict[str, int] | None:
    """The mean draw of each node in the last minute without a window; None when nothing is known of any."""
    found: dict[str, list[int]] = {}
    for sample in state.draws:
        for name, draw_mw in sample.by_node.items():
            found.setdefault(name, []).append(draw_mw)
    return {name: round(sum(mw) / len(mw)) for name, mw in found.items()} or state.draw_before


def _draw_mw(node: NodeView, config: Config, now_ns: int) -> int | None:
    """What all its GPUs draw together, if that is known and no cap of ours cuts it."""
    if node.mode != "enforce" or node.report is None or not node.connected:
        return None
    if now_ns - node.heard_ns > config.times.node_silent_s * NS_PER_S or not node.report.gpus:
        return None
    total_mw = 0
    for gpu in node.report.gpus:
        if gpu.draw_mw is None or gpu.ceiling_mw is None or gpu.ceiling_mw < prior_of(gpu) - MW_PER_W:
            return None
        total_mw += gpu.draw_mw
    return total_mw


def _before_mw(state: State, config: Config, site: SiteView) -> int | None:
    """What the site may come back to, counted as budgets are; None if nothing is known of it.

    A node of whose draw nothing was known counts for as much as cannot be commanded of it now: that is in both sums.
    """
    if config.policy.contract_w is not None:
        return watts_to_mw(config.policy.contract_w)
    before = state.draw_before
    if before is None:
        return None
    return site.fixed_mw + sum(before.get(name, site.constants_mw[name]) for name in state.nodes)


# ------------------------------------------------------------------------------------------------ the rebound


def hold(
    state: State, config: Config, site: SiteView, asking: tuple[Candidate, ...], now_ns: int
) -> Hold | None:
    """The rebound that is under way, or that begins because a window has just ended; None when nothing is held."""
    before_mw = _before_mw(state, config, site)
    rebound = state.rebound
    if rebound is None:
        rebound = _begin(state, config, site, asking, before_mw, site.uncapped_worst_mw, now_ns)
    if now_ns >= rebound.ends_ns:
        return None
    floors_mw = {one.members: None if rebound.inherited else one.demand.floor_mw for one in asking}
    asking = tuple(_kept(one, rebound) for one in asking)
    least_mw = max(_floors_mw(asking, site), _left_mw(rebound, site))
    level_mw = _level_mw(rebound, config, before_mw, site.uncapped_worst_mw, now_ns)
    if level_mw >= site.uncapped_worst_mw:
        return None
    return Hold(rebound, asking, max(least_mw, level_mw), before_mw, least_mw, floors_mw)


def begins(state: State, config: Config, site: SiteView) -> bool:
    """Whether a window is open that ends now, or caps of a predecessor stand whose window nobody remembers."""
    if config.times.rebound_s == 0 or all(node.mode == "observe" for node in state.nodes.values()):
        return False
    if state.window is not None:
        return True
    never_planned = not state.draws
    return never_planned and any(
        gpu.commandable and _reported_mw(gpu) < prior_of(gpu.report) - MW_PER_W for gpu in site.gpus.values()
    )


def release_s(config: Config) -> float:
    """How long giving back what is still held takes at most, once the site may draw more than before."""
    return quick_s(config) if config.policy.ramp_up_w_per_s is None else config.times.rebound_s


def _reported_mw(gpu: Gpu) -> int:
    """The most that its limit could be as it was reported: what a predecessor sent since is for the ledger to count."""
    return gpu.worst_mw if gpu.report.ceiling_mw is None else gpu.report.ceiling_mw


def _begin(
    state: State,
    config: Config,
    site: SiteView,
    asking: Sequence[Candidate],
    before_mw: int | None,
    uncapped_mw: int,
    now_ns: int,
) -> Rebound:
    inherited = state.window is None
    left = [(one, _cap_mw(state, one)) for one in asking if not one.waiting]
    caps_mw = {run: cap_mw for one, cap_mw in left for run in one.members}
    of_runs = {gpu.key: cap_mw for one, cap_mw in left for gpu in one.gpus}
    counted_mw = {
        key: _reported_mw(gpu) if inherited else of_runs.get(key, gpu.park_mw)
        for key, gpu in site.gpus.items()
        if gpu.commandable
    }
    total_mw = site.fixed_mw + site.constant_mw + sum(counted_mw.values())
    from_mw = total_mw if state.window is None else max(total_mw, state.window.limit_mw)
    rebound_s, ramp_w_per_s = config.times.rebound_s, config.policy.ramp_up_w_per_s
    held_ns = 0 if before_mw is None else round(rebound_s * NS_PER_S)
    if inherited and state.held_until_ns is not None:
        held_ns = min(held_ns, max(0, state.held_until_ns - now_ns))
    gap_mw = max(0, (uncapped_mw if before_mw is None else before_mw) - from_mw)
    rise = gap_mw / quick_s(config) if ramp_w_per_s is None else ramp_w_per_s * MW_PER_W
    return Rebound(
        began_ns=now_ns,
        until_ns=now_ns + held_ns,
        ends_ns=now_ns + held_ns + round(release_s(config) * NS_PER_S),
        from_mw=from_mw,
        spare_mw=from_mw - total_mw,
        counted_mw=counted_mw,
        rise_mw_per_s=round(rise),
        caps_mw=caps_mw,
        inherited=inherited,
    )


def _cap_mw(state: State, one: Candidate) -> int:
    """The cap per GPU that the window left this run."""
    target_mw = state.runs[one.demand.run].target_cap_mw
    return min(_reported_mw(gpu) for gpu in one.gpus) if target_mw is None else target_mw


def _level_mw(rebound: Rebound, config: Config, before_mw: int | None, uncapped_mw: int, now_ns: int) -> int:
    """How high the synthetic limit is: in steps, each after its time, so that it is never ahead of the ramp."""
    step_ns = max(1, round(quick_s(config) / RAMP_STEPS * NS_PER_S))

    def rise_mw(since_ns: int, until_ns: int, mw_per_s: float) -> int:
        return round((until_ns - since_ns) // step_ns * step_ns / NS_PER_S * mw_per_s)

    held_until_ns = min(now_ns, rebound.until_ns)
    level_mw = rebound.from_mw + rise_mw(rebound.began_ns, held_until_ns, rebound.rise_mw_per_s)
    if before_mw is not None:
        level_mw = min(level_mw, before_mw)
    if now_ns <= rebound.until_ns:
        return level_mw
    left_s = (rebound.ends_ns - rebound.until_ns) / NS_PER_S
    mw_per_s = max(0.0, (uncapped_mw - level_mw) / left_s)
    if config.policy.ramp_up_w_per_s is not None:
        mw_per_s = max(mw_per_s, config.policy.ramp_up_w_per_s * MW_PER_W)
    return level_mw + rise_mw(rebound.until_ns, now_ns, mw_per_s)


def _kept(one: Candidate, rebound: Rebound) -> Candidate:
    """The same run with the cap that the window left it as its floor, as far as its draw needs it.

    Its own floor is given back at once, where an emergency had passed it; but not by a new controller, which does not
    know yet what its runs draw, and takes their floors too high.
    """
    demand = one.demand
    left_mw = max((rebound.caps_mw[run] for run in one.members if run in rebound.caps_mw), default=None)
    if one.waiting or left_mw is None:
        return one
    own_mw = demand.device_min_mw if rebound.inherited else demand.floor_mw
    floor_mw = max(own_mw, min(left_mw, demand.draw_mw, demand.ceiling_mw) // MW_PER_W * MW_PER_W)
    total_mw = demand.gpus * (-(-floor_mw // MW_PER_W) * MW_PER_W)
    return replace(one, demand=replace(demand, floor_mw=floor_mw), floor_mw=total_mw)


def _left_mw(rebound: Rebound, site: SiteView) -> int:
    """What the window left the site, with each GPU that cannot be commanded now at its worst in the place of its cap.

    So nobody gains from a node that falls silent, or from one that is heard again.
    """
    now_mw = sum(
        rebound.counted_mw.get(key, gpu.park_mw) for key, gpu in site.gpus.items() if gpu.commandable
    )
    return site.fixed_mw + site.constant_mw + now_mw + rebound.spare_mw


def _floors_mw(asking: Sequence[Candidate], site: SiteView) -> int:
    """What the site may draw with every admitted run at its floor."""
    parked_mw = sum(gpu.park_mw for gpu in site.gpus.values() if gpu.commandable)
    runs_mw = sum(one.floor_mw - one.park_mw for one in asking if not one.waiting)
    return site.fixed_mw + site.constant_mw + parked_mw + runs_mw


# ------------------------------------------------------------------------------------------------ steps and words


def steps_of(
    held: Hold, steps: tuple[ScheduleStep, ...], binding: Sequence[bool], now_ns: int
) -> tuple[ScheduleStep, ...]:
    """The schedule as it is with the rebound in it. ``binding``: which of its steps lower anything.

    A node that hears nothing more gives back at the rebound's end, unless a limit begins before.
    """
    now = ScheduleStep(starts_in_s=0.0, limit_mw=held.limit_mw, emergency_mw=None)
    ends_in_s = (held.rebound.ends_ns - now_ns) / NS_PER_S
    early = [i for i, binds in enumerate(binding) if binds and steps[i].starts_in_s <= ends_in_s]
    if early:
        return (now, *steps[max(1, early[0]) :])
    end = ScheduleStep(starts_in_s=ends_in_s, limit_mw=None, emergency_mw=None)
    return (now, end, *(step for step in steps if step.starts_in_s > ends_in_s))


def told(before: Rebound | None, held: Hold | None, now_ns: int) -> tuple[Rebound | None, list[Action]]:
    """The rebound with what the audit has of it, and what the audit must be told."""
    if held is None:
        return None, [] if before is None else [Audit(event="rebound", fields={"open": False})]
    rebound = held.rebound
    known = (held.before_mw, held.least_mw)
    if rebound.told == known:
        return rebound, []
    fields: dict[str, object] = {
        "open": True,
        "limit_mw": held.before_mw,
        "from_mw": rebound.from_mw,
        "rise_mw_per_s": rebound.rise_mw_per_s,
        "least_mw": held.least_mw,
        "until_s": round((rebound.until_ns - now_ns) / NS_PER_S, 3),
        "ends_s": round((rebound.ends_ns - now_ns) / NS_PER_S, 3),
    }
    return msgspec.structs.replace(rebound, told=known), [Audit(event="rebound", fields=fields)]
