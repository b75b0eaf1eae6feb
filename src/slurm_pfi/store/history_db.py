"""The tables of the history and the statements on them; who calls when is in history.py."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from .rows import EndedRun, EventRow, KeptRecord, Kin, Row, RunFacts, RunSample, SiteSample, WindowRow

VERSION: Final = 1
BUSY_S: Final = 5.0
MOST_KIN: Final = 200_000
"""Kinds of work that are remembered; the oldest are forgotten first."""

_SCHEMA: Final = """
CREATE TABLE window (id INTEGER PRIMARY KEY, opened REAL NOT NULL, closed REAL, value BLOB NOT NULL);
CREATE TABLE site_sample (t REAL NOT NULL, phase TEXT NOT NULL, limit_mw INTEGER, draw_mw INTEGER,
    committed_mw INTEGER, unmeasured_mw INTEGER NOT NULL);
CREATE INDEX site_sample_t ON site_sample (t);
CREATE TABLE run_sample (t REAL NOT NULL, run TEXT NOT NULL, cap_mw INTEGER, draw_mw INTEGER, share REAL,
    held_s REAL NOT NULL);
CREATE INDEX run_sample_t ON run_sample (t);
CREATE TABLE window_run (window INTEGER NOT NULL, run TEXT NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (window, run)) WITHOUT ROWID;
CREATE TABLE event (t REAL NOT NULL, run TEXT NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL);
CREATE INDEX event_t ON event (t);
CREATE INDEX event_run ON event (run, t);
CREATE TABLE ended_run (run TEXT PRIMARY KEY, job_id INTEGER NOT NULL, spec TEXT NOT NULL, uid INTEGER, t REAL NOT NULL,
    value BLOB NOT NULL);
CREATE INDEX ended_run_job ON ended_run (job_id);
CREATE INDEX ended_run_spec ON ended_run (spec);
CREATE INDEX ended_run_t ON ended_run (t);
CREATE TABLE kin (uid INTEGER NOT NULL, account TEXT NOT NULL, name TEXT NOT NULL, gpu_model TEXT NOT NULL,
    gpus INTEGER NOT NULL, t REAL NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (uid, account, name, gpu_model, gpus)) WITHOUT ROWID;
