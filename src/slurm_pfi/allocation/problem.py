"""What is to be shared, and the answer, as plain values.

All powers are integer milliwatts **per GPU** unless the name says ``total``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..elasticity.curve import ElasticityCurve
from ..model import Run

Policy: TypeAlias = Literal["equal", "pfi", "marginal", "oracle"]
"""``oracle`` is ``marginal`` on curves that are the truth: for studies, no site can choose it."""


@dataclass(frozen=True, slots=True)
class RunDemand:
    """One admitted run as the allocation sees it.

    ``ceiling_mw``: the cap it gets when nothing has to be given up (its prior limit, or its own draw plus margin).
    ``draw_mw``: its baseline draw; a reduction x means a cap of ``(1 - x) * draw_mw``.
    ``floor_mw``: the lowest cap under an economic limit; ``device_min_mw``: the lowest cap there is.
    ``curve``: the expected loss as a function of the reduction. ``weight``: value of a GPU-hour of its work.
    ``pfi``: its Power Flexibility Index, None when unknown; all of one grid and GPU model, only ``pfi`` looks at it.
    ``common_curve``: where ``curve`` is made of several GPU models' (allocation/mixed), the one that all of them have,
    if they do: runs are told apart by what is known of them, not by where a clamp bends their curve.
    ``flex_none``: passed by an emergency only after every other run stands at its device minimum.
    Always ``device_min_mw <= floor_mw <= ceiling_mw``.
    """

    run: Run
    gpus: int
    ceiling_mw: int
    draw_mw: int
    floor_mw: int
    device_min_mw: int
    curve: ElasticityCurve
    weight: float = 1.0
    flex_none: bool = False
    pfi: float | None = None
    common_curve: ElasticityCurve | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Runs and the power left for all their caps together.

    ``budget_total_mw`` holds for every limit in force and respects floors. ``hard_budget_total_mw`` is the budget of
    the emergency limits alone (None when there is none): floors are passed as far as it needs, and no further.
    ``parked_total_mw``: what GPUs without an admitted run hold of both budgets, each at its park cap, whoever is
    there or not; a job that starts is then capped already.
    """

    runs: tuple[RunDemand, ...]
    budget_total_mw: int
    hard_budget_total_mw: int | None = None
    parked_total_mw: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """The cap of each run's GPUs, in the order of the problem, in whole watts.

    ``shortfall_total_mw``: by how much the caps and what is parked exceed the budget (0 = feasible).
    ``floor_passed``: runs whose cap lies below their floor, by order of an emergency limit. ``expected_loss``: of
    each run, on its curve.
    """

    policy: Policy
    caps_mw: tuple[int, ...]
    expected_loss: tuple[float, ...]
    shortfall_total_mw: int
    floor_passed: tuple[Run, ...]

    @property
    def feasible(self) -> bool:
        return self.shortfall_total_mw == 0
