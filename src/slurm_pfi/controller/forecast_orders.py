"""The requests that compute: answered in a thread on the state as it stands, so that no plan waits for them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from ..bus.control import Reply, Request, refusal
from .forecast import what_if
from .forecast_values import Target
from .offers import offer

if TYPE_CHECKING:
    from .shell import Controller

FORECASTS = frozenset({"what_if", "offer"})


class Forecasts:
    """One at a time: who asks many times at once waits, and the controller's cycles do not."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._one = asyncio.Lock()

    async def answer(self, request: Request) -> Reply:
        """``what_if`` with a Target as its arguments, or ``offer``. An answer that says no is an answer: ok."""
        if request.command == "offer":
            async with self._one:
                control = self._controller
                asked = control.state, control.config, control.core.science, time.monotonic_ns(), time.time()
                return Reply(ok=True, data=await asyncio.to_thread(offer, *asked))
        try:
            target = msgspec.convert(request.args, Target)
        except msgspec.ValidationError as error:
            return refusal(f"what_if: {error}")
        if wrong := unusable(target):
            return refusal(f"what_if: {wrong}")
        async with self._one:
            control = self._controller
            state, config, science = control.state, control.config, control.core.science
            made = await asyncio.to_thread(what_if, state, config, science, target, time.monotonic_ns())
            return Reply(ok=True, data=made)


def unusable(target: Target) -> str:
    """Why this is no target, empty if it is one."""
    given = [value for value in (target.share, target.less_mw, target.limit_mw) if value is not None]
    if len(given) != 1:
        return "name one of share, less_mw and limit_mw"
    if not given[0] >= 0:
        return f"{given[0]} is below zero"
    return ""
