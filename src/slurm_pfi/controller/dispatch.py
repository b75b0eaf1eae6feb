"""From caps by run to one plan a node, and which of them have to be sent now."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import msgspec

from ..config import Config
from ..model import Plan, PlanId, PlanStep, Run, RunCap
from .budget import node_park_mw
from .jobline import job_line
from .ledger import NS_PER_S
from .state import Action, Audit, NodeView, RunView, SendPlan, SentPlan, State

SAME_TIME_S = 0.5  # steps of two plans that begin this close to each other are the same
RESEND_S = 1.0  # a plan that was not accepted is sent again, as the answer to a newer report
REFRESH_S = 30.0  # inside a window a plan is renewed this often, so that clocks and leases do not drift
KEPT_OUTSTANDING = 64
# Unanswered plans beyond these go out only once each RESEND_S. So the oldest of KEPT_OUTSTANDING is too old to be taken
# by any node, and may be forgotten.
HASTY_PLANS = 16
RAMP_S: Final = 60.0
RESPONSES_LATE: Final = 2  # one to hear that the rebound goes on, one for the others to make room


Caps: TypeAlias = dict[tuple[Run, str], int]
"""The cap of each GPU of a run on a node. On all nodes of a run the same, but for the steps on the way there."""


@dataclass(frozen=True, slots=True)
class CapsStep:
    """Caps of all runs from a time on; ``parked`` says whether a window is open then."""

    starts_in_s: float
    caps: Caps
    parked: bool
    lease: bool = False


def quick_s(config: Config) -> float:
    """How long giving back takes where the site sets no ramp: never longer than the rebound."""
    return min(RAMP_S, config.times.rebound_s)


def late_s(node: str, config: Config) -> float:
    """How long after the end of the last limit that it knows a node gives back by itself.

    Its commander is heard before that, if there is one; and without one not all nodes rise in the same instant.
    """
    if config.times.rebound_s == 0:
        return 0.0
    share = int.from_bytes(hashlib.sha256(node.encode()).digest()[:4]) / 2**32
    return RESPONSES_LATE * config.times.response_s + share * quick_s(config)


def latest_release_s(config: Config) -> float:
    """What `late_s` is at most, of any node."""
    return RESPONSES_LATE * config.times.response_s + quick_s(config) if config.times.rebound_s else 0.0


def dispatch(
    state: State, config: Config, steps: tuple[CapsStep, ...], reason: str, now_ns: int
) -> tuple[State, list[Action]]:
    """Make each node's plan, and send those that say something new or were not accepted."""
    actions: list[Action] = []
    nodes = dict(state.nodes)
    seq = state.next_seq
    runs_by_node: dict[str, list[RunView]] = {}
    for view in state.runs.values():
        for name in view.gpus:
            runs_by_node.setdefault(name, []).append(view)
    for name, node in state.nodes.items():
        report = node.report
        if report is None or not report.gpus or not node.connected or report.released:
            continue  # without GPUs in its report there is no range to plan within
        if now_ns - node.heard_ns > config.times.report_age_s * NS_PER_S:
            continue
        runs = runs_by_node.get(name, [])
        plan = Plan(
            cluster=config.cluster,
            node=name,
            id=PlanId(epoch=state.epoch, seq=seq),
            answers=report.id,
            mode=node.mode,
            reason=reason,
            steps=_node_steps(node, runs, config, steps),
            priors={gpu.uuid: node.priors[gpu.uuid] for gpu in report.gpus if gpu.uuid in node.priors},
            gone=tuple(sorted(view.run for view in runs if view.phase == "gone")),
            lines=_lines(runs, config) if config.tag.job_line else {},
        )
        if not _is_due(node, plan, now_ns):
            continue
        seq += 1
        sent = SentPlan(plan=plan, sent_ns=now_ns)
        nodes[name] = msgspec.structs.replace(node, outstanding=_kept((*node.outstanding, sent), report.held))
        actions.append(Audit(event="plan_sent", fields=_told(plan)))
        actions.append(SendPlan(plan=plan))
    return msgspec.structs.replace(state, nodes=nodes, next_seq=seq), actions


def _lines(runs: list[RunView], config: Config) -> dict[str, str]:
    told = ((str(view.run), job_line(view, simulated=config.simulated)) for view in runs)
    return {run: line for run, line in told if line}


