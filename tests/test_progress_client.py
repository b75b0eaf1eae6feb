"""The one function that user jobs call: format, and that nothing can harm the job."""

from __future__ import annotations

import ast
import importlib
import math
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_pfi import progress
from slurm_pfi.progress import report

MESSAGE = re.compile(rb"pfi-progress 1 ([0-9.e+-]+) ([a-z]{1,16})(?: of ([0-9.e+-]+))?")


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    path = tmp_path / "progress.sock"
    monkeypatch.setenv("SLURM_PFI_PROGRESS", str(path))
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as receiver:
        receiver.bind(str(path))
        yield receiver


def test_a_counter_arrives(agent: socket.socket) -> None:
    assert report(1234)
    assert agent.recv(512) == b"pfi-progress 1 1234 tokens"
    assert report(2.5, unit="steps")
    assert agent.recv(512) == b"pfi-progress 1 2.5 steps"
    assert report(2, unit="steps", total=1000)
    assert agent.recv(512) == b"pfi-progress 1 2 steps of 1000"


@pytest.mark.parametrize("total", [0, -1, math.inf, math.nan, "many", None, 10**400])
def test_a_total_that_is_none_costs_no_report(agent: socket.socket, total: Any) -> None:
    assert report(1234, total=total)
    assert agent.recv(512) == b"pfi-progress 1 1234 tokens"


@given(
    counter=st.floats(0, allow_infinity=False, allow_nan=False),
    unit=st.from_regex(r"[a-z]{1,16}", fullmatch=True),
    total=st.none() | st.floats(0, allow_infinity=False, allow_nan=False, exclude_min=True),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_good_value_keeps_its_meaning(
    agent: socket.socket, counter: float, unit: str, total: float | None
) -> None:
    assert report(counter, unit, total)
    data = agent.recv(512)
    match = MESSAGE.fullmatch(data)
    assert match is not None
    assert len(data) <= 256
    assert float(match[1]) == counter
    assert match[2].decode() == unit
    assert (None if match[3] is None else float(match[3])) == total


@pytest.mark.parametrize("counter", [-1, math.inf, math.nan, "many", None, 10**400])
def test_a_bad_counter_is_not_sent(agent: socket.socket, counter: object) -> None:
    assert not report(counter)  # type: ignore[arg-type]
    with pytest.raises(BlockingIOError):
        agent.recv(512)


@pytest.mark.parametrize("unit", ["", "Tokens", "to kens", "x" * 17, "tokens\n", 7])
def test_a_bad_unit_is_not_sent(agent: socket.socket, unit: object) -> None:
    assert not report(1, unit)  # type: ignore[arg-type]
    with pytest.raises(BlockingIOError):
        agent.recv(512)


def test_a_full_socket_does_not_block(agent: socket.socket) -> None:
    start_s = time.monotonic()
    results = [report(number) for number in range(5000)]
    assert results[0]
    assert not results[-1]
    assert time.monotonic() - start_s < 5


def test_no_agent_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PFI_PROGRESS", str(tmp_path / "none.sock"))
    assert not report(1)
    monkeypatch.setenv("SLURM_PFI_PROGRESS", "x" * 200)
    assert not report(1)
    monkeypatch.delenv("SLURM_PFI_PROGRESS")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert not report(1)


def test_a_run_has_a_socket_of_its_own(
    agent: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    assert report(1), "there is none: the one for all is used"
    assert agent.recv(512) == b"pfi-progress 1 1 tokens"
    (tmp_path / "progress").mkdir()
    for restart, name in ((None, "41.0"), ("2", "41.2")):
        if restart is not None:
            monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as own:
            own.bind(str(tmp_path / "progress" / name))
            assert report(2)
            assert own.recv(512) == b"pfi-progress 1 2 tokens"
            while report(3):
                pass
        assert report(4), "nobody reads it any more"
        assert agent.recv(512) == b"pfi-progress 1 4 tokens", "a full one sends nothing to the one for all"
    monkeypatch.setenv("SLURM_JOB_ID", "../41")
    assert report(5)
    assert agent.recv(512) == b"pfi-progress 1 5 tokens"


def test_without_the_variable_the_node_s_own_socket_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []

    class Recorder(socket.socket):
        def sendto(self, data: bytes, address: str) -> int:  # type: ignore[override]
            addresses.append(address)
            return len(data)

    for name in ("SLURM_PFI_PROGRESS", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setattr("slurm_pfi.progress.socket.socket", Recorder)
    assert report(1)
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    assert report(1)
    monkeypatch.setenv("SLURMD_NODENAME", "../../tmp")
    assert not report(1)
    assert addresses == ["/run/slurm-pfi/n7/progress.sock", "/run/slurm-pfi/n7/progress/41.0"]


def test_the_file_works_alone(agent: socket.socket, tmp_path: Path) -> None:
    source = Path(progress.__file__)
    imported = {
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= set(sys.stdlib_module_names)
    copy = tmp_path / "alone.py"
    copy.write_text(source.read_text() + "\nassert report(5)\n")
    subprocess.run([sys.executable, "-I", "-S", str(copy)], check=True, timeout=30)
    assert agent.recv(512) == b"pfi-progress 1 5 tokens"


@pytest.mark.parametrize(
    ("module", "libraries", "install"),
    [
        ("huggingface", ["transformers"], "pip install transformers"),
        ("lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"], "pip install lightning"),
    ],
)
def test_a_missing_training_library_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, libraries: list[str], install: str
) -> None:
    for library in libraries:
        monkeypatch.setitem(sys.modules, library, None)
    callbacks = importlib.import_module(f"slurm_pfi.callbacks.{module}")
    with pytest.raises(
        ImportError, match=rf"^slurm_pfi\.callbacks\.{module} needs {libraries[0]}: {install} \("
    ):
        _ = callbacks.ReportProgress
    with pytest.raises(AttributeError, match="no attribute Other"):
        _ = callbacks.Other
