"""A capped batch job says in its own output what caps cost it, where the site has switched that on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from testbed.processes import submitter
from testbed.site import Site

from ..site_fixture import TRAIN, set_limit, small_site, wait_as, wait_seen

pytestmark = [pytest.mark.cluster, pytest.mark.generations]

SITE_OPTIONS = small_site(times={"tag_refresh_s": 1})
SAYS = "slurm-pfi: caps held this job down for "


@pytest.fixture(scope="module", autouse=True)
def _plugin_says_it(site: Site) -> Iterator[None]:
    """The half of the switch that lies on nodes."""
    plugstack = site.cluster.layout.etc / "plugstack.conf"
    text = plugstack.read_text()
    plugstack.write_text(f"{text.rstrip()} job_line={site.cluster.state_dir}\n")
    yield
    plugstack.write_text(text)


@pytest.fixture
def on(site: Site) -> Iterator[None]:
    """The other half."""
    text = site.config_file.read_text()
    site.config_file.write_text(f"{text}\n[tag]\njob_line = true\n")
    site.send_signal("controller", signal.SIGHUP)
    yield
    site.config_file.write_text(text)
    site.send_signal("controller", signal.SIGHUP)


def capped_job(site: Site, *more: str, flex: str = "high") -> int:
    """A job whose tag tells that a cap held it down."""
    job = site.submit(TRAIN, gpus=1, flex=flex, more=more)
    wait_seen(site, job)
    set_limit(site, 4000)
    wait_as("the tag tells of a cap", lambda: ";capped=1m;" in (site.jobs()[job]["tag"] or ""))
    return job


def lines_kept(site: Site) -> list[str]:
    """The lines that agents keep ready."""
    folders = [site.node_dir(node) / "lines" for node in site.node_names]
    return [path.name for folder in folders if folder.exists() for path in folder.iterdir()]


def end(site: Site, job: int) -> str:
    """Cancel the job; its output when all of it is over."""
    site.cluster.run(["scancel", str(job)])
    site.cluster.wait_job_state(job, "CANCELLED")
    wait_as("its processes are gone", lambda: not site.cluster.squeue("-j", str(job)))
    return site.cluster.job_output(job)


def test_it_is_off_by_default(site: Site) -> None:
    job = capped_job(site)
    assert lines_kept(site) == []
    assert SAYS not in end(site, job)


@pytest.mark.usefixtures("on")
def test_a_capped_job_ends_with_the_line(site: Site) -> None:
    job = capped_job(site)
    wait_as("its line is kept", lambda: lines_kept(site) == [f"{job}.0"])
    output = end(site, job)
    (line,) = [line for line in output.splitlines() if "slurm-pfi:" in line]
    assert line.startswith(f"{SAYS}less than 2 min (flex high), ")
    assert line.endswith(f"more: slurm-pfi job {job}")
    assert output.rstrip().endswith(line)
    wait_as("no line is left", lambda: lines_kept(site) == [])


@pytest.mark.usefixtures("on")
def test_it_comes_where_stderr_goes_and_steps_have_none(site: Site) -> None:
    """The user's own file, by the descriptor that slurmstepd has for its own messages; it stays the user's."""
    errors = site.cluster.layout.out / "errors.txt"
    job = capped_job(site, f"--error={errors}")
    wait_as("its line is kept", lambda: lines_kept(site) == [f"{job}.0"])
    step = site.cluster.run(["srun", f"--jobid={job}", "--overlap", "true"])
    assert SAYS not in step.stderr
    output = end(site, job)
    assert SAYS not in output
    assert errors.read_text().count(SAYS) == 1
    assert errors.stat().st_uid == (submitter(None).pw_uid if os.getuid() == 0 else os.getuid())


@pytest.mark.usefixtures("on")
def test_an_output_that_takes_nothing_holds_up_no_job(site: Site) -> None:
    """slurmstepd's own descriptor does not wait: a full pipe that nobody empties costs the line."""
    pipe = site.cluster.layout.out / "full"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    full = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        job = capped_job(site, f"--error={pipe}")
        wait_as("its line is kept", lambda: lines_kept(site) == [f"{job}.0"])
        with pytest.raises(BlockingIOError):
            while os.write(full, b"." * 4096):
                pass
        end(site, job)
    finally:
        os.close(full)
    assert site.cluster.run(["sinfo", "-h", "-o", "%T"]).stdout.split() == ["idle"]


@pytest.mark.usefixtures("on")
def test_a_job_that_no_cap_held_has_none(site: Site) -> None:
    job = site.submit(TRAIN, gpus=1, flex="low")
    wait_seen(site, job)
    wait_as("it is tagged", lambda: bool(site.jobs()[job]["tag"]))
    assert lines_kept(site) == []
    assert "slurm-pfi:" not in end(site, job)


@pytest.mark.usefixtures("on")
def test_a_missing_folder_costs_the_line_and_nothing_else(site: Site) -> None:
    plugstack = site.cluster.layout.etc / "plugstack.conf"
    text = plugstack.read_text()
    plugstack.write_text(text.replace("job_line=/", "job_line=/nowhere/"))
    try:
        job = capped_job(site)
        output = end(site, job)
    finally:
        plugstack.write_text(text)
    assert "slurm-pfi" not in output
    assert "error: spank" not in output
