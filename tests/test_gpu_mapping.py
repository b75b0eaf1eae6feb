"""Position -> device file -> minor -> UUID, and what is said where a link is missing."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_pfi.gpu.device import DeviceInfo, DeviceLimits
from slurm_pfi.gpu.mapping import Unresolved, board_minor, minor_of, resolve

LIMITS = DeviceLimits(
    min_mw=200_000, max_mw=700_000, default_mw=700_000, requested_mw=700_000, enforced_mw=700_000
)


def devices(minors: Sequence[int]) -> list[DeviceInfo]:
    """One device for each minor, with the NVML index as its place."""
    return [
        DeviceInfo(
            uuid=f"GPU-{minor}",
            model="H",
            pci=f"00000000:{index:02X}:00.0",
            minor=minor,
            index=index,
            limits=LIMITS,
            persistence=True,
        )
        for index, minor in enumerate(minors)
    ]


def _links(folder: Path, numbers: Sequence[int]) -> dict[int, str]:
    for number in set(numbers):
        (folder / f"nvidia{number}").symlink_to("/dev/null")
    return {position: str(folder / f"nvidia{number}") for position, number in enumerate(numbers)}


def _reason(answer: str | Unresolved) -> str:
    assert isinstance(answer, Unresolved)
    return answer.reason


def test_position_minor_and_index_may_all_differ(tmp_path: Path) -> None:
    files = [3, 1, 4, 0, 5, 2, 7, 6]
    minors = random.Random(6).sample(range(8), 8)
    assert resolve(_links(tmp_path, files), devices(minors)) == {
        position: f"GPU-{minor}" for position, minor in enumerate(files)
    }


def test_nvml_order_shuffled_against_minors(tmp_path: Path) -> None:
    """A host where /dev/nvidia0 is the sixth GPU in NVML order, and the jobs have positions 0 and 4."""
    minors_in_nvml_order = [5, 3, 7, 1, 6, 0, 4, 2]
    listed = devices(minors_in_nvml_order)
    found = resolve(_links(tmp_path, range(8)), listed)
    assert found[0] == listed[5].uuid
    assert found[4] == listed[6].uuid
    assert found[0] != listed[0].uuid


def test_one_missing_device_harms_no_other(tmp_path: Path) -> None:
    found = resolve(_links(tmp_path, [0, 1, 2]), devices([0, 2]))
    assert (found[0], found[2]) == ("GPU-0", "GPU-2")
    assert "no GPU with minor number 1" in _reason(found[1])


def test_positions_that_share_a_device_are_both_unresolved(tmp_path: Path) -> None:
    found = resolve(_links(tmp_path, [0, 1, 0]), devices([0, 1]))
    assert found[1] == "GPU-1"
    assert "2 positions lead to minor number 0" in _reason(found[0])
    assert "2 positions lead to minor number 0" in _reason(found[2])


def test_two_devices_of_one_minor_are_not_told_apart(tmp_path: Path) -> None:
    found = resolve(_links(tmp_path, [0, 1]), devices([0, 0, 1]))
    assert "2 GPUs with minor number 0" in _reason(found[0])
    assert found[1] == "GPU-1"


# ------------------------------------------------------------------------------------------------ slices


def _driver(proc: Path, slices: dict[int, tuple[int, int, int | None]]) -> Path:
    """/proc as the driver fills it: device minor -> (board's minor, GPU instance, compute instance or None)."""
    (proc / "driver/nvidia/capabilities/mig").mkdir(parents=True)
    (proc / "driver/nvidia/capabilities/mig/config").write_text("DeviceFileMinor: 1\nDeviceFileMode: 256\n")
    (proc / "devices").write_text(
        "Character devices:\n  1 mem\n195 nvidia\n235 nvidia-caps\n\nBlock devices:\n  8 sd\n"
    )
    for minor, (board, gi, ci) in slices.items():
        folder = proc / f"driver/nvidia/capabilities/gpu{board}/mig/gi{gi}"
        folder = folder if ci is None else folder / f"ci{ci}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "access").write_text(
            f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
        )
    return proc


def _slice_files(folder: Path, board: int | None, *caps: int) -> str:
    for number in caps:
        if not (folder / f"nvidia-cap{number}").is_symlink():
            (folder / f"nvidia-cap{number}").symlink_to("/dev/null")
    files = [f"{folder}/nvidia-cap{number}" for number in caps]
    return ",".join(files if board is None else [f"{folder}/nvidia{board}", *files])


def test_the_whole_gpu_first_and_the_slices_of_another_board_behind_it(tmp_path: Path) -> None:
    """Slurm counts the whole GPU (NVML 3) first; NVML lists the board with the slices before it."""
    minors_in_nvml_order = [0, 1, 5, 2]
    positions = _links(tmp_path, [2])
    _links(tmp_path, [5])
    for position, caps in enumerate(((66, 67), (75, 76), (102, 103)), 1):
        positions[position] = _slice_files(tmp_path, 5, *caps)
    listed = devices(minors_in_nvml_order)
    found = resolve(positions, listed, proc=tmp_path / "no-proc")
    assert found == {0: listed[3].uuid, 1: listed[2].uuid, 2: listed[2].uuid, 3: listed[2].uuid}


def test_where_only_the_slices_file_is_given_the_driver_tells_its_board(tmp_path: Path) -> None:
    proc = _driver(tmp_path / "proc", {66: (5, 7, None), 67: (5, 7, 0), 75: (1, 8, None), 76: (1, 8, 0)})
    positions = _links(tmp_path, [2])
    for position, caps in enumerate(((66,), (76,), (67, 66)), 1):
        positions[position] = _slice_files(tmp_path, None, *caps)
    assert resolve(positions, devices([0, 1, 5, 2]), proc=proc) == {
        0: "GPU-2",
        1: "GPU-5",
        2: "GPU-1",
        3: "GPU-5",
    }
    assert board_minor(positions[2], proc=proc) == 1


