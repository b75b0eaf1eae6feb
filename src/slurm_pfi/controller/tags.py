"""When a run's tag is due, and what stands in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ..config import Config
from ..elasticity.index import PfiSource
from ..model import GpuReport
from ..slurm.tag import Tag, format_tag, parse_tag
from .knowledge import Knowledge
from .ledger import NS_PER_S
from .measuring.activity import lost_by_activity
from .measuring.record import Record
from .runs import run_gpus
from .science import GRID_W, Science, grid_of
from .state import Action, RunView, State, TagWritten, WriteTag

RETRY_S: Final = 5.0
MOST_TOLD: Final = 10_000
"""A PFI that has no place in a tag says as little as none."""

SOONEST_S: Final = 30.0
BEFORE_END_S: Final = 15.0

MOST_A_CYCLE: Final = 20
"""An interval takes a millisecond to work out, and no more tags than that are written in a second."""

LEAST_CHANGE_PFI: Final = 0.05
LEAST_CHANGE_LOSS: Final = 0.005
"""A tag of a run that nothing caps is written anew only for so much: 5,000 jobs have one each."""


def due_tags(
    state: State, config: Config, science: Science, now_ns: int, now_unix_s: float
) -> tuple[State, list[Action]]:
    """Write every tag whose time has come, and set the next time."""
    if not config.tag.enabled:
        return state, []
    actions: list[Action] = []
    runs = dict(state.runs)
    due = sorted(
        (view.tag_due_ns, run)
        for run, view in state.runs.items()
        if view.tag_due_ns is not None and (view.tag_due_ns <= now_ns or _let_go(view)) and _has_tag(view)
    )
    for _, run in due[:MOST_A_CYCLE]:
        view = state.runs[run]
        next_ns = now_ns + round(_next_s(view, config, now_ns, now_unix_s) * NS_PER_S)
        capped = view.record.capped_since_ns is not None
        after = msgspec.structs.replace(view, tag_due_ns=next_ns, tag_capped=capped)
        tag = tag_of(view, state, config, science, now_unix_s)
        wanted = capped or view.tag_failed > 0 or _let_go(view) or _says_more(tag, view.tag_text)
        if view.job is not None and wanted:
            text = format_tag(tag)
            actions.append(WriteTag(run=run, job=view.job, tag=tag))
            after = msgspec.structs.replace(after, tag_text=text)
        runs[run] = after
    return msgspec.structs.replace(state, runs=runs), actions


def _let_go(view: RunView) -> bool:
    """Whether its tag was last written under a cap that is gone: what it cost is known now."""
    return view.tag_capped and view.record.capped_since_ns is None


def _next_s(view: RunView, config: Config, now_ns: int, now_unix_s: float) -> float:
    """How long until the tag is due again.

    Slurm takes no change of a job that ends, and then keeps what it has: so a tag is fresh early in a window, and
    once more just before the job's time is over.
    """
    next_s = config.times.tag_refresh_s
    since_ns = view.record.capped_since_ns
    if since_ns is not None or view.target_cap_mw is not None:
        capped_s = 0.0 if since_ns is None else (now_ns - since_ns) / NS_PER_S
        next_s = min(next_s, max(SOONEST_S, capped_s / 2))
    end_s = None if view.job is None else view.job.end_unix_s
    if isinstance(end_s, int) and view.tag_text and 0 < end_s - BEFORE_END_S - now_unix_s < next_s:
        next_s = end_s - BEFORE_END_S - now_unix_s
    return next_s


def _has_tag(view: RunView) -> bool:
    return view.job is not None and view.flex is not None and view.phase in ("admitted", "waiting")


def due_with_limits(before: State, after: State, now_ns: int) -> State:
    """When the limit changes, runs whose cap it moved get their tag anew, if they have one already."""
    if _limit_mw(before) == _limit_mw(after):
        return after
    runs = {
        run: msgspec.structs.replace(view, tag_due_ns=now_ns)
        if view.tag_text and run in before.runs and view.target_cap_mw != before.runs[run].target_cap_mw
        else view
        for run, view in after.runs.items()
    }
    return msgspec.structs.replace(after, runs=runs)


def _limit_mw(state: State) -> int | None:
    """The limit that binds; what holds a rebound moves every second and is nobody's limit."""
    return None if state.window is None or state.window.rebound else state.window.limit_mw


