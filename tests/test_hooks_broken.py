"""Prolog and epilog where what is around them is broken, hangs or is hostile: they end with 0, and in time."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed.processes import wait_until

from .hook_scripts import BARE, BOTH, Hooks, group_of, hooks

__all__ = ["hooks"]

DEADLINE_S = 5  # the hook's own, for its work


@BOTH
def test_nothing_open(hooks: Hooks, hook: str) -> None:
    hooks.run(hook, wrapper=("/bin/sh", "-c", 'exec "$0" <&- >&- 2>&-'))
    assert hooks.files() == ({"910001.0"} if hook == "prolog" else set())
    hooks.run(hook, {}, wrapper=("/bin/sh", "-c", 'exec "$0" <&- >&- 2>&-'))
    assert len(hooks.faults()) == 1


@BOTH
def test_no_log_to_write_to(hooks: Hooks, hook: str) -> None:
    hooks.log.unlink()
    hooks.run(hook, {})
    assert not hooks.log.exists(), "/dev/kmsg where it is missing would be a file that grows in memory"
    hooks.log.mkdir()
    hooks.run(hook, {})
    hooks.log.rmdir()
    os.mkfifo(hooks.log)
    began = time.monotonic()
    hooks.run(hook, {})
    assert time.monotonic() - began < DEADLINE_S, "a pipe that nobody reads is not waited for"


@BOTH
def test_a_hostile_environment(hooks: Hooks, hook: str) -> None:
    evil = hooks.folder / "evil"
    evil.mkdir()
    for command in ("mv", "rm", "mkdir", "printf", "scontrol", "squeue", "sacct", "srun", "sinfo"):
        (evil / command).write_text(f"#!/bin/sh\n: >{hooks.folder}/called-{command}\nexec /bin/sleep 120\n")
        (evil / command).chmod(0o755)
    startup = hooks.folder / "startup"
    startup.write_text(f": >{hooks.folder}/called-startup\nexit 3\n")
    (hooks.jobs / "910001.0").write_text("")
    env = {
        **BARE,
        "PATH": str(evil),
        "ENV": str(startup),
        "BASH_ENV": str(startup),
        "IFS": "0123456789./",
        "PS4": "$(exit 3)",
        "LC_ALL": "tr_TR.UTF-8",
        "CDPATH": str(evil),
        "POSIXLY_CORRECT": "1",
        "state_dir": "/nowhere",
        "log_file": "/nowhere",
        "node": "..",
        "flex": "evil",
        "gpus_fault": "evil",
        "BASH_FUNC_mv%%": "() { exit 3; }",
        "SLURM_JOB_COMMENT": "$(touch x)`touch y`\n;rm -rf /",
        "SLURM_JOB_USER": "\udcff\n",
    }
    hooks.run(hook, env)
    assert hooks.files() == ({"910001.0"} if hook == "prolog" else set())
    assert [path.name for path in hooks.folder.glob("called-*")] == []
    assert hooks.faults() == []


def search_in(hooks: Hooks, hook: str, *folders: Path) -> None:
    """Put other folders in place of the hook's own PATH."""
    script = hooks.script(hook)
    text = script.read_text()
    assert text.count("\nPATH=/usr/bin:/bin\n") == 1
    script.write_text(text.replace("\nPATH=/usr/bin:/bin\n", f"\nPATH={':'.join(map(str, folders))}\n"))


@BOTH
def test_three_commands_and_a_timer_are_all_it_needs(hooks: Hooks, hook: str) -> None:
    """No python, no agent, no config, no driver: nothing else is on the search path."""
    few = hooks.folder / "few"
    few.mkdir()
    for command in ("mkdir", "mv", "rm", "sleep"):
        (few / command).symlink_to(f"/bin/{command}")
    search_in(hooks, hook, few)
    if hook == "prolog":
        shutil.rmtree(hooks.state)
    else:
        (hooks.jobs / "910001.0").write_text("")
    hooks.run(hook)
    assert hooks.files() == ({"910001.0"} if hook == "prolog" else set())
    assert hooks.faults() == []


@pytest.mark.parametrize("gone", [("sleep",), ("mv", "rm"), ("mkdir", "mv", "rm", "sleep")])
@BOTH
def test_without_the_commands_it_needs(hooks: Hooks, hook: str, gone: tuple[str, ...]) -> None:
    few = hooks.folder / "few"
    few.mkdir()
    for command in {"mkdir", "mv", "rm", "sleep"} - set(gone):
        (few / command).symlink_to(f"/bin/{command}")
    (hooks.jobs / "910001.0").write_text("as it was")
    search_in(hooks, hook, few)
    hooks.run(hook)
    assert len(hooks.faults()) == (0 if gone == ("sleep",) else 1)


@BOTH
def test_what_hangs_is_left_in_time(hooks: Hooks, hook: str) -> None:
    """A command that never ends, put in the hook's own PATH, stands for a file system that does not answer."""
    slow = hooks.folder / "slow"
    slow.mkdir()
    (hooks.jobs / "910001.0").write_text("as it was")
    for command in ("mv", "rm"):
        (slow / command).write_text("#!/bin/sh\ntrap '' TERM HUP INT\nexec /bin/sleep 60\n")
        (slow / command).chmod(0o755)
    search_in(hooks, hook, slow, Path("/usr/bin"))
    began = time.monotonic()
    process = subprocess.Popen(
        [str(hooks.script(hook))], env=BARE, start_new_session=True, stdout=subprocess.PIPE
    )
    try:
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b""
        took_s = time.monotonic() - began
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # as slurmd does when a hook has ended
        assert process.stdout is not None
        process.stdout.close()
    assert 4.5 <= took_s < 30, "and nothing left holds the pipe that slurmd reads"
    assert (hooks.jobs / "910001.0").read_text() == "as it was"
    assert len(hooks.faults()) == 1
    assert "job 910001: not done within 5 s, so left" in hooks.faults()[0]


