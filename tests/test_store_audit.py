"""The audit log: whole lines, nothing lost in silence, nothing raised."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slurm_pfi.store.audit import AuditLog


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel cuts a write at ``size`` bytes and refuses the next, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_line_has_the_envelope_and_its_fields(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", "node:n1")
    assert log.write("set", {"uuid": "GPU-1", "cap_mw": 300_000}, mono_ns=5, unix_s=2.5)
    log.close()
    (line,) = lines(tmp_path / "audit.jsonl")
    assert line == {
        "mono_ns": 5,
        "unix_s": 2.5,
        "actor": "node:n1",
        "event": "set",
        "uuid": "GPU-1",
        "cap_mw": 300_000,
    }
    assert stat.S_IMODE((tmp_path / "audit.jsonl").stat().st_mode) & 0o137 == 0


def test_times_are_now_unless_given(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "a", "controller")
    log.write("leader")
    log.write("leader")
    log.close()
    first, second = lines(tmp_path / "a")
    assert isinstance(first["mono_ns"], int)
    assert isinstance(second["mono_ns"], int)
    assert 0 < first["mono_ns"] <= second["mono_ns"]


def test_a_full_disk_is_told_once_and_counted_and_writing_goes_on_afterwards(tmp_path: Path) -> None:
    faults: list[str] = []
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "controller", on_fault=faults.append)
    assert log.write("first")
    with file_size_limit(path.stat().st_size + 10):
        assert [log.write("lost") for _ in range(3)] == [False] * 3
    assert log.lost == 3
    assert len(faults) == 1
    assert log.write("later")
    assert log.write("last")
    log.close()
    assert [line["event"] for line in lines(path)] == ["first", "audit_gap", "later", "last"]
    assert lines(path)[1]["lost"] == 3
    assert len(faults) == 2


def test_a_torn_last_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"event": "whole"}\n{"event": "to')
    log = AuditLog(path, "controller")
    log.write("next")
    log.close()
    assert json.loads(path.read_text().splitlines()[-1])["event"] == "next"


def test_after_a_rename_reopen_writes_to_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "controller")
    log.write("old")
    path.rename(tmp_path / "audit.jsonl.1")
    log.write("still old")
    assert log.reopen()
    log.write("new")
    log.close()
    assert [line["event"] for line in lines(tmp_path / "audit.jsonl.1")] == ["old", "still old"]
    assert [line["event"] for line in lines(path)] == ["new"]


def test_a_failed_reopen_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    faults: list[str] = []
    log = AuditLog(path, "controller", on_fault=faults.append)
    path.rename(tmp_path / "old")
    path.mkdir()
    assert not log.reopen()
    assert log.write("kept")
    log.close()
    assert [line["event"] for line in lines(tmp_path / "old")] == ["kept"]
    assert faults


@pytest.mark.parametrize("kind", ["symlink", "fifo"])
def test_only_a_regular_file_is_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "audit.jsonl"
    target = tmp_path / "target"
    target.write_text("")
    if kind == "symlink":
        path.symlink_to(target)
    else:
        os.mkfifo(path)
    faults: list[str] = []
    log = AuditLog(path, "controller", on_fault=faults.append)
    assert not log.write("lost")
    log.close()
    assert target.read_text() == ""
    assert len(faults) == 1


def test_a_missing_folder_is_told_and_its_return_used(tmp_path: Path) -> None:
    faults: list[str] = []
    log = AuditLog(tmp_path / "later" / "audit.jsonl", "controller", on_fault=faults.append)
    assert not log.write("lost")
    (tmp_path / "later").mkdir()
    assert log.write("kept")
    log.close()
    assert [line["event"] for line in lines(tmp_path / "later" / "audit.jsonl")] == ["audit_gap", "kept"]
    assert len(faults) == 2


def test_fields_may_not_pose_as_the_envelope_and_odd_values_do_not_raise(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "a", "controller")
    assert not log.write("x", {"actor": "node:n1"})
    assert not log.write("x", {"value": object()})
    assert log.write("x", {"value": math.nan})
    log.close()
    assert lines(tmp_path / "a")[-1]["value"] is None


def test_a_file_that_has_grown_makes_room_and_no_line_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path, "node:n1", max_bytes=2000)
    for number in range(100):
        assert audit.write("set", {"number": number})
        kept = [*_lines(tmp_path / "audit.jsonl.1"), *_lines(path)]
        assert [line["number"] for line in kept] == list(range(kept[0]["number"], number + 1))
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2 * 2000 + 300
    audit.close()
    again = AuditLog(path, "node:n1", max_bytes=2000)
    again.write("set", {"number": 100})
    assert _lines(path)[-1]["number"] == 100, "what an earlier process wrote counts"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["audit.jsonl", "audit.jsonl.1"]


def test_a_file_that_cannot_be_renamed_goes_on_and_it_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "audit.jsonl"
    (tmp_path / "audit.jsonl.1").mkdir()
    audit = AuditLog(path, "node:n1", max_bytes=500, on_fault=said.append)
    for number in range(20):
        assert audit.write("set", {"number": number})
    assert [line["number"] for line in _lines(path)] == list(range(20))
    assert 1 <= len(said) < 10 and "cannot be renamed: Is a directory" in said[0]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
