"""GPUs that several runs share, as the controller counts and caps them: once, and as the least flexible allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from slurm_pfi.cli.job import told_lines
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.answers.forecast import what_if
from slurm_pfi.controller.answers.forecast_values import Target
from slurm_pfi.controller.answers.jobs import job_view
from slurm_pfi.controller.boards import grouped, shared_runs
from slurm_pfi.controller.learning import gather
from slurm_pfi.controller.state import RunView
from slurm_pfi.controller.tags import index_of
from slurm_pfi.controller.views import run_view
from slurm_pfi.model import GpuReport, Progress, Run, RunReport

from .test_controller_core import NOW_S, RUN, S, Site, W, gpu

OTHER, THIRD = Run("c", 2), Run("c", 3)
OVERHEAD_W = 100
PRIOR_W = 700
PARK_W = 200


class Boards:
    """A site whose nodes do at once what their plans say. ``boards``: the runs of each GPU, by node and UUID."""

    def __init__(
        self, boards: Mapping[str, Mapping[str, Sequence[Run]]], flex: Mapping[Run, str] | None = None
    ) -> None:
        self.boards = {
            node: {uuid: tuple(runs) for uuid, runs in own.items()} for node, own in boards.items()
        }
        self.flex = dict(flex or {})
        self.site = Site(nodes=len(boards), gpus=max(len(own) for own in boards.values()))
        self.draw_w: dict[str, float] = {}
        self.counter: dict[Run, float] = {}
        for node in boards:
            self.hear(node)
        for run in {run for own in boards.values() for runs in own.values() for run in runs}:
            self.identify(run)
        self.turn(1)  # no window: all of them are admitted

    def nodes_of(self, run: Run) -> list[str]:
        return [node for node, own in self.boards.items() if any(run in runs for runs in own.values())]

    def identify(self, run: Run) -> None:
        partition = "urgent" if self.flex.get(run) == "none" else "main"
        self.site.identify(run, *self.nodes_of(run), partition=partition)

    def limit_w(self, node: str, uuid: str) -> float:
        """What the last plan makes of a GPU: an own reading of it."""
        plans = self.site.plans(node)
        if not plans or plans[-1].steps[0].park_cap_mw is None:
            return PRIOR_W
        caps = {cap.run: cap.cap_mw for cap in plans[-1].steps[0].caps}
        park_mw = plans[-1].steps[0].park_cap_mw
        given = [caps.get(run, park_mw) for run in self.boards[node][uuid]]
        return max((PRIOR_W if cap is None else cap / W for cap in given), default=park_mw / W)

    def hear(self, node: str) -> None:
        gpus: list[GpuReport] = []
        for uuid, runs in self.boards[node].items():
            limit_w = self.limit_w(node, uuid)
            draw_w = min(limit_w, self.draw_w.get(uuid, 0.0))
            gpus.append(
                gpu(uuid, *runs, limit_w=round(limit_w), draw_mw=round(draw_w * W) if draw_w else None)
            )
        has = {run: [u for u, on in self.boards[node].items() if run in on] for run in self.flex}
        self.site.hear(
            node,
            *gpus,
            runs=tuple(
                RunReport(
                    run=run,
                    uid=1000,
                    flex=self.flex[run],
                    gpus=tuple(uuids),
                    progress=Progress(counter=self.counter[run], unit="t", rate_per_s=None, age_s=0.0)
                    if run in self.counter
                    else None,
                )
                for run, uuids in has.items()
                if uuids
            ),
        )

    def turn(self, times: int = 4) -> None:
        """Cycles, each with the reports that follow."""
        for _ in range(times):
            self.site.cycle()
            for node in self.boards:
                self.hear(node)

    def floor_w(self, flex: str) -> float:
        """The lowest cap of a run that nobody measured, from its flex alone."""
        loss = {"none": 0.0, "low": 0.05, "medium": 0.15, "high": 0.30}[flex]
        return PRIOR_W * (
            1 - self.site.core.science.ignorance.greatest_reduction(Run("", 9), "NVIDIA H200", loss)
        )

    def total_w(self) -> float:
        """All limits, each GPU once, and what is beside them."""
        limits = sum(self.limit_w(node, uuid) for node, own in self.boards.items() for uuid in own)
        return limits + OVERHEAD_W * len(self.boards)

    @property
    def window(self) -> cs.WindowView:
        assert self.site.state.window is not None
        return self.site.state.window


def two_on_one(first: str = "medium", second: str = "high") -> Boards:
    """n1: a board of two runs, and a GPU of a third."""
    boards = {"n1": {"A": (RUN, OTHER), "B": (THIRD,)}}
    return Boards(boards, {RUN: first, OTHER: second, THIRD: "high"})


def test_a_shared_gpu_goes_down_to_the_higher_floor_of_its_runs_and_no_further() -> None:
    made = two_on_one()
    made.site.limit(1)
    made.turn()
    assert made.limit_w("n1", "A") == pytest.approx(made.floor_w("medium"), abs=1)
    assert made.limit_w("n1", "B") == pytest.approx(made.floor_w("high"), abs=1)
    caps = {cap.run: cap.cap_mw for cap in made.site.plans("n1")[-1].steps[0].caps}
    assert caps[RUN] == caps[OTHER]
    assert made.window.committed_mw / W == made.total_w() - OVERHEAD_W, "each GPU counts once"


def test_who_allows_nothing_keeps_a_gpu_uncapped_for_all_on_it() -> None:
    made = two_on_one("none", "high")
    made.site.limit(1000)
    made.turn()
    assert made.limit_w("n1", "A") == PRIOR_W
    assert made.limit_w("n1", "B") == pytest.approx(made.floor_w("high"), abs=1)
    floors_w = PRIOR_W + made.limit_w("n1", "B") + OVERHEAD_W
    assert made.window.shortfall_mw / W == pytest.approx(floors_w - 1000, abs=1)


def test_an_emergency_passes_the_floor_of_both_and_says_so_of_both() -> None:
    made = two_on_one()
    made.site.limit(600, class_="emergency")
    made.turn()
    assert made.limit_w("n1", "A") < made.floor_w("medium") - 1
    told = {fields["run"] for fields in made.site.audits("floor_passed")}
    assert {str(RUN), str(OTHER)} <= told


def test_an_emergency_takes_a_gpu_of_one_that_allows_nothing_last() -> None:
    made = two_on_one("high", "none")
    made.site.limit(OVERHEAD_W + PRIOR_W + 250, class_="emergency")
    made.turn()
    assert made.limit_w("n1", "A") == PRIOR_W
    assert made.limit_w("n1", "B") == 250


def test_runs_that_hang_together_by_others_have_one_cap() -> None:
    boards = {"n1": {"A": (RUN, OTHER), "B": (OTHER,)}, "n2": {"C": (OTHER, THIRD), "D": ()}}
    made = Boards(boards, {RUN: "high", OTHER: "high", THIRD: "low"})
    made.site.limit(1)
    made.turn(6)
    limits = [made.limit_w(node, uuid) for node, uuid in (("n1", "A"), ("n1", "B"), ("n2", "C"))]
    assert limits == [pytest.approx(made.floor_w("low"), abs=1)] * 3
    assert made.limit_w("n2", "D") == PARK_W
    assert made.window.committed_mw / W == made.total_w() - 2 * OVERHEAD_W


def test_when_the_other_has_ended_a_run_is_capped_as_it_alone_allows() -> None:
    made = two_on_one("high", "none")
    made.site.limit(1)
    made.turn()
    assert made.limit_w("n1", "A") == PRIOR_W
    made.boards["n1"]["A"] = (RUN,)
    made.turn()
    assert made.limit_w("n1", "A") == pytest.approx(made.floor_w("high"), abs=1)


# ------------------------------------------------------------------------------------------------ who comes


def newcomer(flex: str, limit_w: float) -> Boards:
    """RUN is capped in a window, and OTHER begins on its GPU; Slurm has described it."""
    made = Boards({"n1": {"A": (RUN,), "B": ()}}, {RUN: "high"})
    made.site.limit(limit_w)
    made.turn()
    made.flex[OTHER] = flex
    made.boards["n1"]["A"] = (RUN, OTHER)
    made.hear("n1")
    made.identify(OTHER)
    return made


def test_who_comes_to_a_shared_gpu_waits_until_what_both_need_fits() -> None:
    made = newcomer("none", 800)
    held_w = made.limit_w("n1", "A")
    made.identify(RUN)
    made.turn()
    assert made.site.state.runs[OTHER].phase == "waiting"
    assert made.limit_w("n1", "A") == held_w, "nor is anything raised, or anybody slowed, for it"
    assert made.window.shortfall_mw == 0
    made.site.limit(1000)
    made.turn()
    assert made.site.state.runs[OTHER].phase == "admitted"
    assert made.limit_w("n1", "A") == PRIOR_W
    assert made.total_w() <= 1000


def test_who_comes_with_a_higher_floor_raises_the_gpu_out_of_budget() -> None:
    made = newcomer("low", 1000)
    made.identify(RUN)
    made.turn()
    assert made.site.state.runs[OTHER].phase == "admitted"
    assert made.limit_w("n1", "A") >= made.floor_w("low") - 1
    assert made.total_w() <= 1000


def test_nobody_joins_a_run_that_slurm_has_not_confirmed() -> None:
    """The other's job file may have stayed behind; a newcomer on its GPU has Slurm asked again."""
    made = newcomer("low", 1000)
    made.turn()
    assert made.site.state.runs[OTHER].phase == "waiting"
    made.site.tell(cs.JobRead(run=RUN, job=None))
    made.boards["n1"]["A"] = (OTHER,)
    made.turn()
    assert made.site.state.runs[OTHER].phase == "admitted"


