"""What the controller knows of one run, in words. Pure: from its answer to lines of text, as long as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..units import format_duration, format_power
from .clock import local_text
from .common import SIMULATED, percent
from .job_measured import cost_lines, ended, known_lines, saved_lines, span
from .jobs import job_text
from .status import folded
from .tables import plain

HEADINGS: Final = ("Asked", "Known", "Done", "Cost", "Saved", "Promised")

MOST_TOLD: Final = 24
"""Entries of the timeline that are shown: a screen of them."""

_Told = Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """A heading and its lines."""

    name: str
    lines: list[str]


def title(told: _Told) -> list[str]:
    """Who and where, in a line or two."""
    gpus = f"{told['gpus']} GPUs" if told["gpus"] != 1 else "1 GPU"
    model = f" ({told['gpu_model']})" if told["gpu_model"] else ""
    where = f" on {folded(told['nodes'])}" if told["nodes"] else ""
    lines = [f"job {job_text(told)} of {told['user'] or 'a user not yet known'}: {_state(told)}"]
    about = [f"{gpus}{model}{where}" if told["gpus"] else ""]
    about += [f"{key} {told[key]}" for key in ("partition", "account") if told[key]]
    lines.append(", ".join(part for part in about if part))
    if told["name"]:
        lines.append(f"name {told['name']}")
    lines.append(
        f"first seen {local_text(told['first_seen_unix_s'])}, {_ago(told, told['first_seen_unix_s'])}"
    )
    if told.get("simulated"):  # not known of runs that a former version kept
        lines.append(SIMULATED)
    if told["other_runs"]:
        names = [run.partition(":")[2] or run for run in told["other_runs"]]
        lines.append(f"other runs of this job: {', '.join(names)} (ask for them by these names)")
    return [plain(line) for line in lines if line]


def sections(told: _Told) -> list[Section]:
    """Everything else, under headings."""
    parts = (_asked, known_lines, _done, cost_lines, saved_lines, _promised)
    made = [Section(name, part(told)) for name, part in zip(HEADINGS, parts, strict=True)]
    return [Section(one.name, [plain(line) for line in one.lines if line]) for one in made if one.lines]


def _state(told: _Told) -> str:
    if told["ended_unix_s"] is not None:
        return f"ended {_ago(told, told['ended_unix_s'])}, at {local_text(told['ended_unix_s'])}"
    return {
        "admitted": "running",
        "waiting for power": "running at the park cap, waiting for power",
        "being read": "running; Slurm has not yet said what it is",
        "refused": "running, but not managed",
        "gone": "ending",
    }.get(told["state"], str(told["state"]))


def _ago(told: _Told, unix_s: float) -> str:
    return f"{format_duration(max(0.0, told['asked_unix_s'] - unix_s))} ago"


# ------------------------------------------------------------------------------------------------ asked


def _asked(told: _Told) -> list[str]:
    word, source, flex = told["user_flex"], told["flex_source"], told["flex"]
    asked = {
        "flag": f"--power-flex={word}",
        "comment": f"pfi:{word}, in the job's comment",
    }.get(source, f"nothing, so the site's default counts: {told['default_flex']}")
    lines = [asked]
    if flex is None:
        lines.append("what the site grants is not known yet: Slurm has not described the job")
    elif told["max_loss"] == 0:
        lines.append("granted none: only an emergency may cap it")
    else:
        at_most = percent(told["max_loss"], 0)
        as_word = "" if flex == at_most.replace(" ", "") else f" {flex}"
        lines.append(
            f"granted{as_word}: caps may cost it at most {at_most} of its throughput while they bind; "
            "only an emergency may go further"
        )
    if told["note"]:
        lines.append(f"note: {told['note']}")
    if told["mode"] and "enforce" not in told["mode"]:
        lines.append("its nodes only observe: caps are planned and told here, none is set")
    return lines


# ------------------------------------------------------------------------------------------------ done


def _done(told: _Told) -> list[str]:
    events, cost = told["events"], told["cost"]
    lines: list[str] = []
    if events is None:
        lines.append(f"not known: {told['events_trouble']}")
    elif not events:
        lines.append("nothing yet: no cap has bound it")
    else:
        lines += timeline(events)
    if told["limit"] is not None and told["target_cap_mw"] is not None and not ended(told):
        limit = f"{format_power(told['limit']['limit_mw'])} ({', '.join(told['limit']['ids'])})"
        why = f"for the limit of {limit}" if told["limit"]["ids"] else "while power is given back slowly"
        lines.append(f"its cap now: {format_power(told['target_cap_mw'])} a GPU, {why}")
    if cost["capped_s"] > 0:
        lines.append(
            f"caps held it down for {format_duration(cost['capped_s'])} of the "
            f"{format_duration(cost['known_s'])} that it was watched"
        )
    if told.get("tag_trouble") and not ended(told):
        lines.append(f"its tag does not stand in Slurm as it should: {told['tag_trouble']}")
    return lines


def timeline(events: Sequence[_Told]) -> list[str]:
    """Each event with its time on this host's clock; the day and offset stand where they change."""
    lines: list[str] = []
    if len(events) > MOST_TOLD:
        lines.append(f"{len(events) - MOST_TOLD} earlier entries are left out (--json has more)")
    last = ""
    for event in events[-MOST_TOLD:]:
        day, clock, offset = local_text(event["unix_s"]).split()
        if (stamp := f"{day}, UTC{offset}") != last:
            lines.append(stamp)
            last = stamp
        lines.append(f"{clock}  {event['text']}")
    return lines


