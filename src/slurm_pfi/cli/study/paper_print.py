"""What ``slurm-pfi study paper`` prints, for people and for programs, and what its figure shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console

from ...allocation.guard import FEW_KINDS, TRUST, TRUST_FEW
from ...sim.jobs import model_jobs
from ...sim.paper import BASE, MIXES, OBJECTIVES, PUBLISHED, PUBLISHED_SHARE, all_assumptions
from ...sim.paper_learned import CONDITIONS, ROUNDS
from ...sim.paper_play import Row
from ..common import console, percent
from ..tables import Column, show_table
from . import figure
from .show import figure as figure_of
from .show import show_with_intervals, signed

JUDGED: Final = 0.30
"""The reduction at which the paper gives its figure."""
SHOWN: Final = (0.10, 0.20, 0.30, 0.40)
_SHOWN_ROUNDS: Final = (0, 1, 2, ROUNDS)
_NEAR: Final = 0.10

ABOUT: Final = (
    "model data, not measurement: of its 25 jobs the paper publishes class, GPUs and one PFI each; curves and draws are"
    " a model fitted to these PFI, token rates are assumptions"
)
_FIGURES: Final = (
    "gap: what equal loses more than an oracle that knows every curve; the tables: how much of it a policy closes at"
    " each cut of power, in %, with its 95 % interval over the sets: 0 is equal, 100 the oracle, below 0 worse than"
    " equal",
    "-: not played",
    "BELOW, 30 %: at a cut of 30 %, the share of the sets in which the policy lost more than equal; WORST, 30 %: the"
    " worst set there, in points (% of the objective), + is less lost than equal",
)
_BEYOND: Final = (
    f"marginal may pass its trust limit here ({100 * TRUST:.0f} % of a run's draw deeper than equal or measured;"
    f" {100 * TRUST_FEW:.0f} % with under {FEW_KINDS} kinds of work), where the plan is certified once more: its"
    " library holds the jobs' GPU model; study curves keeps to the limit"
)
_CHOICES: Final = (
    "ft_share: share of fine-tuning jobs in the mix; base 0.94, counted in the trace that the paper names; 0.1 is by"
    " GPU time",
    "clamp: is there a lowest cap? yes (base): 200 W per GPU, the least an H200 allows; no: jobs can be cut to 0 W",
    "gpus: of each job as in the paper (table, base), or eight for all",
    "pfi: told with the error of the paper's fit (predicted, base), as published (true), or the mean of a job's class",
    "caps: between which curves are straight: as the paper measured (base), six for all, or every 10 W (fine)",
    "CLOSED: share of the gap, with its 95 % interval; SAVED A JOB: tokens/s that a job keeps under pfi and loses under"
    " equal, mean; GAP: in points (% of all tokens/s)",
)

FIGURE_TITLE: Final = (
    "Section 6 of arXiv 2609.11542 repeated: lost under each policy, and saved against equal"
)
FIGURE_NOTE: Final = (
    "Model data, not measurement; token rates are assumptions. Bands: lost, 95 % of the sets; saved, 95 % interval of"
    " the mean.\nmarginal was played on fewer sets: shown is the share of the gap closed there, of the gap of all sets."
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for. ``learned_sets`` of the sets are played by the policy that learns, with ``names`` or not."""

    sets: int
    jobs: int
    seed: int
    learned_sets: int
    names: bool


def document(rows: Sequence[Row], settings: Settings) -> dict[str, Any]:
    """Everything, as ``--json`` prints it."""
    return {
        "results": [row.as_json() for row in rows],
        **asdict(settings),
        "data": ABOUT,
        "learner": asdict(CONDITIONS),
        "paper": dict(PUBLISHED),
        "assumptions": {one.name: asdict(one) for one in all_assumptions()},
        "pfi_range": _range(judged(rows)),
    }


def judged(rows: Iterable[Row]) -> list[Row]:
    """The results of ``pfi`` where the paper gives its figure, one for each combination of assumptions."""
    return [
        row
        for row in rows
        if (row.policy, row.mix, row.objective, row.reduction) == ("pfi", "production", "tokens", JUDGED)
    ]


def _range(rows: Sequence[Row]) -> dict[str, Any]:
    closed = [row.gap_closed for row in rows if row.gap_closed is not None]
    return {
        "combinations": len(rows),
        "low": min(closed, default=None),
        "high": max(closed, default=None),
        "within_10_points": [row.assumptions for row in rows if _distance(row) <= _NEAR],
    }


def _distance(row: Row) -> float:
    """How far a result lies from the published one."""
    return math.inf if row.gap_closed is None else abs(row.gap_closed - PUBLISHED_SHARE)


# ------------------------------------------------------------------------------------------------- for people


def print_study(rows: Sequence[Row], settings: Settings) -> None:
    """What was played, a table for each mix and objective, and what the assumptions change."""
    out = console()
    for line in _head(settings):
        out.print(line, markup=False, highlight=False)
    for mix in MIXES:
        for objective in OBJECTIVES:
            out.print()
            _table(out, rows, mix, objective)
    if settings.learned_sets:
        out.print()
        out.print(_below_equal(rows), markup=False, highlight=False)
    _print_assumptions(out, judged(rows))


