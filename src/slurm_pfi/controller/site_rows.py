"""What the history is told of one instant: site, runs and happenings, as rows made from the core's state. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias

from ..config import Config
from ..model import GpuReport, LimitClass, Run
from ..store.limits import schedule
from ..store.rows import NODE_EVENT, EventRow, Phase, RunFacts, RunSample, SiteSample, WindowRow
from ..units import format_duration, format_power, watts_to_mw
from .ledger import NS_PER_S, default_worst_mw, missing_gpus_mw
from .runs import run_gpus
from .state import NodeView, RunView, State, WindowView
from .views import run_view

UNMEASURED_SHARE: Final = 0.05
"""With more of the site than this counted instead of measured, its draw is told as unknown."""

MOST_TOLD: Final = 20
"""Faults of nodes told at one instant."""

Work: TypeAlias = tuple[float, float]
"""Units of a job's counter: done, and lost to caps."""

TOLD_STEP: Final = 0.05
"""A cap that moves by less than this share is not told anew."""


# ------------------------------------------------------------------------------------------------- the site


def beside_mw(state: State, config: Config) -> int:
    """What the site declares beside its GPUs; a reserve is room that nobody draws, and not in it."""
    return sum(node.overhead_mw for node in state.nodes.values()) + watts_to_mw(config.policy.unmanaged_w)


def limit_now_mw(state: State, now_unix_s: float) -> int | None:
    """The lowest limit in force at this very instant; None if none is, or if they cannot be read."""
    if not state.limits_known:
        return None
    return schedule(state.limits, now_unix_s, horizon_s=0.0, lead_s=0.0)[0].limit_mw


def phase_of(state: State, *, after: bool) -> Phase:
    """``after``: a window has ended not long ago."""
    if state.window is not None:
        return "rebound" if state.window.rebound else "window"
    return "after" if after else "before"


def site_sample(state: State, config: Config, phase: Phase, now_ns: int, now_unix_s: float) -> SiteSample:
    """The site now. In a rebound the limit is the synthetic one that holds it below the draw before."""
    measured_mw, unmeasured_mw = _draws(state.nodes.values(), config, now_ns)
    fixed_mw = beside_mw(state, config)
    total_mw = measured_mw + unmeasured_mw + fixed_mw
    window = state.window
    limit_mw = limit_now_mw(state, now_unix_s)
    if window is not None and window.rebound:
        limit_mw = window.limit_mw
    return SiteSample(
        unix_s=now_unix_s,
        phase=phase,
        limit_mw=limit_mw,
        draw_mw=None if unmeasured_mw > UNMEASURED_SHARE * total_mw else total_mw,
        committed_mw=None if window is None else window.committed_mw + fixed_mw,
        unmeasured_mw=unmeasured_mw,
    )


def _draws(nodes: Iterable[NodeView], config: Config, now_ns: int) -> tuple[int, int]:
    """What GPUs were measured to draw, and what those without a reading could draw at most."""
    measured_mw = unmeasured_mw = 0
    late_ns = _late_ns(config)
    for node in nodes:
        if node.report is None or now_ns - node.heard_ns > late_ns:
            unmeasured_mw += default_worst_mw(node)
            continue
        unmeasured_mw += missing_gpus_mw(node)
        for gpu in node.report.gpus:
            if gpu.draw_mw is not None:
                measured_mw += gpu.draw_mw
            else:
                unmeasured_mw += gpu.max_mw if gpu.ceiling_mw is None else gpu.ceiling_mw
    return measured_mw, unmeasured_mw


def window_row(
    window_id: int,
    window: WindowView,
    state: State,
    config: Config,
    opened_unix_s: float,
    draw_before_mw: int | None,
) -> WindowRow:
    """The window as it opens."""
    modes = {node.mode for node in state.nodes.values()}
    mode: Literal["observe", "enforce", "mixed"] = modes.pop() if len(modes) == 1 else "mixed"
    return WindowRow(
        id=window_id,
        cluster=config.cluster,
        opened_unix_s=opened_unix_s,
        policy=config.policy.name,
        class_=limit_class(window, state),
        mode=mode,
        limit_mw=window.limit_mw,
        limit_ids=window.limit_ids,
        draw_before_mw=draw_before_mw,
        beside_mw=beside_mw(state, config),
        response_s=config.times.response_s,
        simulated=config.simulated,
    )


