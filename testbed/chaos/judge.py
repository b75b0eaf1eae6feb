"""The judge: every change of a limit in the stand-in's trace, against what was ordered. Imports nothing of slurm_pfi.

A rise must be within a plan that the node had accepted (its audit) and not yet left behind. A plan is left behind
when a report held a later one and promised a ceiling below the rise: so the judgement goes by the order of events,
and a loaded machine changes nothing in it. A promise that the trace belies is a fault of its own.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from testbed import gpus

from .record import Heard, Order, Record

TOLERANCE_MW: Final = 1000
IN_FLIGHT_NS: Final = 5_000_000_000
"""How long after a run, a step or a plan a set decided before may still come: far longer than any takes here."""


@dataclass(frozen=True, slots=True)
class Violation:
    """``kind``: lifted_early, false_promise, unasked, above_prior, left_capped, journal, ratchet."""

    kind: str
    node: str
    uuid: str
    at_ns: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.at_ns / 1e9:.6f} on {self.node} {self.uuid}: {self.text}"


@dataclass(frozen=True, slots=True)
class Change:
    """One change of an effective limit, with the one before it. ``pid`` is who set it, 0 the driver itself."""

    at_ns: int
    before_mw: int
    after_mw: int
    pid: int


def judge(record: Record) -> list[Violation]:
    """Everything that the trace and the audit say against the node."""
    accepted = accepted_plans(record)
    found: list[Violation] = []
    for uuid, changes in changes_of(record).items():
        found.extend(_rises(record, accepted, uuid, changes))
        found.extend(_promises(record, uuid, changes))
    found.extend(_priors_recorded(record))
    return sorted(found, key=lambda violation: violation.at_ns)


def changes_of(record: Record) -> dict[str, list[Change]]:
    """Every change since the priors stood, by GPU, in the order of time."""
    found: dict[str, list[Change]] = {uuid: [] for uuid in record.priors}
    level = dict(record.priors)
    begun_ns = min(record.spawns_ns, default=0)
    for line in gpus.read_trace(record.sim):
        if line.event == "limit" and line.mono_ns >= begun_ns and line.effective_mw != level[line.uuid]:
            found[line.uuid].append(Change(line.mono_ns, level[line.uuid], line.effective_mw, line.pid))
            level[line.uuid] = line.effective_mw
    return found


def audit_lines(folder: Path) -> list[dict[str, Any]]:
    """The audit of one node; a line torn by a kill is left out."""
    path = folder / "audit.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def accepted_plans(record: Record) -> list[tuple[int, Order]]:
    """What the node took, with the instant, in that order."""
    by_seq = {order.seq: order for order in record.orders}
    return [
        (line["mono_ns"], by_seq[line["seq"]])
        for line in audit_lines(record.folder)
        if line["event"] == "plan_accepted"
    ]


# ------------------------------------------------------------------------------------------------------- rises


def _rises(
    record: Record, accepted: list[tuple[int, Order]], uuid: str, changes: list[Change]
) -> Iterator[Violation]:
    reasons = _Reasons(record, accepted, uuid)
    prior_mw = record.priors[uuid]
    for change in changes:
        if change.pid == 0 and record.falls:
            continue
        rise = f"{change.before_mw} -> {change.after_mw} mW"
        if change.after_mw > prior_mw:
            yield Violation("above_prior", record.node, uuid, change.at_ns, f"{rise}, prior {prior_mw} mW")
        elif change.after_mw > change.before_mw:
            why_not = reasons.against(change)
            if why_not:
                kind, text = why_not
                yield Violation(kind, record.node, uuid, change.at_ns, f"{rise}: {text}")


class _Reasons:
    """Which plan may have lifted a limit of one GPU."""

    def __init__(self, record: Record, accepted: list[tuple[int, Order]], uuid: str) -> None:
        self._record = record
        self._accepted = accepted
        self._accepted_ns = [at_ns for at_ns, _ in accepted]
        self._heard_ns = [heard.received_ns for heard in record.heard]
        self._uuid = uuid
        self._jobs = [job for job in record.jobs if uuid in job.uuids]

    def against(self, change: Change) -> tuple[str, str] | None:
        """Why this rise should not have been: its kind and a text; None when it was ordered."""
        released = (begin <= change.at_ns <= end + IN_FLIGHT_NS for begin, end in self._record.releases_ns)
        if any(released):
            return None
        first_seq = self._left_behind(change)
        until = bisect.bisect_right(self._accepted_ns, change.at_ns)
        candidates = [(at, order) for at, order in self._accepted[:until] if order.seq >= first_seq]
        allowing = [
            (at_ns, begins_ns, park_mw)
            for at_ns, order in candidates
            for begins_ns, park_mw, cap_mw in self._allowed(order, change.at_ns)
            if cap_mw >= change.after_mw - TOLERANCE_MW
        ]
        if not allowing:
            plans = ", ".join(str(order.seq) for _, order in candidates) or "none"
            return "lifted_early", f"allowed by no plan that could be in force ({plans})"
        asked_ns = change.at_ns - self._record.effect_ns
        spawned = bisect.bisect_right(self._record.spawns_ns, asked_ns) - 1
        spawned_ns = self._record.spawns_ns[max(spawned, 0)]
        # An agent that was started in between raises nothing by an order that another one had accepted.
        if any(park is None or max(at, begins) >= spawned_ns for at, begins, park in allowing):
            return None
        return "unasked", f"by an order from before the agent's start at {spawned_ns / 1e9:.6f}"

    def _left_behind(self, change: Change) -> int:
        """The first plan that may still have been in force on this GPU as to a limit this high.

        Without persistence mode every ceiling is the default limit; then only time tells.
        """
        place = bisect.bisect_right(self._heard_ns, change.at_ns)
        for heard in reversed(self._record.heard[:place]):
            ceiling_mw = heard.ceilings.get(self._uuid)
            if heard.held is None:
                continue
            if heard.received_ns + IN_FLIGHT_NS < change.at_ns:
                return heard.held
            if ceiling_mw is not None and ceiling_mw < change.after_mw - TOLERANCE_MW:
                return heard.held
        return 0

    def _allowed(self, order: Order, at_ns: int) -> Iterator[tuple[int, int | None, int]]:
        """For each step that could be in force at this instant: its begin, its park cap, what it allows here."""
        prior_mw = self._record.priors[self._uuid]
        for place, step in enumerate(order.steps):
            begins_ns = order.sent_ns + step.starts_ns
            ends_ns = (
                order.sent_ns + order.steps[place + 1].starts_ns if place + 1 < len(order.steps) else None
            )
            if begins_ns > at_ns or (ends_ns is not None and ends_ns + IN_FLIGHT_NS < at_ns):
                continue
            if step.park_mw is None:
                yield begins_ns, None, prior_mw
                continue
            here = [
                step.caps[job.job_id]
                for job in self._jobs
                if job.job_id in step.caps
                and job.begin_ns <= at_ns
                and (job.end_ns is None or job.end_ns + IN_FLIGHT_NS >= at_ns)
            ]
            caps = [prior_mw if cap_mw is None else cap_mw for cap_mw in here]
            yield begins_ns, step.park_mw, min(prior_mw, max([step.park_mw, *caps]))


def _promises(record: Record, uuid: str, changes: list[Change]) -> Iterator[Violation]:
    """A ceiling that was reported while the limit stood above it, and did not rise on the report's way."""
    times = [change.at_ns for change in changes]
    last_ns = 0
    for heard in record.heard:
        ceiling_mw = heard.ceilings.get(uuid)
        place = bisect.bisect_right(times, heard.received_ns)
        level_mw = changes[place - 1].after_mw if place else record.priors[uuid]
        on_its_way = any(
            change.after_mw > change.before_mw for change in _since(changes, times, last_ns, place)
        )
        if ceiling_mw is not None and level_mw > ceiling_mw + TOLERANCE_MW and not on_its_way:
            text = f"{ceiling_mw} mW promised under plan {heard.held}, {level_mw} mW in force"
            yield Violation("false_promise", record.node, uuid, heard.received_ns, text)
        if record.falls and ceiling_mw is not None and ceiling_mw < record.priors[uuid]:
            text = f"{ceiling_mw} mW promised, but without persistence mode only the default limit is sure"
            yield Violation("false_promise", record.node, uuid, heard.received_ns, text)
        last_ns = heard.received_ns


