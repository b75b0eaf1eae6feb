"""Runs: who may be flexible how much, what a run draws uncapped, and what it asks of the allocation."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from ..allocation.problem import RunDemand
from ..config import Config
from ..elasticity.curve import ElasticityCurve
from ..flex import flex_in_comment, is_flex, no_flex_in_comment, parse_flex
from ..model import Flex, GpuReport, Progress, Report, Run, RunReport
from ..slurm.backend import JobInfo
from .budget import node_park_mw, parked_mw
from .ledger import NS_PER_S, prior_of
from .measuring.activity import UNTAUGHT, pace_of
from .measuring.sample import Sample
from .state import FlexSource, NodeView, RunView, State

BOUND_MARGIN_MW = 1000
MOST_COUNTED = 1e24
MOST_AGE_S = 1e8
RESTS = 0.5
"""A suspended run below this share of its baseline draw is not at work."""


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
    if flex.is_none and not may_have_none(job, config):
        flex = parse_flex("low")
        notes.append("none is not allowed here; read as low")
    return Granted(flex, "; ".join(notes), word, source)


def may_have_none(job: JobInfo | None, config: Config) -> bool:
    """Whether the site grants ``none`` to this job, if it asks for it."""
    policy = config.policy
    return job is not None and (
        job.partition in policy.none_partitions
        or job.account in policy.none_accounts
        or job.qos in policy.none_qos
    )


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


def overtaken(runs: dict[Run, RunView], job: JobInfo) -> list[RunView]:
    """The earlier runs of a job that Slurm runs anew: they are over, also on a node that died and says nothing more."""
    earlier = (view for run, view in runs.items() if run.job_id == job.job_id and run.restart < job.restart)
    return [view for view in earlier if view.phase != "gone"]


def superseded(run: Run, runs: dict[Run, RunView]) -> bool:
    """Whether a later run of its job is alive by Slurm's word: a node's word alone ends no run of another node."""
    return any(
        known.job_id == run.job_id
        and known.restart > run.restart
        and view.job is not None
        and view.phase not in ("gone", "refused")
        for known, view in runs.items()
    )


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


# -------------------------------------------------------------------------------------------------- samples


def sample_of(
    view: RunView, report: Report, nodes: dict[str, NodeView], now_ns: int, silent_s: float
) -> Sample | None:
    """This report as a sample of the run; None where another of its nodes is the one that samples come from.

    That is the first by name that tells a counter, else the first: ranks beside rank 0 mostly tell nothing. The GPUs of
    the other nodes are as last told; what one has not told, or not for ``silent_s``, is unknown for the run. ``nodes``
    may hold the report before this one.
    """
    reports = {
        name: report if name == report.node else _lately(nodes, name, now_ns, silent_s) for name in view.gpus
    }
    told = {name: _progress(view.run, last) for name, last in reports.items()}
    if report.node != min(
        (name for name, progress in told.items() if progress is not None), default=min(view.gpus)
    ):
        return None
    heard = [
        (gpu, now_ns if name == report.node else nodes[name].heard_ns)
        for name, last in reports.items()
        for gpu in (() if last is None else last.gpus)
        if gpu.uuid in view.gpus[name]
    ]
    gpus = [gpu for gpu, _ in heard]
    number = sum(len(uuids) for uuids in view.gpus.values())
    caps = [gpu.enforced_mw for gpu in gpus if gpu.enforced_mw is not None]
    free = [
        cap_mw >= prior_of(gpu) - BOUND_MARGIN_MW for gpu in gpus if (cap_mw := gpu.enforced_mw) is not None
    ]
    progress = told[report.node]
    draw_mw = _mean([gpu.draw_mw for gpu in gpus], number)
    return Sample(
        now_ns=now_ns,
        gpus=number,
        draw_mw=draw_mw,
        # The energy counter misses nothing; an instant draw is one of many.
        mean_mw=_mean([gpu.draw_mw if gpu.mean_mw is None else gpu.mean_mw for gpu in gpus], number),
        cap_mw=max(caps) if number and len(caps) == number else None,
        lowest_mw=min(caps) if number and len(caps) == number else None,
        prior_mw=max((prior_of(gpu) for gpu in gpus), default=None),
        uncapped=len(free) == number and all(free),
        counter=None if progress is None else progress.counter,
        counter_ns=None if progress is None else now_ns - round(progress.age_s * NS_PER_S),
        unit="" if progress is None else progress.unit,
        node=report.node,
        pace=pace_of(heard, number),
        slowed=any(gpu.slowed in UNTAUGHT for gpu in gpus) or _rests(view, draw_mw),
        total=_total(progress),
    )


def _total(progress: Progress | None) -> float | None:
    """What the counter will be at the end of the work; a figure that nothing can have is none."""
    total = None if progress is None else progress.total
    return total if total is not None and 0 < total <= MOST_COUNTED else None


def _rests(view: RunView, draw_mw: int | None) -> bool:
    """Whether Slurm has suspended the run and its GPUs idle: as while heat holds them down, nothing is learned of caps.

    When it was resumed, Slurm is asked only at the next reading of all jobs; its GPUs show it before.
    """
    if view.job is None or view.job.state != "SUSPENDED" or draw_mw is None:
        return False
    known_mw = view.record.draw_mw
    return known_mw is None or draw_mw < RESTS * known_mw


def _mean(values_mw: list[int | None], number: int) -> int | None:
    """The mean of a value for each of ``number`` GPUs; None where one is missing."""
    known_mw = [value_mw for value_mw in values_mw if value_mw is not None]
    return round(sum(known_mw) / number) if number and len(known_mw) == number else None


def _lately(nodes: dict[str, NodeView], name: str, now_ns: int, silent_s: float) -> Report | None:
    """The last report of a node, unless it is too old to say what is."""
    node = nodes.get(name)
    return None if node is None or now_ns - node.heard_ns > silent_s * NS_PER_S else node.report


def _progress(run: Run, report: Report | None) -> Progress | None:
    """What a node tells of a run's counter; figures that no counter has are as good as none."""
    for run_report in () if report is None else report.runs:
        if run_report.run == run:
            told = run_report.progress
            if told is None or not (0 <= told.counter <= MOST_COUNTED and 0 <= told.age_s <= MOST_AGE_S):
                return None
            return told
    return None


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
    known_mw = run.record.draw_mw
    if known_mw is not None:
        draw_mw = min(ceiling_mw, round(known_mw * (1 + margin)))
    flex = run.flex
    floor_mw = ceiling_mw
    if flex is not None and not flex.is_none:
        base_mw = ceiling_mw if known_mw is None else min(ceiling_mw, known_mw)
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
