"""Times as admins type them, on clocks that are set forward and back.

Each question runs in a process of its own, because a time zone belongs to a process. The zone is central European
time, written out, so that no zone file is needed: forward on 2026-03-29 at 02:00, back on 2026-10-25 at 03:00.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from slurm_pfi.cli.clock import local_text, parse_start_s, parse_time_s
from slurm_pfi.units import UnitError

CENTRAL_EUROPE = "CET-1CEST,M3.5.0,M10.5.0/3"
PROGRAM = """
import json, sys
from slurm_pfi.cli.clock import local_text, parse_time_s
from slurm_pfi.units import UnitError
answers = []
for text, now_s in json.load(sys.stdin):
    try:
        at_s = parse_time_s(text, now_s)
        answers.append([at_s, local_text(at_s)])
    except UnitError as error:
        answers.append([None, str(error)])
json.dump(answers, sys.stdout)
"""


def utc_s(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


def in_central_europe(questions: list[tuple[str, str]]) -> list[tuple[float | None, str]]:
    asked = json.dumps([[text, utc_s(now)] for text, now in questions])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=asked,
        env={**os.environ, "TZ": CENTRAL_EUROPE},
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[Any] = json.loads(done.stdout)
    return [(at_s, text) for at_s, text in answers]


READ = [
    # text, now, the instant meant
    ("18:00", "2026-07-09T15:59:59Z", "2026-07-09T16:00:00Z"),
    ("18:00", "2026-07-09T16:00:00Z", "2026-07-10T16:00:00Z"),
    ("9:05", "2026-01-09T12:00:00Z", "2026-01-10T08:05:00Z"),
    # The hour that comes twice: the first one ahead.
    ("02:30", "2026-10-24T12:00:00Z", "2026-10-25T00:30:00Z"),
    ("02:30", "2026-10-25T00:45:00Z", "2026-10-25T01:30:00Z"),
    ("02:30", "2026-10-25T01:45:00Z", "2026-10-26T01:30:00Z"),
    # Once the hour that is left out has passed, the next day's is meant.
    ("02:30", "2026-03-29T01:10:00Z", "2026-03-30T00:30:00Z"),
    ("03:00", "2026-03-29T00:30:00Z", "2026-03-29T01:00:00Z"),
    # With an offset the host's zone does not matter.
    ("2026-10-25T02:30:00+02:00", "2026-10-24T12:00:00Z", "2026-10-25T00:30:00Z"),
    ("2026-10-25T02:30:00+01:00", "2026-10-24T12:00:00Z", "2026-10-25T01:30:00Z"),
    ("2026-07-09T19:00:00.000Z", "2026-07-01T12:00:00Z", "2026-07-09T19:00:00Z"),
    ("20260709T190000Z", "2026-07-01T12:00:00Z", "2026-07-09T19:00:00Z"),
]
REFUSED = [
    # Left out by the clock, asked the day before and a quarter of an hour before.
    ("02:30", "2026-03-28T12:00:00Z", "02:30 does not exist on 2026-03-29"),
    ("02:30", "2026-03-29T00:45:00Z", "02:30 does not exist on 2026-03-29"),
    ("2026-10-25T02:30:00", "2026-10-24T12:00:00Z", "has no offset from UTC"),
    ("2026-03-29T02:30:00", "2026-03-28T12:00:00Z", "has no offset from UTC"),
    ("2026-07-09", "2026-07-01T12:00:00Z", "has no offset from UTC"),
    ("24:00", "2026-07-01T12:00:00Z", "not on the clock"),
    ("12:60", "2026-07-01T12:00:00Z", "not on the clock"),
    ("yesterday", "2026-07-01T12:00:00Z", "is not understood: write 18:00 or 2026-11-30T18:00+01:00"),
    ("", "2026-07-01T12:00:00Z", "is not understood"),
]


def test_what_is_read_and_what_is_refused() -> None:
    answers = in_central_europe([(text, now) for text, now, _ in READ + REFUSED])
    for (text, now, wanted), (at_s, _) in zip(READ, answers, strict=False):
        assert at_s == utc_s(wanted), (text, now)
    for (text, now, why), (at_s, message) in zip(REFUSED, answers[len(READ) :], strict=True):
        assert at_s is None, (text, now)
        assert why in message
        assert "2026-11-30T18:00+01:00" in message or "write 00:00 to 23:59" in message


def test_the_two_readings_of_a_repeated_hour_are_shown_apart() -> None:
    answers = in_central_europe([("02:30", "2026-10-24T12:00:00Z"), ("02:30", "2026-10-25T00:45:00Z")])
    assert [text for _, text in answers] == ["2026-10-25 02:30:00 +0200", "2026-10-25 02:30:00 +0100"]


def test_instants_are_compared_and_not_their_text() -> None:
    start, end = "2026-07-09T19:00:00+01:00", "2026-07-09T18:30:00+00:00"
    assert parse_time_s(end, 0) - parse_time_s(start, 0) == 30 * 60
    assert end < start


def test_a_day_is_24_hours_also_across_a_change_of_the_clock() -> None:
    now_s = utc_s("2026-10-24T12:00:00+02:00")
    assert parse_start_s("1d", now_s) == now_s + 86_400


def test_a_start_may_be_a_duration_or_a_time() -> None:
    assert parse_start_s("90m", 1000.0) == 1000.0 + 5400
    assert parse_start_s("2026-07-09T19:00Z", 0) == utc_s("2026-07-09T19:00Z")
    with pytest.raises(UnitError):
        parse_start_s("soon", 0)
    assert local_text(0.0).startswith(("1970-01-01", "1969-12-31"))
