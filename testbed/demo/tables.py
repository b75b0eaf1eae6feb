"""What the demo shows: its jobs, and the figures at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.table import Table

from slurm_pfi.slurm.tag import Tag
from slurm_pfi.units import format_power

from . import figures
from .figures import Span


@dataclass
class DemoJob:
    """A job of the demo, as its settings name it and as it came to run."""

    name: str
    workload: str
    gpus: int
    where: str
    flex: str = ""
    nodes: int = 1
    partition: str = "main"
    late: bool = False
    job_id: int = 0
    tokens: list[tuple[int, float]] = field(default_factory=list)
    uuids: list[str] = field(default_factory=list)

    @classmethod
    def from_settings(cls, entry: Mapping[str, Any]) -> DemoJob:
        return cls(**entry)

    @property
    def leaves(self) -> bool:
        """Whether its user cancels it inside the window."""
        return self.name == "ends inside the window"

    def throughput(self, act: Act, before: Act) -> float | None:
        """Share of its own rate before, from its own token counter; None where it did not run all the time."""
        try:
            rate = figures.rate_per_s(self.tokens, act.settled)
            return rate / figures.rate_per_s(self.tokens, before.settled)
        except ValueError:
            return None

    def summary(self, acts: Sequence[Act]) -> dict[str, Any]:
        """For summary.json."""
        return {
            "job_id": self.job_id,
            "name": self.name,
            "workload": self.workload,
            "flex": self.flex,
            "gpus": len(self.uuids),
            "acts": {
                act.name: {
                    "cap_mw": act.runs[self.job_id].get("cap_mw"),
                    "floor_mw": act.runs[self.job_id].get("floor_mw"),
                    "draw_mw": act.runs[self.job_id].get("draw_mw"),
                    "throughput": self.throughput(act, acts[0]),
                    "floor_passed": act.runs[self.job_id].get("floor_passed"),
                }
                for act in acts
                if act.runs.get(self.job_id)
            },
        }


@dataclass(frozen=True)
class Act:
    """One stretch of the story: ``runs`` is what ``slurm-pfi jobs`` showed at its end, by job id."""

    name: str
    span: Span
    limit_mw: int | None
    runs: dict[int, dict[str, Any]]

    @property
    def settled(self) -> Span:
        """Its last seconds, in which nothing moved any more."""
        length_ns = min(4 * figures.SECOND_NS, (self.span.end_ns - self.span.start_ns) // 2)
        end_ns = self.span.end_ns - figures.SECOND_NS // 2
        return Span(end_ns - length_ns, end_ns)

    def last(self, seconds: float) -> Span:
        """Its last seconds, but for a moment at the end that token logs may not reach."""
        end_ns = self.span.end_ns - figures.SECOND_NS // 2
        return Span(end_ns - round(seconds * figures.SECOND_NS), end_ns)


_BESIDE_WHAT: Final = 56
"""Columns that the other figures of a job take."""


def jobs_table(
    jobs: Sequence[DemoJob], act: Act, before: Act, runs: Mapping[int, Any], *, width: int
) -> Table:
    """All jobs at the end of an act: cap and draw of each GPU, rate as a share of the job's own rate before.

    Below 100 columns the job model is left out, and what a job is may be cut.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    wide = width >= 100
    what_width = None if wide else max(8, width - _BESIDE_WHAT)
    for heading, side, least in (
        ("JOB", "right", 3),
        ("WHAT", "left", None),
        *([("MODEL", "left", 12)] if wide else []),
        ("GPUS", "right", 4),
        ("FLEX", "left", 11),
        ("CAP", "right", 5),
        ("FLOOR", "right", 7),
        ("DRAW", "right", 5),
        ("RATE", "right", 7),
    ):
        table.add_column(
            heading,
            justify="right" if side == "right" else "left",
            no_wrap=True,
            min_width=least,
            max_width=what_width if heading == "WHAT" else None,
        )
    for job in jobs:
        run = runs.get(job.job_id)
        if not job.job_id or run is None:
            table.add_row(
                str(job.job_id or "-"),
                job.name,
                *([job.workload] if wide else []),
                "-",
                job.flex or "-",
                "-",
                "-",
                "-",
                "ended" if job.job_id else "later",
            )
            continue
        granted = run["flex"] or "?"
        flex = granted if job.flex in ("", granted) else f"{job.flex} -> {granted}"
        throughput = job.throughput(act, before)
        capped = act.limit_mw is not None
        table.add_row(
            str(job.job_id),
            job.name,
            *([job.workload] if wide else []),
            str(run["gpus"]),
            flex,
            format_power(run["cap_mw"]) if capped else "-",
            _floor(run) if capped else "-",
            format_power(run["draw_mw"] // run["gpus"] if run["draw_mw"] and run["gpus"] else None),
            "-" if throughput is None else f"{100 * throughput:.1f} %",
        )
    return table


def _floor(run: Mapping[str, Any]) -> str:
    return format_power(run["floor_mw"]) + (" !" if run["floor_passed"] else "")


def learned_table(jobs: Sequence[DemoJob], tags: Mapping[int, Tag | None], *, width: int) -> Table:
    """What the tags say: PFI with its interval and grid, loss and energy since the job's start.

    Below 100 columns the grid is left out: it is the same for all.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    wide = width >= 100
    for heading in (
        "JOB",
        "WHAT",
        "PFI",
        "95 %",
        "SOURCE",
        *(["CAP GRID"] if wide else []),
        "LOSS",
        "ENERGY",
    ):
        table.add_column(heading, justify="left" if heading in ("WHAT", "SOURCE") else "right", no_wrap=True)
    for job in jobs:
        tag = tags.get(job.job_id)
        if tag is None:
            continue
        interval = "-" if tag.pfi_low is None else f"{tag.pfi_low:.2f} to {tag.pfi_high:.2f}"
        table.add_row(
            str(job.job_id),
            job.name,
            f"{tag.pfi:.2f}",
            interval,
            tag.source,
            *([f"{tag.grid_low_w}-{tag.grid_high_w}/{tag.grid_step_w} W"] if wide else []),
            "?" if tag.loss is None else f"{100 * tag.loss:.1f} %",
            "?" if tag.energy_wh is None else f"{tag.energy_wh} Wh",
        )
    return table


def acts_table(summary: Mapping[str, Any]) -> Table:
    """The figures with what they had to be."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("FIGURE")
    table.add_column("MEASURED", justify="right", no_wrap=True)
    table.add_column("REQUIRED", no_wrap=True)
    read_back = "from the order to the last GPU read back at its cap"
    above = "  site draw against it from then on, at the worst of 10 samples a second"
    rows = [
        (f"economic limit: {read_back}", "compliance_s", "s", "<= 1"),
        (above, "worst_excess_w", "W", "<= 0"),
        (f'again, policy "equal": {read_back}', "equal_compliance_s", "s", ""),
        (above, "equal_worst_excess_w", "W", "<= 0"),
        (f"emergency limit: {read_back}", "emergency_compliance_s", "s", "<= 1"),
        (above, "emergency_worst_excess_w", "W", "<= 0"),
        ("loss of the job that was promised 5 %", "flex5_loss", "%", "<= 5 %"),
        ("  its lowest cap", "flex5_cap_w", "W", "< its draw"),
        ("  its draw without a cap", "flex5_draw_w", "W", ""),
        ("  for how long its cap was below that draw", "flex5_tested_s", "s", ">= 10"),
        ("was the job with flex none capped under the economic limit?", "none_capped", "", "no"),
        ('throughput kept under the economic limit, policy "marginal"', "kept", "%", ">= equal - 0.5"),
        ('  the same with policy "equal"', "kept_equal", "%", ""),
        ("greatest error of a tag's loss against the job's own counter", "tag_loss_error", "%", "<= 1 %"),
        ("jobs whose PFI in the tag is measured", "tags_measured", "", ">= 4"),
        ("site draw before the window", "uncapped_w", "W", ""),
        ("  its peak while caps rose after it", "rebound_peak_w", "W", "<= 1 % more"),
        ("GPUs back at the limit they had before", "restored_gpus", "", "32"),
        ("GPUs at another limit", "restored_wrong", "", "0"),
    ]
    for text, key, unit, required in rows:
        table.add_row(text, _figure(summary[key], unit), required)
    return table


def _figure(value: Any, unit: str) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit == "%":
        return f"{100 * value:.2f} %"
    if unit:
        return f"{value:,.0f} {unit}" if unit == "W" and abs(value) >= 10 else f"{value:g} {unit}"
    return str(value)
