"""Progress sockets: whose counter a datagram is, and that nobody else's word or flood reaches it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.bus.unix import SocketError
from slurm_pfi.model import Progress
from slurm_pfi.node import progress_socket, sender
from slurm_pfi.node.jobfile import JobFile
from slurm_pfi.node.progress import MAX_RUNS, ProgressTable, RunKey, Said, newest_runs, parse_progress
from slurm_pfi.node.sender import JobFinder, Senders, Turn

from . import hostile_senders
from .progress_node import ME, Node, descriptors, made_node, python, run_file, until

NOBODY = 65534


# --------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"pfi-progress 1 12 tokens", (12.0, "tokens", None)),
        (b"pfi-progress 1 1.5e+09 steps", (1.5e9, "steps", None)),
        (b"pfi-progress 1 1e24 tokens", (1e24, "tokens", None)),
        (b"pfi-progress 1 12 steps of 5e3", (12.0, "steps", 5000.0)),
        (b"pfi-progress 1 12 steps of 7", (12.0, "steps", 7.0)),
        (b"pfi-progress 1 12 steps of 0", None),
        (b"pfi-progress 1 12 steps of -7", None),
        (b"pfi-progress 1 12 steps of 2e24", None),
        (b"pfi-progress 1 12 steps of nan", None),
        (b"pfi-progress 1 12 steps of", None),
        (b"pfi-progress 1 12 steps of 7 of 8", None),
        (b"pfi-progress 1 12 steps 7", None),
        (b"pfi-progress 1 2e24 tokens", None),
        (b"pfi-progress 1 12 tokens\n", None),
        (b"pfi-progress 2 12 tokens", None),
        (b"pfi-progress 1 -12 tokens", None),
        (b"pfi-progress 1 1e999 tokens", None),
        (b"pfi-progress 1 inf tokens", None),
        (b"pfi-progress 1 nan tokens", None),
        (b"pfi-progress 1 12 Tokens", None),
        (b"pfi-progress 1 12 tokens 41", None),
        (b"pfi-progress 1 12 " + b"x" * 300, None),
    ],
)
def test_progress_datagrams(data: bytes, found: tuple[float, str, float | None] | None) -> None:
    assert parse_progress(data) == found


@given(st.binary(max_size=400))
def test_no_bytes_harm_the_reader(data: bytes) -> None:
    assert parse_progress(data) is None


# -------------------------------------------------------------------------------------------------- the table


def test_a_rate_is_that_of_the_last_seconds() -> None:
    table, run = ProgressTable(), RunKey(7, 0)
    table.expect([run_file(7)])
    table.take(run, Said(100, "tokens", None), 0.0)
    first = table.progress(run, 1.0)
    assert first is not None and first.rate_per_s is None and first.age_s == 1.0
    for second in range(1, 61):
        table.take(
            run,
            Said(100 + (second if second <= 30 else 30 + (second - 30) * 5), "tokens", None),
            float(second),
        )
    found = table.progress(run, 60.0)
    assert found is not None and found.rate_per_s == pytest.approx(5.0, rel=0.01)
    table.take(run, Said(3, "tokens", None), 61.0)
    begun = table.progress(run, 61.0)
    assert begun is not None and begun.rate_per_s is None, "a counter that falls begins anew"
    table.expect([run_file(8)])
    assert table.progress(run, 61.0) is None


def test_the_newest_total_counts() -> None:
    table, run = ProgressTable(), RunKey(7, 0)
    table.expect([run_file(7)])
    for second, total in enumerate((None, 900.0, 1000.0, None)):
        table.take(run, Said(10 * second, "steps", total), float(second))
        found = table.progress(run, float(second))
        assert found is not None and found.total == total


def test_a_requeued_job_begins_without_the_old_runs_counter() -> None:
    table = ProgressTable()
    table.expect([run_file(7, 0)])
    table.take(RunKey(7, 0), Said(100, "tokens", None), 0.0)
    table.expect(newest_runs([run_file(7, 0), run_file(7, 1)]).values())
    assert table.run_of(7) == RunKey(7, 1)
    assert table.progress(RunKey(7, 0), 1.0) is None and table.progress(RunKey(7, 1), 1.0) is None
    table.take(RunKey(7, 0), Said(200, "tokens", None), 1.0)
    assert table.progress(RunKey(7, 0), 1.0) is None, "a late word of the old run"


def test_the_table_is_of_a_bounded_size() -> None:
    table = ProgressTable()
    table.expect([run_file(number + 1) for number in range(MAX_RUNS + 50)])
    for number in range(MAX_RUNS + 50):
        table.take(RunKey(number + 1, 0), Said(1, "tokens", None), 0.0)
    assert table.progress(RunKey(MAX_RUNS, 0), 0.0) is not None
    assert table.progress(RunKey(MAX_RUNS + 1, 0), 0.0) is None


# ------------------------------------------------------------------------------------------------- the sender


class Proc:
    """A /proc of plain files, for what a test cannot make of real processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        pid: int,
        parent: int,
        uid: int = NOBODY,
        *,
        name: str = "python3",
        title: str = "",
        started: int = 5,
    ) -> None:
        own = self.folder / str(pid)
        own.mkdir(exist_ok=True)
        uids = "\t".join([str(uid)] * 4)
        (own / "status").write_text(f"Name:\t{name}\nState:\tS (sleeping)\nPPid:\t{parent}\nUid:\t{uids}\n")
        (own / "stat").write_text(f"{pid} ({name} ) x) S {parent} " + "0 " * 17 + f"{started} 0 0\n")
        (own / "cmdline").write_text(title)
        (own / "exe").unlink(missing_ok=True)
        (own / "exe").symlink_to(shutil.which("true") or "/bin/true")

    def cgroup(self, pid: int, text: str) -> None:
        (self.folder / str(pid) / "cgroup").write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "job_id"),
    [
        ("0::/system.slice/slurmstepd.scope/job_41/step_0/user/task_0\n", 41),
        ("0::/system.slice/slurmstepd.scope/job_41\n", 41),
        ("12:cpu,cpuacct:/\n5:memory:/slurm/uid_65534/job_41/step_batch\n", 41),
        ("1:name=systemd:/slurm/uid_65534/job_41/step_batch\n", None),
        ("0::/user.slice/user-65534.slice/user@65534.service/slurmstepd.scope/job_41/x\n", None),
        ("0::/user.slice/system.slice/slurmstepd.scope/job_41/x\n", None),
        ("0::/x\n0::/system.slice/slurmstepd.scope/job_x/step_0\n", None),
        ("0::/system.slice/slurmstepd.scope/job_41x/step_0\n", None),
        ("0::/docker/slurm/uid_65534/job_41/step_0\n", None),
        ("0::/../slurmstepd.scope/job_41/step_0\n", None),
        ("", None),
    ],
)
def test_a_daemonised_process_stays_in_the_job_of_its_cgroup(
    tmp_path: Path, cgroup: str, job_id: int | None
) -> None:
    proc = Proc(tmp_path)
    proc.add(100, parent=1)
    proc.cgroup(100, cgroup)
    finder = JobFinder(frozenset({0, ME}), tmp_path)
    assert finder.job_of(100, NOBODY) == job_id
    assert finder.job_of(100, NOBODY + 1) is None, "the pid is another user's by now"
    assert finder.job_of(0, NOBODY) is None and finder.job_of(101, NOBODY) is None


