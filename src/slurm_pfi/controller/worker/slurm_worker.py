"""Questions to Slurm and tags into it, a few at a time, so that slurmctld hardly notices us."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from ...config import Config
from ...model import Run
from ...slurm.backend import JobGone, JobInfo, SlurmBackend, Unavailable
from ...slurm.tagwrite import TagWrite, write_tag
from ..state import AllJobsRead, Event, JobRead, RaiseTimeLimit, TagWritten, WriteTag
from .pace import Pace
from .time_limit_writer import TimeLimitWriter

READERS = 4
PRUNE_EVERY = 1000  # tags
SAY_EVERY_S = 60.0  # Slurm may refuse the tags of some jobs and take those of others between

log = structlog.get_logger("controller")


class SlurmWorker:
    """Takes orders from the shell and hands the answers to ``take`` as events. Never raises into the shell.

    ``is_alive`` says whether a run is still there. ``clock`` (monotonic seconds) and ``chance`` (0..1) set the pace of
    the tags.
    """

    def __init__(
        self,
        backend: SlurmBackend,
        config: Config,
        take: Callable[[Event], None],
        *,
        time_limits: TimeLimitWriter | None = None,
        is_alive: Callable[[Run], bool] = lambda _run: True,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._backend = backend
        self._take = take
        self._time_limits = time_limits
        self._is_alive = is_alive
        self._clock = clock
        self._chance = chance
        self._pace = Pace(config.tag.max_writes_per_s)
        self._reads: asyncio.Queue[Run | None] = asyncio.Queue()
        self._tags: dict[Run, WriteTag] = {}
        self._raises: dict[Run, RaiseTimeLimit] = {}
        self._ready = asyncio.Event()
        self._left: dict[Run, str] = {}
        self._counts: Counter[str] = Counter()
        self._trouble = ""
        self._tag_trouble = ""
        self._told_s: float | None = None

    def read_job(self, run: Run) -> None:
        """Ask about one run; the answer comes as JobRead."""
        self._reads.put_nowait(run)

    def read_all(self) -> None:
        """Ask about all jobs; the answer comes as AllJobsRead."""
        self._reads.put_nowait(None)

    def write_tag(self, order: WriteTag) -> None:
        """Write a tag when its turn comes; a newer one of the same run replaces one that waits."""
        self._tags[order.run] = order
        self._ready.set()

    def raise_time_limit(self, order: RaiseTimeLimit) -> None:
        """Raise a time limit when its turn comes, before any tag; the answer comes as TimeLimitRaised."""
        self._raises[order.run] = order
        self._ready.set()

    def set_rate(self, writes_per_s: float) -> None:
        """The most writes a second, from the next one on."""
        self._pace = replace(self._pace, rate_per_s=writes_per_s)

    def tag_view(self) -> dict[str, Any]:
        """What became of all tags since the start, how many wait, and why if none can be written now."""
        names = ("written", "raced", "not_rewritable", "gone", "unavailable")
        return {
            **{name: self._counts[name] for name in names},
            "waiting": len(self._tags),
            "retry_in_s": max(0.0, self._pace.next_s - self._clock()) if self._pace.strained else None,
            "trouble": self._tag_trouble,
        }

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(READERS):
                group.create_task(self._read_forever())
            group.create_task(self._write_forever())

    # ------------------------------------------------------------------------------------------------ reading

    async def _read_forever(self) -> None:
        while True:
            run = await self._reads.get()
            if run is None:
                jobs = await self._backend.jobs()
                self._say(jobs)
                known = None if isinstance(jobs, Unavailable) else jobs
                self._take(AllJobsRead(jobs=known, read_unix_s=time.time()))
                continue
            answer = await self._backend.job(run.job_id)
            self._say(answer)
            match answer:
                case JobInfo():
                    self._take(JobRead(run=run, job=answer, read_unix_s=time.time()))
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

    # ------------------------------------------------------------------------------------------------ writing

    async def _write_forever(self) -> None:
        while True:
            await self._ready.wait()
            # Before the tag is taken: a newer one of the run may come meanwhile, or the run may end.
            await asyncio.sleep(max(0.0, self._pace.next_s - self._clock()))
            began_s = self._clock()
            if self._raises and self._time_limits is not None:
                # A run may end before its tag is written, and that of its limit would come too late.
                raised = await self._time_limits.raise_time_limit(self._raises.pop(next(iter(self._raises))))
                self._pace = self._pace.after(
                    began_s, self._clock(), ok=not raised.again, chance=self._chance()
                )
                self._take(raised)
                continue
            order = self._next_tag()
            if order is None:
                self._ready.clear()
                continue
            done = await write_tag(self._backend, order.job, order.tag, self._left.get(order.run))
            ok = done.outcome != "unavailable"
            self._pace = self._pace.after(began_s, self._clock(), ok=ok, chance=self._chance())
            self._wrote(order.run, done)

    def _next_tag(self) -> WriteTag | None:
        """The tag that waits longest and whose run is still there; Slurm takes none of a job that has ended."""
        while self._tags:
            order = self._tags.pop(next(iter(self._tags)))
            if self._is_alive(order.run):
                return order
            self._counts["gone"] += 1
            self._left.pop(order.run, None)
        return None

    def _wrote(self, run: Run, done: TagWrite) -> None:
        self._counts[done.outcome] += 1
        if self._counts.total() % PRUNE_EVERY == 0:
            self._left = {known: text for known, text in self._left.items() if self._is_alive(known)}
        if done.text is None or done.outcome == "gone":
            self._left.pop(run, None)
        else:
            self._left[run] = done.text
        if done.outcome in ("raced", "not_rewritable"):
            log.info(f"tag {done.outcome.replace('_', ' ')}", run=str(run), reason=done.why)
        ok = done.outcome != "unavailable"
        self._say_tags(run, "" if ok else done.why)
        trouble = "" if done.outcome == "written" else f"{done.outcome.replace('_', ' ')}: {done.why}"
        self._take(TagWritten(run=run, ok=ok, trouble=trouble))

    def _say_tags(self, run: Run, trouble: str) -> None:
        now_s = self._clock()
        anew = self._told_s is None or now_s - self._told_s >= SAY_EVERY_S
        if trouble and not self._tag_trouble and anew:
            log.warning(
                f"a tag cannot be written: {trouble}; tried again, less often each time", run=str(run)
            )
            self._told_s = now_s
        elif not trouble and self._tag_trouble and self._pace.strained == 0:
            log.info("tags are written again")
            self._told_s = None
        self._tag_trouble = trouble
