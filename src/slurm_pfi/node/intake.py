"""Taking events into the state: devices, samples, answers to sets, job files, plans."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from ..gpu.device import DeviceFailure, DeviceInfo, DeviceSample, LibraryGoneError, LostError
from ..model import GpuId, Plan, Run
from .jobfile import JobFile
from .limits import first_sight, found_prior
from .messages import (
    DevicesListed,
    DevicesUnavailable,
    JobFilesRead,
    PlanRead,
    RemoveJobFile,
    Sampled,
    SavePlan,
)
from .plan import MAX_NUMBER, MAX_REASON, HeldPlan, malformed, refusal
from .sets import count_reverted, landed_late, noticed, resolved, settle, tell_readback
from .state import Gpu, Refused, SeenRun, State, near
from .telemetry import NOTHING_READ, Bounds, over_cap, taken
from .turn import Turn
from .wording import GONE_KINDS, NOT_LISTED, bare, device_fault

MEASURED = ("draw", "energy", "cap")
"""What of a GPU's readings may be wrong while it answers."""


# ------------------------------------------------------------------------------------------------------ plans


def plan_read(turn: Turn, event: PlanRead) -> None:
    """The plan of an earlier agent process of this boot goes on."""
    turn.fault("plan", event.fault)
    own, held = turn.state.settings, event.held
    if held is None or held.boot_id != own.boot_id:
        return
    if (held.plan.cluster, held.plan.node) != (own.cluster, own.node):
        return
    if wrong := malformed(turn.state, held.plan):
        turn.fault("plan", f"the plan saved is of no use: {wrong}; limits stay until a plan comes")
        return
    turn.change(held=held, held_from_file=True, highest_epoch=held.plan.id.epoch)


def plan_received(turn: Turn, plan: Plan) -> None:
    """Hold it, or say why not."""
    reason = refusal(turn.state, plan, turn.now_ns)[:MAX_REASON]  # it may hold text of the plan
    turn.report_soon()
    if reason:
        epoch, seq = (max(-MAX_NUMBER, min(number, MAX_NUMBER)) for number in (plan.id.epoch, plan.id.seq))
        last = Refused(plan=f"{epoch}/{seq}", reason=reason, at_ns=turn.now_ns)
        turn.change(refused=f"plan {epoch}/{seq} refused: {reason}", last_refused=last)
        turn.audit("plan_refused", epoch=epoch, seq=seq, reason=reason)
        return
    turn.audit("plan_accepted", epoch=plan.id.epoch, seq=plan.id.seq, reason=plan.reason)
    held = HeldPlan(plan=plan, boot_id=turn.state.settings.boot_id, received_ns=turn.now_ns)
    turn.change(held=held, held_from_file=False, highest_epoch=plan.id.epoch)
    turn.do(SavePlan(held=held))
    _take_priors(turn, plan)
    for run in plan.gone:
        if run in turn.state.runs:
            turn.do(RemoveJobFile(run=run))
            _drop_run(turn, run, "controller")


def _take_priors(turn: Turn, plan: Plan) -> None:
    """The controller remembers a limit before us that this node no longer knows.

    What is found below it is a cap of ours whose record was lost: it is held as such, or it would be the prior limit
    from the next reading on, and stay for ever.
    """
    for uuid, prior_mw in plan.priors.items():
        gpu = turn.state.gpus.get(uuid)
        if gpu is None or gpu.prior_mw is not None or gpu.blocked or gpu.requested_mw is None:
            continue
        if gpu.min_mw <= prior_mw <= gpu.max_mw and not gpu.is_ours(prior_mw):
            turn.record_prior(gpu, prior_mw, "controller")
            if gpu.requested_mw < prior_mw and not near(gpu.requested_mw, prior_mw):
                turn.hold(turn.state.gpus[uuid], gpu.requested_mw, "")


# ------------------------------------------------------------------------------------------------------- runs


def job_files_read(turn: Turn, event: JobFilesRead) -> None:
    """Compare what is there with what was; of one job only its newest run counts."""
    newest: dict[int, JobFile] = {}
    for file in sorted(event.files, key=lambda file: file.restart):
        older = newest.get(file.job_id)
        if older is not None:
            turn.do(RemoveJobFile(run=_run(turn.state, older)))
        newest[file.job_id] = file
    present = {_run(turn.state, file): file for file in newest.values()}
    for run in tuple(turn.state.runs):
        if run not in present:
            newer = any(other.job_id == run.job_id for other in present)
            _drop_run(turn, run, "newer run" if newer else "epilog")
    for run, file in present.items():
        said = SeenRun(run=run, uid=file.uid, flex=file.flex, positions=file.gpus)
        seen = _locate(said, turn.state.positions)
        if turn.state.runs.get(run) != seen:  # new, or its prolog has run again and says otherwise
            turn.change(runs={**turn.state.runs, run: seen})
            turn.audit("run_seen", run=str(run), gpus=list(seen.gpus), reason="job file")
            turn.report_soon()
            if seen.unknown:
                turn.relist_soon()  # gres.conf or the slices of a board may be others by now
    turn.change(jobs_read=True)


