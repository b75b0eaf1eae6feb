"""The controller's core against nodes that say odd things, and against its own past: restarts, epochs, orders."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from slurm_pfi.config import Config, NodeSet, PolicySection, TimesSection
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.budget import look
from slurm_pfi.controller.core import Core
from slurm_pfi.controller.ledger import worst_by_gpu
from slurm_pfi.controller.measuring.measured import evidence
from slurm_pfi.controller.nodes import declared_nodes
from slurm_pfi.controller.science import Science
from slurm_pfi.controller.views import run_view
from slurm_pfi.elasticity.library import Library
from slurm_pfi.model import GpuReport, Limit, LimitStep, Plan, Progress, Report, ReportId, Run, RunReport
from slurm_pfi.slurm.backend import JobInfo

from .world import job_info

S = 1_000_000_000
W = 1000
NOW_S = 1_800_000_000.0
LIBRARY = Library.load_default()
RUN = Run("c", 1)


def gpu(uuid: str, *runs: Run, limit_w: int = 700, **changes: Any) -> GpuReport:
    """A GPU of 200 to 700 W that stands at its limit."""
    whole = GpuReport(
        uuid=uuid,
        model="NVIDIA H200",
        position=None,
        min_mw=200 * W,
        max_mw=700 * W,
        default_mw=700 * W,
        requested_mw=limit_w * W,
        enforced_mw=limit_w * W,
        ceiling_mw=limit_w * W,
        prior_mw=700 * W,
        draw_mw=None,
        runs=runs,
    )
    return msgspec.structs.replace(whole, **changes)


class Site:
    """A controller's core whose nodes say exactly what the test says."""

    def __init__(self, nodes: int = 2, gpus: int = 2, mode: Any = "enforce", **times: Any) -> None:
        self.config = Config(
            cluster="c",
            mode=mode,
            node_set=(NodeSet(names=f"n[1-{nodes}]", gpus=gpus, gpu_max_w=700, overhead_w=100),),
            policy=PolicySection(none_partitions=("urgent",)),
            times=TimesSection(start_settle_s=0.001, **{"rebound_s": 0.0, **times}),
        )
        self.core = Core(self.config, Science(LIBRARY))
        self.now_ns = 1000 * S
        self.state = cs.State(epoch=0, started_ns=self.now_ns, nodes=declared_nodes(self.config))
        self.actions: list[cs.Action] = []
        self.tell(cs.EpochTaken(epoch=1))
        self.seq = 0

    def tell(self, event: cs.Event) -> list[cs.Action]:
        self.state, actions = self.core.step(self.state, event, self.now_ns)
        self.actions.extend(actions)
        return actions

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * S)

    def report(
        self, node: str, *gpus: GpuReport, uid: int = 1000, flex: str = "medium", **changes: Any
    ) -> Report:
        """A report of these GPUs and the runs on them, that holds the last plan sent."""
        self.seq += 1
        runs: dict[Run, list[str]] = {}
        for one in gpus:
            for run in one.runs:
                runs.setdefault(run, []).append(one.uuid)
        plans = self.plans(node)
        whole = Report(
            cluster="c",
            node=node,
            id=ReportId(boot_id="b", agent_id="a", seq=self.seq),
            highest_epoch=plans[-1].id.epoch if plans else 0,
            held=plans[-1].id if plans else None,
            released=False,
            window_ends_in_s=None,
            gpus=gpus,
            runs=tuple(
                RunReport(run=run, uid=uid, flex=flex, gpus=tuple(uuids)) for run, uuids in runs.items()
            ),
        )
        return msgspec.structs.replace(whole, **changes)

    def hear(self, node: str, *gpus: GpuReport, **changes: Any) -> list[cs.Action]:
        return self.tell(cs.ReportCame(report=self.report(node, *gpus, **changes)))

    def cycle(self) -> list[cs.Action]:
        self.wait(0.1)
        return self.tell(cs.Cycle(now_unix_s=NOW_S + self.now_ns / S))

    def limit(
        self, limit_w: float | None, *, ends_in_s: float | None = None, class_: Any = "economic"
    ) -> None:
        now_s = NOW_S + self.now_ns / S
        steps = [] if limit_w is None else [LimitStep(start_unix_s=now_s, limit_mw=round(limit_w * W))]
        if ends_in_s is not None:
            steps.append(LimitStep(start_unix_s=now_s + ends_in_s, limit_mw=None))
        made = Limit(id="m", revision=1, source="test", class_=class_, steps=tuple(steps))
        self.tell(cs.LimitsChanged(limits=(made,) if steps else ()))

    def plans(self, node: str) -> list[Plan]:
        return [a.plan for a in self.actions if isinstance(a, cs.SendPlan) and a.plan.node == node]

    def identify(self, run: Run, *nodes: str, partition: str = "main") -> list[cs.Action]:
        job = msgspec_job(run, nodes, partition)
        return self.tell(cs.JobRead(run=run, job=job))

    def audits(self, event: str) -> list[dict[str, Any]]:
        return [a.fields for a in self.actions if isinstance(a, cs.Audit) and a.event == event]


