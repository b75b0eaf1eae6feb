"""What the budget counts: the worst that can be in force, whatever has not been said."""

from __future__ import annotations

import msgspec
import pytest

from slurm_pfi.controller.ledger import (
    default_worst_mw,
    gpu_worst_mw,
    missing_gpus_mw,
    still_outstanding,
)
from slurm_pfi.controller.state import NodeView, SentPlan
from slurm_pfi.model import GpuReport, Plan, PlanId, PlanStep, Report, ReportId, Run, RunCap

S = 1_000_000_000
LATE_S = 30.0
RUN = Run("c", 1)


def gpu(ceiling_mw: int | None = 300_000, prior_mw: int | None = 650_000) -> GpuReport:
    return GpuReport(
        uuid="GPU-1",
        model="NVIDIA H200",
        position=0,
        min_mw=200_000,
        max_mw=700_000,
        default_mw=700_000,
        requested_mw=ceiling_mw,
        enforced_mw=ceiling_mw,
        ceiling_mw=ceiling_mw,
        prior_mw=prior_mw,
        draw_mw=None,
        runs=(RUN,),
    )


def node(held: PlanId | None, *plans: SentPlan, fenced: bool = True, of: GpuReport | None = None) -> NodeView:
    report = Report(
        cluster="c",
        node="n1",
        id=ReportId(boot_id="b", agent_id="a", seq=1),
        highest_epoch=1,
        held=held,
        released=False,
        window_ends_in_s=None,
        gpus=(of or gpu(),),
        runs=(),
    )
    return NodeView(
        name="n1",
        gpus=2,
        gpu_max_mw=700_000,
        overhead_mw=0,
        mode="enforce",
        report=report,
        outstanding=plans,
        fenced=fenced,
    )


def sent(seq: int, *steps: tuple[float, int | None], at_s: float = 0.0, mode: str = "enforce") -> SentPlan:
    """A plan whose steps are (starts in, cap of the run); None ends the window."""
    made = tuple(
        PlanStep(starts_in_s=start, park_cap_mw=None)
        if cap is None
        else PlanStep(starts_in_s=start, park_cap_mw=200_000, caps=(RunCap(run=RUN, cap_mw=cap),))
        for start, cap in steps
    )
    plan = Plan(
        cluster="c",
        node="n1",
        id=PlanId(1, seq),
        answers=ReportId(boot_id="b", agent_id="a", seq=1),
        mode="observe" if mode == "observe" else "enforce",
        reason="",
        steps=made,
    )
    return SentPlan(plan=plan, sent_ns=round(at_s * S))


def worst_mw(view: NodeView, at_s: float) -> int:
    assert view.report is not None
    return gpu_worst_mw(view, view.report.gpus[0], round(at_s * S), LATE_S)


def test_a_plan_sent_counts_until_a_later_one_is_held() -> None:
    raised, lowered = sent(2, (0, 500_000)), sent(3, (0, 250_000))
    view = node(PlanId(1, 1), raised, lowered)
    assert worst_mw(view, 1) == 500_000
    assert still_outstanding(view) == (raised, lowered)
    acknowledged = node(PlanId(1, 3), raised, lowered)
    assert still_outstanding(acknowledged) == (lowered,)


def test_the_plan_held_counts_too_since_its_raises_may_be_under_way() -> None:
    view = node(PlanId(1, 2), sent(2, (0, 500_000)))
    assert still_outstanding(view) == view.outstanding
    assert worst_mw(view, 1) == 500_000


def test_a_window_that_the_node_knows_to_end_counts_as_ended_from_that_time_on() -> None:
    view = node(PlanId(1, 1), sent(1, (0, 300_000), (60, None)))
    assert worst_mw(view, 58) == 300_000
    assert worst_mw(view, 59.5) == 650_000


def test_a_step_that_lowers_counts_only_when_it_has_surely_begun() -> None:
    """A node counts from receipt, which can be as late as a report may be old."""
    view = node(PlanId(1, 1), sent(1, (0, 600_000), (10, 300_000)))
    assert worst_mw(view, 35) == 600_000
    assert worst_mw(view, 41) == 300_000


def test_before_our_first_plan_is_held_another_commanders_may_lift_everything() -> None:
    assert worst_mw(node(PlanId(1, 9), fenced=False), 1) == 650_000
    assert worst_mw(node(None, fenced=False), 1) == 650_000  # one may lie unread before it


@pytest.mark.parametrize(("reported", "expected_mw"), [(gpu(None), 700_000), (gpu(300_000, None), 300_000)])
def test_unknown_is_the_most_there_is(reported: GpuReport, expected_mw: int) -> None:
    assert worst_mw(node(None, of=reported), 1) == expected_mw


def test_a_run_that_the_plan_does_not_cap_is_at_the_prior_limit_or_the_maximum() -> None:
    uncapped = sent(1, (0, 300_000))
    steps = (PlanStep(starts_in_s=0, park_cap_mw=200_000, caps=(RunCap(run=RUN, cap_mw=None),)),)
    free = msgspec.structs.replace(uncapped, plan=msgspec.structs.replace(uncapped.plan, steps=steps))
    assert worst_mw(node(PlanId(1, 1), free), 1) == 650_000
    assert worst_mw(node(PlanId(1, 1), free, of=gpu(300_000, None)), 1) == 700_000


def test_a_plan_to_observe_caps_nothing() -> None:
    assert worst_mw(node(PlanId(1, 1), sent(1, (0, 300_000), mode="observe")), 1) == 650_000


def test_a_node_never_heard_counts_at_the_declared_maximum() -> None:
    unheard = NodeView(name="n1", gpus=8, gpu_max_mw=700_000, overhead_mw=0, mode="enforce")
    assert default_worst_mw(unheard) == 5_600_000
    assert missing_gpus_mw(unheard) == 5_600_000


def test_gpus_that_are_declared_and_not_reported_count_at_the_declared_maximum() -> None:
    assert missing_gpus_mw(node(None)) == 700_000
    assert default_worst_mw(node(None)) == 1_400_000
