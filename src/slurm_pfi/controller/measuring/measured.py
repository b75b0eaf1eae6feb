"""What is measured of a run from its reports: its baseline, what each cap did to it, what that came to. Pure.

A job's counter is a user's word. What physics does not allow is doubted here; what the curves do not expect, in
``elasticity``.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable
from struct import Struct
from typing import Final

from msgspec.structs import replace

from ...config import TimesSection
from ...elasticity.evidence import (
    LEAST_BASELINE_SD,
    LEAST_LOSS,
    LEAST_NOISE_SD,
    NEW_SEGMENT_SD,
    Measurement,
    RunEvidence,
)
from ...elasticity.plausible import plausible
from .activity import judged, unjudged
from .counting import NS_PER_S, SETTLE_NS, counted, new_segment
from .levels import FEWEST_INTERVALS, Active, Level, acted, drew, is_high, is_low, kept, nearest_cap
from .record import Drift, Recalled, Record, Totals
from .sample import Sample

__all__ = ["Level", "Recalled", "Record", "Sample", "Totals", "believed", "evidence", "observe"]

KEPT_DRAWS: Final = 240
TOP_SHARE: Final = 0.1
"""arXiv 2609.11542: the draw is the mean of the top 10 % of samples."""

BEYOND_BASELINE: Final = 1.1
SAME_CAP: Final = 0.01
"""Caps this near to each other, as a share of the baseline draw, are one level."""

AT_CAP: Final = 0.95
"""A run of unknown baseline that draws this share of its cap is held by it."""

OVERLAP_NS: Final = NS_PER_S // 2
"""So much may two readings of activity of GPUs on several nodes overlap."""

UNWATCHED_NS: Final = 60 * NS_PER_S
"""Its GPUs have not told what they do for so long: then no level waits for that."""

SURGES: Final = 3
"""So many samples in a row far above the draw of their level: that saw no training."""

DRAW: Final = Struct("i")
MOST_DRAW_MW: Final = 2**31 - 1
LEAST_REDUCTION: Final = 0.005
ANY_BASELINE_SD: Final = 10.0
NEAR_PRIOR: Final = 0.9

Expected = Callable[[float], tuple[float, float]]
"""What is expected of a run at a reduction: mean loss and its standard deviation."""


def observe(record: Record, sample: Sample, times: TimesSection) -> Record:
    """The record with one more report of the run in it. A sample older than the last changes nothing.

    A stretch of more than ``times.report_age_s`` without a report is not known: neither time nor energy of it count,
    and what the counter did in it is work without a loss.
    """
    if record.last_ns is None:
        seconds = 0.0
    elif sample.now_ns < record.last_ns:
        return record
    else:
        seconds = (sample.now_ns - record.last_ns) / NS_PER_S
    gap = seconds > times.report_age_s
    was_bound = record.bound
    record = _placed(record, sample, gap=gap)
    if gap:
        seconds = 0.0
    share_capped = (was_bound + record.bound) / 2
    record = _drawn(record, sample, seconds, share_capped, times)
    record = _paced(record, sample)
    return counted(record, sample, times)


def _placed(record: Record, sample: Sample, *, gap: bool) -> Record:
    """Which level the run is at, and since when. While its GPUs have different caps, it is at none."""
    known = sample.uncapped or sample.cap_mw is not None
    cap_mw = None if sample.uncapped else sample.cap_mw
    bound, uneven = False, False
    if cap_mw is not None:
        base_mw = record.draw_mw
        lowest_mw = cap_mw if sample.lowest_mw is None else sample.lowest_mw
        if base_mw is not None:
            bound = lowest_mw < base_mw
        elif sample.draw_mw is not None:
            bound = sample.draw_mw >= AT_CAP * lowest_mw
        within_mw = SAME_CAP * (base_mw or sample.prior_mw or cap_mw)
        uneven = cap_mw - lowest_mw > within_mw
        if record.cap_mw is not None and abs(record.cap_mw - cap_mw) <= within_mw:
            cap_mw = record.cap_mw
        else:
            cap_mw = nearest_cap(record.levels, record.segment, cap_mw, within_mw)
    uneven = uneven or sample.slowed
    changed = gap or uneven or (known, cap_mw) != (record.cap_known, record.cap_mw)
    heard = record.heard
    if heard is not None and heard.capped is not None:
        if gap or not known:
            heard = replace(heard, capped=None)
        elif bound and not heard.capped:
            heard = replace(heard, capped=True)
    if heard is not None and sample.slowed and not heard.slowed:
        heard = replace(heard, slowed=True)
    if changed and (record.drift.count or record.drift.strikes or record.slump.count or record.jumps):
        record = replace(record, drift=Drift(), slump=Drift(), jumps=0, jumped=0.0, jumped_s=0.0)
    return replace(
        record,
        last_ns=sample.now_ns,
        gpus=sample.gpus,
        prior_mw=sample.prior_mw,
        cap_known=known,
        cap_mw=cap_mw,
        bound=bound,
        capped_since_ns=None if not bound else record.capped_since_ns or sample.now_ns,
        changed_ns=sample.now_ns if changed else record.changed_ns,
        heard=heard,
        rate_now=None if changed else record.rate_now,
        surges=0 if changed else record.surges,
    )


# ------------------------------------------------------------------------------------------------- draw


def _drawn(
    record: Record, sample: Sample, seconds: float, share_capped: float, times: TimesSection
) -> Record:
    """Energy and the draw of the level, by the mean draw; and the baseline draw, of instants, as the paper's is."""
    tally, draw_mw = record.tally, sample.draw_mw
    mean_mw = draw_mw if sample.mean_mw is None else sample.mean_mw
    known_s, capped_s = tally.known_s + seconds, tally.capped_s + seconds * share_capped
    if mean_mw is None:
        return replace(
            record, since_ns=None, tally=replace(tally, known_s=known_s, capped_s=capped_s), surges=0
        )
    level = record.level(record.cap_mw) if record.cap_known else None
    low = is_low(level, mean_mw) or sample.slowed
    gpu_s = seconds * sample.gpus
    cut_s = 0.0 if low else gpu_s * share_capped
    tally = replace(
        tally,
        known_s=known_s,
        capped_s=capped_s,
        drawn_mws=tally.drawn_mws + gpu_s * mean_mw,
        cut_gpu_s=tally.cut_gpu_s + cut_s,
        cut_mws=tally.cut_mws + cut_s * mean_mw,
    )
    levels, heard, surges = record.levels, record.heard, 0
    if record.cap_known and seconds > 0 and not low and sample.now_ns >= record.changed_ns + SETTLE_NS:
        if is_high(level, mean_mw):
            surges = record.surges + 1
        elif heard is None:
            level = level or Level(cap_mw=record.cap_mw, segment=record.segment, last_ns=sample.now_ns)
            levels = kept(levels, drew(level, mean_mw * seconds, seconds, sample.now_ns))
        else:
            draw_s, draw_mws = heard.draw_s + seconds, heard.draw_mws + mean_mw * seconds
            heard = replace(heard, draw_s=draw_s, draw_mws=draw_mws)
    if low and not sample.slowed and heard is not None and not heard.low:
        heard = replace(heard, low=True)
    record = replace(record, tally=tally, levels=levels, surges=surges, heard=heard)
    if level is not None and surges >= SURGES:
        record = _trains_now(record, level, mean_mw, sample)
    if sample.slowed:
        return record if record.since_ns is None else replace(record, since_ns=None)
    if draw_mw is None:
        return record
    if sample.uncapped:
        return _free(record, draw_mw, sample.now_ns, times.baseline_s)
    baseline_mw = record.draw_mw
    if baseline_mw is not None and draw_mw > baseline_mw * BEYOND_BASELINE:
        # It had not begun to train when it was seen; a floor made from that would hold it down all window long.
        record = new_segment(record, priced=False)
        return replace(record, recalled=None, seen=False, since_ns=None, draws=b"", top_mw=None)
    return record if record.since_ns is None else replace(record, since_ns=None)


