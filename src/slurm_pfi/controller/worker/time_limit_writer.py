"""Raises time limits in Slurm, one order after the other: read, bounded, put on record, written, put on record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from ...model import Run
from ...slurm.backend import JobGone, JobInfo, Unavailable
from ...slurm.timelimit import TimeLimitBackend, raised
from ...store.given import GivenStore
from ..deadline import owed_s
from ..state import RaiseTimeLimit, TimeLimitRaised

log = structlog.get_logger("controller")


class TimeLimitWriter:
    """``raise_time_limit`` never raises. The record is written first: what is not known to have failed counts as given.

    It holds a month of runs and is made durable, in a thread: no plan waits for a disk. One order at a time.
    """

    def __init__(
        self,
        backend: TimeLimitBackend,
        given: GivenStore,
        is_alive: Callable[[Run], bool] = lambda _run: True,
    ) -> None:
        self._backend = backend
        self._given = given
        self._is_alive = is_alive

    async def raise_time_limit(self, order: RaiseTimeLimit) -> TimeLimitRaised:
        """Carry out one order, as far as there is room."""
        job = await self._backend.job(order.run.job_id)
        if not isinstance(job, JobInfo):
            return self._left(order, job.why, again=isinstance(job, Unavailable))
        if job.restart != order.run.restart:
            return self._left(order, f"Slurm runs restart {job.restart} of it")
        if job.user_id != order.job.user_id:  # a slurmctld that lost its state begins again at job 1
            return self._left(order, "Slurm has a job of another user under its id")
        try:
            return await self._of(order, job)
        except OSError as error:
            return self._left(order, f"what it was given cannot be put on record: {error}", again=True)

    async def _of(self, order: RaiseTimeLimit, job: JobInfo) -> TimeLimitRaised:
        run = order.run
        under_way = self._given.under_way(run)
        if under_way is not None:
            # An order of which no answer came. A limit that is neither value was changed by somebody since.
            await asyncio.to_thread(self._given.end, run, done=job.limit_s != under_way.old_s)
        given_s = self._given.of(run)
        if given_s is None:
            return self._left(order, "what it was given so far is not known")
        more_s = owed_s(order.lost_s, given_s)
        if not more_s or not isinstance(job.limit_s, int):
            return self._left(order, "" if not more_s else "it has no time limit")
        room = await self._backend.room(job)
        if isinstance(room, JobGone | Unavailable):
            return self._left(order, room.why, again=isinstance(room, Unavailable))
        found = raised(job, more_s, room)
        if found.limit_s is None:
            return self._left(order, found.why, old_s=job.limit_s)
        await asyncio.to_thread(
            self._given.begin, run, job.limit_s, found.limit_s, time.time(), self._is_alive
        )
        answer = await self._backend.set_time_limit(job.spec, found.limit_s)
        if isinstance(answer, Unavailable):
            # It may have been taken all the same: the next try sees.
            return self._left(order, answer.why, again=True)
        await asyncio.to_thread(self._given.end, run, done=not isinstance(answer, JobGone))
        if isinstance(answer, JobGone):
            return self._left(order, answer.why)
        return TimeLimitRaised(
            run=run,
            lost_s=order.lost_s,
            given_s=self._given.of(run),
            old_s=job.limit_s,
            new_s=found.limit_s,
            why=found.why,
        )

    def _left(
        self, order: RaiseTimeLimit, why: str, *, old_s: int | None = None, again: bool = False
    ) -> TimeLimitRaised:
        return TimeLimitRaised(
            run=order.run,
            lost_s=order.lost_s,
            given_s=self._given.of(order.run),
            old_s=old_s,
            why=why,
            again=again,
        )
