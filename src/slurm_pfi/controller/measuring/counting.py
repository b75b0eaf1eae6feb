"""What the counter of a run tells: the rate of each level, work done and lost, stalls, lies and new work. Pure.

Rates are differences of the counter itself, so that what is lost adds up to what the job's own count would say.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

from msgspec.structs import replace

from ...config import TimesSection
from .activity import dispute
from .levels import FEWEST_INTERVALS, JUMP, STALL, Level, acted, drew, kept, learned, typical_rate
from .record import Drift, Heard, Record
from .sample import Sample

NS_PER_S: Final = 1_000_000_000

SETTLE_NS: Final = 2 * NS_PER_S
"""The first moments under another cap are work like any other, but no level."""

LEAST_INTERVAL_S: Final = 0.5
STALE_NS: Final = 60 * NS_PER_S
SMOOTH_S: Final = 10.0

JUMPS: Final = 3
"""So many intervals in a row above JUMP are the work itself and not a counter that was set."""

SLUMPS: Final = 8
"""So many intervals in a row below STALL, over two baseline times, are other work and no stall."""

LEAST_BLOCK_S: Final = 10.0
CHANGED_FREE: Final = 0.10
CHANGED_CAPPED: Final = 0.25
CHANGED_SD: Final = 4.0
"""A block of work is other work when its rate is off by so much, and by so many standard deviations."""

SAME_DRAW: Final = 1.1
PART_STALL: Final = 0.9
"""An interval with the draw of a stall in it and a rate below this share of its level's held a part of a stall."""

MIXED_STALL: Final = 0.25
"""Below this share of the baseline rate, work across a change of caps is a stall; twice that with such a draw."""


def counted(record: Record, sample: Sample, times: TimesSection) -> Record:
    """The record with what this sample says of the counter."""
    counter, at_ns, heard = sample.counter, sample.counter_ns, record.heard
    if counter is None or at_ns is None:
        return _quiet(record, sample)
    if sample.total != record.total:
        record = replace(record, total=sample.total)
    if heard is None or (heard.unit, heard.node) != (sample.unit, sample.node) or counter < heard.counter:
        if record.unit not in ("", sample.unit):
            record = _other_unit(record)
        record = replace(record, reporting=True, unit=sample.unit, jumps=0, jumped=0.0, jumped_s=0.0)
        return _heard(record, sample, counter, at_ns)
    seconds = (at_ns - heard.ns) / NS_PER_S
    if counter == heard.counter or seconds < LEAST_INTERVAL_S:
        return _quiet(record, sample)
    record = _interval(record, sample, heard, seconds, counter - heard.counter, times)
    return _heard(record, sample, counter, at_ns)


def new_segment(record: Record, *, priced: bool = True, saved: bool | None = None) -> Record:
    """From here on its work is other work. What went before keeps its price, or has none if its baseline was wrong.

    ``saved``: the same of its energy, if the baseline draw is not as wrong as that of its counter.

    The baseline draw goes on; the rate is unknown until it is seen uncapped again.
    """
    tally, rate, draw_mw = record.tally, record.rate_per_s, record.mean_draw_mw
    changes: dict[str, float] = {"work_s": 0.0, "work_done": 0.0, "cut_gpu_s": 0.0, "cut_mws": 0.0}
    if priced and rate is not None:
        expected = rate * tally.work_s
        changes["past_work_s"] = tally.past_work_s + tally.work_s
        changes["past_lost"] = tally.past_lost + expected - tally.work_done
        changes["past_lost_sd"] = tally.past_lost_sd + expected * record.baseline_sd
        if rate > 0:
            changes["past_lost_s"] = tally.past_lost_s + tally.work_s - tally.work_done / rate
    else:
        changes["unpriced_s"] = tally.unpriced_s + tally.work_s
    if (priced if saved is None else saved) and draw_mw is not None:
        changes["past_cut_gpu_s"] = tally.past_cut_gpu_s + tally.cut_gpu_s
        changes["past_saved_mws"] = tally.past_saved_mws + draw_mw * tally.cut_gpu_s - tally.cut_mws
    else:
        changes["unpriced_gpu_s"] = tally.unpriced_gpu_s + tally.cut_gpu_s
    recalled = record.recalled
    return replace(
        record,
        segment=record.segment + 1,
        tally=replace(tally, **changes),
        recalled=None if recalled is None else replace(recalled, rate_per_s=None),
        drift=Drift(),
        slump=Drift(),
        jumps=0,
        jumped=0.0,
        jumped_s=0.0,
    )


# ---------------------------------------------------------------------------------------------- the counter


def _quiet(record: Record, sample: Sample) -> Record:
    """Nothing new was heard: after a while nobody knows how fast it is now."""
    if record.rate_now is None or record.heard is None or sample.now_ns - record.heard.ns < STALE_NS:
        return record
    return replace(record, rate_now=None)


