"""Invariant 3: no cap is lifted early, and none outlives its reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .audited import SAME_MW, Change
from .files import RunFolder
from .plans import Plans, RunMap
from .site import Site
from .steps import Steps
from .verdict import Finding, Result

REASON: Final = "3"

Key = tuple[str, str]


class Priors:
    """What a GPU's limit was before us: the snapshot's, or what a declared write made of it while it had no cap."""

    def __init__(self, run: RunFolder, changes: list[Change]) -> None:
        self._before = run.before
        self._written: dict[Key, list[tuple[int, int]]] = {}
        self._last: dict[Key, Change] = {}
        for change in changes:
            key = (change.line.node, change.line.uuid)
            earlier = self._last.get(key)
            self._last[key] = change
            over_ours = earlier is not None and (earlier.leaves_a_cap or self._contested(key, earlier))
            if change.foreign is not None and not over_ours:
                self._written.setdefault(key, []).append((change.line.mono_ns, change.line.requested_mw))

    def _contested(self, key: Key, earlier: Change) -> bool:
        """The earlier write was itself one over a cap of ours."""
        written = self._written.get(key, [])
        return earlier.foreign is not None and (not written or written[-1][0] != earlier.line.mono_ns)

    def at(self, key: Key, time_ns: float) -> int | None:
        """None when unknown."""
        written = [mw for at_ns, mw in self._written.get(key, []) if at_ns <= time_ns]
        before = self._before.get(key)
        return written[-1] if written else None if before is None else before.requested_mw

    def at_end(self, key: Key) -> list[int]:
        """Where the GPU may be in the end: at its prior limit, or where somebody else's last word left it."""
        prior_mw, last = self.at(key, float("inf")), self._last.get(key)
        left = [last.line.requested_mw] if last is not None and last.foreign is not None else []
        return ([] if prior_mw is None else [prior_mw]) + left


def _released(run: RunFolder) -> dict[str, Steps]:
    """1 while an admin has taken the node from us, by node."""
    return {
        node: Steps(
            [
                (record["mono_ns"], float(record["event"] == "released"))
                for record in records
                if record["event"] in ("released", "resumed")
            ],
            before=0,
        )
        for node, records in run.node_audit.items()
    }


def check_caps(run: RunFolder, site: Site, plans: Plans, runs: RunMap, changes: list[Change]) -> Result:
    """Raises in windows, then what is left after the last one."""
    priors = Priors(run, changes)
    released = _released(run)
    findings: list[Finding] = []
    raises = 0
    margin: tuple[float, int] | None = None
    for change in changes:
        time_ns = change.line.mono_ns
        if not change.rises or change.foreign is not None:
            continue
        if not site.in_window(time_ns) and not site.held(time_ns):
            continue
        raises += 1
        if released[change.line.node].value_at(change.decided_ns):
            continue
        ceiling_mw, text = _raise_ceiling(change, plans, runs, priors)
        room_mw = ceiling_mw - change.line.effective_mw
        if margin is None or room_mw < margin[0]:
            margin = (room_mw, change.line.mono_ns)
        if room_mw < -SAME_MW:
            findings.append(
                Finding(REASON, change.line.mono_ns, change.line.node, change.line.uuid, _told(change) + text)
            )
    left, judged, notes = _left_behind(run, site, priors, changes)
    return Result(
        REASON,
        "no cap is lifted early and none outlives its reason",
        raises + judged,
        f"raises in a window or a rebound ({raises}) and GPUs after it ({judged})",
        (*findings, *left),
        None if margin is None else margin[0],
        None if margin is None else margin[1],
        notes,
    )


def _told(change: Change) -> str:
    reason = "" if change.cause is None else f" (reason {change.cause['reason']!r})"
    return (
        f"raised in a window from {change.was_effective_mw / 1000:.0f} W to "
        f"{change.line.effective_mw / 1000:.0f} W{reason}: "
    )


def _raise_ceiling(change: Change, plans: Plans, runs: RunMap, priors: Priors) -> tuple[int, str]:
    """(the highest limit that a plan allowed, why)."""
    node, uuid, at_ns = change.line.node, change.line.uuid, change.decided_ns
    # A run that the controller has not admitted gives its GPUs no cap but the park cap.
    admitted = runs.admitted_at(node, uuid, at_ns)
    ceiling_mw = plans.ceiling_mw(node, at_ns, admitted, priors.at((node, uuid), at_ns) or 0)
    if ceiling_mw is None:
        return 0, "no plan in force names it"
    who = f"its runs are {', '.join(sorted(admitted))}" if admitted else "it has no admitted run"
    return ceiling_mw, f"plans in force allow {ceiling_mw / 1000:.0f} W, {who}"


def _left_behind(
    run: RunFolder, site: Site, priors: Priors, changes: list[Change]
) -> tuple[list[Finding], int, tuple[str, ...]]:
    """(findings, GPUs judged, notes) about the limits after the last window."""
    if site.held_at_end:
        return (
            [],
            0,
            ("the last window, or the rebound after it, is still open: what is left was not judged",),
        )
    findings = []
    last = {(line.node, line.uuid): line for line in run.limits}
    changed = {(change.line.node, change.line.uuid) for change in changes}
    for key in sorted({*run.before, *last}):
        for text in _wrong_at_end(run, key, priors, changed):
            findings.append(Finding(REASON, last[key].mono_ns if key in last else None, *key, text))
    for key in sorted(set(last) & set(run.after)):
        seen_mw, traced_mw = run.after[key].effective_mw, last[key].effective_mw
        if abs(seen_mw - traced_mw) > SAME_MW:
            text = f"after.json says {seen_mw / 1000:.0f} W, the trace ends at {traced_mw / 1000:.0f} W"
            findings.append(Finding(REASON, last[key].mono_ns, *key, text))
    return findings, len({*run.before, *last}), ()


def _wrong_at_end(run: RunFolder, key: Key, priors: Priors, changed: set[Key]) -> Iterator[str]:
    before, after = run.before.get(key), run.after.get(key)
    if before is None or after is None:
        missing = " and ".join(
            name for name, found in (("before.json", before), ("after.json", after)) if found is None
        )
        yield f"not in {missing}"
        return
    possible = priors.at_end(key)
    if any(abs(after.requested_mw - prior_mw) <= SAME_MW for prior_mw in possible):
        if possible == [before.requested_mw] and abs(after.effective_mw - before.effective_mw) > SAME_MW:
            yield f"in force are {after.effective_mw / 1000:.0f} W, before it were {before.effective_mw / 1000:.0f} W"
        return
    state = "above" if after.requested_mw > max(possible) else "left capped below"
    ours = "" if key in changed else ", without any change in the trace"
    yield f"ends at {after.requested_mw / 1000:.0f} W, {state} its prior {max(possible) / 1000:.0f} W{ours}"
