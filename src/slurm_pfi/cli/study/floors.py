"""``slurm-pfi study floors``: whether promised floors hold on GPU models that the library has not seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import Progress

from ...bus.asking import NO
from ...elasticity.curvefile import CurveFile
from ...elasticity.floors import FLOOR_SDS
from ...sim.floors_study import (
    ALLOWED,
    LIMITS,
    MOST_MEASUREMENTS,
    Row,
    Study,
    judged,
    play,
    steps,
    without_library,
)
from ...sim.population import Gathered, Population
from ...sim.rounds import Conditions
from ...sim.workers import usable_cores
from ..common import console, fail, percent, print_json
from ..tables import Column, show_table
from .files import library_of, population_of

DEFAULT_SEED: Final = 20261117
DEFAULT_SETS: Final = 20
_SHOWN_IDS: Final = 5
_AFTER: Final = 2


@click.command(short_help="See how often a promised greatest loss is kept.")
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
    "--sets",
    default=DEFAULT_SETS,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="how often each job is tried, with new errors and noise",
)
@click.option(
    "--sds",
    default=FLOOR_SDS,
    show_default=True,
    type=click.FloatRange(0, 10),
    help="standard deviations above the expected loss that a floor is kept by",
)
@click.option(
    "--baseline-error", default=0.01, show_default=True, type=click.FloatRange(0, 0.5), help="of T_max"
)
@click.option(
    "--pfi-sd", default=0.3, show_default=True, type=click.FloatRange(0, 100), help="error of the PFI told"
)
@click.option(
    "--noise",
    default=0.006,
    show_default=True,
    type=click.FloatRange(0, 0.5),
    help="of a measured throughput",
)
@click.option("--seed", default=DEFAULT_SEED, show_default=True, type=click.IntRange(0), help="of all draws")
@click.option(
    "--workers", default=None, type=click.IntRange(1), help="processes; default: the cores there are"
)
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, shares of 1")
def floors(
    population_file: Path | None,
    library_file: Path | None,
    sets: int,
    sds: float,
    baseline_error: float,
    pfi_sd: float,
    noise: float,
    seed: int,
    workers: int | None,
    as_json: bool,
) -> None:
    """Promise every job of a file a greatest loss, and see how often it loses more at the floor it gets.

    Without a file: published curves. The GPU model of a job is not in its library, which is the hardest case: your own
    curves are not used for the floors that are judged. Floors are made after 0 to 4 measurements, each taken at the
    floor before. Families of workloads count alike; the bound of broken promises draws them anew.
    """
    file, gathered = population_of(population_file, "progress")
    origin, library = library_of(library_file)
    study = Study(
        population=Population(gathered.members),
        library=library,
        conditions=Conditions(pfi_sd=pfi_sd, noise=noise, baseline_error=baseline_error),
        sets=sets,
        seed=seed,
        sds=sds,
    )
    if not judged(study.population)[0]:
        fail(f"{file.origin}: nothing to judge: no cap lies below what any of the jobs draws", NO)
    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        bar = progress.add_task("study floors", total=steps(study))
        rows = play(study, workers or usable_cores(), lambda: progress.advance(bar))
    document = _document(rows, study, gathered, file, origin)
    if as_json:
        print_json(document)
    else:
        _print(rows, study, document)


def _document(
    rows: Sequence[Row], study: Study, gathered: Gathered, file: CurveFile, origin: str
) -> dict[str, Any]:
    _, without = judged(study.population)
    return {
        "results": [asdict(row) for row in rows],
        "by_gpu": _by_gpu(rows),
        "allowed": ALLOWED,
        "limits": list(LIMITS),
        "sets": study.sets,
        "seed": study.seed,
        "sds": study.sds,
        "conditions": asdict(study.conditions),
        "file": file.origin,
        "library": origin,
        "lacking": without_library(study),
        "no_cap_below_draw": [one.curve_id for one in without],
        "not_judged": [asdict(one) for one in gathered.not_judged],
        "skipped": [asdict(one) for one in gathered.skipped],
    }


def _by_gpu(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each GPU model over all measurements: promises broken under its worst limit, and the share used after two."""
    found = []
    learned = [row for row in rows if row.rule == "learned"]
    for gpu in dict.fromkeys(row.gpu for row in learned):
        of_gpu = [row for row in learned if row.gpu == gpu]
        by_limit = {limit: [row for row in of_gpu if row.limit == limit] for limit in LIMITS}
        worst = max(LIMITS, key=lambda limit: _mean(row.broken for row in by_limit[limit]))
        found.append(
            {
                "gpu": gpu,
                "broken": _mean(row.broken for row in of_gpu),
                "worst_limit": worst,
                "worst_limit_broken": _mean(row.broken for row in by_limit[worst]),
                "worst_limit_upper95": max(
                    (row.upper95 for row in by_limit[worst] if row.upper95 is not None), default=None
                ),
                "worst_row_broken": max(row.broken for row in of_gpu),
                "jobs": of_gpu[0].jobs,
                "families": of_gpu[0].families,
                "used_after_two": _mean(row.used for row in of_gpu if row.measurements == _AFTER),
            }
        )
    return found


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _print(rows: Sequence[Row], study: Study, document: dict[str, Any]) -> None:
    out = console()
    out.print(
        f"{document['file']}: every job of each GPU model, {study.sets} times, seed {study.seed};"
        f" library: {document['library']} without that GPU model; floors at the expected loss plus {study.sds:g} sd",
        markup=False,
        highlight=False,
    )
    conditions = study.conditions
    out.print(
        f"assumed: every job's PFI is known beforehand with an error of sd {conditions.pfi_sd:g}; noise"
        f" {percent(conditions.noise)}, baselines {percent(conditions.baseline_error)}",
        markup=False,
    )
    out.print(
        "broken: share of promises that were, allowed 5 %; upper: its one-sided 95 % bound, families drawn anew (zero"
        " where nothing broke, however few jobs: --json has the bound by jobs); used: share of the true greatest"
        " reduction"
    )
    out.print(
        "(library): floors from the library's curves alone, as the controller makes them for every run today"
    )
    for limit in LIMITS:
        out.print()
        out.print(f"promised: at most {100 * limit:.0f} % lost", style="bold")
        show_table(out, _COLUMNS, [row for row in rows if row.limit == limit])
    out.print()
    out.print(f"all limits, 0 to {MOST_MEASUREMENTS} measurements", style="bold")
    show_table(out, _GPU_COLUMNS, document["by_gpu"])
    out.print(_verdict(document["by_gpu"]), markup=False)
    _say(
        out,
        "NO LIBRARY is left, so floors come from a straight line, a guess (try --library)",
        document["lacking"],
    )
    _say(out, "no cap lies below the draw, so nothing is promised", document["no_cap_below_draw"])
    _say(out, "not judged", [f"{one['curve_id']} ({one['reason']})" for one in document["not_judged"]])
    _say(out, "skipped", [f"{one['curve_id']} ({one['reason']})" for one in document["skipped"]])