CREATE INDEX kin_t ON kin (t);
CREATE TABLE kept_record (run TEXT PRIMARY KEY, boot TEXT NOT NULL, t REAL NOT NULL, value BLOB NOT NULL);
CREATE INDEX kept_record_t ON kept_record (t);
"""

_PRUNED: Final = ("site_sample", "run_sample", "event", "ended_run", "kept_record")


class DamagedError(Exception):
    """The file is no database of ours, or its pages are torn."""


class NewerError(Exception):
    """The file was written by a later version of this program."""


# ---------------------------------------------------------------------------------------------------- opening


def open_writer(path: Path) -> sqlite3.Connection:
    """Open or make the file, mode 0640. Raises DamagedError, NewerError, OSError, sqlite3.OperationalError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
    os.close(descriptor)
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        _check_schema(connection, path)
    except sqlite3.DatabaseError as error:
        connection.close()
        # At the first look a table that is not there (SQLITE_ERROR) means a file that is not ours.
        if is_damage(error) or _code(error) == sqlite3.SQLITE_ERROR:
            raise DamagedError(str(error)) from error
        raise
    except Exception:
        connection.close()
        raise
    return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write. Raises sqlite3.Error."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is broken, rather than the disk full or the folder read-only."""
    return _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _code(error: sqlite3.Error) -> int | None:
    """SQLite's primary result code; None where the error came from Python's side."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise NewerError(f"{path} is of version {version}; this program writes version {VERSION}")
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if version == 0 and tables:
        raise DamagedError("it is a database of another program")
    if version == 0:
        connection.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version = {VERSION};COMMIT;")
    connection.execute("SELECT max(id), max(value) FROM window").fetchone()


def last_seen_s(connection: sqlite3.Connection) -> float | None:
    """When the last sample of the site was taken."""
    (last,) = connection.execute("SELECT max(t) FROM site_sample").fetchone()
    return None if last is None else float(last)


# ---------------------------------------------------------------------------------------------------- writing

_encode = msgspec.json.encode


def insert(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """All rows in one transaction. Raises sqlite3.Error, and then none of them is there."""
    by_kind: dict[type[Row], list[tuple[Any, ...]]] = {}
    for row in rows:
        by_kind.setdefault(type(row), []).append(_values(row))
    connection.execute("BEGIN IMMEDIATE")
    try:
        for kind, values in by_kind.items():
            connection.executemany(_INSERTS[kind], values)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


_INSERTS: Final[dict[type[Row], str]] = {
    WindowRow: "INSERT OR REPLACE INTO window VALUES (?, ?, ?, ?)",
    SiteSample: "INSERT INTO site_sample VALUES (?, ?, ?, ?, ?, ?)",
    RunSample: "INSERT INTO run_sample VALUES (?, ?, ?, ?, ?, ?)",
    RunFacts: "INSERT OR REPLACE INTO window_run VALUES (?, ?, ?)",
    EventRow: "INSERT INTO event VALUES (?, ?, ?, ?)",
    EndedRun: "INSERT OR REPLACE INTO ended_run VALUES (?, ?, ?, ?, ?, ?)",
    Kin: "INSERT OR REPLACE INTO kin VALUES (?, ?, ?, ?, ?, ?, ?)",
    KeptRecord: "INSERT OR REPLACE INTO kept_record VALUES (?, ?, ?, ?)",
}


def _values(row: Row) -> tuple[Any, ...]:
    match row:
        case WindowRow():
            return row.id, row.opened_unix_s, row.closed_unix_s, _encode(row)
        case SiteSample():
            return row.unix_s, row.phase, row.limit_mw, row.draw_mw, row.committed_mw, row.unmeasured_mw
        case RunSample():
            return row.unix_s, row.run, row.cap_mw, row.draw_mw, row.share, row.held_s
        case RunFacts():
            return row.window, row.run, _encode(row)
        case EventRow():
            return row.unix_s, row.run, row.kind, row.text
        case EndedRun():
            return row.run, row.job_id, row.spec, row.uid, row.ended_unix_s, _encode(row)
        case Kin(key=key):
            return key.uid, key.account, key.name, key.gpu_model, key.gpus, row.unix_s, _encode(row)
        case KeptRecord():
            return row.run, row.boot_id, row.unix_s, row.value


def prune(connection: sqlite3.Connection, before_unix_s: float, most: int) -> bool:
    """Delete what is older, ``most`` rows of a table at a time; True when more is left. Raises sqlite3.Error."""
    left = False
    for table in _PRUNED:
        done = connection.execute(
            f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} WHERE t < ? LIMIT ?)",  # noqa: S608
            (before_unix_s, most),
        )
        left = left or done.rowcount >= most
    connection.execute("DELETE FROM kin WHERE t < ?", (before_unix_s,))
    connection.execute("DELETE FROM kept_record WHERE run IN (SELECT run FROM ended_run)")
    connection.execute(
        "DELETE FROM kin WHERE t < (SELECT t FROM kin ORDER BY t DESC LIMIT 1 OFFSET ?)", (MOST_KIN,)
    )
    connection.execute("DELETE FROM window WHERE closed < ?", (before_unix_s,))
    connection.execute("DELETE FROM window_run WHERE window NOT IN (SELECT id FROM window)")
    return left


def shrink(connection: sqlite3.Connection, most_bytes: int, rows: int) -> bool:
    """Where the file has outgrown ``most_bytes``, delete the ``rows`` oldest run samples; True if it had."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    if (pages - free) * size <= most_bytes:
        return False
    for table in ("run_sample", "site_sample", "event", "ended_run"):
        done = connection.execute(
            f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} ORDER BY t LIMIT ?)",  # noqa: S608
            (rows,),
        )
        if done.rowcount:
            return True
    return False


# ---------------------------------------------------------------------------------------------------- reading


def windows(connection: sqlite3.Connection, most: int) -> list[WindowRow]:
    """The newest first."""
    found = connection.execute("SELECT value FROM window ORDER BY id DESC LIMIT ?", (most,))
    return [msgspec.json.decode(value, type=WindowRow) for (value,) in found]


def window(connection: sqlite3.Connection, window_id: int | None) -> WindowRow | None:
    """The one of this id; with None the last."""
    found = connection.execute(
        "SELECT value FROM window WHERE id = coalesce(?, (SELECT max(id) FROM window))", (window_id,)
    ).fetchone()
    return None if found is None else msgspec.json.decode(found[0], type=WindowRow)


def facts(connection: sqlite3.Connection, window_id: int) -> list[RunFacts]:
    found = connection.execute("SELECT value FROM window_run WHERE window = ? ORDER BY run", (window_id,))
    return [msgspec.json.decode(value, type=RunFacts) for (value,) in found]


def site_samples(connection: sqlite3.Connection, from_s: float, to_s: float) -> list[SiteSample]:
    """Of ``[from_s, to_s]``, in the order of time."""
    found = connection.execute(
        "SELECT t, phase, limit_mw, draw_mw, committed_mw, unmeasured_mw FROM site_sample"
        " WHERE t BETWEEN ? AND ? ORDER BY t",
        (from_s, to_s),
    )
    return [
        SiteSample(
            unix_s=t,
            phase=phase,
            limit_mw=limit,
            draw_mw=draw,
            committed_mw=committed,
            unmeasured_mw=unmeasured,
        )
        for t, phase, limit, draw, committed, unmeasured in found
    ]


