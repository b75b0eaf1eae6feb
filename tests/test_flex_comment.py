"""``pfi:VALUE`` in a job's comment: what is found in it, and that the flag always beats it."""

from __future__ import annotations

import dataclasses
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.config import Config, PolicySection
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.runs import Granted, effective_flex
from slurm_pfi.flex import flex_in_comment, is_flex, no_flex_in_comment, parse_flex
from slurm_pfi.model import Run

from .test_controller_core import RUN, Site, gpu
from .world import job_info

CONFIG: Final = Config(cluster="c", policy=PolicySection(none_partitions=("urgent",), default_flex="medium"))
WORDS: Final = ["none", "low", "medium", "high", "auto", "1%", "10%", "100%"]

# comment, the flex in it, the word that is none
TABLE: Final = [
    ("", None, None),
    ("pfi:high", "high", None),
    ("pfi:10%", "10%", None),
    ("x pfi:10% y", "10%", None),
    ("project A,pfi:low,urgent", "low", None),
    ("a;pfi:auto;b", "auto", None),
    ("line one\npfi:none\tline two", "none", None),
    ("  pfi:5%  ", "5%", None),
    ("pfi:low pfi:high", "low", None),
    ("pfi:11x", None, "pfi:11x"),
    ("pfi:11x pfi:11%", "11%", "pfi:11x"),
    ("pfi:High", None, "pfi:High"),
    ("PFI:high", None, "PFI:high"),
    ("pfi:", None, "pfi:"),
    ("pfi: high", None, "pfi:"),
    ("pfi:0%", None, "pfi:0%"),
    ("pfi:101%", None, "pfi:101%"),
    ("pfi:10%.", None, "pfi:10%."),
    ("pfi:low/pfi:high", None, "pfi:low?pfi:high"),
    ("pfi:\x1b[31mred", None, "pfi:??31mred"),
    ("pfi:" + "9" * 5000 + "%", None, "pfi:" + "9" * 20),
    ("pfi:\u0661\u0660%", None, "pfi:??%"),
    ("xpfi:high", None, None),
    ("(pfi:high)", None, None),
    ("spfi:high pfi=high pfi high", None, None),
    ("a\u00a0pfi:high", None, None),
    ("pfi:high\u00a0", None, "pfi:high?"),
]


@pytest.mark.parametrize(("comment", "flex", "wrong"), TABLE, ids=[repr(row[0][:40]) for row in TABLE])
def test_what_a_comment_says(comment: str, flex: str | None, wrong: str | None) -> None:
    assert flex_in_comment(comment) == flex
    assert no_flex_in_comment(comment) == wrong


def granted(flag: str, comment: str, partition: str = "main") -> Granted:
    job = dataclasses.replace(job_info(Run("c", 1), ("n1",), partition), comment=comment)
    return effective_flex(flag, job, CONFIG)


def test_the_comment_counts_where_no_flag_was_given() -> None:
    assert granted("", "x pfi:10% y") == (parse_flex("10%"), "", "10%", "comment")
    assert granted("", "nothing") == (parse_flex("auto"), "", "", "")
    assert effective_flex("", None, CONFIG) == (parse_flex("auto"), "", "", "")


def test_the_flag_beats_the_comment_and_a_difference_is_said() -> None:
    assert granted("high", "pfi:10%") == (
        parse_flex("high"),
        "--power-flex=high counts, not pfi:10% in the comment",
        "high",
        "flag",
    )
    assert granted("10%", "pfi:10%") == (parse_flex("10%"), "", "10%", "flag")
    assert granted("auto", "pfi:none").flex == parse_flex("auto")


def test_a_word_that_is_no_flex_is_told_and_not_guessed() -> None:
    assert granted("", "pfi:11x") == (
        parse_flex("auto"),
        "pfi:11x in the comment is not a flex; the site's default counts",
        "",
        "",
    )
    assert granted("", "pfi:11x pfi:low").note == "pfi:11x in the comment is not a flex; pfi:low counts"
    assert granted("high", "pfi:11x").note == "pfi:11x in the comment is not a flex; --power-flex=high counts"


def test_none_in_a_comment_needs_leave_as_from_the_flag() -> None:
    assert granted("", "pfi:none") == (
        parse_flex("low"),
        "none is not allowed here; read as low",
        "none",
        "comment",
    )
    assert granted("", "pfi:none", "urgent").flex == parse_flex("none")


def test_an_invalid_flag_means_the_default_whatever_the_comment_says() -> None:
    expected = (parse_flex("auto"), "not a flex; the site's default counts", "invalid", "flag")
    assert granted("invalid", "pfi:high pfi:11x") == expected


def comments() -> st.SearchStrategy[str]:
    any_text = st.text(st.characters())  # lone surrogates and control characters too
    marked = st.sampled_from([f"pfi:{word}" for word in [*WORDS, "", "11x", "High"]])
    parts = st.lists(st.one_of(any_text, marked, st.sampled_from([" ", ",", ";", "\n"])), max_size=12)
    return st.one_of(any_text, parts.map("".join))


@given(comment=comments(), flag=st.sampled_from([*WORDS, "", "invalid"]))
def test_no_comment_raises_and_the_flag_always_wins(comment: str, flag: str) -> None:
    found = granted(flag, comment)
    msgspec.json.encode(found.note)
    assert found.note.isascii()
    assert found.note.isprintable()
    if flag:
        assert (found.word, found.source) == (flag, "flag")
        assert found.flex == granted(flag, "").flex
    else:
        assert found.source == ("comment" if flex_in_comment(comment) else "")
        assert found.flex == granted(flex_in_comment(comment) or "", "").flex
        assert is_flex(found.word or "auto")


@given(text=st.one_of(st.sampled_from(WORDS), st.text(max_size=8), st.from_regex(r"\A[0-9]{1,3}%\Z")))
def test_is_flex_and_parse_flex_agree(text: str) -> None:
    try:
        parse_flex(text)
    except ValueError:
        assert not is_flex(text)
    else:
        assert is_flex(text)


def test_the_controller_shows_the_word_that_counted_also_when_it_reads_the_job_again() -> None:
    site = Site(nodes=1)
    site.hear("n1", gpu("A", RUN), flex="")
    job = dataclasses.replace(job_info(RUN, ("n1",), "main"), comment="x pfi:10% y")
    for _ in range(2):
        site.tell(cs.JobRead(run=RUN, job=job))
        view = site.state.runs[RUN]
        assert (view.user_flex, view.flex_source, view.flex) == ("10%", "comment", parse_flex("10%"))
    assert site.audits("admitted")[-1]["user_flex"] == "10%"
    # The user takes it out again: then nothing was asked.
    site.tell(cs.JobRead(run=RUN, job=dataclasses.replace(job, comment="")))
    view = site.state.runs[RUN]
    assert (view.user_flex, view.flex_source, view.flex) == ("", "", parse_flex("auto"))


def test_the_controller_keeps_the_flag_against_the_comment() -> None:
    site = Site(nodes=1)
    site.hear("n1", gpu("A", RUN), flex="high")
    job = dataclasses.replace(job_info(RUN, ("n1",), "main"), comment="pfi:10%")
    site.tell(cs.JobRead(run=RUN, job=job))
    view = site.state.runs[RUN]
    assert (view.user_flex, view.flex_source, view.flex) == ("high", "flag", parse_flex("high"))
    assert view.flex_note == "--power-flex=high counts, not pfi:10% in the comment"
