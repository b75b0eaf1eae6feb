"""Who can write AdminComment: every door that Slurm has, tried by an ordinary user, an operator and an admin.

Our tag stands there because users cannot write it. What is asserted here is what Slurm does, and
docs/slurm-versions.md ("Who can write AdminComment") says it in words; a door that is open has a test that says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest

from slurm_pfi.config import SlurmSection
from slurm_pfi.slurm.backend import AdminComment
from slurm_pfi.slurm.cli import SlurmCommands
from testbed.cluster import REPO, Cluster, ClusterOptions, wait_until
from testbed.cluster_files import find_program

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.generations,
    pytest.mark.skipif(os.getuid() != 0, reason="needs several users: run as root"),
]

USER: Final = "games"
OPERATOR: Final = "daemon"
ADMIN: Final = "mail"
FORGED: Final = (
    "pfi=9.99[9.98,9.99];src=measured;grid=200-700/100;flex=100%"
    ";loss=0.0%;wh=-99999;capped=99m;t=2026-11-30T12:00Z"
)
SLEEP: Final = "#!/bin/sh\nexec sleep 300\n"
SOURCE: Final = REPO / "testbed/native/admin_comment.c"
DENIED: Final = "Access/permission denied"


@dataclass(frozen=True)
class Doors:
    """A cluster with accounting, and the program that knocks at libslurm's doors."""

    cluster: Cluster
    program: str

    def knock(self, user: str, *args: str) -> subprocess.CompletedProcess[str]:
        return self.cluster.run([self.program, *args], user=user, check=False)

    def admin_comment(self, job: int) -> str:
        """As our controller reads it."""
        slurm = SlurmCommands(SlurmSection(conf=str(self.cluster.slurm_conf)), timeout_s=30)
        found = asyncio.run(slurm.admin_comment(job))
        assert isinstance(found, AdminComment), found
        return found.text or ""

    def job(self, user: str, *args: str, running: bool = False) -> int:
        job = self.cluster.sbatch(SLEEP, *(() if running else ("--hold",)), *args, user=user)
        if running:
            self.cluster.wait_job_state(job, "RUNNING")
        return job

    def accounted(self, job: int) -> str:
        """The AdminComment in the accounting, of a job that has ended there."""
        wait_until(
            lambda: [row[0].split(" ")[0] for row in self.cluster.sacct(str(job), "State")] == ["CANCELLED"],
            30,
            f"sacct knows that {job} has ended",
        )
        return self.cluster.sacct(str(job), "AdminComment")[0][0]

    def ended_job(self, user: str) -> int:
        job = self.job(user, running=True)
        # Of a job that ends before the accounting knew of its start 22.05 keeps no user but root.
        running = [["RUNNING", user]]
        wait_until(
            lambda: self.cluster.sacct(str(job), "State", "User") == running, 30, "sacct knows its start"
        )
        self.cluster.run(["scancel", str(job)], user=user)
        assert self.accounted(job) == ""
        return job


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    options = ClusterOptions(
        nodes=1, gpus_per_node=1, hooks=False, plugin=False, accounting=True, conf=("ScronParameters=enable",)
    )
    with Cluster(options) as cluster:
        for told in (
            f"add user {USER},{OPERATOR},{ADMIN} account=research",
            f"modify user {OPERATOR} set adminlevel=operator",
            f"modify user {ADMIN} set adminlevel=admin",
        ):
            cluster.run(["sacctmgr", "-i", *told.split()], user="root")
        program = cluster.layout.etc / "admin_comment"
        flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1"]
        cluster.run([find_program("gcc"), *flags, "-o", str(program), str(SOURCE), "-lslurm"], user="root")
        program.chmod(0o755)
        yield Doors(cluster, str(program))


@pytest.fixture(autouse=True)
def _left_whole(doors: Doors) -> Iterator[None]:
    yield
    for user in (USER, OPERATOR, ADMIN):
        doors.knock(user, "cron-end")  # scancel does not end such jobs
    doors.cluster.cancel_all()
    doors.cluster.wait_nodes_idle()


# ------------------------------------------------------------------------------------------ Slurm's own commands


