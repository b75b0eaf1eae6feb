"""The process that loads pyslurm: one question on standard input, one answer on standard output, until its end.

It stands alone because libslurm ends its process when it cannot read slurm.conf, waits without a deadline of ours, and
leaks some memory at each full read (22.05).
"""

from __future__ import annotations

import importlib
import os
import pwd
import sys
from typing import Any

import msgspec

from .pyslurm_jobs import LENGTH_BYTES, Answer, Hello, Question, Record, packed


def main() -> None:
    """See the module."""
    # What pyslurm or libslurm print must not come between our messages.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    pyslurm, hello = _load()
    out.write(packed(hello))
    while not hello.why and (head := sys.stdin.buffer.read(LENGTH_BYTES)):
        question = msgspec.json.decode(sys.stdin.buffer.read(int.from_bytes(head)), type=Question)
        out.write(packed(_ask(pyslurm, question.job_id)))


def _load() -> tuple[Any, Hello]:
    try:
        pyslurm: Any = importlib.import_module("pyslurm")
        version = str(pyslurm.__version__)
    except Exception as error:
        # Whatever a foreign module does on import: it is told, and the commands are used.
        return None, Hello(why=f"pyslurm cannot be imported: {type(error).__name__}: {error}"[:500])
    if not hasattr(pyslurm, "job"):
        why = f"pyslurm {version} has no class job, and its class Job does not tell unlimited from not set"
        return None, Hello(why=why)
    return pyslurm, Hello(version=version)


def _ask(pyslurm: Any, job_id: int | None) -> Answer:
    try:
        jobs = pyslurm.job()
        found = list(jobs.get().values()) if job_id is None else jobs.find_id(job_id)
    except TypeError as error:
        return Answer(why=f"TypeError: {error}"[:500], unable=True)
    except Exception as error:
        # libslurm's errors come as ValueError(text, number); any other is told just so.
        match error.args:
            case (str(said), int(number)):
                return Answer(why=said[:500], errno=number)
        return Answer(why=f"{type(error).__name__}: {error}"[:500])
    try:
        return Answer(records=tuple(_record(job) for job in found))
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        return Answer(why=f"its record of a job is not understood: {type(error).__name__}: {error}"[:500])


def _record(job: dict[str, Any]) -> Record:
    user_id = int(job["user_id"])
    try:
        name = pwd.getpwuid(user_id).pw_name
    except KeyError:
        name = str(user_id)
    return msgspec.convert({**job, "user_name": name}, Record)


if __name__ == "__main__":
    main()