def _run(state: State, file: JobFile) -> Run:
    return Run(cluster=state.settings.cluster, job_id=file.job_id, restart=file.restart)


def _drop_run(turn: Turn, run: Run, reason: str) -> None:
    gpus = turn.state.runs[run].gpus
    turn.change(runs={other: seen for other, seen in turn.state.runs.items() if other != run})
    turn.audit("run_gone", run=str(run), gpus=list(gpus), reason=reason)
    turn.report_soon()


def _locate_runs(turn: Turn) -> None:
    """The map from positions to GPUs is new: find each run's GPUs again, and say so where they are others."""
    for run, seen in tuple(turn.state.runs.items()):
        found = _locate(seen, turn.state.positions)
        turn.change(runs={**turn.state.runs, run: found})
        if found.gpus != seen.gpus:
            turn.audit("run_seen", run=str(run), gpus=list(found.gpus), reason="GPUs found")


def _locate(seen: SeenRun, positions: dict[int, GpuId]) -> SeenRun:
    """The GPUs of a run, each once: several slices may lie on one board.

    A position that leads nowhere is kept as such, never replaced by another.
    """
    return replace(
        seen,
        gpus=tuple(dict.fromkeys(positions[place] for place in seen.positions if place in positions)),
        unknown=tuple(place for place in seen.positions if place not in positions),
    )


# ---------------------------------------------------------------------------------------------------- devices


def devices_unavailable(turn: Turn, event: DevicesUnavailable) -> None:
    """No list: the agent stays up, says so and tries again, slowly."""
    turn.fault("nvml", event.error)
    turn.change(listing=False, relist_at_ns=turn.now_ns + turn.state.relist_pause_ns)


def devices_listed(turn: Turn, event: DevicesListed) -> None:
    """Take the list in. Limits of ours die with the driver, so after its restart each GPU is new to us."""
    before, settings = turn.state.gpus, turn.state.settings
    same_driver = turn.state.listed and turn.state.driver_start == event.driver_start
    old = before if same_driver else {}
    place_of = {uuid: place for place, uuid in sorted(event.positions.items(), reverse=True)}
    listed: dict[GpuId, Gpu] = {}
    for info in event.devices:
        if info.uuid in old and not old[info.uuid].blocked:
            listed[info.uuid] = _listed(turn, old[info.uuid], info, place_of.get(info.uuid))
            continue
        entry = event.journal.get(info.uuid)
        listed[info.uuid] = first_sight(info, place_of.get(info.uuid), entry, turn.now_ns)
        if info.uuid in before:
            _new_driver(turn, before[info.uuid], info)
    failed = {failure.uuid: failure for failure in event.failures}
    missing = {uuid: _missing(gpu, failed.get(uuid)) for uuid, gpu in old.items() if uuid not in listed}
    known = {uuid: _paced(turn, before.get(uuid), gpu) for uuid, gpu in {**listed, **missing}.items()}
    blocked = any(gpu.blocked for gpu in listed.values())  # its entry may be put right, the disk freed
    unsound = bool(event.failures or missing or blocked)
    first = not turn.state.listed
    again_ns = settings.relist_ns if unsound else settings.survey_ns
    if event.map_fault:
        again_ns = turn.state.relist_pause_ns  # a file system that was slow for a moment answers by then
    turn.change(
        gpus={uuid: known[uuid] for uuid in (*old, *listed)},  # reports keep their order
        # One that does not answer stays where it was: its run must not pass for a run without a GPU.
        positions={place: uuid for place, uuid in turn.state.positions.items() if uuid in missing}
        | event.positions,
        driver_start=event.driver_start,
        listed=True,
        listing=False,
        relist_at_ns=turn.now_ns + again_ns,
    )
    _locate_runs(turn)
    _tell_failures(turn, event.failures)
    turn.fault("map", event.map_fault)
    if first:
        _adopt(turn)
    for uuid in turn.state.gpus:
        learn_prior(turn, uuid)
    turn.report_soon()


