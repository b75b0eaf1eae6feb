"""The population of section 6 of arXiv 2609.11542, as far as it can be had: sets of the 25 model jobs.

Model data, not measurements: the paper publishes one index per job, neither curves nor power nor throughput. What
else it does not publish is an `Assumptions` here, to be varied.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from functools import cache
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..elasticity.curve import ElasticityCurve, FloatArray, IntArray
from ..elasticity.sweep import curve_from_measurements
from .jobs import ModelJob, model_jobs

Mix: TypeAlias = Literal["production", "random"]
Objective: TypeAlias = Literal["tokens", "progress"]
MIXES: Final[tuple[Mix, ...]] = ("production", "random")
OBJECTIVES: Final[tuple[Objective, ...]] = ("tokens", "progress")

PUBLISHED_SHARE: Final = 0.63
PUBLISHED: Final[dict[str, object]] = {
    "source": "arXiv 2609.11542, section 6",
    "policy": "pfi",
    "mix": "production",
    "objective": "tokens",
    "reduction": 0.30,
    "gap_closed": PUBLISHED_SHARE,
    "tokens_per_s_per_job": 1500.0,
}

SIX_CAPS_W: Final = (200, 300, 400, 500, 600, 700)
FOUR_CAPS_W: Final = (200, 500, 600, 700)
LOWEST_CAP_W: Final = 200
"""The least an H200 can be set to."""
NODE_GPUS: Final = 8

IN_SAMPLE_R2: Final = 0.675
IN_SAMPLE_RMSE: Final = 0.20
"""Of the published fit on the DRAM copy product: its R2 in-sample, and the RMSE that goes with it (0.241 at the
leave-one-out R2 of 0.524)."""

SEREN_JOBS_FT: Final = 0.94
"""Fine-tuning among fine-tuning and pretraining jobs, counted, in cluster Seren of the Acme trace: 14.9 % of all jobs
against 0.9 % (figures of job types that come with the trace, github.com/InternLM/AcmeTrace)."""
SEREN_TIME_FT: Final = 0.10
"""The same by GPU time: 6 to 9 % against 69.5 %."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the paper leaves open, one choice each.

    ``ft_share``: fine-tuning jobs in the production mix. ``clamp``: no cap below 200 W; else a job can be cut to
    nothing, its curve continued pessimistically. ``gpus``: as in the paper's Table 6, or 8 for every job at the same
    rate per GPU. ``pfi``: predicted in-sample, true (as published), or the mean of the job's class. ``caps``: the
    caps between which throughput is interpolated: as measured (four for jobs of several nodes), six for all, or
    every 10 W.
    """

    ft_share: float = SEREN_JOBS_FT
    clamp: bool = True
    gpus: Literal["table", "eight"] = "table"
    pfi: Literal["predicted", "true", "class"] = "predicted"
    caps: Literal["measured", "six", "fine"] = "measured"

    def __post_init__(self) -> None:
        if not 0 <= self.ft_share <= 1:
            raise ValueError(f"a share of fine-tuning jobs lies within 0..1, got {self.ft_share}")

    @property
    def departures(self) -> tuple[str, ...]:
        """What differs from the base, as ``field=value``."""
        changed = (one.name for one in fields(self) if getattr(self, one.name) != getattr(BASE, one.name))
        return tuple(f"{name}={_word(getattr(self, name))}" for name in changed)

    @property
    def name(self) -> str:
        return " ".join(self.departures) or "base"


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value}"


BASE: Final = Assumptions()
FT_SHARES: Final = (SEREN_JOBS_FT, 0.75, 0.50, SEREN_TIME_FT)


def all_assumptions() -> tuple[Assumptions, ...]:
    """Every combination of the choices, the base first."""
    made = itertools.product(
        FT_SHARES,
        (True, False),
        ("table", "eight"),
        ("predicted", "true", "class"),
        ("measured", "six", "fine"),
    )
    return tuple(Assumptions(*choice) for choice in made)  # type: ignore[arg-type]  # product keeps no literals


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The jobs that sets are drawn from, all arrays of shape (kinds,).

    ``watts``: draw of the whole job uncapped. ``tokens_per_s``: of the whole job, assumed. ``pfi``: as published.
    ``end``: greatest reductions. ``moe_ft``, ``ft``: whether a job is MoE fine-tuning, fine-tuning.
    """

    jobs: tuple[ModelJob, ...]
    gpus: FloatArray
    watts: FloatArray
    tokens_per_s: FloatArray
    pfi: FloatArray
    end: FloatArray
    curves: tuple[ElasticityCurve, ...]
    ft: NDArray[np.bool_]
    moe_ft: NDArray[np.bool_]

    def value(self, objective: Objective) -> FloatArray:
        """Worth of each job's whole throughput: tokens/s, or one for each GPU."""
        return self.tokens_per_s if objective == "tokens" else self.gpus


