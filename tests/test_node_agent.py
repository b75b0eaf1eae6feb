"""The agent as processes: on the stand-in library, with a controller's end of the bus in the test."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_pfi.model import Report
from slurm_pfi.node import command, restorer
from slurm_pfi.node.paths import NodePaths
from testbed import gpus
from testbed.lone_node import Commander, LoneNode, ceilings, wait_for
from tests.node_world import window_step

ALL = [700_000] * 4


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LoneNode]:
    made = LoneNode(tmp_path)
    try:
        yield made
    finally:
        made.close()


def priors(report: Report) -> set[int | None]:
    return {gpu.prior_mw for gpu in report.gpus}


def test_a_window_from_job_file_to_restore(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            site.start()
            run = site.job(7, "1-2")
            report = await controller.until(lambda report: report.runs, "the run")
            assert set(report.runs[0].gpus) == {site.devices[1].uuid, site.devices[2].uuid}
            began_s = time.monotonic()
            await controller.plan(window_step(200_000, {run: 450_000}))
            await controller.ceilings(200_000, 450_000, 450_000, 200_000)
            assert time.monotonic() - began_s < 1.0
            assert site.limits() == [200_000, 450_000, 450_000, 200_000]
            (site.paths.jobs / "7.0").unlink()
            await controller.ceilings(*[200_000] * 4)
            await controller.plan(window_step(None))
            await controller.ceilings(*ALL)

    asyncio.run(story())
    wait_for(lambda: site.limits() == ALL, "the restore in force")
    sets = site.audit("set")
    assert len(sets) == 4 + 2 + 4
    trace = [
        line
        for line in gpus.read_trace(site.sim)
        if line.event == "limit" and line.pid not in (0, os.getpid())
    ]
    assert len(trace) == len(sets)
    for line in trace:
        told = [s for s in sets if s["uuid"] == line.uuid and s["cap_mw"] == line.effective_mw]
        assert told and min(s["mono_ns"] for s in told) < line.mono_ns, "audited before it was done"


def test_kill_9_in_the_window_leaves_it_standing_and_the_next_agent_ends_it(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            run = site.job(7, "0")
            await controller.until(lambda report: report.runs, "the run")
            await controller.plan(window_step(200_000, {run: 400_000}), window_step(None, {}, 3600.0))
            await controller.ceilings(400_000, 200_000, 200_000, 200_000)
            agent.kill()
            agent.wait()
            assert site.limits() == [400_000, 200_000, 200_000, 200_000]
            controller.reports.clear()
            site.start()
            report = await controller.ceilings(400_000, 200_000, 200_000, 200_000)
            assert report.held is not None and report.highest_epoch == 1
            assert all(gpu.prior_mw == 700_000 for gpu in report.gpus)
            await controller.plan(window_step(None))
            await controller.ceilings(*ALL)

    asyncio.run(story())
    assert site.audit("adopted")[-1]["reason"].startswith("4 GPUs")
    wait_for(lambda: site.limits() == ALL, "the restore in force")


def test_sigterm_in_the_window_leaves_a_restorer_that_restores_at_its_end(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.plan(window_step(200_000), window_step(None, {}, 4.0))
            await controller.ceilings(*[200_000] * 4)
            agent.terminate()
            assert agent.wait(10) == 0

    asyncio.run(story())
    assert site.limits() == [200_000] * 4
    assert "4 GPUs keep" in site.audit("stopped")[0]["reason"]
    pid = wait_for(site.restorer_pid, "a restorer")
    assert os.getsid(pid) == pid, "in a session of its own"
    wait_for(lambda: site.limits() == ALL, "the restore")
    wait_for(lambda: site.restorer_pid() is None, "the restorer's end")
    assert all(line["reason"].startswith("restore") for line in site.audit("set")[4:])
    assert len(site.audit("readback")) == 8


def test_a_restorer_ends_when_an_agent_is_back(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.plan(window_step(200_000), window_step(None, {}, 600.0))
            await controller.ceilings(*[200_000] * 4)
            agent.terminate()
            agent.wait(10)

    asyncio.run(story())
    assert wait_for(site.restorer_pid, "a restorer")
    site.start()
    assert site.restorer_pid() is None
    assert site.limits() == [200_000] * 4


@pytest.mark.parametrize("ends_in_s", [None, 6.0])
def test_a_restorer_that_nobody_dismissed_lifts_nothing_in_a_later_window(
    site: LoneNode, ends_in_s: float | None
) -> None:
    """One that had only begun when the next agent looked for it lives on; then that agent dies too."""
    ends = () if ends_in_s is None else (window_step(None, {}, ends_in_s),)

    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.plan(window_step(200_000), *ends)
            await controller.ceilings(*[200_000] * 4)
            agent.kill()
            agent.wait()

    asyncio.run(story())
    words = [sys.executable, "-m", "slurm_pfi.node.restorer", "--at-mono-ns", "1", "--node-name", "n1"]
    words += ["--state-dir", str(site.folder / "state"), "--identity-dir", str(site.folder / "id")]
    done = subprocess.run(
        words, env=site.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    held = msgspec.json.decode(site.paths.plan.read_bytes())
    if ends_in_s is None:
        assert "window without end" in done.stderr and site.limits() == [200_000] * 4
    else:
        first_ns = min(said["mono_ns"] for said in site.audit("set") if said["reason"].startswith("restore"))
        assert first_ns >= held["received_ns"] + ends_in_s * 1e9
        wait_for(lambda: site.limits() == ALL, "the restore in force")


RESTORER_AT_WORK = """
import signal, sys
from pathlib import Path
from slurm_pfi.node.lock import Lock
locks = [Lock(Path(path)) for path in sys.argv[1:]]
print("held", flush=True)
signal.pause()
"""


def test_a_restorer_that_began_while_an_agent_looked_for_it_is_dismissed_too(
    site: LoneNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.paths.prepare()
    calls: list[int | None] = []

    def dismiss(node: str, paths: NodePaths) -> int | None:
        calls.append(None if not calls else restorer.dismiss(node, paths))
        return calls[-1]

    monkeypatch.setattr(command, "dismiss", dismiss)
    at_work = subprocess.Popen(
        [sys.executable, "-c", RESTORER_AT_WORK, str(site.paths.restorer_lock), str(site.paths.lock)],
        stdout=subprocess.PIPE,
    )
    try:
        assert at_work.stdout is not None and at_work.stdout.readline() == b"held\n"
        lock, dismissed = command._take_node("n1", site.paths)
        lock.release()
        assert calls == [None, at_work.pid] and dismissed == at_work.pid
    finally:
        at_work.kill()
        at_work.communicate()


def test_a_second_agent_is_refused_and_says_who_runs(site: LoneNode) -> None:
    first = site.start()
    second = site.ask("run")
    assert second.returncode == 1
    assert f"pid {first.pid}" in second.stderr
    assert first.poll() is None


def test_release_with_the_agent_alive_then_resume(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            site.start()
            await controller.plan(window_step(200_000))
            await controller.ceilings(*[200_000] * 4)
            done = await asyncio.to_thread(site.ask, "release")
            assert done.returncode == 0, done.stderr
            wait_for(lambda: site.limits() == ALL, "the restore in force")
            first = next(report for report in controller.reports if report.released)
            assert ceilings(first) == [200_000] * 4, "told before it was done"
            assert (await asyncio.to_thread(site.ask, "resume")).returncode == 0
            await controller.until(lambda report: not report.released, "resumed")

    asyncio.run(story())


def test_release_without_an_agent_restores_from_the_journal(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.plan(window_step(200_000))
            await controller.ceilings(*[200_000] * 4)
            agent.kill()
            agent.wait()

    asyncio.run(story())
    with gpus.Node(site.sim) as node:
        node.poke("requested_mw", 333_000, gpu=site.devices[3].uuid)
    assert site.ask("status").returncode == 3
    done = site.ask("release")
    assert done.returncode == 0, done.stderr
    assert "somebody else" in done.stdout
    wait_for(lambda: site.limits() == [700_000, 700_000, 700_000, 333_000], "the restore")
    assert site.audit("conflict")[-1]["found_mw"] == 333_000
    assert site.ask("release").returncode == 0, "nothing is left to do, which is no failure"


def test_release_without_an_agent_restores_though_nothing_can_be_written_down(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            agent = site.start()
            await controller.plan(window_step(200_000))
            await controller.ceilings(*[200_000] * 4)
            agent.kill()
            agent.wait()

    asyncio.run(story())
    site.paths.released.symlink_to(site.folder / "full" / "disk")  # as on a full disk, no file can be made
    done = site.ask("release")
    assert done.returncode == 1 and "the next agent takes plans again" in done.stderr
    wait_for(lambda: site.limits() == ALL, "the restore")


def test_while_the_journal_cannot_be_written_the_gpus_rest_and_follow_their_owner(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            site.start()
            await controller.until(lambda report: priors(report) == set(ALL), "prior limits recorded")
            site.paths.journal.chmod(0o777)
            await controller.plan(window_step(200_000))
            await controller.until(lambda report: any("journal" in fault for fault in report.faults), "said")
            with gpus.Node(site.sim) as node:
                node.poke("requested_mw", 650_000, gpu=site.devices[3].uuid)
            await controller.until(lambda report: 650_000 in priors(report), "the owner's limit seen")
            assert site.audit("readback") == [], "nothing was set"
            site.paths.journal.chmod(0o700)
            await controller.ceilings(*[200_000] * 4)
            await controller.plan(window_step(None))
            await controller.ceilings(*ALL[:3], 650_000)

    asyncio.run(story())
    assert all("not tried" in said["error"] for said in site.audit("set_failed"))
    assert site.audit("conflict") == []


def test_a_rest_that_could_not_be_written_down_is_as_soon_as_it_can_be(site: LoneNode) -> None:
    """Else an entry would say for ever that a limit of ours stands, and somebody's same value be taken for it."""
    site.config.write_text(site.config.read_text() + "[times]\nrescan_s = 0.3\n")
    entries = [site.paths.journal / f"{device.uuid}.json" for device in site.devices]

    def current() -> set[int | None]:
        return {json.loads(path.read_text())["entry"]["current_mw"] for path in entries}

    def unwritten(report: Report) -> bool:
        return any("journal" in fault for fault in report.faults)

    async def story() -> None:
        async with Commander(site) as controller:
            site.start()
            await controller.plan(window_step(200_000))
            await controller.ceilings(*[200_000] * 4)
            site.paths.journal.chmod(0o777)
            await controller.plan(window_step(None))
            await controller.ceilings(*ALL)
            await controller.until(unwritten, "said")
            assert current() == {200_000}
            site.paths.journal.chmod(0o700)
            await controller.until(lambda report: not unwritten(report), "written")
            assert current() == {None}

    asyncio.run(story())


