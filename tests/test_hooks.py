"""What prolog and epilog write and remove, from whatever Slurm tells them and whatever they find in their folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .hook_scripts import BARE, BOTH, SOURCES, Hooks, group_of, hooks

__all__ = ["hooks"]

JOB_FILE = re.compile(
    rb"pfi-job 1\njob_id [1-9][0-9]{0,9}\nrestart (0|[1-9][0-9]{0,9})\nuid (0|[1-9][0-9]{0,9})\n"
    rb"gpus (-|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)\n"
    rb"flex (-|invalid|none|low|medium|high|auto|([1-9][0-9]?|100)%)\n"
)


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
    (hooks.jobs / "910001.0").write_text("as it was")
    env = {**BARE, name: value} if value is not None else {key: BARE[key] for key in BARE if key != name}
    done = hooks.run(hook, {key: text for key, text in env.items() if text is not None})
    if hook == "epilog" and name == "SLURM_JOB_UID":  # which the epilog does not read
        assert (hooks.files(), hooks.faults()) == (set(), [])
        return
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
