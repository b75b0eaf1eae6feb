"""The node agent without the world: ``step(state, event, now_ns) -> (state, actions)``.

Pure: no clock, file, socket or randomness. Handlers take in what happened; ``_act`` then does whatever is due. The
shell carries the actions out in their order, and wakes the core again at ``next_deadline_ns``.
"""

from __future__ import annotations

from msgspec import structs

from ..model import GpuId, PlanStep
from . import intake, sets
from .limits import LeaveForeign, Record, Rest, Set, Wanted, decide, wanted
from .messages import (
    Action,
    Connected,
    DevicesFreed,
    DevicesListed,
    DevicesUnavailable,
    Event,
    Exit,
    FaultChanged,
    FreeDevices,
    JobFilesRead,
    LeaveRestorer,
    ListDevices,
    PlanRead,
    PlanReceived,
    Reconfigured,
    ReleaseAsked,
    ResumeAsked,
    Sample,
    Sampled,
    SavePlan,
    SetDone,
    SetFailed,
    StopAsked,
    Tick,
)
from .state import LET_GO, TOLERANCE_MW, Gpu, Settings, State
from .turn import Turn

__all__ = ["initial_state", "next_deadline_ns", "step", "wants"]


def initial_state(settings: Settings, now_ns: int) -> State:
    """An agent that knows nothing yet, and so touches nothing."""
    return State(
        settings=settings,
        started_ns=now_ns,
        list_asked_ns=now_ns - settings.survey_ns,
        relist_at_ns=now_ns,
        report_due_ns=now_ns,
    )


def step(state: State, event: Event, now_ns: int) -> tuple[State, tuple[Action, ...]]:
    """Take one event in at ``now_ns`` (CLOCK_MONOTONIC) and decide what is to be done, in order."""
    if state.stopped:
        return state, ()
    turn = Turn(state, now_ns)
    _take_in(turn, event)
    _act(turn)
    return turn.state, tuple(turn.actions)


def next_deadline_ns(state: State, now_ns: int) -> int:
    """When the core wants a Tick if nothing happens before."""
    if state.stopping_ns is not None:  # all else has ended
        return max(now_ns, state.stopping_ns + state.settings.stop_ns)
    due: list[int | None] = []
    if not state.listing and not state.freeing:
        due.append(state.relist_at_ns)
    if state.gpus and not state.sampling and not state.freeing:
        due.append(state.sample_due_ns)
    if not state.quick_sampling and not state.freeing:
        due.append(state.quick_due_ns)
    if state.connected and _knows_itself(state):
        due.append(state.report_due_ns)
    given_up_ns = state.released_ns + state.settings.release_ns
    if state.released and not state.freeing and given_up_ns > now_ns:
        due.append(given_up_ns)
    if state.held is not None:
        due.append(state.held.next_ns(now_ns, skip_lease=state.settings.skip_lease))
    for gpu in state.gpus.values():
        due.extend(at for at in (gpu.retry_at_ns, gpu.reapply_at_ns) if at > now_ns)
        if gpu.pending is not None and gpu.pending.settling and not gpu.set_fault:
            due.append(gpu.pending.since_ns + state.settings.settle_ns)
    return max(now_ns, min((at for at in due if at is not None), default=now_ns + state.settings.report_ns))


def _take_in(turn: Turn, event: Event) -> None:  # noqa: PLR0912 - one case for each event
    match event:
        case Tick():
            pass
        case PlanRead():
            intake.plan_read(turn, event)
        case DevicesListed():
            intake.devices_listed(turn, event)
        case DevicesUnavailable():
            intake.devices_unavailable(turn, event)
        case JobFilesRead():
            intake.job_files_read(turn, event)
        case PlanReceived():
            intake.plan_received(turn, event.plan)
        case Sampled():
            intake.sampled(turn, event)
        case SetDone():
            sets.set_done(turn, event)
        case SetFailed() if event.not_tried:
            if event.uuid in turn.state.gpus:
                turn.set_not_tried(event.uuid, event.error)
        case SetFailed():
            if event.uuid in turn.state.gpus:
                turn.set_failed(event.uuid, event.error, in_doubt=event.in_doubt, lasting=event.lasting)
        case FaultChanged():
            turn.fault(event.what, event.text)
        case Connected():
            turn.change(connected=event.up)
            if event.up:
                turn.report_soon()
        case ReleaseAsked():
            _release(turn)
        case ResumeAsked():
            _resume(turn)
        case DevicesFreed():
            _freed(turn)
        case Reconfigured():
            turn.change(settings=event.settings)
        case StopAsked():
            if turn.state.stopping_ns is None:
                turn.change(stopping_ns=turn.now_ns)


