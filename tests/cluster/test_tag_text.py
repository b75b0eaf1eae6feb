"""The tag beside the text of others: every kind of it, every kind of job, requeue, restart, and what sacct keeps."""

from __future__ import annotations

import asyncio
import getpass
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from slurm_pfi.config import SlurmSection
from slurm_pfi.slurm.backend import AdminComment, JobInfo, Updated
from slurm_pfi.slurm.cli import SlurmCommands
from slurm_pfi.slurm.tag import Tag, find_tag, format_tag
from slurm_pfi.slurm.tagwrite import write_tag
from testbed.cluster import ClusterError
from testbed.site import Site

from ..site_fixture import TRAIN, set_limit, small_site, wait_as, wait_registered, wait_seen
from ..slurm_samples import BARE_TAG as TAG
from .test_accounting import accounted, end, hold_job, is_tagged, shown, wait_tagged, write_note

pytestmark = [pytest.mark.cluster, pytest.mark.generations]

SITE_OPTIONS = small_site(accounting=True, times={"tag_refresh_s": 2})
ROWS: Final = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data/admin_comments.jsonl").read_text("utf-8").splitlines()
]
JS1: Final = "JS1:H4sIAAAAAAACA6tWSi8oLVayUjDSUVDKy09JBbGrlfIMwVQyRM6ktrYWAG0MhPMpAAAA"
TEXTS: Final = {
    **{row["what"]: row["foreign"] for row in ROWS if row["foreign"]},
    "begins like an option": "--help",
    "begins with plus": "+=more",
    "begins with minus": "-=less",
    "quotes around": "\"all\" 'of it'",
    "blanks around": "  two before, one behind ",
    "newlines around": "\nfirst\n\nlast\n",
    "tabs and returns": "a\tb\rc\x0bd\x0ce\t",
    "terminal escapes": "\x1b[31mred\x1b[0m\x07\x7f\x01",
    "backslashes": "a\\nb\\\\c\\",
    "percent": "100 % %s %n %j",
    "fields of Slurm": "AdminComment=x JobId=1\n   AdminComment=y ",
    "shell": "`id` $(id) ${HOME} ; rm -rf / | tee & * ? [a-z]",
    "unset in words": "N/A",
    "marks": "<0123456789abcdef> | , : ;",
    "directions and joiners": "a\u200b\u202eb 👩‍🚀 e\u0301",
    "no UTF-8": "Zo\udceb \udcff\udcfe\udc80",
    "30,000 characters": "long " * 6000,
}
WRITES: Final = 25


def backend(site: Site) -> SlurmCommands:
    return SlurmCommands(SlurmSection(conf=str(site.cluster.slurm_conf)), timeout_s=30)


def history_of(site: Site, job: int) -> Any:
    """What ``slurm-pfi job`` tells of a run that has ended."""
    wait_as("the run is in the history", lambda: _ended(site, job) is not None)
    return _ended(site, job)


def _ended(site: Site, job: int) -> Any:
    done = site.cli("job", str(job), "--json", check=False)
    told = json.loads(done.stdout) if done.returncode == 0 else None
    return told if told is not None and told["ended_unix_s"] is not None else None


def test_whatever_others_wrote_stays_byte_for_byte_beside_every_new_tag(site: Site) -> None:
    """With a job that the controller leaves alone, for it has no GPU."""
    job = site.cluster.sbatch("#!/bin/sh\nexec sleep 600\n")
    site.cluster.wait_job_state(job, "RUNNING")
    second = replace(TAG, loss=0.25, capped_s=900.0)

    async def write_both(slurm: SlurmCommands, known: JobInfo, text: str) -> list[str]:
        assert await slurm.set_admin_comment(str(job), text) == Updated()
        left = []
        for tag in (TAG, second):
            done = await write_tag(slurm, known, tag)
            assert done.outcome == "written", done
            comment = await slurm.admin_comment(job)
            assert isinstance(comment, AdminComment)
            left.append(comment.text)
        return left

    async def scenario() -> dict[str, list[str]]:
        slurm = backend(site)
        known = await slurm.job(job)
        assert isinstance(known, JobInfo)
        return {what: await write_both(slurm, known, text) for what, text in TEXTS.items()}

    for what, left in asyncio.run(scenario()).items():
        assert left == [f"{TEXTS[what]} {format_tag(tag)}" for tag in (TAG, second)], what


def test_beside_a_busy_writer_no_text_is_torn_or_doubled(site: Site) -> None:
    """Slurm has no compare-and-set: a note may be lost in the milliseconds of a write, but no more."""
    job = site.cluster.sbatch("#!/bin/sh\nexec sleep 600\n")
    site.cluster.wait_job_state(job, "RUNNING")
    slurm, tags = backend(site), [replace(TAG, energy_wh=number) for number in range(WRITES)]
    notes = [f"{JS1} {number}" for number in range(WRITES)]
    seen: list[str] = []

    async def rival() -> None:
        for note in notes:
            assert await slurm.set_admin_comment(str(job), note) == Updated()

    async def ours(known: JobInfo) -> list[str]:
        outcomes: list[str] = []
        for tag in tags:
            done = await write_tag(slurm, known, tag)
            outcomes.append(done.outcome)
            comment = await slurm.admin_comment(job)
            assert isinstance(comment, AdminComment)
            seen.append(comment.text)
        return outcomes

    async def scenario() -> list[str]:
        known = await slurm.job(job)
        assert isinstance(known, JobInfo)
        outcomes, _ = await asyncio.gather(ours(known), rival())
        assert (await write_tag(slurm, known, TAG)).outcome == "written"
        return outcomes

    outcomes = asyncio.run(scenario())
    assert set(outcomes) <= {"written", "raced"}
    whole = {
        f"{note}{tag}" for note in ["", *notes] for tag in ["", *(f" {format_tag(tag)}" for tag in tags)]
    }
    assert {f" {text}" if text.startswith("pfi=") else text for text in seen} <= whole
    assert shown_whole(site, job).endswith(f" {format_tag(TAG)}")


