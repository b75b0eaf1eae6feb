"""A run is (cluster, job id, restart): what comes back under an old id, or from an old disk, is another one."""

from __future__ import annotations

from dataclasses import replace as changed

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pfi.bus.asking import WRONG_USE
from slurm_pfi.cli.job import parse_job
from slurm_pfi.controller import state as cs
from slurm_pfi.model import Run, RunReport
from slurm_pfi.node.jobfile import JobFileError, parse_job_file
from slurm_pfi.slurm.backend import JobInfo
from tests.node_world import BOOT, S, World, entry, window_step

from .test_controller_core import Site, gpu, msgspec_job

JOB = 700_100
FIRST, SECOND = Run("c", JOB, 0), Run("c", JOB, 1)


def phases(site: Site) -> dict[Run, str]:
    return {run: view.phase for run, view in site.state.runs.items()}


def read(site: Site, run: Run, job: JobInfo | None) -> None:
    site.tell(cs.JobRead(run=run, job=job))


# -------------------------------------------------------------------------------- the controller: one live run an id


def test_a_run_on_a_node_that_died_is_over_as_soon_as_slurm_tells_of_the_next() -> None:
    site = Site(nodes=2, gpus=1)
    site.hear("n1", gpu("G1", FIRST))
    site.hear("n2", gpu("G2"))
    site.cycle()
    site.identify(FIRST, "n1")
    site.hear("n2", gpu("G2", SECOND))
    assert phases(site) == {FIRST: "admitted", SECOND: "admitted"}, "Slurm has not been heard yet"
    site.identify(SECOND, "n2")
    assert phases(site) == {FIRST: "gone", SECOND: "admitted"}
    assert [told["reason"] for told in site.audits("ended")] == ["Slurm runs restart 1 of it"]
    # The node boots with its old file: no GPU of it is the run's, and the file goes.
    site.hear("n1", gpu("G1", FIRST), id=msgspec.structs.replace(site.report("n1").id, boot_id="another"))
    site.limit(1200)
    site.cycle()
    plan = site.plans("n1")[-1]
    assert plan.gone == (FIRST,)
    assert plan.steps[0].caps == ()
    site.hear("n1", gpu("G1"))
    assert phases(site) == {SECOND: "admitted"}


def test_an_old_run_that_a_boot_brings_back_is_over_at_once_where_the_next_is_known() -> None:
    site = Site(nodes=2, gpus=1)
    site.hear("n1", gpu("G1"))
    site.hear("n2", gpu("G2", SECOND))
    site.cycle()
    site.identify(SECOND, "n2")
    site.hear("n1", gpu("G1", FIRST))
    assert phases(site) == {FIRST: "gone", SECOND: "admitted"}
    site.cycle()
    assert site.plans("n1")[-1].gone == (FIRST,)


def test_a_node_that_claims_a_later_run_ends_nobody_elses() -> None:
    site = Site(nodes=2, gpus=1)
    site.hear("n1", gpu("G1", FIRST))
    site.identify(FIRST, "n1")
    site.hear("n2", gpu("G2", SECOND))
    read(site, SECOND, msgspec_job(FIRST, ("n1",)))
    assert phases(site) == {FIRST: "admitted", SECOND: "refused"}


@pytest.mark.parametrize("was_there", [False, True])
def test_nor_does_it_where_it_comes_first(was_there: bool) -> None:
    """Such as a file from before slurmctld lost its state and began again at job 1."""
    site = Site(nodes=2, gpus=1)
    site.hear("n2", gpu("G2", SECOND))
    if was_there:
        site.identify(SECOND, "n2")
    read(site, SECOND, msgspec_job(FIRST, ("n1",)))
    site.hear("n1", gpu("G1", FIRST))
    site.identify(FIRST, "n1")
    assert phases(site) == {FIRST: "admitted", SECOND: "refused"}
    site.limit(1200)
    site.cycle()
    assert [cap.run for cap in site.plans("n1")[-1].steps[0].caps] == [FIRST]


def test_the_new_run_starts_with_nothing_of_the_old_one() -> None:
    site = Site(nodes=1, gpus=1, baseline_s=5.0)
    for _ in range(10):
        site.hear("n1", gpu("G1", FIRST, draw_mw=600_000))
        site.wait(1)
    site.identify(FIRST, "n1")
    assert site.state.runs[FIRST].record.seen
    site.hear("n1", gpu("G1", SECOND, draw_mw=300_000))
    site.identify(SECOND, "n1")
    view = site.state.runs[SECOND]
    assert not view.record.seen
    assert view.record.draw_mw is None
    assert view.first_seen_ns == site.now_ns


