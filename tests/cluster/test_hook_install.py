"""``slurm-pfi hooks install`` and ``remove`` on a real cluster, at both kinds of sites: jobs run, nothing drains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import mounts
from testbed.cluster import Cluster, ClusterOptions, wait_until
from testbed.cluster_files import find_program

pytestmark = [pytest.mark.cluster, pytest.mark.generations]
CLUSTER_OPTIONS = ClusterOptions(nodes=1, hooks=False, plugin=False)


class Host:
    """The node's side: its config, the command, slurm.conf as its admin edits it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.libexec = cluster.folder / "libexec"
        self.config = cluster.folder / "slurm-pfi.toml"
        self.plain = cluster.slurm_conf.read_text()
        self.config.write_text(
            f'cluster = "pfi"\n[[node_set]]\nnames = "n1"\ngpus = 8\ngpu_max_w = 700\noverhead_w = 1\n'
            f'[node]\nstate_dir = "{cluster.state_dir}"\nhook_log = "{cluster.layout.hook_log}"\n'
            f'[slurm]\nconf = "{cluster.slurm_conf}"\nbin_dir = "{Path(find_program("scontrol")).parent}"\n'
        )

    def hooks(self, *arguments: str, code: int = 0) -> str:
        """What the command says, whose exit code must be ``code``."""
        command = [sys.executable, "-m", "slurm_pfi", "--config", str(self.config), "hooks", *arguments]
        if arguments[0] != "check":
            command += ["--folder", str(self.libexec)]
        env = {**os.environ, "SLURMD_NODENAME": "n1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == code, done
        return done.stdout + done.stderr

    def configure(self, *lines: str) -> None:
        """Add to slurm.conf, and have all daemons read it."""
        self.cluster.slurm_conf.write_text("\n".join([self.plain, *lines, ""]))
        self.cluster.scontrol("reconfigure")

        def known() -> bool:
            shown = self.cluster.scontrol("show", "config")
            values = [line.partition("=")[2] for line in lines]
            named = re.findall(r"(?m)^(?:Prolog|Epilog)(?:\[\d+\])? += (/.*)$", shown)
            return sorted(named) == sorted(values)

        wait_until(known, 20, f"slurmctld runs with {lines}")
        self.cluster.wait_nodes_idle()

    def site_hook(self, path: Path) -> Path:
        """A hook of the site's own, which leaves a line."""
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho $SLURM_JOB_ID >>{self.ran}\n")
        path.chmod(0o755)
        return path

    @property
    def ran(self) -> Path:
        return self.cluster.folder / "ran"

    def job(self, logged: str = "") -> bool:
        """A job from start to end; whether it had a job file while it ran. ``logged``: the one line of the log."""
        jobs = self.cluster.state_dir / "n1/jobs"
        job = self.cluster.sbatch(f"#!/bin/sh\nls {jobs}\n", "--gres=gpu:1")
        self.cluster.wait_job_state(job, "COMPLETED")
        self.cluster.wait_nodes_idle()
        assert self.cluster.drained_nodes() == {}
        assert list(jobs.iterdir()) == []
        log = self.cluster.layout.hook_log
        assert log.read_text() == (f"<12>{logged}\n" if logged else "")
        log.write_text("")
        return f"{job}.0\n" in self.cluster.job_output(job)

    def site_ran(self) -> int:
        return len(self.ran.read_text().splitlines()) if self.ran.exists() else 0


@pytest.fixture
def host(module_cluster: Cluster) -> Iterator[Host]:
    made = Host(module_cluster)
    yield made
    made.configure()
    module_cluster.slurm_conf.write_text(made.plain)


def test_a_site_with_folders_of_hooks(host: Host) -> None:
    folders = {hook: host.cluster.layout.etc / f"{hook.lower()}.d" for hook in ("Prolog", "Epilog")}
    for folder in folders.values():
        host.site_hook(folder / "10-site")
    host.configure(*(f"{hook}={folder}/*" for hook, folder in folders.items()))
    assert not host.job()
    host.hooks("install", "--dry-run")
    assert not host.job(), "a dry run puts nothing into force"
    host.hooks("install")
    assert host.job(), "in force at once, without a word to slurm.conf"
    assert host.site_ran() == 6
    assert all(
        found["outcome"] in ("ok", "warn") for found in json.loads(host.hooks("check", "--json"))["checks"]
    )
    # Out again while jobs come and go: Slurm may be about to run what is to be removed.
    before = len(host.cluster.squeue("--states=all"))
    job = host.cluster.sbatch("#!/bin/sh\n:\n", "--array=1-60%4", "--output=/dev/null")
    host.hooks("remove")
    wait_until(lambda: host.cluster.squeue("--jobs", str(job)) == [], 60, "all jobs are done")
    host.cluster.wait_nodes_idle()
    assert len(host.cluster.squeue("--states=all")) > before
    assert host.cluster.drained_nodes() == {}
    assert set(host.cluster.squeue("--jobs", str(job), "--array", "--states=all", "--format=%T")) == {
        "COMPLETED"
    }
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders.values()] == [
        ["10-site"]
    ] * 2
    for left in (host.cluster.state_dir / "n1/jobs").iterdir():
        left.unlink()  # of runs whose epilog came after ours had gone; the agent hears of their end from slurmctld
    assert not host.job()