def test_the_texts_of_the_field_survive_the_controller_and_are_in_sacct(site: Site) -> None:
    rows = [row for row in ROWS if row["what"] != "not set"][:8]
    jobs = {hold_job(site, row["before"]): row for row in rows}
    wait_as(
        "all have their tag",
        lambda: all(_is_beside(shown_whole(site, job), row["foreign"]) for job, row in jobs.items()),
        40,
    )
    end(site, *map(str, jobs))
    for job, row in jobs.items():
        kept = accounted(site, str(job))
        assert _is_beside(kept, row["foreign"]), (row["what"], kept)
    tags = site.status()["tags"]
    assert tags["written"] >= len(jobs)
    assert (tags["not_rewritable"], tags["unavailable"], tags["trouble"]) == (0, 0, "")


def shown_whole(site: Site, job: int) -> str:
    """The AdminComment as the backend reads it, newlines too."""
    comment = asyncio.run(backend(site).admin_comment(job))
    assert isinstance(comment, AdminComment), comment
    return comment.text


def _is_beside(text: str, foreign: str) -> bool:
    rest = text.removeprefix(f"{foreign} ") if foreign else text
    return rest.startswith("pfi=") and " " not in rest and find_tag(rest) is not None


def test_components_of_a_heterogeneous_job_have_a_tag_each_to_the_end(site: Site) -> None:
    second = ["--gres=gpu:1", "--nodes=1", "--partition=main"]
    first = site.submit(TRAIN, gpus=1, flex="high", more=[":", *second])
    parts = [f"{first}+0", f"{first}+1"]
    site.cluster.wait_job_state(first, "RUNNING")
    for part in parts:
        write_note(site, part, f"note of {part}")
    wait_as("both have their tag", lambda: all(is_tagged(shown(site, p), f"note of {p}") for p in parts), 30)
    end(site, str(first))
    for part in parts:
        assert is_tagged(accounted(site, part), f"note of {part}")


def test_a_requeued_job_shows_nothing_of_its_last_run_as_its_own(site: Site) -> None:
    note = "ops: keep this"
    job = hold_job(site, note)
    site.wait_training(job)
    wait_seen(site, job)
    set_limit(site, 4000)
    wait_as("its tag tells of a cap", lambda: _tag(site, job).capped_s > 0)
    site.cluster.requeue(job)
    wait_as("the tag is the new run's", lambda: _tag(site, job).restart == 1, 30)
    text = wait_tagged(site, str(job), note)
    assert text.endswith(f";restart={_tag(site, job).restart};sim=yes")
    told = json.loads(site.cli("job", f"{job}.0", "--json").stdout)
    assert find_tag(told["tag"]) is not None
    assert ";restart=" not in told["tag"]
    end(site, str(job))
    # The accounting has both runs, each with what stood there at its end.
    wait_as("sacct knows both", lambda: len(site.cluster.sacct(str(job), "AdminComment")) == 2, 30)
    wait_as(
        "both are over",
        lambda: [row[0].split()[0] for row in site.cluster.sacct(str(job), "State")][-1] == "CANCELLED",
    )
    of_run = [find_tag(row[0]) for row in site.cluster.sacct(str(job), "AdminComment")]
    assert [tag.restart for tag in of_run if tag is not None] == [0, 1]
    assert all(row[0].startswith(f"{note} pfi=") for row in site.cluster.sacct(str(job), "AdminComment"))


def _tag(site: Site, job: int) -> Tag:
    tag = find_tag(shown(site, str(job)))
    return TAG if tag is None else tag


def test_tags_survive_a_restart_of_slurmctld_and_go_on_after_it(site: Site) -> None:
    job = hold_job(site, "note")
    site.wait_training(job)
    wait_seen(site, job)
    wait_tagged(site, str(job), "note")
    site.cluster.stop_slurmctld()
    site.cluster.start_slurmctld()
    wait_registered(site)
    assert is_tagged(shown(site, str(job)), "note")
    set_limit(site, 4000)
    try:
        wait_as("it is written anew", lambda: _tag(site, job).capped_s > 0, 30)
    except ClusterError as error:
        raise AssertionError(f"{error}: {site.status()['tags']}, {site.jobs()[job]}") from error
    wait_tagged(site, str(job), "note")


def test_another_tool_that_takes_the_field_at_the_jobs_end_has_it_and_we_tell_from_our_own_record(
    site: Site,
) -> None:
    job = site.submit(TRAIN, gpus=1, flex="high")
    site.wait_training(job)
    wait_seen(site, job)
    wait_as("it has its tag", lambda: shown(site, str(job)).startswith("pfi="))
    end(site, str(job))
    accounted(site, str(job))
    told = history_of(site, job)
    written = site.status()["tags"]["written"]
    command = ["sacctmgr", "-i", "modify", "job", "where", f"jobid={job}", "set", f"admincomment={JS1}"]
    site.cluster.run(command, user=getpass.getuser())

    def theirs() -> bool:
        # sacctmgr before 23.02 writes lower case.
        return [row[0].lower() for row in site.cluster.sacct(str(job), "AdminComment")] == [JS1.lower()]

    wait_as("sacct has the other tool's text alone", theirs)
    own = find_tag(told["tag"])
    assert own is not None
    assert own.flex == "high"
    again = json.loads(site.cli("job", str(job), "--json").stdout)
    assert again["tag"] == told["tag"]
    assert site.status()["tags"]["written"] == written
    assert theirs()