def _node_steps(
    node: NodeView,
    runs: list[RunView],
    config: Config,
    steps: tuple[CapsStep, ...],
) -> tuple[PlanStep, ...]:
    park_mw = node_park_mw(node.report.gpus if node.report is not None else (), config)
    # Of all caps of the site only this node's: else what comes costs as much as the square of the site.
    parts = [(view.run, node.name) for view in runs]
    own = tuple(
        replace(step, caps={part: step.caps[part] for part in parts if part in step.caps}) for step in steps
    )
    made: list[PlanStep] = []
    for step in _given_back_late(own, late_s(node.name, config)):
        if not step.parked:
            made.append(PlanStep(starts_in_s=step.starts_in_s, park_cap_mw=None, lease=step.lease))
            continue
        caps = [
            RunCap(run=view.run, cap_mw=step.caps[view.run, node.name])
            for view in sorted(runs, key=lambda view: view.run)
            if (view.run, node.name) in step.caps
        ]
        made.append(PlanStep(starts_in_s=step.starts_in_s, park_cap_mw=park_mw, caps=tuple(caps)))
    return tuple(made)


def _given_back_late(steps: tuple[CapsStep, ...], late_s: float) -> list[CapsStep]:
    """The same with every end of a window so much later, or left out where the next window has begun by then.

    Nothing rises by itself without an end in between: then caps stay the lower of both windows'.
    """
    made: list[CapsStep] = []
    for step, after in zip(steps, (*steps[1:], None), strict=True):
        if made and not step.parked and not step.lease and made[-1].parked:
            starts_in_s = step.starts_in_s + late_s
            if after is None or starts_in_s < after.starts_in_s:
                made.append(replace(step, starts_in_s=starts_in_s))
        elif made and step.parked and made[-1].parked:
            held = made[-1].caps
            caps = {part: min(cap_mw, held[part]) for part, cap_mw in step.caps.items() if part in held}
            made.append(replace(step, caps=caps))
        else:
            made.append(step)
    return made


def _kept(outstanding: tuple[SentPlan, ...], held: PlanId | None) -> tuple[SentPlan, ...]:
    """The plans that may still act: the one held, whose steps ahead count for ever, and the youngest."""
    if len(outstanding) <= KEPT_OUTSTANDING:
        return outstanding
    holding = tuple(sent for sent in outstanding[:1] if sent.plan.id == held)
    return (*holding, *outstanding[len(holding) - KEPT_OUTSTANDING :])


def _is_due(node: NodeView, plan: Plan, now_ns: int) -> bool:
    if not node.outstanding:
        return True
    last = node.outstanding[-1]
    age_s = (now_ns - last.sent_ns) / NS_PER_S
    if len(node.outstanding) > HASTY_PLANS and age_s < RESEND_S:
        return False
    if not _says_the_same(last.plan, plan, age_s):
        return True
    held = node.report.held if node.report is not None else None
    if held is None or held < last.plan.id:
        return age_s >= RESEND_S
    in_window = any(step.park_cap_mw is not None for step in plan.steps)
    return in_window and age_s >= REFRESH_S


def _says_the_same(old: Plan, new: Plan, age_s: float) -> bool:
    if (old.id.epoch, old.mode, old.priors, old.gone) != (new.id.epoch, new.mode, new.priors, new.gone):
        return False
    if old.lines != new.lines or len(old.steps) != len(new.steps):
        return False
    for before, after in zip(old.steps, new.steps, strict=True):
        if (before.park_cap_mw, before.caps, before.lease) != (after.park_cap_mw, after.caps, after.lease):
            return False
        moved_s = abs(before.starts_in_s - age_s - after.starts_in_s)
        if before.starts_in_s > 0 and not before.lease and moved_s > SAME_TIME_S:
            return False
    return True


def _told(plan: Plan) -> dict[str, object]:
    """The audit's copy of a plan."""
    return {
        "node": plan.node,
        "epoch": plan.id.epoch,
        "seq": plan.id.seq,
        "answers_seq": plan.answers.seq,
        "mode": plan.mode,
        "reason": plan.reason,
        "steps": [
            {
                "starts_in_s": round(step.starts_in_s, 3),
                "park_cap_mw": step.park_cap_mw,
                "caps": {str(cap.run): cap.cap_mw for cap in step.caps},
            }
            for step in plan.steps
        ],
    }