def caps_of(job: ModelJob) -> tuple[int, ...]:
    """The caps at which the paper measured a job: jobs of several nodes at four, the others at six."""
    return FOUR_CAPS_W if job.gpus > NODE_GPUS else SIX_CAPS_W


@cache
def pool(assumptions: Assumptions) -> Pool:
    """The 25 model jobs under some assumptions."""
    jobs = tuple(model_jobs().values())
    gpus = np.array(
        [job.gpus if assumptions.gpus == "table" else NODE_GPUS for job in jobs], dtype=np.float64
    )
    draw_w = np.array([job.workload.draw_w(SIX_CAPS_W[-1]) for job in jobs])
    classes = [job.job_class for job in jobs]
    return Pool(
        jobs=jobs,
        gpus=gpus,
        watts=gpus * draw_w,
        tokens_per_s=np.array([job.tokens_per_s_on(int(n)) for job, n in zip(jobs, gpus, strict=True)]),
        pfi=np.array([job.pfi for job in jobs]),
        end=1.0 - LOWEST_CAP_W / draw_w if assumptions.clamp else np.ones(len(jobs)),
        curves=_curves(assumptions.caps),
        ft=np.array([name.endswith("F") for name in classes]),
        moe_ft=np.array([name == "MF" for name in classes]),
    )


@cache
def _curves(caps: str) -> tuple[ElasticityCurve, ...]:
    grids = {"six": SIX_CAPS_W, "fine": tuple(range(LOWEST_CAP_W, SIX_CAPS_W[-1] + 1, 10))}
    return tuple(_curve(job, grids.get(caps, caps_of(job))) for job in model_jobs().values())


def _curve(job: ModelJob, caps_w: tuple[int, ...]) -> ElasticityCurve:
    draw = [job.workload.draw_w(cap) for cap in caps_w]
    throughput = [job.workload.relative_throughput(cap) for cap in caps_w]
    return curve_from_measurements(caps_w, draw, throughput)[0]


def draw_kinds(
    jobs: Pool, mix: Mix, ft_share: float, *, sets: int, size: int, rng: np.random.Generator
) -> IntArray:
    """Kinds of the jobs of each set, shape (sets, size).

    ``random``: every kind alike. ``production``: fine-tuning with probability ``ft_share``, then every kind alike.
    """
    if mix == "random":
        return rng.integers(len(jobs.jobs), size=(sets, size))
    tuned, trained = np.flatnonzero(jobs.ft), np.flatnonzero(~jobs.ft)
    is_ft = rng.random((sets, size)) < ft_share
    pick_ft, pick_pt = (rng.integers(kinds.size, size=(sets, size)) for kinds in (tuned, trained))
    return np.where(is_ft, tuned[pick_ft], trained[pick_pt])


def known_pfi(jobs: Pool, assumptions: Assumptions, *, sets: int, rng: np.random.Generator) -> FloatArray:
    """The index that a policy is told for each kind, shape (sets, kinds).

    ``predicted`` is what least squares on one feature gives on the jobs that it was fitted on: drawn towards their
    mean by R2, with an error that makes up the published RMSE, new in each set. Among dense jobs the feature says
    nothing (published: Spearman -0.18), so they all have their mean before that error.
    """
    true = jobs.pfi
    classes = np.array([job.job_class for job in jobs.jobs])
    if assumptions.pfi == "true":
        return np.broadcast_to(true, (sets, true.size))
    if assumptions.pfi == "class":
        of_class = {name: true[classes == name].mean() for name in set(classes)}
        return np.broadcast_to(np.array([of_class[name] for name in classes]), (sets, true.size))
    dense = np.array([name.startswith("D") for name in classes])
    signal = np.where(dense, true[dense].mean(), true)
    centre = true.mean() + IN_SAMPLE_R2 * (signal - true.mean())
    error_sd = np.sqrt(max(IN_SAMPLE_RMSE**2 - float(((centre - true) ** 2).mean()), 0.0))
    told: FloatArray = centre + error_sd * rng.standard_normal((sets, true.size))
    return told
