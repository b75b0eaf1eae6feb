"""Boot id and driver start, from a folder and from /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_pfi.gpu.identity import HostIdentity, IdentityError, read_identity


def _process(proc: Path, pid: int, name: str, parent: int, start: int) -> None:
    (proc / str(pid)).mkdir(parents=True)
    fields = ["S", str(parent), *(["0"] * 17), str(start), "0", "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


def test_this_host_has_a_boot_id() -> None:
    identity = read_identity()
    assert identity.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert identity == read_identity()


def test_the_oldest_driver_thread_tells_the_start(tmp_path: Path) -> None:
    _process(tmp_path, 10, "nv_queue", 2, 4321)
    _process(tmp_path, 11, "nv_queue", 2, 1234)
    _process(tmp_path, 12, "kworker/0:1", 2, 1)
    _process(tmp_path, 13, "nv_queue", 1, 5)  # a user's process that calls itself so
    _process(tmp_path, 14, "a) S 2 (b", 2, 3)
    assert read_identity(proc=tmp_path).driver_start == "1234"


def test_without_a_driver_thread_the_start_is_unknown(tmp_path: Path) -> None:
    assert read_identity(proc=tmp_path).driver_start == "unknown"


def test_a_folder_replaces_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "boot_id").write_text("boot-1\n")
    (tmp_path / "driver_start").write_text("77\n")
    assert read_identity(tmp_path) == HostIdentity(boot_id="boot-1", driver_start="77")


@pytest.mark.parametrize("text", ["", "two words", "a/b", "x" * 65, "\0\0\0"])
def test_what_is_no_identity_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "boot_id").write_text(text)
    (tmp_path / "driver_start").write_text("77")
    with pytest.raises(IdentityError, match="boot_id"):
        read_identity(tmp_path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="cannot be read"):
        read_identity(tmp_path)
