"""Put a tag into a job's AdminComment: read just before, write, compare after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .backend import AdminComment, JobGone, JobInfo, SlurmBackend, Unavailable
from .tag import NotRewritable, Tag, merge

Outcome: TypeAlias = Literal["written", "raced", "gone", "not_rewritable", "unavailable"]


@dataclass(frozen=True, slots=True)
class TagWrite:
    """What became of one write. ``raced``: it was made, but another writer's text stands there now."""

    outcome: Outcome
    why: str = ""


async def write_tag(backend: SlurmBackend, job: JobInfo, tag: Tag) -> TagWrite:
    """Write the tag of one job beside what others have put there. Raises TagError for a tag that is none.

    Slurm has no compare-and-set: text that another writes between our reading and our writing, some milliseconds,
    is lost. The comparison afterwards cannot undo it; it finds who wrote after us.
    """
    before = await backend.admin_comment(job.job_id)
    if not isinstance(before, AdminComment):
        return _failed(before)
    wanted = merge(before.text, tag)
    if isinstance(wanted, NotRewritable):
        return TagWrite("not_rewritable", wanted.why)
    if wanted == before.text:
        return TagWrite("written")
    answer = await backend.set_admin_comment(job.spec, wanted)
    if isinstance(answer, (JobGone, Unavailable)):
        return _failed(answer)
    after = await backend.admin_comment(job.job_id)
    if isinstance(after, AdminComment) and after.text != wanted:
        return TagWrite("raced", f"job {job.spec}: the AdminComment is not what was written")
    return TagWrite("written")


def _failed(answer: JobGone | Unavailable) -> TagWrite:
    return TagWrite("gone" if isinstance(answer, JobGone) else "unavailable", answer.why)
