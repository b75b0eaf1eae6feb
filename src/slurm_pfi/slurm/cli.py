"""Slurm by its own commands, squeue and scontrol: works with every version, and is the default.

They are read as text even where a release writes JSON; ``SlurmJson`` reads that, for sites that want it. Seen on real
clusters: ``scontrol show job ID --json`` of 24.11 and 26.05 gives the same empty list, exit 0 and no error for a job
that is gone and for a slurmctld that does not answer; the JSON of 22.05 has null for a limit that is not set and for
none, exits 0 with an empty list when slurmctld is down, and knows no filter. docs/slurm-versions.md has the costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from dataclasses import dataclass
from typing import Final

from ..config import SlurmSection
from .backend import AdminComment, JobGone, JobInfo, Unavailable, Updated
from .damage import SlurmTextError
from .numbers import MINUTE_S
from .squeue import FIELDS, NO_SUCH_JOB, UNSET, new_end, read_jobs, split_rows, squeue_words
from .text import named, parse_count
from .timelimit import Room, read_partition, read_qos_limits, read_reservations
from .version import Probed, UnknownVersion, read_version

_COMMENT_FIELDS: Final = ("JobID", "RestartCnt", "admin_comment")
_FINISHED: Final = "Job has already finished"
_AT_ONCE: Final = 8  # processes; slurmctld is shared with everybody


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that ended by itself; ``error`` is what it wrote to standard error, on one line."""

    exit_code: int
    out: bytes
    error: str


