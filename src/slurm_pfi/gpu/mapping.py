"""From Slurm's positions to GPUs: position in gres.conf -> device file -> minor number -> UUID.

The three numberings (position, minor, NVML index) are independent and change at boot. Where one link is missing the
position is unresolved, with the reason; nothing is guessed.

A position may also be a slice of a board (MIG): it leads to the board that carries it, for power is the board's alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..model import Frozen, GpuId
from .device import DeviceInfo

_NVIDIA_MAJOR: Final = 195  # Linux, Documentation/admin-guide/devices.txt
_CONTROL_MINORS: Final = range(254, 256)  # nvidia-modeset and nvidiactl share the major number
_NAME: Final = re.compile(r"nvidia(0|[1-9][0-9]{0,2})", re.ASCII)
_SLICE_NAME: Final = re.compile(r"nvidia-cap(0|[1-9][0-9]{0,4})", re.ASCII)
_BOARD: Final = re.compile(r"gpu(0|[1-9][0-9]{0,2})", re.ASCII)
_ACCESS_MINOR: Final = re.compile(r"^DeviceFileMinor:\s*([0-9]{1,7})\s*$", re.ASCII | re.MULTILINE)
_SLICE_DRIVER: Final = "nvidia-caps"
_PROC: Final = Path("/proc")


class Unresolved(Frozen, frozen=True, kw_only=True):
    """No GPU can be named; ``reason`` is for the admin."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Place:
    """The board of a position by its minor number, and whether the position is only a slice of it."""

    minor: int
    is_slice: bool


def resolve(
    positions: Mapping[int, str], devices: Sequence[DeviceInfo], *, proc: Path = _PROC
) -> dict[int, GpuId | Unresolved]:
    """The GPU of each position, or why there is none. One bad position does not harm the others.

    A position's text is its device file, or all files of a slice with commas between them. Several slices may lead to
    one board. Where one slice leads to none, none does: it may be on any board that has slices. ``proc`` is where
    the driver tells which slice is on which board.
    """
    slices = _Slices(proc)
    places = {position: _place(files, slices) for position, files in positions.items()}
    lost = [
        position
        for position, place in places.items()
        if isinstance(place, Unresolved) and _names_slice(positions[position])
    ]
    claims = Counter(place.minor for place in places.values() if isinstance(place, _Place))
    whole = {place.minor for place in places.values() if isinstance(place, _Place) and not place.is_slice}
    found: dict[int, GpuId | Unresolved] = {}
    for position, place in places.items():
        if isinstance(place, Unresolved):
            found[position] = place
        elif place.is_slice and lost:
            reason = f"a slice, and the slice at position {lost[0]} may be on the same board"
            found[position] = Unresolved(reason=reason)
        elif place.minor in whole and claims[place.minor] > 1:
            reason = f"{claims[place.minor]} positions lead to minor number {place.minor}"
            found[position] = Unresolved(reason=reason)
        else:
            found[position] = _uuid(place.minor, devices)
    return found


def board_minor(files: str, *, proc: Path = _PROC) -> int | Unresolved:
    """The minor number of the board behind a position's device files. NVML is not asked whether it is there."""
    place = _place(files, _Slices(proc))
    return place if isinstance(place, Unresolved) else place.minor


def slices_sign(proc: Path = _PROC) -> tuple[str, ...]:
    """Which slices there are, by the driver: differs when a board is divided anew. Empty without a driver."""
    root = proc / "driver/nvidia/capabilities"
    return tuple(sorted(str(path.relative_to(root)) for path in root.glob("gpu*/mig/gi*")))


def minor_of(path: str) -> int | Unresolved:
    """The minor number of a GPU's device file.

    It is that of a character device of the NVIDIA major number. For simulated nodes without root a symlink that leads
    to /dev/null counts too, with the number in its name (``nvidia3``).
    """
    device = _device(path)
    if isinstance(device, Unresolved):
        return device
    if os.major(device) == _NVIDIA_MAJOR:
        minor = os.minor(device)
        return Unresolved(reason=f"{path}: no GPU") if minor in _CONTROL_MINORS else minor
    number = _stand_in_number(path, device, _NAME)
    return Unresolved(reason=f"{path}: not a device file of an NVIDIA GPU") if number is None else number


