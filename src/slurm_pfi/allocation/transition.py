"""Safe steps from the caps in force to the caps wanted: lower first, raise only into room that is known to be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..model import Run
from ..units import MW_PER_W


@dataclass(frozen=True, slots=True)
class HeldCap:
    """GPUs that get one cap, on their way to it: those of one run on one node.

    ``worst_mw``: the most that the cap of each of these GPUs can be now, over everything reported and sent since.
    ``target_mw`` and ``sent_mw``: the cap per GPU that is wanted and the one that was sent last.
    """

    run: Run
    worst_mw: tuple[int, ...]
    target_mw: int
    sent_mw: int

    def counted_total_mw(self, cap_mw: int) -> int:
        """What the GPUs count at together when this cap is sent: each at its worst case or the cap, the greater."""
        return sum(max(worst_mw, cap_mw) for worst_mw in self.worst_mw)


def next_caps(held: Sequence[HeldCap], budget_total_mw: int) -> tuple[int, ...]:
    """The caps per GPU to send now, in the order given.

    Lowerings go out in full at once. A cap rises only if the sum over all GPUs of the greater of their worst case and
    their new cap stays within the budget; while that sum is above the budget already, none rises. Every cap lies
    between what was sent and the target. Raises are granted to the run farthest below its target first (as a share
    of the target, then by run): first those that fit whole, then in whole watts as far as the room goes.
    """
    caps = [min(part.sent_mw, part.target_mw) for part in held]
    room_mw = budget_total_mw - sum(part.counted_total_mw(part.sent_mw) for part in held)
    if room_mw < 0:
        return tuple(caps)
    behind = sorted(
        (i for i, part in enumerate(held) if part.target_mw > part.sent_mw), key=lambda i: _order(held[i])
    )
    partial: list[int] = []
    for i in behind:
        extra_mw = held[i].counted_total_mw(held[i].target_mw) - held[i].counted_total_mw(held[i].sent_mw)
        if extra_mw <= room_mw:
            caps[i] = held[i].target_mw
            room_mw -= extra_mw
        else:
            partial.append(i)
    for i in partial:
        reach_mw = _reach_mw(held[i], room_mw)
        if reach_mw > caps[i]:
            room_mw -= held[i].counted_total_mw(reach_mw) - held[i].counted_total_mw(held[i].sent_mw)
            caps[i] = reach_mw
    return tuple(caps)


def _reach_mw(part: HeldCap, room_mw: int) -> int:
    """The highest cap in whole watts that takes no more than the room."""
    most_mw = part.counted_total_mw(part.sent_mw) + room_mw
    low, high = part.sent_mw // MW_PER_W, part.target_mw // MW_PER_W
    while low < high:
        middle = (low + high + 1) // 2
        if part.counted_total_mw(middle * MW_PER_W) <= most_mw:
            low = middle
        else:
            high = middle - 1
    return low * MW_PER_W


def _order(part: HeldCap) -> tuple[float, str, int, int]:
    missing = (part.target_mw - part.sent_mw) / part.target_mw
    return -missing, part.run.cluster, part.run.job_id, part.run.restart
