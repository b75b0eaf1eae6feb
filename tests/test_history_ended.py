"""Which ended runs a user may mean: by job, by part of an array, by user, of the last day."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pfi.store.history import History
from slurm_pfi.store.rows import EndedRun

NOW_S = 1_800_000_000.0


def ended(job_id: int, spec: str, uid: int = 1000, ago_s: float = 60.0, restart: int = 0) -> EndedRun:
    return EndedRun(
        run=f"c:{job_id}.{restart}",
        job_id=job_id,
        spec=spec,
        uid=uid,
        ended_unix_s=NOW_S - ago_s,
        value={"spec": spec},
    )


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    made = History(
        tmp_path / "history.db", days=90, most_bytes=10**9, on_fault=pytest.fail, clock=lambda: NOW_S
    )
    made.start()
    yield made
    made.close()


def test_a_bare_id_means_the_job_its_restarts_and_all_parts_of_an_array(history: History) -> None:
    history.add(
        [
            ended(77, "77_9", ago_s=50),
            ended(78, "77_1", ago_s=40),
            ended(770, "770", ago_s=30),
            ended(80, "80+0", ago_s=20),
            ended(81, "80+1", ago_s=10),
            ended(5, "5", ago_s=9),
            ended(5, "5", ago_s=8, restart=1),
        ]
    )
    assert history.flush()

    def found(job_id: int, spec: str) -> list[str]:
        return [row.run for row in history.ended_of_spec(job_id, spec)]

    assert found(77, "77") == ["c:77.0", "c:78.0"]
    assert found(77, "77_1") == ["c:78.0"]
    assert found(78, "78") == ["c:78.0"], "a task by its own id"
    assert found(80, "80+1") == ["c:81.0"]
    assert found(80, "80") == ["c:80.0", "c:81.0"]
    assert found(5, "5") == ["c:5.0", "c:5.1"]
    assert found(7, "7") == []
    assert found(77, "77_*") == [], "what a user types is no pattern"


def test_the_last_day_of_one_user_or_of_all(history: History) -> None:
    history.add(
        [
            ended(1, "1", ago_s=90_000),
            ended(2, "2", uid=1001, ago_s=300),
            ended(3, "3", ago_s=200),
            ended(4, "4"),
        ]
    )
    assert history.flush()
    assert [row.job_id for row in history.ended_since(NOW_S - 86_400)] == [2, 3, 4]
    assert [row.job_id for row in history.ended_since(NOW_S - 86_400, 1000)] == [3, 4]
    assert [row.job_id for row in history.ended_since(NOW_S - 86_400, None, 1)] == [4]
    assert history.ended_since(NOW_S - 86_400, 99) == []
