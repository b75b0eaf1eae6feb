"""``job``, ``jobs``, ``status`` and ``top`` against a controller that answers over its real socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_pfi.bus.asking import ask
from slurm_pfi.cli.root import main
from slurm_pfi.controller import state as cs
from slurm_pfi.controller.answers.jobs import job_view
from slurm_pfi.controller.shell import CONTROL_SOCKET, Controller
from slurm_pfi.model import Run
from slurm_pfi.store.rows import EndedRun, EventRow

from .site_answers import answering, with_record
from .test_controller_core import NOW_S, S, Site, gpu, msgspec_job

MINE, OTHER, TASK, TASK2, PART = Run("c", 1), Run("c", 2), Run("c", 78), Run("c", 79), Run("c", 81)


def made_site() -> Site:
    """Five runs of one GPU: a requeued one of this user, one of somebody else's, two tasks, one component."""
    site = Site(nodes=1, gpus=5)
    again = replace_restart(MINE, 1)
    runs = (again, OTHER, TASK, TASK2, PART)
    report = site.report("n1", *(gpu(f"G{run}", run, draw_mw=600_000) for run in runs))
    owners = tuple(
        msgspec.structs.replace(one, uid=os.getuid() if one.run == again else 4242) for one in report.runs
    )
    site.tell(cs.ReportCame(report=msgspec.structs.replace(report, runs=owners)))
    for run in runs:
        job = msgspec_job(run, ("n1",))
        job = replace(
            job, user_id=os.getuid() if run == again else 4242, user_name="anna" if run == again else "bob"
        )
        if run in (TASK, TASK2):
            job = replace(job, array_job_id=77, array_task_id=run.job_id - 75)
        if run == PART:
            job = replace(job, het_job_id=80, het_offset=1)
        site.tell(cs.JobRead(run=run, job=job))
    site.limit(2500, ends_in_s=500)
    site.cycle()
    site.state = with_record(site.state, again)
    return site


def replace_restart(run: Run, restart: int) -> Run:
    return Run(run.cluster, run.job_id, restart)


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    site = made_site()
    # What the core believes of its clock is made up; the answers are given by the real one.
    monkeypatch.setattr(time, "monotonic_ns", lambda: site.now_ns)
    monkeypatch.setenv("SLURM_PFI_CONF", str(tmp_path / "site.toml"))
    monkeypatch.setenv("COLUMNS", "80")
    with answering(tmp_path, site.config, site.state) as one:
        yield one


@pytest.fixture
def ended(controller: Controller) -> float:
    """The first run of job 1, and an old job of bob's, are over. Returns when."""
    now_s = time.time()
    view = controller.state.runs[replace_restart(MINE, 1)]
    first = msgspec.structs.replace(view, run=MINE)
    value = job_view(first, controller.state, controller.config, controller.core.science, 1000 * S, NOW_S)
    controller.history.add(
        [
            EndedRun(
                run="c:1.0", job_id=1, spec="1", uid=os.getuid(), ended_unix_s=now_s - 7200, value=value
            ),
            EndedRun(
                run="c:5.0",
                job_id=5,
                spec="5",
                uid=4242,
                ended_unix_s=now_s - 600,
                value={**value, "job_id": 5, "spec": "5", "user": "bob", "uid": 4242},
            ),
            EventRow(unix_s=now_s - 9000, run="c:1.0", kind="capped", text="capped to 480 W a GPU"),
            EventRow(unix_s=now_s - 9000, run="c:5.0", kind="capped", text="another's"),
        ]
    )
    assert controller.history.flush()
    return now_s


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 99
    out, error = capsys.readouterr()
    return code, out, error


def test_job_tells_the_newest_run_on_80_columns(
    controller: Controller, capsys: pytest.CaptureFixture[str], ended: float
) -> None:
    code, out, error = said(capsys, "job", "1")
    assert (code, error) == (0, "")
    assert out.startswith("job 1.1 of anna: running\n")
    assert "other runs of this job: 1.0" in out
    assert "4.4 % of its throughput while capped" in out
    assert max(map(len, out.splitlines())) <= 80
    for heading in ("Asked", "Known", "Done", "Cost", "Saved", "Promised"):
        assert f"\n{heading}\n" in out


