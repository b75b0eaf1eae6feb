"""The journal of prior limits: whole or not there, never believed when it should not be, never overwritten by a lie."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.files import write_atomically, writer_of_temporary
from slurm_pfi.gpu.journal import Journal, JournalEntry, JournalError, Missing, Stale, Unreadable

UUID: Final = "GPU-6a1f3f10-0000-4000-8000-000000000001"


def _entry(**changes: object) -> JournalEntry:
    entry = JournalEntry(
        uuid=UUID,
        prior_mw=650_000,
        issued_mw=(400_000, 300_000),
        current_mw=300_000,
        run="site:12.0",
        boot_id="boot-1",
        driver_start="77",
        how="read",
    )
    return msgspec.structs.replace(entry, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def journal(folder: Path) -> Journal:
    return Journal(folder, "boot-1", "77")


def _reason(read: object) -> str:
    assert isinstance(read, Unreadable)
    return read.reason


def test_an_entry_comes_back_as_written(journal: Journal, folder: Path) -> None:
    assert journal.read(UUID) == Missing()
    journal.write(_entry())
    assert journal.read(UUID) == _entry()
    assert journal.read_all() == {UUID: _entry()}
    assert Journal(folder, "boot-1", "77").read(UUID) == _entry()


@given(
    prior_mw=st.integers(1, 2**40),
    issued_mw=st.lists(st.integers(1, 2**40), max_size=50),
    current_mw=st.none() | st.integers(1, 2**40),
    run=st.text(max_size=80),
)
def test_any_entry_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    prior_mw: int,
    issued_mw: list[int],
    current_mw: int | None,
    run: str,
) -> None:
    journal = Journal(tmp_path_factory.mktemp("journal"), "boot-1", "77")
    entry = _entry(prior_mw=prior_mw, issued_mw=tuple(issued_mw), current_mw=current_mw, run=run)
    journal.write(entry)
    assert journal.read(UUID) == entry


def test_folder_and_file_are_for_the_owner_alone(journal: Journal, folder: Path) -> None:
    mask = os.umask(0)
    try:
        journal.write(_entry())
    finally:
        os.umask(mask)
    assert (folder / f"{UUID}.json").stat().st_mode & 0o7777 == 0o600
    assert folder.stat().st_mode & 0o7777 == 0o700


def test_another_boot_or_driver_start_is_stale(journal: Journal, folder: Path) -> None:
    journal.write(_entry())
    after_boot = Journal(folder, "boot-2", "77").read(UUID)
    assert isinstance(after_boot, Stale)
    assert after_boot.entry == _entry()
    assert "boot-2" in after_boot.reason
    reloaded = Journal(folder, "boot-1", "78").read(UUID)
    assert isinstance(reloaded, Stale)
    assert "driver start 77, now 78" in reloaded.reason


def test_an_entry_of_another_boot_is_not_written(journal: Journal) -> None:
    for wrong in (_entry(boot_id="boot-0"), _entry(driver_start="76")):
        with pytest.raises(JournalError, match="another boot or driver start"):
            journal.write(wrong)
    assert journal.read(UUID) == Missing()


def test_a_value_that_we_issued_never_becomes_the_prior_limit(journal: Journal) -> None:
    journal.write(_entry())
    with pytest.raises(JournalError, match="issued by us"):
        journal.write(_entry(prior_mw=300_000))
    assert journal.read(UUID) == _entry()
    journal.write(_entry(prior_mw=640_000, how="controller"))
    journal.write(_entry(prior_mw=640_000, how="controller", issued_mw=(640_000, 300_000)))


@pytest.mark.parametrize("keep", [0, 1, 40, -1, -30])
def test_a_truncated_entry_is_unreadable(journal: Journal, folder: Path, keep: int) -> None:
    journal.write(_entry())
    path = folder / f"{UUID}.json"
    path.write_bytes(path.read_bytes()[:keep])
    assert _reason(journal.read(UUID))
    assert isinstance(journal.read_all()[UUID], Unreadable)


def test_every_cut_is_noticed(journal: Journal, folder: Path) -> None:
    journal.write(_entry())
    path = folder / f"{UUID}.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert isinstance(journal.read(UUID), Unreadable)


def test_every_changed_byte_is_noticed(journal: Journal, folder: Path) -> None:
    journal.write(_entry())
    path = folder / f"{UUID}.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert isinstance(journal.read(UUID), Unreadable), place


@pytest.mark.parametrize(
    "content", [b"\0" * 4096, b"{}", b"[]", b"null", b'{"entry":1,"sha256":""}', b"\xff\xfe", b" \n"]
)
def test_foreign_content_is_unreadable(journal: Journal, folder: Path, content: bytes) -> None:
    (folder / f"{UUID}.json").write_bytes(content)
    (folder / f"{UUID}.json").chmod(0o600)
    assert _reason(journal.read(UUID))


def test_an_entry_under_another_name_is_unreadable(journal: Journal, folder: Path) -> None:
    journal.write(_entry())
    (folder / f"{UUID}.json").rename(folder / "GPU-other.json")
    assert "holds the entry of" in _reason(journal.read("GPU-other"))


def test_another_version_is_unreadable(journal: Journal) -> None:
    journal.write(_entry(version=2))
    assert "version 2" in _reason(journal.read(UUID))


def test_one_bad_file_hides_no_other(journal: Journal, folder: Path) -> None:
    journal.write(_entry())
    (folder / "GPU-bad.json").write_text("{")
    (folder / "not a uuid").write_text("{")
    read = journal.read_all()
    assert read.pop(UUID) == _entry()
    assert sorted(read) == ["GPU-bad", "not a uuid"]
    assert all(isinstance(value, Unreadable) for value in read.values())


def test_a_link_a_pipe_and_a_folder_are_not_followed(journal: Journal, folder: Path, tmp_path: Path) -> None:
    journal.write(_entry())
    (folder / f"{UUID}.json").rename(tmp_path / "elsewhere")
    (folder / f"{UUID}.json").symlink_to(tmp_path / "elsewhere")
    assert _reason(journal.read(UUID))
    os.mkfifo(folder / "GPU-pipe.json", 0o600)
    assert _reason(journal.read("GPU-pipe")) == "not a regular file"
    (folder / "GPU-folder.json").mkdir()
    assert _reason(journal.read("GPU-folder")) == "not a regular file"
    before = (tmp_path / "elsewhere").read_bytes()
    journal.write(_entry(current_mw=None))
    assert (tmp_path / "elsewhere").read_bytes() == before
    assert journal.read(UUID) == _entry(current_mw=None)


def test_a_file_that_others_can_write_is_not_believed(journal: Journal, folder: Path) -> None:
    journal.write(_entry())
    (folder / f"{UUID}.json").chmod(0o666)
    assert "somebody else" in _reason(journal.read(UUID))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_refused(journal: Journal, folder: Path, mode: int) -> None:
    journal.write(_entry())
    folder.chmod(mode)
    for use in (lambda: journal.read(UUID), journal.read_all, lambda: journal.write(_entry())):
        with pytest.raises(JournalError, match="writable by nobody else"):
            use()
    with pytest.raises(JournalError):
        Journal(folder, "boot-1", "77")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away takes root")
def test_a_folder_of_another_user_is_refused(journal: Journal, folder: Path) -> None:
    os.chown(folder, 65534, 65534)
    with pytest.raises(JournalError, match="owner 65534"):
        journal.write(_entry())


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "journal").symlink_to(tmp_path / "real")
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path / "journal", "boot-1", "77")


@pytest.mark.parametrize("uuid", ["", "../x", "a/b", ".", "GPU 1", "GPU-\n", "x" * 97])
def test_a_name_that_is_no_uuid_touches_no_file(journal: Journal, folder: Path, uuid: str) -> None:
    with pytest.raises(JournalError):
        journal.write(_entry(uuid=uuid))
    with pytest.raises(JournalError):
        journal.remove(uuid)
    assert not isinstance(journal.read(uuid), JournalEntry)
    assert list(folder.iterdir()) == []


def test_remove_is_for_good_and_may_be_repeated(journal: Journal) -> None:
    journal.write(_entry())
    journal.remove(UUID)
    journal.remove(UUID)
    assert journal.read(UUID) == Missing()


@contextmanager
def _full_disk() -> Iterator[None]:
    """No file may grow beyond 100 bytes: a write then fails half-way, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_old_entry_and_no_litter(journal: Journal, folder: Path) -> None:
    journal.write(_entry())
    with _full_disk(), pytest.raises(JournalError, match="cannot be written"):
        journal.write(_entry(current_mw=200_000))
    assert journal.read(UUID) == _entry()
    assert [path.name for path in folder.iterdir()] == [f"{UUID}.json"]
    journal.write(_entry(current_mw=200_000))
    assert journal.read(UUID) == _entry(current_mw=200_000)


