"""The line that a job has in its own output at its end, where the site switches that on. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from ..slurm.tag import Tag, capped_text, find_tag
from .state import RunView


def job_line(view: RunView, *, simulated: bool) -> str:
    """What caps have cost the run, as its tag has it; empty for a run that no cap has held down. ASCII.

    ``simulated``: the GPUs are, so that no figure was measured on hardware.
    """
    tag = find_tag(view.tag_text)
    if tag is None or tag.capped_s <= 0:
        return ""
    at = f"{datetime.fromtimestamp(tag.at_unix_s, UTC):%H:%M} UTC"
    gpus = " (simulated GPUs)" if simulated else ""
    return f"{_cost(tag)}{gpus}; as of {at}, more: slurm-pfi job {view.spec}"


def _cost(tag: Tag) -> str:
    held = f"caps held this job down for {capped_text(tag.capped_s)} (flex {tag.flex})"
    cost = "at a cost not known" if tag.loss is None else f"cost {100 * tag.loss:.1f} % of its throughput"
    if tag.energy_wh is None:
        return f"{held}, {cost}"
    saved = f"saved {-tag.energy_wh} Wh" if tag.energy_wh <= 0 else f"took {tag.energy_wh} Wh more"
    return f"{held}, {cost} and {saved}"
