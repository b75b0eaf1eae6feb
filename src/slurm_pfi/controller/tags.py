"""When a run's tag is due, and what stands in it."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ..config import Config
from ..slurm.tag import Tag, format_tag
from .ledger import NS_PER_S
from .science import Science
from .state import Action, RunView, State, TagWritten, WriteTag

RETRY_S = 5.0


def due_tags(
    state: State, config: Config, science: Science, now_ns: int, now_unix_s: float
) -> tuple[State, list[Action]]:
    """Write every tag whose time has come, and set the next time."""
    if not config.tag.enabled:
        return state, []
    actions: list[Action] = []
    runs = dict(state.runs)
    refresh_ns = round(config.times.tag_refresh_s * NS_PER_S)
    for run, view in state.runs.items():
        if view.job is None or view.flex is None or view.phase not in ("admitted", "waiting"):
            continue
        if view.tag_due_ns is None or view.tag_due_ns > now_ns:
            continue
        after = msgspec.structs.replace(view, tag_due_ns=now_ns + refresh_ns)
        tag = tag_of(view, config, science, now_ns, now_unix_s)
        timeless = format_tag(replace(tag, at_unix_s=0.0, capped_s=0.0))
        if timeless != view.tag_said or view.capped_since_ns is not None:
            actions.append(WriteTag(run=run, job=view.job, tag=tag))
            after = msgspec.structs.replace(after, tag_text=format_tag(tag), tag_said=timeless)
        runs[run] = after
    return msgspec.structs.replace(state, runs=runs), actions


def tag_of(view: RunView, config: Config, science: Science, now_ns: int, now_unix_s: float) -> Tag:
    """What is known of the run: the PFI that the site declares for its partition, else the library's default."""
    pfi = science.default_pfi
    declared = None if view.job is None else config.policy.declared_pfi.get(view.job.partition)
    capped_s = view.capped_s
    if view.capped_since_ns is not None:
        capped_s += (now_ns - view.capped_since_ns) / NS_PER_S
    grid = [round(cap) for cap in pfi.grid_w]
    return Tag(
        pfi=pfi.value if declared is None else declared,
        pfi_low=pfi.low if declared is None else None,
        pfi_high=pfi.high if declared is None else None,
        source="default" if declared is None else "declared",
        grid_low_w=grid[0],
        grid_high_w=grid[-1],
        grid_step_w=grid[1] - grid[0],
        flex="auto" if view.flex is None else view.flex.text,
        loss=None,
        energy_wh=None,
        capped_s=capped_s,
        at_unix_s=now_unix_s,
    )


def tag_written(state: State, event: TagWritten, now_ns: int) -> State:
    """A tag that could not be written is due again soon."""
    view = state.runs.get(event.run)
    if view is None or event.ok:
        return state
    due_ns = now_ns + round(RETRY_S * NS_PER_S)
    view = msgspec.structs.replace(view, tag_due_ns=due_ns, tag_text="", tag_said="")
    return msgspec.structs.replace(state, runs={**state.runs, event.run: view})
