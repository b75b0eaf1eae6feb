"""Kernels ran on the GPUs that the node agent took for their run's, and below the park cap until admitted."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from .files import KernelLine, RunFolder
from .plans import Plans, RunMap
from .site import Site
from .verdict import Finding, Result

PLACEMENT: Final = "placement"
WATT_MW: Final = 1000


def check_placement(run: RunFolder, site: Site, plans: Plans, runs: RunMap) -> Result:
    """The job finds its GPUs by CUDA order, the agent by its map: two ways that must agree."""
    names = _run_names(runs)
    rule = _ParkRule(run, site, plans, runs)
    told: set[tuple[str, str, str, str]] = set()
    findings: list[Finding] = []
    unplaced: set[str] = set()
    placed = judged = 0

    def tell(kernel: KernelLine, kind: str, text: str) -> None:
        key = (kernel.node, kernel.uuid, kernel.job, kind)
        if key not in told:
            told.add(key)
            findings.append(Finding(PLACEMENT, kernel.mono_ns, kernel.node, kernel.uuid, text))

    for kernel in run.kernels:
        if not kernel.job:
            tell(kernel, "nameless", "a kernel of no job")
            continue
        name = names.get(kernel.job, "")
        gpus = runs.named.get((kernel.node, name))
        if gpus is None:
            unplaced.add(f"{kernel.job} on {kernel.node}")
        else:
            placed += 1
            if kernel.uuid not in gpus:
                tell(
                    kernel,
                    "place",
                    f"a kernel of job {kernel.job} ran here, the agent's map gives it {sorted(gpus)}",
                )
        park_cap_mw = rule.cap_mw(kernel, name)
        if park_cap_mw is not None:
            judged += 1
            if kernel.effective_mw > park_cap_mw + WATT_MW:
                text = (
                    f"a kernel of job {kernel.job}, not admitted yet, ran at {kernel.effective_mw / 1000:.0f} W, "
                    f"above the park cap of {park_cap_mw / 1000:.0f} W"
                )
                tell(kernel, "park", text)
    if run.kernels and not placed:
        findings.append(
            Finding(PLACEMENT, None, "", "", "kernels ran, but no run_seen names a run of any of them")
        )
    notes = [f"{judged} kernels ran before their run was admitted, in a window"]
    if unplaced:
        notes.append(f"no run_seen, so not placed: {', '.join(sorted(unplaced))}")
    return Result(
        PLACEMENT, "jobs run where the agent thinks", placed, "kernels", tuple(findings), notes=tuple(notes)
    )


def _run_names(runs: RunMap) -> dict[str, str]:
    """``<job id>.<restart>`` -> run, for every run that an audit names."""
    known = {*runs.admitted, *(name for _, name in runs.named)}
    return {name.rpartition(":")[2]: name for name in known}


class _Parked:
    """When limits of each GPU were read back."""

    def __init__(self, run: RunFolder) -> None:
        self._reads: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        for node, records in run.node_audit.items():
            for record in records:
                if record["event"] == "readback":
                    times, values = self._reads.setdefault((node, record["uuid"]), ([], []))
                    times.append(record["mono_ns"])
                    values.append(record["enforced_mw"])

    def since(self, node: str, uuid: str, park_cap_mw: int, start_ns: int, end_ns: int) -> bool:
        """Was the GPU read back at or below the park cap between the two, or did it stand there before?"""
        times, values = self._reads.get((node, uuid), ([], []))
        first = max(0, bisect_right(times, start_ns) - 1)
        return any(value <= park_cap_mw + WATT_MW for value in values[first : bisect_right(times, end_ns)])


class _ParkRule:
    """Which park cap binds a kernel of a run that is not admitted yet."""

    def __init__(self, run: RunFolder, site: Site, plans: Plans, runs: RunMap) -> None:
        self._site, self._plans, self._runs = site, plans, runs
        self._parked = _Parked(run)
        self._started = {name.rpartition(":")[2]: seen_ns for name, seen_ns in runs.first_seen.items()}
        for kernel in run.kernels:
            self._started[kernel.job] = min(self._started.get(kernel.job, kernel.mono_ns), kernel.mono_ns)

    def cap_mw(self, kernel: KernelLine, name: str) -> int | None:
        """None when the run is admitted, began before the window, or nothing had been parked."""
        if self._runs.admitted.get(name, kernel.mono_ns + 1) <= kernel.mono_ns:
            return None
        window_ns = self._site.window_start(kernel.mono_ns)
        if window_ns is None or self._started[kernel.job] < window_ns:
            return None
        park_cap_mw = self._plans.park_cap_mw(kernel.node, kernel.mono_ns)
        if park_cap_mw is None:
            return None
        parked = self._parked.since(kernel.node, kernel.uuid, park_cap_mw, window_ns, kernel.mono_ns)
        return park_cap_mw if parked else None
