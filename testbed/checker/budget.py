"""Invariant 1: the limits in force fit the site limit at every instant. Invariant 2: so does what might come."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from .files import LimitLine, Record, RunFolder
from .plans import STEP_SLACK_NS, Plan, Plans, RunMap
from .site import SECOND_NS, NodeFacts, Site, SiteFacts
from .steps import UNBOUNDED
from .verdict import Finding, Result

HOLDS: Final = "1"
WORST_CASE: Final = "2"


@dataclass(slots=True)
class _Margin:
    """The least room seen, and when."""

    mw: float = UNBOUNDED
    at_ns: int | None = None
    checked: int = 0

    def see(self, margin_mw: float, time_ns: int) -> None:
        self.checked += 1
        if margin_mw < self.mw:
            self.mw, self.at_ns = margin_mw, time_ns


def _first_heard(run: RunFolder) -> dict[str, int]:
    """Since when each node has had an agent. Nodes that never had one are absent."""
    return {node: records[0]["mono_ns"] for node, records in run.node_audit.items() if records}


class TraceSum:
    """The sum of all effective limits, kept up to date line by line."""

    def __init__(self, run: RunFolder) -> None:
        self._heard = _first_heard(run)
        self._limits: dict[str, dict[str, int]] = {node: {} for node in run.nodes}
        self._sums = dict.fromkeys(run.nodes, 0)

    def apply(self, node: str, uuid: str, effective_mw: int) -> None:
        limits = self._limits[node]
        self._sums[node] += effective_mw - limits.get(uuid, 0)
        limits[uuid] = effective_mw

    def total_mw(self, facts: SiteFacts, time_ns: int) -> int:
        return facts.load_mw + sum(self._node_mw(name, node, time_ns) for name, node in facts.nodes.items())

    def _node_mw(self, name: str, node: NodeFacts, time_ns: int) -> int:
        if node.mode != "enforce" or self._heard.get(name, time_ns + 1) > time_ns:
            return node.most_mw
        unknown = max(0, node.gpus - len(self._limits.get(name, ())))
        return self._sums.get(name, 0) + unknown * node.gpu_max_mw


@dataclass(slots=True)
class _Excess:
    """One unbroken stretch above what was due."""

    start_ns: int
    end_ns: int
    worst_mw: float
    worst_ns: int
    due_mw: float

    def finding(self) -> Finding:
        text = (
            f"the limits in force exceed {self.due_mw / 1000:.0f} W by {self.worst_mw / 1000:.3f} W "
            f"(above it for {(self.end_ns - self.start_ns) / 1e9:.3f} s)"
        )
        return Finding(HOLDS, self.worst_ns, "", "", text)


class _Settling:
    """How soon the limits in force came under each limit: no invariant, but what people ask first."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._since: int | None = None
        self.notes: list[str] = []

    def see(self, time_ns: int, total_mw: int) -> None:
        limit_mw = self._site.limit.value_at(time_ns)
        if limit_mw == UNBOUNDED:
            self._since = None
        elif total_mw > limit_mw:
            self._since = self._since or self._site.limit.start_of(time_ns)
        elif self._since is not None:
            self.notes.append(
                f"under {limit_mw / 1000:.0f} W {(time_ns - self._since) / 1e9:.3f} s after it came into force"
            )
            self._since = None


def check_sum(run: RunFolder, site: Site) -> Result:
    """Invariant 1, at every instant at which the sum or what is due changes."""
    margin = _Margin()
    settling = _Settling(site)
    stretches: list[_Excess] = []
    open_excess: _Excess | None = None
    for time_ns, total_mw, due_mw in _instants(run, site):
        settling.see(time_ns, total_mw)
        if open_excess is not None:
            open_excess.end_ns = time_ns
        if due_mw == UNBOUNDED:
            open_excess = None
            continue
        margin.see(due_mw - total_mw, time_ns)
        excess_mw = total_mw - due_mw
        if excess_mw <= 0:
            open_excess = None
        elif open_excess is None:
            open_excess = _Excess(time_ns, time_ns, excess_mw, time_ns, due_mw)
            stretches.append(open_excess)
        elif excess_mw > open_excess.worst_mw:
            open_excess.worst_mw, open_excess.worst_ns, open_excess.due_mw = excess_mw, time_ns, due_mw
    findings = [stretch.finding() for stretch in stretches]
    findings += _unknown_gpus(run, site)
    return Result(
        HOLDS,
        "the budget holds",
        margin.checked,
        "instants under a limit",
        tuple(findings),
        None if margin.at_ns is None else margin.mw,
        margin.at_ns,
        (*_agentless(run, site), *settling.notes),
    )


