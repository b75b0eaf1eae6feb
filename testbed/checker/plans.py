"""Which plans a node may be following at an instant, and what they let a GPU have."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .files import Record, RunFolder
from .site import SECOND_NS

# A step's begin is known to some milliseconds: the audit's entry, the sending and the receipt lie apart.
STEP_SLACK_NS: Final = SECOND_NS // 20

PlanId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PlanStep:
    starts_in_ns: int
    park_cap_mw: int | None
    caps: dict[str, int | None]

    def values(self, runs: Iterable[str], prior_mw: int, *, ended_too: bool) -> list[int]:
        """The limits that this step gives to a GPU with these runs.

        ``ended_too``: also what it falls to should its runs end before the next plan.
        """
        resting_mw = prior_mw if self.park_cap_mw is None else self.park_cap_mw
        caps = [
            prior_mw if self.caps[run] is None else self.caps[run] or 0 for run in runs if run in self.caps
        ]
        return [*caps, resting_mw] if ended_too or not caps else caps


@dataclass(slots=True)
class Plan:
    """A plan as sent. ``accepted_ns`` is when the node took it."""

    node: str
    id: PlanId
    sent_ns: int
    mode: str
    steps: tuple[PlanStep, ...]
    accepted_ns: int | None = None
    refused_ns: int | None = None

    def steps_at(self, time_ns: int, begun_slack_ns: int = STEP_SLACK_NS) -> list[PlanStep]:
        """Steps that may be in force: begun at the earliest receipt, not surely replaced by the next one.

        ``begun_slack_ns`` above zero counts a step that much before its begin, below zero that much after it.
        """
        found = []
        for at, step in enumerate(self.steps):
            begins_in_ns = max(0, step.starts_in_ns - begun_slack_ns) if at else 0
            if self.sent_ns + begins_in_ns > time_ns:
                break
            following = self.steps[at + 1] if at + 1 < len(self.steps) else None
            if (
                following is not None
                and self.accepted_ns is not None
                and self.accepted_ns + following.starts_in_ns < time_ns - STEP_SLACK_NS
            ):
                continue
            found.append(step)
        return found


class Plans:
    """All plans of a run, by node."""

    def __init__(self, run: RunFolder) -> None:
        self.sent: dict[str, list[Plan]] = {node: [] for node in run.nodes}
        self._accepted: dict[str, list[tuple[int, PlanId]]] = {}
        for record in run.controller:
            if record["event"] == "plan_sent":
                plan = _plan(record)
                self.sent.setdefault(plan.node, []).append(plan)
        for node, records in run.node_audit.items():
            self._answer(node, records)
        self._times = {node: [plan.sent_ns for plan in plans] for node, plans in self.sent.items()}

    def _answer(self, node: str, records: list[Record]) -> None:
        by_id = {plan.id: plan for plan in self.sent.get(node, [])}
        accepted: list[tuple[int, PlanId]] = []
        for record in records:
            if record["event"] not in ("plan_accepted", "plan_refused"):
                continue
            plan = by_id.get((record["epoch"], record["seq"]))
            if record["event"] == "plan_accepted":
                highest = max(accepted[-1][1], (record["epoch"], record["seq"])) if accepted else None
                accepted.append((record["mono_ns"], highest or (record["epoch"], record["seq"])))
                if plan is not None and plan.accepted_ns is None:
                    plan.accepted_ns = record["mono_ns"]
            elif plan is not None:
                plan.refused_ns = record["mono_ns"]
        self._accepted[node] = accepted

    def held_at(self, node: str, time_ns: int) -> PlanId | None:
        """The plan that the node had accepted by then."""
        accepted = self._accepted.get(node, [])
        at = bisect_right(accepted, time_ns, key=lambda item: item[0])
        return accepted[at - 1][1] if at else None

    def candidates(self, node: str, time_ns: int, since_ns: int | None = None) -> list[Plan]:
        """Plans that may rule the node at that instant: the one held, and each one sent since, unless refused.

        With ``since_ns`` also those that ruled it at some instant since then.
        """
        held = self.held_at(node, time_ns if since_ns is None else since_ns)
        found = []
        plans = self.sent.get(node, [])
        for at in range(bisect_right(self._times.get(node, []), time_ns) - 1, -1, -1):
            plan = plans[at]
            if held is not None and plan.id < held:
                break
            if plan.refused_ns is None or plan.refused_ns > time_ns:
                found.append(plan)
        return found

    def any_sent(self, node: str, time_ns: int) -> bool:
        return bool(self._times.get(node)) and self._times[node][0] <= time_ns

    def ceiling_mw(self, node: str, time_ns: int, runs: Iterable[str], prior_mw: int) -> int | None:
        """The highest limit that any candidate gives to a GPU with these runs, now or when they end.

        A plan in mode observe lets go: it gives the prior limit. None when no plan gives anything.
        """
        values = []
        runs = tuple(runs)
        for plan in self.candidates(node, time_ns):
            for step in plan.steps_at(time_ns):
                enforced = step.values(runs, prior_mw, ended_too=True)
                values.append(max(enforced) if plan.mode == "enforce" else prior_mw)
        return max(values, default=None)

    def park_cap_mw(self, node: str, time_ns: int) -> int | None:
        """The highest park cap that the node may be following; None when it may be following none."""
        parks = [
            step.park_cap_mw for plan in self.candidates(node, time_ns) for step in plan.steps_at(time_ns)
        ]
        known = [park for park in parks if park is not None]
        return max(known) if known and len(known) == len(parks) else None


def _plan(record: Record) -> Plan:
    steps = tuple(
        PlanStep(round(step["starts_in_s"] * SECOND_NS), step["park_cap_mw"], dict(step["caps"]))
        for step in record["steps"]
    )
    return Plan(record["node"], (record["epoch"], record["seq"]), record["mono_ns"], record["mode"], steps)


class RunMap:
    """Which runs a GPU had, and since when runs were admitted, as the audits say."""

    def __init__(self, run: RunFolder) -> None:
        self._changes: dict[tuple[str, str], tuple[list[int], list[frozenset[str]]]] = {}
        self.named: dict[tuple[str, str], set[str]] = {}
        self.first_seen: dict[str, int] = {}
        self.admitted: dict[str, int] = {}
        for record in run.controller:
            if record["event"] == "admitted":
                self.admitted.setdefault(record["run"], record["mono_ns"])
        for node, records in run.node_audit.items():
            self._read(node, records)

    def _read(self, node: str, records: list[Record]) -> None:
        gpus_of: dict[str, set[str]] = {}
        for record in records:
            if record["event"] not in ("run_seen", "run_gone"):
                continue
            name = record["run"]
            if record["event"] == "run_seen":
                self.first_seen[name] = min(self.first_seen.get(name, record["mono_ns"]), record["mono_ns"])
                if not record["gpus"]:
                    continue  # a run without GPUs, or an agent that does not know them yet: what was known stays
            now = set(record["gpus"]) if record["event"] == "run_seen" else set()
            if record["event"] == "run_seen":
                self.named.setdefault((node, name), set()).update(now)
            touched = gpus_of.get(name, set()) | now
            gpus_of[name] = now
            for uuid in touched:
                runs = frozenset(other for other, gpus in gpus_of.items() if uuid in gpus)
                times, values = self._changes.setdefault((node, uuid), ([], []))
                times.append(record["mono_ns"])
                values.append(runs)

    def runs_at(self, node: str, uuid: str, time_ns: int) -> frozenset[str]:
        times, values = self._changes.get((node, uuid), ([], []))
        at = bisect_right(times, time_ns)
        return values[at - 1] if at else frozenset()

    def admitted_at(self, node: str, uuid: str, time_ns: int) -> frozenset[str]:
        """The GPU's runs that the controller had admitted by then."""
        runs = self.runs_at(node, uuid, time_ns)
        return frozenset(run for run in runs if self.admitted.get(run, time_ns + 1) <= time_ns)