class SlurmCommands:
    """The backend that runs ``squeue`` and ``scontrol``; see ``SlurmBackend`` for what it answers.

    ``timeout_s`` bounds each command; squeue by itself waits a minute for a missing configuration file.
    """

    def __init__(self, section: SlurmSection, *, timeout_s: float) -> None:
        self._bin_dir = section.bin_dir
        self._timeout_s = timeout_s
        # A bare environment: SQUEUE_* and SLURM_* of whoever started us would change what the commands say.
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C",
            "SLURM_CONF": section.conf,
            "SLURM_TIME_FORMAT": "%s",
        }
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def job(self, job_id: int) -> JobInfo | JobGone | Unavailable:
        """See SlurmBackend."""
        jobs = await self._read_jobs(job_id)
        if not isinstance(jobs, tuple):
            return jobs
        return next((job for job in jobs if job.job_id == job_id), _absent(job_id))

    async def jobs(self) -> tuple[JobInfo, ...] | Unavailable:
        """See SlurmBackend."""
        jobs = await self._read_jobs(None)
        return Unavailable(f"{jobs.why}, though no job was named") if isinstance(jobs, JobGone) else jobs

    async def version(self) -> Probed:
        """The release of the commands; they and slurmctld may be two releases apart (Slurm's upgrade guide)."""
        ran = await self._run("squeue", "-V")
        if isinstance(ran, Unavailable):
            return UnknownVersion(ran.why)
        return read_version(ran.out.decode("utf-8", "replace"))

    async def close(self) -> None:
        """End what was started for asking; commands end by themselves."""

    async def _read_jobs(self, job_id: int | None) -> tuple[JobInfo, ...] | JobGone | Unavailable:
        """One job, of an array's leader all tasks too, or all jobs."""
        rows = await self._squeue(FIELDS, job_id)
        if not isinstance(rows, list):
            return rows
        # Thousands of jobs take a good part of a second, in which the daemon must not stand still.
        return read_jobs(rows) if job_id is not None else await asyncio.to_thread(read_jobs, rows)

    async def admin_comment(self, job_id: int) -> AdminComment | JobGone | Unavailable:
        """See SlurmBackend."""
        row = await self._own_row(_COMMENT_FIELDS, job_id)
        return _read_comment(row) if isinstance(row, dict) else row

    async def confirms_comment(self, job_spec: str, text: str) -> bool | JobGone | Unavailable:
        """See SlurmBackend. ``scontrol show job`` prints the field as it is; up to 24.11 a blank ends its line."""
        ran = await self._run("scontrol", "show", "job", job_spec)
        if isinstance(ran, Unavailable):
            return ran
        if ran.exit_code != 0:
            said = f"scontrol show job {job_spec} exited {ran.exit_code}: {ran.error}"
            return JobGone(said) if NO_SUCH_JOB in ran.error else Unavailable(said)
        shown = b"\n   AdminComment=" + text.encode("utf-8", "surrogateescape")
        return any(shown + end in ran.out for end in (b" \n", b"\n"))

    async def set_admin_comment(self, job_spec: str, text: str) -> Updated | JobGone | Unavailable:
        """See SlurmBackend."""
        value = b"admincomment=" + text.encode("utf-8", "surrogateescape")
        if b"\0" in value:
            return Unavailable("an AdminComment cannot hold a zero byte")
        return await self._update(job_spec, value)

    async def set_time_limit(self, job_spec: str, limit_s: int) -> Updated | JobGone | Unavailable:
        """See TimeLimitBackend. scontrol(1) takes whole minutes."""
        minutes, rest = divmod(limit_s, MINUTE_S)
        if rest or minutes < 1:
            return Unavailable(f"a time limit of {limit_s} s is not in whole minutes")
        return await self._update(job_spec, f"timelimit={minutes}")

    async def room(self, job: JobInfo) -> Room | JobGone | Unavailable:
        """See TimeLimitBackend."""
        row = await self._own_row(("JobID", "Reservation"), job.job_id)
        if not isinstance(row, dict):
            return row
        own = named(row["Reservation"].decode("utf-8", "backslashreplace"))
        try:
            partition = read_partition(
                await self._told("scontrol", "--all", "--oneliner", "show", "partition", job.partition),
                job.partition,
            )
            reservations = read_reservations(
                await self._told("scontrol", "--all", "--oneliner", "show", "reservation")
            )
            names = sorted({name for name in (job.qos, partition.qos) if name})
            # Not by "scontrol show assoc_mgr": where there is no accounting, that ends the slurmctld of 22.05.
            asked = (
                "sacctmgr",
                "--noheader",
                "--parsable2",
                "show",
                "qos",
                "where",
                f"name={','.join(names)}",
            )
            qos = read_qos_limits(await self._told(*asked, "format=name,maxwall"), names) if names else ()
        except SlurmTextError as error:
            return Unavailable(f"what bounds the time limit of job {job.spec} is not known: {error}")
        return Room(partition_s=partition.limit_s, reservations=reservations, own=own, qos=qos)

    async def _told(self, *words: str) -> str:
        """What a command told. Raises SlurmTextError where it gave no answer, or complained."""
        ran = await self._run(*words)
        if isinstance(ran, Unavailable):
            raise SlurmTextError(ran.why)
        if ran.exit_code != 0 or ran.error:
            raise SlurmTextError(f"{' '.join(words)} exited {ran.exit_code}: {ran.error or ran.out[:200]!r}")
        return ran.out.decode("utf-8", "replace")

    async def _update(self, job_spec: str, change: str | bytes) -> Updated | JobGone | Unavailable:
        ran = await self._run("scontrol", "update", f"jobid={job_spec}", change)
        if isinstance(ran, Unavailable):
            return ran
        if ran.exit_code == 0 and "error" not in ran.error:
            return Updated()
        if NO_SUCH_JOB in ran.error or _FINISHED in ran.error:
            return JobGone(ran.error)
        return Unavailable(f"scontrol update of job {job_spec} exited {ran.exit_code}: {ran.error}")

    async def private_data(self) -> frozenset[str] | Unavailable:
        """See SlurmBackend."""
        ran = await self._run("scontrol", "show", "config")
        if isinstance(ran, Unavailable):
            return ran
        found = re.findall(rb"(?m)^PrivateData +=(.*)$", ran.out)
        if ran.exit_code != 0 or len(found) != 1:
            return Unavailable(
                f"scontrol show config exited {ran.exit_code}, with {len(found)} lines of PrivateData: {ran.error}"
            )
        words = found[0].decode("ascii", "replace").strip().split(",")
        if not all(re.fullmatch(r"[a-z]+", word) for word in words):
            return Unavailable(f"PrivateData={','.join(words)[:80]!r} is not understood")
        return frozenset(words) - {"none"}

    async def _own_row(
        self, fields: tuple[str, ...], job_id: int
    ) -> dict[str, bytes] | JobGone | Unavailable:
        """The row of this very job: of an array's leader squeue shows every task."""
        rows = await self._squeue(fields, job_id)
        if not isinstance(rows, list):
            return rows
        return next((row for row in rows if row["JobID"] == str(job_id).encode()), _absent(job_id))

    async def _squeue(
        self, fields: tuple[str, ...], job_id: int | None
    ) -> list[dict[str, bytes]] | JobGone | Unavailable:
        end = new_end()
        ran = await self._squeue_ran(squeue_words(job_id, end, fields), job_id)
        if not isinstance(ran, Ran):
            return ran
        try:
            rows = split_rows(ran.out, fields, end.encode())
        except SlurmTextError as error:
            return Unavailable(f"squeue's answer is not understood: {error} {ran.error}".rstrip())
        if not rows and ran.error:
            return Unavailable(f"squeue named no job, and said: {ran.error}")
        return rows

    async def _squeue_ran(self, words: list[str], job_id: int | None) -> Ran | JobGone | Unavailable:
        """squeue, if it ended well."""
        ran = await self._run(*words)
        if isinstance(ran, Unavailable) or ran.exit_code == 0:
            return ran
        if job_id is not None and NO_SUCH_JOB in ran.error:
            return JobGone(f"job {job_id}: {NO_SUCH_JOB}")
        return Unavailable(f"squeue exited {ran.exit_code}: {ran.error or 'it said nothing'}")

    async def _run(self, command: str, *arguments: str | bytes) -> Ran | Unavailable:
        path = f"{self._bin_dir}/{command}" if self._bin_dir else command
        async with self._slots:
            try:
                process = await asyncio.create_subprocess_exec(
                    path,
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=self._environment,
                )
            except OSError as error:
                return Unavailable(f"{path} cannot be run: {error.strerror}; set slurm.bin_dir")
            try:
                async with asyncio.timeout(self._timeout_s):
                    out, said = await process.communicate()
            except TimeoutError:
                return Unavailable(f"{command} gave no answer within {self._timeout_s:g} s; is slurmctld up?")
            finally:
                # Too late, or the caller has been cancelled: leave nothing behind.
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
        assert process.returncode is not None
        return Ran(process.returncode, out, " ".join(said.decode("utf-8", "replace").split())[:500])


def _read_comment(row: dict[str, bytes]) -> AdminComment | Unavailable:
    text = row["admin_comment"].decode("utf-8", "surrogateescape")
    try:
        restart = parse_count(row["RestartCnt"].decode("ascii", "replace"))
    except SlurmTextError as error:
        return Unavailable(f"squeue's restart count is not understood: {error}")
    return AdminComment("" if text == UNSET else text, restart)


def _absent(job_id: int) -> Unavailable:
    # slurmctld says so in words when it does not know a job; silence is something else.
    return Unavailable(f"squeue answered without job {job_id}")
