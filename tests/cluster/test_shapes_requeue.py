"""Runs of one job id: requeued to another node, restarted after a node died, cancelled in the prolog, out of time."""

from __future__ import annotations

import re
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from testbed import gpus
from testbed.processes import processes_naming
from testbed.site import Site

from ..shape_site import (
    comments,
    gpus_of,
    open_limit,
    runs,
    wait_capped,
    wait_for,
    wait_nothing_known,
    wait_states,
    wait_tagged,
)
from ..site_fixture import (
    PARK_MW,
    TRAIN,
    caps_mw,
    controller_audit,
    small_site,
    wait_as,
)

pytestmark = [pytest.mark.cluster, pytest.mark.generations]

SITE_OPTIONS = small_site(times={"response_s": 4, "start_grace_s": 2})


def ended(site: Site, name: str) -> list[str]:
    """Why the controller took a run for ended; empty text where its node said so."""
    return [
        record.get("reason", "")
        for record in controller_audit(site, "ended")
        if record["run"] == f"pfi:{name}"
    ]


def wait_own_tag(site: Site, job: int, restart: int) -> None:
    """Wait until what stands at the job was said of this run of it: the text of a run before may stand there still."""

    def own() -> bool:
        tag = runs(site).get(f"{job}.{restart}", {}).get("tag")
        return bool(tag) and comments(site).get(str(job)) == tag

    wait_as(f"run {restart} of job {job} is tagged", own)


def lose_power(site: Site, node: str, job: int) -> None:
    """Everything on the node ends at once, slurmd, its one job and the agent; what lies on its disk stays."""
    site.cluster.stop_slurmd(node, signal.SIGKILL)
    step = f"slurmstepd: [{job}."
    doomed = {psutil.Process(pid) for pid in processes_naming(site.cluster.layout.root, below=step)}
    doomed |= {
        above for one in doomed for above in one.parents() if " ".join(above.cmdline()).startswith(step)
    }
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none may tell of the others' end
        for one in doomed:
            one.send_signal(number)
    site.kill(node)


def boot(site: Site, node: str) -> None:
    """Another boot: no limit has outlived it, which nobody of us did, and the agent comes before slurmd."""
    (site.root / "identity" / node / "boot_id").write_text(f"{uuid.uuid4()}\n")
    with gpus.Node(site.sim_dir(node)) as simulated:
        for gpu in simulated.snapshot():
            told = {"node": node, "uuid": gpu.uuid, "mono_ns": time.monotonic_ns(), "mw": gpu.default_mw}
            site.foreign.append(told)
            simulated.reset(gpu.uuid)
    site.start_agent(node)
    site.cluster.start_slurmd(node)


def test_a_requeued_job_is_a_new_run_on_another_node(site: Site) -> None:
    job = site.submit(TRAIN, gpus=2, flex="high", where=None)
    site.wait_training(job)
    wait_states(site, {f"{job}.0": "admitted"})
    (first,) = gpus_of(site, f"{job}.0")
    (other,) = {"n1", "n2"} - {first}
    open_limit(site, 4400)
    wait_capped(site, f"{job}.0")
    wait_tagged(site, {str(job): "high"})
    site.cluster.scontrol("update", f"node={first}", "state=drain", "reason=test")
    try:
        site.cluster.requeue(job)
    finally:
        site.cluster.scontrol("update", f"node={first}", "state=resume")
    wait_states(site, {f"{job}.1": "admitted"})
    wait_capped(site, f"{job}.1")
    wait_own_tag(site, job, 1)
    assert gpus_of(site, f"{job}.1").keys() == {other}
    assert set(caps_mw(site, first)) == {PARK_MW}
    assert ended(site, f"{job}.0")
    assert "ended" in site.cli("job", f"{job}.0").stdout
    site.cluster.cancel_all()
    wait_nothing_known(site)


def test_one_task_of_an_array_is_requeued_and_the_other_goes_on(site: Site) -> None:
    array = site.submit(TRAIN, gpus=1, flex="high", where="n1", more=["--array=0-1"])
    wait_as("both run", lambda: len(runs(site)) == 2)
    wait_tagged(site, {f"{array}_0": "high", f"{array}_1": "high"})
    ids = {run["spec"]: run["job_id"] for run in runs(site).values()}
    goes, stays = ids[f"{array}_0"], ids[f"{array}_1"]
    open_limit(site, 4300)  # six parked: 550 W for each of the two
    wait_capped(site, f"{goes}.0", f"{stays}.0")
    site.cluster.requeue(goes)
    wait_states(site, {f"{goes}.1": "admitted", f"{stays}.0": "admitted"})
    wait_capped(site, f"{goes}.1", f"{stays}.0")
    wait_for("the tag", True, lambda: comments(site)[f"{array}_0"] == runs(site)[f"{goes}.1"]["tag"] != "")
    assert [run["job_id"] for run in runs(site).values() if run["restart"]] == [goes]
    site.cluster.cancel_all()
    wait_nothing_known(site)