class Cluster(Site):
    """Slurm requeues one job between three nodes, which die and come back with what was on their disks."""

    def __init__(self) -> None:
        super().__init__(nodes=3, gpus=1, full_read_min_s=0.5)
        self.restart, self.place = 0, "n1"
        self.files: dict[str, int | None] = {"n1": 0, "n2": None, "n3": None}
        self.dead: set[str] = set()

    def requeue(self, place: str) -> None:
        if place in self.dead:
            return
        if self.place not in self.dead:  # its epilog
            self.files[self.place] = None
        self.restart, self.place = self.restart + 1, place
        self.files[place] = self.restart

    def report_all(self) -> None:
        for number, name in enumerate(self.files):
            restart = self.files[name]
            if name not in self.dead:
                runs = () if restart is None else (Run("c", JOB, restart),)
                self.hear(name, gpu(f"G{number}", *runs))

    def obey(self) -> None:
        """What plans say is gone, is gone from disk."""
        for name in self.files.keys() - self.dead:
            gone = {run.restart for plan in self.plans(name)[-1:] for run in plan.gone}
            if self.files[name] in gone:
                self.files[name] = None

    def slurm_answers(self) -> None:
        """Every question so far, by slurmctld's one record of the job."""
        job = msgspec_job(Run("c", JOB, self.restart), (self.place,))
        asked = [action.run for action in self.actions if isinstance(action, cs.ReadJob)]
        for run in asked:
            if run in self.state.runs and self.state.runs[run].reading:
                read(self, run, job)

    def truth(self) -> Run:
        return Run("c", JOB, self.restart)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["requeue", "die", "boot", "report", "slurm", "limit", "end limit"]),
            st.sampled_from(["n1", "n2", "n3"]),
        ),
        max_size=25,
    )
)
def test_one_id_never_has_two_live_runs_once_slurm_was_heard(story: list[tuple[str, str]]) -> None:
    site = Cluster()
    for what, where in story:
        match what:
            case "requeue":
                site.requeue(where)
            case "die":
                site.dead.add(where)
            case "boot":
                site.dead.discard(where)
            case "report":
                site.report_all()
            case "slurm":
                site.slurm_answers()
            case "limit":
                site.limit(1000)
            case "end limit":
                site.limit(None)
        site.cycle()
        site.obey()
    for _ in range(3):
        site.wait(1)
        site.report_all()
        site.cycle()
        site.slurm_answers()
        site.cycle()
        site.obey()
    site.report_all()
    site.cycle()
    live = {run for run, phase in phases(site).items() if phase != "gone"}
    here = site.place not in site.dead
    assert live <= {site.truth()} if not here else live == {site.truth()}
    for name in site.files.keys() - site.dead:
        on_disk = site.files[name]
        assert on_disk in (None, site.restart), "an old file stays on no node that answers"
        capped = {cap.run for plan in site.plans(name)[-1:] for step in plan.steps for cap in step.caps}
        assert capped <= {site.truth()}


# ------------------------------------------------------------------------------ the agent: what lies there at its start


def test_an_agent_that_boots_with_an_old_job_file_holds_nothing_for_it() -> None:
    """The GPUs of the old run are the next job's from its prolog on; only the controller can say that it is over."""
    world = World()
    world.begin_job(JOB, 0, 1, 2)
    world.start()
    world.advance(S)
    assert world.window(200_000, {}, gone=(FIRST,))
    assert list(world.jobs) == []
    assert world.requested() == [200_000] * 3
    new = world.begin_job(700_222, 0, 1)
    assert list(world.state.runs) == [new]
    world.advance(S)
    assert world.window(200_000, {new: 500_000})
    world.advance(S)
    assert world.requested() == [500_000, 500_000, 200_000]
    assert world.send(world.make_plan(window_step(None)))
    world.advance(S)
    assert world.requested() == [700_000] * 3
    assert {fields["prior_mw"] for fields in world.said("prior")} == {700_000}


