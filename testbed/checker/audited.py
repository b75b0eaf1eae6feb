"""Invariant 9: whatever changed a cap is in the audit. Invariant 7, light: what is not ours stays untouched."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .files import Foreign, LimitLine, Record, RunFolder
from .plans import Plans, RunMap
from .site import SECOND_NS, Site
from .verdict import Finding, Result

AUDITED: Final = "9"
FOREIGN: Final = "7"
SAME_MW: Final = 1000  # boards may round to whole watts

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """A limit that changed, and what stands behind it: a ``set`` of the node's audit, a declared write, or nothing."""

    line: LimitLine
    was_effective_mw: int
    cause: Record | None
    foreign: Foreign | None

    @property
    def decided_ns(self) -> int:
        """When it was decided: the audit's instant, since an effect may come late."""
        return self.cause["mono_ns"] if self.cause is not None else self.line.mono_ns

    @property
    def leaves_a_cap(self) -> bool:
        """The change put a cap of ours on the GPU: it is neither a restore nor somebody else's."""
        return self.cause is not None and not self.cause["reason"].startswith("restore")

    @property
    def rises(self) -> bool:
        return self.line.effective_mw > self.was_effective_mw


class _Causes:
    """Sets and declared writes, each of which can explain one change. To be asked in the order of the changes."""

    def __init__(self, run: RunFolder, late_ns: int) -> None:
        self._late_ns = late_ns
        self._coming: dict[Key, deque[Record]] = {}
        self._recent: dict[Key, list[Record]] = {}
        self._writes: dict[Key, list[Foreign]] = {}
        for node, records in run.node_audit.items():
            for record in records:
                if record["event"] == "set":
                    self._coming.setdefault((node, record["uuid"]), deque()).append(record)
        for write in run.foreign:
            self._writes.setdefault((write.node, write.uuid), []).append(write)

    def take_set(self, line: LimitLine) -> Record | None:
        """The latest unused set of this value, at most ``late`` before the change.

        One of the value in force goes before one of the value requested: a second set may come before the first
        one's effect, and then the first effect is traced beside the second request.
        """
        key = (line.node, line.uuid)
        coming, recent = self._coming.get(key, deque()), self._recent.setdefault(key, [])
        while coming and coming[0]["mono_ns"] <= line.mono_ns:
            recent.append(coming.popleft())
        while recent and recent[0]["mono_ns"] < line.mono_ns - self._late_ns:
            recent.pop(0)
        for value_mw in (line.effective_mw, line.requested_mw):
            for at in range(len(recent) - 1, -1, -1):
                if abs(recent[at]["cap_mw"] - value_mw) <= SAME_MW:
                    return recent.pop(at)
        return None

    def take_write(self, line: LimitLine) -> Foreign | None:
        """The first unused declared write of this value, within ``late`` of the change on either side."""
        writes = self._writes.get((line.node, line.uuid), [])
        for at, write in enumerate(writes):
            if abs(write.mono_ns - line.mono_ns) <= self._late_ns and _explains(write.mw, line):
                return writes.pop(at)
        return None


def _explains(mw: int, line: LimitLine) -> bool:
    return abs(mw - line.requested_mw) <= SAME_MW or abs(mw - line.effective_mw) <= SAME_MW


def find_changes(run: RunFolder, late_s: float) -> list[Change]:
    """All changes of limits, in order, with their causes. A GPU's first line says how it was made: no change."""
    causes = _Causes(run, round(late_s * SECOND_NS))
    last: dict[Key, LimitLine] = {}
    changes = []
    for line in run.limits:
        key = (line.node, line.uuid)
        previous = last.get(key)
        last[key] = line
        if previous is None:
            continue
        same = line.effective_mw == previous.effective_mw and line.requested_mw == previous.requested_mw
        cause = causes.take_set(line)
        if same:
            continue
        foreign = causes.take_write(line) if cause is None else None
        changes.append(Change(line, previous.effective_mw, cause, foreign))
    return changes


def check_audit(run: RunFolder, site: Site, plans: Plans, changes: list[Change], late_s: float) -> Result:
    """Invariant 9. Every change has its set before it; every set a reason, and in a window a plan behind it."""
    findings = [
        Finding(
            AUDITED,
            change.line.mono_ns,
            change.line.node,
            change.line.uuid,
            f"pid {change.line.pid} changed the limit from {change.was_effective_mw / 1000:.0f} W to "
            f"{change.line.effective_mw / 1000:.0f} W (requested {change.line.requested_mw / 1000:.0f} W), and no set "
            f"of the {late_s:g} s before and no declared write says so",
        )
        for change in changes
        if change.cause is None and change.foreign is None
    ]
    sets = 0
    for node, records in run.node_audit.items():
        released = False
        for record in records:
            if record["event"] in ("released", "resumed"):
                released = record["event"] == "released"
            if record["event"] != "set":
                continue
            sets += 1
            if text := _unbacked(record, node, site, plans, released=released):
                findings.append(Finding(AUDITED, record["mono_ns"], node, record["uuid"], text))
    foreign = sum(change.foreign is not None for change in changes)
    notes = (f"{foreign} changes are declared as foreign",) if foreign else ()
    what = f"changes and {sets} sets"
    return Result(
        AUDITED, "everything that changed a cap is audited", len(changes), what, tuple(findings), notes=notes
    )


