"""A Slurm in memory, for ways of failing that a real one cannot be told to: slow, refusing, losing text, rewriting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from slurm_pfi.slurm.backend import AdminComment, JobGone, JobInfo, Unavailable, Updated

from .slurm_samples import slurm_job

DOWN = Unavailable("slurmctld is down")


@dataclass
class SlurmInMemory:
    """AdminComments by job id.

    ``loss`` is done to a text by the first way of reading it; ``rival``: what another writes right behind us;
    ``takes_s``: how long each call lasts; ``down``: it does not answer; ``refused``: jobs whose field nobody may set.
    """

    texts: dict[int, str] = field(default_factory=dict)
    restarts: dict[int, int] = field(default_factory=dict)
    loss: Callable[[str], str] = str
    rival: Callable[[str], str] | None = None
    takes_s: float = 0.0
    down: bool = False
    refused: set[int] = field(default_factory=set)
    writes: list[tuple[float, int, str]] = field(default_factory=list)
    calls: int = 0
    confirmed: int = 0

    async def admin_comment(self, job_id: int) -> AdminComment | JobGone | Unavailable:
        """The text as reading leaves it."""
        if (wrong := await self._call(job_id)) is not None:
            return wrong
        return AdminComment(self.loss(self.texts[job_id]), self.restarts.get(job_id, 0))

    async def confirms_comment(self, job_spec: str, text: str) -> bool | JobGone | Unavailable:
        """By a way that loses nothing."""
        self.confirmed += 1
        job_id = int(job_spec)
        if (wrong := await self._call(job_id)) is not None:
            return wrong
        return text == self.texts[job_id]

    async def set_admin_comment(self, job_spec: str, text: str) -> Updated | JobGone | Unavailable:
        """Write, and let the rival follow."""
        job_id = int(job_spec)
        if (wrong := await self._call(job_id)) is not None:
            return wrong
        if job_id in self.refused:
            return Unavailable("Access/permission denied")
        self.writes.append((asyncio.get_running_loop().time(), job_id, text))
        self.texts[job_id] = text if self.rival is None else self.rival(text)
        return Updated()

    async def job(self, job_id: int) -> JobInfo | JobGone | Unavailable:
        """A plain job."""
        return await self._call(job_id) or slurm_job(job_id, restart=self.restarts.get(job_id, 0))

    async def jobs(self) -> tuple[JobInfo, ...] | Unavailable:
        """All of them."""
        return DOWN if self.down else tuple(map(slurm_job, self.texts))

    async def private_data(self) -> frozenset[str] | Unavailable:
        """Nothing is."""
        return DOWN if self.down else frozenset()

    async def _call(self, job_id: int) -> JobGone | Unavailable | None:
        self.calls += 1
        await asyncio.sleep(self.takes_s)
        if self.down:
            return DOWN
        return None if job_id in self.texts else JobGone("Invalid job id specified")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time leaps to the next timer: what waits an hour is tested in a moment."""

    def __init__(self) -> None:
        super().__init__()
        self._leapt_s = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def leap(timeout: float | None = None) -> object:
            if timeout:
                self._leapt_s += timeout
            return select(0)

        self._selector.select = leap  # type: ignore[attr-defined]

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._leapt_s
