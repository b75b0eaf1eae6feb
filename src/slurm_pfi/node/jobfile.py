"""Job files, version 1: what the prolog says of a run. Read strictly; whatever is not exactly this is ignored."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..flex import FlexError, parse_flex

MAX_BYTES: Final = 1024
MAX_POSITION: Final = 1023
MAX_JOB_ID: Final = 2**32 - 1  # slurm.h has it as uint32_t; federated ids use the upper bits
_NAME: Final = re.compile(r"([1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9})", re.ASCII)
_FILE: Final = re.compile(
    r"pfi-job 1\njob_id ([1-9][0-9]{0,9})\nrestart (0|[1-9][0-9]{0,9})\nuid (0|[1-9][0-9]{0,9})\n"
    r"gpus (-|[0-9,-]{1,512})\nflex ([a-z0-9%-]{1,16})\n",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """One job on this node. ``gpus`` are positions in gres.conf; ``flex`` is empty when the user gave none."""

    job_id: int
    restart: int
    uid: int
    gpus: tuple[int, ...]
    flex: str

    @property
    def name(self) -> str:
        """What the file is called, and other files of its run."""
        return f"{self.job_id}.{self.restart}"


class JobFileError(ValueError):
    """A file in the job folder that is no job file; the message says why."""


def is_job_name(name: str) -> bool:
    """Whether a file of this name is meant to be a job file (temporary files of the prolog are not)."""
    return _NAME.fullmatch(name) is not None


def parse_job_file(name: str, data: bytes) -> JobFile:
    """Read the bytes of a job file. Raises JobFileError unless every byte is as the format says."""
    if len(data) > MAX_BYTES:
        raise JobFileError(f"larger than {MAX_BYTES} bytes")
    try:
        match = _FILE.fullmatch(data.decode("ascii"))
    except UnicodeDecodeError as error:
        raise JobFileError("not ASCII") from error
    if match is None:
        raise JobFileError("not a job file of version 1")
    job_id, restart, uid = (int(match.group(group)) for group in (1, 2, 3))
    if name != f"{job_id}.{restart}":
        raise JobFileError(f"it says job {job_id}.{restart}")
    if job_id > MAX_JOB_ID:
        raise JobFileError(f"no job has the id {job_id}")
    return JobFile(
        job_id=job_id, restart=restart, uid=uid, gpus=_positions(match.group(4)), flex=_flex(match.group(5))
    )


def read_job_file(folder_fd: int, name: str, *, trusted_uids: frozenset[int]) -> JobFile:
    """Open and read one job file below an open folder, following no link.

    Raises JobFileError unless it is a regular file that only a trusted user could have written; OSError when it
    cannot be opened (FileNotFoundError: it went away, which is no fault).
    """
    # O_NONBLOCK, so that a named pipe put there cannot hold us up.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise JobFileError("not a regular file")
        if status.st_uid not in trusted_uids:
            raise JobFileError(f"owned by uid {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise JobFileError(f"writable by others (mode {stat.S_IMODE(status.st_mode):o})")
        return parse_job_file(name, os.read(descriptor, MAX_BYTES + 1))
    finally:
        os.close(descriptor)


def read_job_folder(
    folder: Path, *, trusted_uids: frozenset[int]
) -> tuple[tuple[JobFile, ...], dict[str, str]]:
    """Every job file in the folder, and by name why each other file was ignored.

    Raises OSError when the folder cannot be read: then nothing is known, which is not the same as no jobs.
    """
    files: list[JobFile] = []
    ignored: dict[str, str] = {}
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with os.scandir(folder_fd) as found:
            names = sorted(item.name for item in found)
        for name in names:
            if name.startswith("."):
                continue  # the prolog's own temporary file, before its rename
            if not is_job_name(name):
                ignored[name] = "not a job file's name"
                continue
            with contextlib.suppress(FileNotFoundError):
                try:
                    files.append(read_job_file(folder_fd, name, trusted_uids=trusted_uids))
                except FileNotFoundError:
                    raise
                except (JobFileError, OSError) as error:
                    ignored[name] = str(error)
    finally:
        os.close(folder_fd)
    return tuple(files), ignored


def remove_job_file(folder: Path, job_id: int, restart: int) -> None:
    """Remove a run's file. It being gone already is as good. Raises OSError otherwise."""
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{job_id}.{restart}", dir_fd=folder_fd)
    finally:
        os.close(folder_fd)


def _positions(text: str) -> tuple[int, ...]:
    """``0,2-3`` as (0, 2, 3); ``-`` as none. Raises JobFileError on anything else."""
    if text == "-":
        return ()
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part, re.ASCII)
        if match is None:
            raise JobFileError(f"gpus {text[:40]!r} is not a list of positions")
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        if not first <= last <= MAX_POSITION:
            raise JobFileError(f"gpus {text[:40]!r} is not a list of positions")
        found.extend(range(first, last + 1))
    if len(set(found)) != len(found):
        raise JobFileError(f"gpus {text[:40]!r} names a position twice")
    return tuple(found)


def _flex(text: str) -> str:
    if text == "-":
        return ""
    if text != "invalid":
        try:
            parse_flex(text)
        except FlexError as error:
            raise JobFileError(str(error)) from error
    return text
