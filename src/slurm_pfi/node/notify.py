"""Telling systemd how we are (sd_notify(3)): a datagram to the socket that it names, nothing where there is none."""

from __future__ import annotations

import os
import socket


def notify(text: str) -> None:
    """Send ``READY=1`` and the like. A failure is of no consequence to us."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    address = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(1.0)
            sender.sendto(text.encode(), address)
    except OSError:
        return


def watchdog_period_s() -> float | None:
    """How often systemd wants a sign of life from this process: half of its deadline. None if not at all."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6
