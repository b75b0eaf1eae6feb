"""Tell slurm-pfi how far a job has come: one call in a training loop.

    from slurm_pfi.progress import report
    report(tokens_so_far)                 # or report(step, unit="steps", total=steps_in_all)

The counter goes as one datagram to a Unix socket of the node's agent: that of the run,
``/run/slurm-pfi/<SLURMD_NODENAME>/progress/<SLURM_JOB_ID>.<SLURM_RESTART_COUNT>``, else ``progress.sock`` beside that
folder, which everyone shares. SLURM_PFI_PROGRESS gives another path in place of
``/run/slurm-pfi/<SLURMD_NODENAME>/progress.sock``. Format, version 1, ASCII, at most 256 bytes, no newline:

    pfi-progress 1 <counter> <unit>
    pfi-progress 1 <counter> <unit> of <total>

``counter`` is a decimal number, finite and not below zero, such as ``1234`` or ``1.5e+09``; it counts up over the life
of the run. ``unit`` is one to sixteen letters a-z. ``total``, a number like the counter and above zero, is what the
counter will be when the job's work is done: with it the site can see whether the job still fits its time limit. Who
does not know it leaves it out. Fields are separated by one space. Whose counter it is, the agent
knows from the sender's process; nothing in the text claims a job. The process must still be there when it is read: a
moment later, as a rule. A report that gets lost does no harm, as the next one counts on.

This file needs nothing but Python's standard library and nothing else of this package: it may be copied into a job.
"""

from __future__ import annotations

import math
import os
import re
import socket

_UNIT = re.compile(r"[a-z]{1,16}")
_RUN = re.compile(r"[0-9]{1,10}\.[0-9]{1,10}", re.ASCII)


def report(counter: float, unit: str = "tokens", total: float | None = None) -> bool:
    """Report the job's own counter, and what it will be at the end of the work where that is known.

    Never raises and never waits; False when it could not be handed over. A ``total`` that is none is left out.
    """
    try:
        number = _number(counter)
        if number is None or _UNIT.fullmatch(unit) is None:
            return False
        whole = None if total is None else _number(total)
        of = "" if whole is None or float(whole) <= 0 else f" of {whole}"
        message = f"pfi-progress 1 {number} {unit}{of}".encode("ascii")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            for path in _paths():
                try:
                    sender.sendto(message, path)
                except (FileNotFoundError, ConnectionRefusedError, PermissionError, NotADirectoryError):
                    continue
                return True
    except Exception:  # a job must never fail for its report
        return False
    return False


def _number(value: float) -> str | None:
    """As it is written in a datagram; None for what is no count."""
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not math.isfinite(value) or value < 0:
        return None
    return str(int(value)) if value.is_integer() and value < 1e15 else repr(value)


def _paths() -> list[str]:
    """Where to send to: the run's own socket, then the one that all share."""
    shared = os.environ.get("SLURM_PFI_PROGRESS")
    if not shared:
        node = os.environ.get("SLURMD_NODENAME")
        if not node or "/" in node:
            return []
        shared = f"/run/slurm-pfi/{node}/progress.sock"
    run = f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    if _RUN.fullmatch(run) is None:
        return [shared]
    return [f"{shared[: shared.rfind('/') + 1]}progress/{run}", shared]