@pytest.mark.parametrize("command", ["sbatch", "srun", "salloc"])
def test_no_submitting_command_has_an_option_for_it(doors: Doors, command: str) -> None:
    cluster = doors.cluster
    text = cluster.run([command, "--help"]).stdout
    assert "--comment" in text
    assert not re.search(r"admin.?comment", text, re.IGNORECASE)
    for option in ("--admin-comment", "--admin_comment", "--admincomment"):
        refused = cluster.run([command, f"{option}={FORGED}", "true"], user=USER, stdin=SLEEP, check=False)
        assert refused.returncode != 0
        assert "unrecognized option" in refused.stderr


def test_no_variable_of_the_environment_sets_it(doors: Doors) -> None:
    names = [
        f"{start}_{name}"
        for start in ("SBATCH", "SLURM", "SALLOC")
        for name in ("ADMIN_COMMENT", "ADMINCOMMENT", "JOB_ADMIN_COMMENT")
    ]
    done = doors.cluster.run(
        ["sbatch", "--parsable", "--hold"], user=USER, stdin=SLEEP, env=dict.fromkeys(names, FORGED)
    )
    assert doors.admin_comment(int(done.stdout)) == ""


@pytest.mark.parametrize(
    "option", ["--comment", "--job-name", "--wckey", "--chdir", "--output", "--mail-user"]
)
def test_no_text_of_the_user_is_read_as_one(doors: Doors, option: str) -> None:
    """scontrol's text shows such a line as if it were the field; we do not read that text."""
    forged = f"/tmp/x\n   AdminComment={FORGED} \nAdminComment={FORGED}"
    job = doors.job(USER, f"{option}={forged}")
    assert doors.admin_comment(job) == ""
    if option == "--comment":
        shown = doors.cluster.scontrol("show", "job", str(job))
        assert f"\n   AdminComment={FORGED}" in shown


@pytest.mark.parametrize("running", [False, True], ids=["pending", "running"])
@pytest.mark.parametrize("user", [USER, OPERATOR])
def test_scontrol_refuses_users_and_operators(doors: Doors, user: str, running: bool) -> None:
    for owner in dict.fromkeys([user, USER]):
        job = doors.job(owner, running=running)
        for change in (
            f"admincomment={FORGED}",
            f"AdminComment+={FORGED}",
            f"comment=x admincomment={FORGED}",
        ):
            refused = doors.cluster.run(
                ["scontrol", "update", f"jobid={job}", *change.split(" ")], user=user, check=False
            )
            assert refused.returncode != 0
            assert DENIED in refused.stderr or "+=" in change  # which later releases know not to be meant
        assert doors.admin_comment(job) == ""
        doors.cluster.run(["scancel", str(job)], user="root")


def test_scontrol_takes_it_from_an_admin(doors: Doors) -> None:
    job = doors.job(USER)
    doors.cluster.run(["scontrol", "update", f"jobid={job}", f"admincomment={FORGED}"], user=ADMIN)
    assert doors.admin_comment(job) == FORGED


def test_scancel_has_it_for_admins_alone(doors: Doors) -> None:
    """Since Slurm 25.11 scancel can leave one; before, there is no such option."""
    job = doors.job(USER, running=True)
    command = ["scancel", "--ctld", f"--admin-comment={FORGED}", "--signal=USR1", str(job)]
    for user in (USER, OPERATOR):
        assert doors.cluster.run(command, user=user, check=False).returncode != 0
        assert doors.admin_comment(job) == ""
    has_it = "--admin-comment" in doors.cluster.run(["scancel", "--help"]).stdout
    assert (doors.cluster.run(command, user=ADMIN, check=False).returncode == 0) == has_it
    assert doors.admin_comment(job) == (FORGED if has_it else "")


# ------------------------------------------------------------------------------------------------------ libslurm

NEW_JOB: Final = ("submit", "allocate", "het", "cron", "will-run")


@pytest.mark.parametrize("door", NEW_JOB)
@pytest.mark.parametrize("user", [USER, OPERATOR])
def test_libslurm_refuses_it_in_a_new_job(doors: Doors, user: str, door: str) -> None:
    refused = doors.knock(user, door, FORGED)
    assert (refused.returncode, refused.stdout.strip()) == (1, f"refused {DENIED}")
    assert doors.cluster.squeue("-u", user) == []
    # The same request without it is an ordinary one: it was the text that was refused.
    taken = doors.knock(user, door, "-")
    assert taken.returncode == 0, taken.stdout


