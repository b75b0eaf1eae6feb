"""Which way of reading jobs is gone, what is said where it cannot be, and the process that loads pyslurm.

The pyslurm here is a small package of ours with the one class that is used; the real one meets a real cluster in
tests/cluster/test_backend.py where it is installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import pytest

from slurm_pfi.cli.checks.reading import reading_finding
from slurm_pfi.config import SlurmSection
from slurm_pfi.slurm import pyslurm_process
from slurm_pfi.slurm.backend import JobGone, JobInfo, Special, Unavailable
from slurm_pfi.slurm.choice import SlurmByPyslurm, SlurmJson, SlurmOtherwise, open_backend
from slurm_pfi.slurm.cli import SlurmCommands
from slurm_pfi.slurm.pyslurm_process import PyslurmProcess, Read
from slurm_pfi.slurm.version import UnknownVersion, Version, read_pyslurm_version, read_version

from .slurm_samples import slurm_job

T = TypeVar("T")

# One job as the text of squeue, and one in JSON; the end mark is the layout's.
SQUEUE: Final = """
for word in "$@"; do
  case $word in
    -V) echo "slurm-wlm {release}"; exit 0 ;;
    --json) echo '{{"jobs": [], "errors": [], "warnings": []}}'; exit 0 ;;
  esac
  layout=$word
