"""Runs: who may be flexible how much, what a run draws uncapped, and what it asks of the allocation."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from ..allocation.problem import RunDemand
from ..config import Config
from ..elasticity.curve import ElasticityCurve
from ..flex import flex_in_comment, is_flex, no_flex_in_comment, parse_flex
from ..model import Flex, GpuReport, Report, Run, RunReport
from ..slurm.backend import JobInfo
from .budget import node_park_mw, parked_mw
from .ledger import NS_PER_S, prior_of
from .state import Baseline, FlexSource, NodeView, RunView, State

KEPT_SAMPLES = 240
TOP_SHARE = 0.1  # arXiv 2609.11542: draw and throughput are the mean of the top 10 % of samples
BOUND_MARGIN_MW = 1000
BEYOND_BASELINE = 1.1


class Granted(NamedTuple):
    """The flex that counts. ``word``: what the user asked for, and ``source`` where; empty when nothing was asked.

    ``note`` says in words what differs from what the user may expect.
    """

    flex: Flex
    note: str
    word: str
    source: FlexSource


def effective_flex(word: str, job: JobInfo | None, config: Config) -> Granted:
    """What the site grants of what the user asked: ``word``, from ``--power-flex``, else what the job's comment says.

    ``none`` is granted only to the partitions, accounts and QOS that the site lists; else it is read as ``low``.
    A word that is no flex is read as the site's default and said so: it came from a user. ``job`` is None while
    Slurm has not described it.
    """
    policy = config.policy
    word, source, notes = _asked(word, "" if job is None else job.comment)
    flex = parse_flex(word if is_flex(word) else "auto", site_default=policy.default_flex)
    allowed = job is not None and (
        job.partition in policy.none_partitions
        or job.account in policy.none_accounts
        or job.qos in policy.none_qos
    )
    if flex.is_none and not allowed:
        flex = parse_flex("low")
        notes.append("none is not allowed here; read as low")
    return Granted(flex, "; ".join(notes), word, source)


def _asked(flag: str, comment: str) -> tuple[str, FlexSource, list[str]]:
    """The user's word, where it came from, and what is to be said about it. The flag beats the comment."""
    if flag and not is_flex(flag):
        return flag, "flag", ["not a flex; the site's default counts"]
    stated, wrong = flex_in_comment(comment), no_flex_in_comment(comment)
    counts = f"--power-flex={flag}" if flag else f"pfi:{stated}" if stated else "the site's default"
    notes = []
    if flag and stated and flag != stated:
        notes.append(f"{counts} counts, not pfi:{stated} in the comment")
    if wrong is not None:
        notes.append(f"{wrong} in the comment is not a flex; {counts} counts")
    if flag:
        return flag, "flag", notes
    return (stated, "comment", notes) if stated else ("", "", notes)


def run_over(run: Run, job: JobInfo) -> str:
    """Why this run has ended by Slurm's own record, though its job file is still there; empty if it may go on.

    A file that outlived its epilog would else keep its GPUs from the jobs that got them next.
    """
    if job.restart > run.restart:
        return f"Slurm runs restart {job.restart} of it"
    if job.restart == run.restart and not job.holds_nodes:
        return f"Slurm says that it is {job.state}"
    return ""


def misplaced(run: Run, job: JobInfo) -> str:
    """Why Slurm's own record is of another run of this job; empty when it is this one."""
    return f"Slurm knows restart {job.restart} of it" if job.restart != run.restart else ""


def contradiction(job: JobInfo, node: str, uid: int) -> str:
    """Why a node's word on a run contradicts Slurm's own; empty when it does not."""
    if node not in job.nodes:
        return f"reported by {node}, where Slurm does not run it"
    if uid != job.user_id:
        return f"reported by {node} for another user than Slurm's"
    return ""


# -------------------------------------------------------------------------------- who was there, whose are they


def _sharers(runs: dict[Run, RunView], report: Report, newcomer: RunReport) -> list[RunView]:
    """The runs known on this node that have a GPU of the newcomer's."""
    others = (runs.get(other.run) for other in report.runs if other.run != newcomer.run)
    return [
        view
        for view in others
        if view is not None and not set(newcomer.gpus).isdisjoint(view.gpus.get(report.node, ()))
    ]


def taken(runs: dict[Run, RunView], report: Report, newcomer: RunReport) -> bool:
    """Whether a GPU of the newcomer is an admitted run's: then it is no proof that the newcomer was admitted too."""
    return any(view.phase == "admitted" for view in _sharers(runs, report, newcomer))


def doubt(runs: dict[Run, RunView], report: Report, newcomer: RunReport, now_ns: int) -> None:
    """Ask Slurm again about runs whose GPUs a newcomer has: one of them has ended, and its file stayed behind."""
    for view in _sharers(runs, report, newcomer):
        if view.phase != "gone":
            runs[view.run] = msgspec.structs.replace(view, read_due_ns=now_ns)


