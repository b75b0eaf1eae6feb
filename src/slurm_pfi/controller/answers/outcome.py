"""What a window came to, as values: limit kept or not, what was delivered, who gave what. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final

import msgspec

from ...model import Frozen
from ...store.history import RunMeans
from ...store.rows import EventRow, RunFacts, RunSample, SiteSample, WindowRow
from ...units import Z95

MOST_GAP_S: Final = 5.0
"""A sample stands for what follows it, so long at most; the rest of a longer gap is unknown."""

S_PER_H: Final = 3600.0
MW_PER_KW: Final = 1e6


class Compliance(Frozen, frozen=True, kw_only=True):
    """Draw against the limit, as far as samples tell.

    A limit counts from ``response_s`` after it came into force; until then the one before it does. ``counted_s``: time
    with a limit that counts and a known draw; ``unknown_s``: with one and no sample or no known draw. ``worst_mw``: the
    most that the draw was above the limit, below zero the least room; None where nothing was counted.
    ``interval_s``: the usual time between two samples.
    """

    from_unix_s: float | None
    counted_s: float
    unknown_s: float
    above_s: float
    above_kwh: float
    worst_mw: int | None
    mean_draw_mw: int | None
    interval_s: float | None


class Given(Frozen, frozen=True, kw_only=True):
    """One run in the window. Powers ``cap`` and ``draw`` are per GPU; ``gave_mw`` is of all its GPUs, and the mean over
    the whole time counted, also where the run was there for a part of it (``present_s``). None: not known.

    ``reduction`` and ``loss`` are shares of its baseline. ``gave_sd_mw`` comes from the baseline's own.
    """

    facts: RunFacts
    present_s: float
    draw_mw: int | None
    lowest_cap_mw: int | None
    gave_mw: int | None
    gave_sd_mw: int | None
    reduction: float | None
    loss: float | None
    lost_gpu_h: float | None
    floor_passed: bool
    waited: bool


class Delivered(Frozen, frozen=True, kw_only=True):
    """The reduction, mean over the time counted.

    ``bottom_up_mw``: baseline less draw, summed over the ``known_runs``, with a 95 % interval from the baselines'
    errors, taken as independent; the ``unknown_runs`` have no baseline and are not in it. ``top_down_mw``: the site's
    draw just before less its mean draw.
    """

    bottom_up_mw: int | None
    low_mw: int | None
    high_mw: int | None
    known_runs: int
    unknown_runs: int
    top_down_mw: int | None
    hours: float


class WindowReport(Frozen, frozen=True, kw_only=True):
    """All that a page shows. ``runs``: who gave most first; ``series``: those of them in steps of ``fine_step_s`` that
    ``fine`` names, the others in steps of ``coarse_step_s``.

    ``runs_left_out``: runs that gave least where there are too many for one reply, ``runs_hidden``: those that the
    reader may not see; every sum has them in it.
    ``limits``: (Unix seconds, mW or None) at each change. ``until_unix_s``: its end, or now while it is open.
    """

    window: WindowRow
    until_unix_s: float
    compliance: Compliance
    delivered: Delivered
    loss: float | None
    lost_gpu_h: float | None
    runs: tuple[Given, ...]
    runs_left_out: int
    runs_hidden: int = 0
    site: tuple[SiteSample, ...]
    site_thinned: bool
    limits: tuple[tuple[float, int | None], ...]
    fine: tuple[str, ...]
    fine_step_s: float
    coarse_step_s: float
    series: dict[str, tuple[RunSample, ...]]
    events: tuple[EventRow, ...]


# ------------------------------------------------------------------------------------------------- the limit


def compliance(samples: Sequence[SiteSample], window: WindowRow, until_s: float) -> Compliance:
    """Hold each sample of the window against the highest limit of the ``response_s`` before it."""
    inside = [sample for sample in samples if window.opened_unix_s <= sample.unix_s < until_s]
    times = [sample.unix_s for sample in samples]
    steps = [later - sooner for sooner, later in pairwise(s.unix_s for s in inside) if later > sooner]
    from_s: float | None = None
    counted_s = unknown_s = above_s = above_kwh = drawn = 0.0
    worst_mw: int | None = None
    for place, sample in enumerate(inside):
        if sample.phase == "rebound":
            continue
        bound_mw = _bound_mw(samples, times, sample, window.response_s)
        if bound_mw is None:
            continue
        from_s = sample.unix_s if from_s is None else from_s
        next_s = inside[place + 1].unix_s if place + 1 < len(inside) else until_s
        gap_s = max(0.0, next_s - sample.unix_s)
        held_s = min(gap_s, MOST_GAP_S)
        unknown_s += gap_s - held_s
        if sample.draw_mw is None:
            unknown_s += held_s
            continue
        counted_s += held_s
        drawn += sample.draw_mw * held_s
        over_mw = sample.draw_mw - bound_mw
        worst_mw = over_mw if worst_mw is None else max(worst_mw, over_mw)
        if over_mw > 0:
            above_s += held_s
            above_kwh += over_mw * held_s / MW_PER_KW / S_PER_H
    return Compliance(
        from_unix_s=from_s,
        counted_s=counted_s,
        unknown_s=unknown_s,
        above_s=above_s,
        above_kwh=above_kwh,
        worst_mw=worst_mw,
        mean_draw_mw=round(drawn / counted_s) if counted_s > 0 else None,
        interval_s=median(steps) if steps else None,
    )


def _bound_mw(
    samples: Sequence[SiteSample], times: Sequence[float], at: SiteSample, response_s: float
) -> int | None:
    """The limit that counts at this sample: the highest of the response time before it, None if there was none."""
    if at.limit_mw is None:
        return None
    # The sample in force at the beginning of that time counts too; without one nobody knows when the limit came.
    first = bisect_right(times, at.unix_s - response_s) - 1
    if first < 0:
        return None
    last = bisect_left(times, at.unix_s)
    limits = [sample.limit_mw for sample in samples[first : last + 1]]
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


def limit_steps(samples: Iterable[SiteSample]) -> tuple[tuple[float, int | None], ...]:
    """When the limit changed, and to what."""
    found: list[tuple[float, int | None]] = []
    for sample in samples:
        if not found or found[-1][1] != sample.limit_mw:
            found.append((sample.unix_s, sample.limit_mw))
    return tuple(found)


def thin(samples: Sequence[SiteSample], most: int) -> tuple[SiteSample, ...]:
    """At most ``most`` of them, the highest and lowest draws, the gaps and the changes of phase among them."""
    if len(samples) <= most:
        return tuple(samples)
    size = -(
        -len(samples) // max(1, most // 4)
    )  # four of each piece: the first, lowest, highest and an unknown one
    kept: list[SiteSample] = []
    for start in range(0, len(samples), size):
        some = samples[start : start + size]
        known = {place: sample.draw_mw for place, sample in enumerate(some) if sample.draw_mw is not None}
        places = {0}
        if known:
            places |= {min(known, key=known.__getitem__), max(known, key=known.__getitem__)}
        if len(known) < len(some):
            places.add(next(place for place in range(len(some)) if place not in known))
        kept += (some[place] for place in sorted(places))
    return tuple(kept)


# ------------------------------------------------------------------------------------------------- the runs


def given(facts: RunFacts, means: RunMeans | None, window_s: float, events: Sequence[EventRow]) -> Given:
    """What one run gave. ``events`` are its own."""
    present_s = 0.0 if means is None else min(window_s, means.present_s)
    draw_mw = None if means is None else means.draw_mw
    base_mw, sd = facts.baseline_draw_mw, facts.baseline_sd
    gave_mw = gave_sd_mw = reduction = None
    if draw_mw is not None and base_mw and window_s > 0:
        part = facts.gpus * present_s / window_s
        gave_mw = round((base_mw - draw_mw) * part)
        gave_sd_mw = None if sd is None else round(base_mw * sd * part)
        reduction = 1 - draw_mw / base_mw
    loss = facts.loss
    if loss is None and means is not None and means.share is not None:
        loss = 1 - means.share
    kinds = {event.kind for event in events}
    return Given(
        facts=facts,
        present_s=present_s,
        draw_mw=None if draw_mw is None else round(draw_mw),
        lowest_cap_mw=None if means is None else means.lowest_cap_mw,
        gave_mw=gave_mw,
        gave_sd_mw=gave_sd_mw,
        reduction=reduction,
        loss=loss,
        lost_gpu_h=None if loss is None else loss * facts.gpus * present_s / S_PER_H,
        floor_passed="floor_passed" in kinds,
        waited="floor_breach" in kinds,
    )


def delivered(window: WindowRow, found: Compliance, runs: Sequence[Given], window_s: float) -> Delivered:
    """Both ways of counting the reduction; neither where nothing is known."""
    known = [run for run in runs if run.gave_mw is not None]
    unknown = sum(1 for run in runs if run.gave_mw is None and run.present_s > 0)
    total_mw = sum(run.gave_mw or 0 for run in known) if known else None
    sds = [run.gave_sd_mw for run in known]
    spread_mw = None
    if known and all(sd is not None for sd in sds):
        spread_mw = round(Z95 * math.sqrt(sum((sd or 0) ** 2 for sd in sds)))
    before_mw, mean_mw = window.draw_before_mw, found.mean_draw_mw
    return Delivered(
        bottom_up_mw=total_mw,
        low_mw=None if total_mw is None or spread_mw is None else total_mw - spread_mw,
        high_mw=None if total_mw is None or spread_mw is None else total_mw + spread_mw,
        known_runs=len(known),
        unknown_runs=unknown,
        top_down_mw=None if before_mw is None or mean_mw is None else before_mw - mean_mw,
        hours=window_s / S_PER_H,
    )


def lost(runs: Sequence[Given]) -> tuple[float | None, float | None]:
    """Share of the work of the runs whose loss is known, and their lost GPU-hours."""
    known = [run for run in runs if run.lost_gpu_h is not None]
    gpu_h = sum(run.facts.gpus * run.present_s / S_PER_H for run in known)
    if gpu_h <= 0:
        return None, None
    lost_gpu_h = sum(run.lost_gpu_h or 0.0 for run in known)
    return lost_gpu_h / gpu_h, lost_gpu_h


# ------------------------------------------------------------------------------------------------- on the wire


def decode(data: Any) -> WindowReport:
    """The reply's data as it was made. Raises msgspec.ValidationError where the controller is of another version."""
    return msgspec.convert(data, WindowReport)


def decode_windows(data: Any) -> list[WindowRow]:
    """The reply to ``windows``, the newest first. Raises msgspec.ValidationError."""
    return msgspec.convert(data, list[WindowRow])
