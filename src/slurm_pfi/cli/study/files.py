"""The files that a study is made from: a population of curves, and a library to learn from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ...bus.asking import NO, WRONG_USE
from ...elasticity.curvefile import CurveFile, CurveFileError, family_key, load_curves, load_text
from ...elasticity.library import MEASURED_FILE, Library, LibraryError
from ...sim.population import (
    FEWEST_CURVES,
    UNIT_COLUMN,
    Gathered,
    Member,
    Objective,
    PopulationError,
    gather,
    published,
)
from ..common import fail

FAMILY_COLUMN: Final = "family"


def population_of(
    path: Path | None, objective: Objective, *, bound_only: bool = False
) -> tuple[CurveFile, Gathered]:
    """The file's curves, or all published ones; ends the command when it cannot be read or holds nothing to judge."""
    try:
        file = published() if path is None else load_curves(path, keep=(UNIT_COLUMN, FAMILY_COLUMN))
        gathered = gather(file, objective, bound_only=bound_only)
    except (CurveFileError, PopulationError) as error:
        fail(str(error), WRONG_USE)
    if not gathered.members:
        why = [f"{one.curve_id}: {one.reason}" for one in gathered.not_judged] + [
            str(one) for one in gathered.skipped
        ]
        more = f" ({'; '.join(why[:3])}{'; ...' if len(why) > 3 else ''})" if why else ""
        fail(
            f"{file.origin}: nothing to judge: no GPU model has {FEWEST_CURVES} curves with measured draw{more}",
            NO,
        )
    return file, gathered


def library_of(path: Path | None) -> tuple[str, Library]:
    """Where the library comes from, and the library; ends the command when it cannot be used."""
    if path is None:
        return f"{MEASURED_FILE}, shipped with slurm-pfi", Library.load_default()
    try:
        return str(path), Library.from_csv(load_text(path), origin=str(path))
    except (CurveFileError, LibraryError) as error:
        fail(str(error), WRONG_USE)


def guessed_families(file: CurveFile, members: Iterable[Member]) -> int:
    """Members whose family the file does not say, so that it was taken from the names of workload or curve."""
    wanted = {one.curve_id for one in members}
    return sum(
        one.curve_id in wanted and FAMILY_COLUMN in one.kept and not family_key(one.kept[FAMILY_COLUMN])
        for one in file.curves
    )