def _says_more(tag: Tag, said: str) -> bool:
    """Whether a tag says something else than the one that stands; of a run that is not capped only what matters."""
    if not said:
        return True
    old = parse_tag(said)
    if (tag.source, tag.flex) != (old.source, old.flex) or abs(tag.pfi - old.pfi) >= LEAST_CHANGE_PFI:
        return True
    if tag.loss is None or old.loss is None:
        return (tag.loss is None) != (old.loss is None)
    return abs(tag.loss - old.loss) >= LEAST_CHANGE_LOSS


def tag_of(view: RunView, state: State, config: Config, science: Science, now_unix_s: float) -> Tag:
    """What is known of the run by now."""
    gpus = run_gpus(view, state.nodes)
    index = index_of(view, gpus, config, science, science.knowledge(state))
    record = view.record
    energy_wh = record.energy_wh
    step_w = index.grid_w[1] - index.grid_w[0]
    return Tag(
        pfi=index.value,
        pfi_low=index.low,
        pfi_high=index.high,
        source=index.source,
        grid_low_w=round(index.grid_w[0]),
        grid_high_w=round(index.grid_w[-1]),
        grid_step_w=round(step_w),
        flex="auto" if view.flex is None else view.flex.text,
        loss=_loss(record),
        energy_wh=None if energy_wh is None else round(energy_wh),
        capped_s=record.totals.capped_s,
        at_unix_s=now_unix_s,
        restart=view.run.restart,
        simulated=config.simulated,
    )


def first_tag_s(view: RunView, config: Config) -> float:
    """How long after a run was read its first tag is due. After a requeue at once: the last run's stands there."""
    return 0.0 if view.run.restart else config.times.tag_after_s


def _loss(record: Record) -> float | None:
    """By its counter; where its GPUs contradict that, by what they did, over the time that it was watched.

    A counter that says what cannot be spoils the loss for good. A run that tells no counter is told no loss: an
    estimate does not look like one here.
    """
    shown = lost_by_activity(record) if record.disputed and not record.doubt else None
    if shown is None:
        return record.loss
    totals = record.totals
    return shown.loss * totals.capped_s / totals.known_s if totals.known_s > 0 else None


@dataclass(frozen=True, slots=True)
class Index:
    """A run's PFI as it is told: ``low``..``high`` is the 95 % interval, None for a value that somebody declared."""

    value: float
    low: float | None
    high: float | None
    source: PfiSource
    grid_w: tuple[float, ...]


def index_of(
    view: RunView, gpus: Sequence[GpuReport], config: Config, science: Science, knowledge: Knowledge
) -> Index:
    """Measured once a cap that binds was measured beside a baseline, else what the site declares, else the library's.

    The library's default is that of GRID_W whatever the GPU: it belongs to no GPU model.
    """
    draw_mw = view.record.mean_draw_mw
    if (
        gpus
        and draw_mw is not None
        and not view.shares
        and view.record.measured
        and knowledge.is_learned(view.run)
    ):
        learned = knowledge.pfi(view.run, gpus[0].model, draw_mw, grid_of(gpus))
        if (
            learned is not None
            and 0 <= learned.value < MOST_TOLD
            and learned.low >= 0
            and learned.high < MOST_TOLD
        ):
            return Index(learned.value, learned.low, learned.high, "measured", learned.grid_w)
    declared = None if view.job is None else config.policy.declared_pfi.get(view.job.partition)
    if declared is not None:
        return Index(declared, None, None, "declared", GRID_W)
    default = science.default_pfi
    return Index(default.value, default.low, default.high, "default", default.grid_w)


def tag_written(state: State, event: TagWritten, config: Config, now_ns: int) -> State:
    """A tag that could not be written is due again soon; later each time, for Slurm may refuse it for good."""
    view = state.runs.get(event.run)
    if view is None:
        return state
    failed = 0 if event.ok else view.tag_failed + 1
    view = msgspec.structs.replace(view, tag_failed=failed, tag_trouble=event.trouble)
    if failed:
        retry_s = min(config.times.tag_refresh_s, RETRY_S * 2.0 ** min(failed - 1, 16))
        view = msgspec.structs.replace(view, tag_due_ns=now_ns + round(retry_s * NS_PER_S))
    return msgspec.structs.replace(state, runs={**state.runs, event.run: view})
