"""A process that uses the real pynvml against the stand-in, driven from a test."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from testbed.gpus import nvml_environment

# Reads one Python expression a line, over pynvml as N and the device handles h, and answers in JSON.
_SERVER = """
import json, os, sys, pynvml as N
h = []
def init():
    N.nvmlInit()
    h[:] = [N.nvmlDeviceGetHandleByIndex(i) for i in range(N.nvmlDeviceGetCount())]
    return len(h)
for line in sys.stdin:
    try:
        answer = {"ok": eval(line)}
    except Exception as error:
        answer = {"error": type(error).__name__, "code": getattr(error, "value", None)}
    print(json.dumps(answer, default=lambda value: value.__dict__), flush=True)
"""


class NvmlError(Exception):
    """What pynvml raised in the other process: the class's name and the return code."""

    def __init__(self, name: str, code: int | None) -> None:
        super().__init__(name, code)
        self.name = name
        self.code = code


class NvmlDiedError(Exception):
    """The other process ended in the middle of a call."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class NvmlProcess:
    """One NVML client. ``process("N.nvmlDeviceGetName(h[0])")`` evaluates there; init is called unless told not to."""

    def __init__(self, node_dir: Path, *, init: bool = True, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**nvml_environment(node_dir), **(env or {})},
        )
        if init:
            self("init()")

    def __call__(self, expression: str) -> Any:
        self.send(expression)
        return self.receive()

    def send(self, expression: str) -> None:
        """Begin a call whose answer may not come."""
        assert self._process.stdin is not None
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()

    def has_answered(self, timeout_s: float = 0.0) -> bool:
        """Whether an answer comes within this time."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], timeout_s)[0])

    def receive(self) -> Any:
        """The answer to what was sent. NvmlDiedError when the process ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise NvmlDiedError(self._process.wait(10))
        answer = json.loads(line)
        if "error" in answer:
            raise NvmlError(answer["error"], answer["code"])
        return answer["ok"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def __enter__(self) -> NvmlProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        finally:
            if self._process.poll() is None:
                self.kill()
            self._process.stdout.close()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait for a condition; an AssertionError that says what did not come."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.01)