def _release(turn: Turn) -> None:
    """Everything back to its prior limit. The controller hears of it first, so that it can count with it."""
    turn.change(released=True, released_ns=turn.now_ns, held=None, held_from_file=False)
    turn.audit("released", reason="asked for by the admin")
    turn.do(SavePlan(held=None))
    # A GPU in back-off is tried at once: a person is waiting.
    turn.change(gpus={uuid: structs.replace(gpu, retry_at_ns=0) for uuid, gpu in turn.state.gpus.items()})
    if turn.state.connected:
        turn.send_report(turn.state.settings.report_ns)


def _resume(turn: Turn) -> None:
    if not turn.state.released:
        return
    # Meanwhile GPUs may have been reset, divided or replaced.
    turn.change(released=False, freeing=False, freed=False, relist_at_ns=turn.now_ns)
    turn.audit("resumed", reason="asked for by the admin")
    turn.report_soon()


def _freed(turn: Turn) -> None:
    """What becomes of the limits from now on, we do not see."""
    for uuid in turn.state.gpus if turn.state.freeing else ():
        turn.change_gpu(uuid, requested_mw=None, enforced_mw=None, draw_mw=None, read_fault=LET_GO)
    turn.change(freed=turn.state.freeing)
    turn.report_soon()


# ------------------------------------------------------------------------------------------------ what is due


def _act(turn: Turn) -> None:
    if turn.state.stopping_ns is not None:
        _stop(turn)
        return
    found = _step_in_force(turn)
    _expire_settling(turn)
    _set_limits(turn, found)
    period_ns = _period_ns(turn.state, found)
    _ask_devices(turn, period_ns)
    if turn.state.connected and _knows_itself(turn.state) and turn.now_ns >= turn.state.report_due_ns:
        turn.send_report(period_ns)


def _knows_itself(state: State) -> bool:
    """GPUs and job files have been looked for. A report before that would pass for a node without either."""
    return state.jobs_read and (state.listed or "nvml" in state.faults)


def _step_in_force(turn: Turn) -> PlanStep | None:
    state = turn.state
    if state.held is None:
        return None
    index, found = state.held.in_force(turn.now_ns, skip_lease=state.settings.skip_lease)
    now_in_force = (state.held.plan.id, index)
    if now_in_force != (state.in_force, state.in_force_step):
        turn.change(in_force=now_in_force[0], in_force_step=now_in_force[1])
        turn.report_soon()
    return found


def _period_ns(state: State, found: PlanStep | None) -> int:
    in_window = found is not None and found.park_cap_mw is not None
    return state.settings.report_window_ns if in_window else state.settings.report_ns


def _expire_settling(turn: Turn) -> None:
    """A limit that the device took but that does not come into force."""
    for gpu in tuple(turn.state.gpus.values()):
        pending = gpu.pending
        if pending is None or not pending.settling:
            continue
        if turn.now_ns - pending.since_ns < turn.state.settings.settle_ns:
            continue
        enforced_mw = gpu.enforced_mw
        if pending.raises or (enforced_mw is not None and enforced_mw <= pending.cap_mw + TOLERANCE_MW):
            # Raised, but another limit, of the board or its management controller, rules: that is lower, so it is
            # safe. Lowered and in force: only the draw could not be seen to follow.
            sets.settled(turn, gpu)
        elif not gpu.set_fault:
            turn.change_gpu(
                gpu.uuid,
                set_fault=f"set to {pending.cap_mw} mW, but {gpu.enforced_mw} mW is still enforced",
            )
            turn.report_soon()