def test_where_nothing_can_be_run_nothing_is_installed(host: Host) -> None:
    folder = host.cluster.folder / "noexec"
    folder.mkdir()
    host.cluster.slurm_conf.write_text(f"{host.plain}Prolog={folder}/*\n")  # not put into force
    with mounts.tmpfs(folder, "noexec"):
        assert "is mounted noexec" in host.hooks("install", code=1)
        assert list(folder.iterdir()) == []
        host.site_hook(folder / "10-site")
        assert "mounted noexec: Slurm drains" in host.hooks("check", code=1)


def test_a_site_with_one_script(host: Host) -> None:
    scripts = {
        hook: host.site_hook(host.cluster.layout.etc / f"{hook.lower()}.sh") for hook in ("Prolog", "Epilog")
    }
    lines = [f"{hook}={path}" for hook, path in scripts.items()]
    host.configure(*lines)
    seen = host.site_ran()
    said = host.hooks("install", "--wrapper")
    assert not host.job(), "nothing is in force before the admin says so"
    host.configure(*re.findall(r"(?m)^    ((?:Pro|Epi)log=.*)$", said))
    assert host.job()
    assert host.site_ran() == seen + 4, "the site's own run as ever"
    # What slurm.conf does not name itself may go missing, or lose its mode, and the job runs.
    ours = host.libexec / "slurm-pfi-prolog"
    for mode in (0o644, None):
        if mode is None:
            ours.unlink()
        else:
            ours.chmod(mode)
        assert not host.job(logged=f"{ours}: cannot be run")
        host.hooks("install")
        assert ours.stat().st_mode & 0o777 == 0o755
    assert host.job()
    assert "is still needed" in host.hooks("remove", code=1)
    host.cluster.slurm_conf.write_text("\n".join([host.plain, *lines, ""]))
    assert "was not told of the edit yet" in host.hooks("remove", code=1)
    assert host.job()
    host.configure(*lines)
    host.hooks("remove")
    assert list(host.libexec.iterdir()) == []
    assert not host.job()


def test_a_line_in_the_sites_script(host: Host) -> None:
    scripts = {
        hook: host.site_hook(host.cluster.layout.etc / f"{hook.lower()}.sh") for hook in ("Epilog", "Prolog")
    }
    host.configure(*(f"{hook}={path}" for hook, path in scripts.items()))
    calls = re.findall(r"(?m)^    (/\S+ \|\| :)$", host.hooks("install"))
    for path, line in zip(scripts.values(), calls, strict=True):
        path.write_text(f"{path.read_text()}{line}\n")
    assert host.job()
    (host.libexec / "slurm-pfi-prolog").unlink()
    assert not host.job(), "a hook that is missing costs its job file only"
    host.hooks("install")
    assert "names it" in host.hooks("remove", code=1)
    for path in scripts.values():
        host.site_hook(path)
    host.hooks("remove")
    assert not host.job()


def test_a_site_without_hooks(host: Host) -> None:
    lines = re.findall(r"(?m)^    ((?:Pro|Epi)log=.*)$", host.hooks("install"))
    assert len(lines) == 2
    host.configure(*lines)
    assert host.job()
    path = host.libexec / "slurm-pfi-prolog"
    path.chmod(0o644)
    found = json.loads(host.hooks("check", "--json", code=1))["checks"]
    assert any("not an executable file: Slurm drains" in each["found"] for each in found)
    host.hooks("install")
    assert host.job(), "the mode is right again before a job came"
    host.configure()
    host.hooks("remove")
    assert not host.job()
