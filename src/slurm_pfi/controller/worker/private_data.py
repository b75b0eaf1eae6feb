"""slurm.conf's PrivateData: what users may see of the jobs of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from ...config import TimesSection
from ...slurm.backend import SlurmBackend, Unavailable

log = structlog.get_logger("controller")

ALL_PRIVATE: Final = frozenset({"jobs", "usage", "users", "accounts"})
"""As long as nobody knows what the site wants."""


class PrivateData:
    """Asked for at the start and as often as all jobs are read.

    ``words`` are those of ALL_PRIVATE that the site has set: all of them before Slurm has said it. An answer that
    fails later leaves what was known.
    """

    def __init__(self, backend: SlurmBackend, times: Callable[[], TimesSection]) -> None:
        """``times`` gives those in force: a reload may change them."""
        self._backend = backend
        self._times = times
        self._known = False
        self.words = ALL_PRIVATE

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            known = await self.read()
            times = self._times()
            await asyncio.sleep(times.full_read_s if known else times.full_read_min_s)

    async def read(self) -> bool:
        """Ask once; whether there was an answer."""
        answer = await self._backend.private_data()
        if isinstance(answer, Unavailable):
            if not self._known:
                log.warning(
                    f"PrivateData is not known, so users are told of their own jobs alone: {answer.why}"
                )
            return False
        words = answer & ALL_PRIVATE
        if not self._known or words != self.words:
            log.info("PrivateData of slurm.conf", words=",".join(sorted(words)) or "none")
        self._known, self.words = True, words
        return True
