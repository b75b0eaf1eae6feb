"""What the demo says at its end, and how its lines break."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.demo.figures import SECOND_NS, Span
from testbed.demo.judge import kept_in_windows
from testbed.demo.story import Story
from testbed.demo.tables import Act
from testbed.demo.words import Compared, comparison, folded
from testbed.observer import Sample, Samples

FOUND = Compared(kept=0.965, kept_equal=0.951, cap_gap=0.08, step=0.5, measured=6, jobs=8)


def test_two_ways_that_differ_are_compared() -> None:
    text = comparison(FOUND)
    assert "kept 1.4 points more than an equal cut" in text
    assert "Measured by the end of the first window: 6 of 8 jobs" in text
    assert "certified" not in text


@pytest.mark.parametrize("step", [0.0, None])
def test_where_nothing_was_certified_that_is_said_and_nobody_is_praised(step: float | None) -> None:
    text = comparison(replace(FOUND, kept=0.955, kept_equal=0.956, cap_gap=0.002, step=step, measured=1))
    assert "nothing was certified yet, so marginal was equal in this run" in text
    assert "1 of 8 jobs" in text
    assert "sharing by what was measured" not in text


def test_a_plan_that_came_to_the_same_caps_is_not_called_uncertified() -> None:
    text = comparison(replace(FOUND, cap_gap=0.004))
    assert "as good as equal" in text
    assert "nothing was certified" not in text


def test_what_was_measured_is_left_out_where_that_is_not_known() -> None:
    assert "Measured" not in comparison(replace(FOUND, measured=None))


@pytest.mark.parametrize("width", range(24, 60))
def test_lines_break_between_words_and_hang(width: int) -> None:
    line = "        1  sums hold: holds (4711 instants checked, worst margin 0 W at +12.345 s)"
    head, *rest = folded(line, width, hang=3).split("\n")
    assert head.startswith("        1  sums")
    assert all(one.startswith(" " * 11) and one[11] != " " for one in rest)
    assert " ".join([head.strip(), *(one.strip() for one in rest)]) == line.strip()
    assert any("0 W" in one for one in (head, *rest)), "a figure keeps its unit"
    assert any("+12.345 s" in one for one in (head, *rest))
    assert all(len(one) <= width for one in (head, *rest))


def test_lines_of_their_own_stay_that() -> None:
    assert folded("one\n\n  two", 40) == "one\n\n  two"


def two_windows(out: Path, first_w: int, forecast: dict[str, Any]) -> tuple[Story, Samples]:
    """Job 1 with one GPU: half a minute each without a limit, in the first window, and in the equal one at 600 W."""
    story = Story(out)
    job = story.jobs[0]
    job.job_id, job.uuids = 1, ["G0"]
    half = 30 * SECOND_NS
    job.tokens = [(0, 0.0), (half, 300.0), (2 * half, 300.0 + first_w / 2), (3 * half, 600.0 + first_w / 2)]
    for at, name in enumerate(("before", "economic", "equal")):
        story.acts[name] = Act(name, Span(at * half, (at + 1) * half), None if at == 0 else 1, {})
    story.notes["forecast"] = forecast
    caps_w = [700, first_w, 600]
    samples = [
        Sample(second * SECOND_NS, None, {}, {"n1": (caps_w[second // 30] * 1000,)}) for second in range(90)
    ]
    return story, Samples(hz=1, load_mw=0, gpus={"n1": ("G0",)}, samples=tuple(samples))


@pytest.mark.parametrize(
    ("first_w", "step", "said"),
    [
        (600, 0.0, "nothing was certified yet"),
        (540, 0.5, "points less than an equal cut. Measured by the end of the first window: 1 of 2 jobs"),
    ],
)
def test_the_two_windows_are_compared_by_caps_as_well(
    tmp_path: Path, first_w: int, step: float, said: str
) -> None:
    forecast = {"certificate": {"step": step}, "runs": [{"measured": True}, {"measured": False}]}
    found = kept_in_windows(*two_windows(tmp_path, first_w, forecast))
    assert found["compared"]["cap_gap"] == pytest.approx(abs(first_w - 600) / 600, abs=1e-3)
    assert said in comparison(Compared(**found["compared"]))


def test_a_controller_that_could_not_say_leaves_it_unknown(tmp_path: Path) -> None:
    compared = Compared(**kept_in_windows(*two_windows(tmp_path, 540, {}))["compared"])
    assert compared.step is None
    assert compared.measured is None
    assert "Measured" not in comparison(compared)


def test_the_gpu_that_an_admin_had_set_is_introduced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Story(tmp_path).introduce()
    text = capsys.readouterr().out
    assert "An admin had set GPU 0 of n2 to 650 W" in text
    assert max(map(len, text.splitlines())) <= 110
