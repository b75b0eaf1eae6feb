"""Jobs by pyslurm: asks the process that loads it, with a deadline, and starts a fresh one when need be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from .backend import JobGone, JobInfo, Unavailable
from .damage import SlurmTextError
from .pyslurm_jobs import INVALID_JOB_ID, LENGTH_BYTES, Answer, Hello, Question, is_lossy, packed, read_record
from .version import Probed, UnknownVersion, read_pyslurm_version

READS_PER_PROCESS: Final = 1000
"""libslurm 22.05 leaks some 50 KiB at each full read."""

_Message = TypeVar("_Message", Hello, Answer)


@dataclass(frozen=True, slots=True)
class Read:
    """The jobs, and the ids of those of whose texts pyslurm cannot give every byte."""

    jobs: tuple[JobInfo, ...]
    lossy: tuple[int, ...]


class PyslurmProcess:
    """One process at a time, one question at a time. After any fault it is ended, and the next question starts anew."""

    def __init__(self, slurm_conf: str, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C.UTF-8",  # pyslurm takes text as the locale says
            "SLURM_CONF": slurm_conf,
            "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
        }
        self._process: asyncio.subprocess.Process | None = None
        self._hello = Hello(why="pyslurm has not been asked yet")
        self._reads = 0
        self._in_step = True
        self._one = asyncio.Lock()

    async def version(self) -> Probed:
        """The release of Slurm that pyslurm is built for."""
        async with self._one:
            why = await self._start()
        return UnknownVersion(why) if why else read_pyslurm_version(self._hello.version)

    async def read(self, job_id: int | None) -> Read | JobGone | Unavailable | None:
        """One job (of an array's leader all tasks too), or all; None where this pyslurm cannot read so."""
        async with self._one:
            why = await self._start()
            if why:
                return Unavailable(why)
            answer = await self._exchange(Question(job_id=job_id), Answer)
            self._reads += 1
            if not self._in_step or self._reads >= READS_PER_PROCESS:
                await self.close()
        if isinstance(answer, str):
            return Unavailable(answer)
        if answer.unable:
            return None
        if answer.records is None:
            if job_id is not None and answer.errno == INVALID_JOB_ID:
                return JobGone(f"job {job_id}: {answer.why}")
            return Unavailable(f"pyslurm: {answer.why}")
        jobs, lossy = [], []
        for record in answer.records:
            if is_lossy(record):
                lossy.append(record.job_id)
                continue
            try:
                jobs.append(read_record(record))
            except SlurmTextError as error:
                return Unavailable(f"pyslurm's answer on job {record.job_id} is not understood: {error}")
        return Read(tuple(jobs), tuple(lossy))

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()

    async def _start(self) -> str:
        """Empty when a process stands ready; else why there is none."""
        if self._process is not None and self._process.returncode is None and self._in_step:
            return ""
        await self.close()
        self._reads, self._in_step = 0, True
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", f"{__package__}.pyslurm_child"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=self._environment,
            )
        except OSError as error:
            return f"pyslurm's process cannot be started: {error.strerror}"
        hello = await self._exchange(None, Hello)
        if isinstance(hello, str) or hello.why:
            await self.close()
            return hello if isinstance(hello, str) else hello.why
        self._hello = hello
        return ""

    async def _exchange(self, question: Question | None, kind: type[_Message]) -> _Message | str:
        """What the process says, or in words why it says nothing."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        self._in_step = False  # until all of the answer is here
        try:
            async with asyncio.timeout(self._timeout_s):
                if question is not None:
                    process.stdin.write(packed(question))
                    await process.stdin.drain()
                head = await process.stdout.readexactly(LENGTH_BYTES)
                said = await process.stdout.readexactly(int.from_bytes(head))
            self._in_step = True
            return msgspec.json.decode(said, type=kind)
        except TimeoutError:
            return f"pyslurm gave no answer within {self._timeout_s:g} s; is slurmctld up?"
        except (asyncio.IncompleteReadError, ConnectionError):
            return "pyslurm's process ended: see what `python -c 'import pyslurm'` says with the site's SLURM_CONF"
        except msgspec.MsgspecError as error:
            return f"pyslurm's answer is not understood: {error}"
