"""The history: what goes in comes out, and no fault of a disk reaches who hands rows over."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_pfi.store import history as module
from slurm_pfi.store import history_db
from slurm_pfi.store.history import History, HistoryError
from slurm_pfi.store.rows import (
    EndedRun,
    EventRow,
    Kin,
    KinKey,
    Row,
    RunFacts,
    RunSample,
    SiteSample,
    WindowRow,
)

DAY_S = 86_400.0
NOW_S = 1_800_000_000.0
Maker = Callable[..., History]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATHER_S", 0.01)
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    monkeypatch.setattr(module, "LEAST_RETRY_S", 0.01)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, said: list[str]) -> Iterator[Maker]:
    made: list[History] = []

    def maker(
        path: Path | None = None, *, days: float = 90.0, most_bytes: int = 10**9, now_s: float = NOW_S
    ) -> History:
        one = History(
            path or tmp_path / "history.db",
            days=days,
            most_bytes=most_bytes,
            on_fault=said.append,
            clock=lambda: now_s,
        )
        one.start()
        made.append(one)
        return one

    yield maker
    for one in made:
        one.close()


def window(number: int, opened_s: float = NOW_S, closed_s: float | None = None) -> WindowRow:
    return WindowRow(
        id=number,
        cluster="c",
        opened_unix_s=opened_s,
        closed_unix_s=closed_s,
        policy="marginal",
        class_="economic",
        mode="enforce",
        limit_mw=9_000_000,
        limit_ids=("grid",),
        draw_before_mw=None,
        beside_mw=1_000_000,
        response_s=10.0,
    )


def site(at_s: float, draw_mw: int | None = 1) -> SiteSample:
    return SiteSample(unix_s=at_s, phase="window", limit_mw=None, draw_mw=draw_mw, committed_mw=None)


def sample(at_s: float, run: str = "c:1.0", share: float | None = 0.9, draw_mw: int | None = 5) -> RunSample:
    return RunSample(unix_s=at_s, run=run, cap_mw=300_000, draw_mw=draw_mw, share=share)


def kin(name: str = "train", gpus: int = 4, at_s: float = NOW_S) -> Kin:
    key = KinKey(uid=1000, account="a", name=name, gpu_model="H200", gpus=gpus)
    return Kin(key=key, draw_mw=690_000, rate_per_s=2.5, sd=0.03, points=((0.2, 0.05, 0.01),), unix_s=at_s)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, "it did not come true"
        threading.Event().wait(0.01)


# ---------------------------------------------------------------------------------------------------- in and out


def test_what_goes_in_comes_out(make: Maker, tmp_path: Path) -> None:
    history = make()
    facts = RunFacts(window=1, run="c:1.0", gpus=4, user="<b>x", max_loss=0.15)
    told = EventRow(unix_s=NOW_S, run="c:1.0", kind="capped", text="capped to 400 W")
    ended = EndedRun(run="c:1.0", job_id=1, ended_unix_s=NOW_S, value={"loss": 0.031})
    rows: list[Row] = [
        window(1),
        site(NOW_S),
        site(NOW_S + 1, None),
        sample(NOW_S),
        facts,
        told,
        ended,
        kin(),
    ]
    history.add(rows)
    assert history.flush()
    assert history.windows() == [window(1)]
    assert history.window(1) == history.window(None) == window(1)
    assert history.window(2) is None
    assert history.facts(1) == [facts]
    assert history.site_samples(NOW_S, NOW_S + 1) == [site(NOW_S), site(NOW_S + 1, None)]
    assert history.run_series(NOW_S, NOW_S + 9, 1.0) == {"c:1.0": [sample(NOW_S)]}
    assert history.events(NOW_S, NOW_S) == history.events_of("c:1.0") == [told]
    assert history.ended_of_job(1) == [ended]
    assert history.recall(1000, "a", "train") == [kin()]
    assert history.recall(1001, "a", "train") == []
    assert stat.S_IMODE((tmp_path / "history.db").stat().st_mode) == 0o640
    assert (history.lost, history.trouble) == (0, "")


def test_a_window_is_written_when_it_opens_and_again_when_it_closes(make: Maker) -> None:
    history = make()
    history.add([window(1)])
    history.add([window(1, closed_s=NOW_S + 60)])
    history.flush()
    assert history.windows() == [window(1, closed_s=NOW_S + 60)]


def test_ids_of_windows_go_on_after_a_restart(make: Maker) -> None:
    first = make()
    number = first.new_window_id()
    assert number == 1
    first.add([window(number)])
    first.close()
    assert make().new_window_id() == 2


def test_means_leave_out_what_is_unknown_and_never_read_it_as_zero(make: Maker) -> None:
    history = make()
    history.add(
        [sample(NOW_S, share=0.8), sample(NOW_S + 1, share=None, draw_mw=None), sample(NOW_S + 2, share=0.6)]
    )
    history.add([sample(NOW_S, "c:2.0", share=None, draw_mw=None)])
    history.flush()
    means = history.run_means(NOW_S, NOW_S + 5)
    assert means["c:1.0"].share == pytest.approx(0.7)
    assert (means["c:1.0"].present_s, means["c:1.0"].draw_mw) == (3, 5)
    assert (means["c:2.0"].share, means["c:2.0"].draw_mw) == (None, None)
    (lone,) = history.run_series(NOW_S, NOW_S + 5, 10.0)["c:2.0"]
    assert (lone.share, lone.draw_mw) == (None, None)


def test_a_sample_weighs_by_the_time_it_stands_for(make: Maker) -> None:
    history = make()
    often = [sample(NOW_S + second, share=1.0, draw_mw=600) for second in range(10)]
    seldom = RunSample(unix_s=NOW_S + 10, run="c:1.0", cap_mw=1, draw_mw=400, share=0.5, held_s=30.0)
    history.add([*often, seldom])
    history.flush()
    found = history.run_means(NOW_S, NOW_S + 60)["c:1.0"]
    assert found.present_s == 40
    assert found.share == pytest.approx((10 * 1.0 + 30 * 0.5) / 40)
    assert found.draw_mw == pytest.approx((10 * 600 + 30 * 400) / 40)


def test_kinds_of_work_are_told_apart_by_their_gpus_and_the_newest_counts(make: Maker) -> None:
    history = make()
    history.remember(kin(at_s=NOW_S - 9))
    history.remember(kin(at_s=NOW_S))
    history.remember(kin(gpus=8, at_s=NOW_S - 5))
    history.flush()
    assert [(one.key.gpus, one.unix_s) for one in history.recall(1000, "a", "train")] == [
        (4, NOW_S),
        (8, NOW_S - 5),
    ]


# ---------------------------------------------------------------------------------------------------- bounds


def test_what_is_old_is_forgotten(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIDY_S", 0.01)
    monkeypatch.setattr(module, "TIDY_ROWS", 10)
    old_s = NOW_S - 91 * DAY_S
    history = make()
    facts = [RunFacts(window=number, run="c:1.0", gpus=1) for number in (1, 2)]
    history.add([window(1, old_s, old_s + 9), window(2), *facts])
    history.add(site(old_s + second) for second in range(35))
    history.add([site(NOW_S), kin("old", at_s=old_s), kin("new")])
    wait_until(lambda: len(history.site_samples(0, NOW_S)) == 1)
    wait_until(lambda: [row.id for row in history.windows()] == [2])
    wait_until(lambda: not history.facts(1))
    assert history.facts(2) == [facts[1]]
    wait_until(lambda: not history.recall(1000, "a", "old"))
    assert history.recall(1000, "a", "new")


def test_the_file_does_not_outgrow_its_bound(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIDY_S", 0.01)
    monkeypatch.setattr(module, "TIDY_ROWS", 1000)
    history = make(most_bytes=300_000)
    history.add([window(1)])
    history.add(sample(NOW_S + second) for second in range(20_000))
    history.flush()
    wait_until(lambda: history.run_means(0, NOW_S + 10**6)["c:1.0"].present_s < 10_000)
    assert history.run_means(NOW_S + 19_999, NOW_S + 20_000)["c:1.0"].present_s == 1, "the oldest go first"
    assert history.windows() == [window(1)]


def test_a_queue_that_is_full_loses_the_newest_and_counts_them(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_QUEUED", 10)
    history = History(tmp_path / "history.db", days=1, most_bytes=10**9, on_fault=said.append)
    history.add(site(NOW_S + second) for second in range(15))  # nobody writes yet
    assert history.lost == 5
    history.start()
    history.flush()
    assert len(history.site_samples(0, NOW_S + 99)) == 10
    history.close()


# ---------------------------------------------------------------------------------------------------- faults


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel refuses writes beyond ``size`` bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_said_once_and_what_waited_is_written_when_there_is_room(
    make: Maker, said: list[str]
) -> None:
    history = make()
    history.add([site(NOW_S)])
    history.flush()
    with file_size_limit(200_000):
        history.add(site(NOW_S + second) for second in range(1, 30_000))
        wait_until(lambda: bool(history.trouble))
        assert history.new_window_id() is None
        assert not history.flush(0.3)  # several tries
        assert len(said) == 1
        assert "make room" in said[0]
    assert history.flush()
    wait_until(lambda: history.trouble == "")
    assert len(history.site_samples(0, NOW_S + 10**6)) + history.lost == 30_000
    assert history.lost == 0
    assert len(said) == 2
    assert "written again" in said[1]


def test_a_file_that_is_no_database_is_put_aside_and_kept(
    make: Maker, said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "history.db").write_bytes(b"no database" * 1000)
    history = make()
    wait_until(lambda: history.new_window_id() is not None)
    history.add([site(NOW_S)])
    assert history.flush()
    assert history.site_samples(0, NOW_S) == [site(NOW_S)]
    (aside,) = tmp_path.glob("history.db.damaged-*[0-9]")
    assert aside.read_bytes().startswith(b"no database")
    assert len(said) == 1
    assert aside.name in said[0]


def test_a_database_of_another_program_is_put_aside(make: Maker, said: list[str], tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "history.db") as other:
        other.execute("CREATE TABLE wages (x)")
    other.close()
    history = make()
    wait_until(lambda: history.new_window_id() is not None)
    assert "another program" in said[0]
    assert len(list(tmp_path.glob("history.db.damaged-*[0-9]"))) == 1


def test_pages_torn_under_a_running_history_cost_what_was_there_and_nothing_new(
    make: Maker, said: list[str], tmp_path: Path
) -> None:
    history = make()
    history.add(site(NOW_S + second) for second in range(5_000))
    history.flush()
    history.close()
    path = tmp_path / "history.db"
    path.write_bytes(path.read_bytes()[:4096] + os.urandom(path.stat().st_size - 4096))
    history = make()
    history.add([site(NOW_S), window(1)])
    wait_until(lambda: bool(said) and history.flush())
    assert history.site_samples(0, 2 * NOW_S) == [site(NOW_S)]
    assert list(tmp_path.glob("history.db.damaged-*"))


def test_damage_that_shows_while_it_writes_is_put_aside_too(
    make: Maker, said: list[str], tmp_path: Path
) -> None:
    history = make()
    history.add(site(NOW_S + second) for second in range(5_000))
    history.flush()
    path = tmp_path / "history.db"
    other = sqlite3.connect(path)
    other.execute(
        "INSERT INTO event VALUES (1, '', '', '')"
    )  # what the writer has in memory counts no longer
    other.commit()
    other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    other.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    history.add([site(NOW_S), window(1)])
    wait_until(lambda: bool(said) and history.flush())
    assert "is damaged" in said[0]
    assert history.site_samples(0, 2 * NOW_S) == [site(NOW_S)]
    assert history.lost == 0


def test_a_disk_that_damages_every_file_is_left_alone_in_the_end(
    make: Maker, said: list[str], tmp_path: Path
) -> None:
    history = make()
    for turn in range(module.MOST_ASIDE + 1):
        (tmp_path / "new").write_bytes(b"torn" * 999)
        for suffix in ("-wal", "-shm"):  # whole pages in there would heal it
            (tmp_path / f"history.db{suffix}").unlink(missing_ok=True)
        (tmp_path / "new").rename(tmp_path / "history.db")
        history.add([site(NOW_S)])
        wait_until(lambda turn=turn: len(said) > turn)  # type: ignore[misc]
        if turn < module.MOST_ASIDE:
            assert history.flush()
    assert "damaged again" in said[-1]
    assert len(list(tmp_path.glob("history.db.damaged-*[0-9]"))) == module.MOST_ASIDE


def test_a_newer_file_is_left_as_it_is(make: Maker, said: list[str], tmp_path: Path) -> None:
    make().close()
    with sqlite3.connect(tmp_path / "history.db") as other:
        other.execute("PRAGMA user_version = 99")
    other.close()
    history = make()
    assert history.new_window_id() is None
    assert "version 99" in said[0]
    assert not list(tmp_path.glob("*damaged*"))


def test_a_folder_that_is_not_there_is_said_once(make: Maker, said: list[str], tmp_path: Path) -> None:
    history = make(tmp_path / "none" / "history.db")
    history.add([site(NOW_S)])
    assert not history.flush(0.2)
    assert history.new_window_id() is None
    assert len(said) == 1
    with pytest.raises(HistoryError, match="cannot be read"):
        history.windows()
    (tmp_path / "none").mkdir()
    assert history.flush()
    assert history.site_samples(0, NOW_S) == [site(NOW_S)]
    assert history.new_window_id() == 1


def test_a_second_writer_keeps_its_hands_off(make: Maker, said: list[str], tmp_path: Path) -> None:
    first = make()
    second = make()
    assert "another process" in said[0]
    assert second.new_window_id() is None
    first.add([window(1)])
    first.flush()
    assert second.windows() == [window(1)]  # it may read
    first.close()
    wait_until(lambda: second.new_window_id() == 2)


def test_a_file_taken_away_under_a_running_history_is_made_anew(make: Maker, tmp_path: Path) -> None:
    history = make()
    history.add([site(NOW_S)])
    history.flush()
    for path in tmp_path.glob("history.db*"):
        path.unlink()
    history.add([site(NOW_S + 1)])
    assert history.flush()
    assert history.site_samples(0, 2 * NOW_S) == [site(NOW_S + 1)]


def test_a_row_that_cannot_be_written_does_not_stop_those_after_it(make: Maker, said: list[str]) -> None:
    history = make()
    history.add([site(NOW_S, draw_mw=10**30)])
    history.flush()
    assert history.lost == 1
    history.add([site(NOW_S)])
    history.flush()
    assert history.site_samples(0, NOW_S) == [site(NOW_S)]


KILLED = """
import sys
from pathlib import Path
from slurm_pfi.store import history as module
from slurm_pfi.store import history_db
from slurm_pfi.store.history import History
from slurm_pfi.store.rows import SiteSample
module.GATHER_S = 0.001
history = History(Path(sys.argv[1]), days=90, most_bytes=10**9, on_fault=print)
history.start()
for batch in range(10**6):
    history.add([
        SiteSample(unix_s=float(sys.argv[2]) + batch, phase="window", limit_mw=i, draw_mw=None, committed_mw=None)
        for i in range(50)
    ])
    history.flush()
    print(batch, flush=True)
"""


def test_killed_in_a_write_it_has_whole_batches_and_goes_on(
    make: Maker, said: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "history.db"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), str(time.time())], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        last = ""
        for _ in range(30):
            last = writer.stdout.readline()
        writer.kill()
    history = make()
    found = history.site_samples(0, 10**10)
    assert len(found) >= 50 * (int(last) + 1)
    assert len(found) % 50 == 0
    history.add([site(NOW_S)])
    assert history.flush()
    assert said == []


def test_handing_rows_over_does_not_wait_for_the_disk(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(history_db, "insert", lambda connection, rows: release.wait(10) and None)
    history = make()
    began_s = time.monotonic()
    for _ in range(100):
        history.add([site(NOW_S)])
    assert time.monotonic() - began_s < 1.0
    assert history.new_window_id() == 1
    release.set()
    assert history.flush()
