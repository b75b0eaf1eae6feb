"""Progress datagrams of jobs: whose they are is told by the kernel and the process tree, never by the text.

The sender's pid (SCM_CREDENTIALS) is followed up to a slurmstepd of root; its title names the job. Anyone may send,
so everything is bounded, and what cannot be placed is dropped and counted.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..bus.unix import SocketError
from ..model import Progress

MAX_BYTES: Final = 256
MAX_PARENTS: Final = 64
MAX_JOBS: Final = 1024
_PER_TURN: Final = 64
_PER_SECOND: Final = 2000
_KEEP_S: Final = 15.0
_APART_S: Final = 0.25
_DATAGRAM: Final = re.compile(
    rb"pfi-progress 1 ([0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,3})?) ([a-z]{1,16})"
)
_STEP_TITLE: Final = re.compile(rb"slurmstepd: \[([1-9][0-9]{0,9})\.")
_CREDENTIALS: Final = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent a datagram: the job that the process tree says, and the user that the kernel says."""

    job_id: int
    uid: int


def parse_progress(data: bytes) -> tuple[float, str] | None:
    """Counter and unit of a datagram; None for anything else, and for a counter that is not finite."""
    match = _DATAGRAM.fullmatch(data) if len(data) <= MAX_BYTES else None
    if match is None:
        return None
    counter = float(match.group(1))
    return (counter, match.group(2).decode("ascii")) if counter < 1e300 else None


class JobFinder:
    """From a pid to the job whose slurmstepd is above it."""

    def __init__(self, trusted_uids: frozenset[int], proc: Path = Path("/proc")) -> None:
        self._trusted = trusted_uids
        self._proc = proc

    def job_of(self, pid: int, uid: int) -> int | None:
        """The job id; None when the sender is gone, belongs to another user, or descends from no slurmstepd."""
        try:
            if (self._proc / str(pid)).stat().st_uid != uid:
                return None  # the pid is another process's by now
            for _ in range(MAX_PARENTS):
                name, parent = self._name_and_parent(pid)
                if name == "slurmstepd" and (job_id := self._step_job(pid)) is not None:
                    return job_id
                if parent <= 1:
                    return None
                pid = parent
        except (OSError, ValueError, IndexError):
            return None
        return None

    def _name_and_parent(self, pid: int) -> tuple[str, int]:
        text = (self._proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        head, _, rest = text.rpartition(")")
        return head.partition("(")[2], int(rest.split()[1])

    def _step_job(self, pid: int) -> int | None:
        """The job in the title of a slurmstepd. Anyone can take that name, so the owner counts."""
        folder = self._proc / str(pid)
        if folder.stat().st_uid not in self._trusted:
            return None
        match = _STEP_TITLE.match((folder / "cmdline").read_bytes())
        return int(match.group(1)) if match else None


@dataclass
class _Counter:
    """The last reports of one job in one unit."""

    uid: int
    unit: str
    value: float
    at_s: float
    kept: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=128))


class ProgressTable:
    """The newest counter of each job and its rate over the last seconds."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Counter] = {}

    def take(self, sender: Sender, counter: float, unit: str, now_s: float) -> None:
        """Take one report. A counter that falls, or another unit, begins anew."""
        known = self._jobs.get(sender.job_id)
        if known is None or known.unit != unit or counter < known.value or known.uid != sender.uid:
            if known is None and len(self._jobs) >= MAX_JOBS:
                return
            known = _Counter(uid=sender.uid, unit=unit, value=counter, at_s=now_s)
            self._jobs[sender.job_id] = known
        known.value, known.at_s = counter, now_s
        if not known.kept or now_s - known.kept[-1][0] >= _APART_S:
            known.kept.append((now_s, counter))
        while now_s - known.kept[0][0] > _KEEP_S and len(known.kept) > 2:
            known.kept.popleft()

    def progress(self, job_id: int, uid: int, now_s: float) -> Progress | None:
        """What the job said, if it is the job's own user who said it."""
        known = self._jobs.get(job_id)
        if known is None or known.uid != uid:
            return None
        since_s, first = known.kept[0]
        over_s = known.at_s - since_s
        rate = (known.value - first) / over_s if over_s > 0 else None
        return Progress(counter=known.value, unit=known.unit, rate_per_s=rate, age_s=now_s - known.at_s)

    def keep_only(self, job_ids: set[int]) -> None:
        """Forget jobs that are gone."""
        self._jobs = {job_id: known for job_id, known in self._jobs.items() if job_id in job_ids}