def _heard(record: Record, sample: Sample, counter: float, at_ns: int) -> Record:
    capped = record.bound if record.cap_known else None
    heard = Heard(counter=counter, ns=at_ns, unit=sample.unit, node=sample.node, capped=capped)
    return replace(record, heard=heard)


def _other_unit(record: Record) -> Record:
    """Its counter counts something else now: what was done cannot be added up with it."""
    record = new_segment(record, priced=False, saved=True)
    tally = replace(
        record.tally,
        done=0.0,
        done_capped=0.0,
        past_work_s=0.0,
        past_lost=0.0,
        past_lost_sd=0.0,
        past_lost_s=0.0,
    )
    tally = replace(tally, unpriced_s=tally.unpriced_s + record.tally.past_work_s)
    return replace(record, tally=tally)


def _interval(
    record: Record, sample: Sample, heard: Heard, seconds: float, done: float, times: TimesSection
) -> Record:
    """From the last counter to this one."""
    rate = done / seconds
    clean = record.cap_known and heard.capped is not None and heard.ns >= record.changed_ns + SETTLE_NS
    if not clean:
        base = record.rate_per_s
        if base is not None and rate > JUMP * base:
            return record
        stalled = base is not None and rate < MIXED_STALL * base * (2 if heard.low else 1)
        # What heat took is no cap's loss.
        return _worked(record, heard, seconds, done, stalled=stalled or heard.slowed)
    level = record.level(record.cap_mw) or Level(
        cap_mw=record.cap_mw, segment=record.segment, last_ns=sample.now_ns
    )
    typical = typical_rate(level)
    if typical is not None and rate > JUMP * typical:
        return _jumped(record, sample, heard, level, seconds, done)
    if record.jumps:
        record = replace(record, jumps=0, jumped=0.0, jumped_s=0.0)  # it was set, not worked for
    if typical is not None and rate < STALL * typical:
        record = replace(record, stalled_ns=sample.now_ns)
        record = _worked(record, heard, seconds, done, stalled=True)
        return _slumped(record, sample, seconds, done, times)
    if typical is not None and heard.low and rate < PART_STALL * typical:
        record = replace(record, stalled_ns=sample.now_ns)
        return _worked(record, heard, seconds, done, stalled=True)
    taught, forgotten = learned(level, seconds, done, sample.now_ns)
    if heard.draw_s > 0:
        taught = drew(taught, heard.draw_mws, heard.draw_s, sample.now_ns)
    taught = acted(taught, heard.active)
    record = _worked(record, heard, seconds, done, stalled=False)
    tally = record.tally
    if forgotten.seconds > 0 and heard.capped:
        tally = replace(
            tally, work_s=tally.work_s - forgotten.seconds, work_done=tally.work_done - forgotten.done
        )
    before = record.rate_now
    record = replace(
        record,
        levels=kept(record.levels, taught),
        tally=tally,
        rate_now=rate if before is None else before + (rate - before) * min(1.0, seconds / SMOOTH_S),
        slump=Drift() if record.slump.count else record.slump,
    )
    record = _drifted(record, sample, level, seconds, done, times)
    if heard.active.clock_s > 0 and not record.disputed:
        record = replace(record, disputed=dispute(record))
    return _judged(record)


def _worked(record: Record, heard: Heard, seconds: float, done: float, *, stalled: bool) -> Record:
    """Count work. What was done while it stalled is all that it would have done."""
    tally = record.tally
    tally = replace(
        tally, heard_s=tally.heard_s + seconds, stalled_s=tally.stalled_s + (seconds if stalled else 0.0)
    )
    if not heard.capped:
        return replace(record, tally=replace(tally, done=tally.done + done))
    cut = not stalled
    return replace(
        record,
        tally=replace(
            tally,
            done=tally.done + done,
            done_capped=tally.done_capped + done,
            work_s=tally.work_s + seconds if cut else tally.work_s,
            work_done=tally.work_done + done if cut else tally.work_done,
        ),
    )


# ------------------------------------------------------------------------------------ lies and other work


