"""What a user is told of single runs: asked, known, done, cost. Values; the words are made where they are read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from ...bus.asking import NO, Reply, Request, refusal
from ...config import Config
from ...model import GpuReport
from ...store.history import History, HistoryError
from ...store.rows import EndedRun
from ...units import Z95
from ..knowledge import Knowledge
from ..learning import gpu_model
from ..ledger import NS_PER_S
from ..measuring.activity import lost_by_activity
from ..measuring.record import J_PER_WH, Record
from ..runs import run_gpus
from ..science import Science
from ..state import RunView, State
from ..tags import index_of
from ..views import run_view, uid_of
from .fresh import Fresh
from .privacy import Asker

if TYPE_CHECKING:
    from ..shell import Controller

CURVE_AT: Final = (0.05, 0.1, 0.2, 0.3, 0.4)
"""Reductions at which a run's curve is told."""

ENDED_S: Final = 86_400.0
MOST_ENDED: Final = 1_000
MOST_EVENTS: Final = 200
MOST_NAMED: Final = 8
HIDDEN: Final = ". Jobs of others are not told here: slurm.conf has PrivateData"
UNLIKELY: Final = "under its caps it showed more loss than a job like it can have"

ANSWERS: Final = frozenset({"job", "jobs"})

Number = Annotated[int, Meta(ge=0, le=2**32)]
T = TypeVar("T")


class JobQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``1234``, ``77_3`` (an array's task), ``80+1`` (a component), each with ``.R`` for one restart of it."""

    job_id: Number
    task: Number | None = None
    component: Number | None = None
    restart: Number | None = None

    @property
    def spec(self) -> str:
        """The job as Slurm's commands name it, without its restart."""
        if self.task is not None:
            return f"{self.job_id}_{self.task}"
        return str(self.job_id) if self.component is None else f"{self.job_id}+{self.component}"


class JobsQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``mine``: only runs of who asks. ``ended``: also those that ended within the last day."""

    mine: bool = False
    ended: bool = False


class Answers:
    """Answers ``job`` and ``jobs``. The history is read in a thread: nobody else waits for a disk."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._all_runs = Fresh(self._all_runs_now)

    async def answer(self, request: Request, asker: Asker) -> Reply:
        """One question; what is wrong with it is said in the reply."""
        try:
            if request.command == "jobs":
                return await self.jobs(request.args, asker)
            return await self.job(request.args, asker)
        except msgspec.ValidationError as error:
            return refusal(f"{request.command}: {error}")

    async def jobs(self, args: dict[str, Any], asker: Asker) -> Reply:
        """All runs that are known and the asker may see. Raises msgspec.ValidationError on a wrong question."""
        question = msgspec.convert(args, JobsQuestion)
        found = [
            asker.shown(told, uid)
            for uid, told in self._all_runs.get()
            if uid == asker.uid or (not question.mine and asker.may_see(uid))
        ]
        if question.ended:
            since_s = time.time() - ENDED_S
            uid = asker.uid if question.mine or not asker.may_see_cost(None) else None
            rows, trouble = await self._read(lambda history: history.ended_since(since_s, uid, MOST_ENDED))
            if rows is None:
                return refusal(trouble, exit_code=NO)
            running = {one["run"] for one in found}
            over = (asker.shown(ended_view(row), row.uid) for row in rows if row.run not in running)
            found = [*over, *found]
        return Reply(ok=True, data=found)

    def _all_runs_now(self) -> list[tuple[int | None, dict[str, Any]]]:
        state, now_ns = self._controller.state, time.monotonic_ns()
        views = sorted((view for view in state.runs.values() if _is_live(view)), key=lambda view: view.run)
        return [(uid_of(view, state), run_view(view, state, now_ns)) for view in views]

    async def job(self, args: dict[str, Any], asker: Asker) -> Reply:
        """One run in full. Raises msgspec.ValidationError on a wrong question."""
        question = msgspec.convert(args, JobQuestion)
        state = self._controller.state
        live = [view for view in live_runs(state, question) if asker.may_see_cost(uid_of(view, state))]
        ended, trouble = await self._read(
            lambda history: history.ended_of_spec(question.job_id, question.spec)
        )
        known = {str(view.run): self._live(view) for view in live}
        over = [row for row in ended or () if row.run not in known and asker.may_see_cost(row.uid)]
        known = {**{row.run: ended_view(row) for row in over}, **known}
        specs = sorted({one["spec"] for one in known.values()})
        if len(specs) > 1:
            return refusal(_several(question, specs), exit_code=NO)
        chosen = choose(list(known.values()), question.restart)
        if chosen is None:
            unheard = [name for name, node in state.nodes.items() if not node.connected]
            hidden = "" if asker.may_see_cost(None) else HIDDEN
            return refusal(
                f"{_unknown(question, list(known.values()), trouble, unheard)}{hidden}", exit_code=NO
            )
        events, event_trouble = await self._read(
            lambda history: history.events_of(chosen["run"], MOST_EVENTS)
        )
        data = {
            **asker.shown(chosen, chosen["uid"]),
            "asked_unix_s": time.time(),
            "events": None if events is None else [msgspec.to_builtins(event) for event in events],
            "events_trouble": event_trouble,
            "other_runs": sorted(run for run in known if run != chosen["run"]),
        }
        return Reply(ok=True, data=data)

    def _live(self, view: RunView) -> dict[str, Any]:
        control = self._controller
        now_ns, now_unix_s = time.monotonic_ns(), time.time()
        return job_view(view, control.state, control.config, control.core.science, now_ns, now_unix_s)

    async def _read(self, question: Callable[[History], T]) -> tuple[T | None, str]:
        """What the history says; None and why, where it cannot be read."""
        history = self._controller.history
        try:
            return await asyncio.to_thread(question, history), ""
        except HistoryError as error:
            return None, str(error)


# ------------------------------------------------------------------------------------------------ which run


def live_runs(state: State, question: JobQuestion) -> list[RunView]:
    """The runs that a question may mean: a bare id is also that of a whole array or heterogeneous job."""
    return [view for view in state.runs.values() if _is_live(view) and _meant(view, question)]


def _is_live(view: RunView) -> bool:
    """Not one that Slurm has ended while its node, dead perhaps, still has its job file: the history tells of it."""
    return view.phase != "gone"


def _meant(view: RunView, question: JobQuestion) -> bool:
    job = view.job
    if question.task is not None:
        return job is not None and (job.array_job_id, job.array_task_id) == (question.job_id, question.task)
    if question.component is not None:
        return job is not None and (job.het_job_id, job.het_offset) == (question.job_id, question.component)
    whole = () if job is None else (job.array_job_id, job.het_job_id)
    return view.run.job_id == question.job_id or question.job_id in whole


def choose(known: Sequence[dict[str, Any]], restart: int | None) -> dict[str, Any] | None:
    """The run of this restart; the newest with None. ``known`` are runs of one job."""
    if restart is not None:
        return next((one for one in known if one["restart"] == restart), None)
    return max(known, key=lambda one: int(one["restart"]), default=None)


def _several(question: JobQuestion, specs: Sequence[str]) -> str:
    more = f" and {len(specs) - MOST_NAMED} more" if len(specs) > MOST_NAMED else ""
    return (
        f"job {question.spec} has several parts, here are {', '.join(specs[:MOST_NAMED])}{more}; "
        f"ask for one of them: 'slurm-pfi job {specs[0]}'"
    )


def _unknown(
    question: JobQuestion, others: Sequence[dict[str, Any]], trouble: str, unheard: Sequence[str]
) -> str:
    if question.restart is not None and others:
        restarts = ", ".join(f"{question.spec}.{one['restart']}" for one in others)
        return f"job {question.spec} has no known restart {question.restart}; known: {restarts}"
    ended = (
        f"; whether it ended is not known: {trouble}" if trouble else ", and none of it that ended is kept"
    )
    return (
        f"job {question.spec} is not known: no run of it has a GPU now{ended}. A job is known once it has "
        f"started on a node with GPUs; 'slurm-pfi jobs --ended' lists those of the last day{_not_heard(unheard)}"
    )


def _not_heard(nodes: Sequence[str]) -> str:
    if not nodes:
        return ""
    more = f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
    return f". What runs on {', '.join(nodes[:MOST_NAMED])}{more} is not known: no agent is heard there"


# ------------------------------------------------------------------------------------------------ one run


def job_view(
    view: RunView, state: State, config: Config, science: Science, now_ns: int, now_unix_s: float
) -> dict[str, Any]:
    """All that is known of a run now: what ``jobs`` shows and more. Fit for JSON, and kept of runs that ended.

    Powers are of one GPU unless said. Unknown is None. Times ``*_unix_s`` are Unix seconds.
    """
    job, record, window = view.job, view.record, state.window
    knowledge = science.knowledge(state)
    model = gpu_model(view, state)
    gpus = run_gpus(view, state.nodes)
    return {
        **run_view(view, state, now_ns),
        "simulated": config.simulated,
        "uid": uid_of(view, state),
        "name": None if job is None else job.name,
        "account": None if job is None else job.account,
        "gpu_model": model or None,
        "prior_mw": max((gpu.prior_mw for gpu in gpus if gpu.prior_mw), default=None),
        "mode": sorted({state.nodes[name].mode for name in view.gpus}),
        "default_flex": config.policy.default_flex,
        "first_seen_unix_s": now_unix_s - (now_ns - view.first_seen_ns) / NS_PER_S,
        "ended_unix_s": None,
        "baseline": record.source,
        "baseline_draw_mw": record.mean_draw_mw,
        "baseline_rate_per_s": record.rate_per_s,
        "baseline_rate": record.rate_source,
        "baseline_sd": record.baseline_sd,
        "reporting": record.reporting,
        "unit": record.unit,
        "doubt": record.doubt or record.disputed or (UNLIKELY if record.unlikely else ""),
        "measured": record.measured and not view.shares,
        "shared_capped": record.shared,
        "learned": knowledge.is_learned(view.run),
        "pfi": asdict(index_of(view, gpus, config, science, knowledge)),
        "expected_loss_sd": view.expected_loss_sd,
        "curve": _curve(view, gpus, knowledge),
        "by_curves": _by_curves(view, knowledge, model),
        "by_activity": None if (shown := lost_by_activity(record)) is None else shown._asdict(),
        "cost": cost_of(record),
        "deadline": None if view.deadline is None else msgspec.to_builtins(view.deadline),
        "given_s": view.given_s,
        "raise_note": view.raise_note,
        "limit": None
        if window is None or view.target_cap_mw is None
        else {"limit_mw": window.limit_mw, "ids": list(window.limit_ids)},
    }


def summary_with(science: Science) -> Callable[[RunView, State, Config, int, float], dict[str, Any]]:
    """What the history keeps of a run that ended: all that ``job`` would have told of it."""
    return lambda view, state, config, now_ns, now_unix_s: job_view(
        view, state, config, science, now_ns, now_unix_s
    )


def ended_view(row: EndedRun) -> dict[str, Any]:
    """The same of a run that is over, as it was kept."""
    return {**row.value, "run": row.run, "state": "ended", "ended_unix_s": row.ended_unix_s}


def _curve(view: RunView, gpus: Sequence[GpuReport], knowledge: Knowledge) -> list[dict[str, float]]:
    """What caps cost the run by all that is known of it: expected loss (0..1) and its sd at some of its caps."""
    draw_mw = view.record.mean_draw_mw
    if not draw_mw or not gpus:
        return []
    least_mw = max(gpu.min_mw for gpu in gpus)
    reductions = [share for share in CURVE_AT if draw_mw * (1 - share) >= least_mw]
    mean, sd = knowledge.losses([(view.run, gpus[0].model)] * len(reductions), reductions)
    return [
        {"cap_mw": round(draw_mw * (1 - x)), "reduction": x, "loss": float(loss), "sd": float(error)}
        for x, loss, error in zip(reductions, mean, sd, strict=True)
    ]


def _by_curves(view: RunView, knowledge: Knowledge, model: str) -> dict[str, Any] | None:
    """What it is expected to have lost while capped, from its draws under caps; None without such draws."""
    draw_mw = view.record.mean_draw_mw
    if not draw_mw or view.record.shared:
        return None
    levels = [
        (level.draw_s, 1.0 - level.draw_mw / draw_mw)
        for level in view.record.levels
        if level.cap_mw is not None and level.draw_mw is not None and level.draw_mw < draw_mw
    ]
    seconds = sum(spent_s for spent_s, _ in levels)
    if seconds <= 0:
        return None
    mean, sd = knowledge.losses([(view.run, model)] * len(levels), [reduction for _, reduction in levels])
    weights = [spent_s / seconds for spent_s, _ in levels]
    # All levels go by one curve, so that their errors go together.
    return {
        "loss": sum(weight * float(one) for weight, one in zip(weights, mean, strict=True)),
        "sd": sum(weight * float(one) for weight, one in zip(weights, sd, strict=True)),
    }


def cost_of(record: Record) -> dict[str, Any]:
    """What caps have cost the run and saved. ``*_low`` and ``*_high``: 95 % interval. Energies are of all its GPUs."""
    totals = record.totals
    lost, sd, rate = totals.lost, totals.lost_sd, record.rate_per_s
    told: dict[str, Any] = {
        "known_s": totals.known_s,
        "capped_s": totals.capped_s,
        "drawn_wh": totals.drawn_j / J_PER_WH,
        "saved_wh": None if totals.saved_j is None else totals.saved_j / J_PER_WH,
        "done": totals.done if record.reporting else None,
        "lost": lost,
        "lost_low": None,
        "lost_high": None,
        "loss": record.loss,
        "loss_capped": record.loss_capped,
        "loss_capped_low": None,
        "loss_capped_high": None,
        "longer_s": None,
        "longer_low_s": None,
        "longer_high_s": None,
    }
    if lost is None or sd is None:
        return told
    told["lost_low"], told["lost_high"] = lost - Z95 * sd, lost + Z95 * sd
    longer_s = record.lost_s
    if rate and longer_s is not None:
        told["longer_s"] = longer_s
        told["longer_low_s"], told["longer_high_s"] = longer_s - Z95 * sd / rate, longer_s + Z95 * sd / rate
    if record.loss_capped is not None:
        done = record.tally.done_capped
        for end in ("low", "high"):
            at = told[f"lost_{end}"]
            told[f"loss_capped_{end}"] = at / (done + at) if done + at > 0 else None
    return told
