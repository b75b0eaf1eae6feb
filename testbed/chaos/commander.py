"""The controller's end of the bus of one node under fire: it writes down what it orders and hears, for the judge."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from slurm_pfi.model import Plan, PlanId, PlanStep, Report, Run, RunCap
from testbed import lone_node

from .node import PATIENCE_S, AgentEndedError, ChaosError, ChaosNode
from .record import Heard, Order, Step


class Commander(lone_node.Commander):
    """Plans answer the newest report of the agent that lives now."""

    def __init__(self, node: ChaosNode) -> None:
        super().__init__(node.lone)
        self.node = node

    @property
    def report(self) -> Report | None:
        """The newest one of the agent that lives now."""
        return self.reports[-1] if self.reports else None

    def forget(self) -> None:
        """The agent is dead: what it said is not to be answered."""
        self.reports.clear()

    async def until(
        self, reached: Callable[[Report], object], why: str, deadline_s: float = PATIENCE_S
    ) -> Report:
        """The first report that is so. Raises ChaosError when none comes, AgentEndedError when the agent ends."""
        ends_s = time.monotonic() + deadline_s
        while (report := self.report) is None or not reached(report):
            self.check_alive()
            if time.monotonic() > ends_s:
                raise ChaosError(f"{self.node.name}: no report for {deadline_s:g} s: {why}; last {report}")
            self.news.clear()
            try:
                await asyncio.wait_for(self.news.wait(), 0.5)
            except TimeoutError:
                continue
        return report

    def check_alive(self) -> None:
        """Raises AgentEndedError when the agent is dead."""
        agent = self.node.agent
        if agent is None or agent.poll() is not None:
            raise AgentEndedError(f"{self.node.name}: the agent has ended; see {self.node.log}")

    def send(self, *steps: Step) -> int | None:
        """Order it; the plan's number, or None when the node cannot be told now."""
        report = self.report
        if report is None:
            return None
        priors = self.node.record.priors
        seq = max(self.seq, 0 if report.held is None else report.held.seq) + 1
        plan = Plan(
            cluster="c",
            node=self.node.name,
            id=PlanId(1, seq),
            answers=report.id,
            mode="enforce",
            reason="chaos",
            steps=tuple(_plan_step(step) for step in steps),
            priors={gpu.uuid: priors[gpu.uuid] for gpu in report.gpus if gpu.prior_mw is None},
        )
        sent_ns = time.monotonic_ns()
        if not self.server.send(self.node.name, plan):
            return None
        self.seq = seq
        self.node.record.orders.append(Order(seq, sent_ns, steps))
        return seq

    async def order(self, *steps: Step) -> None:
        """Order it and see it held. Raises ChaosError when that does not come about."""
        await self.until(lambda report: report.gpus, "GPUs listed")
        while (seq := self.send(*steps)) is None:
            self.check_alive()
            await asyncio.sleep(0.01)
        await self.until(lambda report: report.held and report.held.seq >= seq, f"plan {seq} held")

    async def promised(self, wanted_mw: Mapping[str, int]) -> None:
        """Wait until every GPU is said to be at these limits at most."""
        await self.until(
            lambda report: {gpu.uuid: gpu.ceiling_mw for gpu in report.gpus} == dict(wanted_mw),
            f"ceilings {list(wanted_mw.values())}",
        )

    def _take(self, report: Report) -> None:
        self.node.record.heard.append(
            Heard(
                received_ns=time.monotonic_ns(),
                held=None if report.held is None else report.held.seq,
                ceilings={gpu.uuid: gpu.ceiling_mw for gpu in report.gpus},
            )
        )
        super()._take(report)


def _plan_step(step: Step) -> PlanStep:
    return PlanStep(
        starts_in_s=step.starts_ns / 1e9,
        park_cap_mw=step.park_mw,
        caps=tuple(RunCap(run=Run("c", job_id), cap_mw=cap_mw) for job_id, cap_mw in step.caps.items()),
    )