def why_closed(row: WindowRow, state: State, now_unix_s: float) -> str:
    """Why a window is over, in words."""
    if state.off:
        return "an admin said 'slurm-pfi off'"
    mine = [limit for limit in state.limits if limit.id in row.limit_ids]
    if not mine:
        return "its limit was cleared"
    if limit_now_mw(state, now_unix_s) is None:
        return "its limit ended"
    return "the limit is no longer below what the site can draw"


def _late_ns(config: Config) -> int:
    """What a node said longer ago is not its draw of now: one report may be missing, no more."""
    return round(max(config.times.node_answer_s, 2 * config.times.report_s) * NS_PER_S)


# ------------------------------------------------------------------------------------------------- the runs


def run_sample(
    view: RunView, state: State, config: Config, now_ns: int, now_unix_s: float, held_s: float
) -> RunSample:
    """A run now, for the next ``held_s``. What its nodes said too long ago is unknown."""
    gpus = _heard_gpus(view, state, config, now_ns)
    draws = [gpu.draw_mw for gpu in gpus]
    caps = [gpu.enforced_mw for gpu in gpus if gpu.enforced_mw is not None]
    known = [draw for draw in draws if draw is not None]
    record = view.record
    rate, base = (record.rate_now, record.rate_per_s) if gpus and not record.doubted else (None, None)
    return RunSample(
        unix_s=now_unix_s,
        run=str(view.run),
        cap_mw=max(caps, default=None),
        draw_mw=round(sum(known) / len(known))
        if known and len(known) == len(draws) and not view.shares
        else None,
        share=None if rate is None or not base else rate / base,
        held_s=held_s,
    )


def _heard_gpus(view: RunView, state: State, config: Config, now_ns: int) -> list[GpuReport]:
    if any(now_ns - state.nodes[name].heard_ns > _late_ns(config) for name in view.gpus):
        return []
    return run_gpus(view, state.nodes)


def work(view: RunView) -> Work | None:
    """What a run has done and lost so far; None while the latter is unknown."""
    totals = view.record.totals
    return None if totals.lost is None else (totals.done, totals.lost)


def run_facts(window_id: int, view: RunView, state: State, since: Work | None, now_ns: int) -> RunFacts:
    """What is known of a run as such. ``since``: its work when the window opened."""
    shown: dict[str, Any] = run_view(view, state, now_ns)
    models = {gpu.model for gpu in run_gpus(view, state.nodes)}
    job, record, until = view.job, view.record, work(view)
    loss = None
    if since is not None and until is not None:
        done, lost = until[0] - since[0], until[1] - since[1]
        loss = lost / (done + lost) if done + lost > 0 else None
    return RunFacts(
        window=window_id,
        run=str(view.run),
        spec=shown["spec"],
        uid=None if job is None else job.user_id,
        user=shown["user"],
        account=None if job is None else job.account,
        partition=shown["partition"],
        name=None if job is None else job.name,
        gpu_model=models.pop() if len(models) == 1 else None,
        gpus=shown["gpus"],
        nodes=tuple(shown["nodes"]),
        flex=shown["flex"],
        max_loss=shown["max_loss"],
        floor_mw=shown["floor_mw"],
        baseline=record.source,
        baseline_draw_mw=record.mean_draw_mw,
        baseline_sd=record.baseline_sd,
        expected_loss=shown["expected_loss"],
        loss=loss,
    )


# ------------------------------------------------------------------------------------------- what happened


