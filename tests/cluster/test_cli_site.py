"""The command line on a real site: what admins read of a cluster, its runs, a limit and the installation."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from typing import Any

import pytest

from testbed import gpus
from testbed.cluster import wait_until
from testbed.processes import submitter
from testbed.site import Site

from ..site_fixture import TRAIN, small_site

pytestmark = pytest.mark.cluster
SITE_OPTIONS = small_site()


def on_a_terminal(site: Site, *arguments: str, columns: int = 80) -> str:
    """What a terminal of this width is sent."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "slurm_pfi", "--config", str(site.config_file), *arguments],
        env={**environment, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError), os.fdopen(ours, "rb", buffering=0) as terminal:
            while part := terminal.read(65536):  # ends with EIO when the last writer is gone
                seen += part
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0
    return seen.decode().replace("\r\n", "\n")


def plain(text: str) -> list[str]:
    """Without colours, the lines that are not empty."""
    return [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]


def doctor(site: Site, node: str) -> tuple[int, dict[str, Any]]:
    """The doctor's answer on a simulated node."""
    done = subprocess.run(
        [sys.executable, "-m", "slurm_pfi", "doctor", "--node-name", node, "--json"],
        env={
            **site.cluster.client_env,
            "SLURM_PFI_CONF": str(site.config_file),
            **gpus.nvml_environment(site.sim_dir(node)),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout)


def test_status_and_jobs_fit_a_terminal_and_are_plain_in_a_pipe(site: Site) -> None:
    low = site.submit(TRAIN, gpus=2, flex="none", where="n1")
    medium = site.submit(TRAIN, gpus=2, flex="medium", where="n1")
    site.wait_training(low, medium)
    wait_until(
        lambda: all(run["rate_per_s"] for run in site.jobs().values()), 20, "both runs tell their rate"
    )

    for arguments in (["status"], ["jobs"], ["limit", "show"]):
        shown = on_a_terminal(site, *arguments)
        assert all(len(line) <= 80 for line in plain(shown)), shown
        assert "\x1b" not in site.cli(*arguments).stdout

    assert "\x1b[1m" in on_a_terminal(site, "status"), "a terminal gets its headings in bold"
    lines = plain(on_a_terminal(site, "jobs"))
    assert lines[0].split()[0] == "JOB"
    of_job = {line.split()[0]: line for line in lines[1:3]}
    assert set(of_job) == {str(low), str(medium)}
    assert " low " in of_job[str(low)]
    assert "none is not allowed here" in "\n".join(lines), "a flex read otherwise is told"
    wide = site.cli("jobs").stdout
    assert submitter(None).pw_name in wide
    assert len(json.loads(site.cli("jobs", "--json").stdout)) == 2
    status = json.loads(site.cli("status", "--json").stdout)
    assert {node["state"] for node in status["nodes"]} == {"ok"}


def test_a_limit_says_at_once_what_it_means(site: Site) -> None:
    set_ = site.cli("limit", "set", "7kW", "--for", "1h").stdout.splitlines()
    assert set_[0].startswith("limit manual revision ")
    assert "7000 W (economic)" in set_[0]
    assert "all GPU caps together: 5000 W, without a limit 5600 W" in set_[1]
    assert re.fullmatch(r"in force now, until .* \(in 60 min\)", set_[2])
    wait_until(lambda: site.status()["window"], 5, "a window is open")
    shown = site.cli("limit", "show").stdout
    assert re.search(r"manual +\d+ +economic +uid \d+ +7000 W", shown)
    assert "binds now: 7000 W (manual)" in shown

    impossible = site.cli("limit", "set", "3kW", "--emergency").stdout
    assert "it CANNOT be held now: 600 W short, with every run as low as it goes" in impossible
    assert "until 'slurm-pfi limit clear'" in impossible
    assert "it binds nothing" in site.cli("limit", "set", "50kW").stdout
    later = site.cli("limit", "set", "7kW", "--from", "1h", "--for", "30m").stdout
    assert "(in 60 min), until" in later

    assert site.cli("limit", "clear").stdout == "cleared: manual\n"
    again = site.cli("limit", "clear", check=False)
    assert (again.returncode, again.stdout) == (1, "")
    assert "there is no limit 'manual'" in again.stderr
    assert site.cli("limit", "show").stdout == "no limit is set\n"


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_the_doctor_finds_a_whole_site_in_order(site: Site, node: str) -> None:
    code, answer = doctor(site, node)
    told = {check["check"]: check for check in answer["checks"]}
    assert code == 0, [check for check in answer["checks"] if check["outcome"] == "fail"]
    for name in (
        *(
            "config",
            "slurm commands",
            "slurmctld",
            "running config",
            "slurm user",
            "GresTypes",
            "prolog-flags",
        ),
        *("prolog", "epilog", "sbatch plugin", "node sets", "nvml", "gpu positions", "controller", "agent"),
    ):
        assert told[name]["outcome"] == "ok", told[name]
    assert "4 GPUs" in told["nvml"]["found"]
    assert told["gpu-order"]["found"].startswith("on n2 "), "the scrambled node is named"


def test_the_doctor_names_what_is_broken(site: Site) -> None:
    hook = site.cluster.layout.hooks / "slurm-pfi-epilog"
    hook.chmod(0o644)
    try:
        with gpus.planted(site.sim_dir("n1")) as planted:
            planted.poke("persistence", 0)
            code, answer = doctor(site, "n1")
            planted.poke("persistence", 1)
    finally:
        hook.chmod(0o755)
    assert code == 1
    told = {check["check"]: check for check in answer["checks"] if check["outcome"] != "ok"}
    assert "is not an executable file: Slurm drains the node" in told["epilog"]["found"]
    assert told["epilog"]["todo"].startswith("chmod 0755")
    assert told["persistence"]["outcome"] == "warn"
    assert "a cap is lost" in told["persistence"]["found"]