@pytest.mark.parametrize("door", [door for door in NEW_JOB if door != "will-run"])
def test_libslurm_takes_it_in_a_new_job_from_an_admin(doors: Doors, door: str) -> None:
    """So the requests above do carry the text to slurmctld."""
    taken = doors.knock(ADMIN, door, FORGED)
    assert taken.returncode == 0, taken.stdout
    jobs = [int(job) for job in doors.cluster.squeue("-u", ADMIN, "-o", "%A")]
    assert FORGED in {doors.admin_comment(job) for job in jobs}


@pytest.mark.parametrize("text", ["-", FORGED])
def test_nobody_submits_in_the_name_of_root(doors: Doors, text: str) -> None:
    for user in (USER, OPERATOR):
        assert doors.knock(user, "submit-as-root", text).stdout.startswith("refused")
    assert doors.cluster.squeue() == []


@pytest.mark.parametrize("running", [False, True], ids=["pending", "running"])
@pytest.mark.parametrize("door", ["update", "kill"])
def test_libslurm_refuses_it_for_a_job_that_is_there(doors: Doors, door: str, running: bool) -> None:
    for user in (USER, OPERATOR):
        job = doors.job(user, running=running)
        refused = doors.knock(user, door, str(job), FORGED)
        if door == "kill" and refused.returncode == 2:
            return  # this release has no such request
        assert (refused.returncode, refused.stdout[:8]) == (1, "refused ")
        assert doors.admin_comment(job) == ""
        doors.cluster.run(["scancel", str(job)], user="root")
    job = doors.job(USER, running=running)
    assert doors.knock(ADMIN, door, str(job), FORGED).returncode == 0
    assert doors.admin_comment(job) == FORGED


# ---------------------------------------------------------------------------------------------------- slurmrestd


