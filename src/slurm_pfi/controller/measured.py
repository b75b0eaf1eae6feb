"""What is measured of a run from its reports: its baseline, what each cap did to it, what that came to. Pure.

A job's counter is a user's word. What physics does not allow is doubted here; what the curves do not expect, in
``elasticity``.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import TimesSection
from ..elasticity.evidence import RunEvidence
from .levels import Level
from .record import Recalled, Record, Sample, Totals

__all__ = ["Level", "Recalled", "Record", "Sample", "Totals", "evidence", "observe"]

Expected = Callable[[float], tuple[float, float]]
"""What is expected of a run at a reduction: mean loss and its standard deviation."""


def observe(record: Record, sample: Sample, times: TimesSection) -> Record:
    """The record with one more report of the run in it. A sample not newer than the last changes nothing."""
    raise NotImplementedError


def evidence(
    record: Record, gpu_model: str, kin: str, now_ns: int, expected: Expected | None = None
) -> RunEvidence:
    """What the learner can take from a record."""
    raise NotImplementedError