def was_raised(report: Report, run: Run, config: Config) -> bool:
    """Whether a GPU of the run is above the park cap: then there was no window, or somebody admitted it before us."""
    park_mw = node_park_mw(report.gpus, config)
    return any(
        run in gpu.runs and (gpu.enforced_mw is None or gpu.enforced_mw > parked_mw(gpu, park_mw))
        for gpu in report.gpus
    )


def uids(state: State, view: RunView) -> dict[str, int]:
    """The user that each node of a run reports it for."""
    found: dict[str, int] = {}
    for name in view.gpus:
        node = state.nodes.get(name)
        for run_report in node.report.runs if node is not None and node.report is not None else ():
            if run_report.run == view.run:
                found[name] = run_report.uid
    return found


# -------------------------------------------------------------------------------------------------- baseline


def observe_baseline(
    baseline: Baseline, gpus: tuple[GpuReport, ...], report: RunReport, now_ns: int, baseline_s: float
) -> Baseline:
    """Add one report of an uncapped run; any binding cap starts the clock anew but keeps what was seen.

    A run that draws more under a cap than it ever did without one had not begun to train when it was seen: its
    baseline, and a floor made from it, would hold it down for as long as the window lasts.
    """
    uncapped = all(
        gpu.enforced_mw is not None and gpu.enforced_mw >= prior_of(gpu) - BOUND_MARGIN_MW for gpu in gpus
    )
    draws = [gpu.draw_mw for gpu in gpus]
    if not draws or any(draw is None for draw in draws):
        return msgspec.structs.replace(baseline, since_ns=None)
    draw_mw = round(sum(draw for draw in draws if draw is not None) / len(draws))
    if not uncapped:
        if baseline.seen and draw_mw > (baseline.draw_mw or 0) * BEYOND_BASELINE:
            return Baseline()
        return msgspec.structs.replace(baseline, since_ns=None)
    rate = report.progress.rate_per_s if report.progress else None
    samples = (*baseline.samples, (draw_mw, rate))[-KEPT_SAMPLES:]
    since_ns = now_ns if baseline.since_ns is None else baseline.since_ns
    seen = baseline.seen or now_ns - since_ns >= baseline_s * NS_PER_S
    return Baseline(
        since_ns=since_ns,
        samples=samples,
        seen=seen,
        draw_mw=_top_mean([draw for draw, _ in samples]),
        rate_per_s=_top_rate([rate for _, rate in samples if rate is not None]),
    )


def _top_mean(values: list[int]) -> int:
    kept = sorted(values, reverse=True)[: max(1, math.ceil(len(values) * TOP_SHARE))]
    return round(sum(kept) / len(kept))


def _top_rate(rates: list[float]) -> float | None:
    if not rates:
        return None
    kept = sorted(rates, reverse=True)[: max(1, math.ceil(len(rates) * TOP_SHARE))]
    return sum(kept) / len(kept)


# -------------------------------------------------------------------------------------------------- demand


def run_gpus(run: RunView, nodes: dict[str, NodeView]) -> list[GpuReport]:
    """The reports of all its GPUs on all its nodes, as far as known."""
    found: list[GpuReport] = []
    for name, uuids in run.gpus.items():
        report = nodes[name].report
        if report is not None:
            found.extend(gpu for gpu in report.gpus if gpu.uuid in uuids)
    return found


def demand_of(
    run: RunView, gpus: list[GpuReport], curve: ElasticityCurve, greatest_reduction: float, margin: float
) -> RunDemand:
    """What the allocation must know of an admitted run; ``gpus`` are those that can be commanded, at least one.

    A run never seen uncapped is *bounded*: its baseline draw is taken as its prior limit, the most it can be, which
    puts its floor at the safe, high side.
    """
    ceiling_mw = max(prior_of(gpu) for gpu in gpus)
    device_min_mw = max(gpu.min_mw for gpu in gpus)
    draw_mw = ceiling_mw
    if run.baseline.seen and run.baseline.draw_mw is not None:
        draw_mw = min(ceiling_mw, round(run.baseline.draw_mw * (1 + margin)))
    flex = run.flex
    floor_mw = ceiling_mw
    if flex is not None and not flex.is_none:
        base_mw = draw_mw
        if run.baseline.seen and run.baseline.draw_mw is not None:
            base_mw = min(ceiling_mw, run.baseline.draw_mw)
        floor_mw = math.ceil(base_mw * (1 - greatest_reduction))
    floor_mw = min(ceiling_mw, max(floor_mw, device_min_mw))
    return RunDemand(
        run=run.run,
        gpus=len(gpus),
        ceiling_mw=ceiling_mw,
        draw_mw=max(draw_mw, floor_mw),
        floor_mw=floor_mw,
        device_min_mw=device_min_mw,
        curve=curve,
        flex_none=flex is not None and flex.is_none,
    )
