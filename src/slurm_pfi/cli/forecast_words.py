"""The words that ``what-if`` and ``offer`` share."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..units import format_power
from .common import SIMULATED, job_name, percent

MOST_NAMES: Final = 8


def wrapped(line: str, width: int) -> list[str]:
    """A line of words within a terminal; what is indented stays indented."""
    indent = " " * (len(line) - len(line.lstrip()) + (2 if line.startswith(" ") else 0))
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def estimate(value: dict[str, float] | None, digits: int = 1) -> str:
    """``2.3 % (95 %: 1.1 to 3.8 %)``; ``?`` when unknown."""
    if value is None:
        return "?"
    low, high = (round(100 * value[end], digits) + 0.0 for end in ("low", "high"))
    return f"{percent(value['expected'], digits)} (95 %: {low:.{digits}f} to {high:.{digits}f} %)"


def counted(number: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def job_ids(runs: Sequence[str], names: Mapping[str, str]) -> str:
    """The first few jobs of these runs, in order. ``names``: see ``job_name``."""
    return beside(sorted((job_name(run, names) for run in runs), key=_in_order))


def _in_order(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall("[0-9]+", name))


def beside(words: Sequence[str]) -> str:
    """The first few of many words."""
    more = f" and {len(words) - MOST_NAMES} more" if len(words) > MOST_NAMES else ""
    return ", ".join(words[:MOST_NAMES]) + more


def standing_lines(standing: dict[str, Any]) -> Iterator[str]:
    """What to know before one believes the figures; nothing on a site where all is as usual."""
    if standing["simulated"]:
        yield SIMULATED
    if standing["off"]:
        yield "OFF: no limit is enforced ('slurm-pfi on' ends this)."
    elif not standing["enforces"]:
        yield "Mode observe: a limit would be planned and reported, but no cap set."
    if not standing["limits_known"]:
        yield "LIMITS UNREADABLE: the last plans stay in force; see the controller's log."
    if standing["window_mw"] is not None and not standing["off"]:
        limit = format_power(standing["window_mw"])
        yield f"A limit of {limit} holds now; this answer is for the site without it."
    if standing["silent"]:
        yield f"Counted at their worst, they do not answer or take no plan: {beside(standing['silent'])}."
    if standing["unreached_hidden"]:
        hidden = counted(standing["unreached_hidden"], "run")
        yield f"In no figure of loss, for no plan may cap their GPUs: {hidden} of others."
    if standing["unreached"]:
        jobs = job_ids(standing["unreached"], standing["names"])
        yield f"In no figure of loss, for no plan may cap their GPUs: jobs {jobs}."


def uncapped_lines(uncapped: dict[str, int], total_mw: int) -> Iterator[str]:
    """The uncapped draw and how much of it is known."""
    at_most = sum(uncapped[part] for part in ("bounded_mw", "unread_mw", "silent_mw", "beside_mw"))
    bound = f", of which {format_power(at_most)} is not measured but the most it can be" if at_most else ""
    yield f"Uncapped draw {format_power(total_mw)}{bound}:"
    for part, words in (
        ("known_mw", "runs, by their baselines"),
        ("bounded_mw", "runs never seen uncapped, at most"),
        ("idle_mw", "GPUs without a run, as measured"),
        ("unread_mw", "GPUs without a run whose draw is not known, at most"),
        ("silent_mw", "nodes and GPUs that do not answer, at most"),
        ("beside_mw", "declared beside the GPUs, at most"),
    ):
        if uncapped[part]:
            yield f"  {format_power(uncapped[part]):>9}  {words}"