def _tell_failures(turn: Turn, failures: tuple[DeviceFailure, ...]) -> None:
    """Each once: a GPU that is unknown by now says so itself, and one that is still read is named as not listed."""
    gpus = turn.state.gpus
    others = [failure for failure in failures if failure.uuid not in gpus]
    texts = [f"{one.uuid}: {bare(one.uuid, one.message)}" if one.uuid else one.message for one in others]
    turn.fault("nvml", "; ".join(texts))
    failed = {failure.uuid: failure for failure in failures}
    for what in tuple(turn.state.faults):
        if what.startswith(NOT_LISTED) and what.removeprefix(NOT_LISTED) not in gpus:
            turn.fault(what, "")
    for uuid, gpu in gpus.items():
        failure = failed.get(uuid) if gpu.requested_mw is not None else None
        told = f"{uuid}: cannot be listed: {_why(gpu, failure.kind, failure.message)}" if failure else ""
        turn.fault(NOT_LISTED + uuid, told)


def _why(gpu: Gpu, kind: str, message: str) -> str:
    return device_fault(gpu.uuid, kind, message, capped=gpu.current_mw is not None)


def _listed(turn: Turn, gpu: Gpu, info: DeviceInfo, position: int | None) -> Gpu:
    """A GPU that is known already: all of it may have changed but who it is."""
    limits = info.limits
    if not gpu.setting and gpu.touched_ns < turn.state.list_asked_ns:  # else its limits are older than a set
        gpu = structs.replace(
            noticed(turn, gpu, limits.requested_mw),
            requested_mw=limits.requested_mw,
            enforced_mw=limits.enforced_mw,
            read_ns=turn.now_ns,
            read_fault="",
            gone=False,
        )
    return structs.replace(
        gpu,
        position=position,
        min_mw=limits.min_mw,
        max_mw=limits.max_mw,
        default_mw=limits.default_mw,
        persistence=info.persistence,
        settable=info.capabilities.settable,
        driver_lost=False,
    )


def _paced(turn: Turn, before: Gpu | None, gpu: Gpu) -> Gpu:
    """One whose limit cannot be set, as was found out without trying, is tried all the same, but seldom."""
    if gpu.settable is not False or (before is not None and before.settable is False):
        return gpu
    return structs.replace(gpu, retry_at_ns=turn.now_ns + turn.state.settings.survey_ns)


def _missing(gpu: Gpu, failure: DeviceFailure | None) -> Gpu:
    """A GPU that was there. One that only does not answer keeps its last safe state until its readings are old."""
    if failure is not None and failure.kind not in GONE_KINDS:
        return structs.replace(gpu, read_fault=_why(gpu, failure.kind, failure.message))
    kind, message = (failure.kind, failure.message) if failure else (LostError.__name__, "no longer listed")
    why = _why(gpu, kind, message)
    return structs.replace(gpu, requested_mw=None, enforced_mw=None, draw_mw=None, read_fault=why, gone=True)


def _new_driver(turn: Turn, gpu: Gpu, info: DeviceInfo) -> None:
    """What stood there before the driver was loaded anew, and is now lifted, is counted."""
    ours_mw, found_mw = gpu.current_mw, info.limits.requested_mw
    if ours_mw is not None and found_mw > ours_mw and not near(found_mw, ours_mw):
        count_reverted(turn, "driver restart")
        fields = {"uuid": gpu.uuid, "ours_mw": ours_mw, "found_mw": found_mw}
        turn.audit("reverted", **fields, cause="driver restart")


def _adopt(turn: Turn) -> None:
    """Say what an earlier agent process left; nothing is raised because of it."""
    capped = sum(gpu.current_mw is not None for gpu in turn.state.gpus.values())
    held = turn.state.held
    if capped or held is not None:
        plan = f"plan {held.plan.id.epoch}/{held.plan.id.seq}" if held else "no plan"
        turn.audit("adopted", reason=f"{capped} GPUs hold limits of ours, {plan} held")


def learn_prior(turn: Turn, uuid: GpuId) -> None:
    """Record the limit before us as soon as the device tells it."""
    landed_late(turn, uuid)
    gpu = turn.state.gpus[uuid]
    prior = found_prior(gpu)
    if prior is not None:
        turn.record_prior(gpu, *prior)