def test_a_node_dies_and_its_job_runs_on_elsewhere_under_the_same_id(site: Site) -> None:
    """And the node boots with its old job file and journal, and takes a new job: nothing of the old run is left."""
    job = site.submit(TRAIN, gpus=4, flex="high", where="n1", more=["--requeue"])
    site.wait_training(job)
    wait_states(site, {f"{job}.0": "admitted"})
    open_limit(site, 6000)  # 400 W more than n1 at its worst, 500 W for each GPU of both
    wait_as("n2 is parked", lambda: set(caps_mw(site, "n2")) == {PARK_MW})
    lose_power(site, "n1", job)
    old_file = site.cluster.job_file("n1", job)
    assert old_file.exists()
    site.cluster.scontrol("update", "node=n1", "state=down", "reason=no answer")
    site.cluster.wait_job_state(job, "PENDING")
    site.cluster.scontrol("update", f"jobid={job}", "reqnodelist=n2")
    wait_as("n1 counts at its worst", lambda: site.of_window("silent") == ["n1"])
    new_at_unix_s = int(time.time()) + 2
    wait_as("the clock goes on", lambda: time.time() >= new_at_unix_s)
    site.cluster.scontrol("update", f"jobid={job}", "starttime=now")
    site.cluster.wait_job_state(job, "RUNNING")
    wait_as("the new run is known", lambda: f"{job}.1" in runs(site))
    wait_as("the old one is over", lambda: ended(site, f"{job}.0") == ["Slurm runs restart 1 of it"])
    assert set(runs(site)) == {f"{job}.1"}
    assert old_file.exists()

    boot(site, "n1")
    wait_as("the old file is gone", lambda: not old_file.exists())
    wait_as("n1 is heard", lambda: site.of_window("silent") == [])
    wait_states(site, {f"{job}.1": "admitted"})
    wait_as("n1 is parked", lambda: set(caps_mw(site, "n1")) == {PARK_MW})
    wait_own_tag(site, job, 1)
    wait_as("slurmd is back", lambda: site.cluster.drained_nodes() == {}, 30)
    new = site.submit("Q32 PT nc", gpus=4, flex="high", where="n1")
    site.wait_training(new)
    wait_states(site, {f"{job}.1": "admitted", f"{new}.0": "admitted"})
    assert runs(site)[f"{new}.0"]["baseline"] == "bounded", "nothing of the old run is taken for its own"
    wait_capped(site, f"{job}.1", f"{new}.0")
    assert {gpu["uuid"] for gpu in site.snapshot() if gpu["job"] == f"{new}.0"} == gpus_of(site, f"{new}.0")[
        "n1"
    ]
    site.cluster.cancel_all()
    wait_nothing_known(site)
    wait_as("all are parked", lambda: set(caps_mw(site)) == {PARK_MW})


@contextmanager
def prologs_held_and_no_epilogs(site: Site) -> Iterator[Path]:
    """Inside, a prolog waits after ours while the file exists that is given, and no epilog of ours runs."""
    conf = site.cluster.slurm_conf.read_text()
    prolog, epilog = (Path(re.findall(rf"(?m)^{name}=(.*)$", conf)[-1]) for name in ("Prolog", "Epilog"))
    hold = site.cluster.layout.hooks / "hold"
    hold.touch()
    wait = f"while [ -e {hold} ]; do /bin/sleep 0.05; done"
    instead = {prolog: f"#!/bin/sh\n{prolog}.ours\n{wait}\nexit 0\n", epilog: "#!/bin/sh\nexit 0\n"}
    for path, text in instead.items():
        path.rename(f"{path}.ours")
        path.write_text(text)
        path.chmod(0o755)
    try:
        yield hold
    finally:
        hold.unlink(missing_ok=True)
        for path in instead:
            Path(f"{path}.ours").rename(path)


def test_a_job_cancelled_in_its_prolog_whose_epilog_never_comes(site: Site) -> None:
    """And beside it one that runs out of time. The next job has the GPUs for its own, whatever lies there."""
    late = site.submit(TRAIN, gpus=1, flex="high", where="n2")
    site.wait_training(late)
    open_limit(site, 5300)
    wait_as("n1 is parked", lambda: set(caps_mw(site, "n1")) == {PARK_MW})
    site.cluster.scontrol(
        "update", f"jobid={late}", "endtime=now+2"
    )  # seen at slurmctld's next look, every 30 s
    with prologs_held_and_no_epilogs(site) as hold:
        job = site.submit(TRAIN, gpus=4, flex="high", where="n1")
        file = site.cluster.job_file("n1", job)
        wait_as("its file is there", file.exists)
        wait_as("it is known", lambda: f"{job}.0" in runs(site))
        site.cluster.run(["scancel", str(job)])
        hold.unlink()
        site.cluster.wait_job_state(job, "CANCELLED")
    new = site.submit(TRAIN, gpus=4, flex="high", where="n1")
    site.wait_training(new)
    wait_as("the old file is gone", lambda: not file.exists())
    wait_as("the old run is over", lambda: bool(ended(site, f"{job}.0")))
    wait_as("the new one is known", lambda: runs(site).get(f"{new}.0", {}).get("state") == "admitted")
    wait_capped(site, f"{new}.0")
    site.cluster.wait_job_state(late, "TIMEOUT", timeout_s=60)
    wait_states(site, {f"{new}.0": "admitted"})
    wait_as("its GPUs are parked", lambda: set(caps_mw(site, "n2")) == {PARK_MW})
    wait_as("it is kept", lambda: "ended" in site.cli("job", str(late), check=False).stdout)
    site.cluster.cancel_all()
    wait_nothing_known(site)
