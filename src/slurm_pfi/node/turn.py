"""One step of the core while it is being made: the state so far and the actions decided. Never outlives ``step``."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from ..gpu.device import LibraryGoneError
from ..gpu.journal import JournalEntry, PriorSource
from ..model import GpuId
from .limits import Set
from .messages import Action, Audit, SendReport, SetLimit, WriteJournal
from .report import build_report
from .state import Gpu, Ours, Pending, State, near

MAX_BACK_OFF_NS = 5_000_000_000
LASTING_BACK_OFF_NS = 30_000_000_000


class Turn:
    """The state is replaced, never changed in place, so the one that ``step`` was given stays as it was."""

    def __init__(self, state: State, now_ns: int) -> None:
        self.state = state
        self.now_ns = now_ns
        self.actions: list[Action] = []

    def change(self, **fields: Any) -> None:
        self.state = structs.replace(self.state, **fields)

    def change_gpu(self, uuid: GpuId, **fields: Any) -> Gpu:
        gpu = structs.replace(self.state.gpus[uuid], **fields)
        self.put_gpu(gpu)
        return gpu

    def put_gpu(self, gpu: Gpu) -> None:
        self.change(gpus={**self.state.gpus, gpu.uuid: gpu})

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def audit(self, event: str, **fields: object) -> None:
        self.do(Audit(event=event, fields=fields))

    def fault(self, what: str, text: str) -> None:
        """Say that something is wrong, or with an empty text that it is no longer."""
        if self.state.faults.get(what, "") == text:
            return
        others = {key: value for key, value in self.state.faults.items() if key != what}
        self.change(faults={**others, what: text} if text else others)
        self.report_soon()

    def relist_soon(self) -> None:
        """List the GPUs anew: at once, or when the last time is long enough ago."""
        state = self.state
        at_ns = max(self.now_ns, state.list_asked_ns + state.relist_pause_ns)
        if not state.listing:  # the answer says when next
            self.change(relist_at_ns=min(state.relist_at_ns, at_ns))

    def driver_lost(self, uuid: GpuId) -> None:
        """The driver may have been loaded anew, and limits are lost with it: nothing is set before that is known."""
        self.change_gpu(uuid, driver_lost=True)
        self.relist_soon()

    # ---------------------------------------------------------------------------------------------- reports

    def report_soon(self) -> None:
        """A change that the controller waits for; several within a few milliseconds share a report."""
        last_ns = self.state.reported_ns
        due_ns = (
            self.now_ns if last_ns is None else max(self.now_ns, last_ns + self.state.settings.report_gap_ns)
        )
        self.change(report_due_ns=min(self.state.report_due_ns, due_ns))

    def send_report(self, period_ns: int) -> None:
        """Send now. The next one is due when GPUs have been sampled again; the time here is the latest."""
        state = self.state
        seq = state.seq + 1
        oldest_ns = self.now_ns - state.settings.report_age_ns
        young = {number: sent for number, sent in state.sent_ns.items() if sent >= oldest_ns}
        self.change(
            seq=seq,
            sent_ns={**young, seq: self.now_ns},
            reported_ns=self.now_ns,
            report_due_ns=self.now_ns + period_ns + period_ns // 2,
        )
        self.do(SendReport(report=build_report(self.state, self.now_ns)))
        self.change(refused="")

    # ----------------------------------------------------------------------------------------------- limits

    def write_journal(self, gpu: Gpu, run: str = "") -> None:
        assert gpu.prior_mw is not None
        how: PriorSource = (
            "default" if gpu.how == "default" else "read" if gpu.how == "read" else "controller"
        )
        self.do(
            WriteJournal(
                entry=JournalEntry(
                    uuid=gpu.uuid,
                    prior_mw=gpu.prior_mw,
                    issued_mw=gpu.issued_mw,
                    current_mw=gpu.current_mw,
                    run=run,
                    boot_id=self.state.settings.boot_id,
                    driver_start=self.state.driver_start,
                    how=how,
                    lost_mw=gpu.lost_mw,
                )
            )
        )

    def record_prior(self, gpu: Gpu, prior_mw: int, how: PriorSource, run: str = "") -> None:
        """The limit before us is known now, or has been changed by its owner while the GPU rested."""
        gpu = self.change_gpu(gpu.uuid, prior_mw=prior_mw, how=how)
        self.audit("prior", uuid=gpu.uuid, prior_mw=prior_mw, how=how)
        self.write_journal(gpu, run)
        self.report_soon()

    def issue(self, gpu: Gpu, ask: Set) -> None:
        """Say it, write it down, then ask for it: in this order, whatever happens in between."""
        if ask.conflict_mw is not None:
            self.conflict(gpu, ask.conflict_mw)
            gpu = self._give_way_next_time(gpu.uuid)
        # A lowering that was not confirmed yet still counts in full.
        unconfirmed_mw = None if gpu.pending is None else gpu.pending.before_mw
        before_mw = max((mw for mw in (gpu.requested_mw, unconfirmed_mw) if mw is not None), default=None)
        before = gpu.pending
        shown = (gpu.enforced_mw, None if before is None else before.cap_mw)
        earlier = () if before is None else gpu.earlier_mw
        seen = dict.fromkeys((*earlier, *(mw for mw in shown if mw is not None)))
        gpu = self.change_gpu(gpu.uuid, earlier_mw=tuple(seen))
        if before is not None and before.raises and ask.cap_mw < before.cap_mw:
            gpu = self.change_gpu(
                gpu.uuid,
                overtaken_mw=max(gpu.overtaken_mw, before.cap_mw),
                overtaken_until_ns=before.since_ns + self.state.settings.settle_ns,
            )
        gpu = self.change_gpu(
            gpu.uuid,
            pending=Pending(
                cap_mw=ask.cap_mw,
                reason=ask.reason,
                run=ask.run,
                since_ns=self.now_ns,
                raises=ask.raises,
                restores=ask.restores,
                before_mw=before_mw,
                ours=Ours(
                    current_mw=gpu.current_mw,
                    issued_mw=gpu.issued_mw,
                    confirmed=gpu.confirmed,
                    requested_mw=gpu.requested_mw,
                ),
            ),
        )
        self.audit(
            "set", uuid=gpu.uuid, cap_mw=ask.cap_mw, reason=ask.reason, run=ask.run, prior_mw=gpu.prior_mw
        )
        if not ask.restores:  # the entry that a restore needs has been there since the first set
            self.hold(gpu, ask.cap_mw, ask.run)
        self.do(SetLimit(uuid=gpu.uuid, cap_mw=ask.cap_mw, reason=ask.reason, run=ask.run))

    def hold(self, gpu: Gpu, cap_mw: int, run: str) -> None:
        """Make this value the one of ours on the GPU, in memory and in the journal."""
        known = cap_mw in gpu.issued_mw
        gpu = self.change_gpu(
            gpu.uuid,
            current_mw=cap_mw,
            issued_mw=gpu.issued_mw if known else (*gpu.issued_mw, cap_mw),
            confirmed=gpu.requested_mw is not None and near(gpu.requested_mw, cap_mw),
            made_mw=None,
        )
        self.write_journal(gpu, run)

    def rest(self, uuid: GpuId) -> None:
        """No limit of ours stands on this GPU any more."""
        gpu = self.change_gpu(
            uuid,
            current_mw=None,
            confirmed=False,
            foreign_mw=None,
            fell_mw=None,
            restored_mw=None,
            undo=None,
        )
        self.write_journal(gpu)
        self.calm(uuid)
        self.report_soon()

    def _give_way_next_time(self, uuid: GpuId) -> Gpu:
        """Somebody else's limit is replaced: the next time that is waited for, and the longer the more often."""
        gpu, settings = self.state.gpus[uuid], self.state.settings
        wait_ns = min(settings.reapply_ns * 2 ** min(gpu.reapplied, 10), settings.reapply_most_ns)
        gpu = self.change_gpu(uuid, reapplied=gpu.reapplied + 1, reapply_at_ns=self.now_ns + wait_ns)
        if gpu.reapplied > 1:
            text = (
                f"{uuid}: another program keeps setting its limit; look for DCGM, a prolog or nvidia-smi -pl"
            )
            self.fault(f"writer of {uuid}", text)
        return gpu

    def calm(self, uuid: GpuId) -> None:
        """Nobody else has written for a while, or there is nothing of ours to write over."""
        self.change_gpu(uuid, reapplied=0, reapply_at_ns=0)
        self.fault(f"writer of {uuid}", "")

    def conflict(self, gpu: Gpu, found_mw: int) -> None:
        """Somebody else wrote a limit. Said once for each value found."""
        self.audit("conflict", uuid=gpu.uuid, ours_mw=gpu.current_mw, found_mw=found_mw)
        self.change_gpu(gpu.uuid, foreign_mw=found_mw)
        self.report_soon()

    def set_not_tried(self, uuid: GpuId, error: str) -> None:
        """The journal could not be written, so the device was not asked: what was ours before is so now."""
        pending = self.state.gpus[uuid].pending
        if pending is None:
            return
        ours = pending.ours
        gpu = self.change_gpu(
            uuid, current_mw=ours.current_mw, issued_mw=ours.issued_mw, confirmed=ours.confirmed
        )
        self.write_journal(gpu, pending.run)  # what is to be written once the disk has room again
        self.set_failed(uuid, error, in_doubt=False, lasting=False)

    def set_failed(self, uuid: GpuId, error: str, *, in_doubt: bool, lasting: bool) -> None:
        """A set or restore that did not succeed: tried again later, without holding up any other GPU."""
        gpu = self.state.gpus[uuid]
        if gpu.pending is None:
            return
        # Of several answers that were lost, the highest value counts; only that of a restore is no cap of ours.
        doubts = [mw for mw in (gpu.pending.cap_mw if in_doubt else None, gpu.doubt_mw) if mw is not None]
        failures = gpu.failures + 1
        back_off_ns = min(MAX_BACK_OFF_NS, 500_000_000 * 2 ** min(failures - 1, 10))
        if lasting or failures > 8:
            back_off_ns = LASTING_BACK_OFF_NS
        if gpu.settable is False:
            back_off_ns = self.state.settings.survey_ns
        self.audit("set_failed", uuid=uuid, cap_mw=gpu.pending.cap_mw, error=error)
        undo = gpu.undo if gpu.pending.restores else gpu.undo or gpu.pending.ours
        run, lost_mw = gpu.pending.run, gpu.lost_mw
        lost = in_doubt and not gpu.pending.restores and gpu.pending.cap_mw not in lost_mw
        gpu = self.change_gpu(
            uuid,
            pending=None,
            failures=failures,
            retry_at_ns=self.now_ns + back_off_ns,
            touched_ns=self.now_ns,
            doubt_mw=max(doubts, default=None),
            confirmed=gpu.confirmed and not in_doubt,
            undo=undo,
            lost_mw=(*lost_mw, gpu.pending.cap_mw) if lost else lost_mw,
            # A single failure that is tried again in a moment is no reason to give the GPU up.
            set_fault=f"cannot be set: {error}" if lasting or failures > 1 else gpu.set_fault,
        )
        if lost:
            self.write_journal(gpu, run)
        if error.startswith(LibraryGoneError.__name__):
            self.change_gpu(uuid, driver_lost=True)
        self.change(sample_due_ns=self.now_ns)
        self.relist_soon()  # its range, or the right to set it, may have changed
        self.report_soon()
