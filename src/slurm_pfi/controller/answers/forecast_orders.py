"""The requests that compute: answered in a thread on the state as it stands, so that no plan waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ...bus.asking import Reply, Request, refusal
from ..views import uid_of
from .forecast import what_if
from .forecast_values import Target, WhatIf
from .fresh import Fresh
from .offers import Offer, offer
from .privacy import Asker, private_offer, private_what_if

if TYPE_CHECKING:
    from ..shell import Controller

FORECASTS = frozenset({"what_if", "offer"})


class Forecasts:
    """One at a time, with a rest after each as long as it took: who asks in a loop leaves the cycles their time."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._one = asyncio.Lock()
        self._rested_s = 0.0
        self._offer = Fresh(self._offer_now)

    async def answer(self, request: Request, asker: Asker) -> Reply:
        """``what_if`` with a Target as its arguments, or ``offer``. An answer that says no is an answer: ok."""
        if request.command == "offer":
            return await self._computed(lambda: private_offer(self._offer.get(), asker, self._owners()))
        try:
            target = msgspec.convert(request.args, Target)
        except msgspec.ValidationError as error:
            return refusal(f"what_if: {error}")
        if wrong := unusable(target):
            return refusal(f"what_if: {wrong}")
        return await self._computed(lambda: private_what_if(self._what_if_now(target), asker, self._owners()))

    def _owners(self) -> dict[str, int | None]:
        state = self._controller.state
        return {str(run): uid_of(view, state) for run, view in state.runs.items()}

    async def _computed(self, answer: Callable[[], WhatIf | Offer]) -> Reply:
        async with self._one:
            await asyncio.sleep(self._rested_s - time.monotonic())
            began_s = time.monotonic()
            try:
                return Reply(ok=True, data=await asyncio.to_thread(answer))
            finally:
                ended_s = time.monotonic()
                self._rested_s = ended_s + (ended_s - began_s)

    def _what_if_now(self, target: Target) -> WhatIf:
        control = self._controller
        return what_if(control.state, control.config, control.core.science, target, time.monotonic_ns())

    def _offer_now(self) -> Offer:
        control = self._controller
        now_ns, now_unix_s = time.monotonic_ns(), time.time()
        return offer(control.state, control.config, control.core.science, now_ns, now_unix_s)


def unusable(target: Target) -> str:
    """Why this is no target, empty if it is one."""
    given = [value for value in (target.share, target.less_mw, target.limit_mw) if value is not None]
    if len(given) != 1:
        return "name one of share, less_mw and limit_mw"
    if not given[0] >= 0:
        return f"{given[0]} is below zero"
    return ""
