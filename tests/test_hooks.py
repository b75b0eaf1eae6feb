"""Prolog and epilog as real processes in the bare environment of a Slurm hook, with one thing broken at a time."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.cluster_files import REPO, install_hook
from testbed.processes import wait_until

SOURCES = {"prolog": REPO / "prolog/slurm-pfi-prolog", "epilog": REPO / "epilog/slurm-pfi-epilog"}
DEADLINE_S = 5  # the hook's own, for its work
BOTH = pytest.mark.parametrize("hook", ["prolog", "epilog"])

# What slurmd 22.05 gives a hook when nothing else is set: no PATH, no HOME, no LANG.
BARE = {
    "SLURM_JOB_ID": "910001",
    "SLURM_JOBID": "910001",
    "SLURM_JOB_UID": "20011",
    "SLURM_JOB_USER": "u11",
    "SLURM_CLUSTER_NAME": "lab",
    "SLURMD_NODENAME": "gpu-03",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_JOB_GPUS": "2,3",
}
JOB_FILE = re.compile(
    rb"pfi-job 1\njob_id [1-9][0-9]{0,9}\nrestart (0|[1-9][0-9]{0,9})\nuid (0|[1-9][0-9]{0,9})\n"
    rb"gpus (-|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)\n"
    rb"flex (-|invalid|none|low|medium|high|auto|([1-9][0-9]?|100)%)\n"
)


@dataclass(frozen=True)
class Hooks:
    """Both hooks installed for one folder."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def jobs(self) -> Path:
        return self.state / "gpu-03/jobs"

    @property
    def log(self) -> Path:
        return self.folder / "hooks.log"

    def script(self, hook: str) -> Path:
        return self.folder / hook

    def run(
        self, hook: str, env: Mapping[str, str] = BARE, wrapper: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[bytes]:
        """Run to the end; it must be 0 whatever happened."""
        encoded = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
        done = subprocess.run(
            [*wrapper, str(self.script(hook))],
            env=encoded,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=20,
            cwd="/",
        )
        assert done.returncode == 0, done
        return done

    def files(self) -> set[str]:
        return {path.name for path in self.jobs.iterdir()} if self.jobs.exists() else set()

    def faults(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def hooks(tmp_path: Path) -> Hooks:
    made = Hooks(tmp_path)
    made.jobs.mkdir(parents=True)
    made.log.touch()
    for hook, source in SOURCES.items():
        install_hook(source, made.script(hook), state_dir=made.state, log_file=made.log)
    return made


def test_a_run_leaves_its_file_and_the_epilog_takes_it_away(hooks: Hooks) -> None:
    hooks.run("prolog", {**BARE, "SPANK_PFI_FLEX": "10%", "SLURM_JOB_RESTART_COUNT": "0"})
    path = hooks.jobs / "910001.0"
    assert path.read_text() == "pfi-job 1\njob_id 910001\nrestart 0\nuid 20011\ngpus 2,3\nflex 10%\n"
    assert path.stat().st_mode & 0o7777 == 0o644
    assert path.stat().st_uid == os.getuid()
    assert hooks.files() == {"910001.0"}
    hooks.run("epilog")
    assert hooks.files() == set()
    assert hooks.faults() == []


def test_the_mode_does_not_follow_the_callers_umask(hooks: Hooks) -> None:
    shutil.rmtree(hooks.state / "gpu-03")
    hooks.run("prolog", wrapper=("/bin/sh", "-c", 'umask 0; exec "$0"'))
    assert (hooks.jobs / "910001.0").stat().st_mode & 0o7777 == 0o644
    assert hooks.jobs.stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize(
    ("given_gpus", "written", "faults"),
    [
        (None, "-", 0),  # a CPU job on a GPU node owns no GPU, not all of them
        ("", "-", 0),
        ("0", "0", 0),
        ("0,1,5", "0,1,5", 0),
        ("0-7", "0-7", 0),
        ("9", "9", 0),  # whether the node has it is the agent's to say
        ("0,", "-", 1),
        (",0", "-", 1),
        ("0,,1", "-", 1),
        ("3-1", "-", 1),
        ("1-", "-", 1),
        ("-1", "-", 1),
        ("1-2-3", "-", 1),
        ("00", "-", 1),
        ("all", "-", 1),
        ("0 1", "-", 1),
        ("0\n1", "-", 1),
        ("GPU-1", "-", 1),
        ("*", "-", 1),
        (",".join(["1000"] * 200), "-", 1),
    ],
)
def test_gpus(hooks: Hooks, given_gpus: str | None, written: str, faults: int) -> None:
    env = {name: value for name, value in BARE.items() if name != "SLURM_JOB_GPUS"}
    env["CUDA_VISIBLE_DEVICES"] = "NoDevFiles"
    if given_gpus is not None:
        env["SLURM_JOB_GPUS"] = given_gpus
    hooks.run("prolog", env)
    assert f"gpus {written}\n" in (hooks.jobs / "910001.0").read_text()
    assert len(hooks.faults()) == faults


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_JOB_ID", None),
        ("SLURM_JOB_ID", ""),
        ("SLURM_JOB_ID", "0"),
        ("SLURM_JOB_ID", "-4"),
        ("SLURM_JOB_ID", "1_2"),
        ("SLURM_JOB_ID", "../../x"),
        ("SLURM_JOB_ID", "12345678901"),
        ("SLURM_JOB_ID", "1\n2"),
        ("SLURM_JOB_UID", None),
        ("SLURM_JOB_UID", "root"),
        ("SLURM_JOB_RESTART_COUNT", "x"),
        ("SLURM_JOB_RESTART_COUNT", ""),
        ("SLURM_JOB_RESTART_COUNT", "1/../../../../x"),
        ("SLURMD_NODENAME", None),
        ("SLURMD_NODENAME", ""),
        ("SLURMD_NODENAME", "."),
        ("SLURMD_NODENAME", ".."),
        ("SLURMD_NODENAME", "../gpu-03"),
        ("SLURMD_NODENAME", "gpu 03"),
        ("SLURMD_NODENAME", "gpu-03\n"),
        ("SLURMD_NODENAME", "gpü"),
    ],
)
@BOTH
def test_a_broken_variable_costs_one_line_and_changes_nothing(
    hooks: Hooks, hook: str, name: str, value: str | None
) -> None:
    if hook == "epilog" and name == "SLURM_JOB_UID":
        return  # which the epilog does not read
    (hooks.jobs / "910001.0").write_text("as it was")
    env = {**BARE, name: value} if value is not None else {key: BARE[key] for key in BARE if key != name}
    done = hooks.run(hook, {key: text for key, text in env.items() if text is not None})
    assert (hooks.jobs / "910001.0").read_text() == "as it was"
    assert hooks.files() == {"910001.0"}
    assert [path.name for path in hooks.state.iterdir()] == ["gpu-03"]
    assert len(hooks.faults()) == 1
    assert name in hooks.faults()[0]
    assert done.stderr == b""