def test_what_could_not_be_read_again_is_not_written(journal: Journal) -> None:
    journal.write(_entry())
    many = tuple(range(200_000, 209_500))
    with pytest.raises(JournalError, match="too large for an entry: 9500 values"):
        journal.write(_entry(issued_mw=many))
    assert journal.read(UUID) == _entry()


def test_entries_of_replaced_gpus_go_once_their_limits_are_gone(journal: Journal, folder: Path) -> None:
    resting, held, other = (UUID[:-1] + digit for digit in "234")
    journal.write(_entry())
    journal.write(_entry(uuid=resting, current_mw=None))
    journal.write(_entry(uuid=held))
    (folder / f"{other}.json").write_text("{}")
    assert journal.sweep({UUID}) == (_entry(uuid=held),), "a limit of ours on a GPU that is not there"
    assert set(journal.read_all()) == {UUID, resting, held, other}, "in this boot nothing is forgotten"
    later = Journal(folder, "boot-2", "77")
    assert later.sweep({UUID}) == ()
    assert {uuid: type(read) for uuid, read in later.read_all().items()} == {UUID: Stale, other: Unreadable}


def test_litter_that_cannot_be_removed_hinders_nobody(journal: Journal, folder: Path) -> None:
    journal.write(_entry())
    (folder / f".{UUID}.json.999999999.0011aabb.tmp").mkdir()
    assert Journal(folder, "boot-1", "77").read(UUID) == _entry()


