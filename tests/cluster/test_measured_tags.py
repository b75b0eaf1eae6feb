"""What a limit cost each job, as its tag says: measured, where its counter can be believed, and else not known."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Final

import pytest

from slurm_pfi.slurm.tag import Tag, find_tag
from testbed.demo.figures import Span, loss_since_start
from testbed.site import Site

from ..site_fixture import TRAIN, hold, set_limit, small_site, wait_as, wait_seen
from .test_accounting import accounted, end, hold_job, is_tagged, shown

pytestmark = pytest.mark.cluster

# Here counters stand alone, as on GPUs that tell no activity; test_measured_activity has both.
TIMES: Final = {"tag_refresh_s": 2, "learn_s": 2, "baseline_s": 5, "activity_s": 3600}
SITE_OPTIONS = small_site(accounting=True, times=TIMES)
NOTE: Final = 'ops: "keep" {"till": [1, 2]} 100% \\o/ 電力; pfi=none of yours'
PARKED_W: Final = 200
BESIDE_W: Final = 2000
GPUS: Final = 8


def cap_all(site: Site, watts: int, gpus: int) -> None:
    """A limit that leaves ``watts`` for each of so many GPUs: all others count at their park cap."""
    set_limit(site, BESIDE_W + (GPUS - gpus) * PARKED_W + gpus * watts)


def tag_of(site: Site, job: int) -> Tag | None:
    return find_tag(shown(site, str(job)))


def wait_measured(site: Site, *jobs: int) -> None:
    """Wait until the tags of all these jobs are measured."""

    def measured() -> bool:
        tags = [tag_of(site, job) for job in jobs]
        return all(tag is not None and tag.source == "measured" for tag in tags)

    wait_as("the tags are measured", measured, 30)


def wait_untold(site: Site, job: int) -> Tag:
    """A tag that says of the loss that it is not known."""

    def untold() -> bool:
        tag = tag_of(site, job)
        return tag is not None and tag.loss is None

    wait_as("the tag says that the loss is not known", untold)
    tag = tag_of(site, job)
    assert tag is not None
    return tag


def wait_fresh(site: Site, job: int) -> Tag:
    """A tag that was written a moment ago."""
    before = shown(site, str(job))
    wait_as("the tag is written anew", lambda: shown(site, str(job)) != before)
    tag = tag_of(site, job)
    assert tag is not None
    return tag


def training(site: Site, *jobs: int) -> Span:
    """Wait until the uncapped rate of these jobs is well known; returns the time in which all of them had it."""
    site.wait_training(*jobs)
    wait_seen(site, *jobs)
    hold(site, 6)
    return Span(max(site.tokens(job)[0][0] for job in jobs), time.monotonic_ns())


def told_loss(site: Site, job: int, before: Span) -> tuple[float | None, float]:
    """The loss in a tag that was written a moment ago, and that by the job's own log."""
    tag = wait_fresh(site, job)
    true_loss = loss_since_start(site.tokens(job), before, time.monotonic_ns())
    assert true_loss is not None
    print(f"{shown(site, str(job))}; by its own log {true_loss:.2%}")  # noqa: T201
    assert true_loss > 0.02, "nothing was lost: this proves little"
    return tag.loss, true_loss


def test_a_tag_says_what_a_limit_cost_while_it_runs_and_in_sacct(site: Site) -> None:
    job = hold_job(site, NOTE)
    before = training(site, job)
    first = tag_of(site, job)
    assert first is not None
    assert (first.source, first.capped_s) == ("default", 0)
    cap_all(site, 500, 1)
    hold(site, 25)
    loss, true_loss = told_loss(site, job, before)
    assert loss is not None
    assert abs(loss - true_loss) < 0.01
    text = shown(site, str(job))
    assert is_tagged(text, NOTE), text
    tag = find_tag(text)
    assert tag is not None
    assert tag.source == "measured", text
    assert tag.energy_wh is not None
    assert tag.energy_wh < 0
    end(site, str(job))
    kept = accounted(site, str(job))
    last = find_tag(kept)
    assert is_tagged(kept, NOTE), kept
    assert last is not None
    assert last.source == "measured"
    assert last.loss is not None
    assert abs(last.loss - true_loss) < 0.01


@pytest.mark.parametrize("watts", [610, 480])
def test_a_counter_that_lies_measures_nothing(site: Site, tmp_path: Path, watts: int) -> None:
    honest = [site.submit(TRAIN, gpus=1, flex="high", where=node) for node in ("n1", "n2")]
    slows = site.submit(TRAIN, gpus=1, flex="high", where="n2", lie=1 / 3)
    leaps = site.submit(TRAIN, gpus=1, flex="high", where="n2", lie=10)
    before = training(site, *honest, slows, leaps)
    cap_all(site, watts, 4)
    hold(site, 16)
    wait_measured(site, *honest)
    for job in (slows, leaps):
        tag = wait_untold(site, job)
        said = " ".join(site.cli("job", str(job)).stdout.split())
        (tmp_path / f"{job}.txt").write_text(said)
        assert tag.source == "default"
        assert "its counter is not believed: " in said
        assert "not known: its counter is not believed" in said
    for job in honest:
        loss, true_loss = told_loss(site, job, before)
        assert loss is not None
        assert abs(loss - true_loss) < 0.01


@pytest.mark.parametrize("in_window", [False, True])
def test_a_job_that_ends_at_once(site: Site, in_window: bool) -> None:
    if in_window:
        cap_all(site, 500, 1)
    job = site.submit(TRAIN, gpus=1, flex="high", seconds=0.2, more=["--job-name=short"])
    site.cluster.wait_job_state(job, "COMPLETED")
    hold(site, 3)
    done = site.cli("job", str(job), check=False)
    if done.returncode == 0:
        told = json.loads(site.cli("job", str(job), "--json").stdout)
        assert told["baseline_draw_mw"] is None
        assert told["cost"]["capped_s"] < 2
        assert (told["cost"]["loss_capped"], told["cost"]["saved_wh"] or 0) == (None, 0)
        assert told["ended_unix_s"] is not None
    else:
        assert (done.returncode, done.stdout) == (1, "")
        assert f"job {job} is not known" in done.stderr
    tag = tag_of(site, job)
    assert tag is None or (tag.source, tag.loss or 0) == ("default", 0)


def test_a_job_on_a_node_whose_agent_is_down(site: Site) -> None:
    assert site.kill("n2", signal.SIGTERM) == 0
    try:
        job = site.submit(TRAIN, gpus=1, flex="high", where="n2")
        beside = site.submit(TRAIN, gpus=1, flex="high", where="n1")
        site.wait_training(job, beside)
        wait_as(
            "n2 is silent",
            lambda: "silent" in {one["state"] for one in site.status()["nodes"] if one["name"] == "n2"},
        )
        wait_seen(site, beside)
        done = site.cli("job", str(job), check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"job {job} is not known" in done.stderr
        assert "What runs on n2 is not known: no agent is heard there" in done.stderr
        assert shown(site, str(job)) == ""
        forecast = json.loads(site.cli("what-if", "5%", "--json", check=False).stdout)
        assert forecast["standing"]["silent"] == ["n2"]
        assert forecast["uncapped"]["silent_mw"] == 4 * 700_000
        assert [run["job_id"] for run in forecast["runs"]] in ([], [beside])
    finally:
        site.start_agent("n2")
    wait_seen(site, job)
    wait_as("it has its tag", lambda: tag_of(site, job) is not None)
