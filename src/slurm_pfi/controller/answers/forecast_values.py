"""What is asked of a forecast, and its answer, as frozen values. Powers in mW, losses and shares 0..1."""

from __future__ import annotations

from typing import TypeAlias

from ...elasticity.evidence import BaselineSource
from ...model import Frozen

Baseline: TypeAlias = tuple[BaselineSource, int | None]
"""Where a run's uncapped draw is known from, and what it is for one GPU in mW; None where it is bounded."""


class Target(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked: exactly one of a share (0..1) or a power less than the uncapped draw, or a limit; in mW."""

    share: float | None = None
    less_mw: int | None = None
    limit_mw: int | None = None
    emergency: bool = False


class Estimate(Frozen, frozen=True, kw_only=True):
    """An expected value with its 95 % interval."""

    expected: float
    low: float
    high: float


class UncappedDraw(Frozen, frozen=True, kw_only=True):
    """What the site would draw without any cap, by how it is known; sums of all GPUs, mW.

    ``known_mw``: runs with a seen or recalled baseline. ``bounded_mw``: runs never seen uncapped, at their prior
    limits. ``idle_mw``: GPUs without a run, as measured; ``unread_mw``: those whose draw is not known, at their prior
    limits. ``silent_mw``: nodes that do not answer and GPUs that are not reported, at their worst. ``beside_mw``: what
    the site declares beside the GPUs. Bounded, unread, silent and beside are the most that it can be.
    """

    known_mw: int
    bounded_mw: int
    idle_mw: int
    unread_mw: int
    silent_mw: int
    beside_mw: int

    @property
    def total_mw(self) -> int:
        return (
            self.known_mw + self.bounded_mw + self.idle_mw + self.unread_mw + self.silent_mw + self.beside_mw
        )


class RunForecast(Frozen, frozen=True, kw_only=True):
    """One run under the limit. Powers of one GPU; ``draw_mw`` uncapped, the prior limit where ``baseline`` is bounded.

    ``reduction`` and ``loss`` (0..1) are the most they can be where the baseline is bounded. ``measured``: whether
    anything measured of this run, or of its kin, went into its curve. ``spec`` is how Slurm's commands name its job:
    ``77_3`` a task, ``80+1`` a component.
    """

    run: str
    spec: str
    job_id: int
    restart: int
    user: str | None
    flex: str | None
    gpus: int
    baseline: BaselineSource
    measured: bool
    draw_mw: int
    cap_mw: int
    floor_mw: int
    reduction: float
    loss: Estimate
    at_floor: bool
    floor_passed: bool


class Certificate(Frozen, frozen=True, kw_only=True):
    """How far the cut is from cutting everyone alike. ``informed``: whether anything is known that tells runs apart.

    ``step`` (0..1): the share of the way that ``marginal`` certifies, None by another policy or where nothing had to
    be cut. ``gain``: what the cut saves against the equal one, as a share of all throughput.
    """

    informed: bool
    step: float | None
    gain: Estimate | None


class Standing(Frozen, frozen=True, kw_only=True):
    """What somebody who reads a forecast must know of the controller.

    ``window_mw``: the limit that holds now, None without a window. ``enforces``: whether any node is in that mode.
    ``simulated``: the GPUs are. ``silent``: nodes that do not answer or take no plan; ``unreached``: runs on them, and
    others that no plan may cap; they are in no figure of loss. ``unreached_hidden``: more such runs, which the reader
    may not see. ``names``: those of the unreached that are tasks or components, as Slurm's commands name them, by run.
    """

    cluster: str
    policy: str
    window_mw: int | None
    off: bool
    limits_known: bool
    enforces: bool
    simulated: bool
    silent: tuple[str, ...]
    unreached: tuple[str, ...]
    unreached_hidden: int = 0
    names: dict[str, str] = {}


class WhatIf(Frozen, frozen=True, kw_only=True):
    """The answer. Powers of the whole site in mW, losses as shares of the throughput of ``gpus`` GPUs in ``runs``.

    ``asked_less_mw``: the reduction of the uncapped draw that the target means, below zero where it is a limit above
    it. ``binds`` is False where the site cannot reach the limit without caps. ``loss`` is None without a run. A site of
    nothing is not ``feasible``. Where the limit cannot be held, ``shortfall_mw`` is missing with every run as low as it
    may go (which the figures then show), and ``least_limit_mw`` is the lowest that can be held;
    ``emergency_shortfall_mw``: what an emergency limit would miss. ``runs_hidden``, ``waiting_hidden``: runs that are
    in all sums and that the reader may not see. ``names``: those of the waiting that are tasks or components, by run.
    """

    target: Target
    limit_mw: int
    asked_less_mw: int
    uncapped: UncappedDraw
    uncapped_mw: int
    worst_mw: int
    binds: bool
    feasible: bool
    shortfall_mw: int
    least_limit_mw: int
    emergency_shortfall_mw: int | None
    runs: tuple[RunForecast, ...]
    gpus: int
    loss: Estimate | None
    waiting: tuple[str, ...]
    parked_gpus: int
    parked_mw: int
    parked_draw_mw: int
    certificate: Certificate
    standing: Standing
    runs_hidden: int = 0
    waiting_hidden: int = 0
    names: dict[str, str] = {}