def test_who_joins_two_gpus_of_different_caps_raises_none_before_others_are_known_to_be_lower() -> None:
    boards: dict[str, dict[str, tuple[Run, ...]]] = {
        "n1": {"A": (RUN,), "B": (OTHER,)},
        "n2": {"C": (THIRD,), "D": ()},
    }
    made = Boards(boards, {RUN: "high", OTHER: "low", THIRD: "none"})
    floors_w = made.floor_w("high") + made.floor_w("low")
    made.site.limit(floors_w + 2 + PRIOR_W + PARK_W + 2 * OVERHEAD_W)
    made.turn()
    before_w = made.limit_w("n1", "A")
    assert before_w < made.limit_w("n1", "B") - 100
    # Its run has ended, but the node does not yet say that C is lower.
    made.site.hear("n2", gpu("C"), gpu("D", limit_w=PARK_W), runs=())
    del made.flex[THIRD]
    made.boards["n2"]["C"] = ()
    joins = Run("c", 4)
    made.flex[joins] = "low"
    made.boards["n1"] = {"A": (RUN, joins), "B": (OTHER, joins)}
    made.hear("n1")
    for run in (RUN, OTHER, joins):
        made.identify(run)
    made.site.cycle()
    assert made.site.state.runs[joins].phase == "admitted"
    assert made.limit_w("n1", "A") <= before_w + 2
    assert made.limit_w("n1", "B") >= made.floor_w("low") - 1
    made.turn()
    assert made.limit_w("n1", "A") >= made.floor_w("low") - 1