def _head(settings: Settings) -> list[str]:
    lines = [
        f"section 6 of arXiv 2609.11542 repeated: {settings.sets} sets of {settings.jobs} jobs, seed {settings.seed}",
        ABOUT,
        "objectives: tokens, the sum of tokens/s (the paper's), and progress, where every GPU counts alike",
        "policies: equal, the same cut for all, in % of a job's draw; pfi, the paper's Eq. 2; moe-ft x2, a rule without"
        " measurements: MoE fine-tuning jobs are cut by twice the % of all others",
    ]
    if settings.learned_sets:
        names = "pool what they measure" if settings.names else "do not pool what they measure (--no-names)"
        lines.append(
            f"marginal, ours, on {settings.learned_sets} of the sets: told the same PFI as pfi, and the curves of the"
            f" other {len(model_jobs()) - 1} jobs; round n follows n plans whose losses were measured (noise"
            f" {percent(CONDITIONS.noise)}, baselines {percent(CONDITIONS.baseline_error)}); jobs of one name {names}"
        )
        lines.append(_BEYOND)
    return [*lines, *_FIGURES]


def _table(out: Console, rows: Sequence[Row], mix: str, objective: str) -> None:
    entries = _by_policy(rows, mix, objective)
    paper = f"; the paper: pfi {_points(PUBLISHED_SHARE)} at 30 %"
    note = paper if (mix, objective) == ("production", "tokens") else ""
    out.print(f"{mix} mix, {objective}{note}", style="bold", markup=False, highlight=False)
    gaps = entries["oracle", 0]
    out.print(
        f"gap, % of all {objective}: "
        + ", ".join(f"{_tenths(gaps[x].gap_share_of_throughput)} at {100 * x:.0f} %" for x in SHOWN),
        markup=False,
        highlight=False,
    )
    shown = [entry for key, entry in entries.items() if key[0] not in ("equal", "oracle")]
    show_with_intervals(out, _POLICY_COLUMNS, [one for one in shown if _first(one).round in _SHOWN_ROUNDS])


def _below_equal(rows: Sequence[Row]) -> str:
    """How often an applied plan of ``marginal`` lost more than equal, in all that was played."""
    found = [row for row in rows if row.policy == "marginal"]
    plans = sum(row.sets for row in found)
    below = sum(round(row.below_equal * row.sets) for row in found)
    worst = min(found, key=lambda row: row.worst_vs_equal)
    where = f" ({worst.mix}, {worst.objective}, {100 * worst.reduction:.0f} %, round {worst.round})"
    return (
        f"marginal: {below} of {plans} applied plans lost more than equal; the worst:"
        f" {signed(100 * worst.worst_vs_equal)} points{where}; sets share their 25 jobs, so these are not independent"
    )


def _print_assumptions(out: Console, one_each: Sequence[Row]) -> None:
    out.print()
    out.print(
        "what the paper does not publish, varied: pfi at 30 %, production mix, tokens (the paper: 63, 1,500 tokens/s)",
        style="bold",
        highlight=False,
    )
    for line in _CHOICES:
        out.print(line, markup=False, highlight=False)
    shown = sorted((row for row in one_each if _departures(row) <= 1), key=_departures)
    show_table(out, _ASSUMPTION_COLUMNS, shown)
    found = _range(one_each)
    out.print(
        f"all {found['combinations']} combinations: pfi closes {_points(found['low'])} to {_points(found['high'])} %;"
        f" {len(found['within_10_points'])} of them lie within 63 +- 10",
        markup=False,
        highlight=False,
    )
    if found["within_10_points"]:
        fewest = min(one_each, key=lambda row: (_distance(row) > _NEAR, _departures(row), _distance(row)))
        nearest = min(one_each, key=lambda row: (_departures(row) > 2, _distance(row)))
        out.print(
            f"within 63 +- 10 with the fewest changes: {_named(fewest)}; nearest to 63 with two at most:"
            f" {_named(nearest)}",
            markup=False,
            highlight=False,
        )


def _named(row: Row) -> str:
    return f"{row.assumptions}, {_points(row.gap_closed)} %"


def _departures(row: Row) -> int:
    return 0 if row.assumptions == BASE.name else len(row.assumptions.split())


def _by_policy(rows: Sequence[Row], mix: str, objective: str) -> dict[tuple[str, int], dict[float, Row]]:
    """By policy and round: its results by reduction, under the base assumptions."""
    found: dict[tuple[str, int], dict[float, Row]] = {}
    for row in rows:
        if (row.mix, row.objective, row.assumptions) == (mix, objective, BASE.name):
            found.setdefault((row.policy, row.round), {})[row.reduction] = row
    return found


def _first(entry: Mapping[float, Row]) -> Row:
    return next(iter(entry.values()))


def _policy_name(entry: Mapping[float, Row]) -> str:
    first = _first(entry)
    if first.policy != "marginal":
        return first.policy
    return "marginal, first plan" if first.round == 0 else f"marginal, round {first.round}"