def test_a_finished_run_is_told_from_the_history(
    controller: Controller, capsys: pytest.CaptureFixture[str], ended: float
) -> None:
    code, out, _ = said(capsys, "job", "1.0")
    assert code == 0
    assert out.startswith("job 1 of anna: ended 2 h 00 min ago, at ")
    assert "capped to 480 W a GPU" in out
    assert "another's" not in out
    code, out, _ = said(capsys, "job", "5", "--json")
    told = json.loads(out)
    assert (told["user"], told["state"], told["ended_unix_s"]) == ("bob", "ended", ended - 600)
    assert [one["text"] for one in told["events"]] == ["another's"]


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("77_3", TASK),
        ("77_4", TASK2),
        ("78", TASK),
        ("80+1", PART),
        ("80", PART),
        ("81.0", PART),
        ("2", OTHER),
    ],
)
def test_parts_are_found_by_the_names_that_slurm_gives_them(
    controller: Controller, capsys: pytest.CaptureFixture[str], name: str, run: Run
) -> None:
    code, out, error = said(capsys, "job", name, "--json")
    assert (code, error) == (0, "")
    assert json.loads(out)["run"] == str(run)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("77", 1, "job 77 has several parts, here are 77_3, 77_4; ask for one of them: 'slurm-pfi job 77_3'"),
        ("9", 1, "job 9 is not known: no run of it has a GPU now"),
        ("77_9", 1, "job 77_9 is not known"),
        ("1.7", 1, "job 1 has no known restart 7; known: 1.1"),
        ("x", 2, "'x' is no job: write 1234"),
        ("-1", 2, "no such option"),
        ("1_2+3", 2, "is no job"),
        ("99999999999", 2, "is no job"),
        ("4294967297", 2, "is no job"),
        ("1.2.3", 2, "is no job"),
        ("\u0661", 2, "is no job"),
    ],
)
def test_what_is_not_there(
    controller: Controller, capsys: pytest.CaptureFixture[str], name: str, code: int, words: str
) -> None:
    got, out, error = said(capsys, "job", name)
    assert (got, out) == (code, "")
    assert words in error
    assert error.count("\n") == 1


def test_without_a_history_what_runs_is_told_all_the_same(
    controller: Controller, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    controller.history.close()
    for path in tmp_path.glob("history.db*"):
        path.unlink()
    (tmp_path / "history.db").write_bytes(b"no database" * 100)
    code, out, _ = said(capsys, "job", "2")
    assert code == 0
    assert "not known: the history cannot be read" in out
    code, _, error = said(capsys, "job", "9")
    assert code == 1
    assert "whether it ended is not known: the history cannot be read" in error
    code, _, error = said(capsys, "jobs", "--ended")
    assert code == 1
    assert "the history cannot be read" in error


def test_jobs_of_mine_and_ended_ones(
    controller: Controller, capsys: pytest.CaptureFixture[str], ended: float
) -> None:
    def runs(*options: str) -> list[str]:
        code, out, _ = said(capsys, "jobs", "--json", *options)
        assert code == 0
        return [run["run"] for run in json.loads(out)]

    assert runs() == ["c:1.1", "c:2.0", "c:78.0", "c:79.0", "c:81.0"]
    assert runs("--me") == ["c:1.1"]
    assert runs("--me", "--ended") == ["c:1.0", "c:1.1"]
    assert runs("--ended")[:2] == ["c:1.0", "c:5.0"]
    _, out, _ = said(capsys, "jobs", "--ended")
    assert out.splitlines()[1].split()[:3] == ["1", "anna", "ended"]
    assert "77_3  bob" in out
    assert max(map(len, out.splitlines())) <= 80


def test_whose_they_are_is_the_word_of_the_kernel(controller: Controller, tmp_path: Path) -> None:
    """Nobody may name another uid in the question."""
    reply = ask(tmp_path / CONTROL_SOCKET, "jobs", {"mine": True, "uid": 4242})
    assert not reply.ok
    assert "uid" in reply.message
    if os.getuid() != 0:
        pytest.skip("only root may become another user")
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom slurm_pfi.bus.asking import ask\n"
        "os.setuid(4242)\nprint(*(run['run'] for run in ask(Path(sys.argv[1]), 'jobs', {'mine': True}).data))"
    )
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / CONTROL_SOCKET)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["c:2.0", "c:78.0", "c:79.0", "c:81.0"], done.stderr


@pytest.mark.parametrize(
    ("command", "args"),
    [
        ("job", {}),
        ("job", {"job_id": "1"}),
        ("job", {"job_id": -1}),
        ("jobs", {"mine": 1}),
        ("job", {"job_id": 1, "x": 2}),
    ],
)
def test_a_wrong_question_is_refused(
    controller: Controller, tmp_path: Path, command: str, args: dict[str, Any]
) -> None:
    reply = ask(tmp_path / CONTROL_SOCKET, command, args)
    assert not reply.ok
    assert reply.exit_code == 2
    assert reply.message.startswith(f"{command}: ")


def test_status_and_top_say_until_when(controller: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "status")
    assert code == 0
    assert "limit 2500 W (economic, m)" in out
    assert "NODES 1: 1 ok" in out
    code, out, _ = said(capsys, "top", "--once")
    assert code == 0
    assert "RUNS 5: 5 running" in out
    assert "q or Ctrl-C" not in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = said(capsys, "top", "--json")
    assert {run["run"] for run in json.loads(out)["jobs"]} >= {"c:1.1", "c:2.0"}


def test_the_lists_are_quick_and_cheap_to_start() -> None:
    """No command that only asks waits for what only the daemons need."""
    for module in ("job", "jobs", "status", "top"):
        code = f"import sys\nimport slurm_pfi.cli.{module}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        assert not {"numpy", "sqlite3", "structlog", "ClusterShell"} & set(done.stdout.split()), module
