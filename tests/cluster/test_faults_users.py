"""What a user's job may try against limits, job files and sockets: all of it is refused, and said in a log."""

from __future__ import annotations

import json
import os
import signal

import pytest

from testbed import gpus
from testbed.site import Site

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

DATAGRAMS = """
import os, socket
out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
path = os.environ["SLURM_PFI_PROGRESS"].replace("%n", "n1")
sent = 0
words = [b"", b"x", b"pfi-progress 1 nan tokens", b"pfi-progress 1 1e999 tokens", b"pfi-progress 2 1 tokens",
         b"pfi-progress 1 -5 tokens", b"pfi-progress 1 5 " + b"t" * 300, bytes(range(256)), b"\\0" * 4096]
for number in range(1000):
    out.sendto(words[number % len(words)], path)
    sent += 1
print("sent", sent)
out.sendto(b"pfi-progress 1 4711 tokens", path)
import time, json
connection = socket.socket(socket.AF_UNIX)
for _ in range(100):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{RUN}/control.sock")
    connection.sendall(b'{"command": "jobs"}\\n')
    answer = b""
    while not answer.endswith(b"\\n"):
        answer += connection.recv(65536)
    mine = [run for run in json.loads(answer)["data"] if str(run["job_id"]) == os.environ["SLURM_JOB_ID"]]
    if mine:
        break
    time.sleep(0.1)
print("known", bool(mine))
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


def test_a_thousand_datagrams(site: Site) -> None:
    said = as_user(site, script(site, DATAGRAMS), name="datagrams")
    assert said.splitlines() == ["sent 1000", "known True"]
    wait_logged(site, "n1", "progress dropped")
    assert site.log_of("n1").count("progress dropped") <= 5
    # The agent still does its work.
    job = site.submit(TRAIN, gpus=4, flex="medium")
    site.wait_training(job)
    wait_as("progress arrives", lambda: (site.jobs()[job]["rate_per_s"] or 0) > 0)
    set_limit(site, 3400)


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
