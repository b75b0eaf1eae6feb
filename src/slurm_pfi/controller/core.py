"""The controller's core: ``step(state, event, now_ns) -> (state, actions)``, with no clock, socket or Slurm in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatchmethod

import msgspec

from ..config import Config
from ..model import Flex, Report, Run, RunReport
from ..slurm.backend import JobInfo
from .announce import admitted_fields
from .boards import answered, shares_now, unmeasured
from .kinship import with_recalled
from .learning import curves_learned, due_learning
from .ledger import NS_PER_S, still_outstanding
from .measuring.measured import observe
from .planning import plan_cycle
from .remembered import with_kept
from .runs import (
    contradiction,
    doubt,
    effective_flex,
    misplaced,
    overtaken,
    run_over,
    sample_of,
    superseded,
    taken,
    uids,
    was_raised,
)
from .science import Science
from .shares import has_its_floor
from .sound import refusal, sound
from .state import (
    Action,
    AllJobsRead,
    Audit,
    CurvesLearned,
    Cycle,
    EpochTaken,
    Event,
    JobRead,
    LimitsChanged,
    NeedEpoch,
    NodeLost,
    NodeView,
    OffChanged,
    ReadAllJobs,
    ReadJob,
    ReportCame,
    RunView,
    State,
    TagWritten,
    TimeLimitRaised,
)
from .tags import due_tags, due_with_limits, first_tag_s, tag_written
from .timelimits import all_timed, due_deadlines, due_raises, limit_raised, timed

RETRY_READ_S = 5.0  # Slurm could not be asked about a run: ask again after this long
READ_FOREVER_S = 60.0  # a run that Slurm contradicts is asked about again this often
EPOCH_GAP_S = 5.0  # a node that claims ever higher epochs must not unfence the whole site all the time
MAX_STRANGERS = 1024  # refused nodes that are remembered, so that each is told of once

Result = tuple[State, list[Action]]


@dataclass(frozen=True)
class Core:
    """The rules of this site applied to events, one after the other."""

    config: Config
    science: Science

    def step(self, state: State, event: Event, now_ns: int) -> Result:
        """The state after ``event`` and what has to be done, in order. Never raises on any event."""
        return self._on(event, state, now_ns)

    @singledispatchmethod
    def _on(self, event: object, state: State, now_ns: int) -> Result:
        raise TypeError(f"no event of the controller: {event!r}")

    # ------------------------------------------------------------------------------------------- time

    @_on.register
    def _cycle(self, event: Cycle, state: State, now_ns: int) -> Result:
        actions: list[Action] = []
        state, reads = self._ask_slurm(state, now_ns)
        actions.extend(reads)
        if not self._settled(state, now_ns):
            return state, actions
        state = msgspec.structs.replace(state, planned=True)
        state, told = due_deadlines(state, self.config, now_ns, event.now_unix_s)
        actions.extend(told)
        before = state
        state, planned = plan_cycle(state, self.config, self.science, now_ns, event.now_unix_s)
        actions.extend(planned)
        state = due_with_limits(before, state, now_ns)
        state, tags = due_tags(state, self.config, self.science, now_ns, event.now_unix_s)
        actions.extend(tags)
        state, raises = due_raises(state, self.config, now_ns)
        actions.extend(raises)
        state, learn = due_learning(state, self.config, self.science, now_ns)
        actions.extend(learn)
        return state, actions

    def _settled(self, state: State, now_ns: int) -> bool:
        """Whether a new commander has heard all nodes, or given them their time to speak. Until then it plans nothing.

        And Slurm's word on runs that share a GPU: who of them allows least, no other tells. The nodes hold the plans of
        its predecessor meanwhile.
        """
        if now_ns - state.started_ns >= self.config.times.start_settle_s * NS_PER_S:
            return True
        heard = all(node.report is not None for node in state.nodes.values())
        return heard and all(answered(view) for view in state.runs.values() if view.shares)

    def _ask_slurm(self, state: State, now_ns: int) -> Result:
        actions: list[Action] = []
        runs = dict(state.runs)
        for run, view in state.runs.items():
            if not view.reading and view.read_due_ns is not None and view.read_due_ns <= now_ns:
                runs[run] = msgspec.structs.replace(view, reading=True)
                actions.append(ReadJob(run=run))
        if state.runs and not state.reading_all and state.full_read_due_ns <= now_ns:
            actions.append(ReadAllJobs())
            state = msgspec.structs.replace(state, reading_all=True)
        return msgspec.structs.replace(state, runs=runs), actions

    # ------------------------------------------------------------------------------------------- nodes

    @_on.register
    def _report(self, event: ReportCame, state: State, now_ns: int) -> Result:
        report = event.report
        node = state.nodes.get(report.node)
        if node is None or report.cluster != self.config.cluster:
            return _refused(state, report, "no node set names it")
        if reason := refusal(report):
            return _refused(state, report, reason)
        if _is_late(node, report):
            return state, []
        report = sound(report, node)
        actions: list[Action] = []
        if report.highest_epoch > state.epoch and now_ns >= state.epoch_due_ns:
            actions.append(NeedEpoch(above=report.highest_epoch))
            state = msgspec.structs.replace(state, epoch_due_ns=now_ns + round(EPOCH_GAP_S * NS_PER_S))
        first = node.report is None or node.report.id.agent_id != report.id.agent_id
        state, told = self._take_runs(state, report, now_ns, first=first)
        actions.extend(told)
        node = _node_after(node, report, event.priors, state.epoch, now_ns)
        nodes = {**state.nodes, report.node: node}
        return msgspec.structs.replace(state, nodes=nodes), actions

    def _take_runs(self, state: State, report: Report, now_ns: int, *, first: bool) -> Result:
        actions: list[Action] = []
        runs = dict(state.runs)
        present = {run.run for run in report.runs}
        before = state.nodes[report.node].report
        known = {run.run for run in before.runs} if before is not None else set()
        # The newest first: where two runs claim one GPU, the older job's file has most likely stayed behind.
        for run_report in sorted(report.runs, key=lambda run_report: run_report.run, reverse=True):
            view = runs.get(run_report.run)
            # A run without GPUs is no business of ours; one that had some keeps them until the node tells others.
            if not run_report.gpus or run_report.run.cluster != self.config.cluster:
                continue
            if view is None:
                view, told = self._newcomer(state, runs, report, run_report, now_ns, first=first)
                actions.extend(told)
                doubt(runs, report, run_report, now_ns)
            elif view.job is not None and report.node not in view.gpus:
                wrong = contradiction(view.job, report.node, run_report.uid)
                if wrong:
                    if run_report.run not in known:
                        actions.append(_run_refused(view.run, wrong))
                    continue
            view = msgspec.structs.replace(view, gpus={**view.gpus, report.node: run_report.gpus})
            runs[run_report.run] = self._measure(view, state.nodes, report, now_ns)
        for run in known - present:
            view = runs.get(run)
            if view is None or report.node not in view.gpus:
                continue
            gpus = {name: uuids for name, uuids in view.gpus.items() if name != report.node}
            if gpus:
                runs[run] = msgspec.structs.replace(view, gpus=gpus)
                continue
            del runs[run]
            actions.append(Audit(event="ended", fields={"run": str(run), "nodes": sorted(view.gpus)}))
        return msgspec.structs.replace(state, runs=runs), actions

    def _newcomer(
        self,
        state: State,
        runs: dict[Run, RunView],
        report: Report,
        run_report: RunReport,
        now_ns: int,
        *,
        first: bool,
    ) -> tuple[RunView, list[Action]]:
        """A run not known so far. Inside a window it waits for power, unless it was there before we were."""
        run = run_report.run
        view = RunView(
            run=run,
            first_seen_ns=now_ns,
            user_flex=run_report.flex,
            read_due_ns=now_ns,
            gpus={report.node: run_report.gpus},
        )
        if superseded(run, state.runs):
            return msgspec.structs.replace(view, phase="gone", read_due_ns=None), []
        raised = was_raised(report, run, self.config) and not taken(runs, report, run_report)
        in_window = state.window is not None or not state.planned
        if not in_window or (first and raised):
            # Slurm may be slow or down: until it answers, the site's default flex counts, never less than that.
            flex = effective_flex(run_report.flex, None, self.config)[0]
            view = msgspec.structs.replace(view, phase="admitted", flex=flex)
            return view, [Audit(event="admitted", fields=admitted_fields(view))]
        return msgspec.structs.replace(view, started_in_window=True), []

    def _measure(self, view: RunView, nodes: dict[str, NodeView], report: Report, now_ns: int) -> RunView:
        if shared := shares_now(view, nodes, report):
            return unmeasured(view, shared)
        times = self.config.times
        view = msgspec.structs.replace(view, shares=False)
        sample = sample_of(view, report, nodes, now_ns, times.node_silent_s)
        if sample is None:
            return view
        view = with_recalled(view, nodes)
        return msgspec.structs.replace(view, record=observe(view.record, sample, times))

    @_on.register
    def _lost(self, event: NodeLost, state: State, now_ns: int) -> Result:
        node = state.nodes.get(event.node)
        if node is None:
            return state, []
        nodes = {**state.nodes, event.node: msgspec.structs.replace(node, connected=False)}
        return msgspec.structs.replace(state, nodes=nodes), []

    @_on.register
    def _epoch(self, event: EpochTaken, state: State, now_ns: int) -> Result:
        nodes = {name: msgspec.structs.replace(node, fenced=False) for name, node in state.nodes.items()}
        state = msgspec.structs.replace(state, epoch=event.epoch, nodes=nodes)
        return state, [Audit(event="leader", fields={"epoch": event.epoch})]

    # ------------------------------------------------------------------------------------------- Slurm

    @_on.register
    def _job(self, event: JobRead, state: State, now_ns: int) -> Result:
        view = state.runs.get(event.run)
        if view is None:
            return state, []
        view = msgspec.structs.replace(view, reading=False)
        actions: list[Action] = []
        if event.unavailable:
            retry_ns = now_ns + round(RETRY_READ_S * NS_PER_S)
            view = msgspec.structs.replace(view, read_due_ns=retry_ns)
        elif event.job is None or (over := run_over(event.run, event.job)):
            view, told = _over(view, "Slurm does not know it" if event.job is None else over)
            actions.append(told)
        else:
            view, actions = self._identified(state, view, event.job, now_ns)
            view = with_kept(timed(view, event.job, event.read_unix_s, now_ns), event.kept)
            view = msgspec.structs.replace(view, given_s=event.given_s)
            view = with_recalled(msgspec.structs.replace(view, kins=event.kins), state.nodes)
        runs = {**state.runs, event.run: view}
        if event.job is not None:
            for earlier in overtaken(runs, event.job):
                runs[earlier.run], told = _over(earlier, run_over(earlier.run, event.job))
                actions.append(told)
        return msgspec.structs.replace(state, runs=runs), actions

    def _identified(
        self, state: State, view: RunView, job: JobInfo, now_ns: int
    ) -> tuple[RunView, list[Action]]:
        strangers = {
            name: wrong for name, uid in uids(state, view).items() if (wrong := contradiction(job, name, uid))
        }
        wrong = misplaced(view.run, job) or (
            "; ".join(strangers.values()) if view.gpus.keys() <= strangers.keys() else ""
        )
        if wrong:
            again_ns = now_ns + round(READ_FOREVER_S * NS_PER_S)
            said = wrong != view.refusal
            view = msgspec.structs.replace(view, phase="refused", refusal=wrong, read_due_ns=again_ns)
            return view, [_run_refused(view.run, wrong)] if said else []
        # What a node claims that Slurm did not give it does not touch the run where it really is.
        told: list[Action] = [_run_refused(view.run, reason) for reason in strangers.values()]
        gpus = {name: uuids for name, uuids in view.gpus.items() if name not in strangers}
        flag = "" if view.flex_source == "comment" else view.user_flex
        flex, note, word, source = effective_flex(flag, job, self.config)
        phase = "waiting" if view.started_in_window and view.phase in ("new", "refused") else view.phase
        if phase in ("new", "refused") or (phase == "waiting" and self._was_there(state, view, flex)):
            phase = "admitted"
        changed = phase != view.phase or flex != view.flex
        tag_due_ns = view.tag_due_ns
        if tag_due_ns is None:
            tag_due_ns = now_ns + round(first_tag_s(view, self.config) * NS_PER_S)
        view = msgspec.structs.replace(
            view,
            job=job,
            gpus=gpus,
            user_flex=word,
            flex_source=source,
            flex=flex,
            flex_note=note,
            phase=phase,
            refusal="",
            read_due_ns=None,
            tag_due_ns=tag_due_ns,
        )
        if phase == "admitted" and changed:
            told.append(Audit(event="admitted", fields=admitted_fields(view)))
        return view, told

    def _was_there(self, state: State, view: RunView, flex: Flex) -> bool:
        """Whether a new commander finds a run on shared GPUs that has its floor there: its predecessor let it in.

        Else who of them was seen first would stand for all, and a limit below their floors take it from the others.
        """
        if state.planned or not view.shares:
            return False
        return has_its_floor(msgspec.structs.replace(view, flex=flex), state, self.config, self.science)

    @_on.register
    def _all_jobs(self, event: AllJobsRead, state: State, now_ns: int) -> Result:
        """Reconcile: a run that Slurm no longer has on any node is gone. No answer changes nothing."""
        times = self.config.times
        if event.jobs is None:
            due_ns = now_ns + round(times.full_read_min_s * NS_PER_S)
            return msgspec.structs.replace(state, reading_all=False, full_read_due_ns=due_ns), []
        alive = {(job.job_id, job.restart) for job in event.jobs if job.holds_nodes}
        actions: list[Action] = []
        runs = dict(state.runs)
        for run, view in state.runs.items():
            settled = now_ns - view.first_seen_ns > times.full_read_min_s * NS_PER_S
            if view.phase != "gone" and settled and (run.job_id, run.restart) not in alive:
                runs[run], told = _over(view, "Slurm no longer runs it")
                actions.append(told)
        due_ns = now_ns + round(times.full_read_s * NS_PER_S)
        state = msgspec.structs.replace(state, runs=runs, reading_all=False, full_read_due_ns=due_ns)
        return all_timed(state, event, now_ns), actions

    # ------------------------------------------------------------------------------------------- orders

    @_on.register
    def _limits(self, event: LimitsChanged, state: State, now_ns: int) -> Result:
        runs = {
            run: msgspec.structs.replace(view, tag_due_ns=None if view.tag_due_ns is None else now_ns)
            for run, view in state.runs.items()
        }
        state = msgspec.structs.replace(
            state, limits=event.limits, limits_known=event.known, runs=runs, deadlines_due_ns=0
        )
        return state, []

    @_on.register
    def _off(self, event: OffChanged, state: State, now_ns: int) -> Result:
        fields = {"off": event.off, "uid": event.uid}
        return msgspec.structs.replace(state, off=event.off), [Audit(event="off", fields=fields)]

    @_on.register
    def _tag(self, event: TagWritten, state: State, now_ns: int) -> Result:
        return tag_written(state, event, self.config, now_ns), []

    @_on.register
    def _limit_raised(self, event: TimeLimitRaised, state: State, now_ns: int) -> Result:
        return limit_raised(state, event, now_ns)

    @_on.register
    def _learned(self, event: CurvesLearned, state: State, now_ns: int) -> Result:
        return curves_learned(state, event), []


def _node_after(node: NodeView, report: Report, priors: dict[str, int], epoch: int, now_ns: int) -> NodeView:
    rebooted = node.report is not None and node.report.id.boot_id != report.id.boot_id
    node = msgspec.structs.replace(
        node,
        report=report,
        heard_ns=now_ns,
        connected=True,
        priors=priors,
        outstanding=() if rebooted else node.outstanding,
        fenced=report.held is not None and report.held.epoch == epoch,
    )
    return msgspec.structs.replace(node, outstanding=still_outstanding(node))


def _is_late(node: NodeView, report: Report) -> bool:
    """Whether a later report of the same agent is known already."""
    return (
        node.report is not None
        and (node.report.id.boot_id, node.report.id.agent_id) == (report.id.boot_id, report.id.agent_id)
        and report.id.seq <= node.report.id.seq
    )


def _refused(state: State, report: Report, reason: str) -> Result:
    """A report that is not taken, told of once for each node and reason."""
    told = (report.cluster, report.node, reason)
    if told in state.strangers or len(state.strangers) >= MAX_STRANGERS:
        return state, []
    fields = {"node": report.node, "cluster": report.cluster, "reason": reason}
    state = msgspec.structs.replace(state, strangers=state.strangers | {told})
    return state, [Audit(event="report_refused", fields=fields)]


def _run_refused(run: Run, reason: str) -> Audit:
    return Audit(event="run_refused", fields={"run": str(run), "reason": reason})


def _over(view: RunView, reason: str) -> tuple[RunView, Audit]:
    """A run that has ended by Slurm's word, and what the audit is told of it."""
    fields = {"run": str(view.run), "nodes": sorted(view.gpus), "reason": reason}
    return msgspec.structs.replace(view, phase="gone", read_due_ns=None), Audit(event="ended", fields=fields)