class ProgressSocket:
    """The datagram socket that every user may write to. ``dropped`` counts, by reason, what was not taken."""

    def __init__(
        self,
        path: Path,
        finder: JobFinder,
        table: ProgressTable,
        *,
        on_first_drop: Callable[[str, int], None],
    ) -> None:
        self._path = path
        self._finder = finder
        self._table = table
        self._on_first_drop = on_first_drop
        self._socket: socket.socket | None = None
        self._budget = _PER_SECOND
        self._budget_s = 0.0
        self._resume: asyncio.TimerHandle | None = None
        self.dropped: Counter[str] = Counter()

    def open(self) -> None:
        """Bind, mode 0666. Raises SocketError when something other than a dead socket of ours lies there."""
        if self._path.is_symlink() or (self._path.exists() and not self._path.is_socket()):
            raise SocketError(f"{self._path} exists and is not a socket; it is left alone: move it away")
        # Whoever holds the node's lock owns this name: a socket that lies there was left behind.
        self._path.unlink(missing_ok=True)
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            with _short(self._path) as address:
                opened.bind(address)
            self._path.chmod(0o666)
        except OSError as error:
            opened.close()
            raise SocketError(f"cannot listen at {self._path}: {error.strerror or error}") from error
        self._socket = opened
        asyncio.get_running_loop().add_reader(opened, self._readable)

    def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._resume is not None:
            self._resume.cancel()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._path.unlink(missing_ok=True)
            self._socket.close()
            self._socket = None

    def _readable(self) -> None:
        assert self._socket is not None
        now_s = time.monotonic()
        if now_s - self._budget_s >= 1.0:
            self._budget, self._budget_s = _PER_SECOND, now_s
        for _ in range(_PER_TURN):
            if self._budget <= 0:
                self._pause(self._budget_s + 1.0 - now_s)
                return
            self._budget -= 1
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(
                    MAX_BYTES + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except OSError:
                return
            self._take(data, ancillary, flags, now_s)

    def _pause(self, pause_s: float) -> None:
        """A flood of datagrams must not keep the agent from its limits; senders never wait for us."""
        loop = asyncio.get_running_loop()
        assert self._socket is not None
        loop.remove_reader(self._socket)
        self._drop("more than can be read", 0)
        self._resume = loop.call_later(
            max(0.01, pause_s), lambda: self._socket and loop.add_reader(self._socket, self._readable)
        )

    def _take(self, data: bytes, ancillary: list[tuple[int, int, bytes]], flags: int, now_s: float) -> None:
        credentials = [raw for level, kind, raw in ancillary if (level, kind) == (1, socket.SCM_CREDENTIALS)]
        if len(credentials) != 1 or len(credentials[0]) != _CREDENTIALS.size:
            self._drop("no credentials", 0)
            return
        pid, uid, _ = _CREDENTIALS.unpack(credentials[0])
        said = None if flags & socket.MSG_TRUNC else parse_progress(data)
        if said is None:
            self._drop("not a progress datagram", uid)
            return
        job_id = self._finder.job_of(pid, uid)
        if job_id is None:
            self._drop("sender is in no job of this node", uid)
            return
        self._table.take(Sender(job_id=job_id, uid=uid), *said, now_s)

    def _drop(self, why: str, uid: int) -> None:
        self.dropped[why] += 1
        if self.dropped[why] == 1:
            self._on_first_drop(why, uid)


class _short:  # noqa: N801 - a context manager used like a function
    """A path as a socket address, by way of its folder's descriptor where it is too long (unix(7): 107 bytes)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder: int | None = None

    def __enter__(self) -> str:
        if len(os.fsencode(self._path)) <= 107:
            return os.fspath(self._path)
        self._folder = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._folder}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            os.close(self._folder)
