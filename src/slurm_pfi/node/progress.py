"""What jobs tell of their progress: the text of a datagram, and the newest counter of each run."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ..model import Progress
from .jobfile import JobFile

MAX_BYTES: Final = 256
MOST_COUNTED: Final = 1e24
MAX_RUNS: Final = 1024
_KEEP_S: Final = 15.0
_APART_S: Final = 0.25
_NUMBER: Final = rb"([0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,3})?)"
_DATAGRAM: Final = re.compile(rb"pfi-progress 1 %b ([a-z]{1,16})(?: of %b)?" % (_NUMBER, _NUMBER))


class RunKey(NamedTuple):
    """A run on this node. A requeued job is another run under the same id."""

    job_id: int
    restart: int


class Said(NamedTuple):
    """What a datagram says. ``total``: what the counter will be when the work is done, None where it is not told."""

    counter: float
    unit: str
    total: float | None


def parse_progress(data: bytes) -> Said | None:
    """A datagram; None for anything else, and for a counter or a total that nothing can have."""
    match = _DATAGRAM.fullmatch(data) if len(data) <= MAX_BYTES else None
    if match is None:
        return None
    counter = float(match.group(1))
    total = None if match.group(3) is None else float(match.group(3))
    if counter > MOST_COUNTED or (total is not None and not 0 < total <= MOST_COUNTED):
        return None
    return Said(counter, match.group(2).decode("ascii"), total)


def newest_runs(files: Iterable[JobFile]) -> dict[RunKey, JobFile]:
    """The run of each job that job files tell of: where an older one of the same job was left, the newest."""
    newest: dict[int, JobFile] = {}
    for file in files:
        if file.job_id not in newest or newest[file.job_id].restart < file.restart:
            newest[file.job_id] = file
    return {RunKey(file.job_id, file.restart): file for file in newest.values()}


@dataclass
class _Counter:
    """The last reports of one run in one unit. Times are CLOCK_MONOTONIC in seconds."""

    unit: str
    value: float
    at_s: float
    total: float | None = None
    kept: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=128))


class ProgressTable:
    """The newest counter of each run on this node and its rate over the last seconds.

    Only runs that have a job file are known, and only their own user is heard: nobody can fill the table.
    """

    def __init__(self) -> None:
        self._users: dict[RunKey, int] = {}
        self._restarts: dict[int, int] = {}
        self._counters: dict[RunKey, _Counter] = {}

    def expect(self, runs: Iterable[JobFile]) -> None:
        """The runs of this node, one for each job; what others told is forgotten."""
        self._users = {RunKey(run.job_id, run.restart): run.uid for run in list(runs)[:MAX_RUNS]}
        self._restarts = {key.job_id: key.restart for key in self._users}
        self._counters = {key: told for key, told in self._counters.items() if key in self._users}

    def run_of(self, job_id: int) -> RunKey | None:
        """The run of a job that is on this node now."""
        restart = self._restarts.get(job_id)
        return None if restart is None else RunKey(job_id, restart)

    def user_of(self, run: RunKey) -> int | None:
        """Whose run it is, by its job file."""
        return self._users.get(run)

    def take(self, run: RunKey, said: Said, now_s: float) -> None:
        """Take one report of a run that is expected. A counter that falls, or another unit, begins anew."""
        if run not in self._users:
            return
        known = self._counters.get(run)
        if known is None or known.unit != said.unit or said.counter < known.value:
            known = self._counters[run] = _Counter(unit=said.unit, value=said.counter, at_s=now_s)
        known.value, known.at_s, known.total = said.counter, now_s, said.total
        if not known.kept or now_s - known.kept[-1][0] >= _APART_S:
            known.kept.append((now_s, said.counter))
        while now_s - known.kept[0][0] > _KEEP_S and len(known.kept) > 2:
            known.kept.popleft()

    def progress(self, run: RunKey, now_s: float) -> Progress | None:
        """What the run told; None while it has told nothing."""
        known = self._counters.get(run)
        if known is None:
            return None
        since_s, first = known.kept[0]
        over_s = known.at_s - since_s
        rate = (known.value - first) / over_s if over_s > 0 else None
        return Progress(
            counter=known.value,
            unit=known.unit,
            rate_per_s=rate,
            age_s=now_s - known.at_s,
            total=known.total,
        )
