"""Jobs as ``squeue --json`` writes them, in the forms of 22.05 (plain numbers) and of later releases (objects).

What a job's user wrote may hold bytes that are no UTF-8, which Slurm puts into its JSON as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from .backend import HOLDS_NODES, JobInfo, Span, Special, Unavailable
from .damage import SlurmTextError
from .numbers import read_count, read_id, read_minutes_s, read_number, read_time
from .text import expand_nodes, is_state

# Of a state with flags squeue's table shows one flag, the first of these.
_FLAGS_SHOWN: Final = (
    "COMPLETING",
    "STAGE_OUT",
    "CONFIGURING",
    "RESIZING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "STOPPED",
    "REVOKED",
    "RESV_DEL_HOLD",
    "SIGNALING",
)
_NOT_ENDING: Final = HOLDS_NODES - {"COMPLETING", "STAGE_OUT"}


def read_json_jobs(out: bytes) -> tuple[JobInfo, ...] | Unavailable:
    """All jobs of an answer. Anything that could mean a job left out makes the answer unknown.

    That is: text that ends early, an entry in ``errors``, no list of jobs, a warning beside an empty list, a job that
    cannot be read or comes twice.
    """
    try:
        answer = json.loads(out.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        return Unavailable(f"JSON of {len(out)} bytes is cut off or damaged: {str(error)[:200]}")
    try:
        told = _told(answer)
        if told:
            return Unavailable(f"squeue --json: {told}")
        jobs = tuple(_read_job(job, f"jobs[{place}]") for place, job in enumerate(answer["jobs"]))
    except SlurmTextError as error:
        return Unavailable(f"squeue's JSON is not understood: {error}")
    if len({job.job_id for job in jobs}) != len(jobs):
        return Unavailable("squeue's JSON is not understood: a job comes twice")
    return jobs


def _told(answer: object) -> str:
    """What is wrong with the answer as a whole; empty if nothing is. Raises SlurmTextError."""
    if not isinstance(answer, Mapping) or not isinstance(answer.get("jobs"), list):
        raise SlurmTextError("there is no list of jobs in it")
    for key in ("errors", "warnings"):
        entries = answer.get(key, [])
        if not isinstance(entries, list):
            raise SlurmTextError(f"{key} is no list")
        if entries and (key == "errors" or not answer["jobs"]):
            return f"{key}: {'; '.join(_words(entry) for entry in entries[:3])}"
    return ""


def _words(entry: object) -> str:
    if not isinstance(entry, Mapping):
        return repr(entry)[:200]
    words = (entry.get("description"), entry.get("error"), entry.get("source"))
    return " / ".join(str(word)[:100] for word in words if word)


def _read_job(job: object, where: str) -> JobInfo:
    if not isinstance(job, Mapping):
        raise SlurmTextError(f"{where} is no object")
    job_id = read_id(_value(job, "job_id", where), f"{where}.job_id")
    if job_id is None:
        raise SlurmTextError(f"{where}.job_id: 0 is not a job id")
    where = f"{where} (job {job_id})"
    array = read_id(_value(job, "array_job_id", where), f"{where}.array_job_id")
    task = read_number(_value(job, "array_task_id", where), f"{where}.array_task_id")
    het = read_id(_value(job, "het_job_id", where), f"{where}.het_job_id")
    limit_s = read_minutes_s(_value(job, "time_limit", where), f"{where}.time_limit")
    start = read_time(_value(job, "start_time", where), f"{where}.start_time")
    end = read_time(_value(job, "end_time", where), f"{where}.end_time")
    state = _state(_value(job, "job_state", where), f"{where}.job_state")
    return JobInfo(
        job_id=job_id,
        array_job_id=array,
        array_task_id=task if array is not None and isinstance(task, int) else None,
        het_job_id=het,
        het_offset=None
        if het is None
        else read_count(_value(job, "het_job_offset", where), f"{where}.het_job_offset"),
        restart=read_count(_value(job, "restart_cnt", where), f"{where}.restart_cnt"),
        user_id=read_count(_value(job, "user_id", where), f"{where}.user_id"),
        user_name=_text(job, "user_name", where),
        account=_text(job, "account", where),
        partition=_text(job, "partition", where),
        qos=_text(job, "qos", where),
        state=state,
        nodes=expand_nodes(_text(job, "nodes", where)),
        start_unix_s=start,
        end_unix_s=without_false_end(state, limit_s, end),
        limit_s=limit_s,
        name=_text(job, "name", where),
        comment=_text(job, "comment", where),
    )


def without_false_end(state: str, limit_s: Span, end: Span) -> Span:
    """The end of a job: of one that goes on without a limit slurmctld tells a day a year after its start."""
    return Special.UNLIMITED if state in _NOT_ENDING and limit_s is Special.UNLIMITED else end


def _value(job: Mapping[str, Any], key: str, where: str) -> object:
    if key not in job:
        raise SlurmTextError(f"{where} has no {key}")
    return job[key]


def _text(job: Mapping[str, Any], key: str, where: str) -> str:
    """Text that can be encoded again anywhere; null is empty."""
    value = _value(job, key, where)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise SlurmTextError(f"{where}.{key}: {value!r:.64} is no text")
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _state(value: object, where: str) -> str:
    """One word, as squeue's table has it; of a list of a state and its flags the flag that the table shows."""
    words = value if isinstance(value, list) else [value]
    if not words or not all(isinstance(word, str) and is_state(word) for word in words):
        raise SlurmTextError(f"{where}: {value!r:.64} is not a job state")
    return str(next((word for word in _FLAGS_SHOWN if word in words), words[0]))
