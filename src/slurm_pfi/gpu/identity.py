"""Which boot this is, and which start of the driver: power limits survive neither.

Both are compared with what the journal says; an entry of another boot or driver start tells of limits that are gone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ..model import Frozen

UNKNOWN: Final = "unknown"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PROC: Final = Path("/proc")
_VERSION: Final = Path("/sys/module/nvidia/version")
_DRIVER_THREAD: Final = "nv_queue"
_TOKEN: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)


class IdentityError(Exception):
    """Boot id or driver start cannot be read; without them no journal entry can be told from an old one."""


class HostIdentity(Frozen, frozen=True, kw_only=True):
    """``driver_start`` is ``unknown`` where the driver shows no sign of when it was loaded.

    Unknown equals unknown: within one boot an entry is then believed, and restoring stays safe because only a limit
    that still equals the one we issued is ever restored.
    """

    boot_id: str
    driver_start: str


def read_identity(folder: Path | None = None, *, proc: Path = _PROC) -> HostIdentity:
    """The identity of this host, or that which ``folder`` tells in its files ``boot_id`` and ``driver_start``.

    The driver start is the start time of the oldest ``nv_queue`` thread, in clock ticks since boot (proc(5), field 22
    of stat). NVIDIA's kernel module makes this thread when it is loaded (open-gpu-kernel-modules, nv.c); this is not
    tried on hardware yet. Raises IdentityError.
    """
    if folder is not None:
        return HostIdentity(boot_id=_read(folder / "boot_id"), driver_start=_read(folder / "driver_start"))
    return HostIdentity(boot_id=_read(_BOOT_ID), driver_start=_driver_start(proc))


def driver_version(path: Path = _VERSION) -> str | None:
    """The version of the kernel module that is loaded; None where it does not say."""
    try:
        return _read(path)
    except IdentityError:
        return None


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityError(f"{path}: cannot be read: {error}") from error
    if _TOKEN.fullmatch(text) is None:
        raise IdentityError(f"{path}: {text[:80]!r} is not an identity: one word of letters, digits, . _ : -")
    return text


def _driver_start(proc: Path) -> str:
    starts = [
        ticks for folder in proc.glob("[0-9]*") if (ticks := _start_of_driver_thread(folder)) is not None
    ]
    return str(min(starts)) if starts else UNKNOWN


def _start_of_driver_thread(folder: Path) -> int | None:
    try:
        stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it ended meanwhile
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    # Field 3 is the first of ``rest``; only a kernel thread (parent 2, kthreadd) may speak for the driver.
    if name != _DRIVER_THREAD or len(fields) < 20 or fields[1] != "2":
        return None
    return int(fields[19])
