"""Mutants of what users are told: of others, by a tag alone, and in a job's own output."""

from __future__ import annotations

from typing import Final

from .mutant import Mutant

PRIVACY: Final = ("tests/test_privacy.py",)
LOGIN: Final = ("tests/test_login_words.py", "tests/test_sacct.py")
LINE: Final = ("tests/test_job_line.py",)
OTHERS: Final = "the jobs of others only as PrivateData allows"
TAG_ALONE: Final = "what a tag does not tell is unknown"

USER_MUTANTS: Final = (
    Mutant(
        name="a-run-that-nobody-owns-yet-is-everybody-s",
        invariant=OTHERS,
        file="controller/answers/privacy.py",
        old='        return owner == self.uid or "jobs" not in self.private\n',
        new='        return owner in (self.uid, None) or "jobs" not in self.private\n',
        tests=PRIVACY,
    ),
    Mutant(
        name="before-slurm-has-answered-nothing-is-private",
        invariant=OTHERS,
        file="controller/worker/private_data.py",
        old="        self.words = ALL_PRIVATE\n",
        new="        self.words = frozenset[str]()\n",
        tests=PRIVACY,
    ),
    Mutant(
        name="an-offer-names-whose-each-step-is",
        invariant=OTHERS,
        file="controller/answers/privacy.py",
        old='    names = tuple(run if asker.may_see(owners.get(run)) else "" for run in found.supply.run)\n',
        new="    names = found.supply.run\n",
        tests=PRIVACY,
    ),
    Mutant(
        name="what-happened-to-others-stands-in-the-report",
        invariant=OTHERS,
        file="controller/answers/privacy.py",
        old="        return not event.run or event.run in names or asker.may_see_cost(None)\n",
        new="        return True\n",
        tests=PRIVACY,
    ),
    Mutant(
        name="a-report-tells-what-status-keeps",
        invariant=OTHERS,
        file="controller/answers/privacy.py",
        old='        if event.kind == NODE_EVENT and "jobs" in asker.private:\n',
        new="        if False:\n",
        tests=PRIVACY,
    ),
    Mutant(
        name="faults-name-jobs-to-everybody",
        invariant=OTHERS,
        file="controller/answers/privacy.py",
        old='    if "jobs" not in asker.private:\n',
        new='    if "jobs" in asker.private:\n',
        tests=PRIVACY,
    ),
    Mutant(
        name="the-tag-of-the-run-before-counts-for-this-one",
        invariant=TAG_ALONE,
        file="cli/login_words.py",
        old="    if run.restart is not None and run.restart != tag.restart:\n",
        new="    if run.restart is None:\n",
        tests=LOGIN,
    ),
    Mutant(
        name="unknown-savings-are-none",
        invariant=TAG_ALONE,
        file="cli/login_words.py",
        old='"saved_wh": None if tag is None or tag.energy_wh is None else -tag.energy_wh,\n',
        new='"saved_wh": -((tag and tag.energy_wh) or 0),\n',
        tests=LOGIN,
    ),
    Mutant(
        name="runs-of-one-id-are-one-job-for-ever",
        invariant="identity is the run",
        file="slurm/sacct.py",
        old="        last = [*last, run] if goes_on else [run]\n",
        new="        last = [*last, run]\n",
        tests=LOGIN,
    ),
    Mutant(
        name="a-row-that-is-not-understood-is-left-out",
        invariant="unknown is never empty",
        file="slurm/tagged.py",
        old="            return Unavailable("
        'f"{command}\'s line on job {row[fields[0]][:20]!r} is not understood: {error}")\n',
        new="            continue\n",
        tests=LOGIN,
    ),
    Mutant(
        name="a-line-is-kept-for-a-run-that-is-not-here",
        invariant="a job's line is its own",
        file="node/joblines.py",
        old=" or name not in present:\n",
        new=":\n",
        tests=LINE,
    ),
    Mutant(
        name="lines-are-sent-where-nobody-asked-for-them",
        invariant="a job's line is off by default",
        file="controller/dispatch.py",
        old="if config.tag.job_line",
        new="if not config.tag.job_line or config.tag.job_line",
        tests=LINE,
    ),
)