def test_prolog_makes_a_missing_folder(hooks: Hooks) -> None:
    shutil.rmtree(hooks.state)
    hooks.run("prolog")
    assert hooks.files() == {"910001.0"}
    assert hooks.faults() == []


def test_epilog_does_without_a_folder(hooks: Hooks) -> None:
    shutil.rmtree(hooks.state)
    hooks.run("epilog")
    assert not hooks.state.exists()
    assert hooks.faults() == []


def test_a_file_where_the_folder_should_be(hooks: Hooks) -> None:
    shutil.rmtree(hooks.state)
    hooks.state.write_text("")
    hooks.run("prolog")
    assert len(hooks.faults()) == 1
    hooks.run("epilog")
    assert len(hooks.faults()) == 1


@pytest.mark.parametrize("link", ["state", "state/gpu-03", "state/gpu-03/jobs"])
@BOTH
def test_symbolic_links_are_not_followed(hooks: Hooks, hook: str, link: str) -> None:
    (hooks.jobs / "910001.0").write_text("as it was")
    (hooks.folder / link).rename(hooks.folder / "elsewhere")
    (hooks.folder / link).symlink_to(hooks.folder / "elsewhere")
    hooks.run(hook)
    assert (hooks.jobs / "910001.0").read_text() == "as it was"
    assert len(hooks.faults()) == 1


def test_a_planted_link_in_place_of_the_file_is_replaced_not_followed(hooks: Hooks) -> None:
    target = hooks.folder / "target"
    target.write_text("as it was")
    (hooks.jobs / "910001.0").symlink_to(target)
    hooks.run("prolog")
    assert not (hooks.jobs / "910001.0").is_symlink()
    assert target.read_text() == "as it was"


@BOTH
def test_a_folder_that_cannot_be_written(hooks: Hooks, hook: str) -> None:
    (hooks.jobs / "910001.0").write_text("as it was")
    hooks.jobs.chmod(0o555)
    # Root may write whatever the mode says, unless that right is taken from it.
    hooks.run(hook, wrapper=("/usr/bin/setpriv", "--bounding-set=-dac_override") if os.getuid() == 0 else ())
    hooks.jobs.chmod(0o755)
    assert (hooks.jobs / "910001.0").read_text() == "as it was"
    assert hooks.files() == {"910001.0"}
    assert len(hooks.faults()) == 1


def test_no_room_for_the_file(hooks: Hooks) -> None:
    """A file size limit fails the write as a full disk does; here the log is full as well."""
    hooks.run("prolog", wrapper=("/usr/bin/prlimit", "--fsize=0"))
    assert hooks.files() == set()
    assert hooks.faults() == []
    # Room for the log's line, not for a file with 256 positions.
    hooks.run(
        "prolog", {**BARE, "SLURM_JOB_GPUS": ",".join(["0"] * 256)}, ("/usr/bin/prlimit", "--fsize=300")
    )
    assert hooks.files() == set()
    assert len(hooks.faults()) == 1
    assert "910001.0 cannot be written" in hooks.faults()[0]


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


