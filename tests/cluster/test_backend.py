"""The contract of every way of talking to Slurm, against a real slurmctld: the same truths for each.

``json`` runs where the installed release has JSON that tells all, ``pyslurm`` where it imports and fits; where they do
not, a test proves that the reason is said and the commands' text is read.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar, cast

import pytest

from slurm_pfi.config import SlurmSection
from slurm_pfi.slurm.backend import AdminComment, JobGone, JobInfo, Special, Unavailable, Updated
from slurm_pfi.slurm.choice import FIRST_WITH_OBJECTS, SlurmByPyslurm, SlurmJson, SlurmOtherwise
from slurm_pfi.slurm.cli import SlurmCommands
from slurm_pfi.slurm.tag import format_tag
from slurm_pfi.slurm.tagwrite import TagWrite, write_tag
from slurm_pfi.slurm.version import UnknownVersion, Version
from testbed.cluster import Cluster, ClusterOptions
from testbed.cluster_files import slurm_version

from ..slurm_samples import BARE_TAG as TAG

pytestmark = [pytest.mark.cluster, pytest.mark.generations]

SLEEP = "#!/bin/sh\nexec sleep 300\n"
CLUSTER_OPTIONS = ClusterOptions(nodes=2, gpus_per_node=2, hooks=False, plugin=False)


@pytest.fixture
def cluster(module_cluster: Cluster) -> Iterator[Cluster]:
    """The module's cluster, which every test finds and leaves without jobs."""
    yield module_cluster
    module_cluster.cancel_all()
    module_cluster.cancel_all()


T = TypeVar("T")
WAYS: Final[dict[str, type[SlurmOtherwise]]] = {"json": SlurmJson, "pyslurm": SlurmByPyslurm}
HAS_JSON: Final = Version(*slurm_version()) >= FIRST_WITH_OBJECTS
HAS_PYSLURM: Final = importlib.util.find_spec("pyslurm") is not None


@dataclass(frozen=True)
class Asked:
    """One way of talking to the cluster's Slurm; a fresh backend for each question, as for each loop."""

    cluster: Cluster
    way: str

    def backend(self, *, timeout_s: float = 30.0) -> SlurmCommands:
        section = SlurmSection(conf=str(self.cluster.slurm_conf))
        if self.way == "cli":
            return SlurmCommands(section, timeout_s=timeout_s)
        return WAYS[self.way](section, timeout_s=timeout_s, say=pytest.fail)

    def ask(self, question: Callable[[SlurmCommands], Awaitable[T]], *, timeout_s: float = 30.0) -> T:
        async def scenario() -> T:
            backend = self.backend(timeout_s=timeout_s)
            try:
                return await question(backend)
            finally:
                await backend.close()

        return asyncio.run(scenario())

    def known(self, job_id: int) -> JobInfo:
        answer = self.ask(lambda backend: backend.job(job_id))
        assert isinstance(answer, JobInfo), answer
        return answer

    def jobs(self) -> tuple[JobInfo, ...]:
        answer = self.ask(lambda backend: backend.jobs())
        assert not isinstance(answer, Unavailable), answer
        return answer

    def comment(self, job_id: int) -> str:
        answer = self.ask(lambda backend: backend.admin_comment(job_id))
        assert isinstance(answer, AdminComment), answer
        return answer.text

    def set_comment(self, job_spec: str, text: str) -> object:
        return self.ask(lambda backend: backend.set_admin_comment(job_spec, text))

    def put_tag(self, job: JobInfo) -> TagWrite:
        return self.ask(lambda backend: write_tag(backend, job, TAG))


@pytest.fixture(params=["cli", *(["json"] if HAS_JSON else []), *(["pyslurm"] if HAS_PYSLURM else [])])
def slurm(request: pytest.FixtureRequest, cluster: Cluster) -> Asked:
    """Each way that this Slurm and this Python have."""
    return Asked(cluster, request.param)


def test_each_way_reads_the_same(cluster: Cluster) -> None:
    array = cluster.sbatch(SLEEP, "--array=0-3%2", "--time=2:00:00", "--gres=gpu:1", "--comment=pfi:10%")
    het = cluster.sbatch(SLEEP, "--time=UNLIMITED", ":", "--comment=second")
    odd = cluster.sbatch(SLEEP, "--hold", "--job-name=a|b\n\udcff", "--comment=N/A")
    for running in (array, het):
        cluster.wait_job_state(running, "RUNNING")
    read = {job.job_id: job for job in Asked(cluster, "cli").jobs() if job.job_id >= array}
    assert {array, het, odd} <= read.keys()
    assert len(read) == 3 + 2 + 1
    for way in [*(["json"] if HAS_JSON else []), *(["pyslurm"] if HAS_PYSLURM else [])]:
        other = Asked(cluster, way)
        assert {job.job_id: job for job in other.jobs() if job.job_id >= array} == read, way
        assert {job_id: other.known(job_id) for job_id in read} == read, way


