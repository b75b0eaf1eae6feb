"""What squeue and sacct print for an ordinary user, read strictly: each run by itself, each field where it belongs."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_pfi.slurm.backend import JobGone, Special, Unavailable
from slurm_pfi.slurm.sacct import ended_in_accounting, job_in_accounting, read_accounting
from slurm_pfi.slurm.squeue import new_end
from slurm_pfi.slurm.tagged import JobName, TaggedRun, UserCommands, job_in_queue, queue

END: Final = "<0123456789abcdef>"
FIELDS: Final = (
    *("JobID", "JobIDRaw", "Cluster", "User", "Account", "Partition", "JobName", "State", "Submit", "Start"),
    *("End", "NodeList", "AllocTRES", "AdminComment"),
)
ROW: Final = {
    "JobID": "12",
    "JobIDRaw": "12",
    "Cluster": "c",
    "User": "anna",
    "Account": "phys",
    "Partition": "main",
    "JobName": "train",
    "State": "COMPLETED",
    "Submit": "1796063873",
    "Start": "1796063880",
    "End": "1796063990",
    "NodeList": "n[1-2]",
    "AllocTRES": "billing=1,cpu=1,gres/gpu=4,node=2",
    "AdminComment": "",
}


def printed(*rows: dict[str, Any], end: str = END) -> bytes:
    """As sacct prints it: ``end`` after every field, a newline after every run."""
    cells = ["".join(f"{row[field]}{end}" for field in row) for row in rows]
    return "".join(f"{line}\n" for line in cells).encode("utf-8", "surrogateescape")


def read(*rows: dict[str, Any]) -> tuple[TaggedRun, ...] | Unavailable:
    fields = (*FIELDS, "Restarts") if rows and "Restarts" in rows[0] else FIELDS
    return read_accounting(printed(*rows), fields, END)


def one(**changes: Any) -> TaggedRun:
    found = read({**ROW, **changes})
    assert isinstance(found, tuple), found
    (run,) = found
    return run


def test_a_run_as_sacct_has_it() -> None:
    run = one(State="CANCELLED by 65534")
    assert (run.spec, run.job_id, run.parent, run.restart) == ("12", 12, None, None)
    assert (run.state, run.has_ended, run.nodes, run.gpus) == ("CANCELLED", True, ("n1", "n2"), 4)
    assert (run.start_unix_s, run.end_unix_s) == (1796063880, 1796063990)
    task = one(JobID="77_3", JobIDRaw="80")
    assert (task.spec, task.job_id, task.parent) == ("77_3", 80, 77)
    part = one(JobID="55+1", JobIDRaw="56", End="Unknown", State="RUNNING")
    assert (part.spec, part.parent, part.end_unix_s, part.has_ended) == ("55+1", 55, Special.NOT_SET, False)


def test_what_slurm_does_not_tell_is_unknown_and_what_never_started_is_no_run() -> None:
    assert one(AllocTRES="").gpus is None
    assert one(AllocTRES="billing=1,cpu=1,node=1").gpus is None, "a site that does not track gres/gpu"
    for changes in (
        {"JobID": "2_[1-3%1]", "Start": "Unknown", "State": "PENDING"},
        {"Start": "Unknown", "State": "CANCELLED"},
        {
            "Start": "1796063877",
            "State": "PENDING",
            "End": "Unknown",
        },  # 22.05 tells of a het job so for a moment
    ):
        assert read({**ROW, **changes}) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"JobID": "12.batch"},
        {"JobID": ""},
        {"JobIDRaw": "0"},
        {"State": ""},
        {"State": "Running"},
        {"Start": "2026-11-30T12:00:00"},
        {"NodeList": "n[1"},
        {"AllocTRES": "gres/gpu=x"},
        {"Restarts": "-1"},
    ],
)
def test_a_row_that_is_not_understood_makes_the_answer_unknown(changes: dict[str, Any]) -> None:
    found = read({**ROW, **changes}, {**ROW, **({"Restarts": "0"} if "Restarts" in changes else {})})
    assert isinstance(found, Unavailable)
    assert "sacct's line on job" in found.why


@given(st.binary(max_size=300))
@example(b"")
@example(b"\xff\n")
def test_damaged_output_is_never_a_guess(noise: bytes) -> None:
    whole = printed(ROW)
    for out in (noise, whole + noise, whole[: len(noise)]):
        found = read_accounting(out, FIELDS, END)
        assert isinstance(found, Unavailable) or out.strip(b"\n") in (b"", whole.strip(b"\n"))


HOSTILE = st.text(st.characters(codec="utf-8") | st.sampled_from("|\n<>\0 =;,"), max_size=80)


@given(name=HOSTILE, account=HOSTILE, note=st.binary(max_size=80))
def test_no_text_of_a_user_moves_a_field(name: str, account: str, note: bytes) -> None:
    comment = note.decode("utf-8", "surrogateescape")
    run = one(JobName=name, Account=account, AdminComment=comment)
    assert (run.job_id, run.user, run.state, run.gpus) == (12, "anna", "COMPLETED", 4)
    assert run.admin_comment == comment
    assert run.name == ("" if name in ("(null)", "N/A") else name)


def test_the_word_between_fields_is_new_each_time() -> None:
    assert len({new_end() for _ in range(50)}) == 50


# ------------------------------------------------------------------------------------------- commands that answer


def commands(tmp_path: Path, **scripts: str) -> UserCommands:
    """Commands of these sh lines; ``$end`` is the word between fields."""
    find = "for w; do case $w in --delimiter=*) end=${w#--delimiter=};; *:\\<*) end=${w##*:};; esac; done\n"
    for name, script in scripts.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{find}{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return UserCommands(bin_dir=str(tmp_path), timeout_s=10)


def says(*rows: dict[str, Any]) -> str:
    """sh lines that print these runs."""
    text = printed(*rows, end="%s").decode()
    count = text.count("%s")
    return f"printf '{text}' {' '.join(['$end'] * count)}".replace("\n", "\\n")


RUN0 = {**ROW, "State": "REQUEUED", "Start": "1796063880", "End": "1796063900"}
RUN1 = {**ROW, "State": "NODE_FAIL", "Submit": "1796063900", "Start": "1796063910", "End": "1796063930"}
RUN2 = {**ROW, "State": "COMPLETED", "Submit": "1796063930", "Start": "1796063940", "End": "1796063950"}
OLD_RELEASE = (
    'case "$*" in *Restarts*) echo \'sacct: error: Invalid field requested: "Restarts"\' >&2; exit 1;; esac\n'
)


def test_runs_are_kept_apart_and_counted_where_slurm_does_not_count_them(tmp_path: Path) -> None:
    slurm = commands(tmp_path, sacct=OLD_RELEASE + says(RUN2, RUN0, RUN1))
    found = job_in_accounting(slurm, JobName(12))
    assert isinstance(found, tuple)
    assert [(run.restart, run.state) for run in found] == [
        (0, "REQUEUED"),
        (1, "NODE_FAIL"),
        (2, "COMPLETED"),
    ]
    within = ended_in_accounting(slurm, 60, user=None)
    assert isinstance(within, tuple)
    assert {run.restart for run in within} == {None}, "earlier runs may lie before that time"


def test_newer_releases_say_which_restart_it_was(tmp_path: Path) -> None:
    rows = [{**row, "Restarts": str(count)} for row, count in ((RUN1, 4), (RUN2, 5))]
    found = job_in_accounting(commands(tmp_path, sacct=says(*rows)), JobName(12))
    assert isinstance(found, tuple)
    assert [run.restart for run in found] == [4, 5]


def test_an_id_that_was_used_again_means_the_last_job(tmp_path: Path) -> None:
    for older in ({**RUN0, "State": "COMPLETED"}, {**RUN0, "User": "bob"}):
        found = job_in_accounting(commands(tmp_path, sacct=OLD_RELEASE + says(older, RUN2)), JobName(12))
        assert isinstance(found, tuple)
        assert [(run.restart, run.state) for run in found] == [(0, "COMPLETED")]


def test_parts_of_a_job_whose_id_was_used_again_are_not_meant(tmp_path: Path) -> None:
    component = {**ROW, "JobID": "12+1", "JobIDRaw": "13", "Submit": "1796060000", "State": "COMPLETED"}
    found = job_in_accounting(commands(tmp_path, sacct=OLD_RELEASE + says(component, RUN2)), JobName(12))
    assert isinstance(found, tuple)
    assert [(run.spec, run.state) for run in found] == [("12", "COMPLETED")]
    later = {**component, "Submit": "1796069999"}
    found = job_in_accounting(commands(tmp_path, sacct=OLD_RELEASE + says(RUN2, later)), JobName(12))
    assert isinstance(found, tuple)
    assert [run.spec for run in found] == ["12+1"]


def test_a_part_is_meant_by_its_name_and_by_that_of_the_whole(tmp_path: Path) -> None:
    tasks = [{**ROW, "JobID": f"77_{n}", "JobIDRaw": str(78 + n)} for n in range(2)]
    slurm = commands(tmp_path, sacct=OLD_RELEASE + says(*tasks))

    def specs(name: JobName) -> list[str]:
        found = job_in_accounting(slurm, name)
        return [run.spec for run in found] if isinstance(found, tuple) else []

    assert specs(JobName(77, task=1)) == ["77_1"]
    assert specs(JobName(77)) == ["77_0", "77_1"]
    assert specs(JobName(79)) == ["77_1"]
    assert isinstance(job_in_accounting(slurm, JobName(5)), JobGone)


QUEUED: Final = {
    **dict.fromkeys(("JobID", "ArrayJobID"), "12"),
    **dict.fromkeys(("ArrayTaskID", "HetJobID", "HetJobOffset"), "N/A"),
    **{"RestartCnt": "0", "Cluster": "c", "UserName": "anna", "Account": "phys", "Partition": "main"},
    **{"Name": "train", "State": "RUNNING", "SubmitTime": "1796063873", "StartTime": "1796063880"},
    **{
        "EndTime": "1796063990",
        "NodeList": "n1",
        "tres-alloc": "cpu=1,gres/gpu=4",
        "admin_comment": "(null)",
    },
}


@pytest.mark.parametrize(
    ("changes", "gpus", "ended"),
    [
        ({}, 4, False),
        ({"tres-alloc": ""}, None, False),
        ({"tres-alloc": "N/A"}, None, False),
        ({"NodeList": "(null)", "State": "RESV_DEL_HOLD"}, None, False),
        ({"NodeList": "", "State": "EXPEDITING"}, None, False),
        ({"State": "TIMEOUT"}, 4, True),
    ],
)
def test_what_squeue_does_not_tell_is_unknown(
    tmp_path: Path, changes: dict[str, str], gpus: int | None, ended: bool
) -> None:
    found = queue(commands(tmp_path, squeue=says({**QUEUED, **changes})), mine=True)
    assert isinstance(found, tuple), found
    assert [(run.gpus, run.has_ended, run.admin_comment) for run in found] == [(gpus, ended, "")]


def test_failures_are_typed_and_say_what_happened(tmp_path: Path) -> None:
    off = commands(tmp_path, sacct="echo Slurm accounting storage is disabled >&2; exit 1")
    assert isinstance(job_in_accounting(off, JobName(1)), JobGone)
    down = commands(tmp_path, sacct="echo sacct: error: slurmdbd down >&2; exit 1")
    assert job_in_accounting(down, JobName(1)) == Unavailable("sacct exited 1: sacct: error: slurmdbd down")
    quiet = commands(tmp_path, sacct="echo sacct: error: half an answer >&2")
    assert isinstance(ended_in_accounting(quiet, 60, user="7"), Unavailable)
    none = UserCommands(bin_dir=str(tmp_path / "nowhere"))
    missing = queue(none, mine=True)
    assert isinstance(missing, Unavailable)
    assert "squeue cannot be run here: No such file or directory" in missing.why
    hangs = UserCommands(bin_dir=str(tmp_path), timeout_s=0.2)
    commands(tmp_path, squeue="exec sleep 20")
    assert queue(hangs, mine=True) == Unavailable("squeue gave no answer within 0.2 s")
    gone = commands(tmp_path, squeue="echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    assert isinstance(job_in_queue(gone, JobName(1)), JobGone)


def test_nothing_of_the_user_s_settings_changes_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SACCT_FORMAT", "SLURM_CLUSTERS", "SQUEUE_FORMAT", "SLURM_TIME_FORMAT", "LC_TIME"):
        monkeypatch.setenv(name, "odd")
    monkeypatch.setenv("SLURM_CONF", "/of/the/user")
    seen = tmp_path / "env"
    commands(tmp_path, squeue=f'env >"{seen}"')
    UserCommands(bin_dir=str(tmp_path), conf="/of/the/site").run("squeue")
    env = dict(line.split("=", 1) for line in seen.read_text().splitlines())
    assert env["SLURM_CONF"] == "/of/the/user"
    assert env["SLURM_TIME_FORMAT"] == "%s"
    assert not {"SACCT_FORMAT", "SLURM_CLUSTERS", "SQUEUE_FORMAT", "LC_TIME"} & set(env)
    assert os.environ["SACCT_FORMAT"] == "odd"
