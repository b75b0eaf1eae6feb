"""Progress sockets of a node in this process, and real processes that stand for its jobs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from slurm_pfi import progress
from slurm_pfi.model import Progress
from slurm_pfi.node.jobfile import JobFile
from slurm_pfi.node.progress import ProgressTable, RunKey
from slurm_pfi.node.progress_socket import ProgressSocket
from slurm_pfi.node.sender import JobFinder

from . import hostile_senders

ME = os.geteuid()


def run_file(job_id: int = 41, restart: int = 0, uid: int = ME) -> JobFile:
    return JobFile(job_id=job_id, restart=restart, uid=uid, gpus=(0,), flex="")


class Node:
    """The sockets of a node, and processes that stand for its jobs. Every user can reach the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        self.stepd = folder / "bin/slurmstepd"
        self.stepd.parent.mkdir()
        shutil.copy(Path("/bin/sh").resolve(), self.stepd)
        self.stepd.chmod(0o755)
        package = folder / "python/slurm_pfi"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        shutil.copy(Path(progress.__file__), package)
        shutil.copy(Path(hostile_senders.__file__), folder / "python")
        self.table = ProgressTable()
        self.drops: list[str] = []
        self.started: list[subprocess.Popen[str]] = []
        self.listener = ProgressSocket(
            folder / "progress.sock",
            JobFinder(frozenset({0, ME})),
            self.table,
            on_first_drop=lambda why, uid: self.drops.append(why),
        )

    @contextlib.asynccontextmanager
    async def open(self, *runs: JobFile) -> AsyncIterator[None]:
        self.listener.expect(runs)
        self.listener.open()
        try:
            yield
        finally:
            self.listener.close()
            assert [path for path in self.folder.rglob("*") if path.is_socket()] == []

    def own(self, job_id: int, restart: int = 0) -> Path:
        return self.folder / "progress" / f"{job_id}.{restart}"

    def told(self, job_id: int, restart: int = 0) -> Progress | None:
        return self.table.progress(RunKey(job_id, restart), time.monotonic())

    def below_stepd(
        self,
        title: str,
        *command: str,
        job_id: int | None = None,
        uid: int = ME,
        python_path: Path | None = None,
    ) -> subprocess.Popen[str]:
        """A command of a user below a process that looks like slurmstepd; our uid stands for root's there."""
        if uid != ME:
            command = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *command)
        env = {**os.environ, "PYTHONPATH": str(python_path or self.folder / "python")}
        env["SLURM_PFI_PROGRESS"] = str(self.folder / "progress.sock")
        if job_id is not None:
            env["SLURM_JOB_ID"] = str(job_id)
        process = subprocess.Popen(
            [title, "-c", '"$@"; exit $?', "sh", *command],
            executable=self.stepd,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def reporter(self, counter: int, title: str, *, job_id: int | None = None, uid: int = ME) -> None:
        """A process of a job that reports once and stays."""
        code = (
            "import time\nfrom slurm_pfi.progress import report\n"
            f"print(report({counter}), flush=True)\ntime.sleep(60)"
        )
        process = self.below_stepd(title, python(uid), "-S", "-c", code, job_id=job_id, uid=uid)
        assert process.stdout is not None and process.stdout.readline() == "True\n"

    def end_all(self) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextlib.contextmanager
def made_node() -> Iterator[Node]:
    """A node in a folder of its own, which goes with all its processes."""
    made = Node(Path(tempfile.mkdtemp(prefix="pfi-progress-")))
    try:
        yield made
    finally:
        made.end_all()
        shutil.rmtree(made.folder)


def python(uid: int) -> str:
    """A Python that this user may run."""
    return sys.executable if uid == ME else "/usr/bin/python3"


def descriptors() -> set[Path]:
    """What this process has open."""
    return set(Path("/proc/self/fd").iterdir())


async def until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None