def rises(record: Record) -> int:
    """How many rises were judged: as many as there were, but for those that the driver made by itself."""
    changes = (change for found in changes_of(record).values() for change in found)
    return sum(change.pid != 0 and change.after_mw > change.before_mw for change in changes)


def fallen(record: Record) -> int:
    """How often a cap fell back to the default because nobody held the GPU."""
    changes = (change for found in changes_of(record).values() for change in found)
    return sum(change.pid == 0 and change.after_mw > change.before_mw for change in changes)


def _since(changes: list[Change], times: list[int], after_ns: int, place: int) -> Iterable[Change]:
    return changes[bisect.bisect_right(times, after_ns) : place]


# ------------------------------------------------------------------------------------------------- the journal


class _Entry(msgspec.Struct, frozen=True):
    uuid: str
    prior_mw: int
    issued_mw: tuple[int, ...]
    current_mw: int | None


class _File(msgspec.Struct, frozen=True):
    entry: msgspec.Raw
    sha256: str


def read_journal(folder: Path) -> tuple[dict[str, _Entry], list[str]]:
    """The entries, and what is wrong with the folder. Temporary files are the writer's business while it lives."""
    entries: dict[str, _Entry] = {}
    wrong: list[str] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_File)
            if hashlib.sha256(bytes(file.entry)).hexdigest() != file.sha256:
                raise ValueError("wrong checksum")
            entry = msgspec.json.decode(file.entry, type=_Entry)
        except FileNotFoundError:
            continue
        except ValueError as error:
            wrong.append(f"{path.name}: {error}")
        else:
            entries[entry.uuid] = entry
    return entries, wrong


