"""What the controller knows of one run, in words. Pure: from its answer to lines of text, as long as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..units import Z95, format_duration, format_power
from .clock import local_text
from .common import SIMULATED, percent
from .jobs import DISPUTED, job_text
from .status import folded
from .tables import plain

HEADINGS: Final = ("Asked", "Known", "Done", "Cost", "Saved", "Promised")

MOST_TOLD: Final = 24
"""Entries of the timeline that are shown: a screen of them."""

SHARED: Final = "it shared a GPU with other jobs while caps held that down, which is not measured"

NO_PROGRESS: Final = "the job reports no progress"

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
    parts = (_asked, _known, _done, _cost, _saved, _promised)
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


def _ended(told: _Told) -> bool:
    return told["ended_unix_s"] is not None


# ------------------------------------------------------------------------------------------------ asked, known


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


def _known(told: _Told) -> list[str]:
    lines = [_known_draw(told), _known_rate(told)]
    if told.get("shares") and not _ended(told):
        lines.append(
            "it shares its GPU with other jobs: not measured meanwhile, and no cap below any of their floors"
        )
    if told.get("disputed"):
        lines.append(f"{DISPUTED}: {told['disputed']}; what its GPUs did counts")
    elif told["doubt"]:
        lines.append(f"its counter is not believed: {told['doubt']}; so curves of other jobs count")
    lines.append(_known_pfi(told))
    if curve := _known_curve(told):
        lines.append(curve)
    loss, sd, cap_mw = told["expected_loss"], told["expected_loss_sd"], told["target_cap_mw"]
    if loss is not None and cap_mw is not None and not _ended(told):
        by = f"by {_basis(told)}"
        lines.append(
            f"at its present cap of {format_power(cap_mw)} it is expected to lose "
            f"{percent(loss)} of its throughput{_around(loss, sd)}, {by}"
        )
    return lines


def _basis(told: _Told) -> str:
    if not told["learned"]:
        return "curves of other jobs"
    if told.get("disputed"):
        return "what its GPUs did"
    return f"what was measured of {'it' if told['measured'] else 'runs of the same work'}"


def _known_draw(told: _Told) -> str:
    draw = told["baseline_draw_mw"]
    if draw is None:
        prior_mw = told["prior_mw"]
        prior = f": its limit of {format_power(prior_mw)} is taken as the most it can be" if prior_mw else ""
        return f"draw without a cap: not known, it was never seen without one for long enough{prior}"
    how = {
        "seen": "seen on this run",
        "recalled": "recalled from earlier runs of the same work, not seen on this one",
    }.get(told["baseline"], "at most")
    return f"draw without a cap: {format_power(draw)} a GPU, {how}"


def _known_rate(told: _Told) -> str:
    if not told["reporting"]:
        return f"throughput without a cap: not known, {NO_PROGRESS} (it could, with slurm_pfi.progress)"
    rate = told["baseline_rate_per_s"]
    if rate is None:
        return "throughput without a cap: not known, it has not yet worked without one for long enough"
    how = "seen on this run" if told["baseline_rate"] == "seen" else "recalled from earlier runs"
    return (
        f"throughput without a cap: {_figure(rate)} {_unit(told)}/s, give or take "
        f"{percent(Z95 * told['baseline_sd'])}, {how}"
    )


def _known_pfi(told: _Told) -> str:
    pfi = told["pfi"]
    source = {
        "measured": "measured on this run",
        "predicted": "predicted from its telemetry",
        "declared": "declared by the site for this partition, not measured",
        "default": "of curves of other jobs, not measured on this one",
    }.get(pfi["source"], str(pfi["source"]))
    between = "" if pfi["low"] is None else f" ({pfi['low']:.2f} to {pfi['high']:.2f})"
    grid = f"{min(pfi['grid_w']):.0f} to {max(pfi['grid_w']):.0f} W"
    return (
        f"PFI {pfi['value']:.2f}{between} on caps of {grid}, {source}: "
        f"1 % of its throughput gives about {pfi['value']:.1f} % of its power"
    )


def _known_curve(told: _Told) -> str:
    points = told.get("curve") or []
    if not points:
        return ""
    basis = _basis(told)
    parts = []
    for point in points:
        low, high = (max(0.0, point["loss"] + side * Z95 * point["sd"]) for side in (-1, 1))
        parts.append(
            f"{format_power(point['cap_mw'])} {100 * point['loss']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
        )
    return f"what caps cost it, by {basis} (95 %): {', '.join(parts)}"


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
    if told["limit"] is not None and told["target_cap_mw"] is not None and not _ended(told):
        limit = f"{format_power(told['limit']['limit_mw'])} ({', '.join(told['limit']['ids'])})"
        why = f"for the limit of {limit}" if told["limit"]["ids"] else "while power is given back slowly"
        lines.append(f"its cap now: {format_power(told['target_cap_mw'])} a GPU, {why}")
    if cost["capped_s"] > 0:
        lines.append(
            f"caps held it down for {format_duration(cost['capped_s'])} of the "
            f"{format_duration(cost['known_s'])} that it was watched"
        )
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


# ------------------------------------------------------------------------------------------------ cost, saved


def _cost(told: _Told) -> list[str]:
    cost = told["cost"]
    if cost["capped_s"] <= 0 and not told.get("shared_capped"):
        return ["nothing: no cap has lowered its draw"]
    if cost["loss_capped"] is None or cost["lost_low"] is None:
        return [_cost_unknown(told)]
    low, high = cost["loss_capped_low"], cost["loss_capped_high"]
    between = "" if low is None or high is None else f" ({_range(low, high)})"
    lines = [
        f"{percent(cost['loss_capped'])} of its throughput while capped{between}, "
        f"{percent(cost['loss'])} over the time it was watched, by its own counter"
    ]
    if cost["lost_low"] <= 0 <= cost["lost_high"]:
        lines.append("so little that it cannot be told from nothing")
    few, most = _about(cost["lost_low"]), _about(cost["lost_high"])
    work = f"{_about(cost['lost'])} {_unit(told)} not done ({few} to {most})"
    if cost["longer_s"] is not None:
        low_s, high_s = max(0.0, cost["longer_low_s"]), max(0.0, cost["longer_high_s"])
        lines.append(
            f"that is {format_duration(max(0.0, cost['longer_s']))} longer for the same work "
            f"({format_duration(low_s)} to {format_duration(high_s)}), or {work}"
        )
    else:
        lines.append(f"that is {work}")
    return lines


def _cost_unknown(told: _Told) -> str:
    if told.get("shared_capped"):
        why = SHARED
    elif not told["reporting"]:
        why = NO_PROGRESS
    elif told.get("disputed"):
        why = DISPUTED
    elif told["doubt"]:
        why = "its counter is not believed"
    else:
        why = "its speed without a cap was not seen for long enough"
    if shown := told.get("by_activity"):
        return (
            f"not known: {why}; estimated from the activity of its GPUs, about {percent(shown['loss'])} of its "
            f"throughput while capped{_around(shown['loss'], shown['sd'])}"
        )
    curves = told["by_curves"] or (
        {"loss": told["expected_loss"], "sd": told["expected_loss_sd"]}
        if told["expected_loss"] is not None
        else None
    )
    if curves is None:
        return f"not known: {why}"
    return (
        f"not known: {why}; by curves of other jobs about {percent(curves['loss'])} of its throughput "
        f"while capped{_around(curves['loss'], curves['sd'])}"
    )


def _saved(told: _Told) -> list[str]:
    cost = told["cost"]
    drawn = f"it drew {_energy(cost['drawn_wh'])} while it was watched"
    if told.get("shared_capped"):
        return [f"not known: {SHARED}; {drawn} alone"]
    if cost["capped_s"] <= 0:
        return [f"nothing; {drawn}"]
    if cost["saved_wh"] is None:
        return [f"not known, as what it draws without a cap was not seen; {drawn}"]
    return [f"{_energy(cost['saved_wh'])}; {drawn}"]


def _energy(energy_wh: float) -> str:
    return f"{energy_wh / 1000:,.2f} kWh" if abs(energy_wh) >= 999.5 else f"{energy_wh:.3g} Wh"


# ------------------------------------------------------------------------------------------------ promised


def _promised(told: _Told) -> list[str]:
    if told["flex"] is None:
        return []
    return [line for line in (_promised_floor(told), _promised_loss(told)) if line]


def _promised_floor(told: _Told) -> str:
    floor_mw, events = told["floor_mw"], told["events"]
    if floor_mw is None:
        return ""
    passed = [event for event in events or () if event["kind"] == "floor_passed"]
    floor = f"floor of {format_power(floor_mw)} a GPU"
    if told["floor_passed"] and not _ended(told):
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
        return f"{promise}: it lost {percent(loss)} ({_range(low, high)}), the emergency included"
    if low > most:
        return f"{promise}: broken, it lost {percent(loss)} ({_range(low, high)})"
    verdict = "probably kept" if loss <= most else "probably broken"
    return f"{promise}: {verdict}, it lost {percent(loss)} ({_range(low, high)})"


def _promised_none(told: _Told) -> str:
    promise = "no cap but in an emergency"
    if told["cost"]["capped_s"] <= 0:
        return f"{promise}: kept"
    if floor_stretches(told["events"] or ()):
        return f"{promise}: there was one"
    return f"{promise}: but caps held it down for {format_duration(told['cost']['capped_s'])}"


# ------------------------------------------------------------------------------------------------ figures


def _around(value: float, sd: float | None) -> str:
    """The 95 % interval of a loss, within what a loss can be; empty while it is unknown."""
    if sd is None:
        return ""
    return f" ({_range(max(0.0, value - Z95 * sd), min(1.0, value + Z95 * sd))})"


def _range(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def _about(value: float) -> str:
    """A count that is no more than an estimate: three digits of it."""
    return _figure(float(f"{value:.3g}"))


def _figure(value: float) -> str:
    """A count in three digits that count, or whole where it is larger."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _unit(told: _Told) -> str:
    return str(told["unit"] or "units of its counter")
