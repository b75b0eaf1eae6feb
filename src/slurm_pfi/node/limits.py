"""What one GPU should be held at, and what is to be done about it. Each GPU is judged on its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from msgspec import structs

from ..gpu.device import DeviceInfo
from ..gpu.journal import JournalEntry, PriorSource
from ..model import PlanStep, Run
from ..units import MW_PER_W
from .state import TOLERANCE_MW, Gpu, State, near


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The limit that a GPU should have now. At its prior limit it rests. ``reason`` goes into the audit log."""

    cap_mw: int
    reason: str
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Set:
    """Ask the device for this. ``conflict_mw``: a foreign value that is being replaced."""

    cap_mw: int
    reason: str
    run: str
    raises: bool
    restores: bool
    conflict_mw: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """No limit of ours stands any more. ``conflict_mw``: a foreign value found there, which stays."""

    conflict_mw: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The device stands where it should: only the journal has to say so."""

    cap_mw: int
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveForeign:
    """Somebody lowered the limit below ours; within a window that is left alone."""

    found_mw: int


Decision: TypeAlias = Set | Rest | Record | LeaveForeign | None


def wanted(state: State, gpu: Gpu, step: PlanStep, reason: str) -> Wanted | None:
    """The limit this step wants for a GPU with a known prior limit; None where we must not judge.

    A GPU of several runs gets the highest of their caps; a run that the step does not name counts with the park cap,
    as it would have the GPU alone. A GPU that may belong to a run which leads to no GPU is left alone, but for going
    back to its prior limit.
    """
    prior_mw = gpu.prior_mw
    if prior_mw is None:
        return None
    here = [run for run, seen in state.runs.items() if gpu.uuid in seen.gpus]
    caps = [(cap.cap_mw, cap.run) for cap in step.caps if cap.run in here]
    if caps:
        cap_mw, run = max(((cap if cap is not None else prior_mw), run) for cap, run in caps)
        if step.park_cap_mw is not None and len(caps) < len(here):
            cap_mw = max(cap_mw, step.park_cap_mw)
        if cap_mw >= prior_mw:
            return Wanted(cap_mw=prior_mw, reason=f"restore: {reason}", run=str(run))
        return _within(gpu, cap_mw, reason, run)
    if step.park_cap_mw is None:
        return Wanted(cap_mw=prior_mw, reason=f"restore: {reason}")
    if gpu.position is None and any(seen.unknown for seen in state.runs.values()):
        return None
    return _within(gpu, step.park_cap_mw, f"park: {reason}", None)


def decide(gpu: Gpu, want: Wanted, now_ns: int) -> Decision:
    """What to do now so that this GPU comes to the wanted limit; None when nothing, or not yet."""
    if gpu.blocked or gpu.setting or gpu.prior_mw is None or gpu.requested_mw is None:
        return None
    if now_ns < gpu.retry_at_ns or gpu.driver_lost:
        return None
    if want.cap_mw >= gpu.prior_mw:
        return _restore(gpu, want)
    found_mw = gpu.requested_mw
    if found_mw == gpu.made_mw and gpu.current_mw == want.cap_mw:
        return None  # the board has no nearer value
    # Only against the very value that was asked for may a difference be the board's rounding.
    tolerance_mw = TOLERANCE_MW if gpu.current_mw == want.cap_mw else 0
    if found_mw > want.cap_mw + tolerance_mw:
        return _lower(gpu, want, now_ns)
    if found_mw < want.cap_mw - tolerance_mw:
        return _raise(gpu, want)
    if gpu.current_mw is not None and gpu.current_mw != want.cap_mw:
        return Record(cap_mw=want.cap_mw, run=want.run)
    return None


def _restore(gpu: Gpu, want: Wanted) -> Decision:
    assert gpu.prior_mw is not None and gpu.requested_mw is not None
    if gpu.current_mw is None:
        return None
    back_mw = min(max(gpu.prior_mw, gpu.min_mw), gpu.max_mw)  # the range may have shrunk since
    restore = Set(cap_mw=back_mw, reason=want.reason, run=want.run, raises=True, restores=True)
    if near(gpu.requested_mw, back_mw) and gpu.requested_mw not in gpu.issued_mw:
        # The prior limit, as far as the board's rounding shows it. A set whose answer was lost may stand there by now.
        return Rest() if gpu.doubt_mw is None else restore
    # Any value of this boot counts as ours: after failed sets an older one of ours may still stand there, and
    # leaving it would leave a cap behind.
    if not gpu.is_ours(gpu.requested_mw):
        return Rest(conflict_mw=gpu.requested_mw)
    return replace(restore, raises=gpu.requested_mw < back_mw)


def _lower(gpu: Gpu, want: Wanted, now_ns: int) -> Decision:
    """The device stands above what is wanted."""
    assert gpu.requested_mw is not None
    ask = Set(cap_mw=want.cap_mw, reason=want.reason, run=want.run, raises=False, restores=False)
    if gpu.current_mw is None or near(gpu.requested_mw, gpu.current_mw):
        return ask
    if gpu.doubt_mw is not None and near(gpu.requested_mw, gpu.doubt_mw):
        return ask  # a restore whose answer was lost: nobody else wrote
    if gpu.requested_mw in (gpu.fell_mw, gpu.restored_mw):
        return replace(ask, reason=f"re-applied: {want.reason}")  # nobody to give way to
    if not gpu.confirmed or want.cap_mw < gpu.current_mw - TOLERANCE_MW:
        # Neither a set that is still to be made nor a new, lower order waits because somebody else wrote in between.
        return replace(ask, conflict_mw=_unsaid(gpu))
    if now_ns < gpu.reapply_at_ns:
        return None
    return replace(ask, reason=f"re-applied: {want.reason}", conflict_mw=gpu.requested_mw)


def _unsaid(gpu: Gpu) -> int | None:
    """A foreign value on the device that was not reported yet; None when it is, or may be, one of ours or the prior."""
    found_mw = gpu.requested_mw
    if found_mw is None or gpu.is_ours(found_mw) or found_mw == gpu.foreign_mw:
        return None
    # Without a read-back the prior limit is what a set without effect leaves.
    expected_mw = gpu.prior_mw if not gpu.confirmed else None
    return None if expected_mw is not None and near(found_mw, expected_mw) else found_mw


def _raise(gpu: Gpu, want: Wanted) -> Decision:
    """The device stands below what is wanted: ours may go up, somebody else's stays."""
    assert gpu.requested_mw is not None
    if gpu.current_mw is None:
        return None
    if not gpu.is_ours(gpu.requested_mw):
        return LeaveForeign(found_mw=gpu.requested_mw) if gpu.foreign_mw != gpu.requested_mw else None
    return Set(cap_mw=want.cap_mw, reason=want.reason, run=want.run, raises=True, restores=False)


