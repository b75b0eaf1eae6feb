"""Telling systemd how we are (sd_notify(3)): a datagram to the socket that it names, nothing where there is none."""

from __future__ import annotations

import os
import socket
import time
from typing import Final

from ..model import GpuId
from .core import wants
from .limits import Wanted
from .report import all_faults, gpu_fault
from .state import TOLERANCE_MW, Gpu, State

_SEND_S: Final = 1.0
_MOST_STATUS_BYTES: Final = 200


def notify(*lines: str) -> None:
    """Send ``READY=1`` and the like, each a line. A failure is of no consequence to us."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    address = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(_SEND_S)
            sender.sendto("\n".join(lines).encode(), address)
    except OSError:
        return


def reloading() -> None:
    """A reload begins; ``READY=1`` ends it. The time is what systemd 253 and later ask for, with Type=notify-reload."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def status(text: str) -> str:
    """The line that ``systemctl status`` shows: one line, of bounded length."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return f"STATUS={plain.encode()[:_MOST_STATUS_BYTES].decode(errors='ignore')}"


def watchdog_period_s() -> float | None:
    """How often systemd wants a sign of life from this process: half of its deadline. None if not at all."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6


def summary(state: State, now_ns: int) -> str:
    """How the node is, in one line for people: what holds, what is capped, what is wrong. No plan: say so."""
    n_faults = len(all_faults(state)) + sum(bool(gpu_fault(state, gpu)) for gpu in state.gpus.values())
    parts = [_mode(state, now_ns)]
    if state.listed:
        parts.append(_capped(state, now_ns))
    else:
        parts.append("GPUs not listed yet" if "nvml" not in state.faults else "GPUs cannot be listed")
    if not state.connected:
        parts.append("controller not reached")
    if n_faults:
        parts.append(_count(n_faults, "fault"))
    return ", ".join(parts)


def _capped(state: State, now_ns: int) -> str:
    """How many GPUs have a cap of ours; in a window that not all of them follow: how many do."""
    n_gpus = len(state.gpus)
    if window_open(state, now_ns):
        wanted = wanted_now(state, now_ns)
        following = sum(follows(gpu, wanted.get(gpu.uuid)) for gpu in state.gpus.values())
        if following < n_gpus:
            return f"{following} of {_count(n_gpus, 'GPU')} follow the plan"
    # One that cannot be read may have lost its cap.
    capped = sum(gpu.current_mw is not None and gpu.enforced_mw is not None for gpu in state.gpus.values())
    return f"{capped} of {_count(n_gpus, 'GPU')} capped"


def wanted_now(state: State, now_ns: int) -> dict[GpuId, Wanted]:
    """What the plan wants of each GPU now; one that must not be touched is not in it."""
    if state.held is None:
        return {}
    _, found = state.held.in_force(now_ns, skip_lease=state.settings.skip_lease)
    return wants(state, found)


def follows(gpu: Gpu, want: Wanted | None) -> bool:
    """Whether this GPU is known to stand no higher than what is wanted of it, as far as its board can."""
    if want is None or gpu.requested_mw is None or gpu.enforced_mw is None or gpu.setting:
        return False
    if gpu.current_mw is not None and gpu.requested_mw == gpu.made_mw and gpu.current_mw == want.cap_mw:
        return True  # the board has no nearer value
    return max(gpu.requested_mw, gpu.enforced_mw) <= want.cap_mw + TOLERANCE_MW


def _mode(state: State, now_ns: int) -> str:
    if state.stopping_ns is not None:
        return "stopping"
    if state.released:
        return "released by the admin"
    if state.held is None:
        return "no plan held"
    if state.held.plan.mode == "observe":
        return "observe only"
    return "window open" if window_open(state, now_ns) else "no window"


def window_open(state: State, now_ns: int) -> bool:
    """Whether a step that caps this node is in force; not while an admin has released it, nor in observe mode."""
    if state.held is None or state.released or state.held.plan.mode == "observe":
        return False
    _, step = state.held.in_force(now_ns, skip_lease=state.settings.skip_lease)
    return step.park_cap_mw is not None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
