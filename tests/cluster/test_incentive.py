"""etc/job_submit.lua on a real cluster with accounting: who gets the cheaper QOS, what it costs, that nobody cheats.

What the script rules is tried at length in tests/test_job_submit_lua.py; here stands what Slurm makes of it.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pytest

from testbed.cluster import REPO, Cluster, ClusterOptions, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.generations,
    pytest.mark.skipif(os.getuid() != 0, reason="needs several users: run as root"),
]

USAGE_FACTOR: Final = 0.8
CPUS: Final = 8  # what a job of ours is billed a second: one for each
SITE: Final = {
    "none_partitions = {}": 'none_partitions = { "urgent" }',
    "none_accounts = {}": 'none_accounts = { "clinic" }',
}
SCRIPT: Final = (REPO / "etc/job_submit.lua").read_text()
# Ordinary users: of the account research, clinic, guests. Slurm 26.05 finds no association of nobody's.
USER: Final = "games"
CLINICIAN: Final = "daemon"
GUEST: Final = "mail"
GPU: Final = ("--gres=gpu:1",)
SLEEP: Final = "#!/bin/sh\nexec sleep 300\n"
DENIED: Final = "Access/permission denied"


@dataclass(frozen=True)
class Submitted:
    """One submission: the job's id, or None when it was refused, and what the user read."""

    job: int | None
    said: str


def with_site(text: str, changes: Mapping[str, str]) -> str:
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