def test_caps_whose_jobs_ended_unseen_are_lifted_to_what_was_before_them_and_only_where_they_still_stand() -> (
    None
):
    """No epilog ran: one GPU went back to its default by itself, one is still capped over a limit of 650 W."""
    world = World(2)
    for uuid, prior_mw in (("GPU-0", 700_000), ("GPU-1", 650_000)):
        world.journal[uuid] = entry(uuid, prior_mw=prior_mw, boot_id=BOOT)
    world.devices.gpus["GPU-1"].requested_mw = world.devices.gpus["GPU-1"].enforced_mw = 300_000
    world.issued = {uuid: {300_000} for uuid in world.issued}
    first, second = world.begin_job(810, 0), world.begin_job(811, 1)
    world.start()
    world.advance(S)
    assert world.devices.sets == [], "nobody has said yet that they are over"
    assert world.send(world.make_plan(window_step(None), gone=(first, second)))
    world.advance(S)
    # A set of the agent before may have been under way: the prior limit is said again, and no other.
    assert set(world.devices.sets) == {("GPU-0", 700_000), ("GPU-1", 650_000)}
    assert world.jobs == {}
    new = world.begin_job(900, 1)
    world.end_job(second)  # an epilog that comes late
    assert list(world.state.runs) == [new]
    world.advance(5 * S)
    assert world.requested() == [700_000, 650_000]


def test_a_job_cancelled_in_its_prolog_is_over_at_the_next_full_reading() -> None:
    """Its file is there and no epilog ever comes: Slurm's own list of jobs ends it."""
    site = Site(nodes=1, gpus=1, full_read_min_s=1.0, full_read_s=5.0)
    site.hear("n1", gpu("G1", FIRST))
    site.identify(FIRST, "n1")
    site.wait(2)
    cancelled = changed(msgspec_job(FIRST, ()), state="CANCELLED")
    site.tell(cs.AllJobsRead(jobs=(cancelled,)))
    site.hear("n1", gpu("G1", FIRST))
    site.cycle()
    assert phases(site) == {FIRST: "gone"}
    assert site.plans("n1")[-1].gone == (FIRST,)


# ---------------------------------------------------------------------------------------- which GPUs are a run's at all


def test_no_list_of_gpus_is_no_gpu_and_an_index_that_is_not_here_is_told() -> None:
    world = World().start()
    plain, strange, real = world.begin_job(1), world.begin_job(2, 9), world.begin_job(3, 1)
    world.advance(S)
    told = world.reports[-1]
    assert {run.run: run.gpus for run in told.runs} == {plain: (), strange: (), real: ("GPU-1",)}
    (fault,) = told.faults
    assert f"run {strange}" in fault and "position 9" in fault
    assert world.window(200_000, {plain: 300_000, strange: 300_000, real: 500_000})
    world.advance(S)
    assert world.requested() == [200_000, 500_000, 200_000]


def test_a_run_without_gpus_is_no_run_of_the_controller() -> None:
    site = Site(nodes=1, gpus=1)
    report = site.report("n1", gpu("G1"))
    without = RunReport(run=FIRST, uid=1000, flex="high", gpus=())
    site.tell(cs.ReportCame(report=msgspec.structs.replace(report, runs=(without,))))
    site.limit(400)
    site.cycle()
    assert phases(site) == {}
    assert site.plans("n1")[-1].steps[0].caps == ()


# ------------------------------------------------------------------------------------------------- how large an id is


@pytest.mark.parametrize("job_id", [1, 67_108_865, 201_330_913, 2**31, 2**32 - 1])
def test_a_federated_id_is_an_id_like_any_other(job_id: int) -> None:
    text = f"pfi-job 1\njob_id {job_id}\nrestart 0\nuid 1000\ngpus 0\nflex 10%\n"
    assert parse_job_file(f"{job_id}.0", text.encode()).job_id == job_id
    site, run = Site(nodes=1, gpus=1), Run("c", job_id)
    site.hear("n1", gpu("G1", run))
    site.identify(run, "n1")
    assert phases(site) == {run: "admitted"}


@pytest.mark.parametrize("job_id", [0, 2**32, 9_999_999_999])
def test_what_slurm_cannot_have_as_an_id_is_no_job_file(job_id: int) -> None:
    text = f"pfi-job 1\njob_id {job_id}\nrestart 0\nuid 1000\ngpus 0\nflex 10%\n"
    with pytest.raises(JobFileError):
        parse_job_file(f"{job_id}.0", text.encode())


@pytest.mark.parametrize("text", ["0", "0_3", str(2**32), "north", "8123;north", "-1", "1e3", "1234.", "77_"])
def test_what_cannot_be_a_job_is_refused_and_never_read_as_job_0(text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_job(text)
    assert ended.value.code == WRONG_USE


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("201330913", {"job_id": 201_330_913}),
        (str(2**32 - 1), {"job_id": 2**32 - 1}),
        ("201330913_0", {"job_id": 201_330_913, "task": 0}),
        ("201330913+1.2", {"job_id": 201_330_913, "component": 1, "restart": 2}),
    ],
)
def test_large_ids_are_read_whole(text: str, read: dict[str, int]) -> None:
    assert parse_job(text) == read
