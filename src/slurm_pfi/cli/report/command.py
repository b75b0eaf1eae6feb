"""``slurm-pfi report``: what a window asked, what was delivered, who gave what; as text, page and CSV."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from ...bus.asking import UNREACHABLE, WRONG_USE
from ...controller.answers.outcome import Given, WindowReport, decode, decode_windows
from ...files import write_atomically
from ...store.rows import WindowRow
from ...units import format_duration, format_power
from ..common import ask_controller, console, fail, percent, print_json
from ..tables import Column, show_table
from . import words
from .csv_files import csv_files
from .page import page

WIDTH: Final = 80
MOST_ROWS: Final = 10


@click.command()
@click.argument("window", type=click.IntRange(min=1), required=False)
@click.option(
    "--html", metavar="FILE", help="write the page, one file without anything beside it; - for stdout"
)
@click.option("--csv", "csv_dir", metavar="DIR", help="write the figures as CSV files into this folder")
@click.option("--json", "as_json", is_flag=True, help="machine-readable output, powers in mW")
@click.option("--list", "as_list", is_flag=True, help="the windows that are known, the last first")
@click.pass_context
def report(
    context: click.Context,
    window: int | None,
    html: str | None,
    csv_dir: str | None,
    as_json: bool,
    as_list: bool,
) -> None:
    """Show what a window delivered and what it cost. WINDOW is its number, by default the last.

    A window is a time in which a limit was lower than what the site could draw.
    """
    if as_list:
        if window is not None or html is not None or csv_dir is not None:
            raise click.UsageError("--list shows all windows: give no number and no file with it")
        _list(context, as_json)
        return
    data = ask_controller(context, "report", {"window": window}).data
    found = _understood(decode, data)
    if html is not None and html != "-":
        _write(Path(html), page(found))
    if csv_dir is not None:
        _write_all(Path(csv_dir), csv_files(found))
    if html == "-":
        click.echo(page(found), nl=False)
    elif as_json:
        print_json(data)
    else:
        _show(found, html, csv_dir)


def _understood(how: Any, data: Any) -> Any:
    try:
        return how(data)
    except msgspec.ValidationError as error:
        fail(f"the controller's answer is not understood, is it of another version? {error}", UNREACHABLE)


# ---------------------------------------------------------------------------------------------------- files


def _mode() -> int:
    """Of any file that this user makes: a report names jobs, and the umask says who may read it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text.encode("utf-8", "replace"), _mode())
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror or error}", WRONG_USE)


def _write_all(folder: Path, files: dict[str, str]) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        fail(f"{folder} cannot be made: {error.strerror or error}", WRONG_USE)
    for name, text in files.items():
        _write(folder / name, text)


# ---------------------------------------------------------------------------------------------------- terminal


def _list(context: click.Context, as_json: bool) -> None:
    data = ask_controller(context, "windows").data
    if as_json:
        print_json(data)
        return
    found: list[WindowRow] = _understood(decode_windows, data)
    out = console()
    if not found:
        out.print("no window was recorded yet")
        return
    show_table(out, _WINDOWS, found)


def _length(window: WindowRow) -> str:
    closed_s = window.closed_unix_s
    return "open" if closed_s is None else format_duration(closed_s - window.opened_unix_s)


_WINDOWS: Final = (
    Column("WINDOW", lambda w: str(w.id), side="right"),
    Column("OPENED (UTC)", lambda w: words.utc(w.opened_unix_s)),
    Column("LENGTH", _length, side="right"),
    Column("LIMIT", lambda w: format_power(w.limit_mw), side="right"),
    Column("CLASS", lambda w: w.class_, drop=2),
    Column("POLICY", lambda w: w.policy, drop=3),
    Column("MODE", lambda w: w.mode, drop=1),
    Column("LIMITS", lambda w: ", ".join(w.limit_ids), clip=6, drop=4),
)


def _show(found: WindowReport, html: str | None, csv_dir: str | None) -> None:
    for line in summary(found):
        click.echo(line)
    if found.runs:
        click.echo()
        show_table(console(), _RUNS, found.runs[:MOST_ROWS])
        if len(found.runs) > MOST_ROWS:
            click.echo(
                f"and {words.count(len(found.runs) - MOST_ROWS, 'run')} that gave less (--json, --csv)"
            )
    click.echo()
    if html is not None:
        click.echo(f"page: {html}")
    if csv_dir is not None:
        click.echo(f"CSV files: {csv_dir}")
    if html is None:
        click.echo(f"as a page: slurm-pfi report {found.window.id} --html window-{found.window.id}.html")


def summary(found: WindowReport) -> list[str]:
    """The window in lines of at most 80 columns."""
    window = found.window
    told = [
        f"window {window.id} on {window.cluster}: {words.headline(window, found.until_unix_s)}",
        words.limit_line(window),
        *words.warnings(found),
        words.verdict(found),
        words.counting(found),
        words.top_down(found),
        words.bottom_up(found),
        words.cost(found),
        words.promises(found),
    ]
    if after := words.rebound(found):
        told.append(after)
    if window.closed_unix_s is not None:
        told.append(words.ended_line(window))
    return [line for text in told for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]


def _draws(run: Given) -> str:
    return f"{format_power(run.facts.baseline_draw_mw)} -> {format_power(run.draw_mw)}"


_RUNS: Final = (
    Column("JOB", lambda run: words.job_of(run.facts), side="right"),
    Column("USER", lambda run: run.facts.user or "?", clip=5, drop=2),
    Column("GPUS", lambda run: str(run.facts.gpus), side="right"),
    Column("FLEX", lambda run: run.facts.flex or "?", side="right", drop=1),
    Column("DRAW/GPU", _draws, side="right"),
    Column("GAVE", lambda run: format_power(run.gave_mw), side="right"),
    Column("OF ITS DRAW", lambda run: percent(run.reduction), side="right"),
    Column("LOSS", lambda run: percent(run.loss), side="right"),
)
