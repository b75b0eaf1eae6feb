"""What people read of the audit log: its entries in plain words, for the history. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..store.rows import EventRow
from ..units import format_duration, format_power


def audit_event(event: str, fields: Mapping[str, Any], now_unix_s: float) -> EventRow | None:
    """An entry of the audit log in plain words; None for what people need not read, or what is told elsewhere."""
    run = str(fields.get("run", ""))
    text = _words(event, fields)
    return None if text is None else EventRow(unix_s=now_unix_s, run=run, kind=event, text=text)


def _words(event: str, fields: Mapping[str, Any]) -> str | None:
    match event:
        case "admitted":
            asked = (
                f" ({fields['user_flex']!r} was asked)"
                if fields["user_flex"] not in ("", fields["flex"])
                else ""
            )
            return f"admitted with flex {fields['flex'] or 'not yet known'}{asked}"
        case "ended" | "run_refused":
            return f"{'ended' if event == 'ended' else 'not managed'}{_because(fields)}"
        case "floor_passed":
            return (
                f"an emergency limit takes it to {format_power(fields['cap_mw'])} a GPU, "
                f"below its floor of {format_power(fields['floor_mw'])}"
            )
        case "floor_breach":
            return f"waits for power, {format_duration(fields['waited_s'])} so far: its floor does not fit"
        case "infeasible":
            return _short(fields)
        case "feasible":
            return "the limit can be held again"
        case "limit":
            done = "set" if fields["action"] == "set" else "cleared"
            return f"limit {fields['id']} was {done} by uid {fields['uid']}"
        case "off":
            return (
                "switched off: no limit is enforced" if fields["off"] else "switched on: limits are enforced"
            )
        case "rebound" if not fields["open"]:
            return "the slow release is over: no cap is held any more"
        case "leader":
            return f"a controller took command (epoch {fields['epoch']})"
        case "deadline":
            return _stands(fields)
        case "time_limit":
            return _raised(fields)
    return None


def _short(fields: Mapping[str, Any]) -> str:
    """What the limit lacks."""
    silent = (
        f"; counted at their worst, not answering: {_names(fields['silent'])}" if fields["silent"] else ""
    )
    return (
        f"the limit cannot be held: {format_power(fields['shortfall_mw'])} short, "
        f"with every run as low as it may go{silent}"
    )


def _stands(fields: Mapping[str, Any]) -> str:
    """How a run stands to its time limit."""
    if fields["left_s"] is None:
        return "how it stands to its time limit is no longer known: its flex counts"
    stands = f"{format_duration(fields['left_s'])} left for {format_duration(fields['needed_s'])} of work"
    match fields["verdict"]:
        case "tight":
            most = f"{100 * (fields['max_loss'] or 0):.1f} %"
            return f"its floor allows no more than {most} for its time limit: {stands}"
        case "late":
            return f"its time limit is too short even without a cap: {stands}; its flex counts"
    return f"its work fits its time limit: {stands}; its flex counts"


def _raised(fields: Mapping[str, Any]) -> str:
    if fields["new_s"] is None:
        return f"time limit not raised: {fields['why']}"
    return (
        f"time limit raised from {fields['old_s'] // 60} to {fields['new_s'] // 60} min: "
        f"caps have cost it {format_duration(fields['lost_s'])}"
    )


def _because(fields: Mapping[str, Any]) -> str:
    return f": {fields['reason']}" if fields.get("reason") else ""


def _names(names: list[str], most: int = 8) -> str:
    """No event grows with the site."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