def _paced(record: Record, sample: Sample) -> Record:
    """What its GPUs did, if that was all at one cap and not in a stall; with a counter it waits for that to say so."""
    pace, heard = sample.pace, record.heard
    # Nodes read at different times. One whose reading is new beside old ones of others has most of it in already.
    if pace is None or pace.to_ns <= record.paced_ns or pace.from_ns < record.paced_ns - OVERLAP_NS:
        return record
    record = replace(record, paced_ns=pace.to_ns)
    if not record.cap_known or pace.from_ns < max(record.changed_ns + SETTLE_NS, record.stalled_ns):
        return record
    seconds = (pace.to_ns - pace.from_ns) / NS_PER_S
    tensor_s = 0.0 if pace.tensor_mhz is None else seconds
    clock_s = 0.0 if pace.clock_mhz is None else seconds
    active = Active(
        tensor_s=tensor_s,
        tensor_mhz_s=tensor_s * (pace.tensor_mhz or 0.0),
        clock_s=clock_s,
        clock_mhz_s=clock_s * (pace.clock_mhz or 0.0),
    )
    if heard is not None:
        return replace(record, heard=replace(heard, active=heard.active.and_then(active)))
    level = record.level(record.cap_mw) or Level(
        cap_mw=record.cap_mw, segment=record.segment, last_ns=sample.now_ns
    )
    return replace(record, levels=kept(record.levels, acted(level, active)))


