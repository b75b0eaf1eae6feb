"""A population of measured jobs to draw sites from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Final, Literal, TypeAlias

import numpy as np

from ..elasticity.curve import CurveError, CurveStack, ElasticityCurve, FloatArray, IntArray
from ..elasticity.curvefile import CurveFile, FileCurve, Skipped, read_curves
from ..elasticity.index import SMALLEST_LOSS, pfi
from ..elasticity.library import MEASURED_FILE
from ..elasticity.names import gpu_key

Objective: TypeAlias = Literal["progress", "tokens"]

FEWEST_CURVES: Final = 5
"""A GPU model with fewer curves is reported and not judged: one odd job would be its verdict."""

OTHER_FILE: Final = "other_curves.csv"
UNIT_COLUMN: Final = "throughput_unit"
_INTERVAL_SAMPLES: Final = 2  # of the PFI: its interval is not used here


class PopulationError(ValueError):
    """Curves of which no population can be made; the message says why and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One measured job as the truth of a study.

    ``pfi``: Eq. 1 on its own cap grid, None where no cap lies below its draw; ``pfi_reductions``: what those caps
    would take from its draw. Nothing is known below its lowest measured cap, so no run is cut deeper; one that is
    ``fixed`` is not cut at all.
    """

    curve_id: str
    gpu_model: str
    family: str
    curve: ElasticityCurve
    draw_w: float
    pfi: float | None
    pfi_reductions: tuple[float, ...]
    value: float = 1.0
    fixed: bool = False

    @property
    def deepest(self) -> float:
        """The greatest reduction that a cap can bring about, as far as anybody measured."""
        return 0.0 if self.fixed else float(self.curve.reduction[-1])


class Population:
    """Members, drawn so that families count alike, and within each its members."""

    def __init__(self, members: Sequence[Member]) -> None:
        if not members:
            raise ValueError("a population needs at least one member")
        self.members = tuple(members)
        self.families = tuple(sorted({one.family for one in members}))
        count = {name: sum(one.family == name for one in members) for name in self.families}
        self._chance = np.array([1 / len(count) / count[one.family] for one in members])
        self.gpu_models = tuple(sorted({one.gpu_model for one in members}))

    def draw(self, rng: np.random.Generator, runs: int) -> IntArray:
        """Places of ``runs`` members, drawn with replacement."""
        return np.asarray(rng.choice(len(self.members), size=runs, p=self._chance), dtype=np.intp)

    def curves(self, drawn: IntArray) -> CurveStack:
        """The true curves of the members drawn."""
        return CurveStack([self.members[i].curve for i in drawn])

    def column(self, name: str, drawn: IntArray) -> FloatArray:
        """A number of each member drawn, shape (runs,)."""
        return np.array([getattr(self.members[i], name) for i in drawn], dtype=np.float64)

    def of_gpu(self, gpu_model: str) -> Population:
        """The members of one GPU model, named as in ``gpu_models``."""
        return Population([one for one in self.members if one.gpu_model == gpu_model])


@dataclass(frozen=True, slots=True)
class NotJudged:
    """A readable curve that is reported and left out of the population, and why."""

    curve_id: str
    gpu: str
    family: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """What a curve file gives: the members, and all that was left out or repaired.

    ``repairs``: counts of points by kind of repair, over the members. ``doubts``: curve and what to know of it.
    """

    members: tuple[Member, ...]
    not_judged: tuple[NotJudged, ...]
    skipped: tuple[Skipped, ...]
    repairs: dict[str, int] = field(default_factory=dict)
    doubts: tuple[tuple[str, str], ...] = ()


def published() -> CurveFile:
    """All published curves that come with the package, those of the library and those no good to learn from."""
    files = [
        read_curves(
            resources.files(package).joinpath("data").joinpath(name).read_text(encoding="utf-8"), origin=name
        )
        for package, name in (("slurm_pfi.elasticity", MEASURED_FILE), ("slurm_pfi.sim", OTHER_FILE))
    ]
    return CurveFile(
        origin="published curves, shipped with slurm-pfi",
        curves=tuple(one for file in files for one in file.curves),
        skipped=tuple(one for file in files for one in file.skipped),
        sha256=hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest(),
    )


def gather(file: CurveFile, objective: Objective = "progress", *, bound_only: bool = False) -> Gathered:
    """The members of a curve file whose draw was measured, of GPU models with FEWEST_CURVES such curves or more.

    A GPU model has the name of its first curve. With ``tokens`` a run is worth its uncapped throughput: the file
    must have been read with UNIT_COLUMN kept, and all members share one unit. Raises PopulationError if they do not.
    With ``bound_only`` a job whose draw lies below all its caps is fixed: what its curve shows is noise.
    """
    skipped = list(file.skipped)
    not_judged: list[NotJudged] = []
    read: list[tuple[FileCurve, ElasticityCurve, dict[str, int]]] = []
    for entry in file.curves:
        try:
            curve, repairs = entry.curve()
        except CurveError as error:
            skipped.append(Skipped(entry.curve_id, entry.line, str(error)))
            continue
        if entry.draw_measured:
            read.append((entry, curve, asdict(repairs)))
        else:
            not_judged.append(_not_judged(entry, "; ".join(entry.doubts)))
    of_gpu: dict[str, list[FileCurve]] = {}
    for entry, _, _ in read:
        of_gpu.setdefault(gpu_key(entry.gpu), []).append(entry)
    members: list[Member] = []
    kept: list[FileCurve] = []
    counts: dict[str, int] = {}
    for entry, curve, repaired in read:
        same = of_gpu[gpu_key(entry.gpu)]
        if len(same) < FEWEST_CURVES:
            reason = f"{len(same)} of {FEWEST_CURVES} curves of this GPU model that are needed to judge it"
            not_judged.append(_not_judged(entry, reason))
            continue
        value = float(entry.sweep.throughput[0]) if objective == "tokens" else 1.0
        members.append(_member(entry, curve, same[0].gpu, value, bound_only=bound_only))
        kept.append(entry)
        for kind, number in repaired.items():
            counts[kind] = counts.get(kind, 0) + number
    if objective == "tokens":
        _check_units(kept)
    return Gathered(
        members=tuple(members),
        not_judged=tuple(not_judged),
        skipped=tuple(sorted(skipped, key=lambda one: one.line)),
        repairs=counts,
        doubts=tuple((entry.curve_id, doubt) for entry in kept for doubt in entry.doubts),
    )


def _not_judged(entry: FileCurve, reason: str) -> NotJudged:
    return NotJudged(entry.curve_id, entry.gpu, entry.family, reason)


def _member(
    entry: FileCurve, curve: ElasticityCurve, gpu_model: str, value: float, *, bound_only: bool
) -> Member:
    cap_w = entry.sweep.cap_w
    binding = tuple(sorted((1.0 - cap_w[cap_w < entry.draw_w] / entry.draw_w).tolist()))
    return Member(
        curve_id=entry.curve_id,
        gpu_model=gpu_model,
        family=entry.family,
        curve=curve,
        draw_w=entry.draw_w,
        pfi=_index(entry, binding),
        pfi_reductions=binding,
        value=value,
        fixed=bound_only and not binding,
    )


def _index(entry: FileCurve, binding: tuple[float, ...]) -> float | None:
    """Eq. 1 on the file's caps. A job whose caps bind and cost nothing is as flexible as noise lets one tell."""
    if not binding:
        return None
    try:
        return pfi(*entry.points(), samples=_INTERVAL_SAMPLES).value
    except CurveError:
        return binding[-1] / SMALLEST_LOSS


def _check_units(kept: Sequence[FileCurve]) -> None:
    units = sorted({entry.kept.get(UNIT_COLUMN, "") for entry in kept})
    if "" in units:
        missing = next(entry for entry in kept if not entry.kept.get(UNIT_COLUMN, ""))
        raise PopulationError(
            f"tokens need one unit of throughput for all curves, and curve {missing.curve_id} has none: say it in a"
            f" column {UNIT_COLUMN}, or use --objective progress"
        )
    if len(units) > 1:
        raise PopulationError(
            f"tokens need one unit of throughput for all curves, and these are in {', '.join(units)}: give curves of"
            " one unit, or use --objective progress"
        )