class _Slices:
    """Which board carries a slice, as the driver tells below /proc; read when it is first asked."""

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._boards: dict[int, int] | None = None

    def board_of(self, path: str) -> int | Unresolved:
        """The minor number of the board whose slice has this device file (/dev/nvidia-caps/nvidia-capN)."""
        minor = self._minor(path)
        if isinstance(minor, Unresolved):
            return minor
        if self._boards is None:
            self._boards = self._read()
        board = self._boards.get(minor)
        return Unresolved(reason=f"{path}: the driver tells of no such slice") if board is None else board

    def _minor(self, path: str) -> int | Unresolved:
        device = _device(path)
        if isinstance(device, Unresolved):
            return device
        number = _stand_in_number(path, device, _SLICE_NAME)
        if number is not None:
            return number
        if os.major(device) != self._major():
            return Unresolved(reason=f"{path}: not a device file of a GPU slice")
        return os.minor(device)

    def _major(self) -> int | None:
        """The major number of slices, which the kernel gives out anew at each boot."""
        try:
            text = (self._proc / "devices").read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return None
        lines = (line.split() for line in text.splitlines())
        return next((int(words[0]) for words in lines if words[1:] == [_SLICE_DRIVER]), None)

    def _read(self) -> dict[int, int]:
        """Board by slice, both as minor numbers. What two boards claim is no board's."""
        boards: dict[int, int] = {}
        disputed: set[int] = set()
        root = self._proc / "driver/nvidia/capabilities"
        for pattern in ("gpu*/mig/gi*/access", "gpu*/mig/gi*/ci*/access"):
            for path in root.glob(pattern):
                board = _BOARD.fullmatch(path.relative_to(root).parts[0])
                minor = _access_minor(path)
                if (
                    board is not None
                    and minor is not None
                    and boards.setdefault(minor, int(board[1])) != int(board[1])
                ):
                    disputed.add(minor)
        return {minor: board for minor, board in boards.items() if minor not in disputed}


def _access_minor(path: Path) -> int | None:
    try:
        match = _ACCESS_MINOR.search(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        return None  # a slice that was just taken away
    return None if match is None else int(match[1])


def _device(path: str) -> int | Unresolved:
    """The device number of a character device."""
    try:
        about = Path(path).stat()
    except OSError as error:
        return Unresolved(reason=f"{path}: {error.strerror}")
    except ValueError as error:
        return Unresolved(reason=f"{path!r}: {error}")
    return (
        about.st_rdev if stat.S_ISCHR(about.st_mode) else Unresolved(reason=f"{path}: not a character device")
    )


def _stand_in_number(path: str, device: int, name: re.Pattern[str]) -> int | None:
    """The number in the name of a link to /dev/null, which stands for a device file where nobody may make one."""
    match = name.fullmatch(Path(path).name)
    if match is None or not Path(path).is_symlink() or device != Path(os.devnull).stat().st_rdev:
        return None
    return int(match[1])


def _place(files: str, slices: _Slices) -> _Place | Unresolved:
    """The board behind the device files of one position."""
    paths = files.split(",")
    if not _names_slice(files):
        minor = minor_of(files)
        return minor if isinstance(minor, Unresolved) else _Place(minor, is_slice=False)
    boards: set[int] = set()
    faults: list[Unresolved] = []
    for path in paths:
        board = slices.board_of(path) if _is_slice_file(path) else minor_of(path)
        if isinstance(board, Unresolved):
            faults.append(board)
        else:
            boards.add(board)
    if len(boards) > 1:
        numbers = ", ".join(map(str, sorted(boards)))
        return Unresolved(reason=f"{files}: files of several boards (minor numbers {numbers})")
    # A slice has files that say nothing of its board, or that the driver no longer lists: one that does is enough.
    return _Place(boards.pop(), is_slice=True) if boards else faults[0]


def _names_slice(files: str) -> bool:
    return "," in files or _is_slice_file(files)


def _is_slice_file(path: str) -> bool:
    return _SLICE_NAME.fullmatch(Path(path).name) is not None


def _uuid(minor: int, devices: Sequence[DeviceInfo]) -> GpuId | Unresolved:
    uuids = [device.uuid for device in devices if device.minor == minor]
    if len(uuids) == 1:
        return uuids[0]
    if not uuids:
        return Unresolved(reason=f"NVML lists no GPU with minor number {minor}")
    return Unresolved(reason=f"NVML lists {len(uuids)} GPUs with minor number {minor}")