def wants(state: State, found: PlanStep | None) -> dict[GpuId, Wanted]:
    """What every GPU that may be touched now should be held at, under the step in force."""
    ours = [gpu for gpu in state.gpus.values() if gpu.current_mw is not None and gpu.prior_mw is not None]
    if state.released:
        return {gpu.uuid: _back(gpu, "released by the admin") for gpu in ours}
    if state.held is None or found is None:
        return {}
    if state.held.plan.mode == "observe":
        return {gpu.uuid: _back(gpu, "observe only") for gpu in ours}
    capping = found.park_cap_mw is not None or any(cap.cap_mw is not None for cap in found.caps)
    if capping and not state.jobs_read:
        return {}  # which GPUs have a run is not known yet
    reason = state.held.plan.reason or "plan"
    if found.park_cap_mw is None:
        reason = "window over"
    each = ((gpu.uuid, wanted(state, gpu, found, reason)) for gpu in state.gpus.values())
    return {uuid: want for uuid, want in each if want is not None}


def _back(gpu: Gpu, why: str) -> Wanted:
    assert gpu.prior_mw is not None
    return Wanted(cap_mw=gpu.prior_mw, reason=f"restore: {why}")


def _set_limits(turn: Turn, found: PlanStep | None) -> None:
    """Every lowering first; raises only when none is under way. Each GPU is judged and fails on its own."""
    raises: list[tuple[Gpu, Set]] = []
    for uuid, want in wants(turn.state, found).items():
        gpu = turn.state.gpus[uuid]
        decision = decide(gpu, want, turn.now_ns)
        match decision:
            case Set() if decision.raises:
                raises.append((gpu, decision))
            case Set():
                turn.issue(gpu, decision)
            case Rest():
                if decision.conflict_mw is not None:
                    turn.conflict(gpu, decision.conflict_mw)
                turn.rest(uuid)
                intake.learn_prior(turn, uuid)
            case Record():
                turn.hold(gpu, decision.cap_mw, decision.run)
            case LeaveForeign():
                turn.conflict(gpu, decision.found_mw)
            case None:
                pass
    if _may_raise(turn, found):
        for gpu, ask in raises:
            turn.issue(gpu, ask)


def _may_raise(turn: Turn, found: PlanStep | None) -> bool:
    state = turn.state
    if state.released:
        return True  # an admin's order, which the controller has been told of, waits for nothing
    if any(_is_lowering(turn, gpu) for gpu in state.gpus.values()):
        return False
    if state.held is None or found is None or found.park_cap_mw is None or not state.held_from_file:
        return True
    # The plan of an earlier agent process: only what begins under our eyes is known to be due, and going back to the
    # prior limits, where that plan caps nothing.
    return state.held.plan.mode == "observe" or state.held.start_ns(found) > state.started_ns


def _is_lowering(turn: Turn, gpu: Gpu) -> bool:
    pending = gpu.pending
    if pending is None or pending.raises or gpu.failures:  # one that failed before keeps nobody waiting
        return False
    return turn.now_ns - pending.since_ns < turn.state.settings.settle_ns or not pending.settling


def _may_free(state: State, now_ns: int) -> bool:
    """Released, every GPU at rest (or given up, as it cannot be read or listed), and no question under way."""
    if not state.released or state.listing or state.sampling or state.quick_sampling:
        return False
    late = now_ns - state.released_ns >= state.settings.release_ns
    if not state.listed and not (late and "nvml" in state.faults):
        return False
    return all(
        gpu.pending is None and (gpu.current_mw is None or (late and _out_of_reach(gpu)))
        for gpu in state.gpus.values()
    )


def _out_of_reach(gpu: Gpu) -> bool:
    return gpu.requested_mw is None or gpu.settable is False or bool(gpu.blocked)


