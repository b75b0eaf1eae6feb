"""The figures of a window as CSV: one file each for the site, the runs, their samples and what happened."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Final

from ...controller.answers.outcome import WindowReport
from ..tables import plain
from .words import utc

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def csv_files(report: WindowReport) -> dict[str, str]:
    """File name -> text. Times are Unix seconds and UTC, powers watts; what is not known is empty."""
    number = report.window.id
    return {
        f"window-{number}-site.csv": _site(report),
        f"window-{number}-runs.csv": _runs(report),
        f"window-{number}-run-samples.csv": _samples(report),
        f"window-{number}-events.csv": _events(report),
    }


def _site(report: WindowReport) -> str:
    head = ("unix_s", "utc", "phase", "limit_w", "draw_w", "caps_w", "unmeasured_w")
    rows = (
        (
            s.unix_s,
            utc(s.unix_s),
            s.phase,
            _w(s.limit_mw),
            _w(s.draw_mw),
            _w(s.committed_mw),
            _w(s.unmeasured_mw),
        )
        for s in report.site
    )
    return _text(head, rows)


def _runs(report: WindowReport) -> str:
    head = (
        "run", "spec", "user", "account", "partition", "name", "gpu_model", "gpus", "nodes", "flex", "max_loss",
        "present_s", "baseline", "baseline_draw_w_per_gpu", "baseline_sd", "draw_w_per_gpu", "lowest_cap_w_per_gpu",
        "floor_w_per_gpu", "gave_w", "gave_sd_w", "reduction", "loss", "expected_loss", "lost_gpu_h", "floor_passed",
        "waited",
    )  # fmt: skip
    rows = []
    for run in report.runs:
        facts = run.facts
        rows.append(
            (
                facts.run,
                facts.spec,
                facts.user,
                facts.account,
                facts.partition,
                facts.name,
                facts.gpu_model,
                facts.gpus,
                " ".join(facts.nodes),
                facts.flex,
                facts.max_loss,
                _round(run.present_s),
                facts.baseline,
                _w(facts.baseline_draw_mw),
                facts.baseline_sd,
                _w(run.draw_mw),
                _w(run.lowest_cap_mw),
                _w(facts.floor_mw),
                _w(run.gave_mw),
                _w(run.gave_sd_mw),
                _round(run.reduction),
                _round(run.loss),
                _round(facts.expected_loss),
                _round(run.lost_gpu_h),
                int(run.floor_passed),
                int(run.waited),
            )
        )
    return _text(head, rows)


def _samples(report: WindowReport) -> str:
    head = ("unix_s", "utc", "step_s", "run", "cap_w_per_gpu", "draw_w_per_gpu", "throughput_share")
    fine = set(report.fine)
    rows = (
        (
            s.unix_s,
            utc(s.unix_s),
            _round(report.fine_step_s if run in fine else report.coarse_step_s),
            run,
            _w(s.cap_mw),
            _w(s.draw_mw),
            _round(s.share),
        )
        for run, series in report.series.items()
        for s in series
    )
    return _text(head, rows)


def _events(report: WindowReport) -> str:
    rows = ((e.unix_s, utc(e.unix_s), e.run, e.kind, e.text) for e in report.events)
    return _text(("unix_s", "utc", "run", "kind", "text"), rows)


def _w(power_mw: int | None) -> float | None:
    return None if power_mw is None else power_mw / 1000


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow(["" if cell is None else _safe(cell) for cell in row])
    return out.getvalue()


def _safe(cell: object) -> object:
    """What a user chose must neither become a formula in a spreadsheet nor steer the terminal that shows the file."""
    if not isinstance(cell, str):
        return cell
    return plain(f"'{cell}" if cell.startswith(_FORMULA) else cell)