def _instants(run: RunFolder, site: Site) -> Iterator[tuple[int, int, float]]:
    """(instant, sum, what is due) wherever one of them changes, after all that happens at that instant."""
    if not site.facts:
        return
    trace = TraceSum(run)
    others = {
        *site.due.times,
        *_first_heard(run).values(),
        *(facts.mono_ns for facts in site.facts),
        run.last_ns,
    }
    lines = run.limits
    at = 0
    facts, facts_until = _facts_and_end(site, run.first_ns)
    for time_ns in sorted(others | {line.mono_ns for line in lines}):
        while at < len(lines) and lines[at].mono_ns <= time_ns:
            trace.apply(lines[at].node, lines[at].uuid, lines[at].effective_mw)
            at += 1
        if time_ns >= facts_until:
            facts, facts_until = _facts_and_end(site, time_ns)
        due_mw = site.due.value_at(time_ns) if facts.enforces else UNBOUNDED
        yield time_ns, trace.total_mw(facts, time_ns), due_mw


def _facts_and_end(site: Site, time_ns: int) -> tuple[SiteFacts, float]:
    facts = site.facts_at(time_ns)
    assert facts is not None  # the caller has looked
    return facts, next((later.mono_ns for later in site.facts if later.mono_ns > time_ns), UNBOUNDED)


def _unknown_gpus(run: RunFolder, site: Site) -> Iterator[Finding]:
    """A node with more GPUs than declared, or a node that no site record knows, makes every sum a guess."""
    gpus: dict[str, set[str]] = {}
    for line in run.limits:
        gpus.setdefault(line.node, set()).add(line.uuid)
    for facts in site.facts:
        for node, uuids in gpus.items():
            known = facts.nodes.get(node)
            if known is None:
                yield Finding(HOLDS, facts.mono_ns, node, "", "the site record does not know this node")
            elif len(uuids) > known.gpus:
                text = f"{len(uuids)} GPUs in the trace, {known.gpus} in the site record"
                yield Finding(HOLDS, facts.mono_ns, node, "", text)


def _agentless(run: RunFolder, site: Site) -> tuple[str, ...]:
    """Nodes without an agent when a window opened, by name."""
    heard = _first_heard(run)
    notes = []
    for start_ns, _ in site.windows():
        facts = site.facts_at(start_ns)
        silent = [name for name in facts.nodes if heard.get(name, start_ns + 1) > start_ns] if facts else []
        if silent:
            notes.append(
                f"counted at device maximum, without an agent as the window opened: {', '.join(silent)}"
            )
    return tuple(notes)


@dataclass(slots=True)
class _Known:
    """What the node's audit says of one GPU: the last read-back, those before it, and the set since.

    A later set replaces an earlier one on the device, so only the last one is still under way.
    """

    read_mw: int | None = None
    under_way_mw: int = 0
    replaced: list[tuple[int, int]] = field(default_factory=list)

    def learn(self, record: Record) -> None:
        match record["event"]:
            case "prior":
                self.read(record["mono_ns"], record["prior_mw"] if self.read_mw is None else self.read_mw)
            case "set":
                self.under_way_mw = record["cap_mw"]
            case "readback":
                self.read(record["mono_ns"], max(record["requested_mw"], record["enforced_mw"]))
                self.under_way_mw = 0
            case "conflict":
                self.read(record["mono_ns"], record["found_mw"])

    def read(self, at_ns: int, value_mw: int) -> None:
        if self.read_mw is not None:
            self.replaced.append((at_ns, max(self.read_mw, self.under_way_mw)))
        self.read_mw = value_mw

    def most_mw(self, unknown_mw: int, since_ns: int) -> int:
        """The highest that it was known to be since then; ``unknown_mw`` before the first reading."""
        recent = 0
        for at_ns, value_mw in reversed(self.replaced):
            if at_ns < since_ns:
                break
            recent = max(recent, value_mw)
        return max(unknown_mw if self.read_mw is None else self.read_mw, self.under_way_mw, recent)