@pytest.mark.skipif(HAS_PYSLURM, reason="pyslurm is installed; the contract runs on it")
def test_pyslurm_is_not_installed_and_the_reason_is_said(cluster: Cluster) -> None:
    assert_text_is_read(cluster, SlurmByPyslurm, "pyslurm cannot be imported: ModuleNotFoundError")


@pytest.mark.skipif(HAS_JSON, reason="the JSON of this release tells all; the contract runs on it")
def test_the_json_of_this_release_does_not_tell_all_and_the_reason_is_said(cluster: Cluster) -> None:
    assert_text_is_read(cluster, SlurmJson, "does not tell all")


def assert_text_is_read(cluster: Cluster, way: type[SlurmOtherwise], reason: str) -> None:
    job_id = cluster.sbatch(SLEEP, "--hold")
    said: list[str] = []

    async def scenario() -> object:
        backend = way(SlurmSection(conf=str(cluster.slurm_conf)), timeout_s=30, say=said.append)
        return await backend.job(job_id), await backend.job(job_id)

    assert asyncio.run(scenario()) == (Asked(cluster, "cli").known(job_id),) * 2
    assert len(said) == 1
    assert reason in said[0]


def test_the_release_is_probed(cluster: Cluster) -> None:
    assert Asked(cluster, "cli").ask(lambda backend: backend.version()) == Version(*slurm_version())
    missing = SlurmCommands(SlurmSection(conf=str(cluster.slurm_conf), bin_dir="/nowhere"), timeout_s=5)
    assert isinstance(asyncio.run(missing.version()), UnknownVersion)


def test_an_empty_cluster_has_no_jobs_and_an_unknown_id_is_gone(cluster: Cluster, slurm: Asked) -> None:
    assert all(not job.holds_nodes for job in slurm.jobs())
    assert isinstance(slurm.ask(lambda backend: backend.job(999_999)), JobGone)
    assert isinstance(slurm.ask(lambda backend: backend.admin_comment(999_999)), JobGone)
    assert isinstance(slurm.set_comment("999999", "x"), JobGone)


def test_a_job_with_texts_that_pretend_to_be_fields(cluster: Cluster, slurm: Asked) -> None:
    job_id = cluster.sbatch(
        SLEEP,
        "--job-name=x|1|RUNNING\n7 main",
        "--comment=JobState=FAILED\nJobId=8",
        "--account=acc|9\n9|9|N/A",
        "--time=1-02:03",
        "--nodes=2",
    )
    cluster.wait_job_state(job_id, "RUNNING")
    before = time.time()
    job = slurm.known(job_id)
    assert (job.state, job.nodes, job.limit_s, job.restart) == ("RUNNING", ("n1", "n2"), 93_780, 0)
    assert (job.partition, job.spec) == ("main", str(job_id))
    assert job.account.startswith("acc|9\n9")
    assert (job.name, job.comment) == ("x|1|RUNNING\n7 main", "JobState=FAILED\nJobId=8")
    assert abs(cast(int, job.start_unix_s) - before) < 60
    assert cast(int, job.end_unix_s) - cast(int, job.start_unix_s) == job.limit_s
    assert [other.job_id for other in slurm.jobs() if other.holds_nodes] == [job_id]


def test_name_and_comment_are_read_whole_whatever_bytes_they_have(cluster: Cluster, slurm: Asked) -> None:
    name, comment = "é🙂 a\udce9b", "pfi:10%, " + "long " * 200 + "\udcff é"
    job = slurm.known(cluster.sbatch(SLEEP, "--hold", f"--job-name={name}", f"--comment={comment}"))
    assert job.name == "é🙂 a\\xe9b"
    assert job.comment == comment.replace("\udcff", "\\xff")
    bare = slurm.known(cluster.sbatch(SLEEP, "--hold"))
    assert (bare.name, bare.comment) == ("sbatch", "")


def test_array_tasks_share_a_comment_and_components_may_have_their_own(
    cluster: Cluster, slurm: Asked
) -> None:
    array = cluster.sbatch(SLEEP, "--array=0-1", "--comment=pfi:low")
    own = cluster.sbatch(SLEEP, "--comment=pfi:10%", ":", "--comment=pfi:high")
    first = cluster.sbatch(SLEEP, "--comment=pfi:10%", ":", "--nodes=1")
    for leader in (array, own, first):
        cluster.wait_job_state(leader, "RUNNING")
    comments = {job.spec: job.comment for job in slurm.jobs() if job.holds_nodes}
    assert comments == {
        f"{array}_0": "pfi:low",
        f"{array}_1": "pfi:low",
        f"{own}+0": "pfi:10%",
        f"{own}+1": "pfi:high",
        f"{first}+0": "pfi:10%",
        f"{first}+1": "pfi:10%",  # Slurm's own doing
    }


