"""Watches simulated GPUs from the side: site draw and limits, ten times a second, into a file.

    python -m testbed.observer --sim-dir D --nodes n1,n2 --overhead-w 1000 --out samples.jsonl

It reads the shared state of the stand-in: not through NVML, and nothing that the controller says. The first line of the
file is a header, every other one a sample:

    {"hz": 10, "load_mw": 2000000, "gpus": {"n1": ["GPU-...", ...]}}
    {"mono_ns": 1, "site_draw_mw": 2500000, "draw_mw": {"n1": 250000}, "caps_mw": {"n1": [400000, ...]}}

``caps_mw`` are limits in force, in NVML order, as ``gpus`` names them. A node that cannot be read has null for both,
and then the site's draw is null too: unknown, not zero.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, TextIO

from testbed.gpus import GpuState, Node, snapshot

SECOND_NS: Final = 1_000_000_000
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

LimitSteps = Sequence[tuple[int, int | None]]
"""(start in CLOCK_MONOTONIC ns, limit in mW or None), ascending: the lowest limit in force, as it changes."""


# ------------------------------------------------------------------------------------------------------ observing


class Watch:
    """The simulated nodes, opened once each; a node that fails is opened anew at the next look."""

    def __init__(self, sim_dir: Path, nodes: Sequence[str], load_mw: int) -> None:
        self._dirs = {node: sim_dir / node for node in nodes}
        self._open: dict[str, Node] = {}
        self._load_mw = load_mw

    def look(self, node: str) -> list[GpuState] | None:
        """The node's GPUs in NVML order; None when it cannot be read."""
        try:
            if node not in self._open:
                self._open[node] = Node(self._dirs[node])
            return self._open[node].snapshot()
        except OSError:
            opened = self._open.pop(node, None)
            if opened is not None:
                opened.close()
            return None

    def sample(self) -> dict[str, object]:
        """One line of the file. Its instant is the middle of the look, which takes some tens of microseconds."""
        begun_ns = time.monotonic_ns()
        seen = {node: self.look(node) for node in self._dirs}
        draws = {
            node: None if gpus is None else sum(gpu.draw_mw for gpu in gpus) for node, gpus in seen.items()
        }
        known = [draw for draw in draws.values() if draw is not None]
        return {
            "mono_ns": (begun_ns + time.monotonic_ns()) // 2,
            "site_draw_mw": self._load_mw + sum(known) if len(known) == len(draws) else None,
            "draw_mw": draws,
            "caps_mw": {
                node: None if gpus is None else [gpu.effective_mw for gpu in gpus]
                for node, gpus in seen.items()
            },
        }

    def header(self, hz: float) -> dict[str, object]:
        names = {node: [gpu.uuid for gpu in self.look(node) or ()] for node in self._dirs}
        return {"hz": hz, "load_mw": self._load_mw, "gpus": names}

    def close(self) -> None:
        for node in self._open.values():
            node.close()
        self._open.clear()