def msgspec_job(run: Run, nodes: tuple[str, ...], partition: str = "main") -> JobInfo:
    return job_info(run, nodes, partition)


def caps_w(plan: Plan, step: int = 0) -> dict[int, float | None]:
    return {cap.run.job_id: None if cap.cap_mw is None else cap.cap_mw / W for cap in plan.steps[step].caps}


# ------------------------------------------------------------------------------------- odd and hostile reports


@pytest.mark.parametrize(
    "changes",
    [
        {"min_mw": 800 * W},
        {"min_mw": 0, "max_mw": 0, "default_mw": 0, "prior_mw": 0},
        {"min_mw": -5, "prior_mw": -3, "default_mw": -3},
        {"prior_mw": 100 * W},
        {"ceiling_mw": -(10**12)},
        {"max_mw": 10**15, "prior_mw": 10**15},
        {"prior_mw": 9 * 10**12},
    ],
)
def test_numbers_that_cannot_be_never_stop_a_cycle_nor_count_below_the_declared_maximum(
    changes: dict[str, Any],
) -> None:
    site = Site(nodes=2, gpus=1)
    site.hear("n1", gpu("A", RUN))
    site.hear("n2", gpu("B", Run("c", 2), **changes))
    site.identify(RUN, "n1")
    site.identify(Run("c", 2), "n2")
    site.limit(1500)
    site.cycle()
    window = site.state.window
    assert window is not None
    seen = look(site.state, site.config, site.now_ns)
    assert seen.constant_mw == 700 * W
    assert caps_w(site.plans("n1")[-1])[1] is not None


def test_more_gpus_than_a_node_can_have_are_not_taken() -> None:
    site = Site(nodes=1)
    site.hear("n1", *(gpu(f"G{i}") for i in range(65)))
    assert site.state.nodes["n1"].report is None
    assert site.audits("report_refused")


def test_two_nodes_that_name_the_same_gpu_are_both_counted() -> None:
    site = Site(nodes=2, gpus=1)
    site.hear("n1", gpu("A", RUN))
    site.hear("n2", gpu("A"))
    site.limit(1100)
    site.cycle()
    assert len(look(site.state, site.config, site.now_ns).gpus) == 2
    window = site.state.window
    assert window is not None and window.committed_mw + 200 * W <= window.limit_mw + window.shortfall_mw
    (cap,) = caps_w(site.plans("n1")[-1]).values()
    assert cap is not None and cap + 200 + 200 <= 1100 + window.shortfall_mw / W