done
end=${{layout#*:}}; end=${{end%%,*}}
for cell in 5 5 N/A N/A N/A 0 0 root '(null)' main '(null)' RUNNING n1 1796010770 NONE UNLIMITED text '(null)'; do
  printf '%s%s' "$cell" "$end"
done
echo
"""
PYSLURM: Final = """
import os
{before}
__version__ = "{version}"

def record(job_id, **changes):
    return {{
        "job_id": job_id, "array_job_id": None, "array_task_id": None, "het_job_id": None, "het_job_offset": None,
        "restart_cnt": 0, "user_id": 0, "account": None, "partition": "main", "qos": None, "job_state": "RUNNING",
        "nodes": "n[1-2]", "start_time": 1796010770, "end_time": 1827546770, "time_limit": "UNLIMITED",
        "name": "lib", "comment": None, "of_no_use": object(), **changes,
    }}

class {name}:
    def get(self):
        print("noise on standard output")
        {get}

    def find_id(self, job_id):
        {find}
"""


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def scenario() -> T:
        return await work()

    return asyncio.run(scenario())


def commands_of(tmp_path: Path, release: str) -> SlurmSection:
    (tmp_path / "squeue").write_text("#!/bin/sh\n" + SQUEUE.format(release=release))
    (tmp_path / "squeue").chmod(0o755)
    return SlurmSection(conf="/nowhere/slurm.conf", bin_dir=str(tmp_path))


def install_pyslurm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    version: str = "24.11.0",
    before: str = "",
    name: str = "job",
    get: str = "return {5: record(5)}",
    find: str = "return [record(job_id)]",
) -> None:
    folder = tmp_path / "site" / "pyslurm"
    folder.mkdir(parents=True)
    text = PYSLURM.format(version=version, before=before, name=name, get=get, find=find)
    (folder / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


async def names_and_said(backend: SlurmCommands) -> list[str]:
    jobs = await backend.jobs()
    await backend.close()
    assert isinstance(jobs, tuple), jobs
    return [job.name for job in jobs]


# ------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("slurm-wlm 22.05.8\n", Version(22, 5)),
        ("slurm 24.11.5", Version(24, 11)),
        ("slurm 23.02.0-0rc1", Version(23, 2)),
        ("slurm-wlm 26.05.5\nwarning: old plugin", Version(26, 5)),
    ],
)
def test_what_the_commands_say_of_themselves(said: str, version: Version) -> None:
    assert read_version(said) == version


@pytest.mark.parametrize(
    "said", ["", "slurm", "squeue: fatal: no configuration", "slurm 24", "slurm 24.11\nslurm 22.05"]
)
def test_an_unknown_release_is_a_value_of_its_own(said: str) -> None:
    assert isinstance(read_version(said), UnknownVersion)


def test_releases_are_ordered_and_pyslurm_names_one() -> None:
    assert Version(23, 11) < Version(24, 5) < Version(24, 11)
    assert read_pyslurm_version("22.5.3") == Version(22, 5)
    assert str(Version(22, 5)) == "22.05"
    assert isinstance(read_pyslurm_version("unknown"), UnknownVersion)


# ------------------------------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize("word", ["auto", "cli"])
def test_the_commands_text_is_the_default(word: str, tmp_path: Path) -> None:
    section = SlurmSection(bin_dir=str(tmp_path), backend=word)  # type: ignore[arg-type]
    assert type(open_backend(section, timeout_s=1, say=pytest.fail)) is SlurmCommands
    assert SlurmSection().backend == "auto"


def test_json_is_read_where_it_tells_all(tmp_path: Path) -> None:
    backend = SlurmJson(commands_of(tmp_path, "24.11.5"), timeout_s=10, say=pytest.fail)
    assert run(lambda: names_and_said(backend)) == []  # what the JSON says, not the text


@pytest.mark.parametrize(("release", "why"), [("22.05.8", "JSON of Slurm 22.05"), ("x", "is not known")])
def test_where_json_does_not_the_text_is_read_and_the_reason_said_once(
    release: str, why: str, tmp_path: Path
) -> None:
    said: list[str] = []
    section = commands_of(tmp_path, release)
    backend = open_backend(
        SlurmSection(conf=section.conf, bin_dir=section.bin_dir, backend="json"),
        timeout_s=10,
        say=said.append,
    )

    async def twice() -> list[str]:
        return await names_and_said(backend) + await names_and_said(backend)

    assert run(twice) == ["text", "text"]
    assert len(said) == 1
    assert why in said[0]


@pytest.mark.skipif(importlib.util.find_spec("pyslurm") is not None, reason="pyslurm is installed")
def test_without_pyslurm_the_text_is_read_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    backend = SlurmByPyslurm(commands_of(tmp_path, "24.11.5"), timeout_s=30, say=said.append)
    assert run(lambda: names_and_said(backend)) == ["text"]
    assert len(said) == 1
    assert "pyslurm cannot be imported: ModuleNotFoundError" in said[0]


@pytest.mark.parametrize(
    ("version", "before", "name", "release", "why"),
    [
        ("24.11.0", "", "job", "24.05.1", "built for Slurm 24.11: Slurm 24.05 is installed"),
        ("24.11.0", "", "job", "x", "built for Slurm 24.11: 'slurm-wlm x' names no release"),
        ("25.11.2", "", "Job", "25.11.1", "pyslurm 25.11.2 has no class job"),
        ("dev", "", "job", "24.11.5", "'dev' is no version of pyslurm"),
        (
            "24.11.0",
            "raise OSError('libslurm.so.42: no such file')",
            "job",
            "24.11.5",
            "OSError: libslurm.so.42",
        ),
        (
            "24.11.0",
            "os._exit(1)",
            "job",
            "24.11.5",
            "pyslurm's process ended",
        ),  # libslurm does so without slurm.conf
    ],
)
def test_a_pyslurm_that_does_not_fit_is_not_used(
    version: str,
    before: str,
    name: str,
    release: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_pyslurm(tmp_path, monkeypatch, version=version, before=before, name=name)
    said: list[str] = []
    backend = SlurmByPyslurm(commands_of(tmp_path, release), timeout_s=30, say=said.append)
    assert run(lambda: names_and_said(backend)) == ["text"]
    assert len(said) == 1
    assert why in said[0]


def test_a_pyslurm_that_fits_is_read_and_bytes_that_it_loses_are_asked_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = 'return {4: record(4), 5: record(5, comment="a\\N{REPLACEMENT CHARACTER}b")}'
    install_pyslurm(tmp_path, monkeypatch, get=get)
    backend = SlurmByPyslurm(commands_of(tmp_path, "24.11.5"), timeout_s=30, say=pytest.fail)
    assert run(lambda: names_and_said(backend)) == ["lib", "text"]


def test_one_job_is_asked_of_the_commands_where_that_pyslurm_takes_no_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pyslurm(tmp_path, monkeypatch, find="raise TypeError('an integer is required')")
    backend = SlurmByPyslurm(commands_of(tmp_path, "24.11.5"), timeout_s=30, say=pytest.fail)

    async def scenario() -> tuple[object, list[str]]:
        return await backend.job(5), await names_and_said(backend)

    job, names = run(scenario)
    assert isinstance(job, JobInfo), job
    assert (job.name, names) == ("text", ["lib"])


def test_many_lossy_jobs_are_asked_for_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get = 'return {n: record(n, name="\\N{REPLACEMENT CHARACTER}") for n in range(1, 50)}'
    install_pyslurm(tmp_path, monkeypatch, get=get)
    backend = SlurmByPyslurm(commands_of(tmp_path, "24.11.5"), timeout_s=30, say=pytest.fail)
    assert run(lambda: names_and_said(backend)) == ["text"]


@pytest.mark.parametrize(
    ("release", "outcome", "found"),
    [
        ("24.11.5", "ok", "jobs are read by json"),
        ("22.05.8", "warn", "json is not used, squeue's text is: the JSON of"),
    ],
)
def test_doctor_says_whether_the_named_way_can_be_gone(
    release: str, outcome: str, found: str, tmp_path: Path
) -> None:
    section = commands_of(tmp_path, release)
    finding = reading_finding(SlurmSection(conf=section.conf, bin_dir=section.bin_dir, backend="json"))
    assert finding.outcome == outcome
    assert found in finding.found


def test_another_way_shall_say_what_it_does() -> None:
    backend = SlurmOtherwise(SlurmSection(), timeout_s=1, say=pytest.fail)
    with pytest.raises(NotImplementedError):
        run(backend.jobs)


# ----------------------------------------------------------------------------------------------------- the process


async def asked(*job_ids: int | None, timeout_s: float = 30) -> list[Read | JobGone | Unavailable | None]:
    process = PyslurmProcess("/nowhere/slurm.conf", timeout_s=timeout_s)
    try:
        return [await process.read(job_id) for job_id in job_ids]
    finally:
        await process.close()


def test_a_process_that_cannot_be_started_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert run(lambda: asked(None)) == [
        Unavailable("pyslurm's process cannot be started: No such file or directory")
    ]


def test_a_job_with_all_its_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = """return [record(job_id, array_job_id=9, array_task_id=0),
            record(10, het_job_id=10, het_job_offset=0, time_limit="Partition_Limit", start_time=0, end_time=0),
            record(11, time_limit=30, job_state="COMPLETED", user_id=4123456789)]"""
    install_pyslurm(tmp_path, monkeypatch, find=find)
    (read,) = run(lambda: asked(9))
    assert isinstance(read, Read), read
    task, component, plain = read.jobs
    assert task == slurm_job(
        9,
        array_job_id=9,
        array_task_id=0,
        user_id=0,
        user_name="root",
        nodes=("n1", "n2"),
        start_unix_s=1796010770,
        end_unix_s=Special.UNLIMITED,
        name="lib",
    )
    assert (component.spec, component.limit_s, component.start_unix_s) == (
        "10+0",
        Special.NOT_SET,
        Special.NOT_SET,
    )
    assert (plain.limit_s, plain.end_unix_s, plain.user_name) == (1800, 1827546770, "4123456789")


@pytest.mark.parametrize(
    ("find", "kind", "why"),
    [
        ("raise ValueError('Invalid job id specified', 2017)", JobGone, "job 5: Invalid job id specified"),
        ("raise ValueError('Unable to contact slurm controller', 1)", Unavailable, "Unable to contact"),
        ("raise RuntimeError('odd')", Unavailable, "RuntimeError: odd"),
        ("return [{'job_id': 5}]", Unavailable, "pyslurm"),
        ("return [record(0)]", Unavailable, "0 is not a job id"),
        ("return [record(5, job_state='R x')]", Unavailable, "not a job state"),
        ("return [record(5, time_limit='soon')]", Unavailable, "not a time limit"),
        ("return [record(5, nodes='n[1-')]", Unavailable, "not a list of nodes"),
        ("return [record(5, restart_cnt='0')]", Unavailable, "restart_cnt"),
    ],
)
def test_what_cannot_be_read_is_unknown_and_a_gone_job_is_gone(
    find: str, kind: type[object], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pyslurm(tmp_path, monkeypatch, find=find)
    (answer,) = run(lambda: asked(5))
    assert type(answer) is kind, answer
    assert isinstance(answer, (JobGone, Unavailable))
    assert why in answer.why


def test_an_id_that_slurm_does_not_know_in_a_full_read_is_no_gone_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pyslurm(tmp_path, monkeypatch, get="raise ValueError('Invalid job id specified', 2017)")
    (answer,) = run(lambda: asked(None))
    assert isinstance(answer, Unavailable)


def test_a_process_that_dies_or_hangs_is_ended_and_the_next_question_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    find = f"""open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
        import time
        if job_id == 6: os._exit(9)
        if job_id == 7: time.sleep(60)
        return [record(job_id)]"""
    install_pyslurm(tmp_path, monkeypatch, find=find)
    answers = run(lambda: asked(5, 6, 5, 7, 5, timeout_s=10))
    kinds = [type(answer) for answer in answers]
    assert kinds == [Read, Unavailable, Read, Unavailable, Read], answers
    assert isinstance(answers[3], Unavailable)
    assert "no answer within 10 s" in answers[3].why
    seen = pids.read_text().split()
    assert len(set(seen)) == 3
    for pid in set(seen):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_after_so_many_reads_a_fresh_process_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyslurm_process, "READS_PER_PROCESS", 2)
    install_pyslurm(tmp_path, monkeypatch, find="return [record(job_id, name=str(os.getpid()))]")
    reads = run(lambda: asked(1, 2, 3, 4, 5))
    pids = [read.jobs[0].name for read in reads if isinstance(read, Read)]
    assert len(pids) == 5
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


def test_a_caller_that_is_cancelled_leaves_no_half_answer_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    find = f"""if job_id == 7:
            open({str(began)!r}, "w").close()
            import time; time.sleep(60)
        return [record(job_id)]"""
    install_pyslurm(tmp_path, monkeypatch, find=find)

    async def scenario() -> Read | JobGone | Unavailable | None:
        process = PyslurmProcess("/nowhere/slurm.conf", timeout_s=30)
        asking = asyncio.create_task(process.read(7))
        while not began.exists():
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking])
        try:
            return await process.read(8)
        finally:
            await process.close()

    answer = run(scenario)
    assert isinstance(answer, Read)
    assert [job.job_id for job in answer.jobs] == [8]
