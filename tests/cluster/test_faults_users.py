"""What a user's job may try against limits, job files and sockets: all of it is refused, and said in a log."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from testbed import gpus
from testbed.site import Site

from .. import hostile_senders
from ..site_fixture import (
    PARK_MW,
    TRAIN,
    as_user,
    caps_mw,
    set_limit,
    small_site,
    wait_as,
    wait_logged,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root: else jobs run as the owner of everything"),
]

SITE_OPTIONS = small_site(nodes=1, times={"response_s": 3})

NVML = """
import ctypes, os
os.environ["PFI_STANDIN_DIR"] = os.environ["PFI_SIM_DIR"] + "/n1"
if PRETEND:
    os.environ["PFI_STANDIN_EUID"] = "0"
nvml = ctypes.CDLL(os.environ["PFI_STANDIN_LIB"])
print("init", nvml.nvmlInit_v2())
for index in range(4):
    device = ctypes.c_void_p()
    print("handle", nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)))
    print("set", nvml.nvmlDeviceSetPowerManagementLimit(device, 700000))
    print("persistence", nvml.nvmlDeviceSetPersistenceMode(device, 0))
"""
NO_PERMISSION = 4

FILES = """
import os
jobs = f"{STATE}/n1/jobs"
def attempt(what, deed):
    try:
        deed()
        print("DONE", what)
    except OSError as error:
        print("refused", what, error.errno)
attempt("write a job file", lambda: open(f"{jobs}/4711.0", "w"))
attempt("make a link", lambda: os.symlink("/etc/passwd", f"{jobs}/4712.0"))
attempt("replace the own one", lambda: os.rename("/etc/passwd", f"{jobs}/{os.environ['SLURM_JOB_ID']}.0"))
attempt("remove the own one", lambda: os.unlink(f"{jobs}/{os.environ['SLURM_JOB_ID']}.0"))
attempt("append to the own one", lambda: open(f"{jobs}/{os.environ['SLURM_JOB_ID']}.0", "a"))
attempt("move the folder", lambda: os.rename(jobs, jobs + "2"))
attempt("write a plan", lambda: open(f"{STATE}/n1/plan.json", "w"))
attempt("read the plan", lambda: open(f"{STATE}/n1/plan.json"))
attempt("write a journal entry", lambda: open(f"{STATE}/n1/journal/GPU-x.json", "w"))
attempt("take the lock", lambda: open(f"{STATE}/n1/lock", "r+"))
attempt("remove the bus", lambda: os.unlink(f"{RUN}/bus.sock"))
attempt("remove the node's socket", lambda: os.unlink(f"{STATE}/n1/control.sock"))
attempt("remove the progress socket", lambda: os.unlink(f"{STATE}/n1/progress.sock"))
attempt("write the audit", lambda: open(f"{STATE}/n1/audit.jsonl", "a"))
attempt("write the limits", lambda: open(f"{STATE}/../controller/state/limits.json", "w"))
attempt("signal the agent", lambda: os.kill(AGENT, 9))
attempt("signal the controller", lambda: os.kill(CONTROLLER, 9))
"""

SOCKETS = """
import json, socket, struct, os
def talk(path, data):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    try:
        connection.connect(path)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(65536).strip()
    except OSError as error:
        return repr(error).encode()
def ask(path, command, **args):
    print(command, talk(path, json.dumps({"command": command, "args": args}).encode() + b"\\n").decode())
order = {"id": "evil", "class": "economic", "limit_mw": 900000}
for command, args in (("limit_set", order), ("limit_clear", {"id": None}), ("off", {}), ("on", {})):
    ask(f"{RUN}/control.sock", command, **args)
for command in ("release", "resume"):
    ask(f"{STATE}/n1/control.sock", command)
report = REPORT
print("bus", talk(f"{RUN}/bus.sock", struct.pack(">I", len(report)) + report))
for garbage in (b"", b"\\n", b"{}\\n", b"[" * 60000 + b"\\n", b"\\xff" * 70000, b'{"command": 7}\\n'):
    for path in (f"{RUN}/control.sock", f"{STATE}/n1/control.sock"):
        talk(path, garbage)