def test_a_node_that_claims_anothers_run_neither_stops_nor_touches_it() -> None:
    site = Site(nodes=2, gpus=1)
    site.hear("n1", gpu("A", RUN))
    site.hear("n2", gpu("B", RUN))  # before Slurm has said where the run is
    site.identify(RUN, "n1")
    assert site.state.runs[RUN].phase == "admitted"
    assert set(site.state.runs[RUN].gpus) == {"n1"}
    site.hear("n2", gpu("B", RUN))  # and after
    assert set(site.state.runs[RUN].gpus) == {"n1"}
    assert [fields["run"] for fields in site.audits("run_refused")] == [str(RUN)]
    site.hear("n2", gpu("B"))
    assert RUN in site.state.runs


def test_a_run_reported_for_another_user_is_refused_there_alone() -> None:
    site = Site(nodes=2, gpus=1)
    site.hear("n1", gpu("A", RUN))
    site.hear("n2", gpu("B", RUN), uid=7)
    site.identify(RUN, "n1", "n2")
    assert set(site.state.runs[RUN].gpus) == {"n1"}
    site.hear("n2", gpu("B", RUN), uid=7)
    assert set(site.state.runs[RUN].gpus) == {"n1"}


def test_a_run_that_only_strangers_report_is_refused() -> None:
    site = Site(nodes=2, gpus=1)
    site.hear("n2", gpu("B", RUN))
    site.identify(RUN, "n1")
    assert site.state.runs[RUN].phase == "refused"


def test_a_node_cannot_free_others_of_their_caps_by_naming_their_runs() -> None:
    site = Site(nodes=2, gpus=2)
    other = Run("c", 2)
    site.hear("n1", gpu("A", RUN), gpu("B", other))
    for run in (RUN, other):
        site.identify(run, "n1")
    site.hear("n2", gpu("C", RUN, other), gpu("D"), runs=())
    site.limit(2200)
    site.cycle()
    assert None not in caps_w(site.plans("n1")[-1]).values()


def test_a_node_of_no_set_is_told_of_once() -> None:
    site = Site()
    for _ in range(5):
        site.hear("x9", gpu("A"))
        site.hear("n1", gpu("A"), cluster="other")
    assert len(site.audits("report_refused")) == 2
    for number in range(3000):
        site.hear(f"x{number}", gpu("A"))
    assert len(site.audits("report_refused")) < 1100


def test_a_report_that_was_overtaken_changes_nothing() -> None:
    site = Site(nodes=1, gpus=1)
    late = site.report("n1", gpu("A", limit_w=300))
    site.hear("n1", gpu("A", limit_w=700))
    site.tell(cs.ReportCame(report=late))
    (known,) = site.state.nodes["n1"].report.gpus  # type: ignore[union-attr]
    assert known.ceiling_mw == 700 * W


# ------------------------------------------------------------------------------------------- what is counted


def test_gpus_of_one_node_count_at_the_park_cap_that_they_are_sent() -> None:
    """A plan has one park cap: with differing device minimums it is the highest of them."""
    site = Site(nodes=1, gpus=3)
    small = {"min_mw": 100 * W}
    site.hear("n1", gpu("A", RUN), gpu("B", **small), gpu("C"))
    site.identify(RUN, "n1")
    site.limit(1050)
    site.cycle()
    plan = site.plans("n1")[-1]
    window = site.state.window
    assert window is not None
    park_mw = plan.steps[0].park_cap_mw or 0
    cap_mw = plan.steps[0].caps[0].cap_mw or 0
    assert cap_mw + 2 * park_mw + 100 * W <= 1050 * W + window.shortfall_mw


def test_a_gpu_counts_no_higher_than_its_prior_limit_lets_it_go() -> None:
    site = Site(nodes=1, gpus=2)
    low = {"prior_mw": 150 * W, "min_mw": 100 * W}
    site.hear("n1", gpu("A", RUN), gpu("B", limit_w=150, **low))
    site.limit(900)
    site.cycle()
    site.hear("n1", gpu("A", RUN), gpu("B", limit_w=150, **low))
    assert worst_by_gpu(site.state.nodes["n1"], site.now_ns, 30)["B"] == 150 * W