def cap_events(
    before: Mapping[Run, RunView],
    state: State,
    policy: str,
    told: dict[Run, int],
    now_ns: int,
    now_unix_s: float,
) -> list[EventRow]:
    """Runs that came under a cap, whose cap moved, or that are free again. ``told`` holds the caps last told of."""
    found: list[EventRow] = []
    for run, view in state.runs.items():
        cap_mw = view.target_cap_mw
        known_mw = told.get(run)
        if view.record.capped_since_ns is None or cap_mw is None:
            if known_mw is not None:
                del told[run]
                old = before.get(run)
                since_ns = None if old is None else old.record.capped_since_ns
                text = "no longer capped"
                if since_ns is not None:
                    text += f", after {format_duration((now_ns - since_ns) / NS_PER_S)}"
                found.append(EventRow(unix_s=now_unix_s, run=str(run), kind="uncapped", text=text))
            continue
        if known_mw is not None and abs(cap_mw - known_mw) <= TOLD_STEP * known_mw:
            continue
        told[run] = cap_mw
        from_mw = _prior_mw(view, state) if known_mw is None else known_mw
        came = "" if from_mw is None else f" from {format_power(from_mw)}"
        how = "capped" if from_mw is None or cap_mw <= from_mw else "cap raised"
        # A release goes by what the window left each run, not by floors.
        released = state.window is not None and state.window.rebound
        floor = "" if released else f" (floor {format_power(view.floor_mw)})"
        text = f"{how}{came} to {format_power(cap_mw)} a GPU{floor}: {_why(state)}, policy {policy}"
        found.append(EventRow(unix_s=now_unix_s, run=str(run), kind="capped", text=text))
    return found


def _why(state: State) -> str:
    window = state.window
    if window is None:
        return "no window"
    if window.rebound:
        return "slow release after the window"
    return (
        f"{limit_class(window, state)} limit {', '.join(window.limit_ids)} of {format_power(window.limit_mw)}"
    )


def limit_class(window: WindowView, state: State) -> LimitClass:
    """Emergency if one of the limits that bind is."""
    binding = [limit.class_ for limit in state.limits if limit.id in window.limit_ids]
    return "emergency" if "emergency" in binding else "economic"


def _prior_mw(view: RunView, state: State) -> int | None:
    """The highest limit that one of its GPUs had before us."""
    return max((gpu.prior_mw for gpu in run_gpus(view, state.nodes) if gpu.prior_mw), default=None)


def promise_events(before: Mapping[Run, RunView], state: State, now_unix_s: float) -> list[EventRow]:
    """Runs that began inside a window and wait for power, and those whose floor an emergency has left again."""
    found: list[EventRow] = []
    for run, view in state.runs.items():
        old = before.get(run)
        if view.phase == "waiting" and (old is None or old.phase != "waiting"):
            text = "began inside a window: held at the park cap until there is power for its floor"
            found.append(EventRow(unix_s=now_unix_s, run=str(run), kind="waiting", text=text))
        if old is not None and old.floor_passed and not view.floor_passed:
            text = f"the emergency is over for it: its floor of {format_power(view.floor_mw)} holds again"
            found.append(EventRow(unix_s=now_unix_s, run=str(run), kind="floor_kept", text=text))
    return found


def node_events(before: Mapping[str, NodeView], state: State, now_unix_s: float) -> list[EventRow]:
    """Nodes that were lost or came back, and what is newly wrong with them; of a storm only the first."""
    found: list[str] = []
    for name, node in state.nodes.items():
        old = before.get(name)
        if old is None or node is old:
            continue
        if old.connected != node.connected and old.report is not None:
            found.append(
                f"node {name}: its agent is {'connected again' if node.connected else 'not connected'}"
            )
        if node.report is not old.report:
            known = set(_troubles(old))
            found += [f"node {name}: {one}" for one in _troubles(node) if one not in known]
    more = (
        [f"and {len(found) - MOST_TOLD} more faults of nodes at the same time"]
        if len(found) > MOST_TOLD
        else []
    )
    return [EventRow(unix_s=now_unix_s, kind=NODE_EVENT, text=told) for told in (*found[:MOST_TOLD], *more)]


def _troubles(node: NodeView) -> list[str]:
    report = node.report
    if report is None:
        return []
    refused = [f"it refused a plan: {report.refused}"] if report.refused else []
    return [*report.faults, *(f"{gpu.uuid}: {gpu.fault}" for gpu in report.gpus if gpu.fault), *refused]


def limit_event(window: WindowView, window_id: int, now_unix_s: float, *, first: bool) -> EventRow:
    """A window opened, or its limit changed."""
    what = f"window {window_id} opens" if first else f"window {window_id}: another limit binds"
    text = (
        f"{what}: limit {format_power(window.limit_mw)} ({', '.join(window.limit_ids)}), "
        f"{format_power(window.budget_mw)} of it for GPU caps"
    )
    return EventRow(unix_s=now_unix_s, kind="limit", text=text)
