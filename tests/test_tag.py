"""The tag, and the text of others beside it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.slurm.tag import (
    MAX_COMMENT_BYTES,
    MAX_TAG_BYTES,
    SOURCES,
    NotRewritable,
    Tag,
    TagError,
    find_tag,
    format_tag,
    merge,
    parse_tag,
)

from .slurm_samples import FULL_TAG

TAG = replace(FULL_TAG, capped_s=52 * 60 + 59)
TEXT = "pfi=1.83[1.71,1.95];src=measured;grid=200-700/100;flex=10%;loss=3.1%;wh=-840;capped=52m;t=2026-11-30T12:00Z"
ROWS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "admin_comments.jsonl").read_text("utf-8").splitlines()
]

TAGS = st.builds(
    Tag,
    pfi=st.floats(0, 9999),
    source=st.sampled_from(SOURCES),
    grid_low_w=st.integers(0, 99_999),
    grid_high_w=st.integers(0, 99_999),
    grid_step_w=st.integers(0, 99_999),
    flex=st.sampled_from(["none", "low", "medium", "high", "auto", "1%", "100%"]),
    loss=st.none() | st.floats(-1, 1),
    energy_wh=st.none() | st.integers(-(10**11), 10**11),
    capped_s=st.floats(0, 1e8),
    at_unix_s=st.floats(0, 4e9),
    pfi_low=st.none() | st.floats(0, 9999),
    pfi_high=st.none() | st.floats(0, 9999),
    restart=st.integers(0, 999_999),
    simulated=st.booleans(),
)


def test_the_text_is_as_designed() -> None:
    assert format_tag(TAG) == TEXT
    assert parse_tag(TEXT) == replace(TAG, capped_s=52 * 60.0)


def test_what_is_unknown_is_said_and_not_zero() -> None:
    text = format_tag(replace(TAG, source="default", pfi_low=None, pfi_high=None, loss=None, energy_wh=None))
    assert text == (
        "pfi=1.83;src=default;grid=200-700/100;flex=10%;loss=?;wh=?;capped=52m;t=2026-11-30T12:00Z"
    )
    tag = parse_tag(text)
    assert (tag.loss, tag.energy_wh, tag.pfi_low) == (None, None, None)


@given(TAGS)
def test_format_and_parse_agree(tag: Tag) -> None:
    text = format_tag(tag)
    assert text.isascii()
    assert " " not in text
    assert len(text) <= MAX_TAG_BYTES
    assert format_tag(parse_tag(text)) == text


@pytest.mark.parametrize(
    "changes",
    [
        {"pfi": math.nan},
        {"pfi": -1.0},
        {"pfi": 1e9},
        {"loss": math.inf},
        {"flex": "10% x"},
        {"flex": "lots"},
        {"energy_wh": 10**20},
        {"capped_s": -60.0},
        {"at_unix_s": 1e20},
        {"source": "guessed"},
    ],
)
def test_values_without_a_place_in_a_tag_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TagError):
        format_tag(replace(TAG, **changes))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pfi=1.83",
        TEXT + " ",
        " " + TEXT,
        TEXT.replace("measured", "guessed"),
        TEXT.replace("11-30", "13-30"),
    ],
)
def test_what_is_no_tag_is_refused(text: str) -> None:
    with pytest.raises(TagError):
        parse_tag(text)


def test_a_run_after_a_requeue_says_which_it_is() -> None:
    assert format_tag(replace(TAG, restart=2)) == f"{TEXT};restart=2"
    assert parse_tag(f"{TEXT};restart=2;next=1").restart == 2


def test_a_tag_of_simulated_gpus_says_so() -> None:
    assert format_tag(replace(TAG, simulated=True)) == f"{TEXT};sim=yes"
    assert format_tag(replace(TAG, restart=2, simulated=True)) == f"{TEXT};restart=2;sim=yes"
    assert parse_tag(f"{TEXT};sim=yes;next=1").simulated
    assert not parse_tag(f"{TEXT};sim=no").simulated


def test_fields_of_a_later_version_are_ignored() -> None:
    assert parse_tag(TEXT + ";next=1,2") == parse_tag(TEXT)


@pytest.mark.parametrize("row", ROWS, ids=[row["what"] for row in ROWS])
def test_the_text_of_others_stays_byte_for_byte(row: dict[str, str]) -> None:
    merged = merge(row["before"], TAG)
    assert merged == (f"{row['foreign']} {TEXT}" if row["foreign"] else TEXT)
    assert merge(merged, TAG) == merged
    assert find_tag(merged) == parse_tag(TEXT)


@given(st.text(st.characters(exclude_characters="\0"), max_size=60), TAGS, TAGS)
def test_a_new_tag_replaces_the_old_and_nothing_else(foreign: str, first: Tag, second: Tag) -> None:
    once = merge(foreign, first)
    assert isinstance(once, str)
    assert once == (f"{foreign} {format_tag(first)}" if foreign else format_tag(first))
    assert merge(once, second) == merge(foreign, second)


@given(st.text("ab =;\n", max_size=20), st.text("ab =;\n", min_size=1, max_size=20), TAGS, TAGS)
def test_text_put_behind_our_tag_is_kept(before: str, behind: str, first: Tag, second: Tag) -> None:
    once = merge(before, first)
    assert isinstance(once, str)
    kept = f"{before} {behind}" if before else behind
    assert merge(f"{once} {behind}", second) == f"{kept} {format_tag(second)}"


def test_no_tag_is_found_where_there_is_none() -> None:
    assert find_tag("pfi=1 JS1:AAAA") is None


def test_a_field_that_accounting_would_cut_is_not_rewritten() -> None:
    room = MAX_COMMENT_BYTES - len(TEXT) - 1
    assert isinstance(merge("x" * room, TAG), str)
    assert isinstance(merge("x" * (room + 1), TAG), NotRewritable)
    assert isinstance(merge("é" * (room // 2 + 1), TAG), NotRewritable)
    assert isinstance(merge("a\0b", TAG), NotRewritable)


@pytest.mark.parametrize(
    ("capped_s", "minutes"), [(0.0, 0), (0.4, 0), (1.0, 1), (59.0, 1), (119.0, 1), (120.0, 2)]
)
def test_a_cap_of_seconds_is_no_zero_minutes(capped_s: float, minutes: int) -> None:
    assert f";capped={minutes}m;" in format_tag(replace(TAG, capped_s=capped_s))