KILLED_WRITER: Final = """
import os, signal, sys
from pathlib import Path
from slurm_pfi.gpu.journal import Journal
from slurm_pfi import files
import msgspec
journal = Journal(Path(sys.argv[1]), "boot-1", "77")
real = getattr(os, sys.argv[2])
def die(*args, **kwargs):
    if sys.argv[3] == "after":
        real(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
entry = journal.read(sys.argv[4])
setattr(os, sys.argv[2], die)
journal.write(msgspec.structs.replace(entry, current_mw=200_000))
"""


@pytest.mark.parametrize(
    ("call", "when", "current_mw"),
    [
        ("write", "before", 300_000),
        ("write", "after", 300_000),
        ("fsync", "before", 300_000),
        ("fsync", "after", 300_000),
        ("rename", "before", 300_000),
        ("rename", "after", 200_000),
    ],
)
def test_killed_at_any_point_the_entry_is_the_old_or_the_new(
    journal: Journal, folder: Path, call: str, when: str, current_mw: int
) -> None:
    journal.write(_entry())
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WRITER, str(folder), call, when, UUID], check=False, timeout=30
    )
    assert killed.returncode == -signal.SIGKILL
    assert journal.read(UUID) == _entry(current_mw=current_mw)
    assert journal.read_all() == {UUID: _entry(current_mw=current_mw)}
    Journal(folder, "boot-1", "77")
    assert [path.name for path in folder.iterdir()] == [f"{UUID}.json"]


def test_the_temporary_file_of_a_living_writer_is_left_alone(journal: Journal, folder: Path) -> None:
    mine = folder / f".{UUID}.json.{os.getpid()}.0011aabb.tmp"
    mine.write_text("half")
    Journal(folder, "boot-1", "77")
    assert mine.exists()


def test_the_entry_is_readable_for_people(journal: Journal, folder: Path) -> None:
    journal.write(_entry())
    assert json.loads((folder / f"{UUID}.json").read_text())["entry"]["prior_mw"] == 650_000


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666])
def test_write_atomically_sets_mode_and_content(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new" * 1000, mode)
    assert path.read_bytes() == b"new" * 1000
    assert path.stat().st_mode & 0o7777 == mode
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomically_says_what_failed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "file", b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "folder", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("name", "pid"),
    [
        (".a.json.12.0f.tmp", 12),
        ("a.json.12.0f.tmp", None),
        (".a.json.x.0f.tmp", None),
        (".tmp", None),
        (".a.json", None),
    ],
)
def test_temporary_files_tell_their_writer(name: str, pid: int | None) -> None:
    assert writer_of_temporary(name) == pid
