"""Fixtures that several tests share: real Slurm clusters, and the check that none of them is left damaged.

A test or module says what cluster it wants by ``CLUSTER_OPTIONS`` in its module, or a test by
``@pytest.mark.parametrize("cluster", [ClusterOptions(...)], indirect=True)``.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from testbed.cluster import Cluster, ClusterError, ClusterOptions, wait_until
from testbed.processes import processes_of_jobs


def pytest_configure() -> None:
    """Ended from outside, by a time limit or a closed terminal, the fixtures still stop what they started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def _options(request: pytest.FixtureRequest) -> ClusterOptions:
    given = getattr(request, "param", None) or getattr(request.module, "CLUSTER_OPTIONS", ClusterOptions())
    assert isinstance(given, ClusterOptions)
    return given


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of this test's own."""
    with Cluster(_options(request)) as started:
        yield started


@pytest.fixture(scope="module")
def module_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One cluster for all tests of a module. A test leaves no job on it."""
    before = len(Cluster.stopped)
    with Cluster(_options(request)) as started:
        yield started
    for report in Cluster.stopped[before:]:
        assert report.clean, report


@pytest.fixture(autouse=True)
def _cluster_left_whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a ``cluster`` test: no node out of service, no process of an ended job or its hooks, of a stopped cluster
    no process at all."""
    if request.node.get_closest_marker("cluster") is None:
        yield
        return
    before = len(Cluster.stopped)
    yield
    for report in Cluster.stopped[before:]:
        assert report.clean, report
    for running in Cluster.running:
        assert running.drained_nodes() == {}, f"{running.folder}: nodes out of service"
        with contextlib.suppress(ClusterError):
            wait_until(partial(is_quiet, running), 10, "hooks and steps of jobs that ended are gone")
        assert left_by_ended_jobs(running) == [], f"{running.folder}: processes of jobs that have ended"


def left_by_ended_jobs(cluster: Cluster) -> list[str]:
    """Processes of jobs that are not in the queue any more. A job is there until its epilogs are done."""
    found = processes_of_jobs(cluster.folder)
    queued = set(cluster.squeue("-o", "%A")) if found else set()
    return [command for job, command in found.values() if str(job) not in queued]


def is_quiet(cluster: Cluster) -> bool:
    return not left_by_ended_jobs(cluster)
