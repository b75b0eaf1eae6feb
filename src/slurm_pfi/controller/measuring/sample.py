"""What one report tells of a run, as frozen values."""

from __future__ import annotations

from ...model import Frozen


class Pace(Frozen, frozen=True, kw_only=True):
    """What all GPUs of a run did between two instants of our clock; None where one of them does not tell it.

    ``tensor_mhz``: tensor activity (share of cycles) x SM clock, mean of the GPUs: it does not matter which of them
    waits for which. ``clock_mhz``: SM clock of the slowest.
    """

    from_ns: int
    to_ns: int
    tensor_mhz: float | None
    clock_mhz: float | None


class Sample(Frozen, frozen=True, kw_only=True):
    """One report of a run. ``draw_mw``: the draw of its GPUs at that instant, ``mean_mw`` since the reading before, by
    their energy counters; both of the mean GPU. ``cap_mw``: the highest enforced limit of them.

    ``lowest_mw``: the lowest of these limits where they differ; a run is as fast as its slowest GPU.
    ``uncapped``: every GPU at its prior limit. ``counter_ns``: when the agent of ``node`` heard the counter, on our
    clock. ``gpus``: how many the run has on all its nodes. ``pace``: what they did of late. ``slowed``: heat or a
    power brake holds one of them down, or the run is suspended, so that nothing is learned of caps. ``total``: what
    the job says that its counter will be when its work is done.
    """

    now_ns: int
    gpus: int
    draw_mw: int | None = None
    mean_mw: int | None = None
    cap_mw: int | None = None
    lowest_mw: int | None = None
    prior_mw: int | None = None
    uncapped: bool = False
    counter: float | None = None
    counter_ns: int | None = None
    unit: str = ""
    node: str = ""
    pace: Pace | None = None
    slowed: bool = False
    total: float | None = None
