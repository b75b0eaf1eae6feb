"""The screen of ``slurm-pfi top``: drawn anew at each look, key and change of size, and left as it was found.

The controller is asked by a thread, so that keys and the size of the terminal count also while it does not answer.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from ..bus.asking import ask
from ..bus.unix import UnreachableError
from ..units import format_duration
from .common import why_unreachable
from .top import render

ANSWER_S: Final = 10.0
_QUIT: Final = b"qQ\x03"


@dataclass(frozen=True)
class Look:
    """What was last known of the site, when (monotonic seconds), and why there is nothing newer; empty if there is."""

    status: dict[str, Any]
    jobs: list[dict[str, Any]]
    at_s: float
    trouble: str = ""

    def away(self, now_s: float) -> str:
        """The line that says so when the figures are old."""
        if not self.trouble:
            return ""
        age = format_duration(now_s - self.at_s)
        return f"NO ANSWER, this is {age} old; trying again. {self.trouble}"


class Watcher:
    """Asks again every ``interval_s`` in a thread, and writes a byte to ``wake_fd`` after each answer."""

    def __init__(self, path: Path, interval_s: float, first: Look, wake_fd: int) -> None:
        self._path = path
        self._interval_s = interval_s
        self._wake_fd = wake_fd
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)
        self.look = first

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No more questions. One under way is not waited for."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.look = self._ask()
            if not self._ended.is_set():
                _wake(self._wake_fd)

    def _ask(self) -> Look:
        old = self.look
        try:
            status = ask(self._path, "status", timeout_s=ANSWER_S)
            jobs = ask(self._path, "jobs", timeout_s=ANSWER_S)
        except UnreachableError as error:
            return Look(old.status, old.jobs, old.at_s, why_unreachable(error, self._path))
        for reply in (status, jobs):
            if not reply.ok:
                return Look(old.status, old.jobs, old.at_s, reply.message)
        return Look(status.data, jobs.data, time.monotonic())


def watch(out: Console, path: Path, interval_s: float, status: Any, jobs: Any) -> None:
    """Show the site until q, Ctrl-C or a signal that ends us; then the terminal is what it was before."""
    read_fd, wake_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(wake_fd, False)
    watcher = Watcher(path, interval_s, Look(status, jobs, time.monotonic()), wake_fd)
    keys_fd = sys.stdin.fileno() if sys.stdin.isatty() else None
    try:
        with (
            _signals(wake_fd),
            _keys(keys_fd),
            Live(
                console=out, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            ) as live,
        ):
            watcher.start()
            while True:
                look = watcher.look
                now_s = time.monotonic()
                width, height = out.size
                picture = render(
                    look.status,
                    look.jobs,
                    width,
                    height,
                    now_unix_s=time.time() - (now_s - look.at_s),
                    away=look.away(now_s),
                )
                live.update(picture, refresh=True)
                if _pressed(read_fd, keys_fd, 1.0 if look.trouble else None):
                    break
    except KeyboardInterrupt:
        pass
    finally:
        watcher.stop()


def _pressed(read_fd: int, keys_fd: int | None, timeout_s: float | None) -> bool:
    """Wait for an answer, a key or a new size; True when the key was one that ends."""
    fds = [read_fd] if keys_fd is None else [read_fd, keys_fd]
    ready, _, _ = select.select(fds, [], [], timeout_s)
    if read_fd in ready:
        with contextlib.suppress(BlockingIOError):
            os.read(read_fd, 4096)
    if keys_fd is None or keys_fd not in ready:
        return False
    typed = os.read(keys_fd, 64)
    return not typed or any(key in _QUIT for key in typed)


def _wake(fd: int) -> None:
    with contextlib.suppress(OSError):  # full: it will wake up anyhow
        os.write(fd, b".")


@contextlib.contextmanager
def _signals(wake_fd: int) -> Iterator[None]:
    """A new size wakes the loop; what ends a process ends it by an exception, so that the screen is left in order."""
    old_wake = signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    old = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    old[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_wake)


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _keys(fd: int | None) -> Iterator[None]:
    """Keys come one by one and unseen. Ctrl-Z does nothing: it would leave the shell on our screen."""
    if fd is None:
        yield
        return
    old = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd, termios.TCSANOW)
        now = termios.tcgetattr(fd)
        now[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSANOW, now)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, old)
