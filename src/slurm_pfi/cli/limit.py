"""``slurm-pfi limit``: show, set and clear site limits."""

from __future__ import annotations

import re
import time
from typing import Any, Final

import click

from ..bus.asking import WRONG_USE
from ..units import UnitError, format_duration, format_power, parse_duration_s, parse_power_mw
from .clock import local_text, parse_start_s, parse_time_s
from .common import ask_controller, console, fail, print_json, tell
from .tables import Column, show_table

_LONGEST_S: Final = 10 * 366 * 86400.0
_NEGATIVE: Final = re.compile(r"-[0-9.].*")


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
    out = console()
    if not data["known"]:
        out.print("LIMITS UNREADABLE: the last plans stay in force; see the controller's log")
        return
    if not data["limits"]:
        out.print("no limit is set")
        return
    show_table(out, _COLUMNS, [row for entry in data["limits"] for row in _rows(entry)])
    binding = data["binding"]
    if binding is None:
        out.print("no limit binds now")
    else:
        out.print(
            f"binds now: {format_power(binding['limit_mw'])} ({', '.join(binding['ids'])})", markup=False
        )


def _rows(entry: dict[str, Any]) -> list[dict[str, str]]:
    """One row for each step; what they share stands on the first."""
    rows = []
    for place, step in enumerate(entry["steps"]):
        first = place == 0
        rows.append(
            {
                "id": entry["id"] if first else "",
                "revision": str(entry["revision"]) if first else "",
                "class": entry["class"] if first else "",
                "source": entry["source"] if first else "",
                "limit": "none" if step["limit_mw"] is None else format_power(step["limit_mw"]),
                "from": local_text(step["start_unix_s"]),
            }
        )
    return rows


_COLUMNS: Final = (
    Column("ID", lambda row: row["id"], clip=10),
    Column("REV", lambda row: row["revision"], side="right", drop=1),
    Column("CLASS", lambda row: row["class"]),
    Column("SOURCE", lambda row: row["source"], clip=8, drop=2),
    Column("LIMIT", lambda row: row["limit"], side="right"),
    Column("FROM", lambda row: row["from"]),
)


class _SetCommand(click.Command):
    """Takes ``-5kW`` as the power it was meant to be, which is then refused as such, not as an unknown option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        valued = {
            name for option in self.params for name in option.opts if not getattr(option, "is_flag", True)
        }
        negative = [
            place
            for place, word in enumerate(args)
            if _NEGATIVE.fullmatch(word) and (place == 0 or args[place - 1] not in valued)
        ]
        if negative and "--" not in args:
            moved = [args[place] for place in negative]
            args = [word for place, word in enumerate(args) if place not in negative] + ["--", *moved]
        return super().parse_args(ctx, args)


@limit.command("set", cls=_SetCommand)
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
    try:
        limit_mw = parse_power_mw(power)
    except UnitError as error:
        fail(str(error), WRONG_USE)
    start_s, end_s = _span(start, until, duration, now_s)
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
        return
    tell(reply.message)
    tell(_when(None if start is None else start_s, end_s, now_s))


def _span(
    start: str | None, until: str | None, duration: str | None, now_s: float
) -> tuple[float, float | None]:
    """Begin and end in Unix seconds; ends the command when they make no sense."""
    if until is not None and duration is not None:
        fail("give --until or --for, not both", WRONG_USE)
    try:
        option = "--from"
        start_s = now_s if start is None else parse_start_s(start, now_s)
        option = "--until"
        end_s = None if until is None else parse_time_s(until, now_s)
        option = "--for"
        if duration is not None:
            end_s = start_s + parse_duration_s(duration)
    except UnitError as error:
        fail(f"{option}: {error}", WRONG_USE)
    if end_s is not None and end_s <= now_s:
        ago = format_duration(now_s - end_s)
        fail(f"the limit would end {ago} ago, at {local_text(end_s)}; nothing was set", WRONG_USE)
    if end_s is not None and end_s <= start_s:
        text = f"it begins at {local_text(start_s)} and ends at {local_text(end_s)}"
        fail(f"the limit would end before it begins: {text}; nothing was set", WRONG_USE)
    if max(start_s, end_s or 0) > now_s + _LONGEST_S:
        fail("the limit would begin or end in more than ten years; check the times", WRONG_USE)
    return start_s, end_s


def _when(start_s: float | None, end_s: float | None, now_s: float) -> str:
    begins = "in force now" if start_s is None else f"from {local_text(start_s)} ({_ahead(start_s, now_s)})"
    if end_s is None:
        return f"{begins}, until 'slurm-pfi limit clear'"
    return f"{begins}, until {local_text(end_s)} ({_ahead(end_s, now_s)})"


def _ahead(at_s: float, now_s: float) -> str:
    return f"in {format_duration(at_s - now_s)}" if at_s > now_s else "at once"


@limit.command("clear", short_help="End a limit now.")
@click.argument("limit_id", default="manual")
@click.option("--all", "everything", is_flag=True, help="clear every limit")
@click.option("--json", "as_json", is_flag=True, help="machine-readable output")
@click.pass_context
def clear(context: click.Context, limit_id: str, everything: bool, as_json: bool) -> None:
    """End the limit LIMIT_ID now; without a name the one that is called manual."""
    reply = ask_controller(context, "limit_clear", {"id": None if everything else limit_id})
    if as_json:
        print_json(reply.data)
    else:
        tell(reply.message)
