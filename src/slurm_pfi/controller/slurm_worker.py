"""Questions to Slurm and tags into it, a few at a time, so that slurmctld hardly notices us."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from ..config import Config
from ..model import Run
from ..slurm.backend import JobGone, JobInfo, SlurmBackend, Unavailable
from ..slurm.tagwrite import write_tag
from .state import AllJobsRead, Event, JobRead, TagWritten, WriteTag

READERS = 4

log = structlog.get_logger("controller")


class SlurmWorker:
    """Takes orders from the shell and hands the answers to ``take`` as events. Never raises into the shell."""

    def __init__(self, backend: SlurmBackend, config: Config, take: Callable[[Event], None]) -> None:
        self._backend = backend
        self._take = take
        self._pause_s = 1 / config.tag.max_writes_per_s
        self._reads: asyncio.Queue[Run | None] = asyncio.Queue()
        self._tags: dict[Run, WriteTag] = {}
        self._tag_ready = asyncio.Event()
        self._trouble = ""

    def read_job(self, run: Run) -> None:
        """Ask about one run; the answer comes as JobRead."""
        self._reads.put_nowait(run)

    def read_all(self) -> None:
        """Ask about all jobs; the answer comes as AllJobsRead."""
        self._reads.put_nowait(None)

    def write_tag(self, order: WriteTag) -> None:
        """Write a tag when its turn comes; a newer one of the same run replaces one that waits."""
        self._tags[order.run] = order
        self._tag_ready.set()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(READERS):
                group.create_task(self._read_forever())
            group.create_task(self._write_forever())

    async def _read_forever(self) -> None:
        while True:
            run = await self._reads.get()
            if run is None:
                jobs = await self._backend.jobs()
                self._say(jobs)
                self._take(AllJobsRead(jobs=None if isinstance(jobs, Unavailable) else jobs))
                continue
            answer = await self._backend.job(run.job_id)
            self._say(answer)
            match answer:
                case JobInfo():
                    self._take(JobRead(run=run, job=answer))
                case JobGone():
                    self._take(JobRead(run=run, job=None))
                case Unavailable():
                    self._take(JobRead(run=run, job=None, unavailable=answer.why))

    def _say(self, answer: object) -> None:
        trouble = answer.why if isinstance(answer, Unavailable) else ""
        if trouble and not self._trouble:
            log.warning(f"Slurm does not answer: {trouble}; what is known stays in force")
        elif self._trouble and not trouble:
            log.info("Slurm answers again")
        self._trouble = trouble

    async def _write_forever(self) -> None:
        while True:
            await self._tag_ready.wait()
            if not self._tags:
                self._tag_ready.clear()
                continue
            order = self._tags.pop(next(iter(self._tags)))
            self._take(TagWritten(run=order.run, ok=await self._write(order)))
            await asyncio.sleep(self._pause_s)  # the rate limit itself, not a wait for something

    async def _write(self, order: WriteTag) -> bool:
        """Whether the tag needs no other try now. A comment that we cannot keep whole is left alone, and said so."""
        done = await write_tag(self._backend, order.job, order.tag)
        if done.outcome in ("raced", "not_rewritable"):
            log.info(f"tag {done.outcome.replace('_', ' ')}", run=str(order.run), reason=done.why)
        return done.outcome != "unavailable"
