"""``slurm-pfi study paper``: section 6 of arXiv 2609.11542 repeated on model jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.progress import Progress

from ...bus.asking import WRONG_USE
from ...sim.paper import BASE, MIXES, OBJECTIVES, Mix, all_assumptions
from ...sim.paper_learned import learned_rounds
from ...sim.paper_play import Game, Row, play
from ...sim.workers import run_all, usable_cores
from ..common import fail, print_json
from . import figure
from .paper_print import (
    FIGURE_NOTE,
    FIGURE_TITLE,
    JUDGED,
    SHOWN,
    Settings,
    document,
    panels,
    print_study,
)

DEFAULT_SEED: Final = 20260911
DEFAULT_LEARNED_SETS: Final = 8
_LEARNED: Final[dict[Mix, tuple[float, ...]]] = {"production": SHOWN, "random": (JUDGED,)}
"""Where the policy that learns is played: it takes longest."""
_ASSUMPTION_SETS: Final = 40
"""Sets for each combination of assumptions: there are many, and the interval is printed."""


@click.command()
@click.option("--sets", default=500, show_default=True, type=click.IntRange(2), help="sets of jobs")
@click.option("--jobs", default=100, show_default=True, type=click.IntRange(1), help="jobs in a set")
@click.option("--seed", default=DEFAULT_SEED, show_default=True, type=click.IntRange(0), help="of all draws")
@click.option(
    "--learned-sets",
    default=DEFAULT_LEARNED_SETS,
    show_default=True,
    type=click.IntRange(0),
    help="sets, of these, for the policy that learns (marginal), which takes longest; 0 leaves it out",
)
@click.option(
    "--names/--no-names",
    default=True,
    show_default=True,
    help="for marginal, jobs of one name are known to be the same work and pool what they measured",
)
@click.option(
    "--workers", default=None, type=click.IntRange(1), help="processes; default: the cores there are"
)
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, shares of 1")
@click.option(
    "--plot", metavar="FILE", type=click.Path(path_type=Path), help="a figure too: FILE.svg or FILE.png"
)
def paper(
    sets: int,
    jobs: int,
    seed: int,
    learned_sets: int,
    names: bool,
    workers: int | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Repeat section 6 of arXiv 2609.11542 on a model of its 25 jobs.

    Sets of jobs have to draw less, and each policy shares out the cut. For each policy: the share of the gap between
    the equal policy and the oracle that it closes, with a 95 % interval over the sets, beside the 63 % that the paper
    reports. What the paper does not publish is assumed, and varied.
    """
    if plot is not None:
        try:
            figure.check_target(plot)
        except figure.FigureError as error:
            fail(str(error), WRONG_USE)
    settings = Settings(sets, jobs, seed, min(learned_sets, sets), names)
    rows = run(settings, workers or usable_cores())
    if plot is not None:
        try:
            figure.draw(plot, panels(rows), title=FIGURE_TITLE, note=FIGURE_NOTE)
        except figure.FigureError as error:
            fail(str(error), WRONG_USE)
    if as_json:
        print_json(document(rows, settings))
    else:
        print_study(rows, settings)


def run(settings: Settings, workers: int) -> list[Row]:
    """All results: the base assumptions in full, then every other combination where the paper gives its figure."""
    sets, jobs, seed = settings.sets, settings.jobs, settings.seed
    tasks: list[tuple[Callable[[Game], list[Row]], Game]] = [
        (play, Game(BASE, mix, objective, sets, jobs, seed)) for mix in MIXES for objective in OBJECTIVES
    ]
    if settings.learned_sets:
        tasks += [
            (
                learned_rounds,
                Game(BASE, mix, objective, settings.learned_sets, jobs, seed, (reduction,), settings.names),
            )
            for mix, reductions in _LEARNED.items()
            for objective in OBJECTIVES
            for reduction in reductions
        ]
    tasks += [
        (play, Game(one, "production", "tokens", min(sets, _ASSUMPTION_SETS), jobs, seed, (JUDGED,)))
        for one in all_assumptions()
        if one != BASE
    ]
    found: list[list[Row]] = [[] for _ in tasks]
    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        bar = progress.add_task("study paper", total=len(tasks))
        for place, rows in run_all(tasks, workers):
            found[place] = rows
            progress.advance(bar)
    return [row for rows in found for row in rows]
