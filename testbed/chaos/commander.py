"""The controller's end of the bus, as small as it can be: it keeps what it hears and sends what it is told to."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from slurm_pfi.bus.local import LocalServer
from slurm_pfi.model import Plan, PlanId, PlanStep, Report, Run, RunCap

from .node import PATIENCE_S, AgentEndedError, ChaosError, ChaosNode, Site
from .record import Heard, Order, Step


class Commander:
    """Commands every node of a rig. Plans answer the newest report of the agent that lives now."""

    def __init__(self, site: Site) -> None:
        self._nodes: dict[str, ChaosNode] = {}
        self._last: dict[str, Report] = {}
        self._seqs: dict[str, int] = {}
        self._news = asyncio.Event()
        self.faults: list[str] = []
        site.bus.parent.mkdir(exist_ok=True)
        self._server = LocalServer(
            site.bus,
            on_report=lambda report, _peer: self._take(report),
            on_fault=self.faults.append,
            node_uids=[os.geteuid()],
        )

    async def __aenter__(self) -> Commander:
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close()

    def add(self, node: ChaosNode) -> None:
        self._nodes[node.name] = node

    def forget(self, node: ChaosNode) -> None:
        """Its agent is dead: what it said is not to be answered."""
        self._last.pop(node.name, None)

    def report(self, node: ChaosNode) -> Report | None:
        """The newest one of the agent that lives now."""
        return self._last.get(node.name)

    async def until(self, node: ChaosNode, reached: Callable[[Report], object], what: str) -> Report:
        """The first report that is so. Raises ChaosError when none comes, or the agent ends."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (report := self._last.get(node.name)) is None or not reached(report):
                    _check_alive(node)
                    self._news.clear()
                    try:
                        await asyncio.wait_for(self._news.wait(), 1.0)
                    except TimeoutError:
                        continue
        except TimeoutError:
            raise ChaosError(f"{node.name}: no report for {PATIENCE_S:g} s: {what}; last {report}") from None
        return report

    def send(self, node: ChaosNode, steps: tuple[Step, ...]) -> int | None:
        """Order it; the plan's number, or None when the node cannot be told now."""
        report = self._last.get(node.name)
        if report is None:
            return None
        held = 0 if report.held is None else report.held.seq
        seq = max(self._seqs.get(node.name, 0), held) + 1
        plan = Plan(
            cluster="c",
            node=node.name,
            id=PlanId(1, seq),
            answers=report.id,
            mode="enforce",
            reason="chaos",
            steps=tuple(_plan_step(step) for step in steps),
            priors={gpu.uuid: node.record.priors[gpu.uuid] for gpu in report.gpus if gpu.prior_mw is None},
        )
        sent_ns = time.monotonic_ns()
        if not self._server.send(node.name, plan):
            return None
        self._seqs[node.name] = seq
        node.record.orders.append(Order(seq, sent_ns, steps))
        return seq

    async def order(self, node: ChaosNode, *steps: Step) -> None:
        """Order it and see it held. Raises ChaosError when that does not come about."""
        await self.until(node, lambda report: report.gpus, "GPUs listed")
        while (seq := self.send(node, steps)) is None:
            _check_alive(node)
            await asyncio.sleep(0.01)
        await self.until(node, lambda report: report.held and report.held.seq >= seq, f"plan {seq} held")

    async def ceilings(self, node: ChaosNode, wanted_mw: Mapping[str, int]) -> None:
        """Wait until every GPU is promised to be at these limits."""
        await self.until(
            node,
            lambda report: {gpu.uuid: gpu.ceiling_mw for gpu in report.gpus} == dict(wanted_mw),
            f"ceilings {list(wanted_mw.values())}",
        )

    def _take(self, report: Report) -> None:
        node = self._nodes[report.node]
        self._last[report.node] = report
        node.record.heard.append(
            Heard(
                received_ns=time.monotonic_ns(),
                held=None if report.held is None else report.held.seq,
                ceilings={gpu.uuid: gpu.ceiling_mw for gpu in report.gpus},
            )
        )
        self._news.set()


def _check_alive(node: ChaosNode) -> None:
    if node.agent is None or node.agent.poll() is not None:
        raise AgentEndedError(f"{node.name}: the agent has ended; see {node.log}")


def _plan_step(step: Step) -> PlanStep:
    return PlanStep(
        starts_in_s=step.starts_ns / 1e9,
        park_cap_mw=step.park_mw,
        caps=tuple(RunCap(run=Run("c", job_id), cap_mw=cap_mw) for job_id, cap_mw in step.caps.items()),
    )