@dataclass(slots=True)
class _WorstCase:
    """The most that could be in force, as far as plans sent and read-backs tell."""

    run: RunFolder
    plans: Plans
    runs: RunMap
    heard: dict[str, int]
    known: dict[tuple[str, str], _Known] = field(default_factory=dict)

    def learn(self, node: str, record: Record) -> None:
        uuid = record.get("uuid")
        if isinstance(uuid, str):
            self._of(node, uuid).learn(record)
        elif record["event"] == "adopted":
            # An agent that takes over reads all limits, and writes a read-back only of what it sets itself.
            for line in self._limits_at(node, record["mono_ns"]):
                known = self._of(node, line.uuid)
                known.read(record["mono_ns"], max(line.effective_mw, line.requested_mw))
                known.under_way_mw = 0

    def _limits_at(self, node: str, time_ns: int) -> list[LimitLine]:
        """The node's limits in force at that instant, as the trace has them."""
        at = bisect_right(self.run.limits, time_ns, key=lambda line: line.mono_ns)
        return list({line.uuid: line for line in self.run.limits[:at] if line.node == node}.values())

    def _of(self, node: str, uuid: str) -> _Known:
        key = (node, uuid)
        if key not in self.known:
            before = self.run.before.get(key)
            self.known[key] = _Known(max(before) if before is not None else None)
        return self.known[key]

    def node_mw(self, name: str, node: NodeFacts, time_ns: int) -> int:
        """The node's worst case now, with all that it has read back."""
        return self._node_mw(name, node, time_ns, time_ns, None)

    def raised_mw(self, plan: Plan, node: NodeFacts, news_ns: int) -> int:
        """By how much this plan raises its node's worst case.

        The controller hears of read-backs up to ``news_ns`` late: a cap that it had lowered a moment before is no
        raise when it comes again somewhat higher.
        """
        since_ns = plan.sent_ns - news_ns
        with_it = self._node_mw(plan.node, node, plan.sent_ns, since_ns, None)
        return with_it - self._node_mw(plan.node, node, plan.sent_ns, since_ns, plan)

    def _node_mw(self, name: str, node: NodeFacts, time_ns: int, since_ns: int, without: Plan | None) -> int:
        if node.mode != "enforce" or self.heard.get(name, time_ns + 1) > time_ns:
            return node.most_mw
        uuids = {uuid for owner, uuid in (*self.run.before, *self.known) if owner == name}
        steps = [
            step
            for plan in self.plans.candidates(name, time_ns, since_ns)
            if plan is not without and plan.mode == "enforce"
            for step in plan.steps_at(time_ns, -STEP_SLACK_NS)
        ]
        total = max(0, node.gpus - len(uuids)) * node.gpu_max_mw
        for uuid in uuids:
            known = self._of(name, uuid)
            before = self.run.before.get((name, uuid))
            prior_mw = max(before) if before is not None else node.gpu_max_mw
            runs = self.runs.runs_at(name, uuid, time_ns)
            # No node sets a cap above the GPU's prior limit, whatever a plan says.
            values = [
                min(value, prior_mw)
                for step in steps
                for value in step.values(runs, prior_mw, ended_too=True)
            ]
            total += max([known.most_mw(node.gpu_max_mw, since_ns), *values])
        return total


def check_worst_case(run: RunFolder, site: Site, plans: Plans, runs: RunMap, news_s: float) -> Result:
    """Invariant 2, at every plan sent.

    A plan that raises the worst case must leave it within the limit in force at that instant, without any delay:
    so no plan raises before the lowerings that it needs were read back. From ``response_s`` on, the worst case
    stays within what is due whatever the plan does.
    """
    worst = _WorstCase(run, plans, runs, _first_heard(run))
    margin = _Margin()
    findings: list[Finding] = []
    told = sorted(
        ((record["mono_ns"], node, record) for node, records in run.node_audit.items() for record in records),
        key=lambda item: item[0],
    )
    told_at = 0
    for plan in sorted(
        (plan for sent in plans.sent.values() for plan in sent), key=lambda plan: plan.sent_ns
    ):
        while told_at < len(told) and told[told_at][0] <= plan.sent_ns:
            worst.learn(told[told_at][1], told[told_at][2])
            told_at += 1
        facts = site.facts_at(plan.sent_ns)
        if facts is None or not facts.enforces or not site.in_window(plan.sent_ns):
            continue
        total_mw = facts.load_mw + sum(
            worst.node_mw(name, node, plan.sent_ns) for name, node in facts.nodes.items()
        )
        own = facts.nodes.get(plan.node)
        if own is None:
            findings.append(
                Finding(WORST_CASE, plan.sent_ns, plan.node, "", "a plan for a node of no site record")
            )
            continue
        raised_mw = worst.raised_mw(plan, own, round(news_s * SECOND_NS))
        bound_mw = site.allowed.value_at(plan.sent_ns) if raised_mw > 0 else site.due.value_at(plan.sent_ns)
        if bound_mw == UNBOUNDED:
            continue
        margin.see(bound_mw - total_mw, plan.sent_ns)
        if total_mw > bound_mw:
            deed = f"raises by {raised_mw / 1000:.0f} W" if raised_mw > 0 else "is sent"
            text = (
                f"plan {plan.id[0]}.{plan.id[1]} {deed} while the worst case is "
                f"{(total_mw - bound_mw) / 1000:.0f} W above {bound_mw / 1000:.0f} W"
            )
            findings.append(Finding(WORST_CASE, plan.sent_ns, plan.node, "", text))
    return Result(
        WORST_CASE,
        "the worst case of plans and read-backs holds",
        margin.checked,
        "plans under a limit",
        tuple(findings),
        None if margin.at_ns is None else margin.mw,
        margin.at_ns,
    )
