"""The way of talking to Slurm that ``slurm.backend`` names, and the reason where it cannot be gone.

``auto`` and ``cli`` are the commands. ``json`` and ``pyslurm`` read jobs in another way and leave all else to the
commands: AdminComment byte for byte, and every write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from ..config import SlurmSection
from .backend import JobGone, JobInfo, Unavailable
from .cli import Ran, SlurmCommands
from .jsonjobs import read_json_jobs
from .pyslurm_process import PyslurmProcess, Read
from .version import UnknownVersion, Version

FIRST_WITH_OBJECTS: Final = Version(23, 11)
"""Before it squeue's JSON has no word for "unlimited", ignores --jobs, or fails with exit 0."""

MOST_ASKED_SINGLY: Final = 20
"""Jobs whose texts are no UTF-8, so that pyslurm loses bytes; beyond this the commands read all."""

Say = Callable[[str], None]


class SlurmOtherwise(SlurmCommands):
    """The commands, but jobs are read in another way once it has been found fit; else the reason is said once."""

    def __init__(self, section: SlurmSection, *, timeout_s: float, say: Say) -> None:
        super().__init__(section, timeout_s=timeout_s)
        self._say = say
        self._asked = asyncio.Lock()
        self._unfit: str | None = None
        self._decided = False

    async def unfit(self) -> str | None:
        """Why jobs are read by squeue's text after all; None where they are not."""
        async with self._asked:
            if not self._decided:
                self._unfit = await self._why_not()
                self._decided = True
                if self._unfit is not None:
                    self._say(f"jobs are read by squeue's text: {self._unfit}")
        return self._unfit

    async def _read_jobs(self, job_id: int | None) -> tuple[JobInfo, ...] | JobGone | Unavailable:
        if await self.unfit() is None:
            answer = await self._read_otherwise(job_id)
            if answer is not None:
                return answer
        return await super()._read_jobs(job_id)

    async def _why_not(self) -> str | None:
        raise NotImplementedError

    async def _read_otherwise(self, job_id: int | None) -> tuple[JobInfo, ...] | JobGone | Unavailable | None:
        """None where this way cannot tell all of it and the commands must be asked."""
        raise NotImplementedError


class SlurmJson(SlurmOtherwise):
    """``squeue --json``. What a user called ``(null)`` is told apart from no name; it costs more (see ``cli``)."""

    async def _why_not(self) -> str | None:
        version = await self.version()
        if isinstance(version, UnknownVersion):
            return f"which Slurm this is is not known: {version.why}"
        if version < FIRST_WITH_OBJECTS:
            return f"the JSON of Slurm {version} does not tell all; it does from {FIRST_WITH_OBJECTS} on"
        return None

    async def _read_otherwise(self, job_id: int | None) -> tuple[JobInfo, ...] | JobGone | Unavailable | None:
        one = () if job_id is None else ("--jobs", str(job_id))
        ran = await self._squeue_ran(["squeue", "--local", "--all", "--states=all", *one, "--json"], job_id)
        if not isinstance(ran, Ran):
            return ran
        jobs = read_json_jobs(ran.out)
        return (
            Unavailable(f"squeue named no job, and said: {ran.error}") if jobs == () and ran.error else jobs
        )


class SlurmByPyslurm(SlurmOtherwise):
    """pyslurm, in a process of its own; of the release that the commands have, and with its class ``job``."""

    def __init__(self, section: SlurmSection, *, timeout_s: float, say: Say) -> None:
        super().__init__(section, timeout_s=timeout_s, say=say)
        self._process = PyslurmProcess(section.conf, timeout_s=timeout_s)

    async def _why_not(self) -> str | None:
        built_for = await self._process.version()
        if isinstance(built_for, UnknownVersion):
            return built_for.why
        installed = await self.version()
        if installed != built_for:
            have = (
                installed.why if isinstance(installed, UnknownVersion) else f"Slurm {installed} is installed"
            )
            return f"pyslurm is built for Slurm {built_for}: {have}"
        return None

    async def _read_otherwise(self, job_id: int | None) -> tuple[JobInfo, ...] | JobGone | Unavailable | None:
        answer = await self._process.read(job_id)
        if not isinstance(answer, Read):
            return answer
        if len(answer.lossy) > (MOST_ASKED_SINGLY if job_id is None else 0):
            return None
        jobs = {job.job_id: job for job in answer.jobs}
        for lossy in answer.lossy:
            own = await SlurmCommands._read_jobs(self, lossy)
            if isinstance(own, Unavailable):
                return own
            # An array's leader brings its tasks; a job that has gone meanwhile is gone.
            jobs.update({job.job_id: job for job in (own if isinstance(own, tuple) else ())})
        return tuple(jobs.values())

    async def close(self) -> None:
        """End pyslurm's process."""
        await self._process.close()


def open_backend(section: SlurmSection, *, timeout_s: float, say: Say) -> SlurmCommands:
    """What the config names. Nothing is started before the first question; ``say`` is told why another way is gone."""
    if section.backend == "json":
        return SlurmJson(section, timeout_s=timeout_s, say=say)
    if section.backend == "pyslurm":
        return SlurmByPyslurm(section, timeout_s=timeout_s, say=say)
    return SlurmCommands(section, timeout_s=timeout_s)
