"""Put a tag into a job's AdminComment: read just before, write, compare after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .backend import AdminComment, JobGone, JobInfo, SlurmBackend, Unavailable
from .tag import NotRewritable, Tag, foreign_text, merge

Outcome: TypeAlias = Literal["written", "raced", "gone", "not_rewritable", "unavailable"]


@dataclass(frozen=True, slots=True)
class TagWrite:
    """What became of one write. ``raced``: another writer changed the field at the same time, and its text stands.

    ``text`` is the field as it was left, for the next write of this run; None where it is not known.
    """

    outcome: Outcome
    why: str = ""
    text: str | None = field(default=None, compare=False)


async def write_tag(backend: SlurmBackend, job: JobInfo, tag: Tag, known: str | None = None) -> TagWrite:
    """Write the tag of one run beside what others have put there. Raises TagError for a tag that is none.

    Slurm has no compare-and-set: text that another writes between our reading and our writing, some milliseconds,
    is lost. The comparison afterwards cannot undo it; it finds who wrote after us.

    ``known`` is ``TagWrite.text`` of the last time. Text of others that was not there then is read in a second way
    first: what does not read the same in both cannot be written back whole, and is left alone.
    """
    before = await backend.admin_comment(job.job_id)
    if not isinstance(before, AdminComment):
        return _failed(before)
    if later := _later_run(before, job):
        return later
    wanted = merge(before.text, tag)
    if isinstance(wanted, NotRewritable):
        return TagWrite("not_rewritable", wanted.why)
    if wanted == before.text:
        return TagWrite("written", text=wanted)
    if before.text != known and foreign_text(before.text):
        confirmed = await backend.confirms_comment(job.spec, before.text)
        if isinstance(confirmed, (JobGone, Unavailable)):
            return _failed(confirmed)
        if not confirmed:
            return await _unlike(backend, job, before.text)
    answer = await backend.set_admin_comment(job.spec, wanted)
    if isinstance(answer, (JobGone, Unavailable)):
        return _failed(answer)
    after = await backend.admin_comment(job.job_id)
    if not isinstance(after, AdminComment):
        return TagWrite("written")
    if after.text != wanted:
        return TagWrite("raced", "another writer's text stands in the AdminComment, or Slurm changed ours")
    return TagWrite("written", text=wanted)


async def _unlike(backend: SlurmBackend, job: JobInfo, text: str) -> TagWrite:
    """Two ways of reading told different texts: it was changed between them, or one of them loses some of it."""
    again = await backend.admin_comment(job.job_id)
    if isinstance(again, AdminComment) and again.text != text:
        return TagWrite("raced", "another writer changed the AdminComment while it was read")
    return TagWrite("not_rewritable", "text of others reads differently in two ways, so it is left alone")


def _later_run(comment: AdminComment, job: JobInfo) -> TagWrite | None:
    """The job was requeued: what was measured of this run is not the next one's."""
    if comment.restart in (None, job.restart):
        return None
    return TagWrite("gone", f"job {job.spec} is at restart {comment.restart} by now, not {job.restart}")


def _failed(answer: JobGone | Unavailable) -> TagWrite:
    return TagWrite("gone" if isinstance(answer, JobGone) else "unavailable", answer.why)
