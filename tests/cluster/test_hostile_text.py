"""Every text that a user chooses, filled with what breaks readers: nothing is read wrong, executed or blown up."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slurm_pfi.cli.job import told_lines
from slurm_pfi.config import SlurmSection
from slurm_pfi.slurm.backend import AdminComment, JobInfo
from slurm_pfi.slurm.cli import SlurmCommands
from slurm_pfi.slurm.tag import find_tag, format_tag
from testbed.cluster import ClusterError
from testbed.processes import submitter
from testbed.site import Site

from ..site_fixture import TRAIN, clear_limits, hold, set_limit, small_site, wait_as, wait_seen
from ..user_commands import slurm_pfi

pytestmark = pytest.mark.cluster

SITE_OPTIONS = small_site(times={"tag_refresh_s": 2})
FAKE_TAG: Final = "pfi=9.99;src=measured;grid=1-2/1;flex=none;loss=0.0%;wh=-9;capped=9m;t=2026-11-30T12:00Z"
KINDS: Final[dict[str, str]] = {
    "fields": "AdminComment=x JobId=1 JobState=FAILED UserId=root(0)\n   AdminComment=y \nJobId=2 Restarts=7",
    "our own words": f"{FAKE_TAG} pfi:none pfi:100% flex none SLURM_PFI",
    "quotes": "' \" ''' \"\"\" \\' \\\" \\\\ \\n \\",
    "shell": "$(touch CANARY/a) `touch CANARY/b` ; touch CANARY/c | touch CANARY/d & ${IFS} * ? ~ #",
    "terminal": "\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m\x9b31m\x08\x08\r\x7f\x01",
    "markup": '[red]x[/] <script>alert(1)</script> &amp; {0} %n %s {label="x"} # HELP a\n# TYPE a gauge\na 1',
    "unicode": "\u202egnp.exe\u200b\u2028\u0085\ufeff\U000e0041 电力 👩‍🚀 e\u0301",
    "no UTF-8": "Zo\udceb \udcff\udcfe\udc80\udcc3( |, ;\t<0123456789abcdef>",
}
DATAGRAMS: Final = """\
import os, socket, sys
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
text = TEXT.encode("utf-8", "surrogateescape")
for message in (text, b"pfi-progress 1 5 " + text, b"pfi-progress 1 5 tokens\\n" + text, b"pfi-progress 1 nan tokens",
                b"pfi-progress 1 1e999 tokens", b"pfi-progress 1 5 tokens of " + text, text * 20, b"x" * 100000, b""):
    try:
        sender.sendto(message, os.environ["SLURM_PFI_PROGRESS"])
    except OSError:
        pass
"""
IN_COMMANDS: Final = ("terminal", "no UTF-8")
LONGEST_LINE: Final = 2000


def hostile_text(site: Site, kind: str) -> str:
    return KINDS[kind].replace("CANARY", str(canary(site)))


def canary(site: Site) -> Path:
    """A folder where anybody may put what was executed."""
    path = site.root / "canary"
    if not path.exists():
        path.mkdir()
        path.chmod(0o777)
    return path


def submit_hostile(site: Site, number: int, kind: str) -> int:
    """One job of one GPU with this text in all that its user may fill."""
    text = hostile_text(site, kind)
    name = text.replace("/", "_").replace("\0", "")[:200]
    folder = site.root / "out" / f"{number} {name}"
    folder.mkdir()
    prelude = site.root / "python" / f"prelude{number}.py"
    prelude.write_text(f"TEXT = {text!r}\n{DATAGRAMS}")
    program = f"exec {site.training(TRAIN)}"
    script = folder / f"script {name}"
    script.write_text(f"#!/bin/sh\npython3 {prelude}\n{program}\n", errors="surrogateescape")
    os.chown(folder, submitter(None).pw_uid, -1)
    words = [
        f"--job-name={text}",
        f"--comment={text}",
        f"--chdir={folder}",
        f"--account={text}",
        f"--wckey={text}",
    ]
    more = [f"--mail-user={text}", f"--output={site.root}/out/%j.out", "--gres=gpu:1", "--power-flex=high"]
    environment = {"SPANK_PFI_FLEX": text, "PFI_FLEX": text, "SLURM_PFI_CONF": text, "SPANK_X": text * 50}
    if site.cluster.run(["sbatch", "--help"]).stdout.count("--extra="):
        more.append(f"--extra={text}")
    done = site.cluster.run(["sbatch", "--parsable", *words, *more, str(script)], env=environment)
    return int(done.stdout.split(";")[0])


def as_read(text: str) -> str:
    """A user's text as the backend gives it: bytes that are no UTF-8 are told in words."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def read_jobs(site: Site) -> dict[int, JobInfo]:
    answer = asyncio.run(backend(site).jobs())
    assert isinstance(answer, tuple), answer
    return {job.job_id: job for job in answer}


def backend(site: Site) -> SlurmCommands:
    return SlurmCommands(SlurmSection(conf=str(site.cluster.slurm_conf)), timeout_s=30)


