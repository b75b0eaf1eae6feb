"""What happens to one node: runs, windows and kills, all drawn from one seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Final

from .commander import Commander
from .node import AgentEndedError, ChaosError, wait_until
from .record import Step

_NS: Final = 1_000_000_000
_CAPS_MW: Final = tuple(range(200_000, 700_001, 50_000))
_REST_EVERY: Final = 25
_RESTART_S: Final = 0.1
_MOST_ENDS: Final = 20
_RESTORER_S: Final = 2.0


class Story:
    """One node's life. ``play`` goes on until so many SIGKILLs have been sent to its processes."""

    def __init__(self, commander: Commander, seed: int) -> None:
        self.node, self.commander = commander.node, commander
        self._draw = random.Random(seed)
        self._closes_ns: int | None = None
        self._ends_in_a_row = 0
        self._releasing = False

    @property
    def kills(self) -> int:
        return len(self.node.record.kills)

    async def play(self, kills: int) -> None:
        """Raises ChaosError when the rig cannot go on; what the node did wrong is in its violations."""
        next_rest = _REST_EVERY
        while self.kills < kills:
            try:
                await self._life()
            except AgentEndedError:
                await self._ended_by_itself()
            if self.kills >= next_rest:
                await self.end()
                next_rest = self.kills + _REST_EVERY
        await self.end()

    async def end(self) -> None:
        """Close the window and see everything come to rest, with an agent that nobody kills."""
        while True:
            try:
                await self._close_window()
                break
            except AgentEndedError:
                await self._ended_by_itself()
        await self.node.rest()

    async def _ended_by_itself(self) -> None:
        """As when a restorer that has just begun holds the node: the service manager starts it again."""
        self.node.ended_by_itself += 1
        self._ends_in_a_row += 1
        if self._ends_in_a_row > _MOST_ENDS:
            raise ChaosError(f"{self.node.name}: the agent does not stay up; see {self.node.log}")
        await self.node.collect()
        self.commander.forget()
        await asyncio.sleep(_RESTART_S)

    async def _close_window(self) -> None:
        if self.node.agent is None:
            self.node.start()
        await self._up()
        await self.commander.order(Step(0, None, {}))

    async def _up(self) -> None:
        """Wait until the agent knows its GPUs, and end the admin's release if one is on."""
        report = await self.commander.until(lambda report: report.gpus, "GPUs listed")
        if self._releasing and report.released:
            reply = await asyncio.to_thread(self.node.control, "resume")
            if reply is None or not reply.ok:
                raise AgentEndedError(f"{self.node.name}: resume: {reply}")
        elif self._releasing:
            self.node.resumed()
        self._releasing = False

    # ------------------------------------------------------------------------------------------ one agent

    async def _life(self) -> None:
        """From the start of an agent to its end."""
        draw = self._draw
        if self.node.agent is None:
            self.node.start()
        if draw.random() < 0.15:  # it does not get far
            await asyncio.sleep(draw.uniform(0.0, 0.7))
            await self._end_agent()
            return
        await self._up()
        self._ends_in_a_row = 0
        for _ in range(draw.randint(1, 4)):
            self._order()
            await asyncio.sleep(self._moment_s())
            if draw.random() < 0.3:
                self.node.kill_child()
                await asyncio.sleep(self._moment_s())
        await self._end_agent()

    def _moment_s(self) -> float:
        """Most kills come while an order is being carried out, which takes some tens of milliseconds."""
        return self._draw.choice((0.0, *(self._draw.uniform(0.0, most) for most in (0.01, 0.04, 0.12, 0.5))))

    async def _end_agent(self) -> None:
        draw = self._draw
        ways = {"agent": 0.45, "both": 0.1, "child first": 0.1, "term": 0.25, "release": 0.1}
        how = draw.choices(tuple(ways), tuple(ways.values()))[0]
        if how == "release":
            await self._release()
        elif how == "term":
            self.node.terminate()
            if draw.random() < 0.6:
                await asyncio.sleep(draw.uniform(0.0, 0.1))
                self.node.kill_agent("agent after SIGTERM")
        elif how == "both":
            self.node.kill_agent()
            self.node.kill_child()
        else:
            if how == "child first":
                self.node.kill_child()
                await asyncio.sleep(draw.uniform(0.0, 0.02))
            self.node.kill_agent()
        await self.node.collect()
        self.commander.forget()
        self.node.look_at_the_dead()
        await self._after(left_one=how == "term" and draw.random() < 0.7)

    async def _release(self) -> None:
        """The admin takes the node away, and the agent dies over it."""
        self._releasing = True
        asking = asyncio.create_task(asyncio.to_thread(self.node.control, "release"))
        await asyncio.sleep(self._draw.uniform(0.0, 0.1))
        self.node.kill_agent("agent in a release")
        await asking

    async def _after(self, *, left_one: bool) -> None:
        """No agent lives; a restorer may, once it is up."""
        draw = self._draw
        if left_one:
            with contextlib.suppress(ChaosError):
                await wait_until(lambda: self.node.restorer_pid() is not None, "a restorer", _RESTORER_S)
        if self.node.restorer_pid() is None:
            await asyncio.sleep(draw.choice((0.0, draw.uniform(0.0, 0.05))))
            return
        due_s = 0.0 if self._closes_ns is None else max(0.0, (self._closes_ns - time.monotonic_ns()) / 1e9)
        await asyncio.sleep(due_s + draw.uniform(0.0, 0.6))
        if draw.random() < 0.3 and self.node.kill_restorers_child():
            await asyncio.sleep(draw.uniform(0.0, 0.3))
        self.node.kill_restorer()
        await wait_until(lambda: self.node.restorer_pid() is None, "the restorer's end")
        self.node.look_at_the_dead()

    # --------------------------------------------------------------------------------------------- orders

    def _order(self) -> None:
        """A run begins or ends, or a plan is sent."""
        draw = self._draw
        jobs = self.node.jobs
        what = draw.random()
        if what < 0.15 and len(jobs) < 5:
            places = [device.position for device in self.node.devices]
            self.node.begin_job(draw.sample(places, draw.randint(1, min(2, len(places)))))
        elif what < 0.25 and jobs:
            self.node.end_job(draw.choice(jobs))
        else:
            self._closes_ns = None
            self.commander.send(*self._steps())

    def _steps(self) -> tuple[Step, ...]:
        draw = self._draw
        kind = draw.random()
        if kind < 0.25:
            return (Step(0, None, {}),)
        first = self._window(0)
        if kind < 0.6:
            return (first,)
        ends_ns = round(draw.uniform(0.05, 1.5) * _NS)
        if kind < 0.85:
            self._closes_ns = time.monotonic_ns() + ends_ns
            return (first, Step(ends_ns, None, {}))
        begins_ns = round(draw.uniform(0.05, 0.5) * _NS)
        self._closes_ns = time.monotonic_ns() + begins_ns + ends_ns
        before = Step(0, None, {}) if draw.random() < 0.5 else first
        return (before, self._window(begins_ns), Step(begins_ns + ends_ns, None, {}))

    def _window(self, starts_ns: int) -> Step:
        draw = self._draw
        report = self.commander.report
        runs = report.runs if report is not None else ()
        caps = {
            run.run.job_id: None if draw.random() < 0.1 else draw.choice(_CAPS_MW)
            for run in runs
            if draw.random() < 0.9
        }
        return Step(starts_ns, draw.choice((200_000, 250_000)), caps)
