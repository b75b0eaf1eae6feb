"""What ``bench.agent`` is compared with: ``python -m bench.agent_bare PERIOD_S`` reads every GPU and forgets it.

Two processes, as the agent has: one keeps the time and asks, the other calls NVML and answers. Nothing is checked,
recorded, decided or sent on. The calls are those that the agent makes in a window, counters of activity included.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from typing import Final

import pynvml

ACTIVITY_EVERY: Final = 5
"""Seconds; as the agent's ``times.activity_s``."""

FIELDS: Final = [
    pynvml.NVML_FI_DEV_POWER_REQUESTED_LIMIT,
    pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT,
    pynvml.NVML_FI_DEV_POWER_INSTANT,
    pynvml.NVML_FI_DEV_POWER_AVERAGE,
    pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
]
METRICS: Final = (
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
)


class Gpu:
    """One GPU and its last two samples of activity."""

    def __init__(self, index: int) -> None:
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        pynvml.nvmlGpmSampleGet(self.handle, self.samples[1])
        time.sleep(0.1)  # two samples must lie this far apart

    def read(self, *, activity: bool) -> list[float]:
        """What the agent reads of a GPU each second, and every fifth."""
        values = [field.value.uiVal for field in pynvml.nvmlDeviceGetFieldValues(self.handle, FIELDS)]
        values.append(pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM))
        values.append(pynvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle))
        return values + self._activity() if activity else values

    def _activity(self) -> list[float]:
        rates = pynvml.nvmlDeviceGetUtilizationRates(self.handle)
        self.samples.reverse()
        pynvml.nvmlGpmSampleGet(self.handle, self.samples[1])
        get = pynvml.c_nvmlGpmMetricsGet_t()
        get.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        get.numMetrics = len(METRICS)
        get.sample1, get.sample2 = self.samples
        for place, metric in enumerate(METRICS):
            get.metrics[place].metricId = metric
        pynvml.nvmlGpmMetricsGet(get)
        return [rates.gpu, rates.memory, *(get.metrics[place].value for place in range(len(METRICS)))]


def serve(asked: socket.socket) -> None:
    """The one that calls NVML."""
    pynvml.nvmlInit()
    gpus = [Gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    while what := asked.recv(1):
        asked.sendall(json.dumps([gpu.read(activity=what == b"a") for gpu in gpus]).encode())


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
    for turn in itertools.count():
        ours.sendall(b"a" if turn % ACTIVITY_EVERY == 0 else b"r")
        json.loads(ours.recv(65536))
        due_s += period_s
        time.sleep(max(0.0, due_s - time.monotonic()))


if __name__ == "__main__":
    main()
