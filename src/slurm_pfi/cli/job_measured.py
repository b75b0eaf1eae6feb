"""What was measured of one run, and what caps cost and saved it, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..units import Z95, format_duration, format_power
from .common import percent
from .jobs import DISPUTED

SHARED: Final = "it shared a GPU with other jobs while caps held that down, which is not measured"

NO_PROGRESS: Final = "the job reports no progress"

_Told = Mapping[str, Any]


def ended(told: _Told) -> bool:
    """Whether the run is over."""
    return told["ended_unix_s"] is not None


# ------------------------------------------------------------------------------------------------ known


def known_lines(told: _Told) -> list[str]:
    """Draw, throughput, PFI and curve, and how far its counter is believed."""
    lines = [_known_draw(told), _known_rate(told)]
    if told.get("shares") and not ended(told):
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
    if loss is not None and cap_mw is not None and not ended(told):
        by = f"by {_basis(told)}"
        lines.append(
            f"at its present cap of {format_power(cap_mw)} it is expected to lose "
            f"{percent(loss)} of its throughput{around(loss, sd)}, {by}"
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


# ------------------------------------------------------------------------------------------------ cost, saved


def cost_lines(told: _Told) -> list[str]:
    """What caps cost it, or why nobody knows."""
    cost = told["cost"]
    if cost["capped_s"] <= 0 and not told.get("shared_capped"):
        return ["nothing: no cap has lowered its draw"]
    if cost["loss_capped"] is None or cost["lost_low"] is None:
        return [_cost_unknown(told)]
    low, high = cost["loss_capped_low"], cost["loss_capped_high"]
    between = "" if low is None or high is None else f" ({span(low, high)})"
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
            f"throughput while capped{around(shown['loss'], shown['sd'])}"
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
        f"while capped{around(curves['loss'], curves['sd'])}"
    )


def saved_lines(told: _Told) -> list[str]:
    """What caps saved it."""
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


# ------------------------------------------------------------------------------------------------ figures


def around(value: float, sd: float | None) -> str:
    """The 95 % interval of a loss, within what a loss can be; empty while it is unknown."""
    if sd is None:
        return ""
    return f" ({span(max(0.0, value - Z95 * sd), min(1.0, value + Z95 * sd))})"


def span(low: float, high: float) -> str:
    """From one share to another."""
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def _about(value: float) -> str:
    """A count that is no more than an estimate: three digits of it."""
    return _figure(float(f"{value:.3g}"))


def _figure(value: float) -> str:
    """A count in three digits that count, or whole where it is larger."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _unit(told: _Told) -> str:
    return str(told["unit"] or "units of its counter")