def judge_journal(record: Record, requested: dict[str, int], at_ns: int) -> list[Violation]:
    """What must be written down while every process of ours is dead: each limit that is not as it was before us."""
    entries, wrong = read_journal(record.folder / "journal")
    found = [Violation("journal", record.node, "", at_ns, text) for text in wrong]

    def say(kind: str, uuid: str, text: str) -> None:
        found.append(Violation(kind, record.node, uuid, at_ns, text))

    for uuid, entry in entries.items():
        prior_mw = record.priors.get(uuid)
        if entry.prior_mw != prior_mw:
            say("ratchet", uuid, f"prior recorded as {entry.prior_mw} mW, it was {prior_mw} mW")
    for uuid, limit_mw in requested.items():
        if limit_mw == record.priors[uuid]:
            continue
        known = entries.get(uuid)
        if known is None or known.current_mw is None or limit_mw not in known.issued_mw:
            say("journal", uuid, f"{limit_mw} mW stands, prior {record.priors[uuid]} mW, recorded: {known}")
    return found


def judge_rest(record: Record, states: Iterable[gpus.GpuState], at_ns: int) -> list[Violation]:
    """After the last window: every GPU at its prior limit, and nothing in the journal that says otherwise."""
    entries, wrong = read_journal(record.folder / "journal")
    found = [Violation("journal", record.node, "", at_ns, text) for text in wrong]
    for state in states:
        prior_mw = record.priors[state.uuid]
        if (state.requested_mw, state.effective_mw) != (prior_mw, prior_mw):
            text = f"{state.requested_mw}/{state.effective_mw} mW, prior {prior_mw} mW"
            found.append(Violation("left_capped", record.node, state.uuid, at_ns, text))
    for uuid, entry in entries.items():
        if uuid not in record.priors or entry.prior_mw != record.priors[uuid]:
            found.append(
                Violation("ratchet", record.node, uuid, at_ns, f"prior {entry.prior_mw} mW recorded")
            )
        if entry.current_mw is not None:
            text = f"still says that {entry.current_mw} mW of ours stands"
            found.append(Violation("journal", record.node, uuid, at_ns, text))
    return found


def _priors_recorded(record: Record) -> Iterator[Violation]:
    for line in audit_lines(record.folder):
        if line["event"] == "prior" and line["prior_mw"] != record.priors[line["uuid"]]:
            text = f"prior said to be {line['prior_mw']} mW, it was {record.priors[line['uuid']]} mW"
            yield Violation("ratchet", record.node, line["uuid"], line["mono_ns"], text)


__all__ = ["Heard", "Violation", "judge", "judge_journal", "judge_rest"]
