"""Slurm's words for times, ids, nodes, and the tables of its commands: rows of tests/data/slurm_text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from slurm_pfi.slurm.backend import Special
from slurm_pfi.slurm.damage import SlurmTextError
from slurm_pfi.slurm.gres import GresError, parse_gres
from slurm_pfi.slurm.table import read_table
from slurm_pfi.slurm.text import (
    JobRef,
    expand_nodes,
    parse_job_id,
    parse_limit_s,
    parse_unix_s,
    read_submission,
)
from slurm_pfi.slurm.tres import count_gpus

DATA: Final = Path(__file__).parent / "data" / "slurm_text"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def is_error(wanted: object) -> bool:
    return isinstance(wanted, str) and wanted.startswith("error")


@pytest.mark.parametrize("row", rows("times.jsonl"), ids=lambda row: repr(row["s"]))
def test_time_limits(row: dict[str, Any]) -> None:
    if is_error(row["min"]):
        with pytest.raises(SlurmTextError):
            parse_limit_s(row["s"])
        return
    limit_s = parse_limit_s(row["s"])
    words = {None: Special.NOT_SET, "unlimited": Special.UNLIMITED}
    assert (limit_s if isinstance(limit_s, Special) else limit_s // 60) == words.get(row["min"], row["min"])


def test_a_time_limit_has_its_seconds() -> None:
    assert parse_limit_s("1-02:03:04") == 93_784
    assert parse_limit_s("47:15") == 2835


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


@pytest.mark.parametrize("row", rows("ids.jsonl"), ids=lambda row: repr(row["text"]))
def test_what_sbatch_prints_is_one_job_or_an_error(row: dict[str, Any]) -> None:
    if row["id"] is None:
        with pytest.raises(SlurmTextError):
            read_submission(row["text"])
    else:
        assert read_submission(row["text"]) == JobRef(row["id"], row["cluster"])


@pytest.mark.parametrize("row", rows("hosts.jsonl"), ids=lambda row: repr(row["s"]))
def test_node_lists(row: dict[str, Any]) -> None:
    if is_error(row["hosts"]):
        with pytest.raises(SlurmTextError):
            expand_nodes(row["s"])
    else:
        assert sorted(expand_nodes(row["s"])) == sorted(row["hosts"])


def test_no_nodes_are_none() -> None:
    assert expand_nodes("") == expand_nodes("(null)") == expand_nodes("None assigned") == ()


def test_a_list_of_more_nodes_than_slurm_can_have_is_an_error_at_once() -> None:
    assert len(expand_nodes("n[1-65536]")) == 65_536
    for text in ("n[1-65537]", "n[1-65536],m", "r[1-300]n[1-300]"):
        with pytest.raises(SlurmTextError, match="at most 65536 nodes"):
            expand_nodes(text)


@pytest.mark.parametrize("row", rows("gres.jsonl"), ids=lambda row: repr(row["s"]))
def test_gres(row: dict[str, Any]) -> None:
    if is_error(row["gpu"]):
        with pytest.raises(GresError):
            parse_gres(row["s"])
        return
    found = {gres.type: gres.indices for gres in parse_gres(row["s"]) if gres.name == "gpu"}
    assert found == {kind: None if at is None else tuple(at) for kind, at in row["gpu"].items()}


@pytest.mark.parametrize("row", rows("tres.jsonl"), ids=lambda row: repr(row["s"]))
def test_gpus_of_tres(row: dict[str, Any]) -> None:
    if is_error(row["gpus"]):
        with pytest.raises(SlurmTextError):
            count_gpus(row["s"])
        return
    unknown = isinstance(row["gpus"], str) and row["gpus"].startswith("unknown")
    assert count_gpus(row["s"]) == (None if unknown else row["gpus"])


@pytest.mark.parametrize(
    ("read", "text", "place"),
    [
        (parse_job_id, "12x4", 2),
        (parse_limit_s, "1-02:03 h", 7),
        (expand_nodes, "n1,n2;n3", 5),
        (count_gpus, "cpu=2,mem=512M,node=", 15),
        (read_submission, "sbatch: hello\nSubmitted batch job none\n", 14),
        (parse_job_id, "9" * 70 + "x", 70),
    ],
)
def test_the_error_tells_the_place(read: Any, text: str, place: int) -> None:
    with pytest.raises(SlurmTextError, match=f"see character {place}$") as caught:
        read(text)
    assert len(str(caught.value)) < 300


def test_fields_with_the_delimiter_or_a_newline_are_named_not_lost() -> None:
    table = read_table((DATA / "squeue_pipe.txt").read_bytes(), 5)
    assert [row[0] for row in table.rows] == ["700", "703"]
    assert [(line.number, line.text) for line in table.unreadable] == [
        (2, "701|u3|RUNNING|odd|name|n2"),
        (3, "702|u3|RUNNING|line"),
        (4, "break|n3"),
    ]


def test_bytes_that_are_no_text_lose_no_job() -> None:
    table = read_table((DATA / "squeue_not_utf8.txt").read_bytes(), 5, b"\x1f")
    assert [row[0] for row in table.rows] == ["704", "705"]
    assert not table.unreadable
    "".join(table.rows[0]).encode()


def test_a_last_line_that_is_cut_off_is_named() -> None:
    table = read_table(b"1|a\n2|", 2)
    assert (table.rows, [line.number for line in table.unreadable]) == ((("1", "a"),), [2])


def test_columns_of_a_fixed_width_cut_their_text_and_that_is_an_error() -> None:
    for line in (DATA / "sinfo_fixed_width.txt").read_text().splitlines():
        _, whole, used = line.split()
        parse_gres(whole)
        with pytest.raises(GresError, match="cut off"):
            parse_gres(used, counted=True)