class Incentive:
    """A cluster with the script in force."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.script = cluster.layout.etc / "job_submit.lua"
        self._written_s = int(time.time())

    def write_script(self, text: str) -> None:
        """slurmctld loads it at its next use, by whole seconds of its time of change."""
        fresh = self.script.with_suffix(".new")
        fresh.write_text(text)
        self._written_s += 2
        os.utime(fresh, (self._written_s, self._written_s))
        fresh.rename(self.script)

    def submit(self, *args: str, user: str = USER, script: str = SLEEP) -> Submitted:
        out = f"--output={self.cluster.layout.out}/%j.out"
        done = self.cluster.run(
            ["sbatch", "--parsable", out, f"--cpus-per-task={CPUS}", *args],
            stdin=script,
            user=user,
            check=False,
        )
        return Submitted(int(done.stdout) if done.returncode == 0 else None, done.stderr)

    def qos(self, *args: str, user: str = USER) -> str:
        """Submit a job and say which QOS it has; it is cancelled."""
        submitted = self.submit("--hold", *args, user=user)
        assert submitted.job is not None, submitted.said
        qos = self.cluster.job_fields(submitted.job)["QOS"]
        self.cluster.run(["scancel", str(submitted.job)], user=user)
        return qos

    def update(self, job: int | str, *change: str, user: str = USER) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(["scontrol", "update", f"jobid={job}", *change], user=user, check=False)

    def usage(self, account: str, user: str) -> float:
        """What the user has been charged there: TRES seconds, as fair share and limits see them."""
        shown = self.cluster.scontrol(
            "-o", "show", "assoc_mgr", "flags=assoc", f"users={user}", f"accounts={account}"
        )
        found = [line for line in shown.splitlines() if f"UserName={user}(" in line]
        assert len(found) == 1, shown
        match = re.search(r"UsageRaw/Norm/Efctv=([0-9.]+)/", found[0])
        assert match is not None, found[0]
        return float(match[1])

    def log(self) -> str:
        return (self.cluster.layout.log / "slurmctld.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def incentive() -> Iterator[Incentive]:
    options = ClusterOptions(
        nodes=1,
        accounting=True,
        conf=(
            "PriorityType=priority/multifactor",
            "PriorityDecayHalfLife=100-0",
            "PriorityCalcPeriod=1",
            "AccountingStorageEnforce=associations,limits,qos",
            "PartitionName=closed Nodes=ALL AllowQos=normal State=UP",
        ),
    )
    with Cluster(options) as cluster:
        # docs/incentive.md, "Set it up"
        for told in (
            "add qos flexible set UsageFactor=0.8 Description=power-flexible",
            "add account clinic,guests",
            f"add user {USER} account=research",
            f"add user {CLINICIAN} account=clinic",
            f"add user {GUEST} account=guests",
            "modify account research,clinic set qos+=flexible",
        ):
            cluster.run(["sacctmgr", "-i", *told.split()], user="root")
        made = Incentive(cluster)
        made.write_script(with_site(SCRIPT, SITE))
        with cluster.slurm_conf.open("a") as conf:
            conf.write("JobSubmitPlugins=lua\n")
        cluster.stop_slurmctld()
        cluster.start_slurmctld()
        cluster.wait_nodes_idle()
        yield made


@pytest.fixture(autouse=True)
def _left_whole(incentive: Incentive) -> Iterator[None]:
    yield
    incentive.cluster.cancel_all()
    incentive.cluster.wait_nodes_idle()
    assert incentive.cluster.drained_nodes() == {}


def charged(incentive: Incentive, *args: str) -> float:
    """Run a job for some seconds; what it was charged for each second that it had a CPU."""
    cluster = incentive.cluster
    before = incentive.usage("research", USER)
    submitted = incentive.submit(*GPU, *args, script="#!/bin/sh\nsleep 4\n")
    assert submitted.job is not None, submitted.said
    job = submitted.job
    cluster.wait_job_state(job, "COMPLETED", timeout_s=60)
    wait_until(lambda: cluster.squeue("-j", str(job)) == [], 30, "the job has left")
    # Slurm charges what a job used until its end at that instant.
    wait_until(lambda: incentive.usage("research", USER) > before, 90, "the job is charged")
    wait_until(lambda: cluster.sacct(str(job), "State") == [["COMPLETED"]], 30, "sacct has the job")
    elapsed_s = int(cluster.sacct(str(job), "ElapsedRaw")[0][0])
    assert elapsed_s >= 3
    rate = (incentive.usage("research", USER) - before) / (elapsed_s * CPUS)
    print(f"{args}: {elapsed_s} s at {rate:.4f}")  # noqa: T201
    return rate


def test_a_flexible_job_is_charged_less(incentive: Incentive) -> None:
    plain = charged(incentive)
    flexible = charged(incentive, "--power-flex=high")
    assert plain == pytest.approx(1, rel=0.01)
    assert flexible == pytest.approx(USAGE_FACTOR, rel=0.01)


def slurm_release(cluster: Cluster) -> tuple[int, int]:
    """(22, 5) for Slurm 22.05.x, of the cluster under test."""
    match = re.search(r"(\d+)\.(\d+)", cluster.scontrol("--version"))
    assert match is not None
    return int(match[1]), int(match[2])


MOVED: Final = "slurm-pfi: --power-flex=high: the job goes to QOS flexible"


def test_who_is_moved_and_reads_so(incentive: Incentive) -> None:
    moved = incentive.submit("--hold", *GPU, "--power-flex=high")
    assert moved.job is not None
    assert MOVED in moved.said
    assert incentive.cluster.job_fields(moved.job)["QOS"] == "flexible"
    assert incentive.qos("--gpus=1", "--power-flex=15%") == "flexible"
    assert incentive.qos("--ntasks=1", "--gpus-per-task=1", "--comment=note pfi:high") == "flexible"
    assert incentive.qos("--gpus-per-node=h200:2", "--power-flex=auto") == "flexible"


def test_who_is_not_moved(incentive: Incentive) -> None:
    assert incentive.qos(*GPU) == "normal"
    assert incentive.qos(*GPU, "--power-flex=14%") == "normal"
    assert incentive.qos(*GPU, "--power-flex=low", "--comment=pfi:high") == "normal"
    assert incentive.qos(*GPU, "--comment=pfi:High") == "normal"
    assert incentive.qos(*GPU, "--power-flex=high", "--qos=normal") == "normal"
    assert incentive.qos("--power-flex=high") == "normal"  # no GPU, so nothing to lower
    assert (
        incentive.qos(*GPU, "--power-flex=high", "--partition=closed") == "normal"
    )  # Slurm would refuse it there


def test_srun_and_salloc_alike(incentive: Incentive) -> None:
    show = ("sh", "-c", "scontrol -o show job $SLURM_JOB_ID")
    ran = incentive.cluster.run(["srun", *GPU, "--power-flex=high", *show], user=USER)
    assert " QOS=flexible " in ran.stdout
    assert MOVED in ran.stderr
    allocated = incentive.cluster.run(["salloc", *GPU, "--power-flex=high", *show], user=USER)
    assert " QOS=flexible " in allocated.stdout
    assert MOVED in allocated.stderr
    refused = incentive.cluster.run(
        ["srun", *GPU, "--qos=flexible", "--power-flex=low", "true"], user=USER, check=False
    )
    assert refused.returncode != 0
    assert "and this one allows 5%" in refused.stderr


def test_each_task_of_an_array_and_each_part_of_a_heterogeneous_job(incentive: Incentive) -> None:
    array = incentive.submit("--hold", *GPU, "--array=0-1", "--power-flex=high")
    assert array.job is not None
    assert incentive.cluster.squeue("-r", "-j", str(array.job), "-o", "%q") == ["flexible", "flexible"]
    # Slurm gives every part the first one's flag; one without a GPU gets no rebate.
    parts = incentive.submit("--hold", *GPU, "--power-flex=high", ":", *GPU, ":", "--ntasks=1")
    assert parts.job is not None
    assert sorted(incentive.cluster.squeue("-j", str(parts.job), "-o", "%q")) == [
        "flexible",
        "flexible",
        "normal",
    ]


@pytest.mark.parametrize("name", ["flexible", "Flexible"])
def test_the_qos_is_refused_to_jobs_that_allow_too_little(incentive: Incentive, name: str) -> None:
    for flags, why in (
        (("--power-flex=low",), "and this one allows 5%"),
        (("--power-flex=none", "--partition=urgent"), "and this one allows 0%"),
        (("--comment=pfi:low",), "and this one allows 5%"),
        ((), "ask with --power-flex=medium"),
    ):
        refused = incentive.submit(*GPU, f"--qos={name}", *flags)
        assert refused.job is None
        assert why in refused.said
        assert DENIED in refused.said
    assert incentive.submit("--qos=flexible", "--power-flex=high").job is None  # no GPU
    assert incentive.qos(*GPU, f"--qos={name}", "--power-flex=high").lower() == "flexible"


def test_an_environment_is_no_way_around(incentive: Incentive) -> None:
    cluster = incentive.cluster
    command = ["sbatch", "--parsable", "--hold", *GPU]
    refused = cluster.run(command, user=USER, stdin=SLEEP, env={"SBATCH_QOS": "flexible"}, check=False)
    assert refused.returncode != 0
    # What SPANK would take from the environment unchecked is our plugin's to drop.
    job = int(cluster.run(command, user=USER, stdin=SLEEP, env={"SLURM_SPANK_PFI_FLEX": "high"}).stdout)
    assert cluster.job_fields(job)["QOS"] == "normal"


def test_none_is_for_whom_the_site_lists(incentive: Incentive) -> None:
    told = "--power-flex=none is not allowed here; it is read as low"
    read_as_low = incentive.submit("--hold", *GPU, "--power-flex=none")
    assert read_as_low.job is not None
    assert told in read_as_low.said
    for args, user in ((("--partition=urgent",), USER), ((), CLINICIAN)):  # the partition; the account clinic
        allowed = incentive.submit("--hold", *GPU, "--power-flex=none", *args, user=user)
        assert allowed.job is not None
        assert "slurm-pfi" not in allowed.said
    incentive.write_script(with_site(SCRIPT, {'none_elsewhere = "low"': 'none_elsewhere = "refuse"'}))
    refused = incentive.submit(*GPU, "--comment=pfi:none")
    assert refused.job is None
    assert "pfi:none in the comment is not allowed here" in refused.said
    incentive.write_script(with_site(SCRIPT, SITE))


def test_a_user_without_the_qos_can_not_be_moved(incentive: Incentive) -> None:
    """Slurm, not the script, knows who may use a QOS: that is why docs/incentive.md gives it to every account."""
    guest = incentive.submit("--hold", *GPU, "--power-flex=high", user=GUEST)
    assert guest.job is None
    assert "Invalid qos" in guest.said
    assert incentive.submit("--hold", *GPU, "--power-flex=high", "--qos=normal", user=GUEST).job is not None


# ------------------------------------------------------------------------------------------------- changed later


def test_nobody_comes_in_later(incentive: Incentive) -> None:
    plain = incentive.submit("--hold", *GPU, "--power-flex=low")
    assert plain.job is not None
    for change in ("qos=flexible", "qos=FLEXIBLE"):
        refused = incentive.update(plain.job, change)
        assert refused.returncode != 0
        assert DENIED in refused.stderr
        # 22.05 keeps the script's words for its own log.
        told = "and this one allows 5%"
        assert told in (refused.stderr if slurm_release(incentive.cluster) >= (23, 2) else incentive.log())
    assert incentive.cluster.job_fields(plain.job)["QOS"] == "normal"
    # Nor by a promise in the comment: the flag beats it, and cannot be changed.
    assert incentive.update(plain.job, "comment=pfi:high").returncode == 0
    assert incentive.update(plain.job, "qos=flexible").returncode != 0
    # Who deserves it may, and so may root.
    other = incentive.submit("--hold", *GPU, "--power-flex=high", "--qos=normal")
    assert other.job is not None
    assert incentive.update(other.job, "qos=flexible").returncode == 0
    assert incentive.update(plain.job, "qos=flexible", user="root").returncode == 0


@pytest.mark.parametrize("running", [False, True])
def test_nobody_takes_the_promise_back(incentive: Incentive, running: bool) -> None:
    submitted = incentive.submit(*([] if running else ["--hold"]), *GPU, "--comment=pfi:high")
    assert submitted.job is not None
    job = submitted.job
    if running:
        incentive.cluster.wait_job_state(job, "RUNNING")
    for comment in ("pfi:low", "", "pfi:low pfi:high"):
        refused = incentive.update(job, f"comment={comment}")
        assert refused.returncode != 0, comment
    fields = incentive.cluster.job_fields(job)
    assert (fields["QOS"], fields["Comment"].rstrip()) == ("flexible", "pfi:high")
    assert incentive.update(job, "comment=pfi:20% and a note").returncode == 0
    if not running:
        assert incentive.update(job, "gres=").returncode != 0
        # With the QOS the promise goes too.
        assert incentive.update(job, "qos=normal").returncode == 0
        assert incentive.update(job, "comment=pfi:low").returncode == 0


def test_an_array_task_is_not_let_out_either(incentive: Incentive) -> None:
    array = incentive.submit(*GPU, "--array=0-1", "--comment=pfi:high")
    assert array.job is not None
    refused = incentive.update(f"{array.job}_1", "comment=pfi:none")
    assert refused.returncode != 0


def test_a_tag_is_written_whatever_the_job(incentive: Incentive) -> None:
    low = incentive.submit(*GPU, "--power-flex=low")
    high = incentive.submit(*GPU, "--power-flex=high")
    for job in (low.job, high.job):
        assert job is not None
        incentive.cluster.wait_job_state(job, "RUNNING")
        incentive.cluster.scontrol("update", f"jobid={job}", "admincomment=a note of ours")
        assert incentive.cluster.job_fields(job)["AdminComment"].rstrip() == "a note of ours"


# ---------------------------------------------------------------------------------------------------- its faults


def broken(text: str, name: str) -> str:
    """The script with a fault in this function, and one that a message with a percent sign could make worse."""
    start = f"local function {name}("
    line = next(line for line in text.splitlines() if line.startswith(start))
    return text.replace(line, f'{line}\n    error("100% broken")')


def test_a_fault_in_the_script_lets_every_job_pass(incentive: Incentive) -> None:
    incentive.write_script(broken(broken(SCRIPT, "submit"), "modify"))
    passed = incentive.submit("--hold", *GPU, "--power-flex=high")
    assert passed.job is not None
    assert incentive.cluster.job_fields(passed.job)["QOS"] == "normal"
    assert incentive.update(passed.job, "comment=x").returncode == 0
    for name in ("slurm_job_submit", "slurm_job_modify"):
        assert re.search(rf"slurm-pfi: {name}: .*100% broken; the job is taken as it is", incentive.log())


def test_a_script_that_cannot_be_loaded_leaves_the_one_before_in_force(incentive: Incentive) -> None:
    incentive.write_script(with_site(SCRIPT, SITE))
    assert incentive.qos(*GPU, "--power-flex=high") == "flexible"
    for text in ("this is no lua\n", "function slurm_job_submit() return 0 end\n", 'error("at load")\n'):
        incentive.write_script(text)
        assert incentive.qos(*GPU, "--power-flex=high") == "flexible"
        assert "using previous script" in incentive.log()
    incentive.script.unlink()
    assert incentive.qos(*GPU, "--power-flex=high") == "flexible"
    incentive.write_script(with_site(SCRIPT, SITE))


def test_what_slurm_does_with_a_fault_that_is_not_caught(incentive: Incentive) -> None:
    """Why ours catches its own: since 26.05 it would stop every submission."""
    body = 'error("planted")'
    incentive.write_script(
        f"function slurm_job_submit() {body} end\nfunction slurm_job_modify() {body} end\n"
    )
    submitted = incentive.submit("--hold", *GPU)
    if slurm_release(incentive.cluster) < (26, 5):
        assert submitted.job is not None
        assert incentive.update(submitted.job, "comment=x").returncode == 0
    else:
        assert submitted.job is None
        assert "planted" in submitted.said
    assert "planted" in incentive.log()
    incentive.write_script(with_site(SCRIPT, SITE))


def test_slurmctld_does_not_start_with_a_script_that_cannot_be_loaded(incentive: Incentive) -> None:
    """Why docs/incentive.md has it checked before: unlike a reload, a start ends."""
    cluster = incentive.cluster
    cluster.stop_slurmctld()
    incentive.write_script("this is no lua\n")
    ended = cluster.run(["slurmctld", "-D", "-i"], user="root", check=False)
    assert ended.returncode != 0
    assert "failed to initialize job_submit plugin" in ended.stderr + incentive.log()
    incentive.write_script(with_site(SCRIPT, SITE))
    cluster.start_slurmctld()
    cluster.wait_nodes_idle()
    assert incentive.qos(*GPU, "--power-flex=high") == "flexible"


def test_it_joins_a_script_that_the_site_has(incentive: Incentive) -> None:
    """As docs/incentive.md says: our file under another name, and two calls."""
    ours = incentive.cluster.layout.etc / "slurm_pfi.lua"
    ours.write_text(SCRIPT)
    incentive.write_script(
        f"""
local pfi = dofile("{ours}")
pfi.site.none_partitions = {{ "urgent" }}

function slurm_job_submit(job_desc, part_list, submit_uid)
    if job_desc.name == "forbidden" then
        return slurm.ERROR
    end
    return pfi.submit(job_desc, part_list, submit_uid)
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    local rc = pfi.modify(job_desc, job_rec, part_list, modify_uid)
    if rc ~= slurm.SUCCESS then
        return rc
    end
    return slurm.SUCCESS
end
"""
    )
    assert incentive.submit(*GPU, "--job-name=forbidden").job is None
    assert incentive.qos(*GPU, "--power-flex=high") == "flexible"
    low = incentive.submit("--hold", *GPU, "--power-flex=low")
    assert low.job is not None
    assert incentive.update(low.job, "qos=flexible").returncode != 0
    allowed = incentive.submit("--hold", *GPU, "--power-flex=none", "--partition=urgent")
    assert "not allowed here" not in allowed.said
    incentive.write_script(with_site(SCRIPT, SITE))