def test_a_silent_node_counts_at_its_prior_limits_where_they_are_above_its_default() -> None:
    site = Site(nodes=1, gpus=1)
    site.hear("n1", gpu("A", default_mw=500 * W, limit_w=200))
    site.limit(600, ends_in_s=20)
    site.cycle()
    site.hear("n1", gpu("A", default_mw=500 * W, limit_w=200))
    site.wait(100)
    assert look(site.state, site.config, site.now_ns).constant_mw == 700 * W


def test_a_released_node_counts_at_its_prior_limits_from_its_word_on() -> None:
    site = Site(nodes=1, gpus=1)
    site.hear("n1", gpu("A", limit_w=200), released=True)
    assert worst_by_gpu(site.state.nodes["n1"], site.now_ns, 30)["A"] == 700 * W


def test_a_faulty_gpu_beside_sound_ones_is_counted_when_their_run_is_raised() -> None:
    """The plan names the run: should the faulty GPU recover, it follows as well."""
    site = Site(nodes=1, gpus=2)

    def said(cap_w: int) -> list[cs.Action]:
        return site.hear(
            "n1", gpu("A", RUN, limit_w=cap_w), gpu("B", RUN, limit_w=300, fault="cannot be set")
        )

    site.hear("n1", gpu("A", RUN), gpu("B", RUN))
    site.identify(RUN, "n1")
    site.limit(700, class_="emergency")
    site.cycle()
    said(300)
    site.cycle()
    said(300)
    for _ in range(3):
        site.limit(1000, class_="emergency")
        site.cycle()
        cap = caps_w(site.plans("n1")[-1])[1] or 0
        assert cap + max(300, cap) + 100 <= 1000
        said(round(cap))


def test_what_is_sent_to_a_node_that_does_not_answer_raises_none_of_its_gpus() -> None:
    site = Site(nodes=1, gpus=2)
    state = gpu("A", RUN, limit_w=200), gpu("B", RUN, limit_w=690)
    site.hear("n1", gpu("A"), gpu("B"))
    site.limit(3000)
    site.cycle()
    site.limit(None)
    site.cycle()
    site.hear("n1", *state)
    site.identify(RUN, "n1")
    site.hear("n1", *state)
    old = site.plans("n1")[-1].id
    # It has accepted nothing since: its word is old, and no plan of a window was ever sent.
    site.state = msgspec.structs.replace(
        site.state,
        nodes={
            "n1": msgspec.structs.replace(
                site.state.nodes["n1"],
                outstanding=(),
                report=msgspec.structs.replace(site.state.nodes["n1"].report, held=old),  # type: ignore[type-var]
            )
        },
    )
    site.wait(8)
    worst = worst_by_gpu(site.state.nodes["n1"], site.now_ns, 30)
    site.limit(1000)
    site.cycle()
    for cap in caps_w(site.plans("n1")[-1]).values():
        assert cap is not None and cap * W <= min(worst.values())


def test_others_make_room_in_time_for_a_node_that_did_not_hear_that_the_limit_goes_on() -> None:
    site = Site(nodes=2, gpus=1)
    other = Run("c", 2)
    for name, run in (("n1", RUN), ("n2", other)):
        site.hear(name, gpu(f"G{name}", run))
        site.identify(run, name)
    site.limit(1400, ends_in_s=30)
    site.cycle()
    for name, run in (("n1", RUN), ("n2", other)):
        site.hear(name, gpu(f"G{name}", run, limit_w=600))
    held = site.plans("n1")[-1].id
    site.limit(1400)

    def until(second: int) -> int:
        for _ in range(second):
            site.wait(0.9)
            site.cycle()
            site.hear("n1", gpu("Gn1", RUN, limit_w=600), held=held)
            site.hear("n2", gpu("Gn2", other, limit_w=600))
        return round(caps_w(site.plans("n2")[-1])[2] or 0)

    assert until(18) == 600
    assert until(4) == 590, "its floor: the first may draw 700 W from then on"


