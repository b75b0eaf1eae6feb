"""What the audit log is told: of the site, of runs admitted, past their floor, kept waiting."""

from __future__ import annotations

import msgspec

from ..config import Config
from ..model import Run
from ..units import watts_to_mw
from .dispatch import latest_release_s
from .ledger import NS_PER_S
from .state import Action, Audit, RunView, State


def site_fields(state: State, config: Config) -> dict[str, object]:
    """The site as a checker of the audit log has to know it."""
    nodes = {
        node.name: {
            "gpus": node.gpus,
            "overhead_mw": node.overhead_mw,
            "gpu_max_mw": node.gpu_max_mw,
            "mode": node.mode,
        }
        for node in state.nodes.values()
    }
    return {
        "cluster": config.cluster,
        "nodes": nodes,
        "unmanaged_mw": watts_to_mw(config.policy.unmanaged_w),
        "reserve_mw": watts_to_mw(config.policy.reserve_w),
        "response_s": config.times.response_s,
        "rebound_s": config.times.rebound_s,
        "release_s": latest_release_s(config),
    }


def admission_audits(before: dict[Run, RunView], after: dict[Run, RunView]) -> list[Action]:
    """Runs that were waiting for power and have it now."""
    return [
        Audit(event="admitted", fields=admitted_fields(view))
        for run, view in after.items()
        if view.phase == "admitted" and before[run].phase == "waiting"
    ]


def admitted_fields(view: RunView) -> dict[str, object]:
    """The audit's words for an admitted run."""
    return {
        "run": str(view.run),
        "nodes": sorted(view.gpus),
        "flex": view.flex.text if view.flex is not None else "",
        "user_flex": view.user_flex,
    }


def floor_audits(before: dict[Run, RunView], after: dict[Run, RunView]) -> list[Action]:
    """Runs whose floor is passed by order of an emergency, again at each new cap."""
    told: list[Action] = []
    for run, view in after.items():
        old = before[run]
        if view.floor_passed and (not old.floor_passed or old.target_cap_mw != view.target_cap_mw):
            fields = {"run": str(run), "cap_mw": view.target_cap_mw, "floor_mw": view.floor_mw}
            told.append(Audit(event="floor_passed", fields=fields))
    return told


def late_starters(
    runs: dict[Run, RunView], config: Config, now_ns: int
) -> tuple[dict[Run, RunView], list[Action]]:
    """Runs that wait for power, or for Slurm's word, beyond the grace time: a broken floor, said once."""
    grace_ns = config.times.start_grace_s * NS_PER_S
    told: list[Action] = []
    for run, view in list(runs.items()):
        waits = view.phase == "waiting" or (view.phase == "new" and view.started_in_window)
        if waits and not view.breach_told and now_ns - view.first_seen_ns > grace_ns:
            runs[run] = msgspec.structs.replace(view, breach_told=True)
            fields = {"run": str(run), "waited_s": round((now_ns - view.first_seen_ns) / NS_PER_S, 1)}
            told.append(Audit(event="floor_breach", fields=fields))
    return runs, told
