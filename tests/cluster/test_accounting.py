"""What Slurm itself keeps of us: the tag beside the text of others, while a job runs and in sacct after its end.

And the other way round: what a job's comment says of its flex, where no flag was given.
"""

from __future__ import annotations

from typing import Final

import pytest

from slurm_pfi.slurm.tag import find_tag
from testbed.cluster import ClusterError
from testbed.site import Site

from ..site_fixture import TRAIN, set_limit, small_site, wait_as, wait_seen

pytestmark = pytest.mark.cluster

SITE_OPTIONS = small_site(accounting=True, times={"tag_refresh_s": 2})
NOTE: Final = (
    'ticket 4711: "ops" said {"owner": "Zoë", "why": [1, 2]} 100% \\o/ 電力 🙂; pfi=none of yours, a=b'
)


def hold_job(site: Site, note: str, *more: str) -> int:
    """A job with an operator's note that is there before our first tag."""
    job = site.submit(TRAIN, gpus=1, flex="high", more=["--hold", *more])
    write_note(site, str(job), note)
    site.cluster.scontrol("release", str(job))
    return job


def write_note(site: Site, job: str, note: str) -> None:
    site.cluster.scontrol("update", f"jobid={job}", f"admincomment={note}")


def shown(site: Site, job: str, field: str = "AdminComment") -> str:
    """A text as ``scontrol show job`` has it, also for some minutes after the end."""
    start = f"   {field}="
    lines = site.cluster.scontrol("show", "job", job).splitlines()
    found = [line.removeprefix(start) for line in lines if line.startswith(start)]
    return found[0].removesuffix(" ") if found else ""  # scontrol adds the blank


def is_tagged(text: str, note: str) -> bool:
    """Whether the text is the note, a blank, and one tag of ours."""
    rest = text.removeprefix(f"{note} ")
    return text.startswith(f"{note} pfi=") and " " not in rest and find_tag(rest) is not None


def wait_tagged(site: Site, job: str, note: str) -> str:
    """Wait until our tag stands behind the note; returns both."""
    try:
        wait_as(f"{job} has its tag", lambda: is_tagged(shown(site, job), note))
    except ClusterError as error:
        raise AssertionError(f"{error}: {shown(site, job)!r}") from error
    return shown(site, job)


def accounted(site: Site, job: str) -> str:
    """The AdminComment in sacct, once the accounting knows of the job's end."""
    wait_as(
        f"sacct knows that {job} has ended",
        lambda: [row[0].split()[0] for row in site.cluster.sacct(job, "State")] == ["CANCELLED"],
    )
    return site.cluster.sacct(job, "AdminComment")[0][0]


def end(site: Site, *jobs: str) -> None:
    site.cluster.run(["scancel", *jobs])


def test_a_cluster_with_accounting_starts_soon_and_stores_what_admins_note(site: Site) -> None:
    cost_s = site.cluster.accounting_start_s
    assert cost_s is not None
    print(f"database and slurmdbd: {cost_s:.1f} s")  # noqa: T201
    assert cost_s < 15
    assert {"mariadbd", "slurmdbd"} <= set(site.cluster.daemon_names)


def test_the_note_of_others_and_our_last_tag_are_in_sacct(site: Site) -> None:
    job = hold_job(site, NOTE)
    site.wait_training(job)
    wait_seen(site, job)
    first = wait_tagged(site, str(job), NOTE)
    # What is refreshed while a cap is in force replaces our tag, and the note stays.
    set_limit(site, 4000)
    wait_as("the job is capped", lambda: site.jobs()[job]["cap_mw"] < 700_000)
    write_note(site, str(job), f"{NOTE} and more")
    wait_tagged(site, str(job), f"{NOTE} and more")
    assert site.cluster.sacct(str(job), "AdminComment") == [[""]]  # sacct learns of it at the end alone
    end(site, str(job))
    kept = accounted(site, str(job))
    assert is_tagged(kept, f"{NOTE} and more"), kept
    assert kept == shown(site, str(job))
    assert first.count("pfi=") == kept.count("pfi=") == 2  # one of them is the note's


def test_each_task_of_an_array_keeps_its_own(site: Site) -> None:
    array = hold_job(site, "all tasks", "--array=0-1")
    tasks = [f"{array}_0", f"{array}_1"]
    wait_as("both run", lambda: all("JobState=RUNNING" in _show(site, task) for task in tasks))
    for task in tasks:
        wait_tagged(site, task, "all tasks")
    write_note(site, tasks[1], "task 1")
    set_limit(site, 4400)
    wait_tagged(site, tasks[1], "task 1")
    end(site, tasks[1])
    kept = accounted(site, tasks[1])
    assert is_tagged(kept, "task 1")
    assert kept == shown(site, tasks[1])
    assert is_tagged(shown(site, tasks[0]), "all tasks")
    end(site, tasks[0])
    assert is_tagged(accounted(site, tasks[0]), "all tasks")


def test_the_comment_gives_the_flex_and_stays_as_it_was(site: Site) -> None:
    comment = "--comment=x pfi:10% y"
    asked = site.submit(TRAIN, gpus=1, more=[comment])
    both = site.submit(TRAIN, gpus=1, flex="high", more=[comment])
    wrong = site.submit(TRAIN, gpus=1, more=["--comment=pfi:11x"])
    wait_as("all are read", lambda: all(_read(site, job) for job in (asked, both, wrong)))
    jobs = site.jobs()
    assert (jobs[asked]["flex"], jobs[asked]["user_flex"], jobs[asked]["note"]) == ("10%", "10%", "")
    assert (jobs[asked]["flex_source"], jobs[both]["flex_source"], jobs[wrong]["flex_source"]) == (
        "comment",
        "flag",
        "",
    )
    assert (jobs[both]["flex"], jobs[both]["user_flex"]) == ("high", "high")
    assert jobs[both]["note"] == "--power-flex=high counts, not pfi:10% in the comment"
    assert (jobs[wrong]["flex"], jobs[wrong]["user_flex"]) == ("auto", "")
    assert jobs[wrong]["note"] == "pfi:11x in the comment is not a flex; the site's default counts"
    wait_as("the tag has it", lambda: ";flex=10%;" in shown(site, str(asked)))
    assert shown(site, str(asked), "Comment") == "x pfi:10% y"
    end(site, str(asked), str(both), str(wrong))
    accounted(site, str(asked))
    assert site.cluster.sacct(str(asked), "Comment") == [["x pfi:10% y"]]


def _read(site: Site, job: int) -> bool:
    shown_jobs = site.jobs()
    return job in shown_jobs and shown_jobs[job]["user"] is not None


def _show(site: Site, job: str) -> str:
    return site.cluster.scontrol("show", "job", job)
