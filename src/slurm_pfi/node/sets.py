"""Answers to sets, and limits that are found otherwise than we left them: fallen back, or written by others."""

from __future__ import annotations

from dataclasses import replace

from ..model import GpuId
from .messages import SetDone
from .state import TOLERANCE_MW, Cause, Gpu, Pending, near
from .turn import Turn

_ROUNDED = 0.05
"""A value this near to one whose set failed in an unclear way is what the board made of it."""


def set_done(turn: Turn, event: SetDone) -> None:
    """The device says it did. Believed only if it reads back what was asked."""
    gpu = turn.state.gpus.get(event.uuid)
    if gpu is None or gpu.pending is None:
        return
    limits, pending = event.limits, gpu.pending
    if limits.replaced_mw is not None:
        gpu = _replaced(turn, gpu, pending, limits.replaced_mw)
    gpu = turn.change_gpu(
        gpu.uuid,
        requested_mw=limits.requested_mw,
        enforced_mw=limits.enforced_mw,
        read_ns=turn.now_ns,
        touched_ns=turn.now_ns,
        read_fault="",
    )
    if not near(limits.requested_mw, pending.cap_mw):
        error = f"the device accepted it, but {limits.requested_mw} mW is read back"
        turn.set_failed(gpu.uuid, error, in_doubt=False, lasting=False)
        return
    gpu = turn.change_gpu(
        gpu.uuid,
        pending=replace(pending, settling=True),
        failures=0,
        retry_at_ns=0,
        set_fault="",
        doubt_mw=None,
        undo=None,
        settable=True,
        fell_mw=None,
        foreign_mw=None,
        confirmed=not pending.restores,
    )
    if pending.restores and gpu.restored_mw is None:
        turn.rest(gpu.uuid)
    turn.report_soon()
    settle(turn, turn.state.gpus[gpu.uuid])


def _replaced(turn: Turn, gpu: Gpu, pending: Pending, found_mw: int) -> Gpu:
    """Somebody wrote between our last reading and our set, which replaced that.

    Where we held nothing it is the limit before us now. So it is where a restore met it, which is then put back once,
    and where it is lower than our cap, for a lower limit of others stays.
    """
    landed = next((mw for mw in gpu.lost_mw if near(mw, found_mw)), None)
    if landed is not None:  # it waits for nothing any more
        gpu = turn.change_gpu(gpu.uuid, lost_mw=tuple(mw for mw in gpu.lost_mw if mw != landed))
    known = (gpu.requested_mw, gpu.doubt_mw, gpu.restored_mw, gpu.fell_mw, *gpu.issued_mw)
    if any(near(found_mw, value_mw) for value_mw in known if value_mw is not None):
        return turn.change_gpu(gpu.uuid, restored_mw=None)
    if pending.ours.current_mw is not None:
        turn.conflict(gpu, found_mw)
    again = gpu.restored_mw is not None  # who writes at each of our sets is not chased
    if pending.ours.current_mw is None or pending.restores or found_mw < pending.cap_mw - TOLERANCE_MW:
        turn.record_prior(gpu, found_mw, "read", pending.run)
    return turn.change_gpu(gpu.uuid, restored_mw=pending.cap_mw if pending.restores and not again else None)


def settle(turn: Turn, gpu: Gpu) -> None:
    """Whether the limit that the device took is in force."""
    pending, enforced_mw = gpu.pending, gpu.enforced_mw
    if pending is None or not pending.settling or enforced_mw is None:
        return
    if gpu.overtaken_mw > pending.cap_mw + TOLERANCE_MW:
        if not _is_new(gpu, enforced_mw, pending):
            return
        gpu = turn.change_gpu(gpu.uuid, overtaken_mw=0)
    in_force = _took_effect(enforced_mw, pending)
    if in_force and not pending.raises:
        in_force = _draw_follows(turn, gpu, pending)
    if in_force:
        settled(turn, gpu)


def _is_new(gpu: Gpu, enforced_mw: int, pending: Pending) -> bool:
    """Whether only this set can have made the limit what it is. Limits come into force in the order of their sets, so
    what was there before it may yet be followed by a raise that it overtook."""
    return near(enforced_mw, pending.cap_mw) and not any(near(enforced_mw, mw) for mw in gpu.earlier_mw)


def _took_effect(enforced_mw: int, pending: Pending) -> bool:
    """Whether the enforced limit is the new one. The old one may lie within a board's rounding of it."""
    if enforced_mw == pending.cap_mw or (not pending.raises and enforced_mw < pending.cap_mw):
        return True
    return near(enforced_mw, pending.cap_mw) and enforced_mw != pending.before_mw


def _draw_follows(turn: Turn, gpu: Gpu, pending: Pending) -> bool:
    """Whether the watts are really given back: a board follows its cap within a second, not at once.

    A draw that is unknown, or stays above the cap (the clock floor, an averaging sensor), is waited for no longer.
    """
    if gpu.draw_mw is None or gpu.draw_mw <= pending.cap_mw + TOLERANCE_MW:
        return True
    return turn.now_ns - pending.since_ns >= turn.state.settings.draw_settle_ns