def _verdict(by_gpu: Sequence[dict[str, Any]]) -> str:
    worst = max(by_gpu, key=lambda entry: float(entry["worst_limit_broken"]))
    row = max(by_gpu, key=lambda entry: float(entry["worst_row_broken"]))
    upper = worst["worst_limit_upper95"]
    if worst["worst_limit_broken"] > ALLOWED:
        said = "NOT kept"
    elif upper is None:
        said = "kept here; one family of workloads gives no bound"
    elif upper <= ALLOWED:
        said = "kept"
    else:
        said = "kept on average, not proven: the bound lies above"
    return (
        f"worst average: {worst['gpu']} promised {percent(worst['worst_limit'], 0)}:"
        f" {percent(worst['worst_limit_broken'])} broken (allowed {percent(ALLOWED, 0)}), upper bound"
        f" {_bound(upper)}: {said}; worst row: {percent(row['worst_row_broken'])} ({row['gpu']})"
    )


def _bound(share: float | None) -> str:
    return "-" if share is None else percent(share)


def _say(out: Console, what: str, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - _SHOWN_IDS} more" if len(names) > _SHOWN_IDS else ""
        out.print(f"{what}: {', '.join(names[:_SHOWN_IDS])}{more}", markup=False)


_COLUMNS: Final = (
    Column("GPU MODEL LEFT OUT", lambda row: row.gpu, clip=10),
    Column(
        "MEASURED", lambda row: "(library)" if row.rule == "library" else str(row.measurements), side="right"
    ),
    Column("BROKEN", lambda row: percent(row.broken), side="right"),
    Column("UPPER", lambda row: _bound(row.upper95), side="right"),
    Column("JOBS", lambda row: str(row.jobs), side="right", drop=2),
    Column("USED", lambda row: percent(row.used, 0), side="right"),
    Column("WORST FAMILY", lambda row: f"{row.worst_family} {percent(row.worst_family_broken)}", drop=1),
)
_GPU_COLUMNS: Final = (
    Column("GPU MODEL LEFT OUT", lambda entry: entry["gpu"], clip=10),
    Column("BROKEN", lambda entry: percent(entry["broken"]), side="right"),
    Column("WORST LIMIT", lambda entry: percent(entry["worst_limit"], 0), side="right"),
    Column("BROKEN THERE", lambda entry: percent(entry["worst_limit_broken"]), side="right"),
    Column("UPPER", lambda entry: _bound(entry["worst_limit_upper95"]), side="right"),
    Column("WORST ROW", lambda entry: percent(entry["worst_row_broken"]), side="right"),
    Column("JOBS", lambda entry: f"{entry['jobs']} of {entry['families']} families", side="right", drop=2),
    Column("USED AFTER 2", lambda entry: percent(entry["used_after_two"], 0), side="right", drop=1),
)
