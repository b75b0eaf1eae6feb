"""Runs of the same work: what is remembered of one when it ends, and what the next one is told of it. Pure.

The same work is the same user, account, job name, GPU model and number of GPUs. A name that says nothing is no name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from ..elasticity.evidence import EvidenceError, Measurement, RunEvidence
from ..slurm.backend import JobInfo
from ..store.rows import Kin, KinKey
from .measured import evidence
from .record import Recalled
from .runs import run_gpus
from .state import NodeView, RunView

NAMELESS: Final = frozenset(
    {"", "bash", "sh", "wrap", "interactive", "python", "python3", "srun", "test", "job"}
)
"""Job names that tell nothing of the work: two such jobs have nothing in common."""

MOST_RECALLED: Final = 8
"""Points of earlier runs that a run is told."""


def kin_name(job: JobInfo | None) -> str:
    """What runs of the same work have in common, as one text; empty where the name says nothing."""
    if job is None or job.name.lower().removesuffix(".sh") in NAMELESS:
        return ""
    return f"{job.user_id}/{job.account}/{job.name}"


def kin_of(view: RunView, nodes: Mapping[str, NodeView], now_ns: int, now_unix_s: float) -> Kin | None:
    """What to remember of a run: only what was seen of it, and only of work that has a name."""
    key = _key(view, nodes)
    record = view.record
    if key is None or record.source != "seen" or record.doubt:
        return None
    found = evidence(record, key.gpu_model, "", now_ns).measurements
    points = [(one.reduction, one.loss, one.sd) for one in found if one.segment == record.segment]
    return Kin(
        key=key,
        draw_mw=record.draw_mw,
        rate_per_s=record.rate_per_s if record.rate_source == "seen" else None,
        sd=record.baseline_sd,
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
    if mine is None or mine.draw_mw is None or view.record.seen:
        return view
    recalled = Recalled(draw_mw=mine.draw_mw, rate_per_s=mine.rate_per_s, sd=mine.sd, points=mine.points)
    return msgspec.structs.replace(view, record=msgspec.structs.replace(view.record, recalled=recalled))


def with_kin_points(found: RunEvidence, recalled: Recalled | None) -> RunEvidence:
    """The evidence of a run with what was measured of its kin: a segment of its own, with that baseline's error."""
    if recalled is None or not recalled.points:
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
    return RunEvidence(
        gpu_model=found.gpu_model,
        kin=found.kin,
        pfi=found.pfi,
        measurements=(*earlier, *found.measurements),
        baseline=found.baseline,
        baseline_sd=found.baseline_sd,
    )


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
