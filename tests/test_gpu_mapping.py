"""Position -> device file -> minor -> UUID, and what is said where a link is missing."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_pfi.gpu.device import DeviceInfo, DeviceLimits
from slurm_pfi.gpu.mapping import Unresolved, minor_of, resolve

LIMITS = DeviceLimits(
    min_mw=200_000, max_mw=700_000, default_mw=700_000, requested_mw=700_000, enforced_mw=700_000
)


def _devices(minors: Sequence[int]) -> list[DeviceInfo]:
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
    assert resolve(_links(tmp_path, files), _devices(minors)) == {
        position: f"GPU-{minor}" for position, minor in enumerate(files)
    }


def test_nvml_order_shuffled_against_minors(tmp_path: Path) -> None:
    """A host where /dev/nvidia0 is the sixth GPU in NVML order, and the jobs have positions 0 and 4."""
    minors_in_nvml_order = [5, 3, 7, 1, 6, 0, 4, 2]
    devices = _devices(minors_in_nvml_order)
    found = resolve(_links(tmp_path, range(8)), devices)
    assert found[0] == devices[5].uuid
    assert found[4] == devices[6].uuid
    assert found[0] != devices[0].uuid


def test_one_missing_device_harms_no_other(tmp_path: Path) -> None:
    found = resolve(_links(tmp_path, [0, 1, 2]), _devices([0, 2]))
    assert (found[0], found[2]) == ("GPU-0", "GPU-2")
    assert "no GPU with minor number 1" in _reason(found[1])


def test_positions_that_share_a_device_are_both_unresolved(tmp_path: Path) -> None:
    found = resolve(_links(tmp_path, [0, 1, 0]), _devices([0, 1]))
    assert found[1] == "GPU-1"
    assert "2 positions lead to minor number 0" in _reason(found[0])
    assert "2 positions lead to minor number 0" in _reason(found[2])


def test_two_devices_of_one_minor_are_not_told_apart(tmp_path: Path) -> None:
    found = resolve(_links(tmp_path, [0, 1]), _devices([0, 0, 1]))
    assert "2 GPUs with minor number 0" in _reason(found[0])
    assert found[1] == "GPU-1"


def test_a_slice_leads_to_no_board(tmp_path: Path) -> None:
    """Whole GPU at position 0, slices of another board behind it: only the whole one may be capped."""
    positions = _links(tmp_path, [3, 2])
    positions[1] = f"{positions[1]},{tmp_path}/nvidia-cap66"
    found = resolve(positions, _devices([2, 3]))
    assert found[0] == "GPU-3"
    assert "No such file" in _reason(found[1])


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
