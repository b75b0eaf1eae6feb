"""What this process may do, as the kernel says (capabilities(7))."""

from __future__ import annotations

from pathlib import Path
from typing import Final

CAP_SYS_ADMIN: Final = 21
_STATUS: Final = Path("/proc/self/status")


def may_set_limits(status: Path = _STATUS) -> bool:
    """Whether a driver will take a power limit from us: it wants CAP_SYS_ADMIN, which root in a container may lack."""
    for line in status.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_ADMIN & 1)
    return False