def test_a_run_that_was_idle_when_it_was_seen_gets_its_floor_back_when_it_begins_to_draw() -> None:
    site = Site(nodes=1, gpus=2)
    for _ in range(15):
        site.hear("n1", gpu("A", RUN, draw_mw=90 * W), gpu("B", draw_mw=70 * W))
        site.wait(5)
    site.identify(RUN, "n1")
    assert site.state.runs[RUN].record.seen
    site.limit(600)
    site.cycle()
    before = caps_w(site.plans("n1")[-1])[1] or 0
    site.hear("n1", gpu("A", RUN, limit_w=300, draw_mw=95 * W), gpu("B", limit_w=200))
    assert site.state.runs[RUN].record.seen
    site.hear("n1", gpu("A", RUN, limit_w=300, draw_mw=300 * W), gpu("B", limit_w=200))
    assert not site.state.runs[RUN].record.seen
    site.limit(500)
    site.cycle()
    assert before <= 300
    assert (site.state.runs[RUN].floor_mw or 0) > 550 * W, "as of a run that was never seen uncapped"


# ---------------------------------------------------------------------------------- epochs, restarts, plans


def test_a_new_epoch_is_carried_to_every_node_at_once() -> None:
    site = Site(nodes=2, gpus=1)
    for name in ("n1", "n2"):
        site.hear(name, gpu(f"G{name}"))
    site.limit(900)
    site.cycle()
    for name in ("n1", "n2"):
        site.hear(name, gpu(f"G{name}", limit_w=200))
    site.tell(cs.EpochTaken(epoch=9))
    site.cycle()
    assert [site.plans(name)[-1].id.epoch for name in ("n1", "n2")] == [9, 9]


def test_many_nodes_that_saw_a_higher_epoch_need_one_new_epoch() -> None:
    site = Site(nodes=4, gpus=1)
    asked = [
        action
        for name in ("n1", "n2", "n3", "n4")
        for action in site.hear(name, gpu(f"G{name}"), highest_epoch=77)
        if isinstance(action, cs.NeedEpoch)
    ]
    assert asked == [cs.NeedEpoch(above=77)]


def test_a_node_that_claims_ever_higher_epochs_cannot_keep_the_site_unfenced() -> None:
    site = Site(nodes=1, gpus=1)
    taken = 0
    for _ in range(100):
        for action in site.hear("n1", gpu("A"), highest_epoch=2**60):
            if isinstance(action, cs.NeedEpoch):
                taken += 1
                site.tell(cs.EpochTaken(epoch=site.state.epoch + 1000))
        site.wait(0.1)
    assert taken <= 3
    # And it is not forgotten: a node that really saw more is answered in the end.
    assert taken >= 2


def test_before_a_node_holds_a_plan_of_ours_it_counts_at_its_prior_limits_even_if_it_holds_none() -> None:
    """Its last commander's plan may lie unread in its socket."""
    site = Site(nodes=1, gpus=1)
    site.hear("n1", gpu("A", limit_w=200))
    assert worst_by_gpu(site.state.nodes["n1"], site.now_ns, 30)["A"] == 700 * W


def test_a_plan_under_way_is_counted_however_many_follow() -> None:
    """Orders may change faster than a node answers."""
    site = Site(nodes=1, gpus=1)
    site.hear("n1", gpu("A", RUN))
    site.identify(RUN, "n1")
    site.cycle()
    site.hear("n1", gpu("A", RUN))
    site.limit(650)
    site.cycle()
    held = site.plans("n1")[-1].id
    site.hear("n1", gpu("A", RUN, limit_w=500))
    site.limit(790)
    site.cycle()
    raised_w = caps_w(site.plans("n1")[-1])[1] or 0
    assert raised_w > 600
    for turn in range(300):
        site.limit(640 + turn % 2, class_="emergency")
        site.cycle()
        site.hear("n1", gpu("A", RUN, limit_w=500), held=held)
    assert worst_by_gpu(site.state.nodes["n1"], site.now_ns, 30)["A"] >= raised_w * W
    assert len(site.state.nodes["n1"].outstanding) <= 64