def settled(turn: Turn, gpu: Gpu) -> None:
    """The set is over: acknowledge it."""
    assert gpu.pending is not None
    tell_readback(turn, gpu.uuid, gpu.requested_mw, gpu.enforced_mw, gpu.pending.cap_mw)
    turn.change_gpu(gpu.uuid, pending=None, set_fault="")
    turn.report_soon()


def tell_readback(
    turn: Turn, uuid: GpuId, requested_mw: int | None, enforced_mw: int | None, cap_mw: int
) -> None:
    turn.audit("readback", uuid=uuid, requested_mw=requested_mw, enforced_mw=enforced_mw, cap_mw=cap_mw)


# ------------------------------------------------------------------------------- limits not as we left them


def noticed(turn: Turn, gpu: Gpu, found_mw: int) -> Gpu:
    """Compare a limit just read, above ours, with what we left there, and count by cause what is no longer ours.

    ``gpu`` is as it was before that reading. A fall that needs no writer is told here; the value of a writer is told
    when it is replaced.
    """
    ours_mw, before_mw, settings = gpu.current_mw, gpu.requested_mw, turn.state.settings
    if ours_mw is None or not gpu.confirmed or gpu.setting:
        return gpu
    if found_mw <= ours_mw + TOLERANCE_MW or found_mw == gpu.made_mw:
        if gpu.reapplied and turn.now_ns > gpu.reapply_at_ns + settings.reapply_most_ns:
            turn.calm(gpu.uuid)
        return turn.change_gpu(gpu.uuid, fell_mw=None)
    if found_mw == before_mw or (gpu.doubt_mw is not None and near(found_mw, gpu.doubt_mw)):
        return gpu
    cause: Cause = "default value" if found_mw == gpu.default_mw else "another value"
    if gpu.gone:
        cause = "reset"
    count_reverted(turn, cause)
    fell = cause == "reset" or (cause == "default value" and gpu.persistence is not True)
    if fell:
        turn.audit("reverted", uuid=gpu.uuid, ours_mw=ours_mw, found_mw=found_mw, cause=cause)
    return turn.change_gpu(gpu.uuid, fell_mw=found_mw if fell else None)


def count_reverted(turn: Turn, cause: Cause) -> None:
    """One more cap that was found lifted."""
    turn.change(reverted={**turn.state.reverted, cause: turn.state.reverted.get(cause, 0) + 1})


def landed_late(turn: Turn, uuid: GpuId) -> None:
    """A set that was never answered was done after all, on a GPU that rests: it is ours and goes like any other."""
    gpu = turn.state.gpus[uuid]
    found_mw, prior_mw = gpu.requested_mw, gpu.prior_mw
    if found_mw is None or prior_mw is None or gpu.current_mw is not None or gpu.pending is not None:
        return
    if gpu.blocked or near(found_mw, prior_mw):
        return
    late_mw = next((mw for mw in gpu.lost_mw if near(mw, found_mw)), None)
    if late_mw is None:
        return
    gpu = turn.change_gpu(uuid, lost_mw=tuple(mw for mw in gpu.lost_mw if mw != late_mw))
    turn.audit("landed_late", uuid=uuid, cap_mw=late_mw, reason="a set without an answer was done after all")
    turn.hold(gpu, late_mw, "")
    turn.report_soon()


def resolved(turn: Turn, uuid: GpuId) -> None:
    """A set failed, and the device has been read since: what it shows says what became of it.

    Changed nothing: the value comes off the record, unless a call without an answer may still set it. Near to it: the
    board's rounding, and so a value of ours as well.
    """
    gpu = turn.state.gpus[uuid]
    undo, found_mw, asked_mw = gpu.undo, gpu.requested_mw, gpu.current_mw
    if undo is None or found_mw is None or asked_mw is None:
        return
    if found_mw == undo.requested_mw and not near(found_mw, asked_mw):
        if gpu.doubt_mw is not None:
            return  # it may still be done
        gpu = turn.change_gpu(
            uuid,
            current_mw=undo.current_mw,
            issued_mw=tuple(dict.fromkeys((*undo.issued_mw, *gpu.lost_mw))),
            confirmed=undo.confirmed,
            undo=None,
        )
        turn.write_journal(gpu)
    elif not near(found_mw, asked_mw) and abs(found_mw - asked_mw) <= _ROUNDED * asked_mw:
        gpu = turn.change_gpu(
            uuid,
            issued_mw=tuple(dict.fromkeys((*gpu.issued_mw, found_mw))),
            made_mw=found_mw,
            confirmed=True,
            undo=None,
            failures=0,
            set_fault="",
        )
        turn.write_journal(gpu)
        turn.report_soon()
