"""What the tests with real training libraries share: a socket that records, and tiny trainings on the CPU.

They run in an environment of their own: ``make test-callbacks``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pfi.callbacks import reporter

# No model, data set or usage report goes over the network.
os.environ.update(
    HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", DISABLE_TELEMETRY="1", CUDA_VISIBLE_DEVICES=""
)


class Told:
    """What was reported so far."""

    def __init__(self, receiver: socket.socket) -> None:
        self._receiver = receiver
        self.totals: list[str] = []

    def take(self) -> list[str]:
        """``counter unit`` of each report since the last call; their totals, "" for none, in ``totals``."""
        found: list[str] = []
        self.totals = []
        while True:
            try:
                text = self._receiver.recv(512).decode().removeprefix("pfi-progress 1 ")
            except BlockingIOError:
                return found
            counter, _, total = text.partition(" of ")
            found.append(counter)
            self.totals.append(total)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """Every counter that is told, however soon after the last one."""
    monkeypatch.setattr(reporter, "APART_S", 0.0)
    monkeypatch.setenv("SLURM_PFI_PROGRESS", str(tmp_path / "progress.sock"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as receiver:
        receiver.bind(str(tmp_path / "progress.sock"))
        yield Told(receiver)
