"""Whether jobs can be read in the way that ``slurm.backend`` names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from ...config import SlurmSection
from ...slurm.choice import SlurmOtherwise, open_backend
from .finding import Facts, Finding

_PATIENCE_S: Final = 10.0


def reading(facts: Facts) -> Iterator[Finding]:
    """Says nothing where the commands' text is read, as it is by itself."""
    if facts.config.slurm.backend in ("auto", "cli"):
        return
    if facts.slurm is None:
        yield Finding("slurm.backend", "unseen", facts.slurm_said)
        return
    yield reading_finding(facts.config.slurm)


def reading_finding(section: SlurmSection) -> Finding:
    """Try it as the controller does, with this user's Python."""
    why = asyncio.run(_why_not(section))
    if why is None:
        return Finding("slurm.backend", "ok", f"jobs are read by {section.backend}")
    todo = 'nothing is lost by it; to be rid of this line set slurm.backend = "auto"'
    return Finding("slurm.backend", "warn", f"{section.backend} is not used, squeue's text is: {why}", todo)


async def _why_not(section: SlurmSection) -> str | None:
    backend = open_backend(section, timeout_s=_PATIENCE_S, say=lambda _: None)
    try:
        return await backend.unfit() if isinstance(backend, SlurmOtherwise) else None
    finally:
        await backend.close()
