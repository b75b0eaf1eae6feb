"""Slurm's words for times, ids and nodes."""

from __future__ import annotations

import pytest

from slurm_pfi.slurm.backend import Span, Special
from slurm_pfi.slurm.text import SlurmTextError, expand_nodes, parse_job_id, parse_limit_s, parse_unix_s


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("UNLIMITED", Special.UNLIMITED),
        ("INVALID", Special.NOT_SET),
        ("NOT_SET", Special.NOT_SET),
        ("Partition_Limit", Special.NOT_SET),
        ("Unknown", Special.NOT_SET),
        ("N/A", Special.NOT_SET),
        ("(null)", Special.NOT_SET),
        ("1-00:00:00", 1440),
        ("300-00:00:00", 432_000),
        ("2-03", 3060),
        ("2-03:30", 3090),
        ("10:00:00", 600),
        ("47:15", 47),
        ("45", 45),
        ("31:07.250", 31),
        ("0:00", 0),
    ],
)
def test_time_limits(text: str, minutes: Span) -> None:
    limit_s = parse_limit_s(text)
    assert (limit_s if isinstance(limit_s, Special) else limit_s // 60) == minutes


def test_a_time_limit_has_its_seconds() -> None:
    assert parse_limit_s("1-02:03:04") == 93_784
    assert parse_limit_s("47:15") == 2835


@pytest.mark.parametrize("text", ["2026-10-25T02:30:00", "-5", "1:2:3:4", "٣", "5 minutes", "1-", "NaN"])
def test_what_is_no_time_limit_is_an_error(text: str) -> None:
    with pytest.raises(SlurmTextError):
        parse_limit_s(text)


def test_points_in_time_are_a_number_unlimited_or_not_set() -> None:
    assert parse_unix_s("1796010770") == 1796010770
    assert parse_unix_s("NONE") is Special.UNLIMITED
    assert parse_unix_s("N/A") is Special.NOT_SET
    assert parse_unix_s("0") == 0
    with pytest.raises(SlurmTextError):
        parse_unix_s("2026-11-30T03:52:49")


def test_job_ids_go_to_the_largest_of_32_bits() -> None:
    assert parse_job_id("8123") == 8123
    assert parse_job_id("201330913") == 201330913
    assert parse_job_id("4294967295") == 4294967295


@pytest.mark.parametrize(
    "text", ["0", "", "north", "8123;north", "-1", "+1", " 1", "4294967296", "1_0", "1.0"]
)
def test_a_failed_reading_is_never_job_zero(text: str) -> None:
    with pytest.raises(SlurmTextError):
        parse_job_id(text)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", []),
        ("(null)", []),
        ("q07-[09-10]", ["q07-09", "q07-10"]),
        ("h[098-101]", ["h098", "h099", "h100", "h101"]),
        ("alpha,beta[002,005],gamma", ["alpha", "beta002", "beta005", "gamma"]),
        (
            "qx003,qx0[10-12],qx[103-104],qx[10,12-14],qx-m11-16",
            [
                "qx003",
                "qx010",
                "qx011",
                "qx012",
                "qx103",
                "qx104",
                "qx10",
                "qx12",
                "qx13",
                "qx14",
                "qx-m11-16",
            ],
        ),
        ("n[001-003,1-2]", ["n001", "n002", "n003", "n1", "n2"]),
        (
            "ws-21-unit-[003-004,008],ws-22-unit-[001-003]",
            [f"ws-21-unit-{n}" for n in ("003", "004", "008")]
            + [f"ws-22-unit-{n}" for n in ("001", "002", "003")],
        ),
        ("a1", ["a1"]),
        ("cn[002,004-005,009]", ["cn002", "cn004", "cn005", "cn009"]),
    ],
)
def test_node_lists(text: str, nodes: list[str]) -> None:
    assert sorted(expand_nodes(text)) == sorted(nodes)


@pytest.mark.parametrize("text", ["n[1-", "n[1-2", "n[2-1]", "@all", "n*", "n1;rm", "n1 n2"])
def test_what_is_no_node_list_is_an_error(text: str) -> None:
    with pytest.raises(SlurmTextError):
        expand_nodes(text)
