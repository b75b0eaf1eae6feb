"""What ``bench.agent`` is compared with: ``python -m bench.agent_bare PERIOD_S`` reads every GPU and forgets it.

Two processes, as the agent has: one keeps the time and asks, the other calls NVML and answers. Nothing is checked,
recorded, decided or sent on. The calls are those that the agent makes in a window, counters of activity included.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any, Final

import pynvml

ACTIVITY_EVERY: Final = 5
_METRICS: Final = (
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
)


def read(handle: Any) -> list[int]:
    """What the agent reads of a GPU each second."""
    return [
        pynvml.nvmlDeviceGetPowerManagementLimit(handle),
        pynvml.nvmlDeviceGetEnforcedPowerLimit(handle),
        pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0].value.uiVal,
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
    ]


def serve(asked: socket.socket) -> None:
    """The one that calls NVML."""
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    while asked.recv(1):
        asked.sendall(json.dumps([read(handle) for handle in handles]).encode())


def main() -> None:
    """Start the other and ask it for ever."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        serve(theirs)
        return
    theirs.close()
    period_s = float(sys.argv[1])
    due_s = time.monotonic()
    while True:
        ours.sendall(b"?")
        json.loads(ours.recv(65536))
        due_s += period_s
        time.sleep(max(0.0, due_s - time.monotonic()))


if __name__ == "__main__":
    main()
