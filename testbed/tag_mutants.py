"""Mutants of the tag on its way into Slurm: the text of others, the pace, and whose tag it is."""

from __future__ import annotations

from typing import Final

from .mutant import Mutant

WRITING: Final = ("tests/test_tag_writing.py",)
WHEN: Final = ("tests/test_tags.py", "-k", "less_often or requeued")

TAG_MUTANTS: Final = (
    Mutant(
        name="text-that-reads-differently-is-rewritten",
        invariant="7: nothing foreign is damaged",
        file="slurm/tagwrite.py",
        old="        if not confirmed:\n",
        new="        if False:\n",
        tests=WRITING,
    ),
    Mutant(
        name="new-text-of-others-is-not-looked-at-twice",
        invariant="7: nothing foreign is damaged",
        file="slurm/tagwrite.py",
        old="    if before.text != known and foreign_text(before.text):\n",
        new="    if known is None and foreign_text(before.text):\n",
        tests=WRITING,
    ),
    Mutant(
        name="a-requeued-job-gets-the-old-runs-tag",
        invariant="a tag is of its own run",
        file="slurm/tagwrite.py",
        old="    if comment.restart in (None, job.restart):\n",
        new="    if True:\n",
        tests=WRITING,
    ),
    Mutant(
        name="a-backlog-bursts",
        invariant="20 writes/s",
        file="controller/worker/slurm_worker.py",
        old="            self._pace = self._pace.after(began_s, self._clock(), ok=ok, chance=self._chance())\n",
        new="            if not ok:\n"
        "                self._pace = self._pace.after(began_s, self._clock(), ok=ok, chance=self._chance())\n",
        tests=WRITING,
    ),
    Mutant(
        name="a-slow-slurmctld-is-pressed",
        invariant="back-off",
        file="controller/worker/pace.py",
        old="        strained = 0 if ok and ended_s - began_s <= SLOW_S else self.strained + 1\n",
        new="        strained = 0 if ok else self.strained + 1\n",
        tests=WRITING,
    ),
    Mutant(
        name="an-older-tag-of-a-run-wins",
        invariant="the newest tag of a run wins",
        file="controller/worker/slurm_worker.py",
        old="        self._tags[order.run] = order\n",
        new="        self._tags.setdefault(order.run, order)\n",
        tests=WRITING,
    ),
    Mutant(
        name="a-run-that-ended-is-tagged",
        invariant="a run that ended is dropped",
        file="controller/worker/slurm_worker.py",
        old="            if self._is_alive(order.run):\n",
        new="            if True:\n",
        tests=WRITING,
    ),
    Mutant(
        name="a-refused-tag-is-tried-for-ever-at-the-same-pace",
        invariant="back-off",
        file="controller/tags.py",
        old="RETRY_S * 2.0 ** min(failed - 1, 16))\n",
        new="RETRY_S)\n",
        tests=WHEN,
    ),
    Mutant(
        name="a-new-run-shows-the-last-runs-tag-for-a-while",
        invariant="a tag is of its own run",
        file="controller/tags.py",
        old="    return 0.0 if view.run.restart else config.times.tag_after_s\n",
        new="    return config.times.tag_after_s\n",
        tests=WHEN,
    ),
)
