"""What the agent answers ``slurm-pfi node status``: its report, and what only this node's admin asks for."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from .limits import Wanted
from .notify import summary, wanted_now
from .report import build_report, gpu_fault
from .state import NS_PER_S, Gpu, State

_REFUSED_SHOWN_NS: Final = 3600 * NS_PER_S


def overview(state: State, now_ns: int) -> dict[str, Any]:
    """The report as JSON has it, GPUs by position, with each one's cap wanted now (None: none) and held."""
    data: dict[str, Any] = msgspec.to_builtins(build_report(state, now_ns))
    data["summary"] = summary(state, now_ns)
    data["settings"] = msgspec.to_builtins(state.settings)
    data["connected"] = state.connected
    data["mode"] = state.held.plan.mode if state.held else None
    data["last_refused"] = _last_refused(state, now_ns)
    wanted = wanted_now(state, now_ns)
    data["gpus"] = sorted(data["gpus"], key=_by_position)
    for gpu in data["gpus"]:
        known = state.gpus[gpu["uuid"]]
        gpu["current_mw"] = known.current_mw
        gpu["cap_mw"] = _cap_mw(known, wanted.get(known.uuid))
        gpu["fault"] = gpu_fault(state, known)
    return data


def _cap_mw(gpu: Gpu, want: Wanted | None) -> int | None:
    """The cap wanted now; going back to the prior limit is none."""
    if want is None or gpu.prior_mw is None or want.cap_mw >= gpu.prior_mw:
        return None
    return want.cap_mw


def _by_position(gpu: dict[str, Any]) -> tuple[bool, int, str]:
    """GPUs of no position come last."""
    position = gpu["position"]
    return position is None, position or 0, gpu["uuid"]


def _last_refused(state: State, now_ns: int) -> dict[str, Any] | None:
    """The plan refused last and why, for as long as an admin may look for it."""
    refused = state.last_refused
    if refused is None or now_ns - refused.at_ns > _REFUSED_SHOWN_NS:
        return None
    return {"plan": refused.plan, "age_s": (now_ns - refused.at_ns) / NS_PER_S, "reason": refused.reason}
