"""What ``slurm-pfi study curves`` prints for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console

from ...sim.curves_study import Outcome, Row, Tally
from ..common import console, percent
from ..tables import Column, show_table

_NAMED: Final = 5
"""Curves left out that are named one by one; --json has all."""


def print_study(outcomes: Mapping[str, Outcome], document: Mapping[str, Any]) -> None:
    """Conditions, tables and counts, then what was not judged."""
    out = console()
    for line in _head(document):
        out.print(line, markup=False)
    lacking = document["library"]["lacking"]
    if lacking:
        out.print(
            f"no library is left for {len(lacking)} of the curves ({', '.join(lacking[:_NAMED])}"
            f"{', ...' if len(lacking) > _NAMED else ''}): they are cut"
            " equally until they were measured, and then no deeper than that",
            markup=False,
        )
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
    return [
        f"population: {population['curves']} measured curves of {population['file']}:"
        f" {_counts(population['gpu_models'])}; families drawn alike: {_counts(population['families'])}{unbound}",
        f"library: {library['origin']}, {library['curves']} curves of {', '.join(library['gpu_models'])}; left out for"
        f" each run: {_LEFT_OUT[conditions['leave_out']]}",
        f"{conditions['sets']} sites of {conditions['runs']} runs, seed {document['seed']}, objective"
        f" {conditions['objective']}; PFI told +-{conditions['pfi_sd']:g}, noise {percent(conditions['noise'])},"
        f" baseline error {percent(conditions['baseline_error'])}; runs of one job name {names}",
    ]


_LEFT_OUT: Final = {"gpu": "its own GPU model", "family": "its own family", "none": "nothing"}


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _outcome(out: Console, outcome: Outcome) -> None:
    reductions = outcome.study.reductions
    out.print("share of the gap from equal to oracle that is closed, in %, with its 95 % interval over sites")
    entries = [entry for entry in _by_policy(outcome.rows) if _policy(entry) not in ("equal", "oracle")]
    show_table(out, [_POLICY, *(_closed_column(share) for share in reductions)], entries)
    out.print(
        "throughput, in %: the gap, what each policy loses, and the worst of marginal's plans shown against equal"
    )
    show_table(
        out, _cost_columns(max(row.round for row in outcome.rows)), [_at(outcome.rows, x) for x in reductions]
    )
    for line in _tally(outcome.tally, outcome.study.last_round):
        out.print(line, markup=False)


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
        return f"{short} [{100 * row.ci_low:.0f}, {100 * row.ci_high:.0f}]"

    return Column(f"{100 * reduction:g} %", cell, side="right", short=lambda entry: _short(entry[reduction]))


def _short(row: Row) -> str:
    if not row.sets:
        return "infeasible"
    return "no gap" if row.gap_closed is None else f"{100 * row.gap_closed:.0f}"


def _cost_columns(last: int) -> list[Column]:
    def lost(policy: str, number: int) -> Column:
        heading = policy if policy != "marginal" else f"marginal, round {number}"
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
    return "-" if share is None else f"{100 * share:.2f}"


def _worst(entry: Mapping[tuple[str, int], Row]) -> str:
    found = [
        row.worst_vs_equal
        for row in entry.values()
        if row.policy == "marginal" and row.worst_vs_equal is not None
    ]
    return f"{100 * min(found):+.2f}" if found else "-"


def _sites(entry: Mapping[tuple[str, int], Row]) -> str:
    row = _any(entry)
    if not row.infeasible:
        return str(row.sets)
    return f"{row.sets}; {row.infeasible} infeasible, short by up to {percent(row.shortfall)} of the draw"


def _tally(found: Tally, last_round: int) -> list[str]:
    if found.worst_vs_equal is None:
        return ["no plan was applied: no site has so much to give"]
    return [
        f"marginal: {found.below_equal_plans} of {found.plans} applied plans, all of rounds 0..{last_round}, below"
        f" equal (rate {percent(found.below_equal_plans / found.plans, 2)}, upper 95 % bound"
        f" {percent(found.below_equal_rate_upper95, 2)}), worst {100 * found.worst_vs_equal:+.2f} % of throughput",
        f"by site, as plans of one site are related: {found.below_equal_sets} of {found.sets} had such a plan (upper"
        f" 95 % bound {percent(found.below_equal_sets_upper95)})",
    ]


def _left_out(document: Mapping[str, Any]) -> list[str]:
    population = document["population"]
    repaired = _counts({kind: number for kind, number in population["repairs"].items() if number})
    lines = [f"repaired in the population's curves, points: {repaired or 'none'}"]
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