def test_one_whose_need_does_not_fit_keeps_nobody_else_from_a_shared_gpu() -> None:
    """All slices of a board would stay empty for the first job on it that allows nothing."""
    made = newcomer("none", 800)
    made.flex[THIRD] = "high"
    made.boards["n1"]["A"] = (RUN, OTHER, THIRD)
    made.hear("n1")
    for run in (RUN, OTHER, THIRD):
        made.identify(run)
    made.turn()
    assert [made.site.state.runs[run].phase for run in (OTHER, THIRD)] == ["waiting", "admitted"]
    assert made.total_w() <= 800
    told = what_if(
        made.site.state, made.site.config, made.site.core.science, Target(limit_mw=800 * W), made.site.now_ns
    )
    assert told.waiting == (str(OTHER),)
    made.site.limit(1000)
    made.turn()
    assert made.site.state.runs[OTHER].phase == "admitted"
    assert made.limit_w("n1", "A") == PRIOR_W


def test_one_whose_need_does_not_fit_keeps_nobody_else_from_a_free_gpu() -> None:
    made = Boards({"n1": {"A": (), "B": ()}})
    made.site.limit(850)
    made.turn()
    made.flex |= {RUN: "none", OTHER: "high"}
    made.boards["n1"]["A"] = (RUN, OTHER)
    made.hear("n1")
    made.identify(RUN)
    made.identify(OTHER)
    made.turn()
    assert [made.site.state.runs[run].phase for run in (RUN, OTHER)] == ["waiting", "admitted"]
    assert made.total_w() <= 850


