"""The backend against a real slurmctld."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import cast

import pytest

from slurm_pfi.config import SlurmSection
from slurm_pfi.slurm.backend import AdminComment, JobGone, JobInfo, Special, Unavailable, Updated
from slurm_pfi.slurm.cli import SlurmCommands
from slurm_pfi.slurm.tag import Tag, format_tag
from slurm_pfi.slurm.tagwrite import TagWrite, write_tag
from testbed.cluster import Cluster, ClusterOptions

pytestmark = pytest.mark.cluster

SLEEP = "#!/bin/sh\nexec sleep 300\n"
TAG = Tag(
    pfi=1.5,
    source="default",
    grid_low_w=200,
    grid_high_w=700,
    grid_step_w=100,
    flex="10%",
    loss=None,
    energy_wh=None,
    capped_s=0.0,
    at_unix_s=1796040000.0,
)


CLUSTER_OPTIONS = ClusterOptions(nodes=2, gpus_per_node=2, hooks=False, plugin=False)


@pytest.fixture
def cluster(module_cluster: Cluster) -> Iterator[Cluster]:
    """The module's cluster, which every test finds and leaves without jobs."""
    yield module_cluster
    module_cluster.cancel_all()
    module_cluster.cancel_all()


def slurm_of(cluster: Cluster, *, timeout_s: float = 30.0) -> SlurmCommands:
    return SlurmCommands(SlurmSection(conf=str(cluster.slurm_conf)), timeout_s=timeout_s)


def known(cluster: Cluster, job_id: int) -> JobInfo:
    answer = asyncio.run(slurm_of(cluster).job(job_id))
    assert isinstance(answer, JobInfo), answer
    return answer


def all_jobs(cluster: Cluster) -> tuple[JobInfo, ...]:
    answer = asyncio.run(slurm_of(cluster).jobs())
    assert not isinstance(answer, Unavailable), answer
    return answer


def comment_of(cluster: Cluster, job_id: int) -> str:
    answer = asyncio.run(slurm_of(cluster).admin_comment(job_id))
    assert isinstance(answer, AdminComment), answer
    return answer.text


def put_tag(cluster: Cluster, job: JobInfo) -> TagWrite:
    return asyncio.run(write_tag(slurm_of(cluster), job, TAG))


def test_an_empty_cluster_has_no_jobs_and_an_unknown_id_is_gone(cluster: Cluster) -> None:
    assert all(not job.holds_nodes for job in all_jobs(cluster))
    slurm = slurm_of(cluster)
    assert isinstance(asyncio.run(slurm.job(999_999)), JobGone)
    assert isinstance(asyncio.run(slurm.admin_comment(999_999)), JobGone)
    assert isinstance(asyncio.run(slurm.set_admin_comment("999999", "x")), JobGone)


def test_a_job_with_texts_that_pretend_to_be_fields(cluster: Cluster) -> None:
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
    job = known(cluster, job_id)
    assert (job.state, job.nodes, job.limit_s, job.restart) == ("RUNNING", ("n1", "n2"), 93_780, 0)
    assert (job.partition, job.spec) == ("main", str(job_id))
    assert job.account.startswith("acc|9\n9")
    assert (job.name, job.comment) == ("x|1|RUNNING\n7 main", "JobState=FAILED\nJobId=8")
    assert abs(cast(int, job.start_unix_s) - before) < 60
    assert cast(int, job.end_unix_s) - cast(int, job.start_unix_s) == job.limit_s
    assert [other.job_id for other in all_jobs(cluster) if other.holds_nodes] == [job_id]


def test_name_and_comment_are_read_whole_whatever_bytes_they_have(cluster: Cluster) -> None:
    name, comment = "é🙂 a\udce9b", "pfi:10%, " + "long " * 200 + "\udcff é"
    job = known(cluster, cluster.sbatch(SLEEP, "--hold", f"--job-name={name}", f"--comment={comment}"))
    assert job.name == "é🙂 a\\xe9b"
    assert job.comment == comment.replace("\udcff", "\\xff")
    bare = known(cluster, cluster.sbatch(SLEEP, "--hold"))
    assert (bare.name, bare.comment) == ("sbatch", "")


def test_array_tasks_share_a_comment_and_components_may_have_their_own(cluster: Cluster) -> None:
    array = cluster.sbatch(SLEEP, "--array=0-1", "--comment=pfi:low")
    own = cluster.sbatch(SLEEP, "--comment=pfi:10%", ":", "--comment=pfi:high")
    first = cluster.sbatch(SLEEP, "--comment=pfi:10%", ":", "--nodes=1")
    for leader in (array, own, first):
        cluster.wait_job_state(leader, "RUNNING")
    comments = {job.spec: job.comment for job in all_jobs(cluster) if job.holds_nodes}
    assert comments == {
        f"{array}_0": "pfi:low",
        f"{array}_1": "pfi:low",
        f"{own}+0": "pfi:10%",
        f"{own}+1": "pfi:high",
        f"{first}+0": "pfi:10%",
        f"{first}+1": "pfi:10%",  # Slurm's own doing
    }


