"""Faults planted in what is made of time limits."""

from __future__ import annotations

from typing import Final

from .mutant import Mutant

PURE: Final = ("tests/test_deadline.py",)
CORE: Final = ("tests/test_timelimits.py",)
WRITER: Final = ("tests/test_time_limit_writer.py",)
ROOM: Final = ("tests/test_slurm_timelimit.py",)

TIME_MUTANTS: Final = (
    Mutant(
        name="a-deadline-by-the-mean-rate",
        invariant="5",
        file="controller/deadline.py",
        old="    slow = _pace(work, -Z95_ONE_SIDED)\n",
        new="    slow = _pace(work, 0.0)\n",
        tests=PURE,
    ),
    Mutant(
        name="stalls-are-work",
        invariant="5",
        file="controller/deadline.py",
        old="    return work.rate_per_s * (1 - stalled) * max(",
        new="    return work.rate_per_s * max(",
        tests=PURE,
    ),
    Mutant(
        name="caps-last-for-a-moment",
        invariant="5",
        file="controller/deadline.py",
        old="    return 1.0 if spare_s >= capped_s else spare_s / capped_s\n",
        new="    return 1.0 if spare_s > 0 else 0.0\n",
        tests=PURE,
    ),
    Mutant(
        name="a-bound-that-follows-noise",
        invariant="5",
        file="controller/deadline.py",
        old="before.max_loss < bound < before.max_loss + LOOSER_BY",
        new="before.max_loss < bound < before.max_loss",
        tests=PURE,
    ),
    Mutant(
        name="a-floor-that-ignores-the-time-limit",
        invariant="5",
        file="controller/shares.py",
        old="reports[0].model, view.max_loss)",
        new="reports[0].model, view.flex.max_loss if view.flex else 0.0)",
        tests=CORE,
    ),
    Mutant(
        name="a-total-gives-none-to-everybody",
        invariant="5",
        file="controller/timelimits.py",
        old="    if may_have_none(view.job, config):\n        return 0.0\n",
        new="    if may_have_none(view.job, config) or view.job is not None:\n        return 0.0\n",
        tests=CORE,
    ),
    Mutant(
        name="a-limit-changed-later-is-not-seen",
        invariant="5",
        file="controller/core.py",
        old="        return all_timed(state, event, now_ns), actions\n",
        new="        return state, actions\n",
        tests=CORE,
    ),
    Mutant(
        name="time-for-a-counter-that-is-not-believed",
        invariant="time limits",
        file="controller/measuring/record.py",
        old="        if self._lost()[0] is None:\n            return None\n        tally = self.tally\n",
        new="        tally = self.tally\n",
        tests=(*CORE, "tests/test_lost_time.py"),
    ),
    Mutant(
        name="given-again-after-a-restart",
        invariant="time limits",
        file="controller/worker/time_limit_writer.py",
        old="        more_s = owed_s(order.lost_s, given_s)\n",
        new="        more_s = owed_s(order.lost_s, 0)\n",
        tests=WRITER,
    ),
    Mutant(
        name="an-answer-that-did-not-come-is-a-refusal",
        invariant="time limits",
        file="controller/worker/time_limit_writer.py",
        old="done=job.limit_s != under_way.old_s",
        new="done=False",
        tests=WRITER,
    ),
    Mutant(
        name="a-requeued-run-begins-without-a-gift",
        invariant="time limits",
        file="store/given.py",
        old="known.restart <= run.restart",
        new="known.restart == run.restart",
        tests=WRITER,
    ),
    Mutant(
        name="into-a-reservation",
        invariant="time limits",
        file="slurm/timelimit.py",
        old="None if one.nodes.isdisjoint(job.nodes) else one.start_unix_s",
        new="None if one.nodes.isdisjoint(job.nodes) else one.end_unix_s",
        tests=ROOM,
    ),
    Mutant(
        name="beyond-the-partition",
        invariant="time limits",
        file="slurm/timelimit.py",
        old="room.partition_s < wanted_s",
        new="room.partition_s < job.limit_s",
        tests=ROOM,
    ),
)