def test_two_that_wait_on_one_gpu_come_in_one_after_the_other() -> None:
    made = Boards({"n1": {"A": (), "B": ()}})
    made.site.limit(1200)
    made.turn()
    made.flex |= {RUN: "medium", OTHER: "medium"}
    made.boards["n1"]["A"] = (RUN, OTHER)
    made.hear("n1")
    made.identify(RUN)
    made.identify(OTHER)
    made.turn()
    assert [made.site.state.runs[run].phase for run in (RUN, OTHER)] == ["admitted", "admitted"]
    assert made.total_w() <= 1200


def test_a_new_controller_waits_for_slurms_word_on_who_shares() -> None:
    """Before it, a run that allows nothing would be slowed by what its neighbour allows."""
    again = Site(nodes=1, gpus=2)
    times = structs.replace(again.config.times, start_settle_s=30.0)
    again.core = replace(again.core, config=structs.replace(again.config, times=times))
    again.limit(1400)
    flex = {RUN: "none", OTHER: "high", THIRD: "high"}
    gpus = (gpu("A", RUN, OTHER), gpu("B", THIRD, limit_w=500))
    runs = tuple(
        RunReport(run=r, uid=1000, flex=f, gpus=("B",) if r == THIRD else ("A",)) for r, f in flex.items()
    )
    again.hear("n1", *gpus, runs=runs)
    again.cycle()
    assert not again.plans("n1")
    for run in flex:
        again.identify(run, "n1", partition="urgent" if run == RUN else "main")
    again.cycle()
    caps = {cap.run: cap.cap_mw for cap in again.plans("n1")[-1].steps[0].caps}
    assert caps[RUN] == PRIOR_W * W


def restarted(limit_w: int, limits_w: Mapping[str, int], flex: Mapping[Run, str]) -> Site:
    """A new controller that finds RUN and OTHER on A and THIRD on B, at these limits, in a window."""
    again = Site(nodes=1, gpus=2)
    times = structs.replace(again.config.times, start_settle_s=30.0)
    again.core = replace(again.core, config=structs.replace(again.config, times=times))
    again.limit(limit_w)
    gpus = (gpu("A", RUN, OTHER, limit_w=limits_w["A"]), gpu("B", THIRD, limit_w=limits_w["B"]))
    runs = tuple(
        RunReport(run=r, uid=1000, flex=f, gpus=("B",) if r == THIRD else ("A",)) for r, f in flex.items()
    )
    again.hear("n1", *gpus, runs=runs)
    again.cycle()
    return again


@pytest.mark.parametrize("none_first", [True, False])
def test_a_new_controller_takes_from_no_sharer_what_it_had_though_the_limit_is_infeasible(
    none_first: bool,
) -> None:
    flex = {RUN: "none", OTHER: "high", THIRD: "high"}
    if not none_first:
        flex |= {RUN: "high", OTHER: "none"}
    again = restarted(900, {"A": PRIOR_W, "B": 491}, flex)
    for run, word in flex.items():
        again.identify(run, "n1", partition="urgent" if word == "none" else "main")
    again.cycle()
    caps = {cap.run: cap.cap_mw for cap in again.plans("n1")[-1].steps[0].caps}
    assert caps[RUN] == caps[OTHER] == PRIOR_W * W
    assert {view.phase for view in again.state.runs.values()} == {"admitted"}


