"""What ``slurm-pfi study curves`` prints for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console

from ...sim.curves_study import Outcome, Row, Tally
from ...sim.gap import NO_GAP
from ..common import console, percent
from ..tables import Column, show_table
from .show import figure, show_with_intervals, signed

_NAMED: Final = 5
"""Curves left out that are named one by one; --json has all."""
_ENOUGH_SITES: Final = 10
"""With fewer, an interval over sites is hardly one."""


def print_study(outcomes: Mapping[str, Outcome], document: Mapping[str, Any]) -> None:
    """Conditions, how to read it, tables and counts, then what was not judged."""
    out = console()
    for line in [*_head(document), *_lacking(document), *_how_to_read(document["conditions"]["objective"])]:
        out.print(line, markup=False)
    for name, outcome in outcomes.items():
        out.print()
        if name:
            out.print(f"sites with {name} only", style="bold", markup=False)
        _outcome(out, outcome)
    out.print()
    for line in _left_out(document):
        out.print(line, markup=False)


def _head(document: Mapping[str, Any]) -> list[str]:
    population, conditions, library = (document[key] for key in ("population", "conditions", "library"))
    fixed = population["fixed"]
    unbound = f"; {fixed} that no cap binds are not cut" if fixed else ""
    names = "pool their measurements" if conditions["names"] else "are not recognised (--no-names)"
    lines = [
        f"population: {population['curves']} measured curves of {population['file']}:"
        f" {_counts(population['gpu_models'])}; families drawn alike: {_counts(population['families'])}{unbound}",
        f"library: {library['origin']}, {library['curves']} curves of {', '.join(library['gpu_models'])}; left out for"
        f" each run: {_LEFT_OUT[conditions['leave_out']]}",
        f"{conditions['sets']} sites of {conditions['runs']} runs, seed {document['seed']}, objective"
        f" {conditions['objective']}",
        f"assumed: every job's PFI is known beforehand with an error of sd {conditions['pfi_sd']:g} (few sites have"
        f" that); measured throughput has noise {percent(conditions['noise'])}, the uncapped one an error of"
        f" {percent(conditions['baseline_error'])}; runs of one job name {names}",
    ]
    if population["families_guessed"]:
        lines.insert(
            1,
            f"families of {population['families_guessed']} curves are guessed from names, as the file does not say them"
            " (column family)",
        )
    return lines


_LEFT_OUT: Final = {"gpu": "its own GPU model", "family": "its own family", "none": "nothing"}
_OTHERS: Final = {"gpu": "of other GPU models", "family": "of other families", "none": "that can be used"}
_COUNTS_AS: Final = {
    "progress": "objective progress: every run counts the same, whatever its GPU and its rate",
    "tokens": "objective tokens: a run counts by its uncapped throughput",
}


def _how_to_read(objective: str) -> list[str]:
    return [
        "gap: what equal loses more than an oracle that knows every curve; a policy that closes 0 % of it is equal,"
        " 100 % the oracle, below 0 worse than equal",
        "first plan: nothing was measured yet; round n: after n plans whose losses were measured; plans count as they"
        " were applied, not the best kept",
        _COUNTS_AS[objective],
    ]


def _lacking(document: Mapping[str, Any]) -> list[str]:
    lacking, leave_out = document["library"]["lacking"], document["conditions"]["leave_out"]
    if not lacking:
        return []
    instead = "" if leave_out == "none" else "--leave-out none, or "
    return [
        f"no library is left for {len(lacking)} of the {document['population']['curves']} curves"
        f" ({', '.join(lacking[:_NAMED])}{', ...' if len(lacking) > _NAMED else ''}): they are cut equally until they"
        f" were measured, and then no deeper than that; try {instead}--library with curves {_OTHERS[leave_out]}"
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _outcome(out: Console, outcome: Outcome) -> None:
    rows, reductions = outcome.rows, outcome.study.reductions
    out.print("share of the gap that is closed at each cut of power, in %, with its 95 % interval over sites")
    entries = [entry for entry in _by_policy(rows) if _policy(entry) not in ("equal", "oracle")]
    show_with_intervals(out, [_POLICY, *(_closed_column(share) for share in reductions)], entries)
    if any(row.sets and row.gap_closed is None for row in rows):
        out.print(f"no gap: equal and oracle differ by less than {percent(NO_GAP)} of throughput")
    counts = sorted({row.sets for row in rows if row.sets})
    if counts and counts[0] < _ENOUGH_SITES:
        out.print(_few_sites(counts[0], counts[-1]))
    out.print(
        "throughput lost, in %: the gap, each policy (FIRST PLAN, ROUND: of marginal); WORST: of marginal's plans"
        " shown, against equal, + is less lost than equal"
    )
    show_table(out, _cost_columns(max(row.round for row in rows)), [_at(rows, x) for x in reductions])
    for line in [*_infeasible(rows), *_tally(outcome.tally, outcome.study.last_round)]:
        out.print(line, markup=False)


def _few_sites(fewest: int, most: int) -> str:
    if most == 1:
        return "one site alone has no interval (more: --sets)"
    sites = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return f"intervals from {sites} sites mean little (more: --sets)"


def _infeasible(rows: Sequence[Row]) -> list[str]:
    """Which cuts sites could not give, and up to where all of them can."""
    short = {row.reduction: row for row in rows if row.infeasible}
    if not short:
        return []
    # Rounded down, so that what is named can be given. The sites are the same at every reduction.
    most = math.floor(1000 * min(row.reduction - row.shortfall for row in short.values())) / 10
    where = ", ".join(
        f"{100 * x:g} % on {row.infeasible} of {row.infeasible + row.sets} sites" for x, row in short.items()
    )
    return [
        f"infeasible: {where}; the runs of the site with the least can give {most:.1f} % of its draw, each at its"
        " lowest measured cap: try smaller --reductions"
    ]


def _by_policy(rows: Sequence[Row]) -> list[dict[float, Row]]:
    """One entry a policy and round: its results by reduction."""
    found: dict[tuple[str, int], dict[float, Row]] = {}
    for row in rows:
        found.setdefault((row.policy, row.round), {})[row.reduction] = row
    return list(found.values())


def _at(rows: Sequence[Row], reduction: float) -> dict[tuple[str, int], Row]:
    """The results at one reduction by policy and round."""
    return {(row.policy, row.round): row for row in rows if row.reduction == reduction}


def _policy(entry: Mapping[float, Row]) -> str:
    return next(iter(entry.values())).policy


def _policy_name(entry: Mapping[float, Row]) -> str:
    first = next(iter(entry.values()))
    if first.policy != "marginal":
        return first.policy
    return "marginal, first plan" if first.round == 0 else f"marginal, round {first.round}"


_POLICY: Final = Column("POLICY", _policy_name)


def _closed_column(reduction: float) -> Column:
    def cell(entry: Mapping[float, Row]) -> str:
        row = entry[reduction]
        short = _short(row)
        if row.gap_closed is None or row.ci_low is None or row.ci_high is None:
            return short
        return f"{short} [{figure(100 * row.ci_low)}, {figure(100 * row.ci_high)}]"

    return Column(f"{100 * reduction:g} %", cell, side="right", short=lambda entry: _short(entry[reduction]))


def _short(row: Row) -> str:
    if not row.sets:
        return "infeasible"
    return "no gap" if row.gap_closed is None else figure(100 * row.gap_closed)


def _cost_columns(last: int) -> list[Column]:
    def lost(policy: str, number: int) -> Column:
        heading = policy
        if policy == "marginal":
            heading = f"round {number}" if number else "first plan"
        return Column(
            heading.upper(),
            lambda entry: _number(entry[policy, number].lost) if (policy, number) in entry else "-",
            side="right",
        )

    shown = sorted({0, last})
    return [
        Column("CUT", lambda entry: f"{100 * _any(entry).reduction:g} %", side="right"),
        Column("GAP", lambda entry: _number(_any(entry).gap_share_of_throughput), side="right"),
        lost("equal", 0),
        lost("pfi", 0),
        *(lost("marginal", number) for number in shown),
        lost("oracle", 0),
        Column("WORST", _worst, side="right", drop=2),
        Column("SITES", _sites, drop=1),
    ]


def _any(entry: Mapping[tuple[str, int], Row]) -> Row:
    return next(iter(entry.values()))


def _number(share: float | None) -> str:
    return "-" if share is None else figure(100 * share, 2)


def _worst(entry: Mapping[tuple[str, int], Row]) -> str:
    found = [
        row.worst_vs_equal
        for row in entry.values()
        if row.policy == "marginal" and row.worst_vs_equal is not None
    ]
    return signed(100 * min(found)) if found else "-"


def _sites(entry: Mapping[tuple[str, int], Row]) -> str:
    row = _any(entry)
    return f"{row.sets} of {row.sets + row.infeasible}" if row.infeasible else str(row.sets)


def _tally(found: Tally, last_round: int) -> list[str]:
    if found.worst_vs_equal is None:
        return ["no plan was applied: no site has so much to give"]
    return [
        f"marginal: {found.below_equal_plans} of {found.plans} applied plans, all of rounds 0..{last_round}, below"
        f" equal (rate {percent(found.below_equal_plans / found.plans, 2)}, upper 95 % bound"
        f" {percent(found.below_equal_rate_upper95, 2)}), worst {signed(100 * found.worst_vs_equal)} % of throughput",
        f"by site, as plans of one site are related: {found.below_equal_sets} of {found.sets} had such a plan (upper"
        f" 95 % bound {percent(found.below_equal_sets_upper95)})",
    ]


_REPAIRS: Final = {
    "unsorted": "not in the order of the caps; sorted",
    "duplicates": "of a cap that was there before; averaged",
    "not_binding": "the cap did not lower the draw; left out",
    "below_zero": "faster than without a cap; taken as no loss",
    "raised": "lost less than a smaller cut; raised to its loss",
}


def _left_out(document: Mapping[str, Any]) -> list[str]:
    population = document["population"]
    repaired = {kind: number for kind, number in population["repairs"].items() if number}
    lines = [f"repaired in the population's curves, points:{'' if repaired else ' none'}"]
    lines += [f"  {kind} {number}: {_REPAIRS[kind]}" for kind, number in repaired.items()]
    for key, title in (("not_judged", "reported, not judged"), ("skipped", "skipped")):
        entries = document[key]
        lines += [f"{title}: {len(entries)}"]
        lines += [f"  {one['curve_id'] or '(no name)'}: {one['reason']}" for one in entries[:_NAMED]]
        if len(entries) > _NAMED:
            lines.append(f"  and {len(entries) - _NAMED} more (--json has all)")
    if population["doubts"]:
        lines.append(f"doubts: {len(population['doubts'])}")
        lines += [f"  {one['curve_id']}: {one['doubt']}" for one in population["doubts"][:_NAMED]]
    return lines