status = talk(f"{RUN}/control.sock", b'{"command": "status"}\\n')
print("status", json.loads(status)["ok"])
"""


def script(site: Site, text: str, **more: object) -> str:
    values = {
        "STATE": str(site.root / "nodes"),
        "RUN": str(site.root / "controller/run"),
        "AGENT": site.pid_of("n1"),
        "CONTROLLER": site.pid_of("controller"),
        **more,
    }
    return "".join(f"{name} = {value!r}\n" for name, value in values.items()) + text


@pytest.fixture
def window(site: Site) -> None:
    """A window in which everything on n1 is parked, and nothing is left for a job."""
    set_limit(site, 1800)
    wait_as("n1 is parked", lambda: caps_mw(site) == [PARK_MW] * 4)


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("pretend", [False, True], ids=["as itself", "as a pretended root"])
def test_limits_through_nvml(site: Site, pretend: bool) -> None:
    def limit_pids() -> set[int]:
        return {line.pid for line in gpus.read_trace(site.sim_dir("n1")) if line.event == "limit"}

    pids = limit_pids()
    said = as_user(site, script(site, NVML, PRETEND=pretend), gpus=4, name=f"nvml{pretend:d}")
    assert said.splitlines() == [
        "init 0",
        *["handle 0", f"set {NO_PERMISSION}", f"persistence {NO_PERMISSION}"] * 4,
    ]
    assert caps_mw(site) == [PARK_MW] * 4
    assert limit_pids() == pids


@pytest.mark.usefixtures("window")
def test_files_and_processes(site: Site) -> None:
    said = as_user(site, script(site, FILES), name="files").splitlines()
    assert len(said) == FILES.count("\nattempt(")
    assert [line for line in said if not line.startswith("refused")] == []
    assert caps_mw(site) == [PARK_MW] * 4


@pytest.mark.usefixtures("window")
def test_sockets(site: Site) -> None:
    report = {"type": "report", "cluster": "pfi", "node": "n1", "gpus": [], "runs": []}
    text = script(site, SOCKETS, REPORT=json.dumps(report).encode())
    said = as_user(site, text, name="sockets")
    lines = dict(line.split(" ", 1) for line in said.splitlines())
    for command in ("limit_set", "limit_clear", "off", "on"):
        reply = json.loads(lines[command])
        assert (reply["ok"], reply["exit_code"]) == (False, 1)
        assert "may not change limits" in reply["message"]
    for command in ("release", "resume"):
        reply = json.loads(lines[command])
        assert (reply["ok"], reply["exit_code"]) == (False, 1)
        assert f"may not {command} this node" in reply["message"]
    assert lines["bus"] == "b''" or "ConnectionReset" in lines["bus"] or "BrokenPipe" in lines["bus"]
    assert lines["status"] == "True"
    wait_logged(site, "controller", r"uid 65534 .*may not speak as a node")
    wait_logged(site, "controller", r"uid 65534 .*may not change limits")
    wait_logged(site, "n1", r"control refused.*65534")
    assert caps_mw(site) == [PARK_MW] * 4
    assert [node["state"] for node in site.status()["nodes"]] == ["ok"]
    assert site.log_of("controller").count("Traceback") == 0


def test_a_thousand_hostile_senders_beside_an_honest_job(site: Site) -> None:
    """All that a user can send, from a job and from what left it: the neighbour's counter and the agent go on."""
    folder, agent = site.node_dir("n1"), site.pid_of("n1")
    honest = site.submit(TRAIN, gpus=2, flex="medium")
    site.wait_training(honest)
    wait_as("its rate is known", lambda: (site.jobs()[honest]["rate_per_s"] or 0) > 0)
    usual = site.jobs()[honest]["rate_per_s"]
    hostile = site.root / "python/hostile_senders.py"
    shutil.copy(hostile_senders.__file__, hostile)
    words = (folder / "progress.sock", folder / f"progress/{honest}.0", f"{folder}/progress/$SLURM_JOB_ID.0")
    sockets = " ".join(f'"{word}"' for word in words)
    text = f'#!/bin/sh\nexec python3 -S {hostile} {sockets} "slurmstepd: [{honest}.batch]" 1000\n'
    began_s, busy_s, open_files = time.monotonic(), cpu_s(agent), len(descriptors(agent))
    job = site.cluster.sbatch(text, "--gres=gpu:1", "--nodelist=n1")
    rates: list[float] = []

    def over() -> bool:
        rates.append(site.jobs()[honest]["rate_per_s"] or 0)
        return site.cluster.job_fields(job)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING")

    wait_as("all have tried", over, timeout_s=100)
    share = (cpu_s(agent) - busy_s) / (time.monotonic() - began_s)
    tried = json.loads(site.cluster.job_output(job))
    assert sum(tried.values()) == 1000 and len(tried) == len(hostile_senders.KINDS)
    assert min(rates) > 0.7 * usual and max(rates) < 1.3 * usual
    assert share < 0.3, "of a core, all of the agent's work"
    wait_as("nothing stays open", lambda: len(descriptors(agent)) <= open_files + 2)
    assert site.log_of("n1").count("progress dropped") <= 12, "one line for each reason"
    dropped = json.loads(site.node_cli("n1", "status", "--json").stdout)["progress_dropped"]
    assert dropped["not a progress datagram"] and dropped["sender belongs to another run"]
    set_limit(site, 3400)


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def descriptors(pid: int) -> list[Path]:
    """What a process has open."""
    return list(Path(f"/proc/{pid}/fd").iterdir())


def test_connections_that_say_nothing_keep_nobody_out(site: Site) -> None:
    """A user opens as many connections as it can, and an admin still sets a limit at once."""
    text = script(
        site,
        """
import resource, socket, time
held = []
for path in (f"{RUN}/control.sock", f"{STATE}/n1/control.sock", f"{RUN}/bus.sock"):
    for _ in range(250):
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(path)
        except OSError:
            pass
        held.append(connection)
print("held", flush=True)
time.sleep(600)
""",
    )
    (site.root / "python/hold.py").write_text(text)
    job = site.cluster.sbatch(f"#!/bin/sh\nexec python3 {site.root}/python/hold.py\n", "--gres=gpu:1")
    wait_as("it holds them", lambda: site.cluster.job_output(job) == "held\n")
    set_limit(site, 2500)
    assert "n1" in site.node_cli("n1", "status").stdout
    assert site.cli("limit", "show").returncode == 0
    site.kill("n1", signal.SIGTERM)
    site.start_agent("n1")
    site.wait_heard("n1")