def rest(
    doors: Doors, user: str, path: str, body: Mapping[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """One request to a slurmrestd of the user's own, which ends with it; the HTTP status and the answer."""
    text = "" if body is None else json.dumps(body)
    method = "GET" if body is None else "POST"
    head = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Connection: close",
    ]
    request = "\r\n".join([*head, f"Content-Length: {len(text)}", "", text])
    # It believes a pipe that its own user made: hence the shell.
    command = ["sh", "-c", "cat | slurmrestd -a rest_auth/local"]
    done = doors.cluster.run(command, user=user, stdin=request, check=False)
    status = re.match(r"HTTP/1\.1 (\d{3})", done.stdout)
    assert status is not None, (done.stdout[:500], done.stderr[-1500:])
    start = done.stdout.find("{")
    answer = {} if start < 0 else json.JSONDecoder().raw_decode(done.stdout, start)[0]
    assert isinstance(answer, dict)
    return int(status[1]), answer


@pytest.fixture(scope="module")
def rest_path(doors: Doors) -> str:
    """Where the newest interface that this slurmrestd has takes jobs: /slurm/v0.0.NN/job."""
    status, described = rest(doors, USER, "/openapi/v3")
    assert status == 200
    versions = sorted(
        path for path in described["paths"] if re.fullmatch(r"/slurm/v[0-9.]+/job/submit/?", path)
    )
    return str(versions[-1]).rstrip("/").removesuffix("/submit")


def rest_job(path: str, **fields: str) -> dict[str, Any]:
    old = path.startswith("/slurm/v0.0.3")
    environment = {"PATH": "/usr/bin:/bin"} if old else ["PATH=/usr/bin:/bin"]
    return {
        "script": SLEEP,
        "job": {
            "name": "by-rest",
            "environment": environment,
            "current_working_directory": "/tmp",
            "standard_output": "/dev/null",
            **fields,
        },
    }


@pytest.mark.parametrize("user", [USER, OPERATOR])
def test_slurmrestd_refuses_it_in_a_new_job(doors: Doors, rest_path: str, user: str) -> None:
    status, answer = rest(doors, user, f"{rest_path}/submit", rest_job(rest_path, admin_comment=FORGED))
    assert status >= 400
    assert answer["errors"]
    assert doors.cluster.squeue("-u", user) == []
    status, answer = rest(doors, user, f"{rest_path}/submit", rest_job(rest_path))
    assert (status, answer["errors"]) == (200, [])
    assert doors.admin_comment(answer["job_id"]) == ""


@pytest.mark.parametrize("user", [USER, OPERATOR])
def test_slurmrestd_refuses_it_for_a_job_that_is_there(doors: Doors, rest_path: str, user: str) -> None:
    job = doors.job(user)
    _, answer = rest(doors, user, f"{rest_path}/{job}", {"admin_comment": FORGED})
    assert answer["errors"]  # 22.05 says 200 even so
    assert doors.admin_comment(job) == ""
    _, answer = rest(doors, user, f"{rest_path}/{job}", {"comment": "a comment"})
    assert answer["errors"] == []
    assert doors.cluster.job_fields(job)["Comment"].rstrip() == "a comment"


def test_slurmrestd_takes_it_from_an_admin_where_it_knows_the_field(doors: Doors, rest_path: str) -> None:
    """Of those tried, 22.05's does not: "Unknown key". So the requests above name the field as later ones know it."""
    known = not rest_path.startswith("/slurm/v0.0.3")
    _, answer = rest(doors, ADMIN, f"{rest_path}/submit", rest_job(rest_path, admin_comment=FORGED))
    assert (answer["errors"] == []) == known
    assert known or answer["errors"][0]["description"] == 'Unknown key "admin_comment"'
    if known:
        assert doors.admin_comment(answer["job_id"]) == FORGED
    job = doors.job(USER)
    rest(doors, ADMIN, f"{rest_path}/{job}", {"admin_comment": FORGED})
    assert doors.admin_comment(job) == (FORGED if known else "")


def test_slurmrestd_does_not_run_as_root(doors: Doors) -> None:
    command = ["sh", "-c", "printf 'GET /openapi/v3 HTTP/1.1\\r\\n\\r\\n' | slurmrestd -a rest_auth/local"]
    refused = doors.cluster.run(command, user="root", check=False)
    assert refused.returncode != 0
    assert "HTTP/1.1 200" not in refused.stdout


# ------------------------------------------------------------------------------- the accounting, after the job's end


def test_the_accounting_refuses_users_by_every_door(doors: Doors, rest_path: str) -> None:
    job = doors.ended_job(USER)
    where = ["modify", "job", "where", f"jobid={job}", "set"]
    refused = doors.cluster.run(["sacctmgr", "-i", *where, f"admincomment={FORGED}"], user=USER, check=False)
    assert refused.returncode != 0
    assert DENIED in refused.stderr
    assert doors.knock(USER, "accounting", str(job), FORGED).stdout.strip() == f"refused {DENIED}"
    rest(doors, USER, database_path(rest_path, job), {"comment": {"administrator": FORGED}})
    assert doors.accounted(job) == ""
    # They may write the comment to the exit code. A quote in it does not end it.
    for text in (f"x', admin_comment='{FORGED}", f"x\\', admin_comment='{FORGED}"):
        doors.cluster.run(["sacctmgr", "-i", *where, f"derivedexitstring={text}"], user=USER, check=False)
        assert doors.accounted(job) == ""
    assert doors.knock(USER, "accounting-quote", str(job), FORGED).returncode == 0
    assert doors.accounted(job) == ""
    # It did arrive, as text.
    assert doors.cluster.sacct(str(job), "Comment") == [[f"x', admin_comment='{FORGED}"]]


@pytest.mark.parametrize("door", ["sacctmgr", "libslurmdb", "slurmrestd"])
def test_the_accounting_takes_it_from_an_operator_an_open_door(
    doors: Doors, rest_path: str, door: str
) -> None:
    """The one door beside admins': slurmdbd asks for an operator only.

    What stands there is shown, and is not the truth for us: see test_forged_tag.py.
    """
    job = doors.ended_job(USER)
    if door == "sacctmgr":
        where = ["where", f"jobid={job}", "set", f"admincomment={FORGED}"]
        doors.cluster.run(["sacctmgr", "-i", "modify", "job", *where], user=OPERATOR)
    elif door == "libslurmdb":
        assert doors.knock(OPERATOR, "accounting", str(job), FORGED).returncode == 0
    else:
        path = database_path(rest_path, job)
        rest(doors, OPERATOR, path, {"comment": {"administrator": FORGED}})
        if not can_change_accounts(doors, path, job):
            assert doors.accounted(job) == ""
            return
    # sacctmgr of 22.05 writes it in lower case.
    assert doors.accounted(job).lower() == FORGED.lower()


def database_path(rest_path: str, job: int) -> str:
    return f"{rest_path.replace('/slurm/', '/slurmdb/')}/{job}"


def can_change_accounts(doors: Doors, path: str, job: int) -> bool:
    """Whether this slurmrestd has a request that changes a job in the accounting; 26.05's has."""
    described = rest(doors, USER, "/openapi/v3")[1]["paths"]
    return any(
        "post" in methods for at, methods in described.items() if at == path.replace(str(job), "{job_id}")
    )