def observe(watch: Watch, out: TextIO, hz: float) -> None:
    """Write samples until SIGTERM or SIGINT, which the caller has blocked.

    They are due at multiples of 1/hz from the start: a late one does not delay those after it.
    """
    period_ns = round(SECOND_NS / hz)
    out.write(_line(watch.header(hz)))
    due_ns = time.monotonic_ns()
    while True:
        out.write(_line(watch.sample()))
        out.flush()
        now_ns = time.monotonic_ns()
        due_ns += period_ns * max(1, -(-(now_ns - due_ns) // period_ns))
        if signal.sigtimedwait(STOP_SIGNALS, max(0, due_ns - now_ns) / SECOND_NS) is not None:
            return


def _line(entry: dict[str, object]) -> str:
    return json.dumps(entry, separators=(",", ":")) + "\n"


def write_snapshot(sim_dir: Path, nodes: Sequence[str], out: Path) -> None:
    """Write the limits of all GPUs as the checker's ``before.json`` and ``after.json`` want them. Raises OSError."""
    entries = [
        {
            "node": node,
            "uuid": gpu.uuid,
            "requested_mw": gpu.requested_mw,
            "effective_mw": gpu.effective_mw,
        }
        for node in nodes
        for gpu in snapshot(sim_dir / node)
    ]
    out.write_text(json.dumps(entries, indent=1) + "\n")


# -------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Sample:
    """Site, nodes and limits at one instant. None: could not be read."""

    mono_ns: int
    site_draw_mw: int | None
    draw_mw: dict[str, int | None]
    caps_mw: dict[str, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Samples:
    """A whole file. ``load_mw``: what counts as drawn beside the GPUs."""

    hz: float
    load_mw: int
    gpus: dict[str, tuple[str, ...]]
    samples: tuple[Sample, ...]

    def between(self, start_ns: float, end_ns: float) -> Iterator[Sample]:
        """The samples of ``[start, end)``."""
        return (sample for sample in self.samples if start_ns <= sample.mono_ns < end_ns)


@dataclass(frozen=True, slots=True)
class Excess:
    """The most that the site drew above the limit (below zero: the least room), at which instant, over how many
    samples. ``longest_gap_s``: the longest time without a sample, the interval's ends included."""

    worst_mw: int
    at_ns: int
    limit_mw: int
    samples: int
    longest_gap_s: float


def load_samples(path: Path) -> Samples:
    """Read a file that may end in a half-written line. Raises ValueError on anything else that is not as above."""
    complete, _, _ = path.read_text().rpartition("\n")
    lines = complete.split("\n")
    try:
        header = json.loads(lines[0])
        samples = tuple(_sample(json.loads(line)) for line in lines[1:])
        gpus = {node: tuple(uuids) for node, uuids in header["gpus"].items()}
        return Samples(header["hz"], header["load_mw"], gpus, samples)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a file of samples: {error!r}") from error


def _sample(entry: dict[str, object]) -> Sample:
    mono_ns, site, draws, caps = (entry[key] for key in ("mono_ns", "site_draw_mw", "draw_mw", "caps_mw"))
    if not isinstance(mono_ns, int) or not isinstance(draws, dict) or not isinstance(caps, dict):
        raise TypeError(f"not a sample: {entry}")
    if not isinstance(site, int | None):
        raise TypeError(f"site_draw_mw is {site!r}")
    limits = {node: None if values is None else tuple(values) for node, values in caps.items()}
    return Sample(mono_ns, site, draws, limits)


def worst_excess(samples: Samples, limits: LimitSteps, start_ns: int, end_ns: int) -> Excess:
    """The worst of site draw minus limit over ``[start, end)``, where a limit is in force.

    Raises ValueError when there is no such sample, or one whose draw is unknown: neither proves anything.
    """
    worst: tuple[int, int, int] | None = None
    count = 0
    seen: list[int] = []
    for sample in samples.between(start_ns, end_ns):
        seen.append(sample.mono_ns)
        limit_mw = _limit_at(limits, sample.mono_ns)
        if limit_mw is None:
            continue
        if sample.site_draw_mw is None:
            unread = ", ".join(node for node, draw_mw in sample.draw_mw.items() if draw_mw is None)
            raise ValueError(f"the draw at {sample.mono_ns} ns is unknown: {unread} could not be read")
        count += 1
        excess_mw = sample.site_draw_mw - limit_mw
        if worst is None or excess_mw > worst[0]:
            worst = (excess_mw, sample.mono_ns, limit_mw)
    if worst is None:
        raise ValueError(f"no sample under a limit between {start_ns} and {end_ns} ns")
    return Excess(*worst, samples=count, longest_gap_s=_longest_gap_s([start_ns, *seen, end_ns]))


def mean_site_draw_mw(samples: Samples, start_ns: int, end_ns: int) -> float:
    """Mean site draw over ``[start, end)``. Raises ValueError without a sample, or with an unknown one."""
    draws = [sample.site_draw_mw for sample in samples.between(start_ns, end_ns)]
    known = [draw for draw in draws if draw is not None]
    if not known or len(known) < len(draws):
        raise ValueError(f"{len(known)} known of {len(draws)} samples between {start_ns} and {end_ns} ns")
    return sum(known) / len(known)


def _limit_at(limits: LimitSteps, time_ns: int) -> int | None:
    held = None
    for step_ns, limit_mw in limits:
        if step_ns > time_ns:
            break
        held = limit_mw
    return held


def _longest_gap_s(instants: Iterable[int]) -> float:
    ordered = sorted(instants)
    return max(later - earlier for earlier, later in pairwise(ordered)) / SECOND_NS


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.observer", description="Sample simulated GPUs.")
    parser.add_argument("--sim-dir", type=Path, required=True, help="holds one folder per simulated node")
    parser.add_argument(
        "--nodes", required=True, metavar="N1,N2", help="names of the nodes, with commas between"
    )
    parser.add_argument(
        "--overhead-w", type=float, required=True, help="declared draw of one node beside its GPUs"
    )
    parser.add_argument(
        "--unmanaged-w", type=float, default=0.0, help="declared load of the site that is no node's"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hz", type=float, default=10.0)
    given = parser.parse_args(arguments)
    nodes = [node for node in given.nodes.split(",") if node]
    if not nodes or given.hz <= 0:
        parser.error("name at least one node, and a rate above 0 Hz")
    # Blocked before anything is opened, so that a stop never cuts a line in two.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    watch = Watch(given.sim_dir, nodes, round((given.overhead_w * len(nodes) + given.unmanaged_w) * 1000))
    try:
        with given.out.open("w") as out:
            observe(watch, out, given.hz)
    finally:
        watch.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
