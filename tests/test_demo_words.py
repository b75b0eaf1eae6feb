"""What the demo says at its end, and how its lines break."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testbed.demo.words import Compared, comparison, folded

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
