"""The boots that were ever commanded: what their GPUs had before us, and no plan that caps without a record of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import structlog

from ..model import GpuId, Plan, Report
from ..store.epoch import CommandedStore, NeverCommanded
from .state import Action, SendPlan, State

log = structlog.get_logger("controller")


class Commanded:
    """What ``commanded.json`` says of the GPUs of a report, and what it must hold before a plan goes out."""

    def __init__(self, path: Path) -> None:
        self._folder = path.parent
        self._store = CommandedStore(path)

    def load(self) -> None:
        """Read the file; says what is wrong with it."""
        self._store.load()
        if self._store.trouble:
            log.error(self._store.trouble)

    def priors_for(self, report: Report) -> dict[GpuId, int]:
        """Prior limits (mW) of the GPUs whose node does not know its own; what it knows is copied."""
        priors: dict[GpuId, int] = {}
        known: dict[GpuId, int] = {}
        for gpu in report.gpus:
            if gpu.prior_mw is not None:
                known[gpu.uuid] = gpu.prior_mw
                continue
            prior = self._store.prior_for(report.node, report.id.boot_id, gpu.uuid)
            if isinstance(prior, NeverCommanded) and gpu.requested_mw is not None:
                priors[gpu.uuid] = gpu.requested_mw
            elif isinstance(prior, int):
                priors[gpu.uuid] = prior
        if known:
            with contextlib.suppress(OSError):  # only a copy; `mark` says it when it matters
                self._store.update_priors(report.node, report.id.boot_id, known)
        return priors

    def mark(self, actions: Iterable[Action], state: State) -> None:
        """On record before the first enforcing plan to a boot goes out; else that plan does not go out."""
        new: dict[str, tuple[str, str, dict[GpuId, int]]] = {}
        for action in actions:
            if not isinstance(action, SendPlan) or action.plan.mode == "observe":
                continue
            node, boot_id = action.plan.node, action.plan.answers.boot_id
            report = state.nodes[node].report
            if report is not None and not self._store.is_commanded(node, boot_id):
                priors = {gpu.uuid: gpu.prior_mw for gpu in report.gpus if gpu.prior_mw is not None}
                new[node] = (node, boot_id, priors)
        if not new:
            return
        try:
            self._store.mark_all(new.values())
        except OSError as error:
            log.error(f"no plan is sent to {', '.join(sorted(new))}: {error}; make room in {self._folder}")

    def may_send(self, plan: Plan) -> bool:
        """Whether the plan caps nothing, or its boot is on record."""
        return plan.mode == "observe" or self._store.is_commanded(plan.node, plan.answers.boot_id)