@pytest.mark.parametrize(
    ("uids", "name", "title", "program", "mode", "job_id"),
    [
        ("0 0 0 0", "slurmstepd", "slurmstepd: [41.batch]", "slurmstepd", 0o755, 41),
        ("0 0 0 0", "slurmstepd", "slurmstepd: [41.extern]", "slurmstepd-wlm (deleted)", 0o755, 41),
        ("65534 0 0 0", "slurmstepd", "slurmstepd: [41.batch]", "slurmstepd", 0o755, None),
        ("65534 65534 65534 65534", "slurmstepd", "slurmstepd: [41.batch]", "slurmstepd", 0o755, None),
        ("0 0 0 0", "su", "slurmstepd: [41.batch]", "slurmstepd", 0o755, None),
        ("0 0 0 0", "slurmstepd", "slurmstepd: [41.batch]", "su", 0o755, None),
        ("0 0 0 0", "slurmstepd", "slurmstepd: [41.batch]", "slurmstepd", 0o4755, None),
        ("0 0 0 0", "slurmstepd", "slurmstepd: [41.batch]", "slurmstepd", 0o757, None),
        ("0 0 0 0", "slurmstepd", "slurmstepd /var/spool", "slurmstepd", 0o755, None),
    ],
)
def test_what_makes_a_slurmstepd(
    tmp_path: Path, uids: str, name: str, title: str, program: str, mode: int, job_id: int | None
) -> None:
    proc = Proc(tmp_path)
    proc.add(100, parent=90)
    proc.add(90, parent=1, uid=0, name=name, title=title)
    status = tmp_path / "90/status"
    status.write_text(status.read_text().replace("0\t0\t0\t0", uids.replace(" ", "\t")))
    file = tmp_path / program
    file.touch()
    file.chmod(mode)
    (tmp_path / "90/exe").unlink()
    (tmp_path / "90/exe").symlink_to(file)
    assert JobFinder(frozenset({0, ME}), tmp_path).job_of(100, NOBODY) == job_id