def test_a_waiting_job_and_one_without_a_limit(cluster: Cluster, slurm: Asked) -> None:
    job = slurm.known(cluster.sbatch(SLEEP, "--hold", "--time=UNLIMITED"))
    assert (job.state, job.nodes, job.limit_s) == ("PENDING", (), Special.UNLIMITED)
    assert (job.start_unix_s, job.end_unix_s) == (Special.NOT_SET, Special.NOT_SET)
    group = slurm.known(cluster.sbatch(SLEEP, "--hold", "--array=3-9%2"))
    assert (group.array_task_id, group.holds_nodes) == (None, False)


def test_each_task_of_an_array_has_its_own_tag(cluster: Cluster, slurm: Asked) -> None:
    leader = cluster.sbatch(SLEEP, "--array=0-2")
    cluster.wait_job_state(leader, "RUNNING")
    tasks = {job.array_task_id: job for job in slurm.jobs() if job.array_job_id == leader}
    assert set(tasks) == {0, 1, 2}
    cluster.scontrol("update", f"jobid={leader}", "admincomment=JS1:AAAA")
    # The task whose own id is the array's is the one whose bare id would mean all of them.
    itself = next(job for job in tasks.values() if job.job_id == leader)
    assert slurm.put_tag(itself) == TagWrite("written")
    assert slurm.comment(leader) == f"JS1:AAAA {format_tag(TAG)}"
    for job in tasks.values():
        if job != itself:
            assert slurm.comment(job.job_id) == "JS1:AAAA"


def test_each_component_of_a_heterogeneous_job_has_its_own_tag(cluster: Cluster, slurm: Asked) -> None:
    leader = cluster.sbatch(SLEEP, "--nodes=1", ":", "--nodes=1")
    cluster.wait_job_state(leader, "RUNNING")
    parts = {job.het_offset: job for job in slurm.jobs() if job.het_job_id == leader}
    assert {offset: job.spec for offset, job in parts.items()} == {0: f"{leader}+0", 1: f"{leader}+1"}
    assert slurm.put_tag(parts[0]) == TagWrite("written")
    assert slurm.comment(parts[0].job_id) == format_tag(TAG)
    assert slurm.comment(parts[1].job_id) == ""
    assert slurm.set_comment(parts[0].spec, "") == Updated()
    assert slurm.comment(parts[0].job_id) == ""


@pytest.mark.parametrize(
    "foreign",
    [
        'ticket=4711 owner="ops team" note: a=b; c',
        '"quoted"',
        " blanks  around ",
        "Zeile eins\nzwei\tété 🙂",
        "a\udce9b",
        "back\\slash $(id) `id`",
        "x" * 5000,
    ],
)
def test_the_text_of_others_survives_byte_for_byte(cluster: Cluster, slurm: Asked, foreign: str) -> None:
    job_id = cluster.sbatch(SLEEP)
    cluster.wait_job_state(job_id, "RUNNING")
    assert slurm.set_comment(str(job_id), foreign) == Updated()
    assert slurm.comment(job_id) == foreign
    for _ in range(2):
        assert slurm.put_tag(slurm.known(job_id)) == TagWrite("written")
        assert slurm.comment(job_id) == f"{foreign} {format_tag(TAG)}"


def test_a_requeued_job_is_another_run(cluster: Cluster, slurm: Asked) -> None:
    job_id = cluster.sbatch(SLEEP, "--requeue")
    cluster.wait_job_state(job_id, "RUNNING")
    assert slurm.known(job_id).restart == 0
    cluster.scontrol("requeue", str(job_id))
    assert slurm.known(job_id).restart == 1


def test_after_its_end_a_job_takes_no_tag(cluster: Cluster, slurm: Asked) -> None:
    job_id = cluster.sbatch("#!/bin/sh\nexit 0\n")
    cluster.wait_job_state(job_id, "COMPLETED")
    job = slurm.known(job_id)
    assert (job.state, job.holds_nodes) == ("COMPLETED", False)
    assert slurm.put_tag(job).outcome == "gone"


def test_without_slurmctld_nothing_is_known_and_nothing_is_empty(cluster: Cluster, slurm: Asked) -> None:
    job_id = cluster.sbatch(SLEEP)
    cluster.wait_job_state(job_id, "RUNNING")
    job = slurm.known(job_id)
    cluster.stop_slurmctld()
    try:

        async def questions(backend: SlurmCommands) -> None:
            answers = await asyncio.gather(
                backend.jobs(),
                backend.job(job_id),
                backend.admin_comment(job_id),
                backend.set_admin_comment("1", "x"),
            )
            assert all(isinstance(answer, Unavailable) for answer in answers), answers
            assert (await write_tag(backend, job, TAG)).outcome == "unavailable"

        slurm.ask(questions, timeout_s=5.0)
    finally:
        cluster.start_slurmctld()
    deadline = time.monotonic() + 30
    while not isinstance(slurm.ask(lambda backend: backend.job(job_id)), JobInfo):
        assert time.monotonic() < deadline
    assert slurm.known(job_id).state == "RUNNING"
    cluster.cancel_all()
    cluster.wait_nodes_idle()