def _trains_now(record: Record, level: Level, mean_mw: int, sample: Sample) -> Record:
    """A level whose draw was far below what it is now saw no training: begin it anew."""
    if record.cap_mw is None:
        if record.seen:
            record = new_segment(record, priced=False)
        record = replace(record, seen=False, since_ns=None, draws=b"", top_mw=None)
        level = Level(cap_mw=None, segment=record.segment, last_ns=sample.now_ns)
    level = replace(level, draw_s=1.0, draw_mws=float(mean_mw))
    return replace(record, levels=kept(record.levels, level), surges=0)


def _free(record: Record, draw_mw: int, now_ns: int, baseline_s: float) -> Record:
    """One sample without a cap."""
    draw_mw = min(draw_mw, MOST_DRAW_MW)
    draws = (record.draws + DRAW.pack(draw_mw))[-KEPT_DRAWS * DRAW.size :]
    since_ns = now_ns if record.since_ns is None else record.since_ns
    seen = record.seen or now_ns - since_ns >= baseline_s * NS_PER_S
    full = len(draws) == len(record.draws)
    least_mw = record.least_top_mw
    if full and max(draw_mw, DRAW.unpack_from(record.draws)[0]) < least_mw:
        return replace(record, since_ns=since_ns, draws=draws, seen=seen)  # its highest tenth is what it was
    highest = sorted(array("i", draws), reverse=True)
    top = highest[: math.ceil(len(highest) * TOP_SHARE)]
    return replace(
        record,
        since_ns=since_ns,
        draws=draws,
        seen=seen,
        top_mw=round(sum(top) / len(top)),
        least_top_mw=top[-1],
    )


# --------------------------------------------------------------------------------------------- evidence


def evidence(record: Record, gpu_model: str, kin: str, now_ns: int) -> RunEvidence:
    """What a record tells: nothing by a counter that is doubted or was never heard.

    ``kin``: what runs of the same work share, empty where unknown.
    """
    points: list[Measurement] = []
    if record.reporting and not record.doubt:
        for segment in sorted({level.segment for level in record.levels}):
            points.extend(_points(record, segment, now_ns))
    return RunEvidence(
        gpu_model=gpu_model,
        kin=kin,
        measurements=tuple(points),
        baseline=record.rate_source,
        baseline_sd=record.baseline_sd,
    )


