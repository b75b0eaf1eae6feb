"""Reading squeue's answers, and what happens when there is none."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from slurm_pfi.config import SlurmSection
from slurm_pfi.slurm.backend import AdminComment, JobGone, JobInfo, Special, Unavailable, Updated
from slurm_pfi.slurm.cli import SlurmCommands
from slurm_pfi.slurm.damage import SlurmTextError
from slurm_pfi.slurm.squeue import FIELDS, read_jobs, split_rows

from .slurm_samples import slurm_job

END = b"<e>"
ROW = {
    "JobID": b"8",
    "ArrayJobID": b"8",
    "ArrayTaskID": b"N/A",
    "HetJobID": b"N/A",
    "HetJobOffset": b"N/A",
    "RestartCnt": b"1",
    "UserID": b"1000",
    "UserName": b"anna",
    "Account": b"(null)",
    "Partition": b"main",
    "QOS": b"(null)",
    "State": b"RUNNING",
    "NodeList": b"n[1-2]",
    "StartTime": b"1796010770",
    "EndTime": b"NONE",
    "TimeLimit": b"UNLIMITED",
    "Name": b"train",
    "Comment": b"(null)",
}


def one_job(**changes: bytes) -> JobInfo:
    jobs = read_jobs([ROW | changes])
    assert isinstance(jobs, tuple)
    return jobs[0]


def as_output(*rows: dict[str, bytes]) -> bytes:
    return b"".join(b"".join(cell + END for cell in row.values()) + b"\n" for row in rows)


def test_a_job_with_all_its_fields() -> None:
    assert one_job() == slurm_job(
        8,
        restart=1,
        user_name="anna",
        nodes=("n1", "n2"),
        start_unix_s=1796010770,
        end_unix_s=Special.UNLIMITED,
        name="train",
    )


def test_name_and_comment_are_whatever_the_user_wrote() -> None:
    job = one_job(Name=b"N/A", Comment=b" pfi:10%\n|9|<x>\xff\xc3\xa9 ")
    assert (job.name, job.comment) == ("", " pfi:10%\n|9|<x>\\xffé ")
    job.comment.encode()  # fit for every file and message
    assert one_job(Name=b"a\nb\xff").name == "a\nb\\xff"


def test_array_task_zero_is_a_task_and_a_waiting_group_is_none() -> None:
    task = one_job(ArrayJobID=b"2", ArrayTaskID=b"0")
    assert (task.array_job_id, task.array_task_id, task.spec) == (2, 0, "2_0")
    group = one_job(ArrayJobID=b"2", ArrayTaskID=b"5-9%1", State=b"PENDING", NodeList=b"")
    assert (group.array_job_id, group.array_task_id, group.nodes) == (2, None, ())
    assert not group.holds_nodes


def test_a_component_of_a_heterogeneous_job_is_named_alone() -> None:
    assert one_job(JobID=b"10", HetJobID=b"10", HetJobOffset=b"0").spec == "10+0"
    assert one_job(JobID=b"11", HetJobID=b"10", HetJobOffset=b"1").spec == "10+1"
    assert one_job().spec == "8"


@pytest.mark.parametrize(
    ("state", "holds"),
    [
        (b"RUNNING", True),
        (b"COMPLETING", True),
        (b"SUSPENDED", True),
        (b"PENDING", False),
        (b"COMPLETED", False),
    ],
)
def test_which_states_hold_nodes(state: bytes, holds: bool) -> None:
    assert one_job(State=state).holds_nodes == holds


def test_no_text_of_a_user_poses_as_a_field_or_a_job() -> None:
    spoof = b"acc|\n9|9|x\n" + as_output(ROW | {"JobID": b"9"}).replace(END, b"<f>") + b"\xff\n"
    rows = split_rows(as_output(ROW | {"Account": spoof}, ROW | {"JobID": b"10"}), FIELDS, END)
    jobs = read_jobs(rows)
    assert isinstance(jobs, tuple)
    assert [job.job_id for job in jobs] == [8, 10]
    assert jobs[0].account.startswith("acc|\n")
    assert jobs[0].partition == "main"


@pytest.mark.parametrize(
    "out",
    [
        as_output(ROW)[:-20],
        as_output(ROW) + b"slurm says\n",
        b"JOBID PARTITION\n",
        as_output(ROW).replace(END, b"", 1),
    ],
)
def test_output_that_is_cut_or_foreign_is_an_error(out: bytes) -> None:
    with pytest.raises(SlurmTextError):
        split_rows(out, FIELDS, END)


@pytest.mark.parametrize(
    "changes",
    [
        {"JobID": b"0"},
        {"RestartCnt": b"N/A"},
        {"State": b"R x"},
        {"NodeList": b"n[1-"},
        {"StartTime": b"yesterday"},
        {"UserID": b"\xff"},
    ],
)
def test_a_line_that_is_not_understood_makes_the_answer_unknown(changes: dict[str, bytes]) -> None:
    answer = read_jobs([ROW, ROW | changes])
    assert isinstance(answer, Unavailable)
    assert "not understood" in answer.why


# --------------------------------------------------------------- commands that fail: small real programs, no mocks

# The last argument is the layout, the end mark in it is not known before.
END_OF_LAYOUT = 'for layout in "$@"; do :; done\nend=${layout#*:}; end=${end%%,*}\n'


def commands(tmp_path: Path, script: str, *, timeout_s: float = 10.0) -> SlurmCommands:
    for name in ("squeue", "scontrol"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return SlurmCommands(SlurmSection(conf="/nowhere/slurm.conf", bin_dir=str(tmp_path)), timeout_s=timeout_s)


def test_no_answer_is_never_an_empty_one(tmp_path: Path) -> None:
    down = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit %d"

    async def scenario() -> None:
        for code in (1, 0):
            slurm = commands(tmp_path, down % code)
            for answer in (await slurm.jobs(), await slurm.job(5), await slurm.admin_comment(5)):
                assert isinstance(answer, Unavailable)
                assert "Unable to contact" in answer.why
        refused = await commands(tmp_path, down % 1).set_admin_comment("5", "x")
        assert isinstance(refused, Unavailable)

    asyncio.run(scenario())


def test_an_empty_answer_without_complaint_is_empty_but_never_a_gone_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        slurm = commands(tmp_path, "exit 0")
        assert await slurm.jobs() == ()
        assert isinstance(await slurm.job(5), Unavailable)
        assert isinstance(await slurm.admin_comment(5), Unavailable)
        assert await slurm.set_admin_comment("5", "x") == Updated()

    asyncio.run(scenario())


def test_slurm_says_that_a_job_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        slurm = commands(tmp_path, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
        assert isinstance(await slurm.job(5), JobGone)
        assert isinstance(await slurm.admin_comment(5), JobGone)
        assert isinstance(await slurm.jobs(), Unavailable)
        slurm = commands(tmp_path, "echo 'Job has already finished for job 5' >&2; exit 1")
        assert isinstance(await slurm.set_admin_comment("5", "x"), JobGone)

    asyncio.run(scenario())


def test_a_command_that_hangs_is_ended_in_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        pid_file = tmp_path / "pid"
        slurm = commands(tmp_path, f"echo $$ > {pid_file}; exec sleep 60", timeout_s=0.5)
        answer = await slurm.jobs()
        assert isinstance(answer, Unavailable)
        assert "no answer within" in answer.why
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)

    asyncio.run(scenario())


def test_missing_commands_are_named(tmp_path: Path) -> None:
    slurm = SlurmCommands(SlurmSection(bin_dir=str(tmp_path / "absent")), timeout_s=1)
    answer = asyncio.run(slurm.jobs())
    assert isinstance(answer, Unavailable)
    assert "slurm.bin_dir" in answer.why


def test_the_callers_environment_does_not_change_what_commands_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SLURM_CONF", "/other/slurm.conf")
    slurm = commands(tmp_path, f"env > {tmp_path}/seen; exit 0")
    asyncio.run(slurm.jobs())
    seen = (tmp_path / "seen").read_text().splitlines()
    assert "SLURM_CONF=/nowhere/slurm.conf" in seen
    assert "LC_ALL=C" in seen
    assert not [line for line in seen if line.startswith("SQUEUE_")]


def test_a_comment_is_handed_over_byte_for_byte_and_through_no_shell(tmp_path: Path) -> None:
    async def scenario() -> None:
        slurm = commands(tmp_path, f'printf %s "$3" > {tmp_path}/seen')
        text = "$(touch x) `y` \"q\" 'q' \n é 🙂 \udce9"
        assert await slurm.set_admin_comment("2_1", text) == Updated()
        assert (tmp_path / "seen").read_bytes() == b"admincomment=" + text.encode("utf-8", "surrogateescape")
        assert isinstance(await slurm.set_admin_comment("2_1", "a\0b"), Unavailable)

    asyncio.run(scenario())


def test_the_comment_of_the_very_job_is_read(tmp_path: Path) -> None:
    # -j 2 answers with every task of array 2.
    script = END_OF_LAYOUT + 'printf "7${end}0${end}one${end}\\n2${end}3${end} t\\377wo\\nlines ${end}\\n"'
    answer = asyncio.run(commands(tmp_path, script).admin_comment(2))
    assert answer == AdminComment(" t\udcffwo\nlines ", restart=3)


def test_a_comment_that_was_never_set_is_empty(tmp_path: Path) -> None:
    script = END_OF_LAYOUT + 'printf "2${end}0${end}(null)${end}\\n"'
    assert asyncio.run(commands(tmp_path, script).admin_comment(2)) == AdminComment("", restart=0)


def test_a_restart_count_that_is_none_makes_the_comment_unknown(tmp_path: Path) -> None:
    script = END_OF_LAYOUT + 'printf "2${end}N/A${end}text${end}\\n"'
    assert isinstance(asyncio.run(commands(tmp_path, script).admin_comment(2)), Unavailable)


@pytest.mark.parametrize(
    ("shown", "same"),
    [("two  words  ", True), ("two  words ", True), ("two words  ", False), ("two  words", False)],
)
def test_a_comment_is_confirmed_by_what_scontrol_shows(tmp_path: Path, shown: str, same: bool) -> None:
    script = f'printf "JobId=2\\n   Comment=AdminComment=x \\n   AdminComment={shown}\\n   StdErr=/x\\n"'
    assert asyncio.run(commands(tmp_path, script).confirms_comment("2", "two  words ")) is same
