"""Numbers and jobs in Slurm's JSON, and answers that must not be believed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from slurm_pfi.slurm.backend import JobInfo, Span, Special, Unavailable
from slurm_pfi.slurm.damage import SlurmTextError
from slurm_pfi.slurm.jsonjobs import read_json_jobs
from slurm_pfi.slurm.numbers import read_count, read_id, read_minutes_s, read_number, read_time

from .slurm_samples import slurm_job

DATA: Final = Path(__file__).parent / "data" / "slurm_text"
UNLIMITED, NOT_SET = Special.UNLIMITED, Special.NOT_SET


def number(value: object, *, is_set: object = True, infinite: object = False) -> dict[str, object]:
    return {"set": is_set, "infinite": infinite, "number": value}


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (0, 0),
        (7, 7),
        (None, NOT_SET),
        (number(0), 0),
        (number(7), 7),
        (number(7, is_set=False), NOT_SET),
        (number(0, infinite=True), UNLIMITED),
        (number(0, is_set=False, infinite=True), UNLIMITED),
        ({**number(7), "a_later_key": 1}, 7),
    ],
)
def test_zero_unlimited_and_not_set_are_three(value: object, read: Span) -> None:
    assert read_number(value, "x") == read


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-1, "x: -1"),
        (1.5, "x: 1.5"),
        (True, "x: True"),
        ("7", "x: '7'"),
        (2**60, "x: 1152921504606846976"),
        ([], r"x: \[\]"),
        ({"set": True, "number": 1}, "without infinite"),
        (number(None), "x.number"),
        (number(1.5), "x.number: 1.5"),
        (number(1, is_set=1), "x.set: 1 is neither"),
        (number(1, infinite="false"), "x.infinite"),
        (number(number(1)), "x.number"),
    ],
)
def test_what_is_no_number_is_an_error_with_its_place(value: object, said: str) -> None:
    with pytest.raises(SlurmTextError, match=f"^{said}" if said.startswith("x") else said):
        read_number(value, "x")


def test_a_limit_is_in_minutes_and_a_time_that_has_not_come_is_not_1970() -> None:
    assert read_minutes_s(number(30), "x") == 1800
    assert read_minutes_s(0, "x") == 0
    assert read_minutes_s(0xFFFFFFFF, "x") is UNLIMITED
    assert read_minutes_s(0xFFFFFFFE, "x") is NOT_SET
    assert read_time(0, "x") is read_time(number(0), "x") is read_time(None, "x") is NOT_SET
    assert read_time(number(1_790_000_000), "x") == 1_790_000_000


def test_an_id_is_from_one_on_and_a_count_must_be_there() -> None:
    assert (read_id(number(0), "x"), read_id(None, "x"), read_id(4, "x")) == (None, None, 4)
    with pytest.raises(SlurmTextError):
        read_id(number(1, infinite=True), "x")
    with pytest.raises(SlurmTextError, match="not set"):
        read_count(None, "x")


MIXED: Final = json.loads((DATA / "squeue_mixed.json").read_text())["jobs"]


@pytest.mark.parametrize(
    ("place", "limit_s", "task", "start"),
    [
        (0, 2880 * 60, NOT_SET, 1_790_000_000),
        (1, 2880 * 60, NOT_SET, 1_790_000_000),
        (2, UNLIMITED, 0, 1_790_000_000),
        (3, UNLIMITED, NOT_SET, NOT_SET),
        (4, NOT_SET, NOT_SET, NOT_SET),
    ],
)
def test_both_forms_side_by_side(place: int, limit_s: Span, task: Span, start: Span) -> None:
    job = MIXED[place]
    assert read_minutes_s(job["time_limit"], "limit") == limit_s
    assert read_number(job["array_task_id"], "task") == task
    assert read_time(job["start_time"], "start") == start


JOB: Final[dict[str, Any]] = {
    "job_id": 8,
    "array_job_id": number(0),
    "array_task_id": number(0, is_set=False),
    "het_job_id": number(0),
    "het_job_offset": number(0),
    "restart_cnt": 1,
    "user_id": 1000,
    "user_name": "anna",
    "account": "",
    "partition": "main",
    "qos": None,
    "job_state": ["RUNNING"],
    "nodes": "n[1-2]",
    "start_time": number(1_790_000_000),
    "end_time": number(1_821_536_000),
    "time_limit": number(0, is_set=False, infinite=True),
    "name": "(null)",
    "comment": "a\udcffb",
    "of_a_later_release": {},
}


def answer(*jobs: object, **more: object) -> bytes:
    whole = {"jobs": list(jobs), "errors": [], "warnings": [], **more}
    return json.dumps(whole, ensure_ascii=False).encode("utf-8", "surrogateescape")


def one(**changes: object) -> JobInfo:
    jobs = read_json_jobs(answer({**JOB, **changes}))
    assert isinstance(jobs, tuple), jobs
    return jobs[0]


def test_a_job_with_all_its_fields() -> None:
    assert one() == slurm_job(
        8,
        restart=1,
        user_name="anna",
        nodes=("n1", "n2"),
        start_unix_s=1_790_000_000,
        end_unix_s=UNLIMITED,
        name="(null)",
        comment="a\\xffb",
    )


def test_task_zero_is_a_task_and_a_waiting_group_is_none() -> None:
    assert one(array_job_id=number(2), array_task_id=number(0)).spec == "2_0"
    group = one(array_job_id=number(2), job_state=["PENDING"], nodes="")
    assert (group.array_job_id, group.array_task_id, group.nodes) == (2, None, ())
    assert one(het_job_id=number(7), het_job_offset=number(1)).spec == "7+1"


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("RUNNING", "RUNNING"),
        (["COMPLETED", "COMPLETING"], "COMPLETING"),
        (["RUNNING", "CONFIGURING"], "CONFIGURING"),
        (["RUNNING", "SIGNALING", "COMPLETING"], "COMPLETING"),
        (["RUNNING", "A_LATER_FLAG"], "RUNNING"),
    ],
)
def test_of_a_state_and_its_flags_the_one_that_the_table_shows(state: object, shown: str) -> None:
    assert one(job_state=state).state == shown


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (answer(JOB)[:-9], "cut off or damaged"),
        (answer(JOB)[: len(answer(JOB)) // 2], "cut off or damaged"),
        (b"", "cut off or damaged"),
        (b"[" * 100_000, "cut off or damaged"),
        (b"[]", "no list of jobs"),
        (b"{}", "no list of jobs"),
        (b'{"jobs": {}}', "no list of jobs"),
        (
            answer(errors=[{"description": "Failed while looking for jobs", "error_number": -1}]),
            "Failed while looking",
        ),
        (answer(JOB, errors=["x"]), "errors: 'x'"),
        (answer(JOB, errors="x"), "errors is no list"),
        (answer(warnings=[{"description": "partial"}]), "warnings: partial"),
        (answer(JOB, JOB), "a job comes twice"),
        (answer(JOB, 7), r"jobs\[1\] is no object"),
        (answer({**JOB, "job_id": 0}), "0 is not a job id"),
        (answer({**JOB, "restart_cnt": None}), r"job 8\)\.restart_cnt"),
        (answer({key: JOB[key] for key in JOB if key != "nodes"}), "has no nodes"),
        (answer({**JOB, "nodes": "n[1-"}), "not a list of nodes"),
        (answer({**JOB, "job_state": []}), "not a job state"),
        (answer({**JOB, "job_state": ["running"]}), "not a job state"),
        (answer({**JOB, "name": 7}), "name: 7 is no text"),
    ],
)
def test_an_answer_that_may_lack_a_job_is_unknown(out: bytes, said: str) -> None:
    read = read_json_jobs(out)
    assert isinstance(read, Unavailable), read
    assert re.search(said, read.why), read.why


def test_an_empty_answer_without_a_word_against_it_is_empty_and_a_warning_beside_jobs_is_passed_over() -> (
    None
):
    assert read_json_jobs(answer()) == ()
    assert read_json_jobs(answer(JOB, warnings=[{"description": "deprecated"}])) == (one(),)
