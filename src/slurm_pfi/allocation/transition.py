"""Safe steps from the caps in force to the caps wanted: lower first, raise only into room that is known to be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..model import Run
from ..units import MW_PER_W


@dataclass(frozen=True, slots=True)
class HeldCap:
    """One run on its way to its cap.

    ``worst_total_mw``: the most that the caps of all its GPUs together can be now, over everything reported and
    sent since. ``target_mw`` and ``sent_mw``: the cap per GPU that is wanted and the one that was sent last.
    """

    run: Run
    gpus: int
    worst_total_mw: int
    target_mw: int
    sent_mw: int

    @property
    def counted_total_mw(self) -> int:
        """What the run counts at: a cap that was sent is possible, whether the worst case holds it or not."""
        return max(self.worst_total_mw, self.gpus * self.sent_mw)


def next_caps(held: Sequence[HeldCap], budget_total_mw: int) -> tuple[int, ...]:
    """The caps per GPU to send now, in the order given.

    Lowerings go out in full at once. A cap rises only if the sum over runs of the greater of its worst case and its
    new cap stays within the budget; while that sum is above the budget already, none rises. Every cap lies between
    what was sent and the target. Raises are granted to the run farthest below its target first (as a share of the
    target, then by run): first those that fit whole, then in whole watts as far as the room goes.
    """
    caps = [min(run.sent_mw, run.target_mw) for run in held]
    room_mw = budget_total_mw - sum(run.counted_total_mw for run in held)
    if room_mw < 0:
        return tuple(caps)
    behind = sorted(
        (i for i, run in enumerate(held) if run.target_mw > run.sent_mw), key=lambda i: _order(held[i])
    )
    partial: list[int] = []
    for i in behind:
        extra_mw = max(0, held[i].gpus * held[i].target_mw - held[i].counted_total_mw)
        if extra_mw <= room_mw:
            caps[i] = held[i].target_mw
            room_mw -= extra_mw
        else:
            partial.append(i)
    for i in partial:
        run = held[i]
        reach_mw = (run.counted_total_mw + room_mw) // run.gpus // MW_PER_W * MW_PER_W
        if reach_mw > caps[i]:
            caps[i] = reach_mw
            room_mw -= max(0, run.gpus * reach_mw - run.counted_total_mw)
    return tuple(caps)


def _order(run: HeldCap) -> tuple[float, str, int, int]:
    missing = (run.target_mw - run.sent_mw) / run.target_mw
    return -missing, run.run.cluster, run.run.job_id, run.run.restart
