"""Safe steps: the budget holds whatever is late, lost or out of order, and in the end the targets are reached."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.allocation.transition import HeldCap, next_caps
from slurm_pfi.model import Run

WATT = 1000


def held(job_id: int, gpus: int, worst_w: float, target_w: float, sent_w: float) -> HeldCap:
    """Worst case given per GPU."""
    return HeldCap(
        Run("c", job_id), (round(worst_w * WATT),) * gpus, round(target_w * WATT), round(sent_w * WATT)
    )


def caps_w(runs: list[HeldCap], budget_w: float) -> list[float]:
    return [cap / WATT for cap in next_caps(runs, round(budget_w * WATT))]


def test_lowerings_go_out_in_full_and_raises_wait_for_them() -> None:
    runs = [held(1, 2, 700, 400, 700), held(2, 2, 300, 600, 300)]
    assert caps_w(runs, 2000) == [400, 300]
    acknowledged = [held(1, 2, 400, 400, 400), held(2, 2, 300, 600, 300)]
    assert caps_w(acknowledged, 2000) == [400, 600]


def test_over_the_budget_nothing_rises() -> None:
    runs = [held(1, 1, 700, 300, 700), held(2, 1, 700, 400, 200), held(3, 1, 200, 300, 200)]
    assert caps_w(runs, 1000) == [300, 200, 200]


def test_whole_raises_before_partial_ones_the_farthest_behind_first() -> None:
    runs = [held(1, 1, 200, 400, 200), held(2, 1, 100, 600, 100), held(3, 1, 300, 400, 300)]
    assert caps_w(runs, 600 + 1000) == [400, 600, 400]
    assert caps_w(runs, 600 + 550.5) == [
        250,
        600,
        300,
    ]  # 2 whole, then in watts for 1, which is farther behind than 3
    assert caps_w(runs, 600 + 100) == [200, 100, 400]  # only 3 fits whole
    assert caps_w(runs, 600 + 99.9) == [200, 199, 300]  # none fits: whole watts for the farthest behind
    assert caps_w(runs, 600 + 0.9) == [200, 100, 300]


def test_back_to_a_cap_that_may_still_be_in_force_is_free() -> None:
    """The lowering to 200 W was never acknowledged, so 700 W is counted and 500 W takes no room."""
    assert caps_w([held(1, 1, 700, 500, 200), held(2, 1, 300, 400, 300)], 1000) == [500, 300]


def test_a_cap_sent_counts_though_the_worst_case_forgets_it() -> None:
    assert caps_w([held(1, 1, 200, 500, 500), held(2, 1, 500, 600, 500)], 1050) == [500, 550]
    assert caps_w([held(1, 1, 200, 400, 500), held(2, 1, 500, 600, 500)], 1000) == [400, 500]


def test_gpus_of_one_run_that_stand_apart_are_counted_one_by_one() -> None:
    """One at 700 W and one at 200 W: half of their sum for each would let them take 1,150 W of 900 W."""
    apart = HeldCap(Run("c", 1), (700 * WATT, 200 * WATT), 600 * WATT, 200 * WATT)
    assert caps_w([apart], 900) == [200]
    assert caps_w([apart], 1000) == [300]
    assert caps_w([apart], 1300) == [600]


def test_nothing_to_do() -> None:
    assert next_caps([], 0) == ()
    assert next_caps([], -1) == ()


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[HeldCap], int]:
    runs = []
    for job_id in range(draw(st.integers(1, 6))):
        gpus = draw(st.integers(1, 16))
        sent_mw, target_mw = draw(st.integers(0, 700_000)), draw(st.integers(0, 700_000))
        above = st.sampled_from([0, 0, 1, 50_000, 1_000_000])
        worst_mw = tuple(sent_mw + draw(above) for _ in range(gpus))
        runs.append(HeldCap(Run("c", job_id), worst_mw, target_mw, sent_mw))
    worst = sum(sum(run.worst_mw) for run in runs)
    return runs, worst + draw(st.sampled_from([-1_000_000, -1, 0, 1, 10_000, 300_000, 3_000_000, 10**8]))


@given(situations())
def test_one_step(situation: tuple[list[HeldCap], int]) -> None:
    runs, budget_mw = situation
    caps = next_caps(runs, budget_mw)
    before = sum(sum(run.worst_mw) for run in runs)
    after = sum(max(worst, cap) for run, cap in zip(runs, caps, strict=True) for worst in run.worst_mw)
    assert after <= max(before, budget_mw)
    for run, cap in zip(runs, caps, strict=True):
        assert min(run.sent_mw, run.target_mw) <= cap <= max(run.sent_mw, run.target_mw)
        assert run.target_mw > run.sent_mw or cap == run.target_mw
        assert cap in (run.sent_mw, run.target_mw) or cap % WATT == 0
        if before > budget_mw:
            assert cap <= run.sent_mw
    if sum(max(worst, run.target_mw) for run in runs for worst in run.worst_mw) <= budget_mw:
        assert caps == tuple(run.target_mw for run in runs)
    assert next_caps(runs[::-1], budget_mw) == caps[::-1]


# ------------------------------------------------------------------------- a world that loses, delays and reorders


@dataclass
class Node:
    """One run on one node: takes any plan that is newer than the one it holds, and says which it holds."""

    run: Run
    gpus: int
    cap_mw: int
    held: int = 0
    sent: list[int] = field(default_factory=list)  # the caps of all plans, by their numbers
    acknowledged: int = 0
    plans: list[int] = field(default_factory=list)  # on their way to the node
    reports: list[int] = field(default_factory=list)  # on their way back

    def as_held(self, target_mw: int) -> HeldCap:
        worst = max(self.sent[self.acknowledged :])
        return HeldCap(self.run, (worst,) * self.gpus, target_mw, self.sent[-1])

    def deliver(self, number: int) -> None:
        if number > self.held:
            self.held, self.cap_mw = number, self.sent[number]
        self.reports.append(self.held)

    def acknowledge(self, number: int) -> None:
        self.acknowledged = max(self.acknowledged, number)


def control(nodes: list[Node], targets_mw: list[int], budget_mw: int) -> None:
    caps = next_caps(
        [node.as_held(target) for node, target in zip(nodes, targets_mw, strict=True)], budget_mw
    )
    for node, cap in zip(nodes, caps, strict=True):
        if cap != node.sent[-1]:
            node.sent.append(cap)
            node.plans.append(len(node.sent) - 1)


@st.composite
def targets_within(draw: st.DrawFn, gpus: list[int], budget_mw: int) -> list[int]:
    """Caps in whole watts whose sum fits the budget, like those that an allocation gives."""
    shares = draw(st.lists(st.integers(0, 100), min_size=len(gpus), max_size=len(gpus)))
    unit = budget_mw / max(1, sum(shares))
    return [int(share * unit / number) // WATT * WATT for share, number in zip(shares, gpus, strict=True)]


@given(st.data())
def test_the_budget_holds_in_any_order_of_events_and_the_targets_are_reached(data: st.DataObject) -> None:
    gpus = data.draw(st.lists(st.integers(1, 8), min_size=2, max_size=5))
    budget_mw = 400 * WATT * sum(gpus)
    start = data.draw(targets_within(gpus, budget_mw))
    nodes = [
        Node(Run("c", i), n, cap, sent=[cap]) for i, (n, cap) in enumerate(zip(gpus, start, strict=True))
    ]

    def within() -> bool:
        return sum(node.gpus * node.cap_mw for node in nodes) <= budget_mw

    targets = start
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["targets", "control", "deliver", "report", "lose"]))
        node = data.draw(st.sampled_from(nodes))
        if what == "targets":
            targets = data.draw(targets_within(gpus, budget_mw))
            control(nodes, targets, budget_mw)
        elif what == "control":
            control(nodes, targets, budget_mw)
        elif what == "deliver" and node.plans:
            node.deliver(node.plans.pop(data.draw(st.integers(0, len(node.plans) - 1))))
        elif what == "report" and node.reports:
            node.acknowledge(node.reports.pop(data.draw(st.integers(0, len(node.reports) - 1))))
        elif what == "lose":
            lost = node.plans if data.draw(st.booleans()) else node.reports
            if lost:
                lost.pop(data.draw(st.integers(0, len(lost) - 1)))
        assert within()
    # Now everything arrives; what was lost is sent again. Lower, raise whole, raise what was partly granted.
    for _ in range(3):
        control(nodes, targets, budget_mw)
        for node in nodes:
            node.deliver(len(node.sent) - 1)
            assert within()
            node.acknowledge(node.held)
    assert [node.cap_mw for node in nodes] == targets


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_silent_run_holds_its_worst_case_and_the_others_stay_below(gpus: int) -> None:
    silent = held(1, gpus, 700, 200, 200)
    other = held(2, gpus, 300, 600, 300)
    assert caps_w([silent, other], 1200 * gpus) == [200, 500]