def test_a_controller_that_finds_two_job_files_on_one_gpu_in_a_window_lifts_no_cap() -> None:
    """One of them stayed behind. Were both admitted, the GPU would be taken for a shared one and uncapped."""
    site = Site(nodes=1, gpus=1)
    site.limit(650)
    old = Run("c", 1), Run("c", 2)
    site.hear("n1", gpu("A", *old, limit_w=500), highest_epoch=1)
    site.cycle()
    (plan,) = site.plans("n1")[-1:]
    assert all(cap is not None and cap <= 550 for cap in caps_w(plan).values())
    site.tell(cs.JobRead(run=old[0], job=None))
    site.identify(old[1], "n1")
    site.cycle()
    site.hear("n1", gpu("A", old[1], limit_w=500))
    site.cycle()
    assert site.state.runs[old[1]].phase == "admitted"


# ------------------------------------------------------------------------------------------------ orders


def test_the_red_button_works_while_the_limits_cannot_be_read() -> None:
    site = Site(nodes=1, gpus=1)
    site.hear("n1", gpu("A", limit_w=200))
    site.tell(cs.LimitsChanged(limits=(), known=False))
    site.cycle()
    assert not site.plans("n1")
    site.tell(cs.OffChanged(off=True))
    site.cycle()
    assert site.plans("n1")[-1].steps[0].park_cap_mw is None


def test_an_end_beyond_the_hold_time_is_told_to_the_nodes() -> None:
    site = Site(nodes=1, gpus=1, max_hold_s=3600)
    site.hear("n1", gpu("A"))
    site.limit(600, ends_in_s=5 * 3600)
    site.cycle()
    last = site.plans("n1")[-1].steps[-1]
    assert last.park_cap_mw is None and not last.lease
    assert last.starts_in_s == pytest.approx(5 * 3600, abs=1)


