"""From Slurm's positions to GPUs: position in gres.conf -> device file -> minor number -> UUID.

The three numberings (position, minor, NVML index) are independent and change at boot. Where one link is missing the
position is unresolved, with the reason; nothing is guessed.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ..model import Frozen, GpuId
from .device import DeviceInfo

_NVIDIA_MAJOR: Final = 195  # Linux, Documentation/admin-guide/devices.txt
_CONTROL_MINORS: Final = range(254, 256)  # nvidia-modeset and nvidiactl share the major number
_NAME: Final = re.compile(r"nvidia(0|[1-9][0-9]{0,2})", re.ASCII)


class Unresolved(Frozen, frozen=True, kw_only=True):
    """No GPU can be named; ``reason`` is for the admin."""

    reason: str


def resolve(positions: Mapping[int, str], devices: Sequence[DeviceInfo]) -> dict[int, GpuId | Unresolved]:
    """The GPU of each position, or why there is none. One bad position does not harm the others."""
    minors = {position: minor_of(path) for position, path in positions.items()}
    claims = Counter(minor for minor in minors.values() if isinstance(minor, int))
    return {position: _resolve_one(minor, claims, devices) for position, minor in minors.items()}


def minor_of(path: str) -> int | Unresolved:
    """The minor number of a GPU's device file.

    It is that of a character device of the NVIDIA major number. For simulated nodes without root a symlink that leads
    to /dev/null counts too, with the number in its name (``nvidia3``).
    """
    try:
        about = Path(path).stat()
        null = Path(os.devnull).stat()
    except OSError as error:
        return Unresolved(reason=f"{path}: {error.strerror}")
    except ValueError as error:
        return Unresolved(reason=f"{path!r}: {error}")
    if not stat.S_ISCHR(about.st_mode):
        return Unresolved(reason=f"{path}: not a character device")
    if os.major(about.st_rdev) == _NVIDIA_MAJOR:
        minor = os.minor(about.st_rdev)
        return Unresolved(reason=f"{path}: no GPU") if minor in _CONTROL_MINORS else minor
    name = _NAME.fullmatch(Path(path).name)
    if about.st_rdev == null.st_rdev and Path(path).is_symlink() and name is not None:
        return int(name[1])
    return Unresolved(reason=f"{path}: not a device file of an NVIDIA GPU")


def _resolve_one(
    minor: int | Unresolved, claims: Counter[int], devices: Sequence[DeviceInfo]
) -> GpuId | Unresolved:
    if isinstance(minor, Unresolved):
        return minor
    if claims[minor] > 1:
        return Unresolved(reason=f"{claims[minor]} positions lead to minor number {minor}")
    uuids = [device.uuid for device in devices if device.minor == minor]
    if len(uuids) == 1:
        return uuids[0]
    if not uuids:
        return Unresolved(reason=f"NVML lists no GPU with minor number {minor}")
    return Unresolved(reason=f"NVML lists {len(uuids)} GPUs with minor number {minor}")
