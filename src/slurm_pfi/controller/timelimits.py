"""What Slurm's time limits ask of the core: tighter floors for runs that would not be done in time, minutes given back.

Pure. The arithmetic is in ``deadline``; a limit that is changed with scontrol is seen at the next reading of all jobs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final, TypeAlias

import msgspec

from ..config import Config
from ..flex import parse_flex
from ..slurm.backend import JobInfo
from ..store.limits import schedule
from .budget import look
from .deadline import Ahead, Deadline, Work, is_due, judge
from .ledger import NS_PER_S
from .measuring.record import Record
from .runs import may_have_none
from .state import Action, AllJobsRead, Audit, RaiseTimeLimit, RunView, State, TimeLimitRaised

MOVED_S: Final = 5.0
"""An end that moved by more was changed by somebody; clocks that are read to the second move it by less."""

HEARD_S: Final = 60.0
"""A counter that is older counts as of so long ago: what was done since is not known."""

LOOK_S: Final = 10.0
RAISE_GAP_S: Final = 60.0
RETRY_S: Final = 30.0
BOUNDED_S: Final = 600.0
"""When to look again at a run: after its limit was raised, after Slurm gave no answer, where there is no room."""

Spans: TypeAlias = tuple[tuple[float, float], ...]
"""From and until when, in seconds from now, caps may hold runs down; in order, apart from each other."""


# ------------------------------------------------------------------------------------------------ what Slurm says


def timed(view: RunView, job: JobInfo, read_unix_s: float | None, now_ns: int) -> RunView:
    """The run with the end that Slurm has given its job; none while it is suspended, for then no time passes."""
    ends_ns = None
    if (
        read_unix_s is not None
        and isinstance(job.limit_s, int)
        and isinstance(job.end_unix_s, int)
        and job.state != "SUSPENDED"
    ):
        ends_ns = now_ns + round((job.end_unix_s - read_unix_s) * NS_PER_S)
        if view.ends_ns is not None and abs(ends_ns - view.ends_ns) < MOVED_S * NS_PER_S:
            ends_ns = view.ends_ns
    if view.job is not None:
        job = dataclasses.replace(
            view.job,
            state=job.state,
            start_unix_s=job.start_unix_s,
            end_unix_s=job.end_unix_s,
            limit_s=job.limit_s,
        )
        view = view if job == view.job else msgspec.structs.replace(view, job=job)
    return view if ends_ns == view.ends_ns else msgspec.structs.replace(view, ends_ns=ends_ns)


def all_timed(state: State, event: AllJobsRead, now_ns: int) -> State:
    """The same for every run, after a reading of all jobs."""
    jobs = {(job.job_id, job.restart): job for job in event.jobs or ()}
    runs = dict(state.runs)
    moved = False
    for run, view in state.runs.items():
        job = jobs.get((run.job_id, run.restart))
        if job is None or view.job is None or view.phase == "gone":
            continue
        runs[run] = timed(view, job, event.read_unix_s, now_ns)
        moved = moved or runs[run].ends_ns != view.ends_ns
    due_ns = 0 if moved else state.deadlines_due_ns
    return msgspec.structs.replace(state, runs=runs, deadlines_due_ns=due_ns)


# ------------------------------------------------------------------------------------------------ tighter floors


def due_deadlines(state: State, config: Config, now_ns: int, now_unix_s: float) -> tuple[State, list[Action]]:
    """Judge every run anew when it is time: as often as is learned, and when limits or an end have changed."""
    if now_ns < state.deadlines_due_ns:
        return state, []
    spans: Spans | None = None
    runs, told = dict(state.runs), []
    for run, view in state.runs.items():
        work = _work(view)
        found = None
        if work is not None and view.flex is not None and view.ends_ns is not None:
            spans = _capped_spans(state, config, now_ns, now_unix_s) if spans is None else spans
            left_s = _left_s(view, view.ends_ns, now_ns)
            ahead = Ahead(left_s, _within(spans, left_s))
            found = judge(work, ahead, view.flex.max_loss, _tightest(view, config), view.deadline)
        if found == view.deadline:
            continue
        runs[run] = msgspec.structs.replace(view, deadline=found)
        told += _told(runs[run], view.deadline)
    due_ns = now_ns + round(config.times.learn_s * NS_PER_S)
    return msgspec.structs.replace(state, runs=runs, deadlines_due_ns=due_ns), told


def _work(view: RunView) -> Work | None:
    """What is left to do; None where that is not known, or told by a counter that is not believed."""
    record: Record = view.record
    rate, heard, total = record.rate_per_s, record.heard, record.total
    if view.phase not in ("admitted", "waiting") or view.shares or record.doubted:
        return None
    if not rate or heard is None or total is None or heard.unit != record.unit:
        return None
    return Work(max(0.0, total - heard.counter), rate, record.baseline_sd, record.stalled)


def _left_s(view: RunView, ends_ns: int, now_ns: int) -> float:
    """Seconds until its end, from when its counter was heard."""
    heard = view.record.heard
    since_ns = now_ns - round(HEARD_S * NS_PER_S)
    if heard is not None:
        since_ns = min(now_ns, max(since_ns, heard.ns))
    return max(0.0, (ends_ns - since_ns) / NS_PER_S)


def _tightest(view: RunView, config: Config) -> float:
    """Down to which loss its time limit may tighten what its flex allows: a total is a user's word.

    It gives nobody more than they might have asked for.
    """
    if may_have_none(view.job, config):
        return 0.0
    return parse_flex(config.policy.time_limit_flex, site_default=config.policy.default_flex).max_loss


def _capped_spans(state: State, config: Config, now_ns: int, now_unix_s: float) -> Spans:
    """When caps may hold runs down, by the limits that are known and the rebound after each.

    Always, where no limit is known: then nobody can say when one begins, and how long it lasts.
    """
    if not state.limits_known:
        return ((0.0, math.inf),)
    site = look(state, config, now_ns)
    times = config.times
    steps = schedule(state.limits, now_unix_s, horizon_s=times.max_hold_s, lead_s=times.response_s)
    ends = [step.starts_in_s for step in steps[1:]] + [math.inf]
    found = [
        (step.starts_in_s, end_s + times.rebound_s)
        for step, end_s in zip(steps, ends, strict=True)
        if site.is_bound(step)
    ]
    if state.rebound is not None:
        found.append((0.0, (state.rebound.ends_ns - now_ns) / NS_PER_S))
    joined: list[tuple[float, float]] = []
    for start_s, end_s in sorted(found):
        if joined and start_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end_s, joined[-1][1]))
        else:
            joined.append((start_s, end_s))
    return tuple(joined) or ((0.0, math.inf),)


def _within(spans: Spans, left_s: float) -> float:
    """How much of the time left lies in these spans."""
    return sum(max(0.0, min(left_s, end_s) - start_s) for start_s, end_s in spans)


def _told(view: RunView, before: Deadline | None) -> list[Action]:
    """What the audit is told when a floor changes for a time limit, or no longer does."""
    now = view.deadline
    was = ("fits", None) if before is None else (before.verdict, before.max_loss)
    verdict, max_loss = ("fits", None) if now is None else (now.verdict, now.max_loss)
    if verdict == was[0] and (verdict != "tight" or max_loss == was[1]):
        return []
    fields = {
        "run": str(view.run),
        "verdict": verdict if now is not None else "unknown",
        "max_loss": view.max_loss,
        "flex_loss": None if view.flex is None else view.flex.max_loss,
        "left_s": None if now is None else round(now.left_s),
        "needed_s": None if now is None else round(now.needed_s),
    }
    return [Audit(event="deadline", fields=fields)]


# ------------------------------------------------------------------------------------------------ minutes given back


def due_raises(state: State, config: Config, now_ns: int) -> tuple[State, list[Action]]:
    """Order that the limits of runs be raised that have lost time under caps, where the site has it so."""
    if not config.policy.compensate_time_limit or now_ns < state.raises_due_ns:
        return state, []
    runs, orders = dict(state.runs), []
    for run, view in state.runs.items():
        lost_s = _lost_s(view, now_ns)
        if lost_s is None or view.job is None:
            continue
        runs[run] = msgspec.structs.replace(view, raising=True)
        orders.append(RaiseTimeLimit(run=run, job=view.job, lost_s=lost_s))
    due_ns = now_ns + round(LOOK_S * NS_PER_S)
    return msgspec.structs.replace(state, runs=runs, raises_due_ns=due_ns), list(orders)


def _lost_s(view: RunView, now_ns: int) -> float | None:
    """What a run has lost, in seconds without caps, if its limit is to be raised now."""
    if (
        view.phase != "admitted"
        or view.raising
        or now_ns < view.raise_due_ns
        or view.ends_ns is None
        or view.given_s is None
        or view.shares
    ):
        return None
    left_s = (view.ends_ns - now_ns) / NS_PER_S
    capped = view.record.capped_since_ns is not None
    # It cannot have lost more than all of that time; what it did lose takes longer to work out.
    if not is_due(view.record.tally.capped_s, view.given_s, left_s, capped=capped):
        return None
    lost_s = view.record.lost_s
    return lost_s if lost_s is not None and is_due(lost_s, view.given_s, left_s, capped=capped) else None


def limit_raised(state: State, event: TimeLimitRaised, now_ns: int) -> tuple[State, list[Action]]:
    """Take over what became of an order, and tell the audit of every change and of every new reason for none."""
    view = state.runs.get(event.run)
    told: list[Action] = []
    note = "" if view is None else view.raise_note
    if event.new_s is not None or (event.why and event.why != note):
        fields = {
            "run": str(event.run),
            "old_s": event.old_s,
            "new_s": event.new_s,
            "lost_s": round(event.lost_s, 1),
            "given_s": event.given_s,
            "why": event.why or "lost under caps",
        }
        told.append(Audit(event="time_limit", fields=fields))
    if view is None:
        return state, told
    wait_s = (
        RETRY_S if event.again else RAISE_GAP_S if event.new_s is not None and not event.why else BOUNDED_S
    )
    view = msgspec.structs.replace(
        view,
        raising=False,
        given_s=event.given_s,
        raise_note=event.why,
        raise_due_ns=now_ns + round(wait_s * NS_PER_S),
    )
    due_ns = state.deadlines_due_ns
    if event.old_s is not None and event.new_s is not None:
        view = _longer(view, event.new_s - event.old_s, event.new_s)
        due_ns = 0
    return msgspec.structs.replace(state, runs={**state.runs, event.run: view}, deadlines_due_ns=due_ns), told


def _longer(view: RunView, more_s: int, limit_s: int) -> RunView:
    """Its end is later by so much: that needs no reading."""
    job = view.job
    if job is not None and isinstance(job.end_unix_s, int):
        job = dataclasses.replace(job, limit_s=limit_s, end_unix_s=job.end_unix_s + more_s)
    ends_ns = None if view.ends_ns is None else view.ends_ns + more_s * NS_PER_S
    return msgspec.structs.replace(view, job=job, ends_ns=ends_ns)