# ------------------------------------------------------------------------------------------------ promised


def _promised(told: _Told) -> list[str]:
    if told["flex"] is None:
        return []
    return [line for line in (_promised_floor(told), _promised_loss(told), *time_lines(told)) if line]


def _promised_floor(told: _Told) -> str:
    floor_mw, events = told["floor_mw"], told["events"]
    if floor_mw is None:
        return ""
    passed = [event for event in events or () if event["kind"] == "floor_passed"]
    floor = f"floor of {format_power(floor_mw)} a GPU"
    if told["floor_passed"] and not ended(told):
        since = f" since {local_text(_first_of_last(events or ())).split()[1]}" if passed else ""
        return f"{floor}: passed by an emergency limit{since}"
    if passed:
        return f"{floor}: passed by an emergency limit {_when_passed(events)}"
    if events is None:
        return f"{floor}: kept now; what was before is not known"
    return f"{floor}: kept"


def _first_of_last(events: Sequence[_Told]) -> float:
    """When the last stretch below the floor began."""
    stretches = floor_stretches(events)
    return stretches[-1][0] if stretches else events[-1]["unix_s"]


def _when_passed(events: Sequence[_Told]) -> str:
    told = []
    for start_s, end_s in floor_stretches(events):
        lasted = "" if end_s is None else f" for {format_duration(end_s - start_s)}"
        told.append(f"at {local_text(start_s)}{lasted}")
    return ", ".join(told)


def floor_stretches(events: Sequence[_Told]) -> list[tuple[float, float | None]]:
    """When an emergency held the run below its floor: from, until (None: not known, or still)."""
    found: list[tuple[float, float | None]] = []
    open_s: float | None = None
    for event in events:
        if event["kind"] == "floor_passed" and open_s is None:
            open_s = event["unix_s"]
        elif event["kind"] in ("floor_kept", "uncapped", "ended") and open_s is not None:
            found.append((open_s, event["unix_s"]))
            open_s = None
    if open_s is not None:
        found.append((open_s, None))
    return found


def _promised_loss(told: _Told) -> str:
    cost, most = told["cost"], told["max_loss"]
    if most is None:
        return ""
    if most == 0:
        return _promised_none(told)
    promise = f"at most {percent(most, 0)} lost while capped"
    loss, low, high = cost["loss_capped"], cost["loss_capped_low"], cost["loss_capped_high"]
    if cost["capped_s"] <= 0 and not told.get("shared_capped"):
        return f"{promise}: kept, it was not capped"
    if loss is None or low is None or high is None:
        shown, curves = told.get("by_activity"), told["by_curves"]
        about = "" if curves is None else f"; by curves of other jobs about {percent(curves['loss'])}"
        if shown is not None:
            about = f"; estimated from the activity of its GPUs about {percent(shown['loss'])}"
        return f"{promise}: not known{about}"
    if high <= most:
        return f"{promise}: kept"
    if floor_stretches(told["events"] or ()):
        return f"{promise}: it lost {percent(loss)} ({span(low, high)}), the emergency included"
    if low > most:
        return f"{promise}: broken, it lost {percent(loss)} ({span(low, high)})"
    verdict = "probably kept" if loss <= most else "probably broken"
    return f"{promise}: {verdict}, it lost {percent(loss)} ({span(low, high)})"


def time_lines(told: _Told) -> list[str]:
    """How its work stands to Slurm's time limit, and what that was raised by. Not known of runs of former versions."""
    lines: list[str] = []
    deadline, most = told.get("deadline"), told["max_loss"]
    if deadline is not None and most is not None and not ended(told):
        needed, left = format_duration(deadline["needed_s"]), format_duration(deadline["left_s"])
        stands = f"time limit: {left} left for {needed} of work without a cap"
        lines.append(
            {
                "tight": f"{stands}; so its floor allows no more than {percent(deadline['max_loss'])}",
                "late": f"{stands}: too little even without a cap, so what its flex allows counts",
            }.get(deadline["verdict"], f"{stands}: it fits")
        )
    if given_s := told.get("given_s"):
        lines.append(f"time limit raised by {given_s // 60} min for what caps have cost it")
    if note := told.get("raise_note"):
        lines.append(f"time limit not raised by all that caps have cost it: {note}")
    return lines


def _promised_none(told: _Told) -> str:
    promise = "no cap but in an emergency"
    capped_s = told["cost"]["capped_s"]
    if capped_s <= 0 and not told.get("shared_capped"):
        return f"{promise}: kept"
    if floor_stretches(told["events"] or ()):
        return f"{promise}: there was one"
    if capped_s <= 0:
        return f"{promise}: but caps held down a GPU that it shared"
    return f"{promise}: but caps held it down for {format_duration(told['cost']['capped_s'])}"
