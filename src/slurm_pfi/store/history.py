"""The history: windows, samples, events, ended runs and what is remembered of kinds of work, in one SQLite file.

It is written by a thread of its own: the controller hands rows over and never waits for a disk. A full disk, a
read-only folder or a damaged file costs history and nothing else; each is said once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from . import history_db as db
from .rows import EndedRun, EventRow, Kin, Row, RunFacts, RunSample, SiteSample, WindowRow

GATHER_S: Final = 1.0
"""Rows of so long go to disk together."""

RETRY_S: Final = 10.0
LEAST_RETRY_S: Final = 0.05
MOST_QUEUED: Final = 50_000
"""Rows that wait for the disk at most, some minutes of a busy window; beyond it the newest are lost, and counted."""

MOST_BATCH: Final = 5_000
TIDY_S: Final = 600.0
TIDY_ROWS: Final = 20_000
MOST_ASIDE: Final = 3
"""Damaged files that one process puts aside; a disk that damages more of them is left alone."""

MOST_WINDOWS: Final = 10_000
MOST_EVENTS: Final = 5_000
MOST_ENDED: Final = 1_000

T = TypeVar("T")


class HistoryError(Exception):
    """The history cannot be read; the message says why."""


class _BusyError(Exception):
    """Another process writes this history."""


@dataclass(frozen=True, slots=True)
class RunMeans:
    """A run between two instants: how long it was there, and means over the time in which they are known."""

    present_s: float
    draw_mw: float | None
    share: float | None
    lowest_cap_mw: int | None


class History:
    """One file. Every method may be called from any thread; only the reading ones wait, and only they raise.

    ``days`` is how long rows are kept, ``most_bytes`` how large the file may grow before the oldest samples go.
    ``on_fault(text)`` is called from the writing thread: once when writing begins to fail, once when it works again.
    """

    def __init__(
        self,
        path: Path,
        *,
        days: float,
        most_bytes: int,
        on_fault: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._days = days
        self._most_bytes = most_bytes
        self._on_fault = on_fault
        self._clock = clock
        self._queue: deque[Row] = deque()
        self._changed = threading.Condition()
        self._writing = False
        self._flushing = 0
        self._closing = False
        self._tried = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: sqlite3.Connection | None = None
        self._lock_fd: int | None = None
        self._inode: tuple[int, int] | None = None
        self._last_window = 0
        self._aside = 0
        self._next_tidy_s = 0.0
        self.trouble = ""
        """Why nothing can be written now; empty while all is well."""
        self.lost = 0
        """Rows that were lost since the start."""
        self.left_open: WindowRow | None = None
        """The window that was open when the last controller ended."""
        self.last_seen_s: float | None = None
        """When the last controller took its last sample of the site (Unix seconds)."""

    # ------------------------------------------------------------------------------------------------ life

    def start(self, wait_s: float = 2.0) -> None:
        """Begin to write. Waits for the file to be opened, ``wait_s`` at most: a slow disk is not waited for."""
        self._thread = threading.Thread(target=self._write_forever, name="history", daemon=True)
        self._thread.start()
        self._tried.wait(wait_s)

    def close(self, wait_s: float = 5.0) -> None:
        """Write what is queued and end. What a dead disk has not taken within ``wait_s`` is lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(wait_s)

    def flush(self, wait_s: float = 5.0) -> bool:
        """Wait until everything handed over so far is on disk or lost; False if that took longer than ``wait_s``."""
        ends_s = time.monotonic() + wait_s
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            done = self._changed.wait_for(
                lambda: not self._queue and not self._writing, max(0.0, ends_s - time.monotonic())
            )
            self._flushing -= 1
        return done

    # ------------------------------------------------------------------------------------------------ writing

    def add(self, rows: Iterable[Row]) -> None:
        """Hand rows over. Never waits for the disk."""
        with self._changed:
            for row in rows:
                if len(self._queue) >= MOST_QUEUED:
                    self.lost += 1
                else:
                    self._queue.append(row)
            self._changed.notify_all()

    def remember(self, kin: Kin) -> None:
        """Keep what was learned of a kind of work, in place of what was known of it before."""
        self.add((kin,))

    def new_window_id(self) -> int | None:
        """The id of a window that opens now: 1, 2, ... for as long as the file lives. None while nothing is written."""
        with self._changed:
            if self.trouble or not self._tried.is_set():
                return None
            self._last_window += 1
            return self._last_window

    def _write_forever(self) -> None:
        while True:
            with contextlib.suppress(_NothingYetError):
                self._ready()
            self._tried.set()
            batch, ends = self._next_batch()
            if batch and not self._write(batch):
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, LEAST_RETRY_S)
                    self._changed.wait_for(lambda: self._closing or self._flushing > 0, RETRY_S)
            self._done()
            if ends:
                break
            self._tidy()
        self._shut()

    def _next_batch(self) -> tuple[list[Row], bool]:
        """What to write now, after it had time to gather; and whether this is the end."""
        with self._changed:
            idle_s = RETRY_S if self.trouble else TIDY_S
            self._changed.wait_for(lambda: self._queue or self._closing, idle_s)
            self._changed.wait_for(
                lambda: self._closing or self._flushing > 0 or len(self._queue) >= MOST_BATCH, GATHER_S
            )
            batch = [self._queue.popleft() for _ in range(min(MOST_BATCH, len(self._queue)))]
            self._writing = bool(batch)
            return batch, self._closing and not self._queue

    def _done(self) -> None:
        with self._changed:
            self._writing = False
            self._changed.notify_all()

    def _write(self, batch: list[Row]) -> bool:
        """True once the rows are on disk or lost for good; False when they wait for another try."""
        try:
            connection = self._ready()
            db.insert(connection, batch)
        except _NothingYetError:
            return self._keep(batch)
        except sqlite3.DatabaseError as error:
            return self._failed(error, batch)
        except Exception as error:  # a row that cannot be written must not stop the others
            self._lose(batch)
            self._fail(f"the history {self._path}: {len(batch)} rows are lost: {error!r}")
            return True
        self._recovered()
        return True

    def _failed(self, error: sqlite3.DatabaseError, batch: list[Row]) -> bool:
        if db.is_damage(error):
            self._put_aside(str(error))
            return self._keep(batch)
        if isinstance(error, sqlite3.OperationalError):
            self._fail(
                f"the history {self._path} cannot be written: {error}; make room, or its folder writable"
            )
            return self._keep(batch)
        self._lose(batch)
        self._fail(f"the history {self._path}: {len(batch)} rows are lost: {error}")
        return True

    def _keep(self, batch: list[Row]) -> bool:
        """Back to the head of the queue; at the end, or where there is no room, they are lost."""
        with self._changed:
            room = 0 if self._closing else max(0, MOST_QUEUED - len(self._queue))
            self._queue.extendleft(reversed(batch[:room]))
            self.lost += max(0, len(batch) - room)
        return False

    def _lose(self, batch: list[Row]) -> None:
        with self._changed:
            self.lost += len(batch)

    # ------------------------------------------------------------------------------------------------ the file

    def _ready(self) -> sqlite3.Connection:
        """The open file. Raises _NothingYetError, having said why, where it cannot be opened."""
        if self._connection is not None and self._inode == _inode(self._path):
            return self._connection
        self._shut()
        try:
            self._take_lock()
            connection = db.open_writer(self._path)
            last = db.window(connection, None)
            last_seen_s = db.last_seen_s(connection)
        except db.DamagedError as error:
            self._put_aside(str(error))
            raise _NothingYetError from error
        except (_BusyError, db.NewerError) as error:
            self._fail(f"no history is kept: {error}")
            raise _NothingYetError from error
        except (OSError, sqlite3.Error) as error:
            self._fail(
                f"no history is kept: {self._path} cannot be opened: {error}; make its folder writable"
            )
            raise _NothingYetError from error
        self._connection = connection
        self._inode = _inode(self._path)
        with self._changed:
            if last is not None and self._last_window == 0:
                self.left_open = None if last.closed_unix_s is not None else last
                self.last_seen_s = last_seen_s
            self._last_window = max(self._last_window, 0 if last is None else last.id)
        self._recovered()
        return connection

    def _take_lock(self) -> None:
        """One writer: two would give the same numbers to different windows."""
        if self._lock_fd is not None:
            return
        path = self._path.with_name(f".{self._path.name}.lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise _BusyError(f"another process writes {self._path}") from error
        self._lock_fd = descriptor

    def _put_aside(self, why: str) -> None:
        """Keep a damaged file under another name and begin a new one."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        if self._aside >= MOST_ASIDE:
            self._fail(f"no history is kept: {self._path} is damaged again: {why}; look at its disk")
            return
        self._aside += 1
        name = f"{self._path.name}.damaged-{round(self._clock())}-{self._aside}"
        try:
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    self._path.with_name(self._path.name + suffix).rename(self._path.with_name(name + suffix))
        except OSError as error:
            self._fail(f"no history is kept: {self._path} is damaged and cannot be put aside: {error}")
            return
        self._say(
            f"the history {self._path} is damaged ({why}); it was put aside as {name}, a new one begins"
        )

    def _tidy(self) -> None:
        """Forget what is too old, and the oldest samples where the file is too large; a piece at a time."""
        now_s = time.monotonic()
        if now_s < self._next_tidy_s or self._connection is None:
            return
        try:
            more = db.prune(self._connection, self._clock() - self._days * 86_400.0, TIDY_ROWS)
            more = db.shrink(self._connection, self._most_bytes, TIDY_ROWS) or more
        except sqlite3.DatabaseError as error:
            if db.is_damage(error):
                self._put_aside(str(error))
                return
            self._fail(f"old rows of the history {self._path} cannot be deleted: {error}")
            more = False
        self._next_tidy_s = now_s + (GATHER_S if more else TIDY_S)

    def _shut(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _fail(self, text: str) -> None:
        if not self.trouble:
            self._say(text)
        self.trouble = text

    def _recovered(self) -> None:
        if self.trouble:
            self.trouble = ""
            self._say(f"the history {self._path} is written again; {self.lost} rows were lost")

    def _say(self, text: str) -> None:
        with contextlib.suppress(Exception):  # a log that fails must not end the history
            self._on_fault(text)

    # ------------------------------------------------------------------------------------------------ reading

    def windows(self, most: int = MOST_WINDOWS) -> list[WindowRow]:
        """All windows, the newest first. Raises HistoryError, as all that follow."""
        return self._read(lambda connection: db.windows(connection, most))

    def window(self, window_id: int | None = None) -> WindowRow | None:
        """The window of this id, the last one with None; None if there is none."""
        return self._read(lambda connection: db.window(connection, window_id))

    def facts(self, window_id: int) -> list[RunFacts]:
        """The runs of a window."""
        return self._read(lambda connection: db.facts(connection, window_id))

    def site_samples(self, from_s: float, to_s: float) -> list[SiteSample]:
        """The site in ``[from_s, to_s]`` (Unix seconds), in the order of time."""
        return self._read(lambda connection: db.site_samples(connection, from_s, to_s))

    def run_means(self, from_s: float, to_s: float) -> dict[str, RunMeans]:
        """The runs in ``[from_s, to_s)``, by run."""
        found = self._read(lambda connection: db.run_means(connection, from_s, to_s))
        return {run: RunMeans(*values) for run, values in found.items()}

    def run_series(
        self, from_s: float, to_s: float, step_s: float, runs: Sequence[str] | None = None
    ) -> dict[str, list[RunSample]]:
        """All runs in ``[from_s, to_s]``, or these; one sample for each ``step_s``: means, and the highest cap."""
        return self._read(lambda connection: db.run_series(connection, from_s, to_s, step_s, runs))

    def events(self, from_s: float, to_s: float, most: int = MOST_EVENTS) -> list[EventRow]:
        """What happened in ``[from_s, to_s]``."""
        return self._read(lambda connection: db.events(connection, from_s, to_s, most))

    def events_of(self, run: str, most: int = 200) -> list[EventRow]:
        """What happened to one run (``cluster:job.restart``): the last ``most``, in the order of time."""
        return self._read(lambda connection: db.events_of(connection, run, most))

    def ended_of_job(self, job_id: int) -> list[EndedRun]:
        """The ended runs of a job id, the newest last."""
        return self._read(lambda connection: db.ended_of_job(connection, job_id))

    def ended_of_spec(self, job_id: int, spec: str, most: int = MOST_ENDED) -> list[EndedRun]:
        """The ended runs that a user may mean by ``spec`` (``77``, ``77_3``, ``80+1``), the newest last."""
        return self._read(lambda connection: db.ended_of_spec(connection, job_id, spec, most))

    def ended_since(self, since_s: float, uid: int | None = None, most: int = MOST_ENDED) -> list[EndedRun]:
        """The last runs that ended since then (Unix seconds), of one user or of all; the newest last."""
        return self._read(lambda connection: db.ended_since(connection, since_s, uid, most))

    def recall(self, uid: int, account: str, name: str) -> list[Kin]:
        """What is remembered of this user's work of that name, the newest first."""
        return self._read(lambda connection: db.recall(connection, uid, account, name))

    def kept_record(self, run: str, boot_id: str, since_s: float = 0.0) -> bytes | None:
        """What an earlier controller of this boot left of a run's measurements since then (Unix seconds)."""
        return self._read(lambda connection: db.kept_record(connection, run, boot_id, since_s))

    def _read(self, question: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with closing(db.open_reader(self._path)) as connection:
                return question(connection)
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            why = self.trouble or f"{self._path}: {error}"
            raise HistoryError(f"the history cannot be read: {why}") from error


class _NothingYetError(Exception):
    """The file is not open; why was said."""


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
