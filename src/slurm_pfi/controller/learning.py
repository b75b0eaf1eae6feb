"""When to learn from the runs again, and from what. Pure; the learning itself happens outside the core."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ..config import Config
from ..elasticity.evidence import RunEvidence
from ..model import Run
from .kinship import kin_labels, with_kin_points
from .knowledge import Knowledge
from .ledger import NS_PER_S
from .measuring.measured import believed, evidence
from .runs import run_gpus
from .science import Science
from .state import Action, CurvesLearned, LearnCurves, RunView, State

Found = tuple[tuple[Run, RunEvidence], ...]


def due_learning(state: State, config: Config, science: Science, now_ns: int) -> tuple[State, list[Action]]:
    """Ask for new curves when it is time and the runs have shown something new."""
    if state.learning or now_ns < state.learn_due_ns:
        return state, []
    due_ns = now_ns + round(config.times.learn_s * NS_PER_S)
    found = gather(state, science, now_ns)
    if _ageless(found) == _ageless(state.learned_from):
        return msgspec.structs.replace(state, learn_due_ns=due_ns), []
    number = science.knowledge(state).number + 1
    state = msgspec.structs.replace(state, learn_due_ns=due_ns, learning=True, learned_from=found)
    return state, [LearnCurves(evidence=found, number=number)]


def curves_learned(state: State, event: CurvesLearned) -> State:
    """Take over what was learned; with a failure all stays, and the same evidence is tried again when it is time."""
    if event.knowledge is None:
        return msgspec.structs.replace(state, learning=False, learned_from=())
    runs = {run: _judged(view, event.knowledge) for run, view in state.runs.items()}
    return msgspec.structs.replace(state, learning=False, knowledge=event.knowledge, runs=runs)


def _judged(view: RunView, knowledge: Knowledge) -> RunView:
    """The run with what the curves of its like say of the loss that it told."""
    unlikely = knowledge.is_unlikely(view.run)
    if view.record.unlikely == unlikely:
        return view
    return msgspec.structs.replace(view, record=msgspec.structs.replace(view.record, unlikely=unlikely))


def gather(state: State, science: Science, now_ns: int) -> Found:
    """What every admitted run has shown, in the order of the runs."""
    admitted = [view for view in state.runs.values() if view.phase == "admitted"]
    labels = kin_labels(admitted)
    return tuple(
        (view.run, _evidence(view, model, labels.get(view.run, ""), science, now_ns))
        for view in sorted(admitted, key=lambda view: view.run)
        if (model := gpu_model(view, state))
    )


def gpu_model(view: RunView, state: State) -> str:
    """The GPU model of a run as the driver names it, that of its first GPU; empty while none was reported."""
    gpus = run_gpus(view, state.nodes)
    return gpus[0].model if gpus else ""


def _evidence(view: RunView, model: str, kin: str, science: Science, now_ns: int) -> RunEvidence:
    """What a run and its kin before it have shown, as far as it can be believed.

    Of a run that shares GPUs nothing: what it lost alone says little of what it loses beside others. Kin are told
    nothing of a run whose counter its GPUs contradict: by that it is kin.
    """
    if view.shares:
        return RunEvidence(model)
    if view.record.disputed:
        kin = ""
    own = evidence(view.record, model, kin, now_ns)
    return believed(
        with_kin_points(own, view.record), lambda reduction: science.ignorance.expected(model, reduction)
    )


def _ageless(found: Found) -> Found:
    """Without the ages: that time has passed is nothing new."""
    return tuple(
        (run, replace(one, measurements=tuple(replace(point, age_s=0.0) for point in one.measurements)))
        for run, one in found
    )
