"""What a check says: findings, how much was checked, and the worst margin."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it must be. ``mono_ns`` is None and ``node``, ``uuid`` empty where they say nothing."""

    invariant: str
    mono_ns: int | None
    node: str
    uuid: str
    text: str

    def line(self, zero_ns: int) -> str:
        when = "" if self.mono_ns is None else f" at {(self.mono_ns - zero_ns) / 1e9:+.3f} s"
        where = " ".join(part for part in (self.node, self.uuid) if part)
        return f"{self.text}{when}{f' ({where})' if where else ''}"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one invariant. ``margin_mw`` is the least room that was left (below zero: an excess)."""

    invariant: str
    title: str
    checked: int
    what: str
    findings: tuple[Finding, ...] = ()
    margin_mw: float | None = None
    margin_at_ns: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return not self.findings

    def lines(self, zero_ns: int, most_findings: int) -> list[str]:
        head = f"{self.invariant:>9}  {self.title}: "
        detail = (
            f"{self.checked} {self.what} checked" if self.checked else f"nothing to check: no {self.what}"
        )
        if self.margin_mw is not None and self.margin_at_ns is not None:
            at_s = (self.margin_at_ns - zero_ns) / 1e9
            detail += f", worst margin {self.margin_mw / 1000:.0f} W at {at_s:+.3f} s"
        if self.findings:
            head += f"BROKEN, {len(self.findings)} findings ({detail})"
        else:
            head += f"holds ({detail})" if self.checked else detail
        shown = [f"           - {finding.line(zero_ns)}" for finding in self.findings[:most_findings]]
        if len(self.findings) > most_findings:
            shown.append(f"           - and {len(self.findings) - most_findings} more")
        return [head, *shown, *(f"           note: {note}" for note in self.notes)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """All results of a run. ``zero_ns`` is the first instant of the run: texts give seconds after it."""

    run_dir: str
    zero_ns: int
    results: tuple[Result, ...]

    @property
    def holds(self) -> bool:
        return all(result.holds for result in self.results)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for result in self.results for finding in result.findings)

    def result(self, invariant: str) -> Result:
        """``files``, ``1``, ``2``, ``3``, ``7``, ``9``, ``placement`` or ``rebound`` by name. Raises KeyError."""
        for result in self.results:
            if result.invariant == invariant:
                return result
        raise KeyError(invariant)

    def unchecked(self, required: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the invariants named that had nothing to check. Raises KeyError on an unknown name."""
        return tuple(name for name in required if self.result(name).checked == 0)

    def text(self, most_findings: int = 20) -> str:
        lines = [line for result in self.results for line in result.lines(self.zero_ns, most_findings)]
        return "\n".join([*lines, "all that was checked holds" if self.holds else "NOT PROVEN"])

    def as_json(self) -> dict[str, Any]:
        """Plain values for a summary file."""
        return {
            "run_dir": self.run_dir,
            "holds": self.holds,
            "zero_ns": self.zero_ns,
            "results": [{**asdict(result), "holds": result.holds} for result in self.results],
        }