def test_garbage_on_the_progress_socket_and_in_the_job_folder_is_dropped(site: LoneNode) -> None:
    agent = site.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for data in (b"", b"\0" * 256, b"x" * 4096, b"pfi-progress 1 nan tokens", b"pfi-progress 1 5 tokens"):
            sender.sendto(data, str(site.paths.progress))
    (site.paths.jobs / "1.0").write_bytes(os.urandom(300))
    (site.paths.jobs / "2.0").write_bytes(b"x" * 5000)
    (site.paths.jobs / "3.0").symlink_to("/etc/hostname")
    (site.paths.jobs / "4.0").mkdir()
    os.mkfifo(site.paths.jobs / "5.0")
    (site.paths.jobs / "notes").write_text("hello")
    site.job(6, "9")
    (site.paths.jobs / "7.0").write_text("pfi-job 1\njob_id 8\nrestart 0\nuid 1\ngpus 0\nflex -\n")
    site.job(9, "0")
    (site.paths.jobs / "9.0").chmod(0o666)

    def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(site.ask("status", "--json").stdout)
        return found

    found = wait_for(
        lambda: (s := status()) and len(s["job_files_ignored"]) == 8 and s, "all files looked at"
    )
    assert [run["run"]["job_id"] for run in found["runs"]] == [6]
    assert found["runs"][0]["gpus"] == [] and any("position 9" in fault for fault in found["faults"])
    assert found["progress_dropped"] == {"not a progress datagram": 4, "sender is in no job of this node": 1}
    assert agent.poll() is None
    log = site.log.read_text()
    assert log.count("job file ignored name=1.0") == 1, "one line for each file"


