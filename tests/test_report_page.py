"""The page of a window and its other forms: whole, self-contained, honest about the unknown, and not to be fooled."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_pfi.cli.report import words
from slurm_pfi.cli.report.charts import WIDE, line, pieces, site_chart, steps, text
from slurm_pfi.cli.report.command import summary
from slurm_pfi.cli.report.csv_files import csv_files
from slurm_pfi.cli.report.page import page
from slurm_pfi.cli.report.scale import Scale, round_axis, time_ticks
from slurm_pfi.cli.report.table import EVERY_CAP, excerpt
from slurm_pfi.cli.root import main
from slurm_pfi.controller.answers.outcome import WindowReport
from slurm_pfi.controller.shell import Controller
from slurm_pfi.store.rows import EventRow, Row

from .report_samples import OPENED_S, facts, made_report, run_samples, window
from .site_answers import answering
from .test_controller_core import Site

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</td><script>alert(1)</script><img src=x onerror=y>&\"'"


def parsed(html: str) -> ET.Element:
    """The page as XML, which forgives nothing."""
    assert html.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(html.removeprefix("<!DOCTYPE html>\n"))


class Balance(HTMLParser):
    """Every element that is opened is closed, in order."""

    EMPTY = frozenset({"meta", "br", "path", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.EMPTY:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.stack.pop() == tag


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> WindowReport:
    return made_report(tmp_path_factory.mktemp("history"), gap=(500, 540))


# ---------------------------------------------------------------------------------------------------- the document


def test_the_page_is_well_formed_and_stands_alone(report: WindowReport) -> None:
    html = page(report)
    parsed(html)
    balance = Balance()
    balance.feed(html)
    balance.close()
    assert balance.stack == []
    assert not re.search(r"<(script|link|img|iframe|object|embed|base|form)\b", html)
    assert not re.search(r"\b(href|src|srcset|action|on[a-z]+)\s*=", html)
    assert "url(" not in html
    assert "@import" not in html
    assert set(re.findall(r"https?://[^\s\"'<]*", html)) <= {"http://www.w3.org/2000/svg"}


def test_the_page_tells_what_it_should(report: WindowReport) -> None:
    html = page(report).replace("&#160;", " ")
    assert "Window 1 on demo" in html
    assert "2026-11-30 14:00:00 to 14:20:00 UTC" in html
    assert words.SIMULATED in html
    assert "The limit was kept" in html
    assert "For 40 s more the draw is not known" in html
    assert "policy marginal" in html
    root = parsed(html)
    assert len(root.findall(f".//{SVG}svg[@class='run-chart']")) == 9
    assert len(root.findall(f".//{SVG}svg[@class='site-chart wide']")) == 1
    assert "prefers-color-scheme: dark" in html


def test_what_users_choose_stays_text(tmp_path: Path) -> None:
    hostile = facts(0, user=HOSTILE, name=HOSTILE, account=HOSTILE, flex=HOSTILE)
    event = EventRow(
        unix_s=OPENED_S + 3, run=f"demo:{HOSTILE}", kind="run_refused", text=f"not managed: {HOSTILE}"
    )
    odd = facts(1, user="a\x00\x1b[31m\u202eb", name="x" * 5000)
    made = made_report(tmp_path, runs=2, extra=(hostile, odd, event))
    html = page(made)
    root = parsed(html)
    assert "<script" not in html
    assert not re.search(r"<[^>]*onerror", html)
    assert "&lt;script&gt;" in html
    assert not {"\x00", "\x1b", "\u202e"} & set(html)
    assert max(len(cell.text or "") for cell in root.iter("td")) < 400
    assert all(len(line) <= 80 for line in summary(made))


def test_text_from_outside_is_escaped() -> None:
    assert text("<a b='c'>&\"") == "&lt;a b=&#x27;c&#x27;&gt;&amp;&quot;"
    assert text("a\nb\u202ec") == "a\ufffdb\ufffdc"


# ---------------------------------------------------------------------------------------------------- the charts


def test_an_unknown_draw_is_a_gap_and_not_a_zero(report: WindowReport) -> None:
    chart = ET.fromstring(site_chart(report, WIDE))
    (draw,) = chart.findall(f"{SVG}path[@class='draw']")
    path = draw.attrib["d"]
    assert path.count("M") == 4, "before, the two sides of the gap, after"
    bottom = WIDE.height - WIDE.bottom
    lowest = max(float(y) for y in re.findall(r"[ML ][\d.]+ ([\d.]+)", path))
    assert lowest < bottom - 5


def test_pieces_end_at_unknown_values_and_at_long_silences() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 4.0), (20.0, 5.0), (21.0, 6.0)]
    assert pieces(points, 5.0) == [[(0, 1), (1, 2)], [(3, 4)], [(20, 5), (21, 6)]]
    assert pieces([(0.0, None)], 5.0) == []


def test_a_lone_sample_can_be_seen() -> None:
    x, y = Scale(0, 10, 0, 100), Scale(0, 10, 100, 0)
    assert line([(5.0, 5.0)], x, y, 1.0) == "M50 50h1.5"


def test_steps_hold_their_value_and_leave_out_what_is_unknown() -> None:
    x, y = Scale(0, 10, 0, 100), Scale(0, 10, 100, 0)
    assert steps([(0, 2), (5, 4)], 10, x, y) == "M0 80H50V60H100"
    assert steps([(0, None), (5, 4), (8, None)], 10, x, y) == "M50 60H80"
    assert steps([], 10, x, y) == ""


def test_nothing_is_drawn_outside_of_its_paper(report: WindowReport) -> None:
    for svg in parsed(page(report)).iter(f"{SVG}svg"):
        _, _, width, height = (float(part) for part in svg.attrib["viewBox"].split())
        for path in svg.iter(f"{SVG}path"):
            for x, y in re.findall(r"[ML ](-?[\d.]+) (-?[\d.]+)", path.attrib["d"]):
                assert 0 <= float(x) <= width
                assert 0 <= float(y) <= height
        for label in svg.iter(f"{SVG}text"):
            assert 0 <= float(label.attrib["x"]) <= width
            assert 0 < float(label.attrib["y"]) <= height


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0, 9, [0, 2, 4, 6, 8, 10]),
        (22, 29, [22, 24, 26, 28, 30]),
        (1, 29, [0, 5, 10, 15, 20, 25, 30]),
        (0, 0, [0, 1]),
        (5, 5, [5, 10]),
    ],
)
def test_axes_of_power_are_round_and_hold_all_values(low: float, high: float, marks: list[float]) -> None:
    assert round_axis(low, high, 6) == marks


def test_axes_of_time_are_round_clock_times() -> None:
    assert time_ticks(OPENED_S - 120, OPENED_S + 1320, 6) == [
        (OPENED_S, "14:00"),
        (OPENED_S + 300, "14:05"),
        (OPENED_S + 600, "14:10"),
        (OPENED_S + 900, "14:15"),
        (OPENED_S + 1200, "14:20"),
    ]
    for span_s in (3, 60, 4000, 90_000, 10**6, 10**8):
        found = time_ticks(OPENED_S, OPENED_S + span_s, 6)
        assert 1 <= len(found) <= 7
    assert len(time_ticks(OPENED_S, OPENED_S, 6)) == 1


# ---------------------------------------------------------------------------------------------------- odd windows


def test_an_open_window_says_so(tmp_path: Path) -> None:
    made = made_report(tmp_path, runs=2, closed=False, length_s=300)
    html = page(made)
    parsed(html)
    assert words.STILL_OPEN in html
    assert "It closed because" not in html


def test_a_window_of_which_nothing_was_recorded(tmp_path: Path) -> None:
    made = made_report(tmp_path, runs=0, length_s=0)
    html = page(made)
    parsed(html)
    assert "is not known" in html
    assert "No run was known in this window" in html
    assert "not known" in " ".join(summary(made))


def test_a_window_of_seconds_has_not_lost_nothing(tmp_path: Path) -> None:
    made = made_report(tmp_path, runs=1, length_s=12)
    assert 0 < (made.lost_gpu_h or 0) < 0.001
    html = page(made)
    parsed(html)
    assert "&lt; 0.001" in html
    assert "less than 0.001 GPU-hours" in html


def test_one_run_without_a_baseline_or_progress(tmp_path: Path) -> None:
    bare = facts(
        0, baseline="bounded", baseline_draw_mw=None, baseline_sd=None, loss=None, user=None, flex=None
    )
    made = made_report(
        tmp_path, runs=0, length_s=300, extra=(bare, *(_mute(row) for row in run_samples(0, 300)))
    )
    html = page(made)
    parsed(html)
    assert "no known baseline" in html
    assert "throughput not known" in html
    said = " ".join(summary(made))
    assert "What the runs gave is not known" in said
    assert "What it cost in throughput is not known" in said


def _mute(row: Row) -> Row:
    return msgspec.structs.replace(row, share=None)


def test_a_thousand_runs_fit_on_a_page(tmp_path: Path) -> None:
    made = made_report(tmp_path, runs=1000, length_s=600)
    began_s = time.perf_counter()
    html = page(made)
    assert time.perf_counter() - began_s < 2.0
    assert len(html) < 1_000_000
    root = parsed(html)
    assert len(root.findall(f".//{SVG}svg[@class='run-chart']")) == 40
    assert "960 more runs" in html
    shown = sum(run.gave_mw or 0 for run in made.runs[40:])
    assert words.power(shown) in html
    assert "more entries in the CSV file" in html


def test_routine_entries_are_only_counted_where_there_are_many() -> None:
    many = [EventRow(unix_s=n, run="c:1.0", kind="capped", text="") for n in range(EVERY_CAP + 1)]
    told = EventRow(unix_s=5, run="c:1.0", kind="floor_passed", text="")
    assert excerpt([*many, told]) == ([told], EVERY_CAP + 1)
    assert excerpt([*many[:3], told]) == ([*many[:3], told], 0)


def test_a_limit_that_was_passed_is_said_first(report: WindowReport) -> None:
    found = msgspec.structs.replace(report.compliance, above_s=12.0, above_kwh=0.02, worst_mw=340_000)
    said = words.verdict(msgspec.structs.replace(report, compliance=found))
    assert said.startswith("The draw was above the limit for 12.0 s of ")
    assert "20.0 Wh in all, 340 W at the worst" in said


def test_a_draw_counted_instead_of_measured_is_warned_of(report: WindowReport) -> None:
    site = tuple(msgspec.structs.replace(row, unmeasured_mw=700_000) for row in report.site)
    said = " ".join(words.warnings(msgspec.structs.replace(report, site=site)))
    assert "700 W was not measured" in said


# ---------------------------------------------------------------------------------------------------- text and CSV


def test_the_summary_is_at_most_80_columns_wide(report: WindowReport) -> None:
    lines = summary(report)
    assert all(len(one) <= 80 for one in lines)
    said = " ".join(one.strip() for one in lines)
    assert "9 runs gave" in said
    assert "95 % interval" in said
    assert "No floor was passed." in said


def test_local_time_stands_beside_utc_where_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        assert words.span(OPENED_S, OPENED_S + 60).endswith("(19:30:00 to 19:31:00 local time, UTC+05:30)")
        monkeypatch.setenv("TZ", "UTC")
        time.tzset()
        assert words.span(OPENED_S, OPENED_S + 60) == "2026-11-30 14:00:00 to 14:01:00 UTC"
    finally:
        monkeypatch.undo()
        time.tzset()


def rows_of(file: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(file)))


def test_csv_has_the_figures_and_leaves_the_unknown_empty(report: WindowReport) -> None:
    files = csv_files(report)
    assert set(files) == {f"window-1-{name}.csv" for name in ("site", "runs", "run-samples", "events")}
    site = rows_of(files["window-1-site.csv"])
    assert len(site) == len(report.site)
    gap = next(row for row in site if float(row["unix_s"]) == OPENED_S + 510)
    assert gap["draw_w"] == ""
    assert gap["limit_w"] != ""
    runs = rows_of(files["window-1-runs.csv"])
    assert [row["run"] for row in runs] == [run.facts.run for run in report.runs]
    assert float(runs[0]["gave_w"]) == (report.runs[0].gave_mw or 0) / 1000
    assert rows_of(files["window-1-run-samples.csv"])
    assert len(rows_of(files["window-1-events.csv"])) == len(report.events)


def test_a_users_text_becomes_no_formula(tmp_path: Path) -> None:
    made = made_report(tmp_path, runs=1, length_s=60, extra=(facts(0, name='=HYPERLINK("x")', user="@sum"),))
    (row,) = rows_of(csv_files(made)["window-1-runs.csv"])
    assert row["name"].startswith("'=")
    assert row["user"] == "'@sum"


def test_a_users_text_steers_no_terminal_that_shows_a_csv_file(tmp_path: Path) -> None:
    made = made_report(tmp_path, runs=1, length_s=60, extra=(facts(0, name="a\x1b[2J\u202eb\nc"),))
    (row,) = rows_of(csv_files(made)["window-1-runs.csv"])
    assert row["name"] == "a?[2J?b?c"


# ---------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    monkeypatch.setenv("SLURM_PFI_CONF", str(tmp_path / "site.toml"))
    monkeypatch.setenv("COLUMNS", "80")
    site = Site(nodes=1, gpus=2)
    with answering(tmp_path, site.config, site.state) as one:
        yield one


def fill(controller: Controller, **changes: Any) -> None:
    row = window(**{"limit_mw": 9_000_000, "draw_before_mw": 11_000_000, **changes})
    controller.history.add([row, facts(0, window=row.id), *run_samples(0, 1200)])
    assert controller.history.flush()


def code_of(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as exit_:
        return int(exit_.code or 0)


def test_the_command_shows_the_last_window_and_writes_page_and_csv(
    controller: Controller, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(controller)
    fill(controller, id=2)
    html, folder = tmp_path / "w.html", tmp_path / "csv"
    assert code_of("report", "--html", str(html), "--csv", str(folder)) == 0
    out = capsys.readouterr().out
    assert out.startswith("window 2 on demo: ")
    assert all(len(one) <= 80 or str(tmp_path) in one for one in out.splitlines())
    parsed(html.read_text())
    assert len(list(folder.glob("window-2-*.csv"))) == 4
    assert code_of("report", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["window"]["id"] == 1
    assert code_of("report", "--html", "-") == 0
    parsed(capsys.readouterr().out)


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_who_may_read_a_report_is_for_its_writer_to_say(
    controller: Controller, tmp_path: Path, umask: int, mode: int
) -> None:
    fill(controller)
    before = os.umask(umask)
    try:
        assert code_of("report", "--html", str(tmp_path / "w.html"), "--csv", str(tmp_path / "csv")) == 0
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    written = [tmp_path / "w.html", *(tmp_path / "csv").iterdir()]
    assert {path.stat().st_mode & 0o777 for path in written} == {mode}


def test_the_list_has_all_windows_the_last_first(
    controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("report", "--list") == 0
    assert "no window was recorded yet" in capsys.readouterr().out
    fill(controller)
    fill(controller, id=2, closed=False)
    assert code_of("report", "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [one.split()[0] for one in lines[1:]] == ["2", "1"]
    assert " open " in lines[1]
    assert code_of("report", "--list", "--json") == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == [2, 1]


def test_no_window_yet_and_an_unknown_one_are_answered_with_no(
    controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("report") == 1
    assert "no window was recorded yet" in capsys.readouterr().err
    fill(controller)
    assert code_of("report", "7") == 1
    assert "there is no window 7; the last is 1" in capsys.readouterr().err
    assert code_of("report", "0") == 2
    assert code_of("report", "--list", "1") == 2


def test_a_place_that_cannot_be_written_is_wrong_use(
    controller: Controller, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(controller)
    assert code_of("report", "--html", str(tmp_path / "none" / "w.html")) == 2
    assert "cannot be written" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert code_of("report", "--csv", str(tmp_path / "file")) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_a_history_that_cannot_be_read_is_said(
    controller: Controller, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(controller)
    controller.history.close()
    for path in tmp_path.rglob("history.db*"):
        path.unlink()
    assert code_of("report") == 1
    assert "the history cannot be read" in capsys.readouterr().err


def test_without_a_controller_it_ends_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.toml").write_text(f'cluster = "c"\n[controller]\nrun_dir = "{tmp_path}/run"\n')
    monkeypatch.setenv("SLURM_PFI_CONF", str(tmp_path / "site.toml"))
    assert code_of("report") == 3
    assert "the controller cannot be reached" in capsys.readouterr().err