def _share_column(reduction: float) -> Column:
    def cell(entry: Mapping[float, Row]) -> str:
        return _with_interval(entry[reduction]) if reduction in entry else "-"

    def short(entry: Mapping[float, Row]) -> str:
        return _closed(entry[reduction]) if reduction in entry else "-"

    return Column(f"{100 * reduction:.0f} %", cell, side="right", short=short)


def _with_interval(row: Row) -> str:
    if row.gap_closed is None or row.ci_low is None or row.ci_high is None:
        return _closed(row)
    return f"{_points(row.gap_closed)} [{_points(row.ci_low)}, {_points(row.ci_high)}]"


def _closed(row: Row) -> str:
    return "no gap" if row.gap_closed is None else _points(row.gap_closed)


def _points(share: float | None) -> str:
    return "?" if share is None else figure_of(100 * share)


def _tenths(share: float) -> str:
    return figure_of(100 * share, 1)


_POLICY_COLUMNS: Final = (
    Column("POLICY", _policy_name),
    *(_share_column(reduction) for reduction in SHOWN),
    Column("BELOW, 30 %", lambda entry: percent(entry[JUDGED].below_equal, 0), side="right", drop=2),
    Column("WORST, 30 %", lambda entry: signed(100 * entry[JUDGED].worst_vs_equal), side="right", drop=3),
    Column("SETS", lambda entry: str(entry[JUDGED].sets), side="right", drop=1),
)
_ASSUMPTION_COLUMNS: Final = (
    Column("DIFFERS FROM THE BASE IN", lambda row: _or_nothing(row.assumptions)),
    Column("CLOSED, %", _with_interval, side="right"),
    Column("SAVED A JOB, TOKENS/S", lambda row: f"{row.gained_per_job:+,.0f}", side="right"),
    Column("GAP", lambda row: _tenths(row.gap_share_of_throughput), side="right"),
    Column("SETS", lambda row: str(row.sets), side="right", drop=1),
)


def _or_nothing(assumptions: str) -> str:
    return "nothing (base)" if assumptions == BASE.name else assumptions


# ------------------------------------------------------------------------------------------------ the figure


def panels(rows: Sequence[Row]) -> list[figure.Panel]:
    """For each mix and objective, under the base assumptions: what is lost, and beside it what equal loses more."""
    made = []
    for mix in MIXES:
        for objective in OBJECTIVES:
            entries = _by_policy(rows, mix, objective)
            lost, saved = {}, {}
            # The oracle last: it is what the others are measured by.
            for (policy, number), entry in sorted(entries.items(), key=lambda one: one[0][0] == "oracle"):
                if policy == "marginal" and number not in (0, ROUNDS):
                    continue
                name = _policy_name(entry)
                saved[name] = _saved(entry, entries["oracle", 0])
                lost[name] = _lost(entry) if policy != "marginal" else _less(entries["equal", 0], saved[name])
            cut = "cut of power, %"
            made.append(figure.Panel(f"{mix} mix, {objective}", lost, cut, f"{objective} lost, %"))
            made.append(
                figure.Panel(
                    f"{mix} mix, {objective}", saved, cut, f"{objective} saved against equal, points"
                )
            )
    return made


def _lost(entry: Mapping[float, Row]) -> figure.Line:
    ordered = [entry[reduction] for reduction in sorted(entry)]
    return figure.Line(
        x=[100 * row.reduction for row in ordered],
        y=[100 * row.lost for row in ordered],
        low=[100 * row.lost_low for row in ordered],
        high=[100 * row.lost_high for row in ordered],
    )


def _saved(entry: Mapping[float, Row], oracle: Mapping[float, Row]) -> figure.Line:
    """The share of the gap closed, of the gap of all sets: policies on other sets are shown on one scale."""
    ordered = [row for _, row in sorted(entry.items()) if row.gap_closed is not None]

    def scaled(row: Row, share: float | None) -> float:
        closed = row.gap_closed if share is None else share
        return 100 * (closed or 0.0) * oracle[row.reduction].gap_share_of_throughput

    # Nothing is saved where nothing is asked for; who was not asked that has no line from there.
    start = [0.0] if 0.0 in entry else []
    return figure.Line(
        x=[*start, *(100 * row.reduction for row in ordered)],
        y=[*start, *(scaled(row, row.gap_closed) for row in ordered)],
        low=[*start, *(scaled(row, row.ci_low) for row in ordered)],
        high=[*start, *(scaled(row, row.ci_high) for row in ordered)],
    )


def _less(equal: Mapping[float, Row], saved: figure.Line) -> figure.Line:
    """What is lost when so much less is lost than under equal."""
    base = {round(100 * reduction): 100 * row.lost for reduction, row in equal.items()}
    lost = [base[round(x)] for x in saved.x]

    def without(points: Sequence[float]) -> list[float]:
        return [whole - part for whole, part in zip(lost, points, strict=True)]

    return figure.Line(saved.x, without(saved.y), without(saved.high), without(saved.low))
