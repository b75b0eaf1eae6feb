"""Signs of life and of state to systemd, while both the event loop and the core behind it really go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from .log import Log
from .notify import notify, status, summary
from .runtime import Runtime


async def pet_watchdog(stalled: Callable[[], str], period_s: float, log: Log) -> None:
    """Say that we live, every ``period_s``, unless ``stalled`` names a reason: then systemd is to start us anew.

    A blocked loop does not get here. What a restart finds is the journal and the plan: it raises no limit by itself.
    """
    silent = ""
    while True:
        why = stalled()
        if not why:
            notify("WATCHDOG=1")
        elif why != silent:
            log.error("no sign of life to systemd's watchdog, which will start the agent anew", why=why)
        silent = why
        await asyncio.sleep(period_s)


async def tell_status(runtime: Runtime, pause_s: float = 1.0) -> None:
    """Keep ``STATUS=`` true: a line at each change of the summary, at most one each ``pause_s``."""
    told = ""
    while True:
        text = summary(runtime.state, time.monotonic_ns())
        if text != told:
            notify(status(text))
            told = text
        async with runtime.changed:
            await runtime.changed.wait()
        await asyncio.sleep(pause_s)