@pytest.mark.parametrize("hook", ["epilog", "prolog"])
def test_a_hook_takes_no_longer_than_its_work(hooks: Hooks, hook: str) -> None:
    """The timer beside it ends with it, on however loaded a machine: here 40 at once."""
    began = time.monotonic()
    running = [subprocess.Popen([str(hooks.script(hook))], env=BARE) for _ in range(40)]
    assert [process.wait(30) for process in running] == [0] * 40
    assert time.monotonic() - began < DEADLINE_S
    assert hooks.faults() == []


SIGNALS = {
    "blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "ignored": "[signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 19)]",
    "SIGCHLD ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
}


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize("signals", SIGNALS)
@BOTH
def test_signals_blocked_or_ignored_by_who_starts_it(
    hooks: Hooks, hook: str, signals: str, shell: str
) -> None:
    """slurmd 22.05 blocks and ignores SIGPIPE. A shell that waits with SIGCHLD blocked would wait for ever."""
    (hooks.jobs / "910001.0").write_text("as it was")
    start = f"import os, signal, sys; {SIGNALS[signals]}; os.execv(sys.argv[1], sys.argv[1:])"
    began = time.monotonic()
    hooks.run(hook, wrapper=(sys.executable, "-c", start, shell))
    assert time.monotonic() - began < DEADLINE_S
    assert hooks.faults() == []
    assert hooks.files() == ({"910001.0"} if hook == "prolog" else set())


@BOTH
def test_a_log_that_hangs_is_left_too(hooks: Hooks, hook: str) -> None:
    """The kernel holds off whoever opens a file for writing that another process has a lease on, for 45 s."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # how the kernel asks for the lease
    with hooks.log.open("rb") as log:
        fcntl.fcntl(log, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        began = time.monotonic()
        hooks.run(hook, {})
        took_s = time.monotonic() - began
        fcntl.fcntl(log, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    signal.signal(signal.SIGIO, before)
    assert 5.5 <= took_s < 20
    assert hooks.faults() == [], "where nothing can be written nothing is"


@BOTH
def test_no_process_can_be_started(hooks: Hooks, hook: str) -> None:
    """As another user, for root is exempt from that limit."""
    if os.getuid() != 0:
        pytest.skip("needs a user of its own, without other processes")
    (hooks.jobs / "910001.0").write_text("as it was")
    for folder in (hooks.folder, *hooks.folder.parents):
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o005:
            folder.chmod(folder.stat().st_mode | 0o055)
    hooks.log.chmod(0o666)
    user = ("/usr/bin/setpriv", "--reuid=20011", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all")
    hooks.run(hook, wrapper=("/usr/bin/prlimit", "--nproc=1", *user))
    assert (hooks.jobs / "910001.0").read_text() == "as it was"
    assert len(hooks.faults()) == 1
    assert "ended by itself with status" in hooks.faults()[0]


@BOTH
def test_bash_as_sh(hooks: Hooks, hook: str, tmp_path: Path) -> None:
    """/bin/sh of many distributions; invoked under that name it is another language than under its own."""
    shell = tmp_path / "sh"
    shell.symlink_to("/bin/bash")
    (hooks.jobs / "910001.0").write_text("")
    done = hooks.run(hook, {**BARE, "SPANK_PFI_FLEX": "7%"}, wrapper=(str(shell),))
    assert hooks.files() == ({"910001.0"} if hook == "prolog" else set())
    if hook == "prolog":
        assert (hooks.jobs / "910001.0").read_text().endswith("gpus 2,3\nflex 7%\n")
    bad = hooks.run(hook, {**BARE, "SLURM_JOB_ID": "x"}, wrapper=(str(shell),))
    assert [done.stderr, bad.stderr] == [b"", b""]
    assert len(hooks.faults()) == 1


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@BOTH
def test_a_signal_while_it_works(hooks: Hooks, hook: str, sig: signal.Signals) -> None:
    """slurmd signals the whole process group. A slow command, put in the hook's own PATH, holds it at work."""
    slow = hooks.folder / "slow"
    slow.mkdir()
    os.mkfifo(hooks.folder / "at-work")
    (hooks.jobs / "910001.0").write_text("")
    for command in ("mv", "rm"):
        (slow / command).write_text(f"#!/bin/sh\n: >{hooks.folder}/at-work\nexec /bin/sleep 60\n")
        (slow / command).chmod(0o755)
    search_in(hooks, hook, slow, Path("/usr/bin"))
    process = subprocess.Popen(
        [str(hooks.script(hook))], env=BARE, start_new_session=True, stderr=subprocess.DEVNULL
    )
    (hooks.folder / "at-work").read_text()
    os.killpg(process.pid, sig)
    assert process.wait(10) == 0
    if sig == signal.SIGINT:
        os.killpg(process.pid, signal.SIGKILL)  # what a shell runs in the background ignores SIGINT
    wait_until(lambda: not group_of(process.pid), 5, "the whole group ends")
    assert hooks.faults() == []