def test_a_known_sender_costs_no_walk_and_a_reused_pid_does(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.add(100, parent=1, started=5)
    proc.cgroup(100, "0::/system.slice/slurmstepd.scope/job_41/step_0\n")
    table = ProgressTable()
    table.expect([run_file(41), run_file(42)])
    senders = Senders(JobFinder(frozenset({0}), tmp_path), table.run_of)
    assert senders.run_of(100, NOBODY, Turn(1.0, 1)) == RunKey(41, 0)
    assert senders.run_of(100, NOBODY, Turn(2.0, 0)) == RunKey(41, 0)
    proc.add(100, parent=1, started=6)
    proc.cgroup(100, "0::/system.slice/slurmstepd.scope/job_42/step_0\n")
    with pytest.raises(sender.Dropped, match=sender.CROWDED):
        senders.run_of(100, NOBODY, Turn(3.0, 0))
    assert senders.run_of(100, NOBODY, Turn(4.0, 1)) == RunKey(42, 0)


def test_a_process_of_an_old_run_never_counts_for_the_new_one(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.add(100, parent=1)
    proc.cgroup(100, "0::/system.slice/slurmstepd.scope/job_41/step_0\n")
    table = ProgressTable()
    senders = Senders(JobFinder(frozenset({0}), tmp_path), table.run_of)
    with pytest.raises(sender.Dropped, match=sender.NO_JOB):
        senders.run_of(100, NOBODY, Turn(1.0, 1))
    table.expect([run_file(41, 0)])
    assert senders.run_of(100, NOBODY, Turn(2.0, 1)) == RunKey(41, 0), "its job file came late"
    for now_s, files in ((3.0, []), (4.0, [run_file(41, 1)])):
        table.expect(files)
        with pytest.raises(sender.Dropped, match=sender.OLD_RUN):
            senders.run_of(100, NOBODY, Turn(now_s, 4))


def test_a_stranger_is_looked_up_again_now_and_then_and_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "MAX_REMEMBERED", 10)
    proc, table = Proc(tmp_path), ProgressTable()
    table.expect([run_file(41)])
    senders = Senders(JobFinder(frozenset({0}), tmp_path), table.run_of)
    for pid in range(100, 130):
        proc.add(pid, parent=1)
        with pytest.raises(sender.Dropped, match=sender.NO_JOB):
            senders.run_of(pid, NOBODY, Turn(1.0, 1))
    assert len(senders._known) == 10
    # pam_slurm_adopt moves a login into the job after it has begun.
    proc.cgroup(129, "0::/system.slice/slurmstepd.scope/job_41/step_extern\n")
    with pytest.raises(sender.Dropped, match=sender.NO_JOB):
        senders.run_of(129, NOBODY, Turn(2.0, 1))
    assert senders.run_of(129, NOBODY, Turn(1.1 + sender.FORGET_STRANGERS_S, 1)) == RunKey(41, 0)


# ------------------------------------------------------------------------------------------- real processes


@pytest.fixture
def node() -> Iterator[Node]:
    with made_node() as made:
        yield made


needs_root = pytest.mark.skipif(ME != 0, reason="needs root: other users' processes")


@pytest.mark.parametrize("own", [True, False], ids=["own socket", "shared socket"])
def test_the_process_tree_tells_whose_counter_it_is(node: Node, own: bool) -> None:
    async def story() -> None:
        async with node.open(run_file(41), run_file(42)):
            node.reporter(5, "slurmstepd: [41.batch]", job_id=41 if own else None)
            await until(lambda: node.told(41), "the counter")
            told = node.told(41)
            assert told is not None and told.counter == 5
            assert node.drops == [] and node.told(42) is None

    asyncio.run(story())


@pytest.mark.parametrize(
    ("title", "claimed", "why"),
    [
        ("slurmstepd: [x]", 41, sender.NO_JOB),
        ("sh: [41.batch]", 41, sender.NO_JOB),
        ("slurmstepd: [43.batch]", 41, sender.NO_JOB),
        ("slurmstepd: [42.batch]", 41, progress_socket.OTHER_RUN),
    ],
)
def test_another_process_does_not_count_on_a_runs_socket(
    node: Node, title: str, claimed: int, why: str
) -> None:
    async def story() -> None:
        async with node.open(run_file(41), run_file(42)):
            node.reporter(5, title, job_id=claimed)
            await until(lambda: node.drops, "the drop")
            assert node.drops == [why]
            assert node.told(41) is None and node.told(42) is None

    asyncio.run(story())


@needs_root
def test_only_its_own_user_may_write_to_a_runs_socket(node: Node) -> None:
    async def story() -> None:
        async with node.open(run_file(41, uid=NOBODY), run_file(42, uid=NOBODY - 1)):
            node.reporter(5, "slurmstepd: [41.batch]", job_id=41, uid=NOBODY)
            await until(lambda: node.told(41), "the counter of its user")
            # Refused by the kernel on 41's socket, it goes to the one for all, and there it is another user's word.
            node.reporter(7, "slurmstepd: [41.batch]", job_id=41, uid=NOBODY - 1)
            await until(lambda: node.drops, "the drop")
            assert node.drops == [progress_socket.OTHER_USER]
            code = (
                "import socket, sys\n"
                "try: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', sys.argv[1])\n"
                "except OSError as error: print(type(error).__name__)"
            )
            command = (python(NOBODY), "-S", "-c", code, str(node.own(41)))
            refused = node.below_stepd("sh", *command, uid=NOBODY - 1)
            assert refused.stdout is not None and refused.stdout.read() == "PermissionError\n"
            told = node.told(41)
            assert told is not None and told.counter == 5

    asyncio.run(story())


@needs_root
def test_a_set_uid_program_with_a_forged_title_is_no_slurmstepd(node: Node) -> None:
    """Its name, title and effective uid are right; its real uid is the user's."""
    shutil.copy(node.stepd, forged := node.folder / "slurmstepd")
    forged.chmod(0o4755)

    async def story() -> None:
        async with node.open(run_file(41, uid=NOBODY)):
            code = (
                "import os, subprocess\n"
                f"subprocess.run(['slurmstepd: [41.batch]', '-p', '-c', {node.folder.as_posix()!r} + '/send; true'],"
                f" executable={str(forged)!r})"
            )
            send = node.folder / "send"
            send.write_text(
                f"#!/usr/bin/python3 -S\nimport os, time\nos.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
                "from slurm_pfi.progress import report\n"
                "uids = open(f'/proc/{os.getppid()}/status').read().split('Uid:')[1].split()[:2]\n"
                "print(uids, report(5), flush=True)\n"
                "time.sleep(60)\n"
            )
            send.chmod(0o755)
            process = node.below_stepd("sh", python(NOBODY), "-S", "-c", code, job_id=41, uid=NOBODY)
            assert process.stdout is not None
            assert process.stdout.readline() == f"['{NOBODY}', '0'] True\n"
            await until(lambda: node.drops, "the drop")
            assert node.drops == [sender.NO_JOB] and node.told(41) is None

    asyncio.run(story())


def test_a_requeued_run_gets_a_socket_of_its_own(node: Node) -> None:
    async def story() -> None:
        async with node.open(run_file(41, 0)):
            assert node.own(41).is_socket()
            node.listener.expect([run_file(41, 0), run_file(41, 1)])
            assert not node.own(41).exists() and node.own(41, 1).is_socket()
            node.listener.expect([])
            assert not node.own(41, 1).exists()
            node.listener.expect([JobFile(job_id=9, restart=0, uid=ME, gpus=(), flex="")])
            assert not node.own(9).exists(), "a job without GPUs needs none"
            assert (node.folder / "progress").stat().st_mode & 0o777 == 0o755

    asyncio.run(story())


def test_what_lies_there_is_told_apart(node: Node) -> None:
    async def story() -> None:
        shared = node.folder / "progress.sock"
        shared.write_text("notes")
        with pytest.raises(SocketError, match="not a socket"):
            node.listener.open()
        shared.unlink()
        shared.symlink_to("/dev/null")
        with pytest.raises(SocketError, match="not a socket"):
            node.listener.open()
        shared.unlink()
        (node.folder / "progress").mkdir()
        for path in (shared, node.own(41), node.own(7)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
                dead.bind(str(path))
        async with node.open(run_file(41)):
            assert node.own(41).is_socket() and not node.own(7).exists()

    asyncio.run(story())


# -------------------------------------------------------------------------------------------------- hostility


@contextlib.contextmanager
def lingering() -> Iterator[socket.socket]:
    """A connection whose last close takes two minutes, or until the other end goes: here, when the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with accepted, out:
        out.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while out.send(b"x" * 65536):
                pass
        out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 120))
        try:
            yield out
        finally:
            if out.fileno() >= 0:
                out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def pass_away(connection: socket.socket, path: Path) -> None:
    """Send a descriptor and give up ours. Raises PermissionError where the kernel refuses to pass it."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", connection.fileno()))]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
        out.sendmsg([b"pfi-progress 1 5 tokens"], ancillary, 0, str(path))
    os.close(connection.detach())


