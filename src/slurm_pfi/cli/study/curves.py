"""``slurm-pfi study curves``: the policies on sites drawn from measured curves that the library has not seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import Progress

from ...bus.asking import WRONG_USE
from ...elasticity.curvefile import CurveFile
from ...sim.curves_study import (
    LEAVE_OUT,
    LeaveOut,
    Outcome,
    Played,
    Row,
    Study,
    of_one_gpu,
    outcome_of,
    play,
)
from ...sim.population import (
    Gathered,
    Objective,
    Population,
)
from ...sim.rounds import Conditions
from ...sim.workers import usable_cores
from ..common import fail, print_json
from . import figure
from .curves_print import print_study
from .files import guessed_families, library_of, population_of

DEFAULT_SEED: Final = 20261103
DEFAULT_SETS: Final = 40
_MOST_ROUNDS: Final = 50
_PER_GPU: Final = 4
"""With ``--by-gpu``, one site of each GPU model for so many mixed ones."""


def _numbers(
    least: float, most: float, *, whole: bool
) -> Callable[[click.Context, click.Parameter, str], tuple[float, ...]]:
    """Reads numbers with commas between, each within ``least`` and ``most``; each once, in ascending order."""

    def read(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[float, ...]:
        try:
            numbers = [int(word) if whole else float(word) for word in text.split(",")]
        except ValueError:
            kind = "whole numbers" if whole else "numbers"
            raise click.BadParameter(f"{text!r} is no list of {kind} with commas between") from None
        if not all(least <= number <= most for number in numbers):
            raise click.BadParameter(f"{text!r}: each has to lie within {least:g}..{most:g}")
        return tuple(sorted(set(numbers)))

    return read


@click.command(short_help="Try the policies on runs drawn from a file of curves.")
@click.argument(
    "population_file", metavar="[POPULATION.csv]", required=False, type=click.Path(path_type=Path)
)
@click.option(
    "--library",
    "library_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="curves to learn from, in place of those shipped with the package",
)
@click.option(
    "--leave-out",
    type=click.Choice(LEAVE_OUT),
    default="gpu",
    show_default=True,
    help="what of a run its library does not hold: its GPU model, its family, or nothing left out, its own curve"
    " included if it is there",
)
@click.option(
    "--rounds",
    metavar="LIST",
    callback=_numbers(0, _MOST_ROUNDS, whole=True),
    default="0,1,2,4,8",
    show_default=True,
    help="shown after so many measured plans; 0 is the first plan",
)
@click.option("--runs", default=100, show_default=True, type=click.IntRange(1, 10_000), help="runs of a site")
@click.option("--sets", default=DEFAULT_SETS, show_default=True, type=click.IntRange(2), help="sites drawn")
@click.option(
    "--reductions",
    metavar="LIST",
    callback=_numbers(0.1, 99.9, whole=False),
    default="10,20,30,40",
    show_default=True,
    help="of the sites' draw, %",
)
@click.option(
    "--baseline-error",
    default=0.01,
    show_default=True,
    type=click.FloatRange(0, 0.5),
    help="of T_max, drawn once a run",
)
@click.option(
    "--pfi-sd",
    default=0.3,
    show_default=True,
    type=click.FloatRange(0, 100),
    help="error of the PFI that is known of a job beforehand; large: marginal learns nothing from it",
)
@click.option(
    "--noise",
    default=0.006,
    show_default=True,
    type=click.FloatRange(0, 0.5),
    help="of a measured throughput",
)
@click.option(
    "--objective",
    type=click.Choice(["progress", "tokens"]),
    default="progress",
    show_default=True,
    help="what is to be kept: every run's progress alike, or throughput (all curves in one unit)",
)
@click.option(
    "--names/--no-names",
    default=True,
    show_default=True,
    help="a job drawn twice is known to be the same work by its name, and its runs pool what they measured",
)
@click.option(
    "--bound-only",
    is_flag=True,
    help="jobs whose draw lies below all their caps cannot be cut; without this their curves count as measured",
)
@click.option("--by-gpu", is_flag=True, help="also sites with one GPU model only, a quarter as many of each")
@click.option("--seed", default=DEFAULT_SEED, show_default=True, type=click.IntRange(0), help="of all draws")
@click.option(
    "--workers", default=None, type=click.IntRange(1), help="processes; default: the cores there are"
)
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, shares of 1")
@click.option(
    "--plot", metavar="FILE", type=click.Path(path_type=Path), help="a figure too: FILE.svg or FILE.png"
)
def curves(
    population_file: Path | None,
    library_file: Path | None,
    leave_out: LeaveOut,
    rounds: tuple[int, ...],
    runs: int,
    sets: int,
    reductions: tuple[float, ...],
    baseline_error: float,
    pfi_sd: float,
    noise: float,
    objective: Objective,
    names: bool,
    bound_only: bool,
    by_gpu: bool,
    seed: int,
    workers: int | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Try the policies on sites whose runs are drawn from a file of measured curves, without one from published ones.

    Families of workloads are drawn alike. For each policy: the share of the gap between the equal policy and the
    oracle that its applied plan closes, with a 95 % interval over the sites. What a run's library may not hold is
    left out. No run is cut deeper than it was measured.
    """
    if plot is not None:
        try:
            figure.check_target(plot)
        except figure.FigureError as error:
            fail(str(error), WRONG_USE)
    file, gathered = population_of(population_file, objective, bound_only=bound_only)
    origin, library = library_of(library_file)
    study = Study(
        population=Population(gathered.members),
        library=library,
        leave_out=leave_out,
        conditions=Conditions(pfi_sd=pfi_sd, noise=noise, baseline_error=baseline_error),
        runs=runs,
        last_round=max(rounds),
        reductions=tuple(share / 100 for share in reductions),
        names=names,
        seed=seed,
    )
    kinds = {"": study, **(of_one_gpu(study) if by_gpu else {})}
    counts = {name: max(2, sets // _PER_GPU) if name else sets for name in kinds}
    played = _play(kinds, counts, workers or usable_cores())
    outcomes = {name: outcome_of(one, rounds, played[name]) for name, one in kinds.items()}
    if plot is not None:
        _plot(plot, outcomes, file)
    document = _document(outcomes, sets, objective, gathered, file, origin)
    if as_json:
        print_json(document)
    else:
        print_study(outcomes, document)


# ------------------------------------------------------------------------------------------------------- the work


def _play(
    kinds: Mapping[str, Study], counts: Mapping[str, int], workers: int
) -> dict[str, list[list[Played]]]:
    """All sites of all kinds, in the order of their numbers."""
    found: dict[str, list[list[Played]]] = {
        name: [[] for _ in range(count)] for name, count in counts.items()
    }
    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        bar = progress.add_task("study curves", total=sum(counts.values()))
        for name, study in kinds.items():
            for number, site in play(study, counts[name], workers):
                found[name][number] = site
                progress.advance(bar)
    return found


# ------------------------------------------------------------------------------------------------------ the output


def _document(
    outcomes: Mapping[str, Outcome],
    sets: int,
    objective: Objective,
    gathered: Gathered,
    file: CurveFile,
    library_origin: str,
) -> dict[str, Any]:
    """All there is to say, as ``--json`` prints it."""
    main = outcomes[""]
    study = main.study
    members = study.population.members
    return {
        **main.as_json(),
        "seed": study.seed,
        "by_gpu": {name: one.as_json() for name, one in outcomes.items() if name},
        "population": {
            "file": file.origin,
            "sha256": file.sha256,
            "curves": len(members),
            "fixed": sum(one.fixed for one in members),
            "gpu_models": _count(one.gpu_model for one in members),
            "families": _count(one.family for one in members),
            "families_guessed": guessed_families(file, members),
            "repairs": gathered.repairs,
            "doubts": [{"curve_id": curve_id, "doubt": doubt} for curve_id, doubt in gathered.doubts],
        },
        "not_judged": [asdict(one) for one in gathered.not_judged],
        "skipped": [asdict(one) for one in gathered.skipped],
        "conditions": {
            **asdict(study.conditions),
            "runs": study.runs,
            "sets": sets,
            "rounds": sorted({row.round for row in main.rows if row.policy == "marginal"}),
            "reductions": list(study.reductions),
            "objective": objective,
            "names": study.names,
            "leave_out": study.leave_out,
        },
        "library": {
            "origin": library_origin,
            "curves": len(study.library.curves),
            "gpu_models": list(study.library.gpu_models),
            "left_out": [{"curve_id": curve_id, "reason": why} for curve_id, why in study.library.left_out],
            "lacking": list(main.lacking),
        },
    }


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _plot(path: Path, outcomes: Mapping[str, Outcome], file: CurveFile) -> None:
    panels = [
        figure.Panel(
            f"sites with {name} only" if name else "all GPU models",
            _lines(one.rows),
            "reduction of power, %",
            "throughput lost, %",
        )
        for name, one in outcomes.items()
    ]
    study = outcomes[""].study
    note = (
        f"{Path(file.origin).name}, measured; sites of {study.runs} runs, seed {study.seed}; left out of the library:"
        f" {study.leave_out}; shaded: 95 % of the sites"
    )
    try:
        figure.draw(path, panels, title="Throughput lost on measured curves", note=note)
    except figure.FigureError as error:
        fail(str(error), WRONG_USE)


def _lines(rows: Sequence[Row]) -> dict[str, figure.Line]:
    """Every policy, of ``marginal`` the first and the last round that were shown; nothing is lost without a cut."""
    last = max(row.round for row in rows)
    named: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        if row.lost is None or row.lost_low is None or row.lost_high is None:
            continue
        if row.policy != "marginal":
            name = row.policy
        elif row.round in (0, last):
            name = "marginal, first plan" if row.round == 0 else f"marginal, round {last}"
        else:
            continue
        point = (row.reduction, row.lost, row.lost_low, row.lost_high)
        named.setdefault(name, [(0.0, 0.0, 0.0, 0.0)]).append(point)
    lines = {}
    for name, points in named.items():
        x, y, low, high = (
            [100 * number for number in column] for column in zip(*sorted(points), strict=True)
        )
        lines[name] = figure.Line(x, y, low, high)
    return lines