def _unbacked(record: Record, node: str, site: Site, plans: Plans, *, released: bool) -> str:
    """What a set lacks; empty when nothing."""
    if not record["reason"].strip():
        return f"set to {record['cap_mw'] / 1000:.0f} W without a reason"
    at_ns = record["mono_ns"]
    if not site.in_window(at_ns) or released or plans.held_at(node, at_ns) is not None:
        return ""
    return f"set to {record['cap_mw'] / 1000:.0f} W in a window, and the node had accepted no plan"


def check_foreign(
    run: RunFolder, plans: Plans, runs: RunMap, changes: list[Change], notice_s: float
) -> Result:
    """Invariant 7, light. A GPU that no plan names is never touched; a foreign write over ours is reported."""
    findings = [*_untouched(run, plans, runs, changes)]
    ours: dict[Key, list[Change]] = {}
    for change in changes:
        ours.setdefault((change.line.node, change.line.uuid), []).append(change)
    writes = 0
    for key, of_gpu in ours.items():
        for earlier, change in zip([None, *of_gpu], of_gpu, strict=False):
            if change.foreign is None:
                continue
            writes += 1
            if text := _unreported(run, key, earlier, change, change.foreign, round(notice_s * SECOND_NS)):
                findings.append(Finding(FOREIGN, change.line.mono_ns, *key, text))
    conflicts = sum(
        record["event"] == "conflict" for records in run.node_audit.values() for record in records
    )
    notes = (
        (f"{writes} declared foreign writes, {conflicts} conflicts reported",) if writes or conflicts else ()
    )
    gpus = {(line.node, line.uuid) for line in run.limits}
    return Result(FOREIGN, "nothing foreign is damaged", len(gpus), "GPUs", tuple(findings), notes=notes)


def _untouched(run: RunFolder, plans: Plans, runs: RunMap, changes: list[Change]) -> Iterator[Finding]:
    """Sets and changes, not declared as foreign, of GPUs that no plan has named until then."""
    touches = [
        (change.line.node, change.line.uuid, change.decided_ns) for change in changes if not change.foreign
    ]
    for node, records in run.node_audit.items():
        touches += [
            (node, record["uuid"], record["mono_ns"]) for record in records if record["event"] == "set"
        ]
    told: set[Key] = set()
    for node, uuid, at_ns in sorted(touches, key=lambda touch: touch[2]):
        if (node, uuid) not in told and not _named(plans, runs, node, uuid, at_ns):
            told.add((node, uuid))
            yield Finding(FOREIGN, at_ns, node, uuid, "touched, though no plan had named this GPU")


def _named(plans: Plans, runs: RunMap, node: str, uuid: str, at_ns: int) -> bool:
    """A plan names a GPU by a cap of one of its runs, or by the park cap for all that have none."""
    for plan in plans.sent.get(node, []):
        if plan.sent_ns > at_ns:
            return False
        if plan.mode != "enforce":
            continue
        for step in plan.steps:
            if step.park_cap_mw is not None or any(
                uuid in runs.named.get((node, run), ()) for run in step.caps
            ):
                return True
    return False


def _unreported(
    run: RunFolder, key: Key, earlier: Change | None, change: Change, write: Foreign, notice_ns: int
) -> str:
    """A declared write over a cap of ours needs a conflict record of its value, if the agent lived to notice it.

    The agent may read what was requested before that comes into force, so the record counts from the write on.
    """
    node, uuid = key
    if earlier is None or not earlier.leaves_a_cap:
        return ""
    if abs(earlier.line.requested_mw - change.line.requested_mw) <= SAME_MW:
        return ""
    written_ns = min(write.mono_ns, change.line.mono_ns)
    later = [record for record in run.node_audit.get(node, []) if record["mono_ns"] >= written_ns]
    told = [record for record in later if record["event"] == "conflict" and record["uuid"] == uuid]
    if any(abs(record["found_mw"] - change.line.requested_mw) <= SAME_MW for record in told):
        return ""
    if not later or later[-1]["mono_ns"] < change.line.mono_ns + notice_ns:
        return ""
    return f"a foreign write of {change.line.requested_mw / 1000:.0f} W over our cap was never reported as a conflict"
