"""``slurm-pfi limit``: show, set and clear site limits."""

from __future__ import annotations

import datetime as dt
import re
import time
from typing import Any

import click

from ..bus.control import WRONG_USE
from ..units import UnitError, format_power, parse_duration_s, parse_power_mw
from .common import ask_controller, console, fail, print_json, table

_CLOCK = re.compile(r"(\d{1,2}):(\d{2})")


@click.group()
def limit() -> None:
    """Show, set or clear site limits."""


@limit.command("show")
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, powers in mW")
@click.pass_context
def show(context: click.Context, as_json: bool) -> None:
    """Show all limits and the one that binds."""
    data = ask_controller(context, "limit_show").data
    if as_json:
        print_json(data)
        return
    if not data["limits"]:
        click.echo("no limit is set")
        return
    columns = (("ID", "left"), ("REV", "right"), ("CLASS", "left"), ("SOURCE", "left"), ("STEPS", "left"))
    console().print(table("", columns, (_row(entry) for entry in data["limits"])))


def _row(entry: dict[str, Any]) -> list[str]:
    steps = ", ".join(
        f"{'none' if step['limit_mw'] is None else format_power(step['limit_mw'])} from {_local(step['start_unix_s'])}"
        for step in entry["steps"]
    )
    return [entry["id"], str(entry["revision"]), entry["class"], entry["source"], steps]


@limit.command("set")
@click.argument("power")
@click.option(
    "--from", "start", metavar="TIME", help="begin later: 18:00, an ISO time, or a duration from now"
)
@click.option("--until", metavar="TIME", help="end at 18:00 (the next one) or at an ISO time with offset")
@click.option("--for", "duration", metavar="DURATION", help="end after this long: 2h, 90m")
@click.option(
    "--emergency", is_flag=True, help="may pass the floors that users were promised; announced and audited"
)
@click.option(
    "--id",
    "limit_id",
    default="manual",
    show_default=True,
    help="name of the limit; the same name replaces it",
)
@click.option("--json", "as_json", is_flag=True, help="machine-readable output")
@click.pass_context
def set_(
    context: click.Context,
    power: str,
    start: str | None,
    until: str | None,
    duration: str | None,
    emergency: bool,
    limit_id: str,
    as_json: bool,
) -> None:
    """Limit what the site may draw to POWER, with its unit: 18.5kW.

    Without --until or --for the limit stays until it is cleared.
    """
    now_s = time.time()
    if until is not None and duration is not None:
        fail("give --until or --for, not both", WRONG_USE)
    try:
        limit_mw = parse_power_mw(power)
        start_s = now_s if start is None else parse_start_s(start, now_s)
        end_s = None if until is None else parse_time_s(until, now_s)
        if duration is not None:
            end_s = start_s + parse_duration_s(duration)
    except UnitError as error:
        fail(str(error), WRONG_USE)
    if end_s is not None and end_s <= start_s:
        fail("the limit would end before it begins", WRONG_USE)
    args = {
        "id": limit_id,
        "class": "emergency" if emergency else "economic",
        "limit_mw": limit_mw,
        "start_unix_s": None if start is None else start_s,
        "end_unix_s": end_s,
    }
    reply = ask_controller(context, "limit_set", args)
    if as_json:
        print_json(reply.data)
    else:
        click.echo(reply.message)


@limit.command("clear")
@click.argument("limit_id", default="manual")
@click.option("--all", "everything", is_flag=True, help="clear every limit")
@click.option("--json", "as_json", is_flag=True, help="machine-readable output")
@click.pass_context
def clear(context: click.Context, limit_id: str, everything: bool, as_json: bool) -> None:
    """End the limit LIMIT_ID now."""
    reply = ask_controller(context, "limit_clear", {"id": None if everything else limit_id})
    if as_json:
        print_json(reply.data)
    else:
        click.echo(reply.message)


def parse_start_s(text: str, now_s: float) -> float:
    """A start: a duration from now, or a time as in `parse_time_s`. Raises UnitError."""
    try:
        return now_s + parse_duration_s(text)
    except UnitError:
        return parse_time_s(text, now_s)


def parse_time_s(text: str, now_s: float) -> float:
    """``18:00`` (the next one on this host's clock) or an ISO time with its offset, as Unix seconds.

    An ISO time without an offset is refused: it could be any of several instants. Raises UnitError.
    """
    match = _CLOCK.fullmatch(text.strip())
    now = dt.datetime.fromtimestamp(now_s).astimezone()
    if match is not None:
        hour, minute = int(match.group(1)), int(match.group(2))
        if hour > 23 or minute > 59:
            raise UnitError(f"time {text!r} is not on the clock: write 00:00 to 23:59")
        day = now.date()
        at = dt.datetime.combine(day, dt.time(hour, minute)).astimezone()
        if at <= now:
            at = dt.datetime.combine(day + dt.timedelta(days=1), dt.time(hour, minute)).astimezone()
        return at.timestamp()
    try:
        at = dt.datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise UnitError(f"time {text!r} is not understood: write 18:00 or 2026-11-30T18:00+01:00") from error
    if at.tzinfo is None:
        raise UnitError(f"time {text!r} has no offset from UTC: write 2026-11-30T18:00+01:00 or ...Z")
    return at.timestamp()


def _local(unix_s: float) -> str:
    return dt.datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
