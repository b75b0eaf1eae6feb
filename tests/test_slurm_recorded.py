"""Every reader against what the real programs of three generations of Slurm answered.

The answers lie in tests/data/slurm/<release>/, written by testbed/record_slurm.py; ``jobs.json`` says which job is
which there.
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pytest

from slurm_pfi.slurm.backend import JobInfo, Special, Unavailable
from slurm_pfi.slurm.gres import parse_gres
from slurm_pfi.slurm.jsonjobs import read_json_jobs
from slurm_pfi.slurm.slurmd import printed_files
from slurm_pfi.slurm.squeue import FIELDS, read_jobs, split_rows, squeue_words
from slurm_pfi.slurm.table import read_table
from slurm_pfi.slurm.tag import find_tag
from slurm_pfi.slurm.text import JobRef, expand_nodes, parse_limit_s, read_submission
from slurm_pfi.slurm.tres import count_gpus
from slurm_pfi.slurm.version import Version, read_version
from testbed.record_slurm import END, LONG_COMMENT, ODD_NAME, TAG

DATA: Final = Path(__file__).parent / "data" / "slurm"
RELEASES: Final = ("22.05", "24.11", "26.05")
YEAR_S: Final = 365 * 86_400


@dataclass(frozen=True)
class Recorded:
    """One release's answers."""

    release: str

    @property
    def folder(self) -> Path:
        return DATA / self.release

    @cached_property
    def said(self) -> dict[str, dict[str, Any]]:
        return dict(json.loads((self.folder / "commands.json").read_text()))

    @cached_property
    def ids(self) -> dict[str, int]:
        return dict(json.loads((self.folder / "jobs.json").read_text()))

    def out(self, name: str) -> bytes:
        plain = self.folder / f"{name}.out"
        return (
            plain.read_bytes()
            if plain.exists()
            else gzip.decompress(plain.with_suffix(".out.gz").read_bytes())
        )

    def text(self, name: str) -> str:
        return self.out(name).decode("utf-8", "replace")

    @cached_property
    def jobs(self) -> dict[int, JobInfo]:
        jobs = read_jobs(split_rows(self.out("squeue"), FIELDS, END.encode()))
        assert isinstance(jobs, tuple), jobs
        return {job.job_id: job for job in jobs}

    def job(self, name: str) -> JobInfo:
        return self.jobs[self.ids[name]]

    def json_jobs(self, name: str) -> dict[int, JobInfo]:
        jobs = read_json_jobs(self.out(name))
        assert isinstance(jobs, tuple), jobs
        return {job.job_id: job for job in jobs}


@pytest.fixture(scope="module", params=RELEASES)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return Recorded(request.param)


def test_every_release_is_here_and_small() -> None:
    assert sorted(path.name for path in DATA.iterdir()) == list(RELEASES)
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 300_000


def test_the_release_names_itself(recorded: Recorded) -> None:
    version = read_version(recorded.text("version"))
    assert isinstance(version, Version)
    assert str(version) == recorded.release


def test_what_was_recorded_is_what_we_ask(recorded: Recorded) -> None:
    assert recorded.said["squeue"]["command"] == squeue_words(None, END)


# ------------------------------------------------------------------------------------------------------------ text


@pytest.mark.parametrize(
    ("name", "state", "nodes", "limit_s"),
    [
        ("gpus", "RUNNING", 1, 93_780),
        ("cpu_only", "RUNNING", 1, 1800),
        (
            "uneven",
            "RUNNING",
            2,
            YEAR_S,
        ),  # the backfill scheduler's own, where neither job nor partition has one
        ("long_comment", "RUNNING", 1, Special.UNLIMITED),
        ("suspended", "SUSPENDED", 1, YEAR_S),
        ("requeued", "RUNNING", 1, YEAR_S),
        ("exclusive", "RUNNING", 1, YEAR_S),
        ("held", "PENDING", 0, Special.UNLIMITED),
        ("held_unlimited", "PENDING", 0, Special.UNLIMITED),
        ("completed", "COMPLETED", 1, None),
        ("failed", "FAILED", 1, None),
        ("cancelled", "CANCELLED", 1, None),
    ],
)
def test_each_kind_of_job(
    recorded: Recorded, name: str, state: str, nodes: int, limit_s: int | Special | None
) -> None:
    job = recorded.job(name)
    assert (job.state, len(job.nodes), job.spec) == (state, nodes, str(recorded.ids[name]))
    assert limit_s is None or job.limit_s in (limit_s, Special.UNLIMITED if limit_s == YEAR_S else limit_s)
    assert job.holds_nodes == (state in ("RUNNING", "SUSPENDED"))
    assert job.restart == (name == "requeued")
    assert isinstance(job.start_unix_s, int) == (state != "PENDING")
    assert (job.end_unix_s is Special.NOT_SET) == (state == "PENDING")
    assert (job.user_name, job.partition) == ("nobody", "main")


