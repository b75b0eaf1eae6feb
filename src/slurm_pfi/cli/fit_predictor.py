"""``slurm-pfi fit-predictor``: calibrate the PFI predictor on a site's own sweeps, and say what it is worth."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from ..bus.asking import NO
from ..elasticity.curve import CurveError
from ..elasticity.curvefile import FileCurve, Skipped
from ..elasticity.index import GridMismatchError
from ..elasticity.index import pfi as index_of
from ..elasticity.predictor import (
    LEVEL,
    Calibration,
    Evaluation,
    PredictorError,
    Score,
    SweptJob,
    copy_product,
    evaluate,
    fit,
    to_json,
)
from ..elasticity.student import t_quantile
from ..files import write_atomically
from .common import console, fail, percent, print_json
from .pfi import read_file, skipped_json, tell_skipped
from .predictor_harm import CutHarm, FloorHarm, HarmJob, harm, verdict
from .tables import Column, show_table

COUNTERS: Final = ("dram_activity", "memory_copy_utilisation")
_MOST_GPUS: Final = 1_000_000


@click.command("fit-predictor")
@click.argument("sweeps", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="write the calibration there; without it nothing is written",
)
@click.option("--json", "as_json", is_flag=True, help="machine-readable output")
def fit_predictor(sweeps: Path, out: Path | None, as_json: bool) -> None:
    """Fit the line from DRAM copy product to PFI on SWEEPS.

    The DRAM copy product is DRAM activity x memory-copy utilisation, both 0..1, of the uncapped job; for example
    DCGM's DRAM active ratio (DCGM_FI_PROF_DRAM_ACTIVE) and memory copy utilisation in % divided by 100
    (DCGM_FI_DEV_MEM_COPY_UTIL).

    SWEEPS is a curve file (see 'slurm-pfi pfi --help') with two more columns for it, dram_activity and
    memory_copy_utilisation, of which the values at the uncapped point are used. A column cluster groups
    jobs that are alike (default: family and task); n_gpus is the job's GPUs (default 1). All jobs must have one GPU
    model and one grid of caps, and there must be four or more.

    Predictions are judged in-sample, with each job left out, and with each cluster left out, and by what their errors
    would cost; the last line printed is a verdict. No part of slurm-pfi reads the file of --out yet.

    Exit codes: 0 done, 1 no line can be fitted or written, 2 the file cannot be read.
    """
    file = read_file(sweeps, need=COUNTERS, keep=("cluster", "n_gpus"))
    jobs: list[HarmJob] = []
    skipped = list(file.skipped)
    for curve in file.curves:
        try:
            jobs.append(_job(curve))
        except (CurveError, PredictorError) as error:
            skipped.append(Skipped(curve.curve_id, curve.line, str(error)))
    tell_skipped(file.origin, skipped)
    try:
        swept = [entry.job for entry in jobs]
        calibration = fit(swept, source_sha256=file.sha256)
        evaluation = evaluate(swept)
    except (PredictorError, GridMismatchError) as error:
        fail(f"{file.origin}: {error}", NO)
    held_out = evaluation.by_job if evaluation.by_cluster is None else evaluation.by_cluster
    score = evaluation.leave_cluster_out or evaluation.leave_one_out
    cuts, floors = harm(jobs, held_out, t_quantile(0.5 + LEVEL / 2, calibration.n - 2) * score.rmse)
    judged = verdict(cuts, floors, warned=bool(calibration.warnings))
    if out is not None:
        _write(out, calibration)
    if as_json:
        print_json(
            {
                "calibration": asdict(calibration),
                "evaluation": _evaluation_json(evaluation),
                "harm": {
                    "cuts": [{**asdict(cut), "through_prediction": cut.through_prediction} for cut in cuts],
                    "floors": [asdict(floor) for floor in floors],
                },
                "verdict": asdict(judged),
                "skipped": skipped_json(file.origin, skipped),
                "out": None if out is None else str(out),
            }
        )
    else:
        _show(calibration, evaluation, cuts, floors)
        written = f"written to {out}; no part of slurm-pfi reads that file yet"
        click.echo(written if out is not None else "not written: name a file with --out")
    for warning in calibration.warnings:
        click.echo(f"slurm-pfi: warning: {warning}", err=True)
    if not as_json:
        click.echo(f"verdict: {judged.text}")


def _job(curve: FileCurve) -> HarmJob:
    """Raises CurveError when the sweep gives no PFI or curve, PredictorError on a bad counter or count."""
    if not curve.draw_measured:
        raise CurveError(curve.doubts[0])
    feature = copy_product(*(_share(curve.kept[name], name) for name in COUNTERS))
    value = index_of(*curve.points(), gpu_model=curve.gpu)
    cluster = curve.kept["cluster"] or " ".join(part for part in (curve.family, curve.task) if part)
    job = SweptJob(name=curve.curve_id, cluster=cluster, feature=feature, pfi=value)
    return HarmJob(
        job=job,
        curve=curve.curve()[0],
        draw_w=curve.draw_w,
        lowest_cap_w=float(curve.sweep.cap_w[-1]),
        gpus=_gpus(curve.kept["n_gpus"]),
    )


def _share(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PredictorError(f"{name} {text!r} at the uncapped point is no number") from None


def _gpus(text: str) -> int:
    if not text:
        return 1
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MOST_GPUS):
        raise PredictorError(f"n_gpus {text!r} is no number of GPUs")
    return int(text)


def _write(out: Path, calibration: Calibration) -> None:
    try:
        write_atomically(out, to_json(calibration).encode(), mode=0o644)
    except OSError as error:
        fail(f"{out}: cannot be written: {error.strerror or error}", NO)


def _evaluation_json(made: Evaluation) -> dict[str, Any]:
    left_out = made.leave_cluster_out
    return {
        "in_sample": asdict(made.in_sample),
        "leave_one_out": asdict(made.leave_one_out),
        "leave_cluster_out": None if left_out is None else asdict(left_out),
        "why_not": made.why_not,
        "clusters": made.clusters,
    }


def _show(line: Calibration, evaluation: Evaluation, cuts: list[CutHarm], floors: list[FloorHarm]) -> None:
    out = console()
    caps = "/".join(f"{cap:g}" for cap in line.grid_w)
    click.echo(
        f"PFI = {line.intercept:.3f} + {line.slope:.3f} x DRAM copy product\n"
        "(DRAM activity x memory-copy utilisation, both 0..1, of the uncapped job)\n"
        f"from {line.n} jobs on {line.gpu_model}, caps {caps} W, product {line.x_low:.3f}..{line.x_high:.3f}, "
        f"residual sd {line.residual_sd:.3f}\n"
    )
    scores: list[tuple[str, Score | None]] = [
        ("in-sample", evaluation.in_sample),
        ("each job left out", evaluation.leave_one_out),
        (f"each of {evaluation.clusters} clusters left out", evaluation.leave_cluster_out),
    ]
    show_table(out, _SCORES, scores)
    if evaluation.why_not:
        click.echo(f"clusters: {evaluation.why_not}")
    what = "clusters" if evaluation.by_cluster is not None else "jobs"
    click.echo(f"\nThroughput lost to a cut, predictions with {what} left out:")
    show_table(out, _CUTS, cuts)
    if any(cut.shortfall for cut in cuts):
        click.echo("* the lowest caps do not reach this cut: every job is at its lowest")
    click.echo(
        "\nFloors promised by the lower end of the 95 % interval: broken, and how much of the true floor is used:"
    )
    show_table(out, _FLOORS, floors)


def _figure(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


_SCORES: Final = (
    Column("PREDICTION", lambda row: row[0]),
    Column("R2", lambda row: _figure(row[1].r2) if row[1] else "-", side="right"),
    Column("RMSE", lambda row: _figure(row[1].rmse) if row[1] else "-", side="right"),
    Column("SPEARMAN", lambda row: _figure(row[1].spearman) if row[1] else "-", side="right"),
)
_CUTS: Final = (
    Column("CUT", lambda cut: percent(cut.cut, 0) + ("*" if cut.shortfall else ""), side="right"),
    Column("EQUAL", lambda cut: percent(cut.equal), side="right"),
    Column("PREDICTED", lambda cut: percent(cut.predicted), side="right"),
    Column("MEASURED PFI", lambda cut: percent(cut.measured), side="right"),
    Column("ORACLE", lambda cut: percent(cut.oracle), side="right"),
    Column("PREDICTED - MEASURED", lambda cut: percent(cut.through_prediction, 2), side="right"),
)
_FLOORS: Final = (
    Column("LOSS", lambda floor: percent(floor.limit, 0), side="right"),
    Column(
        "BY PREDICTED",
        lambda floor: f"{floor.broken_by_predicted} of {floor.jobs}, {percent(floor.used_by_predicted, 0)}",
        side="right",
    ),
    Column(
        "BY MEASURED PFI",
        lambda floor: f"{floor.broken_by_measured} of {floor.jobs}, {percent(floor.used_by_measured, 0)}",
        side="right",
    ),
)
