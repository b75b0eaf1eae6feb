"""Work spread over processes: the studies play many sets that have nothing to do with each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Final, TypeVar

_THREADS: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started meanwhile do their linear algebra in one thread: on small arrays more only get in the way."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def run_all(
    tasks: Sequence[tuple[Callable[[_Task], _Result], _Task]], workers: int, *, apart: bool = False
) -> Iterator[tuple[int, _Result]]:
    """Results of all tasks as they are done, each with its place; in processes of their own if that is quicker.

    The result of a task depends on the task alone, so the number of workers changes nothing but the order. ``apart``:
    in processes of their own always, so that it changes not even the last bit of a matrix product.
    """
    if not apart and (workers < 2 or len(tasks) < 2):
        for place, (function, task) in enumerate(tasks):
            yield place, function(task)
        return
    # Spawned, not forked: a progress bar has a thread, and a fork would copy it halfway.
    with (
        _one_thread_each(),
        ProcessPoolExecutor(min(workers, len(tasks)), mp_context=get_context("spawn")) as executor,
    ):
        places = {executor.submit(function, task): place for place, (function, task) in enumerate(tasks)}
        try:
            for done in as_completed(places):
                yield places[done], done.result()
        finally:
            for future in places:
                future.cancel()
