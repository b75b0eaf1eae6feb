"""The daemons of one cluster by name: started with a log each, watched, and ended by their own pid."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from .cluster_files import SEARCH_PATH, ClusterError, Layout, find_program
from .processes import become, processes_naming, wait_until

STOP_DEADLINE_S: Final = 30.0
LEFTOVER_GRACE_S: Final = 2.0
FIRST_AND_LAST: Final = ("mariadbd", "munged")  # the others need them to the last; in the order of their end


class ClusterDaemons:
    """Daemons whose logs lie in ``layout.log``."""

    def __init__(self) -> None:
        self.layout = Layout(Path())
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def daemon_pid(self, name: str) -> int:
        """The pid of ``munged``, ``slurmctld``, ``slurmd.<node>``, ``mariadbd`` or ``slurmdbd``."""
        return self._daemons[name].pid

    @property
    def daemon_names(self) -> tuple[str, ...]:
        return tuple(self._daemons)

    def _spawn(
        self,
        name: str,
        command: Sequence[str],
        *,
        account: pwd.struct_passwd | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        old = self._daemons.get(name)
        if old is not None and old.poll() is None:
            raise ClusterError(f"{name} runs already, pid {old.pid}")
        with (self.layout.log / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [find_program(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self.layout.root,
                env={"PATH": SEARCH_PATH, "SLURM_CONF": str(self.layout.slurm_conf), **(env or {})},
                start_new_session=True,
                **become(account),
            )

    def _alive(self, name: str) -> bool:
        """True, or ClusterError: a daemon that ended by itself is never waited for."""
        code = self._daemons[name].poll()
        if code is not None:
            raise ClusterError(f"{name} ended with status {code}\n{self._log_tails(name)}")
        return True

    def _end(self, name: str, sig: signal.Signals) -> None:
        process = self._daemons[name]
        process.send_signal(sig)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _end_daemons(self) -> None:
        """slurmds and slurmctld, then slurmdbd; munged and the database stay, they are needed to the last."""
        names = [name for name in self._daemons if name not in (*FIRST_AND_LAST, "slurmdbd")]
        for name in names:
            self._daemons[name].send_signal(signal.SIGTERM)
        for name in [*names, *(["slurmdbd"] if "slurmdbd" in self._daemons else [])]:
            self._end(name, signal.SIGTERM)
            del self._daemons[name]

    def _end_leftovers(self) -> list[str]:
        """Kill what still names our folder in its command line or environment; say what it was."""
        with contextlib.suppress(
            ClusterError
        ):  # what a killed script had just started may end a little later
            wait_until(lambda: not processes_naming(self.layout.root), LEFTOVER_GRACE_S, "no process is left")
        found = processes_naming(self.layout.root)
        self._kill(found)
        return [f"{pid} {command}" for pid, command in found.items()]

    @staticmethod
    def _kill(processes: Mapping[int, str]) -> None:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _log_tails(self, only: str | None = None) -> str:
        lines = []
        for path in sorted([*self.layout.log.iterdir(), self.layout.munge / "munged.log"]):
            if path.exists() and (only is None or path.name.startswith(only)):
                tail = path.read_text(errors="replace").splitlines()[-8:]
                lines += [f"{path.name}: {line}" for line in tail]
        return "\n".join(lines)