def _ask_devices(turn: Turn, period_ns: int) -> None:
    state = turn.state
    if not state.freeing and _may_free(state, turn.now_ns):
        turn.change(freeing=True)
        turn.do(FreeDevices())
    if turn.state.freeing:
        return  # a question would take them up again, and a reset would wait for us
    if not state.listing and turn.now_ns >= state.relist_at_ns:
        quiet = turn.now_ns - state.list_asked_ns >= state.settings.survey_ns
        turn.change(listing=True, list_asked_ns=turn.now_ns, relists=0 if quiet else state.relists + 1)
        turn.do(ListDevices())
    if not state.gpus:
        return
    if state.sample_due_ns > turn.now_ns + period_ns:
        turn.change(sample_due_ns=turn.now_ns + period_ns)  # a window has opened
    if not state.sampling and turn.now_ns >= turn.state.sample_due_ns:
        activity = turn.now_ns + period_ns // 2 >= state.activity_due_ns
        turn.change(sampling=True, sample_due_ns=turn.now_ns + period_ns)
        if activity:
            turn.change(activity_due_ns=turn.now_ns + state.settings.activity_ns)
        turn.do(Sample(uuids=tuple(state.gpus), activity=activity))
    _ask_settling(turn)


def _ask_settling(turn: Turn) -> None:
    """Watch closely while a limit that was taken is not yet in force."""
    state = turn.state
    young = tuple(
        gpu.uuid
        for gpu in state.gpus.values()
        if gpu.pending is not None and gpu.pending.settling and not gpu.set_fault
    )
    if not young:
        turn.change(quick_due_ns=None)
    elif state.quick_due_ns is None:
        turn.change(quick_due_ns=turn.now_ns + state.settings.settle_step_ns)
    elif turn.now_ns >= state.quick_due_ns and not state.quick_sampling:
        turn.change(quick_sampling=True, quick_due_ns=turn.now_ns + state.settings.settle_step_ns)
        turn.do(Sample(uuids=young, quick=True))


def _stop(turn: Turn) -> None:
    """Finish the sets under way, then go; what is capped stays so until the window's end."""
    state = turn.state
    assert state.stopping_ns is not None
    waiting = any(gpu.setting for gpu in state.gpus.values())
    if waiting and turn.now_ns - state.stopping_ns < state.settings.stop_ns:
        return
    capped = sum(gpu.current_mw is not None for gpu in state.gpus.values())
    unanswered = sorted(gpu.uuid for gpu in state.gpus.values() if gpu.setting)
    # Before the first list nobody knows what an earlier agent left; who comes at the window's end reads the journal.
    restore_at_ns = _restore_at_ns(turn) if capped or not state.listed else None
    gpus = "1 GPU keeps its limit" if capped == 1 else f"{capped} GPUs keep their limits"
    limits = gpus if state.listed else "limits of ours, if any, stay"
    if restore_at_ns is not None:
        in_s = max(0, restore_at_ns - turn.now_ns) / 1e9
        reason = f"{limits}; they are restored in {in_s:.1f} s"
        turn.do(LeaveRestorer(at_ns=restore_at_ns))
    elif capped or not state.listed:
        reason = (
            f"{limits} until an agent is back: no end of the window is known; "
            "'slurm-pfi node release' gives them back"
        )
    else:
        reason = "no GPU holds a limit of ours"
    if unanswered:
        reason += "; sets under way were not answered, so these GPUs are at the old or the new limit"
    turn.audit("stopped", reason=reason, unanswered=unanswered)
    turn.do(Exit())
    turn.change(stopped=True)


def _restore_at_ns(turn: Turn) -> int | None:
    """When the limits that are left behind lose their reason; None when that is not known."""
    state, now_ns = turn.state, turn.now_ns
    if state.released:
        return now_ns
    if state.held is None:
        return None
    skip_lease = state.settings.skip_lease
    _, found = state.held.in_force(now_ns, skip_lease=skip_lease)
    if state.held.plan.mode == "observe" or found.park_cap_mw is None:
        return now_ns
    return state.held.window_end_ns(now_ns, skip_lease=skip_lease)
