"""What the command line shows, as plain values made from the core's state."""

from __future__ import annotations

from typing import Any

from ..config import Config
from ..model import Limit
from ..store.limits import schedule
from .budget import SiteView, look
from .ledger import NS_PER_S
from .runs import run_gpus, uids
from .state import NodeView, RunView, State


def site_view(state: State, config: Config, now_ns: int, now_unix_s: float | None = None) -> dict[str, Any]:
    """The whole site: limit in force, budget, draw, nodes. Unknown figures are None.

    Without the wall clock, in which limits are set, it is unknown when a window ends.
    """
    site = look(state, config, now_ns)
    gpu_draws = [
        gpu.draw_mw for node in state.nodes.values() if node.report is not None for gpu in node.report.gpus
    ]
    unheard = [name for name, node in state.nodes.items() if node.report is None]
    known = not unheard and all(draw is not None for draw in gpu_draws)
    gpus_mw = sum(draw for draw in gpu_draws if draw is not None) if known else None
    window = state.window
    phases = [view.phase for view in state.runs.values()]
    return {
        "cluster": config.cluster,
        "simulated": config.simulated,
        "epoch": state.epoch,
        "off": state.off,
        "limits_known": state.limits_known,
        "policy": config.policy.name,
        "window": None
        if window is None
        else {
            "limit_mw": window.limit_mw,
            "limit_ids": list(window.limit_ids),
            "budget_mw": window.budget_mw,
            "committed_mw": window.committed_mw,
            "shortfall_mw": window.shortfall_mw,
            "silent": list(window.silent),
            "open_s": (now_ns - window.opened_ns) / NS_PER_S,
            "rebound": window.rebound,
            "rebound_mw": window.rebound_mw,
            **_until(state, config, site, now_ns, now_unix_s),
        },
        "draw": {
            "gpus_mw": gpus_mw,
            "overhead_mw": site.fixed_mw,
            "site_mw": None if gpus_mw is None else gpus_mw + site.fixed_mw,
            "uncapped_worst_mw": site.uncapped_worst_mw,
        },
        "runs": {phase: phases.count(phase) for phase in sorted(set(phases))},
        "nodes": [node_view(node, config, now_ns) for node in state.nodes.values()],
    }


def _until(
    state: State, config: Config, site: SiteView, now_ns: int, now_unix_s: float | None
) -> dict[str, Any]:
    """Class of the limit that binds, and when caps are no longer needed, as far as that is known now."""
    if state.window is not None and state.window.rebound:
        ends_ns = None if state.rebound is None else state.rebound.ends_ns
        return {"class": None, "ends_in_s": None if ends_ns is None else (ends_ns - now_ns) / NS_PER_S}
    if now_unix_s is None:
        return {"class": None, "ends_in_s": None}
    steps = schedule(state.limits, now_unix_s, horizon_s=config.times.max_hold_s, lead_s=0.0)
    first = steps[0]
    emergency = first.emergency_mw is not None and first.emergency_mw == first.limit_mw
    free = (step.starts_in_s for step in steps if not site.is_bound(step))
    return {"class": "emergency" if emergency else "economic", "ends_in_s": next(free, None)}


def node_view(node: NodeView, config: Config, now_ns: int) -> dict[str, Any]:
    """One node: whether it is heard, what it holds, the sum of its caps and draws."""
    report = node.report
    age_s = None if report is None else (now_ns - node.heard_ns) / NS_PER_S
    state = "never heard"
    if report is not None and age_s is not None:
        silent = not node.connected or age_s > config.times.node_silent_s
        state = "silent" if silent else "released" if report.released else "ok"
    gpus = () if report is None else report.gpus
    draws = [gpu.draw_mw for gpu in gpus]
    enforced = [gpu.enforced_mw for gpu in gpus]
    faults = [] if report is None else [*report.faults, *(f"{g.uuid}: {g.fault}" for g in gpus if g.fault)]
    return {
        "name": node.name,
        "mode": node.mode,
        "state": state,
        "age_s": age_s,
        "gpus": node.gpus if report is None else len(gpus),
        "gpus_declared": node.gpus,
        "capped": sum(1 for g in gpus if g.enforced_mw is not None and g.enforced_mw < (g.prior_mw or 0)),
        "enforced_mw": _sum(enforced) if report is not None else None,
        "draw_mw": _sum(draws) if report is not None else None,
        "prior_unknown": [gpu.uuid for gpu in gpus if gpu.prior_mw is None],
        "refused": "" if report is None else report.refused,
        "faults": faults,
    }


def run_view(view: RunView, state: State, now_ns: int) -> dict[str, Any]:
    """One run: who, where, what was allowed, what is done to it and what it gives."""
    gpus = run_gpus(view, state.nodes)
    draws = [gpu.draw_mw for gpu in gpus]
    caps = [gpu.enforced_mw for gpu in gpus]
    record = view.record
    rate, base_rate = record.rate_now, record.rate_per_s
    job = view.job
    loss = None
    if rate is not None and base_rate and not record.doubted:
        loss = 1 - rate / base_rate
    return {
        "run": str(view.run),
        "job_id": view.run.job_id,
        "restart": view.run.restart,
        "spec": view.spec,
        "user": None if job is None else job.user_name,
        "partition": None if job is None else job.partition,
        "state": {"new": "being read", "waiting": "waiting for power"}.get(view.phase, view.phase),
        "note": view.refusal or view.flex_note,
        "nodes": sorted(view.gpus),
        "gpus": len(gpus),
        "user_flex": view.user_flex,
        "flex_source": view.flex_source,
        "flex": None if view.flex is None else view.flex.text,
        "max_loss": None if view.flex is None else view.flex.max_loss,
        "cap_mw": max((cap for cap in caps if cap is not None), default=None),
        "target_cap_mw": view.target_cap_mw,
        "floor_mw": view.floor_mw,
        "floor_passed": view.floor_passed,
        "draw_mw": None if view.shares else _sum(draws),
        "shares": view.shares,
        "baseline_draw_mw": record.draw_mw,
        "baseline": record.source,
        "rate_per_s": rate,
        "baseline_rate_per_s": base_rate,
        "loss": loss,
        "disputed": "" if record.doubt else record.disputed,
        "expected_loss": view.expected_loss,
        "known_s": (now_ns - view.first_seen_ns) / NS_PER_S,
        "tag": view.tag_text,
        "tag_trouble": view.tag_trouble,
    }


def uid_of(view: RunView, state: State) -> int | None:
    """Whose run it is, by Slurm's own word, before that by its node's; None while nobody has said it."""
    if view.job is not None:
        return view.job.user_id
    return next(iter(uids(state, view).values()), None)


def limit_view(limit: Limit) -> dict[str, Any]:
    """One limit with its steps in wall-clock seconds."""
    return {
        "id": limit.id,
        "revision": limit.revision,
        "class": limit.class_,
        "source": limit.source,
        "steps": [{"start_unix_s": step.start_unix_s, "limit_mw": step.limit_mw} for step in limit.steps],
    }


def _sum(values: list[int | None]) -> int | None:
    """The sum, or None as soon as one is unknown."""
    if any(value is None for value in values):
        return None
    return sum(value for value in values if value is not None)
