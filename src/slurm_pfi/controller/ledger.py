"""The most that every GPU can be at now: what the budget counts until the node has said otherwise.

Three things can be in force on a node: what its last report says, any plan sent since the plan that the report
holds (that plan included), and, before it holds a plan of ours, whatever another commander sent.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..model import GpuId, GpuReport, Plan, PlanStep
from .state import NodeView, SentPlan

NS_PER_S = 1_000_000_000

# A step counts as begun this long before it is due: the node's clock is not ours.
STEP_MARGIN_S = 1.0


def prior_of(gpu: GpuReport) -> int:
    """Where the GPU goes without a cap: its prior limit, or the most it can be when that is unknown."""
    return gpu.max_mw if gpu.prior_mw is None else gpu.prior_mw


def default_worst_mw(node: NodeView) -> int:
    """All GPUs of a node that says nothing: the highest of default, prior and last limit, or what the site declares."""
    if node.report is None:
        return node.gpus * node.gpu_max_mw
    told_mw = sum(max(gpu.default_mw, prior_of(gpu), gpu.ceiling_mw or 0) for gpu in node.report.gpus)
    missing = max(0, node.gpus - len(node.report.gpus))
    return told_mw + missing * node.gpu_max_mw


def gpu_worst_mw(
    node: NodeView, gpu: GpuReport, now_ns: int, late_s: float, early_s: float = STEP_MARGIN_S
) -> int:
    """The most that the limit of this GPU can be now and within ``early_s``, in mW; unread: its maximum."""
    if gpu.ceiling_mw is None:
        return gpu.max_mw
    worst_mw = gpu.ceiling_mw
    # Before it holds a plan of ours another commander's may be under way; a released node says so before it raises.
    if not node.fenced or (node.report is not None and node.report.released):
        worst_mw = max(worst_mw, prior_of(gpu))
    for sent in node.outstanding:
        for step in _begun(sent, now_ns, late_s, early_s):
            worst_mw = max(worst_mw, planned_mw(sent.plan, step, gpu))
    return worst_mw


def planned_mw(plan: Plan, step: PlanStep, gpu: GpuReport) -> int:
    """What a step of a plan allows this GPU: the highest of its runs' caps and of the park cap, else its prior.

    A run of the GPU that the plan does not name is parked, and so is the GPU once its runs have gone; so the park cap
    counts always. No node sets a cap above a GPU's prior limit.
    """
    if plan.mode == "observe" or step.park_cap_mw is None:
        return prior_of(gpu)
    allowed_mw = step.park_cap_mw
    for cap in step.caps:
        if cap.run in gpu.runs:
            allowed_mw = max(allowed_mw, prior_of(gpu) if cap.cap_mw is None else cap.cap_mw)
    return min(allowed_mw, prior_of(gpu))


def missing_gpus_mw(node: NodeView) -> int:
    """GPUs that the site declares and the report does not show, each at the declared maximum."""
    if node.report is None:
        return node.gpus * node.gpu_max_mw
    return max(0, node.gpus - len(node.report.gpus)) * node.gpu_max_mw


def worst_by_gpu(
    node: NodeView, now_ns: int, late_s: float, early_s: float = STEP_MARGIN_S
) -> dict[GpuId, int]:
    """`gpu_worst_mw` of every GPU that the node reported."""
    if node.report is None:
        return {}
    return {gpu.uuid: gpu_worst_mw(node, gpu, now_ns, late_s, early_s) for gpu in node.report.gpus}


def still_outstanding(node: NodeView) -> tuple[SentPlan, ...]:
    """The plans that may still act after this report: those not older than the one it holds."""
    if node.report is None or node.report.held is None:
        return node.outstanding
    held = node.report.held
    return tuple(sent for sent in node.outstanding if sent.plan.id >= held)


def _begun(sent: SentPlan, now_ns: int, late_s: float, early_s: float) -> Iterator[PlanStep]:
    """The steps that may be in force now or begin within ``early_s``.

    A node counts a step from receipt, which lies between our sending and ``late_s`` after it (an older report is no
    longer answered). So a step may have begun once its time has passed since sending, and has surely begun, and ended
    the one before it, only ``late_s`` later.
    """
    age_s = (now_ns - sent.sent_ns) / NS_PER_S
    steps = sent.plan.steps
    surely = max((i for i, step in enumerate(steps) if step.starts_in_s + late_s < age_s), default=0)
    for place in range(surely, len(steps)):
        if place == surely or steps[place].starts_in_s - early_s <= age_s:
            yield steps[place]
