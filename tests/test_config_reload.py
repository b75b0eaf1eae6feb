"""F4: a bad config file at start and at SIGHUP, for both daemons: all or nothing, and a message for the admin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from slurm_pfi.bus.asking import ask
from testbed.lone_node import LoneNode, wait_for

DATA: Final = Path(__file__).parent / "data" / "config"
REFUSED: Final = {
    "bad_syntax": ["not valid TOML", "line 2"],
    "bad_type": ["line 4", "policy.reserve_w", "expected a number, got text in quotes"],
    "bad_value": ["line 4", "times.cycle_s = 0", "expected a number > 0"],
    "duplicate_section": ["policy", "line 6"],
    "duplicate_key": ["line 5"],
    "unknown_key": ["line 4", "policy.reserv_w", "did you mean reserve_w?"],
}
ACCEPTED: Final = ("integer_for_float", "bom_and_crlf", "good")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LoneNode]:
    made = LoneNode(tmp_path)
    try:
        yield made
    finally:
        made.close()


def _in_place_of_its_first_line(name: str, base: str) -> bytes:
    """The file of the test data with the site's own sections after it, which a reload must not take either.

    Its own ``[times]`` or ``[policy]`` stays alone: the site's sections are others.
    """
    text = (DATA / f"{name}.toml").read_bytes()
    ending = b"\r\n" if b"\r\n" in text else b"\n"
    rest = base.partition("\n")[2].replace("\n", ending.decode()).encode()
    return text.replace(b'cluster = "lab"', b'cluster = "c"') + ending + rest


def _status(site: LoneNode) -> dict[str, Any]:
    found: dict[str, Any] = ask(site.paths.control, "status").data
    return found


def test_f4_the_agent_keeps_its_whole_config_when_a_file_is_bad(site: LoneNode) -> None:
    base = site.config.read_text()
    site.config.write_text(base + "[times]\nreport_s = 4\n")  # neither the default nor what bad files say
    agent = site.start()
    before = _status(site)["settings"]
    for name, parts in REFUSED.items():
        # A value that would change if part of the file came into force.
        bad = _in_place_of_its_first_line(name, base).decode()
        if name != "bad_value":
            bad += "[times]\nreport_s = 1.5\n"
        site.config.write_text(bad)
        agent.send_signal(signal.SIGHUP)
        said = wait_for(partial(_config_fault, site, parts), f"the fault of {name}")
        assert said.startswith(f"the old settings stay in force: {site.config}: ") and said.isprintable()
        assert _status(site)["settings"] == before
        assert agent.poll() is None
        assert "Traceback" not in site.log.read_text()
    for name in ACCEPTED:
        site.config.write_bytes(_in_place_of_its_first_line(name, base))
        agent.send_signal(signal.SIGHUP)
        wait_for(lambda: not _config_fault(site, []), f"{name} is taken")
    site.config.write_text(base + "[times]\nreport_s = 1.5\n")
    agent.send_signal(signal.SIGHUP)
    wait_for(lambda: _status(site)["settings"]["report_ns"] == 1_500_000_000, "a good file in force")
    assert {**_status(site)["settings"], "report_ns": before["report_ns"]} == before
    assert "fault over what=" in site.log.read_text()


def _config_fault(site: LoneNode, parts: list[str]) -> str:
    """What the agent says of its config, if it names all of this."""
    for fault in _status(site)["faults"]:
        if "the old settings stay in force" in fault and all(part in fault for part in parts):
            return str(fault)
    return ""


def test_what_needs_a_restart_is_named_and_stays_as_it_was(site: LoneNode) -> None:
    agent = site.start()
    site.config.write_text(
        site.config.read_text().replace('cluster = "c"', 'cluster = "other"').replace("/ctl", "/ctl2")
    )
    agent.send_signal(signal.SIGHUP)
    line = wait_for(
        lambda: [line for line in site.log.read_text().splitlines() if "at the next start only" in line],
        "said",
    )[0]
    assert "cluster" in line and "controller.run_dir" in line
    assert _status(site)["settings"]["cluster"] == "c"


@pytest.mark.parametrize("name", REFUSED)
def test_f4_the_agent_does_not_start_with_a_bad_file(name: str, site: LoneNode) -> None:
    site.config.write_bytes(_in_place_of_its_first_line(name, site.config.read_text()))
    done = site.ask("run")
    assert done.returncode == 2
    for part in [str(site.config), *REFUSED[name]]:
        assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr


def test_f4_the_controller_keeps_its_whole_config_when_a_file_is_bad(tmp_path: Path) -> None:
    config = tmp_path / "pfi.toml"
    base = (
        f'cluster = "c"\n[controller]\nuser = "root"\nstate_dir = "{tmp_path}"\nrun_dir = "{tmp_path}/run"\n'
        '[[node_set]]\nnames = "n1"\ngpus = 4\ngpu_max_w = 700\noverhead_w = 100\n'
    )
    config.write_text(base)
    log = tmp_path / "log"
    with log.open("wb") as stream:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "slurm_pfi", "controller"],
            env={**os.environ, "SLURM_PFI_CONF": str(config)},
            stdout=stream,
            stderr=stream,
        )
    try:
        wait_for(lambda: "commanding" in log.read_text() or daemon.poll() is not None, "the start", 60.0)
        for name, parts in REFUSED.items():
            seen = len(log.read_text())
            config.write_bytes(_in_place_of_its_first_line(name, base))
            daemon.send_signal(signal.SIGHUP)
            said = wait_for(partial(_since, log, seen), f"the fault of {name}")
            assert "config not reloaded, the old one stays in force" in said
            assert all(part in said for part in [str(config), *parts])
            assert daemon.poll() is None and "Traceback" not in said
        seen = len(log.read_text())
        config.write_bytes(_in_place_of_its_first_line("integer_for_float", base))
        daemon.send_signal(signal.SIGHUP)
        wait_for(lambda: "config reloaded" in log.read_text()[seen:], "a good file is taken")
    finally:
        daemon.kill()
        daemon.wait()


def _since(log: Path, seen: int) -> str:
    return log.read_text()[seen:]