def test_a_new_controller_lets_nobody_in_who_has_not_its_floor_on_a_shared_gpu() -> None:
    flex = {RUN: "none", OTHER: "high", THIRD: "high"}
    again = restarted(1150, {"A": 500, "B": 500}, flex)
    for run, word in flex.items():
        again.identify(run, "n1", partition="urgent" if word == "none" else "main")
    again.cycle()
    assert again.state.runs[RUN].phase == "waiting"
    assert again.state.window is not None
    assert again.state.window.shortfall_mw == 0


def test_a_new_controller_waits_for_no_word_on_a_run_that_slurm_does_not_know() -> None:
    again = restarted(1400, {"A": PRIOR_W, "B": 500}, {RUN: "high", OTHER: "high", THIRD: "high"})
    for run in (RUN, THIRD):
        again.identify(run, "n1")
    again.cycle()
    assert not again.plans("n1")
    again.tell(cs.JobRead(run=OTHER, job=None))
    again.cycle()
    assert again.plans("n1")


# ------------------------------------------------------------------------------------------------ nothing is measured


def test_who_shares_is_not_measured_and_the_draw_is_nobodys() -> None:
    made = two_on_one("medium", "medium")
    made.draw_w = {"A": 600.0, "B": 650.0}
    made.counter = {RUN: 0.0, OTHER: 0.0, THIRD: 0.0}
    for _ in range(80):
        made.site.wait(1.0)
        made.counter = {run: count + 100.0 for run, count in made.counter.items()}
        made.turn(1)
    runs = made.site.state.runs
    assert runs[THIRD].record.seen
    assert runs[THIRD].record.draw_mw == 650 * W
    for run in (RUN, OTHER):
        assert runs[run].shares
        assert runs[run].record.source == "bounded"
        assert not runs[run].record.levels
        assert run_view(runs[run], made.site.state, made.site.now_ns)["draw_mw"] is None
    found = dict(gather(made.site.state, made.site.core.science, made.site.now_ns))
    assert not found[RUN].measurements
    science = made.site.core.science
    knowledge = science.knowledge(made.site.state)
    assert index_of(runs[RUN], (gpu("A"),), made.site.config, science, knowledge).source == "default"


def test_what_a_cap_cost_while_sharing_is_not_known() -> None:
    made = Boards({"n1": {"A": (RUN,)}}, {RUN: "high"})
    made.draw_w = {"A": 690.0}
    made.counter = {RUN: 0.0}

    def work(seconds: int) -> None:
        for _ in range(seconds):
            made.site.wait(1.0)
            made.counter = {run: count + 100.0 for run, count in made.counter.items()}
            made.turn(1)

    def shown() -> int:
        return len(dict(gather(made.site.state, made.site.core.science, made.site.now_ns))[RUN].measurements)

    work(80)
    made.site.limit(650)
    work(40)
    made.site.limit(None)
    work(5)
    assert made.site.state.runs[RUN].record.loss == pytest.approx(0.0, abs=0.01)
    alone = shown()
    assert alone > 0
    made.flex[OTHER] = "high"
    made.boards["n1"]["A"] = (RUN, OTHER)
    made.hear("n1")
    made.identify(OTHER)
    work(5)
    assert shown() == 0, "what it lost alone says little of what it loses beside others"
    assert made.site.state.runs[RUN].record.loss == pytest.approx(0.0, abs=0.01), "no cap, no cost"
    made.site.limit(600)
    work(5)
    made.site.limit(None)
    made.boards["n1"]["A"] = (RUN,)
    work(10)
    record = made.site.state.runs[RUN].record
    assert not made.site.state.runs[RUN].shares
    assert record.source == "seen", "what it showed alone stands"
    assert shown() == alone
    assert (record.loss, record.loss_capped, record.energy_wh) == (None, None, None)