@pytest.mark.parametrize("old_kernel", [False, True], ids=["this kernel", "before Linux 6.16"])
def test_passed_descriptors_block_nobody_and_leak_nowhere(
    node: Node, monkeypatch: pytest.MonkeyPatch, old_kernel: bool
) -> None:
    if old_kernel:
        monkeypatch.setattr(progress_socket, "_SO_PASSRIGHTS", 9999)

    async def story() -> None:
        with lingering() as first, lingering() as second:
            async with node.open(run_file(41)):
                before = descriptors()
                try:
                    pass_away(first, node.own(41))
                    pass_away(second, node.own(41))
                    passed = True
                except PermissionError:
                    passed = False
                assert passed or not old_kernel
                began_s = time.monotonic()
                if passed:
                    await until(lambda: node.drops, "the drop")
                    assert node.drops == [progress_socket.DESCRIPTORS]
                node.reporter(7, "slurmstepd: [41.batch]")  # by the socket for all: its own is being emptied
                await until(lambda: node.told(41), "the honest counter")
                assert len(descriptors()) <= len(before) + 1  # that of the reporter's output
            assert time.monotonic() - began_s < 60, "reading waited for a close, or closing did"

    asyncio.run(story())
    for thread in threading.enumerate():
        if thread.name.startswith("progress-"):
            thread.join(30)
            assert not thread.is_alive()