def test_texts_that_pretend_stay_in_their_fields(recorded: Recorded) -> None:
    job = recorded.job("odd")
    assert job.name == ODD_NAME.replace("\udcff", "\\xff").replace("\udce9", "\\xe9")
    assert job.comment == "AdminComment=x\nJobId=7"
    assert recorded.job("long_comment").comment == LONG_COMMENT
    assert (recorded.job("null_texts").name, recorded.job("null_texts").comment) == ("", "N/A")
    assert recorded.job("gpus").comment == ""


def test_tasks_and_components_are_named_alone(recorded: Recorded) -> None:
    array, het = recorded.ids["array"], recorded.ids["het"]
    tasks = {job.spec: job for job in recorded.jobs.values() if job.array_job_id == array}
    assert set(tasks) == {str(array), f"{array}_0", f"{array}_1"}
    assert (tasks[str(array)].state, tasks[str(array)].array_task_id) == ("PENDING", None)
    assert tasks[f"{array}_0"].limit_s == 7200
    assert {job.spec for job in recorded.jobs.values() if job.het_job_id == het} == {f"{het}+0", f"{het}+1"}
    of_array = read_jobs(split_rows(recorded.out("squeue-array"), FIELDS, END.encode()))
    assert isinstance(of_array, tuple)
    assert {job.job_id: job for job in of_array} == {job.job_id: job for job in tasks.values()}


# ------------------------------------------------------------------------------------------------------------ JSON


def test_json_says_the_same_as_text(recorded: Recorded) -> None:
    shown = recorded.json_jobs("squeue-json")
    text = dict(recorded.jobs)
    unnamed = recorded.ids["null_texts"]
    assert shown[unnamed].name == "(null)"  # a name that the text cannot tell from none
    shown[unnamed] = replace(shown[unnamed], name="")
    if recorded.release == "22.05":  # its JSON has null for a limit that is not set and for none
        for job_id, job in text.items():
            if job.limit_s is Special.UNLIMITED:
                assert shown[job_id].limit_s is Special.NOT_SET
                text[job_id] = replace(job, limit_s=Special.NOT_SET, end_unix_s=shown[job_id].end_unix_s)
    assert shown.keys() == text.keys()
    for job_id, job in text.items():
        differ = {f.name for f in fields(job) if getattr(job, f.name) != getattr(shown[job_id], f.name)}
        assert not differ, (job, shown[job_id])


def test_json_of_one_job(recorded: Recorded) -> None:
    array = recorded.ids["array"]
    ours = {job.job_id for job in recorded.jobs.values() if job.array_job_id == array}
    asked = set(recorded.json_jobs("squeue-one-json"))
    assert asked == (set(recorded.jobs) if recorded.release == "22.05" else ours)  # 22.05 knows no filter


def test_why_scontrols_json_is_not_asked_about_one_job(recorded: Recorded) -> None:
    """It says the same of a job that is gone and of a slurmctld that does not answer."""
    if recorded.release == "22.05":
        assert "scontrol-job-json" not in recorded.said
        return
    assert set(recorded.json_jobs("scontrol-job-json")) == {recorded.ids["gpus"]}
    for name in ("scontrol-unknown-json", "down-scontrol-json"):
        assert (recorded.said[name]["exit"], recorded.said[name]["stderr"]) == (0, "")
        answer = json.loads(recorded.out(name))
        assert (answer["jobs"], answer["errors"], answer["warnings"]) == ([], [], [])


# ---------------------------------------------------------------------------------------------- no answer, gone jobs


def test_without_slurmctld_there_is_an_error_to_read(recorded: Recorded) -> None:
    assert recorded.said["down-squeue"]["exit"] == 1
    assert "Unable to contact slurm controller" in recorded.said["down-squeue"]["stderr"]
    assert recorded.said["down-scontrol"]["exit"] == 1
    json_down = recorded.said["down-squeue-json"]
    if recorded.release == "22.05":
        assert json_down["exit"] == 0
        read = read_json_jobs(recorded.out("down-squeue-json"))
        assert isinstance(read, Unavailable)
        assert "Failed while looking for jobs" in read.why
    else:
        assert json_down["exit"] == 1
        assert isinstance(read_json_jobs(recorded.out("down-squeue-json")), Unavailable)