def test_what_if_names_every_run_of_a_shared_gpu_and_counts_the_gpu_once() -> None:
    made = two_on_one("medium", "high")
    told = what_if(
        made.site.state, made.site.config, made.site.core.science, Target(limit_mw=1100 * W), made.site.now_ns
    )
    assert [run.job_id for run in told.runs] == [1, 2, 3]
    assert told.gpus == 2
    assert told.runs[0].cap_mw == told.runs[1].cap_mw
    assert [run.baseline for run in told.runs[:2]] == ["bounded", "bounded"]
    assert not told.standing.unreached


def test_job_says_why_nothing_is_known_of_a_run_that_shares() -> None:
    made = two_on_one("medium", "medium")
    made.site.limit(1000)
    made.turn()
    site = made.site
    now_s = NOW_S + site.now_ns / S

    def told() -> str:
        answer = job_view(
            site.state.runs[RUN], site.state, site.config, site.core.science, site.now_ns, now_s
        )
        beside = {"asked_unix_s": now_s, "events": [], "events_trouble": "", "other_runs": []}
        return " ".join(" ".join(told_lines({**answer, **beside}, 100)).split())

    assert "shares its GPU with other jobs: not measured meanwhile" in told()
    assert "not known: it shared a GPU with other jobs while caps held that down" in told()
    assert "nothing: no cap" not in told()
    assert "kept, it was not capped" not in told()
    made.boards["n1"]["A"] = (RUN,)
    made.turn()
    assert "shares its GPU" not in told()
    assert "not known: it shared a GPU" in told()


# ------------------------------------------------------------------------------------------------ any boards

RUNS = [Run("c", number) for number in range(1, 7)]
FLEXES = ["none", "low", "medium", "high"]


@settings(max_examples=60, deadline=None)
@given(
    on=st.lists(st.lists(st.sampled_from(RUNS), max_size=3, unique=True), min_size=4, max_size=4),
    flexes=st.lists(st.sampled_from(FLEXES), min_size=len(RUNS), max_size=len(RUNS)),
    limit_w=st.integers(300, 3000),
)
def test_no_run_is_below_its_own_floor_and_the_sum_counts_a_gpu_once(
    on: list[list[Run]], flexes: list[str], limit_w: int
) -> None:
    boards = {"n1": {"A": on[0], "B": on[1]}, "n2": {"C": on[2], "D": on[3]}}
    made = Boards(boards, dict(zip(RUNS, flexes, strict=True)))
    made.site.limit(limit_w)
    made.turn(6)
    for node, own in made.boards.items():
        for uuid, runs in own.items():
            for run in runs:
                assert made.limit_w(node, uuid) >= made.floor_w(made.flex[run]) - 1
    window = made.site.state.window
    if window is not None:
        assert window.committed_mw / W == pytest.approx(made.total_w() - 2 * OVERHEAD_W, abs=0.1)
        assert window.shortfall_mw / W == pytest.approx(max(0.0, made.total_w() - limit_w), abs=0.1)
    assert shared_runs(made.site.state) == {run for runs in on if len(runs) > 1 for run in runs}


@given(st.lists(st.sets(st.integers(0, 6), max_size=3), max_size=8))
def test_groups_are_the_runs_that_hang_together(has: list[set[int]]) -> None:
    views = [
        RunView(run=Run("c", number), first_seen_ns=0, gpus={"n1": tuple(f"G{i}" for i in sorted(own))})
        for number, own in enumerate(has)
    ]
    groups = [[view.run.job_id for view in group] for group in grouped(views)]
    assert sorted(number for group in groups for number in group) == list(range(len(has)))
    assert (
        [min(group) for group in groups]
        == [group[0] for group in groups]
        == sorted(group[0] for group in groups)
    )
    for group in groups:
        reached = {group[0]}
        for _ in group:
            reached |= {n for n in group for m in reached if has[n] & has[m]}
        assert reached == set(group)
        others = set(range(len(has))) - set(group)
        assert all(has[n].isdisjoint(has[m]) for n in group for m in others)