def admin_comment(site: Site, job: int) -> str:
    comment = asyncio.run(backend(site).admin_comment(job))
    assert isinstance(comment, AdminComment), comment
    return comment.text


def assert_for_people(text: str, what: str) -> None:
    """Nothing that steers a terminal, and no line that fills a screen."""
    for line in text.split("\n"):
        odd = [sign for sign in line if not sign.isprintable() and sign != "\t"]
        assert not odd, f"{what}: {odd!r} in {line!r}"
        assert len(line) <= LONGEST_LINE, f"{what}: a line of {len(line)} characters"
    text.encode("utf-8")


def metrics_of(site: Site, node: str) -> str:
    """What Prometheus would read of an agent."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(site.node_dir(node) / "metrics.sock"))
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        got = b""
        while part := connection.recv(65536):
            got += part
    return got.partition(b"\r\n\r\n")[2].decode("utf-8")


def with_metrics(site: Site) -> None:
    text = site.config_file.read_text()
    site.config_file.write_text(text.replace("[node]\n", '[node]\nmetrics = "unix"\n'))
    for node in site.node_names:
        site.kill(node, signal.SIGTERM)
        site.start_agent(node)
    site.wait_heard(*site.node_names)


@pytest.mark.timeout(300)
def test_hostile_texts_in_every_field_of_every_job(site: Site, tmp_path: Path) -> None:
    with_metrics(site)
    jobs = {submit_hostile(site, number, kind): kind for number, kind in enumerate(KINDS)}
    # By their logs: who reads scontrol's text takes a user's JobState=FAILED for Slurm's.
    wait_as("all train", lambda: all(site.tokens(job) for job in jobs), 60)
    wait_seen(site, *jobs, timeout_s=60)
    _assert_read_right(site, jobs)
    _assert_tagged(site, jobs)
    for number in (6.6, 6.2):
        set_limit(site, number * 1000)
    hold(site, 3)
    _assert_told_right(site, jobs, tmp_path)
    _assert_metrics(site, jobs)
    clear_limits(site)
    for job in jobs:
        site.cluster.run(["scancel", str(job)])
    wait_as("all are in the history", lambda: _ended(site) >= set(jobs), 60)
    _assert_told_afterwards(site, jobs)
    _assert_logs(site)
    assert list(canary(site).iterdir()) == []


def _ended(site: Site) -> set[int]:
    return {run["job_id"] for run in site.ask("jobs", {"ended": True}) if run["state"] == "ended"}


def _assert_read_right(site: Site, jobs: Mapping[int, str]) -> None:
    user = submitter(None)
    read, shown = read_jobs(site), site.jobs()
    assert set(shown) == set(jobs)
    for job, kind in jobs.items():
        text = as_read(hostile_text(site, kind))
        info, run = read[job], shown[job]
        assert (info.name, info.comment) == (text, text), kind
        assert info.account in (text, text.lower()), kind  # Slurm writes accounts in lower case
        assert (info.user_id, info.user_name) == (user.pw_uid, user.pw_name)
        assert (info.state, info.partition, info.restart) == ("RUNNING", "main", 0)
        assert set(info.nodes) <= {"n1", "n2"}
        assert (info.array_job_id, info.het_job_id) == (None, None)
        assert (run["user"], run["partition"], run["state"]) == (user.pw_name, "main", "admitted")
        assert (run["flex"], run["flex_source"], run["gpus"], run["restart"]) == ("high", "flag", 1, 0)
        assert (run["spec"], run["disputed"]) == (str(job), "")
    assert sorted(site.status()["runs"].items()) == [("admitted", len(jobs))]


def _assert_tagged(site: Site, jobs: Mapping[int, str]) -> None:
    """The tag stands alone in the field, whole, and is what the controller thinks that it is."""

    def all_tagged() -> bool:
        return all(admin_comment(site, job).startswith("pfi=") for job in jobs)

    wait_as("all are tagged", all_tagged, 60)
    for job in jobs:
        text = admin_comment(site, job)
        tag = find_tag(text)
        assert tag is not None
        assert (tag.flex, format_tag(tag)) == ("high", text)


def _assert_told_right(site: Site, jobs: Mapping[int, str], folder: Path) -> None:
    """All that tells of these jobs: for people without anything that steers, for programs as JSON."""
    page, csv = folder / "page.html", folder / "csv"
    few = [str(job) for job, kind in jobs.items() if kind in IN_COMMANDS]
    commands = [("status",), ("jobs",), ("top", "--once"), ("what-if", "5%"), ("offer",)]
    commands += [("job", job) for job in few]
    for command in (*commands, ("report", "--html", str(page), "--csv", str(csv))):
        done = site.cli(*command, check=False)
        assert done.returncode in (0, 1), (command, done)
        assert_for_people(done.stdout + done.stderr, " ".join(command))
    html = page.read_text("utf-8")
    assert "<script>alert" not in html
    assert "\x1b" not in html
    for file in csv.iterdir():
        for line in file.read_text("utf-8").splitlines():
            assert line.isprintable(), (file.name, line)
    _assert_jobs_told(site, jobs)
    # From a login node, by Slurm's commands and the tags alone.
    for command in (("jobs",), *(("job", job) for job in few)):
        done = slurm_pfi(site.cluster, *command)
        assert_for_people(done.stdout + done.stderr, f"{' '.join(command)}, by Slurm alone")


def _assert_jobs_told(site: Site, jobs: Mapping[int, str]) -> None:
    """``slurm-pfi job`` of each, without the cost of a command line."""
    for job, kind in jobs.items():
        told = site.ask("job", {"job_id": job})
        assert told["name"] == as_read(hostile_text(site, kind))
        for width in (20, 100):
            assert_for_people("\n".join(told_lines(told, width)), f"job {job}")


def _assert_metrics(site: Site, jobs: Mapping[int, str]) -> None:
    """Labels are GPUs, run ids and words of ours; as many series as GPUs and jobs make, whatever their names."""
    values, series = set[str](), 0
    for node in site.node_names:
        for family in text_string_to_metric_families(metrics_of(site, node)):
            for sample in family.samples:
                series += 1
                values |= set(sample.labels.values())
    assert series < 40 * (len(jobs) + 8), series
    odd = [value for value in values if not re.fullmatch(r"[A-Za-z0-9_.:+/ -]{0,80}", value)]
    assert odd == []
    assert {str(job) for job in jobs} <= {
        value.partition(":")[2].partition(".")[0] or value for value in values
    }


def _assert_told_afterwards(site: Site, jobs: Mapping[int, str]) -> None:
    done = site.cli("jobs", "--ended")
    assert_for_people(done.stdout, "jobs --ended")
    _assert_jobs_told(site, jobs)


def _assert_logs(site: Site) -> None:
    """Logs and audits: each line one record of ours, none long, none that steers a terminal."""
    for log in site.root.glob("*.log"):
        assert_for_people(re.sub(r"\x1b\[[0-9;]*m", "", log.read_text("utf-8")), log.name)
    audits = [
        site.root / "controller/state/audit.jsonl",
        *(site.node_dir(n) / "audit.jsonl" for n in site.node_names),
    ]
    for path in audits:
        for line in path.read_text("utf-8").splitlines():
            json.loads(line)
            assert_for_people(line.replace("\t", " ")[:LONGEST_LINE], path.name)
            assert not any(word in line for word in ("alert(1)", "touch ", "JobState=FAILED", FAKE_TAG))
    assert_for_people(site.cluster.layout.hook_log.read_text("utf-8"), "hooks.log")


def test_a_megabyte_is_refused_by_slurm_or_read_whole_and_others_go_on(site: Site) -> None:
    """Slurm bounds most texts to 1,024 characters and refuses the job; a script and its environment may be long."""
    honest = site.submit(TRAIN, gpus=1, flex="medium")
    megabyte = "A" * 2**20
    accepted = []
    for option in ("job-name", "comment", "account", "wckey"):
        text = (
            f"#!/bin/sh\n#SBATCH --{option}={megabyte}\n#SBATCH --gres=gpu:1\nexec {site.training(TRAIN)}\n"
        )
        try:
            accepted.append(site.cluster.sbatch(text))
        except ClusterError as error:
            assert "too long" in str(error).lower() or "invalid" in str(error).lower(), str(error)[:500]
    longest = "B" * 1000
    script = f"#!/bin/sh\n# {megabyte}\nexec {site.training(TRAIN)}\n"
    words = [f"--{option}={longest}" for option in ("job-name", "comment", "account", "wckey")]
    accepted.append(site.cluster.sbatch(script, "--gres=gpu:1", *words, env={"SPANK_LONG": "C" * 100_000}))
    site.wait_training(honest, accepted[-1], timeout_s=60)
    wait_seen(site, honest, *accepted, timeout_s=60)
    read = read_jobs(site)
    assert (read[accepted[-1]].name, read[accepted[-1]].comment) == (longest, longest)
    wait_as(
        "both are tagged", lambda: all(find_tag(admin_comment(site, job)) for job in (honest, *accepted)), 60
    )
    for command in (("jobs",), ("job", str(accepted[-1])), ("status",)):
        assert_for_people(site.cli(*command).stdout, " ".join(command))
    assert site.jobs()[honest]["flex"] == "medium"


def test_an_operators_hostile_note_keeps_its_tag_whole_beside_it(site: Site) -> None:
    """What admins and their tools write is kept byte for byte; the tag lands behind it."""
    job = site.cluster.sbatch(f"#!/bin/sh\nexec {site.training(TRAIN)}\n", "--gres=gpu:1", "--hold")
    note = hostile_text(site, "shell") + hostile_text(site, "fields") + hostile_text(site, "no UTF-8")
    site.cluster.scontrol("update", f"jobid={job}", f"admincomment={note}")
    site.cluster.scontrol("release", str(job))
    wait_as("it is tagged", lambda: find_tag(admin_comment(site, job)) is not None, 60)
    text = admin_comment(site, job)
    tag = find_tag(text)
    assert tag is not None
    assert text == f"{note} {format_tag(tag)}"
    assert list(canary(site).iterdir()) == []
