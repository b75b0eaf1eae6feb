"""Which waiting runs can be given their floor."""

from __future__ import annotations

from collections.abc import Sequence

from .problem import RunDemand
from .rounding import lowest_cap_mw


def admit(
    admitted: Sequence[RunDemand], waiting: Sequence[RunDemand], budget_total_mw: int
) -> tuple[RunDemand, ...]:
    """The waiting runs whose floors fit beside the floors of all admitted ones, in the order of waiting.

    Each waiting run is looked at once, in order; one that does not fit is passed by and holds up none behind it, so
    a later, smaller run may start before it. Its turn comes again with the next call, still ahead of them.
    """
    room_mw = budget_total_mw - sum(demand.gpus * lowest_cap_mw(demand) for demand in admitted)
    chosen: list[RunDemand] = []
    for demand in waiting:
        need_mw = demand.gpus * lowest_cap_mw(demand)
        if need_mw <= room_mw:
            chosen.append(demand)
            room_mw -= need_mw
    return tuple(chosen)