def group_of(pid: int) -> bool:
    """Whether a process of this group is left."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


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


def test_the_requeued_run_is_another_file(hooks: Hooks) -> None:
    """What 22.05 sets: the epilog of a run that was requeued already has the count of the next one."""
    hooks.run("prolog", {**BARE, "SLURM_JOB_RESTART_COUNT": "0"})
    hooks.run("epilog", {**BARE, "SLURM_JOB_RESTART_COUNT": "1"})
    assert hooks.files() == set()
    hooks.run("prolog", {**BARE, "SLURM_JOB_RESTART_COUNT": "1"})
    assert hooks.files() == {"910001.1"}
    assert "\nrestart 1\n" in (hooks.jobs / "910001.1").read_text()
    hooks.run("epilog", {**BARE, "SLURM_JOB_RESTART_COUNT": "2"})
    assert hooks.files() == set()


def test_epilog_takes_its_own_runs_file_only(hooks: Hooks) -> None:
    kept = {"910001.0", "910001.2", "910001.10", "91000.1", "9100011.1", "910001.1x", ".910001.1.77", "810.0"}
    for name in [*kept, "910001.1"]:
        (hooks.jobs / name).write_text("")
    hooks.run("epilog", {**BARE, "SLURM_JOB_RESTART_COUNT": "1"})
    assert hooks.files() == kept
    hooks.run("epilog", {**BARE, "SLURM_JOB_ID": "77"})
    assert hooks.files() == kept
    # The first run's epilog, come too late: its file is gone, and the newer runs' files stay.
    hooks.run("epilog", {**BARE, "SLURM_JOB_RESTART_COUNT": "0"})
    hooks.run("epilog", {**BARE, "SLURM_JOB_RESTART_COUNT": "0"})
    assert hooks.files() == kept - {"910001.0"}


def test_a_newer_run_ends_older_ones_of_its_job(hooks: Hooks) -> None:
    others = {"910001.3", "91000.1", "9100011.0", "910001.x"}
    for name in [*others, "910001.0", "910001.1"]:
        (hooks.jobs / name).write_text("")
    hooks.run("prolog", {**BARE, "SLURM_JOB_RESTART_COUNT": "2"})
    assert hooks.files() == others | {"910001.2"}


def test_two_hundred_prologs_at_once(hooks: Hooks) -> None:
    running = [
        subprocess.Popen(
            [str(hooks.script("prolog"))],
            env={**BARE, "SLURM_JOB_ID": str(number)},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in range(1, 201)
    ]
    assert [process.wait(30) for process in running] == [0] * 200
    assert hooks.files() == {f"{number}.0" for number in range(1, 201)}
    assert not any(group_of(process.pid) for process in running), "no child was left"
    assert hooks.faults() == []


@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_no_slurm_command_is_named(hook: str) -> None:
    code = "\n".join(
        line for line in SOURCES[hook].read_text().splitlines() if not line.lstrip().startswith("#")
    )
    assert not re.search(r"\b(s(run|batch|alloc|queue|info|control|acct|cancel|stat|bcast)|scontrol)\b", code)
    assert len(re.findall(r"\bsleep\b", code)) == 1, "the timer alone"


ANY_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
NEARLY = st.one_of(
    st.none(), ANY_TEXT, st.text("0123456789,-%. \n/", max_size=14), st.integers(0, 2**33).map(str)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {
            "SLURM_JOB_ID": st.one_of(st.just("12"), NEARLY),
            "SLURM_JOB_UID": st.one_of(st.just("1000"), NEARLY),
            "SLURM_JOB_RESTART_COUNT": st.one_of(st.just("1"), NEARLY),
            "SLURM_JOB_GPUS": NEARLY,
            "SPANK_PFI_FLEX": NEARLY,
            "SLURMD_NODENAME": st.one_of(st.just("gpu-03"), st.just("gpu-03"), NEARLY),
        }
    )
)
def test_whatever_comes_only_valid_files_appear(hooks: Hooks, variables: dict[str, str | None]) -> None:
    env = {name: value for name, value in variables.items() if value is not None}
    hooks.run("prolog", env)
    made = [path for path in hooks.folder.rglob("*") if path.is_file() and path.parent.name == "jobs"]
    for path in made:
        content = path.read_bytes()
        assert JOB_FILE.fullmatch(content), content
        assert len(content) <= 1024
        assert path.name == f"{env['SLURM_JOB_ID']}.{env.get('SLURM_JOB_RESTART_COUNT', '0')}"
        assert path.parent == hooks.state / env["SLURMD_NODENAME"] / "jobs"
    assert len(made) <= 1
    hooks.run("epilog", env)
    assert not any(path.exists() for path in made)
