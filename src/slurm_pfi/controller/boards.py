"""GPUs that several runs share: by MIG, MPS, shard or because Slurm gives them to several jobs. Pure.

A board has one cap and one draw. So runs that hang together by boards are one group with one cap: it goes down only as
far as the least flexible of them allows, the budget counts each board once, and nothing is measured of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ..model import GpuId, GpuReport, Report, Run
from ..units import MW_PER_W
from .ledger import prior_of
from .measuring.record import Drift, Record
from .state import NodeView, RunView, State

GpuKey = tuple[str, GpuId]


def gpus_of(run: RunView) -> set[GpuKey]:
    """All GPUs of a run, on all its nodes: by node and UUID, for a node may name what it likes."""
    return {(name, uuid) for name, uuids in run.gpus.items() for uuid in uuids}


def grouped(views: Iterable[RunView]) -> list[list[RunView]]:
    """The runs that hang together by shared GPUs, directly or by others between; most are alone. In the order given."""
    known = list(views)
    first: dict[GpuKey, int] = {}
    links: list[tuple[int, int]] = []
    for number, view in enumerate(known):
        for name, uuids in view.gpus.items():
            for uuid in uuids:
                other = first.setdefault((name, uuid), number)
                if other != number:
                    links.append((other, number))
    if not links:
        return [[view] for view in known]
    to = list(range(len(known)))

    def head(number: int) -> int:
        while to[number] != number:
            to[number] = to[to[number]]
            number = to[number]
        return number

    for pair in links:
        low, high = sorted(head(number) for number in pair)
        to[high] = low
    members: dict[int, list[RunView]] = {}
    for number, view in enumerate(known):
        members.setdefault(head(number), []).append(view)
    return list(members.values())


def shared_runs(state: State) -> frozenset[Run]:
    """Admitted runs with a GPU that another admitted run uses too.

    A run that is not admitted has no say: a job file that came, or stayed behind, in a window must lift no cap. Nor has
    a node over runs that Slurm has elsewhere.
    """
    first: dict[GpuKey, Run] = {}
    shared: set[Run] = set()
    for run, view in state.runs.items():
        for key in gpus_of(view) if view.phase == "admitted" else ():
            if first.setdefault(key, run) != run:
                shared.update((run, first[key]))
    return frozenset(shared)


def confirmed(view: RunView) -> bool:
    """Whether Slurm has said that this run is there, and nothing since has put that in doubt."""
    return view.job is not None and view.read_due_ns is None and not view.reading


def answered(view: RunView) -> bool:
    """Whether Slurm has had its word on this run: that it is there, or that it is not, or not here."""
    return view.phase in ("gone", "refused") or confirmed(view)


# --------------------------------------------------------------------------------------------- nothing is measured


def shares_now(view: RunView, nodes: Mapping[str, NodeView], report: Report) -> list[GpuReport]:
    """The GPUs of a run that another job's file names too, by this report and the last ones of its other nodes."""
    found: list[GpuReport] = []
    for name, uuids in view.gpus.items():
        node = nodes.get(name)
        last = report if name == report.node else None if node is None else node.report
        found.extend(
            gpu for gpu in (() if last is None else last.gpus) if gpu.uuid in uuids and len(gpu.runs) > 1
        )
    return found


def unmeasured(view: RunView, shared: list[GpuReport]) -> RunView:
    """A run while it shares GPUs: draw and counter tell of its neighbours as well, so this time is left out.

    What caps cost it meanwhile nobody can tell, and so nobody can tell the sum.
    """
    record = view.record
    capped = record.shared or any(
        gpu.enforced_mw is None or gpu.enforced_mw < prior_of(gpu) - MW_PER_W for gpu in shared
    )
    return replace(view, shares=True, record=_put_by(replace(record, shared=capped)))


def _put_by(record: Record) -> Record:
    """The record as of a run that was not heard, to go on with a new start."""
    return replace(
        record,
        last_ns=None,
        heard=None,
        since_ns=None,
        cap_known=False,
        cap_mw=None,
        bound=False,
        capped_since_ns=None,
        rate_now=None,
        drift=Drift(),
        slump=Drift(),
        jumps=0,
        jumped=0.0,
        jumped_s=0.0,
        surges=0,
    )
