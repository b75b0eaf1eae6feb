"""Asking slurmd itself which device file stands behind each position, where gres.conf's text does not say.

With AutoDetect= and no File=, with several types, or with included files the order is slurmd's own. ``slurmd -G``
prints it and ends; it talks to no daemon. Seen with 22.05.8: jobs' positions count in the order printed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from .gres import GresError
from .hosts import HostListError, expand_list

_SEARCH: Final = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_MOST_FILES: Final = 64
_MOST_TEXT: Final = 256 * 1024
_LINE: Final = re.compile(
    r"^.*?\bGres Name=gpu (?=.*\bCount=(?P<count>[0-9]{1,4})\b).*\bFile=(?P<files>\S+)",
    re.ASCII | re.MULTILINE,
)
_ANY_GPU: Final = re.compile(r"\bGres Name=gpu ", re.ASCII | re.MULTILINE)


def ask_slurmd(node: str, slurm_conf: Path, timeout_s: float = 5.0) -> dict[int, str]:
    """Position -> device file of the GPUs of ``node``; a slice (MIG) gets all its files with commas between them.

    Raises GresError when slurmd cannot be asked or says something else than files.
    """
    program = shutil.which("slurmd", path=f"{os.environ.get('PATH', '')}:{_SEARCH}")
    if program is None:
        raise GresError("slurmd is not in PATH")
    if not slurm_conf.is_file():  # slurmd would wait a minute for it
        raise GresError(f"{slurm_conf} is not there")
    try:
        done = subprocess.run(
            [program, "-G", "-N", node, "-f", str(slurm_conf)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
            cwd="/",
            env={"PATH": _SEARCH, "LANG": "C", "SLURM_CONF": str(slurm_conf)},
        )
    except subprocess.TimeoutExpired:
        raise GresError(f"{program} -G gave no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise GresError(f"{program} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise GresError(f"{program} -G ended with {done.returncode} and said {last[0][:200]!r}")
    return printed_files(f"{done.stdout}\n{done.stderr}")


def printed_files(text: str) -> dict[int, str]:
    """Position -> device file, from what ``slurmd -G`` printed. Raises GresError where that is not plain."""
    lines = list(_LINE.finditer(text[:_MOST_TEXT]))
    if len(lines) != len(_ANY_GPU.findall(text[:_MOST_TEXT])):
        raise GresError("slurmd -G names a GPU without a device file")
    files: list[str] = []
    for line in lines:
        try:
            names = expand_list(line["files"], _MOST_FILES)
        except HostListError as error:
            raise GresError(f"slurmd -G: File: {error}") from error
        if int(line["count"]) == len(names):
            files.extend(names)
        elif int(line["count"]) == 1:
            files.append(",".join(names))
        else:
            raise GresError(f"slurmd -G: Count={line['count']}, but File= names {len(names)}")
    if not files:
        raise GresError("slurmd -G names no GPU")
    return dict(enumerate(files))
