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
