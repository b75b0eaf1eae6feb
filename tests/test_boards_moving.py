"""Shared GPUs while runs come and go and nodes answer late: the budget holds in between, floors at the end."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pfi.controller import state as cs
from slurm_pfi.model import PlanStep, Run, RunReport

from .test_boards import OVERHEAD_W, PARK_W, PRIOR_W
from .test_controller_core import Site, W, gpu
from .world import job_info

NODES = {"n1": ("A", "B"), "n2": ("C", "D")}
NODE_OF = {uuid: node for node, uuids in NODES.items() for uuid in uuids}
FLEXES = ["none", "low", "medium", "high"]


class Moving:
    """Two nodes that follow a plan when it reaches them, and at once when a run comes or goes; Slurm answers late."""

    def __init__(self) -> None:
        self.site = Site(nodes=2, gpus=2)
        self.runs: dict[Run, tuple[tuple[str, ...], str]] = {}
        self.steps: dict[str, PlanStep] = {}
        self.asked = 0
        self.next_id = 1
        self.limit_w = 3000
        for node in NODES:
            self.hear(node)
        self.site.cycle()

    def on(self, uuid: str) -> list[Run]:
        return [run for run, (uuids, _) in self.runs.items() if uuid in uuids]

    def real_w(self, uuid: str) -> float:
        """The limit in force, by the step that its node follows."""
        step = self.steps.get(NODE_OF[uuid])
        if step is None or step.park_cap_mw is None:
            return PRIOR_W
        caps = {cap.run: cap.cap_mw for cap in step.caps}
        given = [caps.get(run, step.park_cap_mw) for run in self.on(uuid)]
        return max(((PRIOR_W * W if cap is None else cap) for cap in given), default=step.park_cap_mw) / W

    @property
    def total_w(self) -> float:
        return sum(self.real_w(uuid) for uuid in NODE_OF) + 2 * OVERHEAD_W

    def hear(self, node: str) -> None:
        """The last plan reaches the node, which follows and reports."""
        if plans := self.site.plans(node):
            self.steps[node] = plans[-1].steps[0]
        self.site.hear(
            node,
            *(gpu(uuid, *self.on(uuid), limit_w=round(self.real_w(uuid))) for uuid in NODES[node]),
            runs=tuple(
                RunReport(run=run, uid=1000, flex=flex, gpus=here)
                for run, (uuids, flex) in self.runs.items()
                if (here := tuple(uuid for uuid in uuids if uuid in NODES[node]))
            ),
        )

    def slurm(self) -> None:
        """All answers that are open."""
        asked = [action.run for action in self.site.actions[self.asked :] if isinstance(action, cs.ReadJob)]
        self.asked = len(self.site.actions)
        for run in asked:
            uuids, flex = self.runs.get(run, ((), ""))
            nodes = tuple(sorted({NODE_OF[uuid] for uuid in uuids}))
            job = job_info(run, nodes, "urgent" if flex == "none" else "main") if uuids else None
            self.site.tell(cs.JobRead(run=run, job=job))

    def begin(self, uuids: tuple[str, ...], flex: str) -> None:
        self.runs[Run("c", self.next_id)] = (uuids, flex)
        self.next_id += 1

    def end(self, place: int) -> None:
        if self.runs:
            del self.runs[sorted(self.runs)[place % len(self.runs)]]

    def limit(self, limit_w: int) -> None:
        self.limit_w = limit_w
        self.site.limit(limit_w)

    def floor_w(self, run: Run) -> float:
        loss = {"none": 0.0, "low": 0.05, "medium": 0.15, "high": 0.30}[self.runs[run][1]]
        return PRIOR_W * (
            1 - self.site.core.science.ignorance.greatest_reduction(Run("", 9), "NVIDIA H200", loss)
        )


OPS = st.one_of(
    st.tuples(st.just("hear"), st.sampled_from(sorted(NODES))),
    st.just(("cycle",)),
    st.just(("cycle",)),
    st.just(("slurm",)),
    st.tuples(
        st.just("begin"),
        st.lists(st.sampled_from(sorted(NODE_OF)), min_size=1, max_size=2, unique=True).map(tuple),
        st.sampled_from(FLEXES),
    ),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("limit"), st.integers(1100, 2900)),
)


@settings(max_examples=150, deadline=None)
@given(ops=st.lists(OPS, min_size=5, max_size=40))
def test_raises_wait_for_lowerings_and_floors_hold_at_the_end(ops: list[tuple[Any, ...]]) -> None:
    made = Moving()
    made.begin(("A",), "high")
    made.begin(("A", "C"), "medium")
    made.hear("n1")
    made.hear("n2")
    made.site.cycle()
    made.slurm()
    made.limit(1800)
    kept, planned, waits = False, False, set(NODES)
    for name, *args in ops:
        getattr(made, name)(*args) if name != "cycle" else made.site.cycle()
        if name == "limit":
            # A plan made for the limit before may still arrive, until each node has a newer one.
            kept, waits, planned = False, set(NODES), False
        elif name == "cycle":
            planned = True
        elif name == "hear" and planned:
            waits.discard(args[0])
        within = made.total_w <= made.limit_w + 0.001
        # A run that ends leaves its GPU to a lower cap and one that comes brings none: no step goes above it again.
        assert within or not kept, f"{name} {args}: {made.total_w} W above {made.limit_w} W"
        kept = kept or (within and not waits)
    for _ in range(8):
        made.site.cycle()
        made.slurm()
        for node in NODES:
            made.hear(node)
    window = made.site.state.window
    assert window is None or abs(window.shortfall_mw / W - max(0.0, made.total_w - made.limit_w)) < 0.1
    for run, (uuids, _) in made.runs.items():
        admitted = made.site.state.runs[run].phase == "admitted"
        for uuid in uuids:
            assert made.real_w(uuid) >= (made.floor_w(run) - 1 if admitted else PARK_W)