def test_a_schedule_of_very_many_steps_makes_a_plan_that_a_node_takes() -> None:
    site = Site(nodes=1, gpus=1)
    site.hear("n1", gpu("A", RUN))
    site.identify(RUN, "n1")
    now_s = NOW_S + site.now_ns / S
    steps = [
        LimitStep(start_unix_s=now_s + 15 * i, limit_mw=(790 - i // 10 - i % 7) * W) for i in range(1000)
    ]
    steps.append(LimitStep(start_unix_s=now_s + 15 * 1000, limit_mw=None))
    made = Limit(id="m", revision=1, source="test", class_="emergency", steps=tuple(steps))
    site.tell(cs.LimitsChanged(limits=(made,)))
    site.cycle()
    plan = site.plans("n1")[-1]
    assert len(plan.steps) <= 64
    assert plan.steps[-1].park_cap_mw is None and plan.steps[-1].starts_in_s == pytest.approx(15000, abs=1)
    # What was left out is never looser than what was said.
    lowest = min(step.limit_mw for step in steps if step.limit_mw is not None)
    assert (plan.steps[-2].caps[0].cap_mw or 0) + 100 * W <= lowest


def test_a_run_that_starts_in_a_window_while_slurm_is_silent_waits_and_that_is_said() -> None:
    site = Site(nodes=1, gpus=2)
    site.hear("n1", gpu("A"), gpu("B"))
    site.limit(1300)
    site.cycle()
    site.hear("n1", gpu("A", RUN, limit_w=200), gpu("B", limit_w=200))
    site.tell(cs.JobRead(run=RUN, job=None, unavailable="down"))
    site.cycle()
    site.wait(11)
    site.cycle()
    assert [fields["run"] for fields in site.audits("floor_breach")] == [str(RUN)]


# ------------------------------------------------------------------------------------------ what is measured


def working(site: Site, counters: dict[str, float | None], seconds: int, limit_w: int = 700) -> None:
    """Both nodes of one run for so long, each telling its counter, which rises by 100 a second, or none."""
    for _ in range(seconds):
        site.wait(1)
        for name in ("n1", "n2"):
            counter = counters.get(name)
            if counter is not None:
                counters[name] = counter = counter + 100 * min(1.0, limit_w / 600)
            told = (
                None
                if counter is None
                else Progress(counter=counter, unit="tokens", rate_per_s=7.0, age_s=0.2)
            )
            whole = site.report(name, gpu(f"G{name}", RUN, limit_w=limit_w, draw_mw=min(600, limit_w) * W))
            runs = tuple(msgspec.structs.replace(one, progress=told) for one in whole.runs)
            site.tell(cs.ReportCame(report=msgspec.structs.replace(whole, runs=runs)))


def test_progress_may_come_from_any_node_of_a_run() -> None:
    site = Site(nodes=2, gpus=1)
    site.hear("n1", gpu("Gn1", RUN))
    site.hear("n2", gpu("Gn2", RUN))
    site.identify(RUN, "n1", "n2")
    counters: dict[str, float | None] = {"n1": None, "n2": 5000.0}
    working(site, counters, 80)
    record = site.state.runs[RUN].record
    assert (record.source, record.rate_source, record.gpus, record.draw_mw) == ("seen", "seen", 2, 600 * W)
    assert record.rate_per_s == pytest.approx(100.0)
    assert record.totals.drawn_j == pytest.approx(2 * 600 * 80, rel=0.05)
    working(site, counters, 60, limit_w=480)
    record = site.state.runs[RUN].record
    assert record.measured
    assert record.loss_capped == pytest.approx(0.2, abs=0.01)
    shown = run_view(site.state.runs[RUN], site.state, site.now_ns)
    assert shown["rate_per_s"] == pytest.approx(80.0)
    assert shown["loss"] == pytest.approx(0.2, abs=0.01)
    assert (shown["baseline"], shown["baseline_draw_mw"]) == ("seen", 600 * W)


def test_a_run_with_a_silent_node_has_no_draw_of_its_own() -> None:
    site = Site(nodes=2, gpus=1)
    site.hear("n1", gpu("Gn1", RUN, draw_mw=600 * W))
    site.hear("n2", gpu("Gn2", RUN, draw_mw=600 * W))
    site.wait(2)
    site.hear("n1", gpu("Gn1", RUN, draw_mw=600 * W))
    known_j = site.state.runs[RUN].record.totals.drawn_j
    assert known_j == pytest.approx(2 * 2 * 600)
    for _ in range(30):
        site.wait(5)
        site.hear("n1", gpu("Gn1", RUN, draw_mw=600 * W))
    record = site.state.runs[RUN].record
    assert record.since_ns is None
    assert record.totals.drawn_j < known_j + 13 * 5 * 2 * 600


@pytest.mark.parametrize("counter", [5.0, 0.0, -1.0, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("age_s", [0.0, -5.0, 1e300, math.inf, math.nan])
def test_a_counter_that_cannot_be_is_no_counter(counter: float, age_s: float) -> None:
    site = Site(nodes=1, gpus=1)
    for i in range(20):
        site.wait(1)
        told = Progress(counter=counter * (1 + i), unit="tokens", rate_per_s=math.nan, age_s=age_s)
        whole = site.report("n1", gpu("G", RUN, draw_mw=600 * W))
        runs = (msgspec.structs.replace(whole.runs[0], progress=told),)
        site.tell(cs.ReportCame(report=msgspec.structs.replace(whole, runs=runs)))
        site.cycle()
    record = site.state.runs[RUN].record
    believed = age_s == 0.0 and 0 <= counter < 1e24
    assert record.reporting == believed
    assert record.totals.done == (pytest.approx(5.0 * 19) if believed and counter else 0)
    assert evidence(record, "g", "", site.now_ns).measurements == ()