def test_without_a_library_the_agent_is_ready_and_says_what_is_missing(site: LoneNode) -> None:
    agent = site.start(LD_LIBRARY_PATH="/nonexistent")
    wait_for(lambda: "libnvidia-ml" in site.log.read_text(), "the fault said")
    assert agent.poll() is None
    agent.terminate()
    assert agent.wait(10) == 0


def test_without_permission_the_fault_is_said_and_nothing_storms(site: LoneNode) -> None:
    async def story() -> None:
        async with Commander(site) as controller:
            site.start(PFI_STANDIN_EUID="1000")
            await controller.plan(window_step(200_000))
            report = await controller.until(
                lambda report: all(gpu.fault for gpu in report.gpus), "the faults"
            )
            assert ceilings(report) == ALL

    asyncio.run(story())
    assert len(site.audit("set_failed")) == 4
    assert site.limits() == ALL


def test_systemd_is_told(site: LoneNode, tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(address))
        listener.settimeout(15)
        site.start(NOTIFY_SOCKET=str(address), WATCHDOG_USEC="400000")
        told = [listener.recv(200) for _ in range(3)]
    assert any(b"READY=1" in word for word in told) and any(word == b"WATCHDOG=1" for word in told)


@pytest.mark.parametrize(
    ("words", "code"), [(["bogus"], 2), (["status"], 3), (["resume"], 3), (["release"], 3), (["run"], 2)]
)
def test_exit_codes(site: LoneNode, words: list[str], code: int) -> None:
    if words == ["run"]:
        site.config.write_text("cluster = 3\n")
    done = site.ask(*words)
    assert done.returncode == code
    assert done.stderr.strip()