def test_a_waiting_job_and_one_without_a_limit(cluster: Cluster) -> None:
    job = known(cluster, cluster.sbatch(SLEEP, "--hold", "--time=UNLIMITED"))
    assert (job.state, job.nodes, job.limit_s) == ("PENDING", (), Special.UNLIMITED)
    assert (job.start_unix_s, job.end_unix_s) == (Special.NOT_SET, Special.NOT_SET)
    group = known(cluster, cluster.sbatch(SLEEP, "--hold", "--array=3-9%2"))
    assert (group.array_task_id, group.holds_nodes) == (None, False)


def test_each_task_of_an_array_has_its_own_tag(cluster: Cluster) -> None:
    leader = cluster.sbatch(SLEEP, "--array=0-2")
    cluster.wait_job_state(leader, "RUNNING")
    tasks = {job.array_task_id: job for job in all_jobs(cluster) if job.array_job_id == leader}
    assert set(tasks) == {0, 1, 2}
    cluster.scontrol("update", f"jobid={leader}", "admincomment=JS1:AAAA")
    # The task whose own id is the array's is the one whose bare id would mean all of them.
    itself = next(job for job in tasks.values() if job.job_id == leader)
    assert put_tag(cluster, itself) == TagWrite("written")
    assert comment_of(cluster, leader) == f"JS1:AAAA {format_tag(TAG)}"
    for job in tasks.values():
        if job != itself:
            assert comment_of(cluster, job.job_id) == "JS1:AAAA"


def test_each_component_of_a_heterogeneous_job_has_its_own_tag(cluster: Cluster) -> None:
    leader = cluster.sbatch(SLEEP, "--nodes=1", ":", "--nodes=1")
    cluster.wait_job_state(leader, "RUNNING")
    parts = {job.het_offset: job for job in all_jobs(cluster) if job.het_job_id == leader}
    assert {offset: job.spec for offset, job in parts.items()} == {0: f"{leader}+0", 1: f"{leader}+1"}
    assert put_tag(cluster, parts[0]) == TagWrite("written")
    assert comment_of(cluster, parts[0].job_id) == format_tag(TAG)
    assert comment_of(cluster, parts[1].job_id) == ""
    assert asyncio.run(slurm_of(cluster).set_admin_comment(parts[0].spec, "")) == Updated()
    assert comment_of(cluster, parts[0].job_id) == ""


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
def test_the_text_of_others_survives_byte_for_byte(cluster: Cluster, foreign: str) -> None:
    job_id = cluster.sbatch(SLEEP)
    cluster.wait_job_state(job_id, "RUNNING")
    slurm = slurm_of(cluster)
    assert asyncio.run(slurm.set_admin_comment(str(job_id), foreign)) == Updated()
    assert comment_of(cluster, job_id) == foreign
    for _ in range(2):
        assert put_tag(cluster, known(cluster, job_id)) == TagWrite("written")
        assert comment_of(cluster, job_id) == f"{foreign} {format_tag(TAG)}"


def test_a_requeued_job_is_another_run(cluster: Cluster) -> None:
    job_id = cluster.sbatch(SLEEP, "--requeue")
    cluster.wait_job_state(job_id, "RUNNING")
    assert known(cluster, job_id).restart == 0
    cluster.scontrol("requeue", str(job_id))
    assert known(cluster, job_id).restart == 1


def test_after_its_end_a_job_takes_no_tag(cluster: Cluster) -> None:
    job_id = cluster.sbatch("#!/bin/sh\nexit 0\n")
    cluster.wait_job_state(job_id, "COMPLETED")
    job = known(cluster, job_id)
    assert (job.state, job.holds_nodes) == ("COMPLETED", False)
    assert put_tag(cluster, job).outcome == "gone"


def test_without_slurmctld_nothing_is_known_and_nothing_is_empty(cluster: Cluster) -> None:
    job_id = cluster.sbatch(SLEEP)
    cluster.wait_job_state(job_id, "RUNNING")
    job = known(cluster, job_id)
    cluster.stop_slurmctld()
    try:

        async def ask() -> None:
            slurm = slurm_of(cluster, timeout_s=1.0)
            answers = await asyncio.gather(
                slurm.jobs(),
                slurm.job(job_id),
                slurm.admin_comment(job_id),
                slurm.set_admin_comment("1", "x"),
            )
            assert all(isinstance(answer, Unavailable) for answer in answers), answers
            assert (await write_tag(slurm, job, TAG)).outcome == "unavailable"

        asyncio.run(ask())
    finally:
        cluster.start_slurmctld()
    deadline = time.monotonic() + 30
    while not isinstance(asyncio.run(slurm_of(cluster).job(job_id)), JobInfo):
        assert time.monotonic() < deadline
    assert known(cluster, job_id).state == "RUNNING"
    cluster.cancel_all()
    cluster.wait_nodes_idle()