def _points(record: Record, segment: int, now_ns: int) -> list[Measurement]:
    """Measurements of one segment: against its own baseline, or of its caps against each other."""
    levels = [
        level for level in record.levels if level.segment == segment and level.count >= FEWEST_INTERVALS
    ]
    free = next((level for level in levels if level.cap_mw is None), None)
    capped = sorted(
        (level for level in levels if level.cap_mw is not None and level.draw_mw is not None),
        key=lambda level: level.last_ns,
    )
    present = segment == record.segment
    rate, baseline_sd, base_mw, base_sd = record.rate_per_s, None, record.mean_draw_mw, 0.0
    if not present:
        rate = None if free is None else free.rate_per_s
        base_mw = base_mw if free is None else free.draw_mw
        baseline_sd = _former_sd(free)
    if base_mw is None:
        base_mw, base_sd = _between(record, capped)
    if rate is None and len(capped) >= 2:
        # No level is known, but how the caps compare is: the shallowest stands for a baseline that may be anything.
        rate, baseline_sd = max(capped, key=lambda level: level.cap_mw or 0).rate_per_s, ANY_BASELINE_SD
    if not rate or base_mw is None:
        return []
    watched = (record.last_ns or 0) - record.paced_ns < UNWATCHED_NS
    points = []
    for level in capped:
        share, draw_mw = (level.rate_per_s or 0.0) / rate, level.draw_mw or 0
        reduction = 1 - draw_mw / base_mw
        rate_sd = level.rate_sd or 1.0
        if watched and unjudged(level, free):
            continue
        shown = judged(level, free, disputed=bool(record.disputed))
        if shown is not None:
            share = shown.share
        if record.disputed:
            if shown is None:
                continue
            rate_sd = shown.sd
        if not LEAST_REDUCTION <= reduction <= 1 or 1 - share < LEAST_LOSS:
            continue
        if present and not record.disputed and record.implausible(level):
            continue
        points.append(
            Measurement(
                reduction=reduction,
                loss=1 - share,
                sd=max(LEAST_NOISE_SD, math.hypot(share * rate_sd, base_sd)),
                age_s=max(0.0, (now_ns - level.last_ns) / NS_PER_S),
                segment=segment,
                baseline_sd=baseline_sd,
            )
        )
    return points


def _former_sd(free: Level | None) -> float:
    """What a baseline of a former segment is worth for the run as it is now."""
    own_sd = 0.0 if free is None else free.rate_sd or 0.0
    return math.hypot(max(LEAST_BASELINE_SD["seen"], own_sd), NEW_SEGMENT_SD)


def _between(record: Record, capped: list[Level]) -> tuple[int | None, float]:
    """The baseline draw of a run never seen uncapped: between its highest draw and its prior limit, if these are near.

    Also what that leaves open, as the standard deviation of a reduction.
    """
    highest_mw = max((level.draw_mw or 0 for level in capped), default=0)
    if record.prior_mw is None or highest_mw < NEAR_PRIOR * record.prior_mw:
        return None, 0.0
    half_mw = max(0, record.prior_mw - highest_mw) / 2
    return round(record.prior_mw - half_mw), half_mw / record.prior_mw


def believed(found: RunEvidence, expected: Expected) -> RunEvidence:
    """The same as far as it can be: what lies beyond belief is taken as the most that can be believed.

    ``expected``: of a run that nobody has measured, by the library alone. By what was learned meanwhile, many liars
    would vouch for each other.
    """
    points, unlikely = [], False
    for point in found.measurements:
        own_sd = found.tau if point.baseline_sd is None else point.baseline_sd
        taken = plausible(*expected(point.reduction), point.loss, point.sd, own_sd)
        unlikely = unlikely or taken.loss < point.loss
        points.append(dataclasses.replace(point, loss=taken.loss) if taken.why else point)
    return dataclasses.replace(found, measurements=tuple(points), unlikely=unlikely)
