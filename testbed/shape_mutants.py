"""Mutants of what a run is, and of job shapes that are seldom: requeued, suspended, on a node that died."""

from __future__ import annotations

from typing import Final

from .mutant import Mutant

IDENTITY: Final = ("tests/test_run_identity.py",)

SHAPE_MUTANTS: Final = (
    Mutant(
        name="a-run-lives-on-where-its-node-died",
        invariant="A8",
        file="controller/core.py",
        old="            for earlier in overtaken(runs, event.job):\n",
        new="            for earlier in ():\n",
        tests=IDENTITY,
    ),
    Mutant(
        name="any-other-run-of-an-id-is-over",
        invariant="A8",
        file="controller/runs.py",
        old="if run.job_id == job.job_id and run.restart < job.restart)",
        new="if run.job_id == job.job_id and run.restart != job.restart)",
        tests=IDENTITY,
    ),
    Mutant(
        name="a-boot-brings-an-old-run-back",
        invariant="A8",
        file="controller/core.py",
        old="        if superseded(run, state.runs):\n",
        new="        if False:\n",
        tests=IDENTITY,
    ),
    Mutant(
        name="a-node-s-word-ends-a-run-of-another-node",
        invariant="A8",
        file="controller/runs.py",
        old='        and view.phase not in ("gone", "refused")\n',
        new="",
        tests=IDENTITY,
    ),
    Mutant(
        name="a-run-takes-over-what-an-earlier-one-of-its-id-showed",
        invariant="A8",
        file="store/history_db.py",
        old=" AND boot = ? AND t >= ?",
        new=" AND boot = ? AND ? >= 0",
        tests=("tests/test_remembered.py",),
    ),
    Mutant(
        name="an-id-is-as-large-as-its-digits",
        invariant="A10",
        file="node/jobfile.py",
        old="    if job_id > MAX_JOB_ID:\n",
        new="    if False:\n",
        tests=IDENTITY,
    ),
    Mutant(
        name="a-job-without-an-epilog-is-never-over",
        invariant="A11",
        file="controller/core.py",
        old='            if view.phase != "gone" and settled and (run.job_id, run.restart) not in alive:\n',
        new="            if False:\n",
        tests=IDENTITY,
    ),
    Mutant(
        name="idle-hours-of-a-suspended-run-are-its-baseline",
        invariant="a suspended run keeps its baseline",
        file="controller/runs.py",
        old=" or _rests(view, draw_mw),\n",
        new=",\n",
        tests=("tests/test_suspended.py",),
    ),
    Mutant(
        name="a-node-is-given-up-while-it-is-heard",
        invariant="3",
        file="controller/nodes.py",
        old="        if to_observe and state.window is not None and not given_up:\n",
        new="        if to_observe and state.window is not None and False:\n",
        tests=("tests/test_controller_shell.py",),
    ),
    Mutant(
        name="a-task-is-told-by-a-number-of-its-own",
        invariant="tasks and components are named as Slurm names them",
        file="cli/common.py",
        old="    name = names.get(run) or job\n",
        new="    name = job\n",
        tests=("tests/test_cli_forecast.py",),
    ),
)