def run_means(
    connection: sqlite3.Connection, from_s: float, to_s: float
) -> dict[str, tuple[float, float | None, float | None, int | None]]:
    """Of each run in ``[from_s, to_s)``: seconds, mean draw and mean share over the time they are known, lowest cap."""
    found = connection.execute(
        "SELECT run, total(held_s),"
        " sum(draw_mw * held_s) / sum(CASE WHEN draw_mw IS NOT NULL THEN held_s END),"
        " sum(share * held_s) / sum(CASE WHEN share IS NOT NULL THEN held_s END), min(cap_mw)"
        " FROM run_sample WHERE t >= ? AND t < ? GROUP BY run",
        (from_s, to_s),
    )
    return {run: (seconds, draw, share, cap) for run, seconds, draw, share, cap in found}


def run_series(
    connection: sqlite3.Connection, from_s: float, to_s: float, step_s: float, runs: Sequence[str] | None
) -> dict[str, list[RunSample]]:
    """Of each run, or of ``runs`` alone, one sample for each ``step_s``: means of what is known, the highest cap."""
    only = "" if runs is None else f" AND run IN ({', '.join('?' * len(runs))})"
    found = connection.execute(
        "SELECT run, min(t), max(cap_mw), avg(draw_mw), avg(share), total(held_s)"  # noqa: S608
        f" FROM run_sample WHERE t BETWEEN ? AND ?{only}"
        " GROUP BY run, CAST((t - ?) / ? AS INTEGER) ORDER BY run, min(t)",
        (from_s, to_s, *(runs or ()), from_s, step_s),
    )
    series: dict[str, list[RunSample]] = {}
    for run, unix_s, cap_mw, draw_mw, share, held_s in found:
        draw = None if draw_mw is None else round(draw_mw)
        sample = RunSample(unix_s=unix_s, run=run, cap_mw=cap_mw, draw_mw=draw, share=share, held_s=held_s)
        series.setdefault(run, []).append(sample)
    return series


def events(connection: sqlite3.Connection, from_s: float, to_s: float, most: int) -> list[EventRow]:
    """Of ``[from_s, to_s]``: the first ``most``, in the order of time."""
    found = connection.execute(
        "SELECT t, run, kind, text FROM event WHERE t BETWEEN ? AND ? ORDER BY t, rowid LIMIT ?",
        (from_s, to_s, most),
    )
    return [EventRow(unix_s=t, run=run, kind=kind, text=text) for t, run, kind, text in found]


def events_of(connection: sqlite3.Connection, run: str, most: int) -> list[EventRow]:
    """Of one run: the last ``most``, in the order of time."""
    found = connection.execute(
        "SELECT t, run, kind, text FROM event WHERE run = ? ORDER BY t DESC, rowid DESC LIMIT ?", (run, most)
    ).fetchall()
    return [EventRow(unix_s=t, run=name, kind=kind, text=text) for t, name, kind, text in reversed(found)]


def ended_of_job(connection: sqlite3.Connection, job_id: int) -> list[EndedRun]:
    """The ended runs of a job id, the newest last."""
    found = connection.execute("SELECT value FROM ended_run WHERE job_id = ? ORDER BY t", (job_id,))
    return [msgspec.json.decode(value, type=EndedRun) for (value,) in found]


def ended_of_spec(connection: sqlite3.Connection, job_id: int, spec: str, most: int) -> list[EndedRun]:
    """The ended runs that ``spec`` may mean, the newest last: of a bare id also the parts of that array or job."""
    where: str = "spec = ?"
    values: tuple[int | str, ...] = (spec,)
    if spec == str(job_id):
        where, values = "job_id = ? OR spec GLOB ? OR spec GLOB ?", (job_id, f"{job_id}_*", f"{job_id}+*")
    found = connection.execute(
        f"SELECT value FROM ended_run WHERE {where} ORDER BY t DESC LIMIT ?",  # noqa: S608
        (*values, most),
    ).fetchall()
    return [msgspec.json.decode(value, type=EndedRun) for (value,) in reversed(found)]


def ended_since(connection: sqlite3.Connection, since_s: float, uid: int | None, most: int) -> list[EndedRun]:
    """The last ``most`` that ended since then, of one user or (None) of all; the newest last."""
    found = connection.execute(
        "SELECT value FROM ended_run WHERE t >= ? AND (? IS NULL OR uid = ?) ORDER BY t DESC LIMIT ?",
        (since_s, uid, uid, most),
    ).fetchall()
    return [msgspec.json.decode(value, type=EndedRun) for (value,) in reversed(found)]


def kept_record(connection: sqlite3.Connection, run: str, boot_id: str, since_s: float) -> bytes | None:
    """What an earlier controller of this boot measured of a run; None if it left nothing since then."""
    found = connection.execute(
        "SELECT value FROM kept_record WHERE run = ? AND boot = ? AND t >= ?", (run, boot_id, since_s)
    ).fetchone()
    return None if found is None else bytes(found[0])


def recall(connection: sqlite3.Connection, uid: int, account: str, name: str) -> list[Kin]:
    """What is remembered of this user's work of that name, on any GPUs; the newest first."""
    found = connection.execute(
        "SELECT value FROM kin WHERE uid = ? AND account = ? AND name = ? ORDER BY t DESC",
        (uid, account, name),
    )
    return [msgspec.json.decode(value, type=Kin) for (value,) in found]
