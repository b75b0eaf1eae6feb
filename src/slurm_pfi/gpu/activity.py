"""How busy parts of one device are (GPM): two snapshots of its counters, and the shares over the time between."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import pynvml

from .codes import Raw, Reader, call, within
from .device import DeviceError, UnsupportedError

LEAST_WINDOW_S: Final = 0.1
"""NVML wants two snapshots at least 100 ms apart."""

_SM, _TENSOR, _DRAM = 2, 5, 10
_ROUNDING: Final = 1.02
"""A share a little above 1 is rounding between two clocks; more is nonsense."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares 0..1 of the time between two snapshots; None where not given."""

    sm_active: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None


class Activity:
    """The snapshots of one device. Used by one thread at a time."""

    def __init__(self) -> None:
        self.supported: bool | None = None
        self._last: tuple[Raw, float] | None = None
        self._spare: Raw = None

    def probe(self, reader: Reader) -> None:
        """Ask whether the device has these counters; None in ``supported`` where it cannot be told."""
        answer = reader.attempt("nvmlGpmQueryDeviceSupport")
        if isinstance(answer, DeviceError):
            self.supported = False if isinstance(answer, UnsupportedError) else None
        else:
            self.supported = bool(answer.isSupportedDevice)

    def read(self, reader: Reader) -> Shares:
        """The shares since the last call that took a snapshot; nothing at the first, or too soon after it."""
        if self.supported is None:
            self.probe(reader)
        now_s = time.monotonic()
        if self.supported is False or (self._last is not None and now_s - self._last[1] < LEAST_WINDOW_S):
            return Shares()
        taken = self._take(reader)
        if isinstance(taken, DeviceError):
            if isinstance(taken, UnsupportedError):
                self.supported = False
            return Shares()
        before, self._last = self._last, (self._spare, now_s)
        self._spare = None if before is None else before[0]
        return Shares() if before is None else _compare(reader, before[0], self._last[0])

    def _take(self, reader: Reader) -> Raw:
        try:
            self._spare = self._spare or call("nvmlGpmSampleAlloc", uuid=reader.uuid)
        except DeviceError as error:
            return error
        return reader.attempt("nvmlGpmSampleGet", self._spare)


def _compare(reader: Reader, before: Raw, after: Raw) -> Shares:
    question = pynvml.c_nvmlGpmMetricsGet_t()
    question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    question.sample1, question.sample2 = before, after
    wanted = (_SM, _TENSOR, _DRAM)
    question.numMetrics = len(wanted)
    for place, metric in enumerate(wanted):
        question.metrics[place].metricId = metric
    try:
        answer = call("nvmlGpmMetricsGet", question, uuid=reader.uuid)
    except DeviceError:
        return Shares()
    return Shares(*(_share(answer.metrics[place]) for place in range(len(wanted))))


def _share(metric: Raw) -> float | None:
    if metric.nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    share = within(float(metric.value) / 100, 0.0, _ROUNDING)
    return None if share is None else min(share, 1.0)
