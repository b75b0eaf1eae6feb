"""A job as Slurm tells it and tags in full, so that a test names only what it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from slurm_pfi.slurm.backend import JobInfo, Special
from slurm_pfi.slurm.tag import Tag

TAG_UNIX_S: Final = 1_796_040_000  # a whole minute: 2026-11-30 12:00 UTC

BARE_TAG: Final = Tag(
    pfi=1.5,
    source="default",
    grid_low_w=200,
    grid_high_w=700,
    grid_step_w=100,
    flex="10%",
    loss=None,
    energy_wh=None,
    capped_s=0.0,
    at_unix_s=float(TAG_UNIX_S),
)
"""Of a run that was not measured and not capped."""

FULL_TAG: Final = replace(
    BARE_TAG,
    pfi=1.83,
    pfi_low=1.71,
    pfi_high=1.95,
    source="measured",
    loss=0.031,
    energy_wh=-840,
    capped_s=3120.0,
)
"""Of a run that caps have held down, with all that a tag can tell."""


def slurm_job(job_id: int, **changes: Any) -> JobInfo:
    """A plain job that runs on one node, without a time limit, and these changes."""
    plain = JobInfo(
        job_id=job_id,
        array_job_id=None,
        array_task_id=None,
        het_job_id=None,
        het_offset=None,
        restart=0,
        user_id=1000,
        user_name="user",
        account="",
        partition="main",
        qos="",
        state="RUNNING",
        nodes=("n1",),
        start_unix_s=Special.NOT_SET,
        end_unix_s=Special.NOT_SET,
        limit_s=Special.UNLIMITED,
    )
    return replace(plain, **changes)