def _within(gpu: Gpu, cap_mw: int, reason: str, run: Run | None) -> Wanted:
    """A cap in whole watts (the values issued stay few), within the device's range, never above the prior limit."""
    assert gpu.prior_mw is not None
    cap_mw = min(max(cap_mw - cap_mw % MW_PER_W, gpu.min_mw), gpu.max_mw, gpu.prior_mw)
    if cap_mw == gpu.prior_mw:
        reason = f"restore: {reason}"
    return Wanted(cap_mw=cap_mw, reason=reason, run="" if run is None else str(run))


# ------------------------------------------------------------------------------------------------ prior limits


def first_sight(info: DeviceInfo, position: int | None, entry: JournalEntry | str | None, now_ns: int) -> Gpu:
    """A GPU as it is found at start, with what its journal entry of this boot says of it.

    A text instead of an entry says why it cannot be read; then nothing on this GPU may be touched.
    """
    limits = info.limits
    gpu = Gpu(
        uuid=info.uuid,
        model=info.model,
        position=position,
        min_mw=limits.min_mw,
        max_mw=limits.max_mw,
        default_mw=limits.default_mw,
        persistence=info.persistence,
        settable=info.capabilities.settable,
        requested_mw=limits.requested_mw,
        enforced_mw=limits.enforced_mw,
        sm_clock_max_mhz=info.sm_clock_max_mhz,
        read_ns=now_ns,
        touched_ns=now_ns,
    )
    if isinstance(entry, str):
        return structs.replace(gpu, blocked=f"journal entry unreadable: {entry}")
    if entry is None:
        return gpu
    current_mw = entry.current_mw
    confirmed = current_mw is not None and near(current_mw, limits.requested_mw)
    return structs.replace(
        gpu,
        prior_mw=entry.prior_mw,
        how=entry.how,
        issued_mw=entry.issued_mw,
        current_mw=current_mw,
        confirmed=confirmed,
        doubt_mw=None if confirmed else current_mw,  # an earlier agent's set may still be under way
        lost_mw=entry.lost_mw if confirmed or current_mw is None else _with(entry.lost_mw, current_mw),
    )


def _with(values_mw: tuple[int, ...], value_mw: int) -> tuple[int, ...]:
    return values_mw if value_mw in values_mw else (*values_mw, value_mw)


def found_prior(gpu: Gpu) -> tuple[int, PriorSource] | None:
    """The prior limit as the device tells it, for a GPU that rests; None when there is nothing new to record.

    A limit that we issued in this boot is never one. Without any record only the default is believed.
    """
    found_mw = gpu.requested_mw
    if (
        found_mw is None
        or gpu.current_mw is not None
        or gpu.pending
        or gpu.blocked
        or gpu.doubt_mw is not None
    ):
        return None
    if gpu.prior_mw is None:
        return (found_mw, "default") if found_mw == gpu.default_mw and not gpu.is_ours(found_mw) else None
    if near(found_mw, gpu.prior_mw) or gpu.is_ours(found_mw):
        return None
    return found_mw, "read"
