"""What a user reads of a job: every state of knowledge has honest words, on 80 columns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.cli.job import told_lines
from slurm_pfi.cli.job_words import floor_stretches, timeline
from slurm_pfi.controller.answers.jobs import job_view
from slurm_pfi.controller.state import RunView
from slurm_pfi.model import Run

from .site_answers import with_record
from .test_controller_core import NOW_S, RUN, S, Site, gpu

UNMEASURED = {
    "lost": None,
    "lost_low": None,
    "lost_high": None,
    "loss": None,
    "loss_capped": None,
    "loss_capped_low": None,
    "loss_capped_high": None,
    "longer_s": None,
}


def site(**record: Any) -> Site:
    """Two nodes of two GPUs, all of one run, under an economic limit."""
    made = Site(nodes=2, gpus=2)
    for name in ("n1", "n2"):
        made.hear(name, *(gpu(f"G{name}{i}", RUN, draw_mw=600_000) for i in range(2)))
    made.identify(RUN, "n1", "n2")
    made.limit(2000, ends_in_s=500)
    made.cycle()
    made.state = with_record(made.state, RUN, **record)
    return made


def told(made: Site | None = None, **changes: Any) -> dict[str, Any]:
    """What the controller answers of that run, 72 min after it began."""
    made = made or site()
    view: RunView = made.state.runs[RUN]
    now_s = NOW_S + made.now_ns / S
    answer = job_view(view, made.state, made.config, made.core.science, made.now_ns, now_s)
    cost = {**answer["cost"], **changes.pop("cost", {})}
    return {
        **answer,
        "first_seen_unix_s": now_s - 4320,
        "asked_unix_s": now_s,
        "events": [],
        "events_trouble": "",
        "other_runs": [],
        **changes,
        "cost": cost,
    }


def text(answer: dict[str, Any], width: int = 1000) -> str:
    return "\n".join(told_lines(answer, width))


def event(at_s: float, kind: str, words: str = "") -> dict[str, Any]:
    return {"unix_s": at_s, "run": "c:1.0", "kind": kind, "text": words or kind}


def test_a_tag_that_could_not_be_written_is_told_while_the_run_lasts() -> None:
    trouble = "not rewritable: text of others reads differently in two ways, so it is left alone"
    assert f"its tag does not stand in Slurm as it should: {trouble}" in text(told(tag_trouble=trouble))
    assert "its tag" not in text(told())
    assert "its tag" not in text(told(tag_trouble=trouble, ended_unix_s=NOW_S, state="ended"))


def test_a_measured_run_is_told_with_figures_and_their_intervals() -> None:
    said = text(told())
    assert "job 1 of user: running" in said
    assert "--power-flex=medium" in said
    assert "at most 15 % of its throughput" in said
    assert "draw without a cap: 650 W a GPU, seen on this run" in said
    assert "1,000 tokens/s, give or take 1.0 %, seen on this run" in said
    assert "4.4 % of its throughput while capped (3.4 to 5.4 %), 1.9 % over the time it was watched" in said
    assert (
        "80 s longer for the same work (61 s to 99 s), or 80,000 tokens not done (61,000 to 99,000)" in said
    )
    assert "360 Wh; it drew 2.88 kWh" in said
    assert "at most 15 % lost while capped: kept" in said
    assert "floor of 590 W a GPU: kept" in said or "floor of 589 W a GPU: kept" in said


def test_without_progress_the_loss_is_not_known_and_curves_of_others_are_called_that() -> None:
    said = text(told(site(reporting=False, levels=site().state.runs[RUN].record.levels[1:])))
    assert "throughput without a cap: not known, the job reports no progress" in said
    cost = said.partition("\nCost\n")[2].partition("\nSaved\n")[0]
    assert cost.strip().startswith("not known: the job reports no progress; by curves of other jobs about ")
    assert " to " in cost, "with an interval"
    assert "at most 15 % lost while capped: not known; by curves of other jobs" in said


def test_a_counter_that_is_not_believed_is_told_as_such() -> None:
    said = text(told(site(doubt="it rose tenfold under a cap")))
    assert "its counter is not believed: it rose tenfold under a cap" in said
    assert "not known: its counter is not believed; by curves of other jobs about" in said
    assert "tokens not done" not in said


def test_a_counter_that_its_gpus_contradict_is_told_with_both_figures_and_what_counts() -> None:
    words = "at a cap of 480 W it kept 86.1 % by its counter, 90.4 % by its activity"
    shown = {"loss": 0.094, "sd": 0.01}
    said = text(told(site(disputed=words), learned=True, by_activity=shown))
    assert f"its counter and its GPUs disagree: {words}; what its GPUs did counts" in said
    assert (
        "not known: its counter and its GPUs disagree; estimated from the activity of its GPUs, about 9.4 % of its "
        "throughput while capped (7.4 to 11.4 %)"
    ) in said
    assert (
        "at most 15 % lost while capped: not known; estimated from the activity of its GPUs about 9.4 %"
        in said
    )
    assert "measured of it" not in said
    assert "tokens not done" not in said


def test_without_progress_an_estimate_from_activity_comes_before_curves_of_others() -> None:
    levels = site().state.runs[RUN].record.levels[1:]
    said = text(told(site(reporting=False, levels=levels), by_activity={"loss": 0.06, "sd": 0.01}))
    cost = said.partition("\nCost\n")[2].partition("\nSaved\n")[0]
    assert cost.strip().startswith(
        "not known: the job reports no progress; estimated from the activity of its GPUs, about 6.0 %"
    )
    assert "curves of other jobs" not in cost


def test_what_nobody_knows_is_not_told_as_a_number() -> None:
    answer = told(
        baseline="bounded",
        baseline_draw_mw=None,
        baseline_rate_per_s=None,
        reporting=False,
        by_curves=None,
        flex=None,
        max_loss=None,
        user=None,
        expected_loss=None,
        target_cap_mw=None,
        cost={**UNMEASURED, "saved_wh": None},
    )
    said = text(answer)
    assert "a user not yet known" in said
    assert "what the site grants is not known yet" in said
    assert "its limit of 700 W is taken as the most it can be" in said
    assert "of curves of other jobs, not measured on this one" in said
    assert "\nCost\n  not known: the job reports no progress\n" in said
    assert "not known, as what it draws without a cap was not seen" in said
    assert "None" not in said
    assert "nan" not in said
    assert "Promised" not in said


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"flex_source": "comment", "user_flex": "10%"}, "pfi:10%, in the job's comment"),
        ({"flex_source": "", "user_flex": ""}, "nothing, so the site's default counts: medium"),
        (
            {
                "user_flex": "none",
                "flex": "low",
                "max_loss": 0.05,
                "note": "none is not allowed here; read as low",
            },
            "granted low: caps may cost it at most 5 %",
        ),
        ({"note": "none is not allowed here; read as low"}, "note: none is not allowed here; read as low"),
        ({"user_flex": "10%", "flex": "10%", "max_loss": 0.1}, "granted: caps may cost it at most 10 %"),
        ({"flex": "none", "max_loss": 0.0}, "granted none: only an emergency may cap it"),
        ({"mode": ["observe"]}, "its nodes only observe"),
        ({"other_runs": ["c:1.1"]}, "other runs of this job: 1.1"),
        (
            {"events": None, "events_trouble": "the history cannot be read: x"},
            "not known: the history cannot be",
        ),
        ({"limit": {"limit_mw": 2_000_000, "ids": []}}, "while power is given back slowly"),
        ({"baseline": "recalled"}, "recalled from earlier runs of the same work, not seen on this one"),
        ({"doubt": "", "baseline_rate_per_s": None}, "it has not yet worked without one for long enough"),
    ],
)
def test_words(changes: dict[str, Any], wanted: str) -> None:
    assert wanted in text(told(**changes))


def test_a_loss_within_its_noise_is_told_as_no_loss() -> None:
    cost = {
        "lost": 500.0,
        "lost_low": -1000.0,
        "lost_high": 2000.0,
        "loss": 0.0001,
        "loss_capped": 0.0003,
        "loss_capped_low": -0.0005,
        "loss_capped_high": 0.001,
        "longer_s": 0.5,
        "longer_low_s": -1.0,
        "longer_high_s": 2.0,
    }
    said = text(told(cost=cost))
    assert "so little that it cannot be told from nothing" in said
    assert "(0 s to 2 s)" in said


def test_who_allows_nothing_and_was_parked_on_a_shared_gpu_is_not_told_that_no_cap_was_there() -> None:
    """It waited for power there: what that was for is not measured, but it was."""
    promise = "no cap but in an emergency: "
    never = {**UNMEASURED, "capped_s": 0.0}
    assert f"{promise}kept" in text(told(max_loss=0.0, cost=never))
    assert f"{promise}but caps held down a GPU" in text(told(max_loss=0.0, cost=never, shared_capped=True))


@pytest.mark.parametrize(
    ("most", "wanted"),
    [
        (0.06, "at most 6 % lost while capped: kept"),
        (0.05, "probably kept, it lost 4.4 % (3.4 to 5.4 %)"),
        (0.04, "probably broken, it lost 4.4 % (3.4 to 5.4 %)"),
        (0.03, "broken, it lost 4.4 % (3.4 to 5.4 %)"),
        (0.0, "no cap but in an emergency: but caps held it down for 30 min"),
    ],
)
def test_whether_the_promise_held(most: float, wanted: str) -> None:
    assert wanted in text(told(max_loss=most))


def test_a_floor_passed_by_an_emergency_is_told_with_when_and_for_how_long() -> None:
    events = [event(1000, "capped"), event(2000, "floor_passed"), event(2100, "floor_passed")]
    said = text(told(events=[*events, event(2300, "floor_kept")]))
    assert "passed by an emergency limit at 1970-01-01" in said
    assert "for 5 min" in said
    now = text(told(events=events, floor_passed=True))
    assert "passed by an emergency limit since " in now
    lost = text(told(events=[*events, event(2300, "uncapped")], max_loss=0.01))
    assert "it lost 4.4 % (3.4 to 5.4 %), the emergency included" in lost


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        ("", []),
        ("cu", []),
        ("pk", [(0.0, 1.0)]),
        ("ppkpu", [(0.0, 2.0), (3.0, 4.0)]),
        ("cp", [(1.0, None)]),
        ("pe", [(0.0, 1.0)]),
    ],
)
def test_stretches_below_the_floor(kinds: str, wanted: list[Any]) -> None:
    words = {"c": "capped", "u": "uncapped", "p": "floor_passed", "k": "floor_kept", "e": "ended"}
    events = [event(float(at), words[kind]) for at, kind in enumerate(kinds)]
    assert floor_stretches(events) == wanted


def test_the_day_and_the_offset_stand_where_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    import time

    time.tzset()
    try:
        # 2026-10-25: the clock goes back at 01:00 UTC.
        lines = timeline([event(1_792_889_900, "a"), event(1_792_890_100, "b"), event(1_792_980_000, "c")])
    finally:
        monkeypatch.undo()
        time.tzset()
    assert lines[0] == "2026-10-25, UTC+0200"
    assert lines[2] == "2026-10-25, UTC+0100"
    assert lines[4] == "2026-10-26, UTC+0100"
    assert len(lines) == 6


def test_of_a_long_timeline_the_end_is_shown() -> None:
    lines = timeline([event(60.0 * i, "capped", f"entry {i}") for i in range(100)])
    assert lines[0] == "76 earlier entries are left out (--json has more)"
    assert sum("entry" in line for line in lines[1:]) == 24
    assert lines[-1].endswith("entry 99")


def test_a_run_that_ended_has_no_present_cap() -> None:
    answer = told()
    said = text({**answer, "state": "ended", "ended_unix_s": answer["asked_unix_s"] - 7200})
    assert "ended 2 h 00 min ago" in said
    assert "its cap now" not in said
    assert "present cap" not in said


@given(
    name=st.text(max_size=40),
    note=st.text(max_size=40),
    doubt=st.text(max_size=40),
    unit=st.text(max_size=10),
    width=st.integers(60, 120),
)
def test_no_text_of_users_steers_a_terminal_or_breaks_a_line(
    name: str, note: str, doubt: str, unit: str, width: int
) -> None:
    answer = told(ANSWERED, name=name, note=note, doubt=doubt, unit=unit, user=name)
    for line in told_lines(answer, width):
        assert line.isprintable(), ascii(line)


def test_80_columns_are_enough() -> None:
    events = [
        event(1000.0 * i, "capped", "capped from 480 W to 300 W a GPU (floor 452 W): limit x")
        for i in range(9)
    ]
    lines = told_lines(told(events=events, name="a-job-with-an-ordinary-name"), 80)
    assert max(map(len, lines)) <= 80
    for line in lines:
        assert not line.strip().startswith(("%", "W ", "W,", "kW", "kWh", "min")), "a unit without its figure"


def test_the_answer_of_a_run_that_slurm_has_not_described() -> None:
    made = Site(nodes=1, gpus=1)
    run = Run("c", 7)
    made.hear("n1", gpu("G", run, draw_mw=None))
    answer = job_view(made.state.runs[run], made.state, made.config, made.core.science, made.now_ns, NOW_S)
    assert answer["user"] is answer["by_curves"] is answer["cost"]["loss"] is None
    assert answer["uid"] == 1000, "its node says so"
    assert answer["pfi"]["source"] == "default", "as its tag will say"
    assert answer["spec"] == "7"


ANSWERED = site()


def test_what_caps_cost_it_is_told_at_some_of_them_with_intervals_and_whose_curve_it_is() -> None:
    answer = told()
    points = answer["curve"]
    assert [point["reduction"] for point in points] == [0.05, 0.1, 0.2, 0.3, 0.4]
    assert all(a["loss"] < b["loss"] for a, b in itertools.pairwise(points))
    said = text(answer)
    first = points[0]
    cap_w, loss = first["cap_mw"] / 1000, 100 * first["loss"]
    assert f"what caps cost it, by curves of other jobs (95 %): {cap_w:.0f} W {loss:.1f} % (0.0 to " in said
    assert "what was measured of it (95 %)" in text(told(learned=True, measured=True))
    assert "what caps cost it" not in text(told(curve=[])), "without a baseline there is no curve to tell"


def test_figures_of_a_simulation_are_told_as_such() -> None:
    assert "SIMULATED GPUs" in text(told(simulated=True))
    assert "SIMULATED" not in text(told())
