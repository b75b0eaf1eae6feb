"""A plan once held: which of its steps is in force, and whether another one may take its place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from ..model import Frozen, Plan, PlanStep

if TYPE_CHECKING:
    from .state import State

MAX_STARTS_IN_S: Final = 10 * 365 * 86400.0
MAX_STEPS: Final = 1000
MAX_REASON: Final = 1000
MAX_NUMBER: Final = 2**53  # what every JSON reader keeps exactly; JSON itself has no bound


class HeldPlan(Frozen, frozen=True, kw_only=True):
    """A plan with the instant it came, so that its steps stand on our monotonic clock alone."""

    plan: Plan
    boot_id: str
    received_ns: int

    def start_ns(self, step: PlanStep) -> int:
        """When this step begins or began."""
        return self.received_ns + round(step.starts_in_s * 1e9)

    def steps(self, *, skip_lease: bool) -> tuple[PlanStep, ...]:
        """The steps that count: the end of a lease is left out where limits are to hold without a controller."""
        steps = self.plan.steps
        return tuple(s for s in steps if not s.lease) if skip_lease else steps

    def in_force(self, now_ns: int, *, skip_lease: bool) -> tuple[int, PlanStep]:
        """Index and value of the step in force. The last one that has begun stays in force for ever."""
        index, found = 0, self.plan.steps[0]
        for position, step in enumerate(self.steps(skip_lease=skip_lease)):
            if self.start_ns(step) <= now_ns:
                index, found = position, step
        return index, found

    def next_ns(self, now_ns: int, *, skip_lease: bool) -> int | None:
        """When the next step begins."""
        starts = (self.start_ns(step) for step in self.steps(skip_lease=skip_lease))
        return min((start for start in starts if start > now_ns), default=None)

    def window_end_ns(self, now_ns: int, *, skip_lease: bool) -> int | None:
        """When the window that is open now ends; None without a window, and when no end is known."""
        if self.in_force(now_ns, skip_lease=skip_lease)[1].park_cap_mw is None:
            return None
        starts = (self.start_ns(s) for s in self.steps(skip_lease=skip_lease) if s.park_cap_mw is None)
        return min((start for start in starts if start > now_ns), default=None)


def refusal(state: State, plan: Plan, now_ns: int) -> str:
    """Why this plan changes nothing; empty if it may be held."""
    own = state.settings
    if any(abs(number) > MAX_NUMBER for number in _numbers(plan)):
        return f"a number in it is beyond {MAX_NUMBER}"
    if (plan.cluster, plan.node) != (own.cluster, own.node):
        return f"it is for {plan.cluster}/{plan.node}, this is {own.cluster}/{own.node}"
    if state.released:
        return "this node was released by its admin: slurm-pfi node resume"
    if state.stopping_ns is not None:
        return "the agent is stopping"
    if not state.listed:
        return "its GPUs have not been listed yet, so no cap can be checked"
    return _out_of_order(state, plan) or _not_our_answer(state, plan, now_ns) or malformed(state, plan)


def _numbers(plan: Plan) -> Iterator[int]:
    yield from (plan.id.epoch, plan.id.seq, plan.answers.seq, *plan.priors.values())
    for step in plan.steps:
        yield from (mw for mw in (step.park_cap_mw, *(cap.cap_mw for cap in step.caps)) if mw is not None)
        yield from (number for cap in step.caps for number in (cap.run.job_id, cap.run.restart))


def _out_of_order(state: State, plan: Plan) -> str:
    if plan.id.epoch < state.highest_epoch:
        return f"its epoch {plan.id.epoch} is behind {state.highest_epoch}"
    if state.held is not None and plan.id <= state.held.plan.id:
        held = state.held.plan.id
        return f"it is {plan.id.epoch}/{plan.id.seq}, and {held.epoch}/{held.seq} is held already"
    return ""


def _not_our_answer(state: State, plan: Plan, now_ns: int) -> str:
    own, answers = state.settings, plan.answers
    if answers.boot_id != own.boot_id:
        return "it answers a report of another boot"
    if answers.agent_id != own.agent_id:
        return "it answers a report of another agent process"
    sent_ns = state.sent_ns.get(answers.seq)
    if sent_ns is None or now_ns - sent_ns > own.report_age_ns:
        return f"it answers report {answers.seq}, older than {own.report_age_ns / 1e9:g} s or never sent"
    if state.held is not None:
        held = state.held.plan.answers
        if held.agent_id == own.agent_id and answers.seq < held.seq:
            return f"it answers report {answers.seq}, the plan held answers the later {held.seq}"
    return ""


def malformed(state: State, plan: Plan) -> str:
    """What is wrong with the steps of a plan; empty if nothing."""
    starts = [step.starts_in_s for step in plan.steps]
    if len(plan.reason) > MAX_REASON:
        return f"its reason is longer than {MAX_REASON} characters"
    if not starts or starts[0] != 0 or len(starts) > MAX_STEPS:
        return f"its steps do not start at 0 s, or there are more than {MAX_STEPS}"
    if not all(math.isfinite(start) and start <= MAX_STARTS_IN_S for start in starts):
        return "a step does not start at a finite time"
    if any(later <= earlier for earlier, later in pairwise(starts)):
        return "its steps do not ascend"
    if plan.steps[0].lease:
        return "its first step is the end of a lease"
    return next((reason for step in plan.steps if (reason := _outside(state, step))), "")


def _outside(state: State, step: PlanStep) -> str:
    """A cap that lies below what a GPU it concerns can do, or above what all of them can.

    A run may have GPUs of differing models: a cap above the maximum of some of them does not bind these.
    """
    caps = [("park cap", step.park_cap_mw, tuple(state.gpus.values()))]
    for cap in step.caps:
        seen = state.runs.get(cap.run)
        concerned = tuple(gpu for gpu in state.gpus.values() if seen is None or gpu.uuid in seen.gpus)
        caps.append((f"cap of {cap.run}", cap.cap_mw, concerned))
    for what, cap_mw, gpus in caps:
        if cap_mw is None or not gpus:
            continue
        low, high = max(gpus, key=lambda gpu: gpu.min_mw), max(gpus, key=lambda gpu: gpu.max_mw)
        for gpu, wrong in ((low, cap_mw < low.min_mw), (high, cap_mw > high.max_mw)):
            if wrong:
                return f"{what} {cap_mw} mW lies outside {gpu.min_mw}..{gpu.max_mw} mW of {gpu.uuid}"
    return ""
