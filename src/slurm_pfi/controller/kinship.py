"""Runs of the same work: what is remembered of one when it ends, and what the next one is told of it. Pure.

The same work is the same user, account, job name, GPU model and number of GPUs. A name that says nothing is no name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

import msgspec

from ..elasticity.evidence import EvidenceError, Measurement, RunEvidence
from ..model import Run
from ..slurm.backend import JobInfo
from ..store.rows import Kin, KinKey
from .measuring.measured import evidence
from .measuring.record import Recalled, Record
from .runs import run_gpus
from .state import NodeView, RunView

NAMELESS: Final = frozenset(
    {
        "",
        "bash",
        "sh",
        "wrap",
        "sbatch",
        "salloc",
        "srun",
        "interactive",
        "python",
        "python3",
        "test",
        "job",
        "jupyter",
    }
)
"""Job names that tell nothing of the work: two such jobs have nothing in common."""

MOST_RECALLED: Final = 8
"""Points of earlier runs that a run is told."""

SAME_DRAW: Final = 0.03
SAME_RATE: Final = 0.07
"""Runs of one name whose uncapped draws, or rates, differ by a greater share do not do the same work."""

MOST_KINDS: Final = 32
"""Of more kinds of work under one name the rest is alone: thousands of tasks of an array may all differ."""

MIXED_SD: Final = 1.0
"""Relative error of a baseline under a name that was used for different work: nobody is told it."""


def kin_name(job: JobInfo | None) -> str:
    """What runs of the same work have in common, as one text; empty where the name says nothing."""
    if job is None or job.name.lower().removesuffix(".sh") in NAMELESS:
        return ""
    return f"{job.user_id}/{job.account}/{job.name}"


def kin_labels(views: Iterable[RunView]) -> dict[Run, str]:
    """Which runs do the same work, by one label each; runs without a label are alone.

    The name alone does not tell: people use one for everything. Runs count as kin when their baselines, seen of each,
    agree as well.
    """
    named: dict[tuple[str, int], list[RunView]] = {}
    for view in views:
        if kin_name(view.job) and view.record.rate_source == "seen":
            gpus = sum(len(uuids) for uuids in view.gpus.values())
            named.setdefault((kin_name(view.job), gpus), []).append(view)
    labels: dict[Run, str] = {}
    for (name, gpus), group in named.items():
        firsts: list[_Baseline] = []
        for view in sorted(group, key=lambda view: view.run):
            own = view.record.mean_draw_mw, view.record.rate_per_s
            place = next((i for i, first in enumerate(firsts) if _agree(first, own)), len(firsts))
            if place == MOST_KINDS:
                continue
            if place == len(firsts):
                firsts.append(own)
            labels[view.run] = f"{name}/{gpus}/{place}"
    return labels


_Baseline: TypeAlias = tuple[int | None, float | None]
"""Mean draw (mW) and rate of a run without caps."""


def _agree(one: _Baseline, other: _Baseline) -> bool:
    return _near(one[0], other[0], SAME_DRAW) and _near(one[1], other[1], SAME_RATE)


def _near(one: float | None, other: float | None, share: float) -> bool:
    return one is not None and other is not None and abs(one - other) <= share * max(abs(one), abs(other))


def kin_of(view: RunView, nodes: Mapping[str, NodeView], now_ns: int, now_unix_s: float) -> Kin | None:
    """What to remember of a run: only what was seen of it, and only of work that has a name."""
    key = _key(view, nodes)
    record = view.record
    if key is None or record.source != "seen" or record.doubted:
        return None
    found = evidence(record, key.gpu_model, "", now_ns).measurements
    told = record.recalled
    differs = told is not None and not (
        _near(told.draw_mw, record.draw_mw, SAME_DRAW)
        and (told.rate_per_s is None or _near(told.rate_per_s, record.rate_per_s, SAME_RATE))
    )
    # A segment without a baseline of its own tells ratios, not losses.
    points = [
        (one.reduction, one.loss, one.sd)
        for one in found
        if one.segment == record.segment and one.baseline_sd is None
    ]
    return Kin(
        key=key,
        draw_mw=record.draw_mw,
        rate_per_s=record.rate_per_s if record.rate_source == "seen" else None,
        sd=MIXED_SD if differs or view.name_is_mixed else record.baseline_sd,
        points=tuple(points[-MOST_RECALLED:]),
        unix_s=now_unix_s,
    )


def with_recalled(view: RunView, nodes: Mapping[str, NodeView]) -> RunView:
    """Tell a run what is known of its kin, once all its nodes have reported it."""
    if not view.kins or view.job is None or not set(view.job.nodes) <= view.gpus.keys():
        return view
    key = _key(view, nodes)
    mine = max((kin for kin in view.kins if kin.key == key), key=lambda kin: kin.unix_s, default=None)
    view = msgspec.structs.replace(view, kins=())
    if mine is not None and mine.sd >= MIXED_SD:
        return msgspec.structs.replace(view, name_is_mixed=True)
    if mine is None or mine.draw_mw is None or view.record.seen:
        return view
    recalled = Recalled(draw_mw=mine.draw_mw, rate_per_s=mine.rate_per_s, sd=mine.sd, points=mine.points)
    return msgspec.structs.replace(view, record=msgspec.structs.replace(view.record, recalled=recalled))


def with_kin_points(found: RunEvidence, record: Record) -> RunEvidence:
    """The evidence of a run with what was measured of its kin: a segment of its own, with that baseline's error.

    A run that was seen to do other work than they did is told nothing of them.
    """
    recalled = record.recalled
    if recalled is None or not recalled.points:
        return found
    if record.seen and not _near(recalled.draw_mw, record.draw_mw, SAME_DRAW):
        return found
    oldest = min((point.segment for point in found.measurements), default=0)
    earlier: list[Measurement] = []
    for reduction, loss, sd in recalled.points:
        try:
            earlier.append(
                Measurement(reduction, loss, sd, segment=oldest - 1, baseline_sd=max(recalled.sd, found.tau))
            )
        except EvidenceError:
            continue  # written by another version, or by a hand
    return replace(found, measurements=(*earlier, *found.measurements))


def _key(view: RunView, nodes: Mapping[str, NodeView]) -> KinKey | None:
    gpus = run_gpus(view, dict(nodes))
    if view.job is None or not kin_name(view.job) or not gpus:
        return None
    return KinKey(
        uid=view.job.user_id,
        account=view.job.account,
        name=view.job.name,
        gpu_model=gpus[0].model,
        gpus=sum(len(uuids) for uuids in view.gpus.values()),
    )