def sampled(turn: Turn, event: Sampled) -> None:
    """Take readings in; one that failed or is missing keeps the last safe state for a while, then all is unknown."""
    turn.change(**({"quick_sampling": False} if event.quick else {"sampling": False}))
    told = {sample.uuid for sample in event.samples}
    for known in () if event.quick else tuple(turn.state.gpus.values()):  # a quick one asks only some
        if known.uuid not in told and turn.now_ns - known.read_ns > turn.state.settings.response_ns:
            _unread(turn, known, "its readings do not come", gone=False)
    for sample in event.samples:
        gpu = turn.state.gpus.get(sample.uuid)
        if gpu is None:
            continue
        if isinstance(sample, DeviceFailure):
            why = _why(gpu, sample.kind, sample.message)
            _unread(turn, gpu, why, gone=sample.kind in GONE_KINDS)
            if sample.kind == LibraryGoneError.__name__:
                turn.driver_lost(sample.uuid)
        elif gpu.driver_lost:  # it answers again: who it is comes before what it says
            turn.change(relist_at_ns=min(turn.state.relist_at_ns, turn.now_ns))
            _unread(turn, gpu, "to be listed anew", gone=False)
        else:
            _read(turn, _measured(turn, gpu, sample, event), sample)
    if event.map_changed:
        turn.relist_soon()
    if not event.quick:
        turn.report_soon()


def _unread(turn: Turn, gpu: Gpu, fault: str, *, gone: bool) -> None:
    settings = turn.state.settings
    gpu = turn.change_gpu(gpu.uuid, read_fault=fault, draw_mw=None, telemetry=NOTHING_READ)
    for what in MEASURED:
        turn.fault(f"{what} of {gpu.uuid}", "")
    if gone or turn.now_ns - gpu.read_ns > settings.response_ns:
        turn.change_gpu(gpu.uuid, requested_mw=None, enforced_mw=None, gone=gpu.gone or gone)
        turn.fault(NOT_LISTED + gpu.uuid, "")  # it says itself what is wrong
        turn.relist_soon()  # the device or the driver may have been replaced


def _measured(turn: Turn, gpu: Gpu, sample: DeviceSample, event: Sampled) -> Gpu:
    """What the reading says of draw and activity, as far as it can be."""
    bounds = Bounds(max_mw=gpu.max_mw, sm_clock_max_mhz=gpu.sm_clock_max_mhz)
    found = taken(gpu.telemetry, sample, bounds, quick=event.quick, asked=event.activity)
    gpu = turn.change_gpu(gpu.uuid, draw_mw=found.draw_mw, telemetry=found.telemetry)
    texts = {"draw": found.draw_fault}
    if not event.quick:
        capped = gpu.current_mw is not None and gpu.pending is None
        since_ns = gpu.touched_ns + turn.state.settings.settle_ns
        texts["energy"] = found.energy_fault
        texts["cap"] = over_cap(found.telemetry, gpu.enforced_mw if capped else None, since_ns)
    for what, text in texts.items():
        turn.fault(f"{what} of {gpu.uuid}", f"{gpu.uuid}: {text}" if text else "")
    return gpu


def _read(turn: Turn, gpu: Gpu, sample: DeviceSample) -> None:
    if gpu.setting or sample.monotonic_ns < gpu.touched_ns:
        return  # what it says of limits is older than the set
    if sample.requested_mw is None or sample.enforced_mw is None:
        _unread(turn, gpu, "limits not read", gone=False)
        return
    ours = gpu.current_mw is not None and near(sample.requested_mw, gpu.current_mw)
    sure = sample.monotonic_ns > gpu.touched_ns + turn.state.settings.deadline_ns
    if (sample.requested_mw, sample.enforced_mw) != (gpu.requested_mw, gpu.enforced_mw):
        turn.report_soon()
    late = gpu.pending is None and gpu.enforced_mw is not None and gpu.enforced_mw > sample.enforced_mw
    if late and sample.enforced_mw == gpu.current_mw:  # in force after it was no longer waited for
        tell_readback(turn, gpu.uuid, sample.requested_mw, sample.enforced_mw, sample.enforced_mw)
    gpu = noticed(turn, gpu, sample.requested_mw)
    gpu = turn.change_gpu(
        gpu.uuid,
        requested_mw=sample.requested_mw,
        enforced_mw=sample.enforced_mw,
        read_ns=turn.now_ns,
        read_fault="",
        gone=False,
        confirmed=gpu.confirmed or ours,
        foreign_mw=None if ours else gpu.foreign_mw,
        doubt_mw=None if sure else gpu.doubt_mw,
        overtaken_mw=gpu.overtaken_mw if sample.monotonic_ns < gpu.overtaken_until_ns else 0,
    )
    resolved(turn, gpu.uuid)
    settle(turn, turn.state.gpus[gpu.uuid])
    learn_prior(turn, gpu.uuid)
