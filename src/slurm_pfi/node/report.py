"""What the agent tells its controller: everything it knows of the node, each time."""

from __future__ import annotations

from ..model import GpuReport, Report, ReportId, Run, RunReport
from .standing import UNSETTABLE, standing_faults
from .state import LET_GO, Gpu, State, ceiling_mw


def build_report(state: State, now_ns: int) -> Report:
    """The report with the state's present sequence number. Progress is left to the shell."""
    own = state.settings
    held = state.held
    window_end_ns = held.window_end_ns(now_ns, skip_lease=own.skip_lease) if held else None
    return Report(
        cluster=own.cluster,
        node=own.node,
        id=ReportId(boot_id=own.boot_id, agent_id=own.agent_id, seq=state.seq),
        highest_epoch=state.highest_epoch,
        held=held.plan.id if held else None,
        released=state.released,
        window_ends_in_s=None if window_end_ns is None else (window_end_ns - now_ns) / 1e9,
        gpus=tuple(_gpu(state, gpu, now_ns) for gpu in state.gpus.values()),
        runs=tuple(
            RunReport(run=seen.run, uid=seen.uid, flex=seen.flex, gpus=seen.gpus)
            for seen in state.runs.values()
        ),
        faults=all_faults(state),
        refused=state.refused,
    )


def all_faults(state: State) -> tuple[str, ...]:
    """What is wrong with the node beside single GPUs, and runs that lead to no GPU."""
    lost = (
        f"run {seen.run}: no GPU known at gres position {','.join(map(str, seen.unknown))}; "
        "check gres.conf against nvidia-smi"
        for seen in state.runs.values()
        if seen.unknown and state.listed
    )
    return (*state.faults.values(), *standing_faults(state), *lost)


def gpu_fault(state: State, gpu: Gpu) -> str:
    """Why this GPU may not follow a plan; empty if it will, and while an admin's release lets go of it."""
    if gpu.blocked:
        return gpu.blocked
    if gpu.read_fault == LET_GO:
        return ""
    if gpu.requested_mw is None or gpu.enforced_mw is None:
        return gpu.read_fault or "limits not read"
    if gpu.settable is False:
        return UNSETTABLE
    if gpu.set_fault:
        return gpu.set_fault
    if gpu.position is None and any(seen.unknown for seen in state.runs.values()):
        return "a run whose GPUs are not known may use it"
    return ""


def caps_are_current(state: State) -> bool:
    """Whether every GPU that can follow its plan does: no set of ours is under way or waited for."""
    return all(gpu.pending is None or gpu_fault(state, gpu) for gpu in state.gpus.values())


def runs_on(state: State, gpu: Gpu) -> tuple[Run, ...]:
    """The runs whose job files name this GPU."""
    return tuple(run for run, seen in state.runs.items() if gpu.uuid in seen.gpus)


def _gpu(state: State, gpu: Gpu, now_ns: int) -> GpuReport:
    return GpuReport(
        uuid=gpu.uuid,
        model=gpu.model,
        position=gpu.position,
        min_mw=gpu.min_mw,
        max_mw=gpu.max_mw,
        default_mw=gpu.default_mw,
        requested_mw=gpu.requested_mw,
        enforced_mw=gpu.enforced_mw,
        ceiling_mw=ceiling_mw(gpu),
        prior_mw=gpu.prior_mw,
        draw_mw=gpu.draw_mw,
        runs=runs_on(state, gpu),
        fault=gpu_fault(state, gpu),
        mean_mw=gpu.telemetry.mean_mw,
        activity=gpu.telemetry.activity_now(now_ns),
        slowed=gpu.telemetry.slowed,
    )