def test_reading_pauses_and_the_rest_waits(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_socket, "PER_TURN", 4)
    monkeypatch.setattr(progress_socket, "CROWDED_PAUSE_S", 3600.0)

    async def story() -> None:
        async with node.open(run_file(41)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
                for _ in range(8):
                    out.sendto(b"x", str(node.own(41)))
            await until(lambda: node.listener.dropped[progress_socket.CROWDED], "the end of a turn")
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert node.listener.dropped == {progress_socket.NO_PROGRESS: 4, progress_socket.CROWDED: 1}

    asyncio.run(story())


def test_a_flood_leaves_the_loop_free(node: Node) -> None:
    async def story() -> float:
        async with node.open(run_file(41)):
            busy_s = time.thread_time()
            sent, ends_s = 0, time.monotonic() + 2
            process = node.below_stepd(
                "sh", sys.executable, "-S", "-c", FLOOD, str(node.folder / "progress.sock")
            )
            while process.poll() is None and time.monotonic() < ends_s + 20:
                await asyncio.sleep(0.02)
            assert process.returncode == 0
            assert node.listener.dropped, sent
            return (time.thread_time() - busy_s) / 2

    assert asyncio.run(story()) < 0.2


FLOOD = """
import socket, sys, time
out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
out.settimeout(1)
ends_s = time.monotonic() + 2
while time.monotonic() < ends_s:
    out.sendto(b"pfi-progress 1 5 tokens", sys.argv[1])
"""

HONEST = """
import sys, time
from slurm_pfi.progress import report
begun_s, handed = time.monotonic(), 0
print("begun", flush=True)
while True:
    handed += report((time.monotonic() - begun_s) * 100)
    time.sleep(0.25)
"""


def test_a_thousand_hostile_senders_change_nothing_but_their_own_run(node: Node) -> None:
    """Of another user where we are root; of the same one in tests/cluster."""
    uid = NOBODY if ME == 0 else ME

    async def story() -> None:
        async with node.open(run_file(41), run_file(42, uid=uid)):
            honest = node.below_stepd("slurmstepd: [41.batch]", python(ME), "-S", "-c", HONEST, job_id=41)
            await until(lambda: (told := node.told(41)) and told.rate_per_s, "the honest rate")
            before, busy_s, began_s = descriptors(), time.thread_time(), time.monotonic()
            hostile = node.below_stepd(
                "slurmstepd: [42.batch]",
                python(uid),
                "-S",
                str(node.folder / "python/hostile_senders.py"),
                *(str(path) for path in (node.folder / "progress.sock", node.own(41), node.own(42))),
                "slurmstepd: [41.batch]",
                "1000",
                job_id=42,
                uid=uid,
            )
            seen: list[Progress] = []
            while hostile.poll() is None:
                await asyncio.sleep(0.05)
                told = node.told(41)
                assert told is not None and honest.poll() is None
                seen.append(told)
            share = (time.thread_time() - busy_s) / (time.monotonic() - began_s)
            assert hostile.returncode == 0 and hostile.stdout is not None
            tried = json.loads(hostile.stdout.read())
            hostile.stdout.close()
            assert len(tried) == len(hostile_senders.KINDS) and sum(tried.values()) == 1000
            assert max(told.age_s for told in seen) < 5, "honest reports got through all the time"
            assert all(told.unit == "tokens" and told.counter < 1e6 for told in seen)
            counters = [told.counter for told in seen]
            assert counters == sorted(counters) and counters[-1] > counters[0]
            rates = [told.rate_per_s for told in seen if told.rate_per_s]
            assert all(rate == pytest.approx(100, rel=0.3) for rate in rates)
            assert descriptors() == before
            assert {run.job_id for run in node.table._counters} <= {41, 42}
            assert share < 0.25

    asyncio.run(story())