def _jumped(
    record: Record, sample: Sample, heard: Heard, level: Level, seconds: float, done: float
) -> Record:
    """Far above its level. Once: its counter was set. Again and again: what the level holds was no training."""
    record = replace(
        record, jumps=record.jumps + 1, jumped=record.jumped + done, jumped_s=record.jumped_s + seconds
    )
    if record.jumps < JUMPS:
        return record
    typical = typical_rate(level) or 0.0
    times_faster = done / seconds / typical if typical > 0 else 0.0
    known = level.count >= SLUMPS
    now_mw = sample.mean_mw or sample.draw_mw
    drawn_more = now_mw is None or level.draw_mw is None or now_mw > SAME_DRAW * level.draw_mw
    if known and times_faster > 0 and not drawn_more:
        text = f"its counter rose {times_faster:.1f} times as fast at the same draw"
        return replace(record, doubt=record.doubt or text)
    jumped_s, jumped = record.jumped_s, record.jumped
    if known:
        record = new_segment(record)
    elif heard.capped:
        tally = record.tally
        work_s, work_done = max(0.0, tally.work_s - level.seconds), tally.work_done - level.done
        record = replace(record, tally=replace(tally, work_s=work_s, work_done=work_done))
    fresh = Level(
        cap_mw=level.cap_mw,
        segment=record.segment,
        last_ns=level.last_ns,
        draw_s=0.0 if known else level.draw_s,
        draw_mws=0.0 if known else level.draw_mws,
    )
    taught, _ = learned(fresh, seconds, done, sample.now_ns)
    record = replace(record, levels=kept(record.levels, taught), jumps=0, jumped=0.0, jumped_s=0.0)
    return _worked(record, heard, jumped_s, jumped, stalled=False)


def _slumped(record: Record, sample: Sample, seconds: float, done: float, times: TimesSection) -> Record:
    """Stall after stall, and nothing between: this is how it works now."""
    slump = record.slump
    slump = replace(slump, seconds=slump.seconds + seconds, done=slump.done + done, count=slump.count + 1)
    record = replace(record, slump=slump)
    if slump.count < SLUMPS or slump.seconds < 2 * _block_s(times):
        return record
    return _changed(record, sample, slump)


def _drifted(
    record: Record, sample: Sample, level: Level, seconds: float, done: float, times: TimesSection
) -> Record:
    """Compare a block of work with the level as it was before; two blocks in a row that are off alike are new work."""
    drift = record.drift
    if drift.before is None and (level.count < FEWEST_INTERVALS or level.seconds < _block_s(times)):
        return record
    before = drift.before or level
    drift = replace(
        drift,
        before=before,
        seconds=drift.seconds + seconds,
        done=drift.done + done,
        count=drift.count + 1,
    )
    if drift.seconds < _block_s(times) or drift.count < FEWEST_INTERVALS:
        return replace(record, drift=drift)
    reference = before.rate_per_s or 0.0
    off = drift.done / drift.seconds / reference - 1 if reference > 0 else 0.0
    noise = (before.rate_sd or 0.0) * sqrt(max(1.0, before.seconds / drift.seconds))
    allowed = max(CHANGED_FREE if record.cap_mw is None else CHANGED_CAPPED, CHANGED_SD * noise)
    if abs(off) <= allowed:
        return replace(record, drift=Drift())
    sign = 1 if off > 0 else -1
    if drift.strikes == sign:
        return _changed(record, sample, drift)
    struck = Drift(before=before, strikes=sign, past_s=drift.seconds, past_done=drift.done)
    return replace(record, drift=struck)


def _changed(record: Record, sample: Sample, work: Drift) -> Record:
    """Begin a new segment with work that was seen already, and take that out of what went before."""
    cap_mw, known, tally = record.cap_mw, record.level(record.cap_mw), record.tally
    seconds, done = work.seconds + work.past_s, work.done + work.past_done
    if work.before is not None:
        record = replace(record, levels=kept(record.levels, work.before))
        if record.bound:
            tally = replace(tally, work_s=max(0.0, tally.work_s - seconds), work_done=tally.work_done - done)
    record = new_segment(replace(record, tally=tally))
    if record.bound:
        record = replace(record, tally=replace(record.tally, work_s=seconds, work_done=done))
    level = Level(cap_mw=cap_mw, segment=record.segment, last_ns=sample.now_ns)
    if known is not None:
        level = replace(
            level, draw_s=1.0, draw_mws=float(sample.mean_mw or sample.draw_mw or known.draw_mw or 0)
        )
    level, _ = learned(level, work.seconds, work.done, sample.now_ns)
    level = replace(level, count=work.count)
    return replace(record, levels=kept(record.levels, level))


def _judged(record: Record) -> Record:
    """Doubt a counter that says under its cap what no run can do."""
    if record.doubt or not record.bound:
        return record
    level = record.level(record.cap_mw)
    wrong = "" if level is None else record.implausible(level)
    if not wrong or level is None or level.seconds < LEAST_BLOCK_S:
        return record
    if record.rate_source == "recalled" and record.recalled is not None:
        # The earlier runs may have been other work under the same name.
        return replace(record, recalled=replace(record.recalled, rate_per_s=None))
    return replace(record, doubt=wrong)


def _block_s(times: TimesSection) -> float:
    return max(LEAST_BLOCK_S, times.baseline_s)
