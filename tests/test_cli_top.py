"""``slurm-pfi top``: the picture fits whatever the size, and the terminal is left as it was found."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from slurm_pfi.cli.top import gives_mw, render

from .site_answers import answering
from .test_controller_core import RUN, Site, gpu

AWAY = "NO ANSWER, this is 12 s old; trying again. nobody listens at /run/x/control.sock"
HOSTILE = "a\x1b[2J\x1b[31m\r\n[red]b[/red]\u202e\u200b\u7535\u529b\u7535\u529b\u7535\u529b\udcff"
LEAVES_SCREEN = b"\x1b[?1049l"
OWN_TERMINAL = (
    "import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "runpy.run_module('slurm_pfi', run_name='__main__')"
)
SHOWS_CURSOR = b"\x1b[?25h"


def node(number: int, **changes: Any) -> dict[str, Any]:
    whole = {
        "name": f"gpu{number:04d}",
        "mode": "enforce",
        "state": "ok",
        "age_s": 0.6,
        "gpus": 8,
        "gpus_declared": 8,
        "capped": 8,
        "enforced_mw": 3_840_000,
        "draw_mw": 3_700_000,
        "prior_unknown": [],
        "refused": "",
        "faults": [],
    }
    return {**whole, **changes}


def run(number: int, **changes: Any) -> dict[str, Any]:
    whole = {
        "run": f"lab:{number}.0",
        "job_id": number,
        "spec": str(number),
        "restart": 0,
        "user": f"user{number % 7}",
        "state": "admitted",
        "note": "",
        "nodes": [f"gpu{number:04d}"],
        "gpus": 8,
        "user_flex": "medium",
        "flex": "medium",
        "cap_mw": 480_000,
        "target_cap_mw": 480_000,
        "floor_mw": 430_000,
        "floor_passed": False,
        "draw_mw": 8 * 470_000,
        "baseline_draw_mw": 650_000 + 10_000 * number,
        "rate_per_s": 1234.5,
        "loss": 0.031,
    }
    return {**whole, **changes}


def status(nodes: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    window = {
        "limit_mw": 18_500_000,
        "limit_ids": ["manual"],
        "budget_mw": 15_000_000,
        "committed_mw": 14_900_000,
        "shortfall_mw": 0,
        "silent": [],
        "open_s": 700.0,
        "rebound": False,
        "class": "economic",
        "ends_in_s": 1500.0,
        **changes.pop("window", {}),
    }
    whole = {
        "cluster": "lab",
        "simulated": False,
        "epoch": 3,
        "off": False,
        "limits_known": True,
        "policy": "marginal",
        "window": window,
        "draw": {
            "gpus_mw": 14_100_000,
            "overhead_mw": 3_500_000,
            "site_mw": 17_600_000,
            "uncapped_worst_mw": 25_900_000,
        },
        "nodes": nodes,
    }
    return {**whole, **changes}


def drawn(
    state: dict[str, Any], runs: list[dict[str, Any]], width: int = 80, height: int = 24, away: str = ""
) -> list[str]:
    out = Console(file=io.StringIO(), width=width, height=height, highlight=False, color_system=None)
    out.print(render(state, runs, width, height, now_unix_s=1_800_000_000.0, away=away))
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().split("\n")
    assert lines.pop() == ""
    return lines


def assert_fits(lines: list[str], width: int, height: int) -> None:
    assert len(lines) <= height
    for line in lines:
        assert cell_len(line) <= width, line
        assert line.isprintable(), ascii(line)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
@pytest.mark.parametrize("nodes", [1, 12, 2000])
@pytest.mark.parametrize("runs", [0, 5, 1000])
@pytest.mark.parametrize("away", ["", AWAY])
def test_it_fits(width: int, height: int, nodes: int, runs: int, away: str) -> None:
    lines = drawn(status([node(i) for i in range(nodes)]), [run(i) for i in range(runs)], width, height, away)
    assert_fits(lines, width, height)
    text = "\n".join(line.rstrip() for line in lines)
    assert "limit  18.50 kW (economic, manual)\n       window open for 11 min, ends in 25 min\n" in text
    assert "95.1 % of the limit" in text
    assert f"NODES {nodes:,}: {nodes:,} ok" in text
    assert lines[-1].endswith("q or Ctrl-C ends")
    listed = sum(" running " in line for line in lines if "RUNS" not in line)
    assert listed >= min(runs, 5)
    if listed < runs:
        assert f"+{runs - listed:,} more runs" in lines[-1]
    assert (AWAY[:60] in text) == bool(away)


@pytest.mark.parametrize("height", range(1, 30))
def test_any_height(height: int) -> None:
    assert_fits(
        drawn(status([node(i) for i in range(9)]), [run(i) for i in range(9)], 80, height), 80, height
    )


def test_who_gives_most_stands_first_and_who_is_not_known_last() -> None:
    runs = [run(1), run(2, baseline_draw_mw=None), run(3), run(4, target_cap_mw=None)]
    rows = [line.split() for line in drawn(status([node(1)]), runs) if "medium" in line]
    assert [row[0] for row in rows] == ["3", "1", "4", "2"]
    assert [gives_mw(one) for one in runs] == [8 * 190_000, None, 8 * 210_000, 0]
    assert rows[2][-3] == "-"
    assert rows[3][-3] == "?"


def test_the_worst_nodes_stand_first_and_many_stand_together() -> None:
    few = [node(1), node(2, state="silent"), node(3, faults=["fell off"])]
    shown = [line.split()[0] for line in drawn(status(few), []) if line.startswith("gpu")]
    assert shown == ["gpu0002", "gpu0003", "gpu0001"]
    text = "\n".join(drawn(status([*few, *(node(i) for i in range(4, 2001))]), [], 200, 50))
    assert "NODES 2,000: 1 silent, 1 faulty, 1,998 ok" in text
    assert "1,998: gpu[0001,0004-2000]" in text


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"off": True}, "OFF: no limit is enforced"),
        ({"limits_known": False}, "LIMITS UNREADABLE"),
        ({"simulated": True}, "SIMULATED GPUs"),
        ({"window": {"shortfall_mw": 900_000}}, "INFEASIBLE: 900 W short"),
        ({"window": {"silent": ["a", "b"]}}, "as they do not answer or take no plan: a, b"),
        (
            {"window": {"rebound": True, "limit_ids": []}},
            "rise slowly: 18.50 kW now\n       done in 25 min at the latest",
        ),
        ({"window": {"ends_in_s": None}}, "no end is set"),
        ({"nodes": []}, "NODES: the config declares none"),
    ],
)
def test_what_else_it_says(changes: dict[str, Any], wanted: str) -> None:
    state = status(**{"nodes": [node(1)], **changes})
    text = "\n".join(line.rstrip() for line in drawn(state, []))
    assert wanted in text


def test_without_a_window_or_a_known_draw() -> None:
    quiet = {**status([node(1)]), "window": None}
    text = "\n".join(drawn(quiet, [run(1, target_cap_mw=None)]))
    assert "limit  none binds" in text
    assert "68.0 % of the most without caps" in text
    unknown = {**quiet, "draw": {**quiet["draw"], "site_mw": None, "gpus_mw": None}}
    assert "draw   not known: not every GPU's draw is reported" in "\n".join(drawn(unknown, []))


@settings(deadline=None, max_examples=40)
@given(text=st.text(max_size=30), width=st.integers(40, 120), height=st.integers(8, 40))
def test_hostile_names_neither_steer_nor_break(text: str, width: int, height: int) -> None:
    for name in (text, HOSTILE):
        nodes = [node(i, name=f"{name}{i}", faults=[name]) for i in range(30)]
        runs = [run(i, user=name, flex=name, user_flex=name) for i in range(30)]
        state = status(nodes, cluster=name, policy=name, window={"limit_ids": [name], "silent": [name] * 20})
        assert_fits(drawn(state, runs, width, height, away=name), width, height)


def test_names_are_no_markup() -> None:
    assert "[red]x" in "\n".join(drawn(status([node(1)]), [run(1, user="[red]x")], 120))


# ------------------------------------------------------------------------------------------------ the terminal


class Terminal:
    """``slurm-pfi top`` on a pseudo terminal, and all that it wrote."""

    def __init__(self, *arguments: str, config: Path) -> None:
        self.fd, self._theirs = pty.openpty()
        self.resize(80, 24, tell=False)
        self.before = termios.tcgetattr(self._theirs)
        environment = {**os.environ, "SLURM_PFI_CONF": str(config), "TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        environment.pop("LINES", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, "top", *arguments],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env=environment,
            start_new_session=True,
        )
        self.seen = b""

    def resize(self, width: int, height: int, *, tell: bool = True) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        if tell:
            self.process.send_signal(signal.SIGWINCH)

    def wait_for(self, pattern: str, timeout_s: float = 30.0) -> bytes:
        """Read until the pattern came in what has not been looked at; returns that part."""
        wanted = re.compile(pattern.encode(), re.DOTALL)
        fresh = b""
        ends_s = time.monotonic() + timeout_s
        while not wanted.search(fresh):
            left_s = ends_s - time.monotonic()
            assert left_s > 0, f"{pattern!r} did not come: {fresh[-2000:]!r}"
            if select.select([self.fd], [], [], left_s)[0]:
                part = os.read(self.fd, 65536)
                self.seen += part
                fresh += part
        return fresh

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def ended(self) -> int:
        """Wait for the end; the screen and all modes must be those from before."""
        self.wait_for(re.escape(LEAVES_SCREEN.decode()))
        code = self.process.wait(30)
        with contextlib.suppress(OSError):
            while select.select([self.fd], [], [], 0)[0]:
                self.seen += os.read(self.fd, 65536)
        assert self.seen.rindex(SHOWS_CURSOR) > self.seen.rindex(b"\x1b[?25l")
        assert termios.tcgetattr(self._theirs) == self.before
        after = self.seen[self.seen.rindex(LEAVES_SCREEN) + len(LEAVES_SCREEN) :]
        assert b"Traceback" not in self.seen
        assert self.seen.count(b"\x1b[2J") <= 1, "a screen that is wiped for each picture flickers"
        assert b"RUNS" not in after
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self.fd)
        os.close(self._theirs)


@pytest.fixture
def site() -> Site:
    made = Site(nodes=1, gpus=1)
    made.hear("n1", gpu("G", RUN, draw_mw=600_000))
    made.identify(RUN, "n1")
    return made


@pytest.fixture
def terminal(tmp_path: Path, site: Site) -> Iterator[Terminal]:
    with answering(tmp_path, site.config, site.state):
        made = Terminal("--interval-s", "0.5", config=tmp_path / "site.toml")
        try:
            made.wait_for("RUNS 1: ")
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("keys", [b"q", b"Q", b"\x03"])
def test_a_key_ends_it_and_the_terminal_is_as_before(terminal: Terminal, keys: bytes) -> None:
    terminal.type(b"xyz\x1b[A\x1a")
    terminal.wait_for("RUNS 1: ")
    terminal.type(keys)
    assert terminal.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_the_terminal_is_as_before(terminal: Terminal, number: signal.Signals) -> None:
    terminal.process.send_signal(number)
    assert terminal.ended() == 128 + number


def test_a_new_size_is_drawn_at_once(terminal: Terminal) -> None:
    terminal.resize(120, 40)
    picture = terminal.wait_for("RUNS 1: ")
    lines = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", picture).replace(b"\r", b"").split(b"\n")
    assert max(map(len, lines)) == 120, "rich fills each line"
    terminal.type(b"q")
    assert terminal.ended() == 0


def test_a_controller_that_goes_away_is_told_and_waited_for(tmp_path: Path, site: Site) -> None:
    with answering(tmp_path, site.config, site.state):
        terminal = Terminal("--interval-s", "0.5", config=tmp_path / "site.toml")
        terminal.wait_for("RUNS 1: ")
    try:
        terminal.wait_for(r"NO ANSWER, this is \d+ s old; trying again\. .*RUNS 1: ")
        with answering(tmp_path, site.config, site.state):
            while b"NO ANSWER" in terminal.wait_for("RUNS 1: "):
                pass
            terminal.type(b"q")
            assert terminal.ended() == 0
    finally:
        terminal.close()


def test_without_a_controller_it_does_not_begin(tmp_path: Path) -> None:
    config = tmp_path / "site.toml"
    config.write_text(f'cluster = "lab"\n[controller]\nrun_dir = "{tmp_path}"\n')
    done = subprocess.run(
        [sys.executable, "-m", "slurm_pfi", "--config", str(config), "top"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert done.stdout == ""
    assert "the controller cannot be reached" in done.stderr
