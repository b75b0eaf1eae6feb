"""Processes of one site by name: started with a log each, signalled, waited for and ended by their own pid."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from .cluster import ClusterError, wait_until

START_S: Final = 40.0
STOP_S: Final = 20.0


class Daemons:
    """``slurm-pfi`` daemons whose logs lie in ``root`` as <name>.log."""

    def __init__(self) -> None:
        self.root = Path()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a daemon: a node's name, or ``controller``."""
        self._processes[name].send_signal(number)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """End a daemon by a signal and wait for its end; returns its exit status."""
        process = self._processes.pop(name)
        process.send_signal(number)
        return process.wait(timeout=STOP_S)

    def is_running(self, name: str) -> bool:
        """Whether a daemon that was started, and not ended by ``kill``, still runs."""
        return name in self._processes and self._processes[name].poll() is None

    def pid_of(self, name: str) -> int:
        """The process id of a daemon."""
        return self._processes[name].pid

    def log_of(self, name: str) -> str:
        """What a daemon wrote to its log so far."""
        return (self.root / f"{name}.log").read_text()

    def own_faults(self) -> list[str]:
        """Lines in which a daemon tells of a fault in itself, not of one in the world around it."""
        return [
            f"{path.stem}: {line[:300]}"
            for path in sorted(self.root.glob("*.log"))
            for line in path.read_text(errors="replace").splitlines()
            if "please report it" in line or "internal error" in line
        ]

    def _spawn(
        self, name: str, arguments: list[str], environment: Mapping[str, str], run_as: Sequence[str] = ()
    ) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*run_as, sys.executable, "-m", "slurm_pfi", *arguments],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                start_new_session=True,
            )

    def _wait_for(self, name: str, ready: Callable[[], bool]) -> None:
        process = self._processes[name]

        def is_ready() -> bool:
            if process.poll() is not None:
                raise ClusterError(f"{name} ended with {process.returncode}: {self.log_of(name)[-2000:]}")
            return ready()

        wait_until(is_ready, START_S, f"{name} answers")

    def _end(self, name: str, troubles: list[str]) -> None:
        process = self._processes.pop(name)
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                troubles.append(f"{name} did not end on SIGTERM")
                return
        if process.returncode != 0:
            troubles.append(f"{name} ended with {process.returncode}: {self._tail(name)}")

    def _tail(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return self.log_of(name)[-500:]
        return ""
