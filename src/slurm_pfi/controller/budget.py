"""The budget of one cycle: which GPUs can be commanded, what all others may draw, what is left for runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..config import Config
from ..model import GpuReport
from ..store.limits import ScheduleStep
from ..units import watts_to_mw
from .boards import GpuKey
from .ledger import NS_PER_S, STEP_MARGIN_S, default_worst_mw, missing_gpus_mw, prior_of, worst_by_gpu
from .state import NodeView, RunView, State


@dataclass(frozen=True, slots=True)
class Gpu:
    """One reported GPU in this cycle. ``commandable`` is False when a plan to it cannot be relied on."""

    node: str
    report: GpuReport
    worst_mw: int
    park_mw: int
    commandable: bool

    @property
    def key(self) -> GpuKey:
        return self.node, self.report.uuid


@dataclass(frozen=True, slots=True)
class SiteView:
    """All GPUs by node and UUID (a node may name what it likes), and what the site draws beside them.

    ``constants_mw``, by node: the worst case of all that is not in ``gpus`` or cannot be commanded; ``fixed_mw`` is
    node overhead, unmanaged load and reserve; ``silent`` names nodes counted at their worst though they should answer.
    """

    gpus: dict[GpuKey, Gpu]
    fixed_mw: int
    constants_mw: dict[str, int]
    uncapped_mw: int
    silent: tuple[str, ...]

    @property
    def constant_mw(self) -> int:
        """The same of all nodes together."""
        return sum(self.constants_mw.values())

    @property
    def uncapped_worst_mw(self) -> int:
        """What the site draws at most with every GPU at its prior limit; a limit of so much or more binds nothing."""
        return self.uncapped_mw + self.fixed_mw

    def is_bound(self, step: ScheduleStep) -> bool:
        """Whether a limit is lower than that."""
        return step.limit_mw is not None and step.limit_mw < self.uncapped_worst_mw


def look(state: State, config: Config, now_ns: int, early_s: float = STEP_MARGIN_S) -> SiteView:
    """Read the state of all nodes at ``now_ns`` into one view; what a node does by itself counts ``early_s`` before."""
    enforced_somewhere = any(node.mode == "enforce" for node in state.nodes.values())
    gpus: dict[GpuKey, Gpu] = {}
    constants_mw = dict.fromkeys(state.nodes, 0)
    uncapped_mw = 0
    silent: list[str] = []
    for node in state.nodes.values():
        answers = node_answers(node, config, now_ns)
        if node.mode == "enforce" and not answers:
            silent.append(node.name)
        if node.report is None or forgotten(node, config, now_ns):
            constants_mw[node.name] = default_worst_mw(node)
            uncapped_mw += default_worst_mw(node)
            continue
        usable = answers and (node.mode == "enforce" or not enforced_somewhere)
        constants_mw[node.name] = missing_gpus_mw(node)
        uncapped_mw += missing_gpus_mw(node) + sum(prior_of(gpu) for gpu in node.report.gpus)
        worst = worst_by_gpu(node, now_ns, config.times.report_age_s, early_s)
        park_mw = node_park_mw(node.report.gpus, config)
        for gpu in node.report.gpus:
            commandable = usable and gpu.ceiling_mw is not None and gpu.prior_mw is not None and not gpu.fault
            seen = Gpu(node.name, gpu, worst[gpu.uuid], parked_mw(gpu, park_mw), commandable)
            gpus[node.name, gpu.uuid] = seen
            if not commandable:
                observed = node.mode == "observe"
                constants_mw[node.name] += max(seen.worst_mw, prior_of(gpu)) if observed else seen.worst_mw
    fixed_mw = (
        sum(node.overhead_mw for node in state.nodes.values())
        + watts_to_mw(config.policy.unmanaged_w)
        + watts_to_mw(config.policy.reserve_w)
    )
    return SiteView(gpus, fixed_mw, constants_mw, uncapped_mw, tuple(silent))


def node_park_mw(gpus: Iterable[GpuReport], config: Config) -> int:
    """The park cap in a node's plan: the site's, else the lowest that each of its GPUs accepts. Zero without GPUs."""
    known = tuple(gpus)
    lowest_mw = max((gpu.min_mw for gpu in known), default=0)
    most_mw = max((gpu.max_mw for gpu in known), default=0)
    return min(max(lowest_mw, watts_to_mw(config.policy.park_cap_w or 0)), most_mw)


def parked_mw(gpu: GpuReport, park_mw: int) -> int:
    """Where this GPU stands under its node's park cap: within its range, and never above its prior limit."""
    return min(max(park_mw, gpu.min_mw), gpu.max_mw, prior_of(gpu))


def node_answers(node: NodeView, config: Config, now_ns: int) -> bool:
    """Whether a plan sent to this node now can be expected to act within the response time."""
    if not node.connected or node.report is None or node.report.released:
        return False
    if now_ns - node.heard_ns > config.times.node_answer_s * NS_PER_S:
        return False
    held = node.report.held
    waiting = [sent for sent in node.outstanding if held is None or sent.plan.id > held]
    return not waiting or now_ns - waiting[0].sent_ns <= config.times.node_answer_s * NS_PER_S


def forgotten(node: NodeView, config: Config, now_ns: int) -> bool:
    """Silent for so long that its caps are no longer believed (policy.silent_node = worst)."""
    silent_ns = now_ns - node.heard_ns
    return config.policy.silent_node == "worst" and silent_ns > config.times.node_silent_s * NS_PER_S


def gpus_on(run: RunView, node: str, site: SiteView) -> list[Gpu]:
    """The GPUs of a run on one of its nodes, as far as that node reports them."""
    found = (site.gpus.get((node, uuid)) for uuid in run.gpus.get(node, ()))
    return [gpu for gpu in found if gpu is not None]


def commandable_gpus(run: RunView, site: SiteView) -> list[Gpu]:
    """The GPUs of a run that a plan can reach."""
    return [gpu for node in run.gpus for gpu in gpus_on(run, node, site) if gpu.commandable]