def test_a_job_that_slurmctld_does_not_know(recorded: Recorded) -> None:
    names = ["squeue-unknown"] + (["squeue-unknown-json"] if recorded.release != "22.05" else [])
    for name in names:
        assert recorded.said[name]["exit"] == 1
        assert "Invalid job id specified" in recorded.said[name]["stderr"]


# ------------------------------------------------------------------------------------------------ GRES, TRES, others


def test_what_nodes_have_and_what_is_in_use(recorded: Recorded) -> None:
    rows = split_rows(recorded.out("sinfo"), ("node", "gres", "used", "state"), END.encode())
    assert [row["node"] for row in rows] == [b"n1", b"n2", b"n3"]
    for row in rows:
        (gres,) = parse_gres(row["gres"].decode())
        (used,) = parse_gres(row["used"].decode(), counted=True)
        assert (gres.name, gres.type, gres.count, gres.indices) == ("gpu", "h200", 8, None)
        assert used.indices is not None
        assert used.count == len(used.indices) <= 8
    assert parse_gres(rows[2]["used"].decode())[0].indices == tuple(range(8))  # the exclusive job's node


def test_gpus_of_a_job_by_node(recorded: Recorded) -> None:
    for name, on in (("gpus", {"n1": 2}), ("uneven", {"n1": 1, "n2": 1})):
        lines = re.findall(
            r"Nodes=(\S+) CPU_IDs=\S+ Mem=\d+ GRES=(\S*)",
            recorded.text(f"scontrol-{'job' if name == 'gpus' else name}"),
        )
        by_node: dict[str, int | None] = {}
        for nodes, gres in lines:
            for node in expand_nodes(nodes):
                (entry,) = parse_gres(gres, counted=True)
                by_node[node] = entry.count
        assert by_node == on


def test_accounting(recorded: Recorded) -> None:
    names = ("id", "job", "state", "alloc", "req", "nodes", "limit", "elapsed", "comment")
    rows = {
        int(row["id"]): {key: cell.decode("utf-8", "replace") for key, cell in row.items()}
        for row in split_rows(recorded.out("sacct"), names, END.encode())
    }
    gpus = {"gpus": 2, "uneven": 2, "exclusive": 8, "het": 1, "suspended": 1, "completed": 1}
    assert {name: count_gpus(rows[recorded.ids[name]]["alloc"]) for name in gpus} == gpus
    assert count_gpus(rows[recorded.ids["cpu_only"]]["alloc"]) is None  # no generic resource in it
    assert parse_limit_s(rows[recorded.ids["gpus"]]["limit"]) == 93_780
    assert parse_limit_s(rows[recorded.ids["long_comment"]]["limit"]) is Special.UNLIMITED
    assert rows[recorded.ids["het"] + 1]["job"] == f"{recorded.ids['het']}+1"


def test_tables_with_a_delimiter_of_their_own(recorded: Recorded) -> None:
    for name, width in (("sacct-steps", 6), ("sacctmgr-qos", 4)):
        table = read_table(recorded.out(name), width)
        assert len(table.rows) >= 2
        assert not table.unreadable
    times = [row[4] for row in read_table(recorded.out("sacct-steps"), 6).rows[1:]]
    assert all(isinstance(parse_limit_s(time), int) for time in times)


def test_the_tag_is_found_in_the_text_of_a_job(recorded: Recorded) -> None:
    blank = "" if recorded.release == "26.05" else " "
    assert f"\n   AdminComment={TAG}{blank}\n" in recorded.text("scontrol-job")
    assert find_tag(TAG) is not None


def test_what_sbatch_said(recorded: Recorded) -> None:
    plain = read_submission(recorded.text("sbatch"))
    assert plain.cluster is None
    assert read_submission(recorded.text("sbatch-parsable")) == JobRef(plain.job_id + 1, None)
    assert read_submission(recorded.text("sbatch-cluster")) == JobRef(plain.job_id + 2, "pfi")


def test_device_files_by_position(recorded: Recorded) -> None:
    printed = recorded.text("slurmd-gres") + recorded.said["slurmd-gres"]["stderr"]
    assert printed_files(printed) == {place: f"/cluster/dev/n1/nvidia{place}" for place in range(8)}


def test_nothing_of_the_machine_is_left(recorded: Recorded) -> None:
    for path in recorded.folder.iterdir():
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert not re.search(rb"/tmp/|/root\b|/work/|/home/", data), path
        years = {int(at) for at in re.findall(rb"\b(1[789]\d{8})\b", data)}
        assert all(1_766_000_000 < at < 1_768_000_000 or at > 1_790_000_000 for at in years), path