def test_a_slice_that_leads_nowhere_takes_the_other_slices_with_it(tmp_path: Path) -> None:
    """It may be on any board with slices: those are then left alone, and whole GPUs are not touched by it."""
    proc = _driver(tmp_path / "proc", {66: (5, 7, None)})
    positions = _links(tmp_path, [2])
    positions[1] = _slice_files(tmp_path, None, 66)
    positions[2] = _slice_files(tmp_path, None, 111)
    found = resolve(positions, devices([2, 5]), proc=proc)
    assert found[0] == "GPU-2"
    assert "position 2 may be on the same board" in _reason(found[1])
    assert "tells of no such slice" in _reason(found[2])


def test_files_of_several_boards_are_no_slice(tmp_path: Path) -> None:
    proc = _driver(tmp_path / "proc", {66: (5, 7, None), 75: (1, 8, None)})
    _links(tmp_path, [1, 5])
    for files in (
        _slice_files(tmp_path, 1, 66),
        _slice_files(tmp_path, None, 66, 75),
        f"{tmp_path}/nvidia1,{tmp_path}/nvidia5",
    ):
        assert "several boards" in _reason(board_minor(files, proc=proc))  # type: ignore[arg-type]


def test_a_whole_gpu_and_slices_of_it_are_not_told_apart(tmp_path: Path) -> None:
    positions = {**_links(tmp_path, [2, 3]), 2: _slice_files(tmp_path, 2, 66)}
    found = resolve(positions, devices([2, 3]), proc=tmp_path / "no-proc")
    assert found[1] == "GPU-3"
    assert "2 positions lead to minor number 2" in _reason(found[0])
    assert "2 positions lead to minor number 2" in _reason(found[2])


def test_a_slice_that_two_boards_claim_is_neithers(tmp_path: Path) -> None:
    proc = _driver(tmp_path / "proc", {66: (5, 7, None)})
    (proc / "driver/nvidia/capabilities/gpu1/mig/gi7").mkdir(parents=True)
    (proc / "driver/nvidia/capabilities/gpu1/mig/gi7/access").write_text("DeviceFileMinor: 66\n")
    assert isinstance(board_minor(_slice_files(tmp_path, None, 66), proc=proc), Unresolved)


def test_what_the_driver_writes_may_be_anything(tmp_path: Path) -> None:
    proc = _driver(tmp_path / "proc", {66: (5, 7, None)})
    access = proc / "driver/nvidia/capabilities/gpu5/mig/gi7/access"
    files = _slice_files(tmp_path, None, 66)
    for text in (b"", b"\xff\x00", b"DeviceFileMinor: none\n", b"DeviceFileMinor: -1\n", b"Minor: 66\n"):
        access.write_bytes(text)
        assert isinstance(board_minor(files, proc=proc), Unresolved)
    access.unlink()
    access.mkdir()
    assert isinstance(board_minor(files, proc=proc), Unresolved)


@pytest.mark.parametrize(
    "name", ["nvidia", "nvidia01", "nvidiactl", "nvidia-1", "nvidia1x", "card1", "nvidia9999"]
)
def test_a_link_without_a_number_is_no_gpu(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/null")
    assert "not a device file of an NVIDIA GPU" in _reason(minor_of(str(tmp_path / name)))  # type: ignore[arg-type]


def test_what_else_lies_there_is_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").write_text("")
    (tmp_path / "nvidia1").symlink_to("/dev/zero")
    (tmp_path / "nvidia2").mkdir()
    for path in ("/dev/null", "", "a\0b", *(str(tmp_path / f"nvidia{number}") for number in range(4))):
        assert isinstance(minor_of(path), Unresolved)


@pytest.mark.skipif(os.geteuid() != 0, reason="making device files takes root")
def test_a_device_file_tells_its_minor_whatever_its_name(tmp_path: Path) -> None:
    try:
        for name, minor in (("nvidia0", 6), ("gpu", 2), ("nvidiactl", 255)):
            os.mknod(tmp_path / name, 0o666 | stat.S_IFCHR, os.makedev(195, minor))
        os.mknod(tmp_path / "nvidia7", 0o666 | stat.S_IFCHR, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("making device files is not allowed here")
    (tmp_path / "link").symlink_to(tmp_path / "gpu")
    assert [minor_of(str(tmp_path / name)) for name in ("nvidia0", "gpu", "link")] == [6, 2, 2]
    for name in ("nvidiactl", "nvidia7"):
        assert isinstance(minor_of(str(tmp_path / name)), Unresolved)


@pytest.mark.skipif(os.geteuid() != 0, reason="making device files takes root")
def test_a_slices_device_file_is_known_by_the_drivers_major_number(tmp_path: Path) -> None:
    proc = _driver(tmp_path / "proc", {66: (5, 7, None)})
    try:
        for name, major in (("nvidia-cap3", 235), ("nvidia-cap66", 195), ("nvidia-cap7", 1)):
            os.mknod(tmp_path / name, 0o666 | stat.S_IFCHR, os.makedev(major, 66))
    except PermissionError:
        pytest.skip("making device files is not allowed here")
    assert board_minor(str(tmp_path / "nvidia-cap3"), proc=proc) == 5
    for name in ("nvidia-cap66", "nvidia-cap7"):
        assert "not a device file of a GPU slice" in _reason(board_minor(str(tmp_path / name), proc=proc))  # type: ignore[arg-type]
    (proc / "devices").unlink()
    assert isinstance(board_minor(str(tmp_path / "nvidia-cap3"), proc=proc), Unresolved)
