"""``slurm-pfi hooks install`` and ``remove`` on folders such as sites have."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pfi.cli.hooks.scripts import OURS, Settings, is_current, rendered, settings_of

from .hooks_site import Site, globs, site

__all__ = ["globs", "site"]

ENV = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURMD_NODENAME": "n1", "SLURM_JOB_GPUS": "0"}

# ------------------------------------------------------------------------------------------------------- patterns


def test_into_folders_with_patterns_and_out_again(globs: Site) -> None:
    prolog, epilog = (
        globs.root / "etc/prolog.d/zz-slurm-pfi-prolog",
        globs.root / "etc/epilog.d/00-slurm-pfi-epilog",
    )
    code, said = globs.run("install")
    assert code == 0
    assert said.index(str(epilog)) < said.index(str(prolog)), (
        "whatever a prolog writes there is an epilog to remove"
    )
    assert "to do" not in said
    for path in (prolog, epilog):
        assert path.stat().st_mode & 0o7777 == 0o755
        assert path.stat().st_uid == os.getuid()
    subprocess.run([str(prolog)], env=ENV, check=True)
    assert (globs.state / "n1/jobs/7.0").is_file()
    subprocess.run([str(epilog)], env={**ENV, "SLURM_JOB_UID": ""}, check=True)
    assert not (globs.state / "n1/jobs/7.0").exists()
    subprocess.run([str(prolog)], env={}, check=True)
    assert (globs.root / "etc/log").read_text().count("\n") == 1
    assert (globs.root / "etc/log").stat().st_mode & 0o7777 == 0o640
    # Again: what is right is not touched.
    before = globs.tree()
    code, said = globs.run("install")
    assert (code, said.count("is as it should be"), globs.tree()) == (0, 2, before)
    code, said = globs.run("remove", "--dry-run")
    assert (code, said.count("would remove"), globs.tree()) == (0, 2, before)
    assert "nothing was changed" in said
    code, said = globs.run("remove")
    assert code == 0
    assert said.index(str(prolog)) < said.index(str(epilog))
    assert not prolog.exists() and not epilog.exists()
    assert globs.run("remove") == (0, "nothing of ours is here\n")


def test_a_dry_run_says_each_step_and_changes_nothing(globs: Site) -> None:
    before = globs.tree()
    code, said = globs.run("install", "--dry-run")
    assert code == 0
    assert said.count("would write") == 2
    assert "would make" in said and "etc/log" in said
    assert "nothing was changed" in said
    assert globs.tree() == before


def test_an_older_hook_or_one_with_other_paths_is_renewed_where_it_is(globs: Site) -> None:
    old = globs.root / "etc/prolog.d/50-slurm-pfi-prolog"
    text = rendered("Prolog", Settings("/elsewhere", "/dev/kmsg")).decode().replace("umask 022", "umask 077")
    globs.hook(old, text.partition("\n")[2])
    code, said = globs.run("install")
    assert (code, "replaced" in said) == (0, True)
    assert settings_of(old.read_text()) == Settings(str(globs.state), str(globs.root / "etc/log"))
    assert is_current("Prolog", old.read_text())
    assert not (globs.root / "etc/prolog.d/zz-slurm-pfi-prolog").exists(), "two of them would be one too many"


def test_a_link_that_leads_nowhere_among_the_hooks_is_the_sites(globs: Site) -> None:
    for name in ("loop", "gone"):
        (globs.root / "etc/prolog.d" / name).symlink_to("loop")
    assert [globs.run(word)[0] for word in ("install", "remove")] == [0, 0]
    assert sorted(path.name for path in (globs.root / "etc/prolog.d").iterdir()) == [
        "10-site",
        "gone",
        "loop",
    ]


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*", "zz-slurm-pfi-prolog"),
        ("*.sh", "zz-slurm-pfi-prolog.sh"),
        ("[0-9][0-9]-*", "99-slurm-pfi-prolog"),
        ("slurm-*", "slurm-pfi-prolog"),
    ],
)
def test_a_name_that_the_pattern_matches(site: Site, pattern: str, name: str) -> None:
    (site.root / "etc/prolog.d").mkdir()
    site.configure(f"Prolog=prolog.d/{pattern}")
    code, said = site.run("install")
    assert (code, (site.root / "etc/prolog.d" / name).exists()) == (0, True), said


@pytest.mark.parametrize("pattern", ["prolog.d/site-*", "*/prolog", "prolog.d/.*"])
def test_no_name_that_the_pattern_matches(site: Site, pattern: str) -> None:
    site.configure(f"Prolog={pattern}")
    before = site.tree()
    code, said = site.run("install")
    assert (code, pattern in said, site.tree()) == (1, True, before)


def test_a_pattern_is_never_left_without_a_file(globs: Site) -> None:
    for hook in ("prolog", "epilog"):
        (globs.root / f"etc/{hook}.d/10-site").unlink()
    globs.run("install")
    before = globs.tree()
    code, said = globs.run("remove")
    assert (code, globs.tree()) == (1, before)
    assert "Take Prolog out of slurm.conf first" in said
    # Taken out of the file alone: slurmctld still runs with it.
    globs.configure(running=("Prolog=prolog.d/*", "Epilog=epilog.d/*"))
    code, _ = globs.run("remove")
    assert code == 1
    assert (globs.root / "etc/prolog.d/zz-slurm-pfi-prolog").exists()


def slurmd_at_work(folder: Path, stop: threading.Event, missing: list[str], pause_s: float) -> Iterator[None]:
    """Runs the files of a folder as slurmd does: lists them, then one after the other."""
    while not stop.is_set():
        for path in sorted(folder.glob("[!.]*")):
            try:
                subprocess.run([str(path)], env=ENV, check=True)
            except (OSError, subprocess.CalledProcessError):
                missing.append(path.name)
        yield
        stop.wait(pause_s)


@pytest.mark.parametrize(("pause_s", "patience_s", "gone"), [(1.0, 60, True), (0.0, 1.5, False)])
def test_no_hook_is_missed_by_a_slurmd_that_runs_them_meanwhile(
    globs: Site, pause_s: float, patience_s: float, gone: bool
) -> None:
    folder = globs.root / "etc/prolog.d"
    globs.hook(folder / "10-site", "exec sleep 0.1")
    globs.run("install")
    stop, missing = threading.Event(), list[str]()
    begun = threading.Barrier(3)

    def work() -> None:
        rounds = slurmd_at_work(folder, stop, missing, pause_s)
        next(rounds)
        begun.wait()
        for _ in rounds:
            pass

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    begun.wait()
    try:
        code, said = globs.run("remove", "--patience", str(patience_s))
    finally:
        stop.set()  # a round that is under way is run to its end
        for worker in workers:
            worker.join()
    assert missing == []
    ours = folder / "zz-slurm-pfi-prolog"
    assert (code, ours.exists()) == ((0, False) if gone else (1, True)), said
    if not gone:
        assert "Run this again at a quiet time" in said
        subprocess.run([str(ours)], env={}, check=True)
        assert "was removed and does nothing" in ours.read_text()
        assert "what a removal left" in globs.run("check", "--node-name", "n1")[1]
        assert globs.run("remove")[0] == 0, "and later it goes"
        assert not ours.exists()


def test_a_hook_that_is_looked_for_while_it_goes_is_there_again(
    globs: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmd lists the folder in the very instant before the file goes, and starts it some milliseconds later."""
    globs.run("install")
    folder = globs.root / "etc/prolog.d"
    ours = folder / "zz-slurm-pfi-prolog"
    listed: list[Path] = []
    found: list[bool] = []
    rename = os.rename

    def at_the_worst_time(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if old == ours.name and not listed:
            listed.extend(folder.iterdir())
        elif old == ours.name:
            found.append(ours.exists())
        rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", at_the_worst_time)
    assert globs.run("remove")[0] == 0
    assert ours in listed
    assert found == [True], "it was put back for who had listed it, and went at the second try"
    assert sorted(path.name for path in folder.iterdir()) == ["10-site"]


# ------------------------------------------------------------------------------------------- one script, or none


def test_without_hooks_the_lines_for_slurm_conf_are_said(site: Site) -> None:
    site.configure("ClusterName=lab")
    before = site.conf.read_text()
    code, said = site.run("install")
    assert code == 0
    for hook, name in OURS.items():
        assert f"\n    {hook}={site.folder / name}\n" in said
        assert os.access(site.folder / name, os.X_OK)
    assert "scontrol reconfigure" in said
    assert site.conf.read_text() == before, "slurm.conf is the site's"
    site.configure(*re.findall(r"(?m)^    ((?:Pro|Epi)log=.*)$", said))
    code, said = site.run("install")
    assert (code, "to do" in said) == (0, False), "nothing is left to do once it names them"
    for running in (None, ()):
        code, said = site.run("remove")
        assert code == 1
        assert "is still needed: " in said
        site.configure("ClusterName=lab", running=running)  # reconfigured, or not yet
        if running is None:
            site.scontrol(f"Prolog[0] = {site.folder}/slurm-pfi-prolog\nSLURM_VERSION = 24.11.5")
    site.configure("ClusterName=lab")
    assert site.run("remove")[0] == 0
    assert list(site.folder.iterdir()) == []


def test_without_slurmctlds_word_nothing_is_removed(site: Site) -> None:
    site.configure("ClusterName=lab")
    site.run("install")
    for answer in (None, "", "Configuration data as of now\nProlog = (null)"):  # none, empty, cut off
        site.scontrol(answer)
        code, said = site.run("remove")
        assert (code, "--unasked" in said) == (1, True)
    assert (site.folder / "slurm-pfi-prolog").exists()
    assert site.run("remove", "--unasked")[0] == 0
    assert not (site.folder / "slurm-pfi-prolog").exists()


@pytest.mark.parametrize("user", ["slurm.conf", "slurmctld", "a script"])
def test_a_hook_of_a_folder_that_is_named_besides_stays(globs: Site, user: str) -> None:
    """A second line of slurm.conf or a script beside it names the file: gone, each job's start would drain the node."""
    assert globs.run("install")[0] == 0
    folder = globs.root / "etc/prolog.d"
    ours = folder / "zz-slurm-pfi-prolog"
    lines = ("Prolog=prolog.d/*", f"Epilog={globs.root}/etc/epilog.d/*")
    if user == "slurm.conf":
        globs.configure(*lines, f"Prolog={ours}", running=lines)
    elif user == "slurmctld":
        globs.configure(*lines, running=(f"Prolog={ours}", lines[1]))
    else:
        globs.hook(folder / "50-ours", str(ours))
    before = globs.tree()
    code, said = globs.run("remove")
    assert (code, f"{ours} is still needed: " in said, globs.tree()) == (1, True, before), said
    globs.configure(*lines)
    (folder / "50-ours").unlink(missing_ok=True)
    assert globs.run("remove")[0] == 0
    assert not ours.exists()


def test_what_a_script_among_others_calls_is_seen_and_kept(globs: Site) -> None:
    """A site that has our hooks beside a pattern and calls them from a script of its own in the folder."""
    own = globs.folder / "slurm-pfi-prolog"
    caller = globs.hook(globs.root / "etc/prolog.d/50-mine", f"{own} || :")
    assert globs.run("install")[0] == 0
    assert own.exists()
    assert not (globs.root / "etc/prolog.d/zz-slurm-pfi-prolog").exists(), "one of them is enough"
    before = globs.tree()
    code, said = globs.run("remove")
    assert (code, f"{caller} (" in said, globs.tree()) == (1, True, before)
    caller.unlink()
    assert globs.run("remove")[0] == 0
    assert not own.exists()


def test_what_a_link_names_is_kept(site: Site) -> None:
    site.configure("ClusterName=lab")
    site.run("install")
    for name in OURS.values():
        (site.root / f"etc/{name}.link").symlink_to(site.folder / name)
    site.configure(*(f"{hook}={site.root}/etc/{name}.link" for hook, name in OURS.items()))
    before = site.tree()
    code, said = site.run("remove")
    assert (code, "slurm-pfi-prolog.link" in said, site.tree()) == (1, True, before)


def test_a_site_with_one_script_gets_a_line_for_it(site: Site) -> None:
    scripts = {hook: site.hook(site.root / f"etc/{hook.lower()}.sh", "exit 0") for hook in OURS}
    site.configure(*(f"{hook}={path}" for hook, path in scripts.items()))
    code, said = site.run("install")
    assert code == 0
    lines = re.findall(r"(?m)^    (/\S+ \|\| :)$", said)
    assert len(lines) == 2
    assert all(path.read_text() == "#!/bin/sh\nexit 0\n" for path in scripts.values())
    for path, line in zip((scripts["Epilog"], scripts["Prolog"]), lines, strict=True):
        site.hook(path, f"{line}\nexit 0")
        subprocess.run([str(path)], env=ENV, check=True)
    code, said = site.run("install")
    assert (code, "to do" in said) == (0, False), "it sees that the scripts call them"
    code, said = site.run("remove")
    assert (code, "names it" in said) == (1, True)
    for path in scripts.values():
        site.hook(path)
    assert site.run("remove")[0] == 0
    assert list(site.folder.iterdir()) == []


def test_or_a_wrapper_that_runs_both_and_fails_only_as_the_site_would(site: Site) -> None:
    ran = site.root / "ran"
    scripts = {
        hook: site.hook(site.root / f"etc/my {hook}.sh", f"echo {hook} >>{ran}; exit $CODE") for hook in OURS
    }
    # slurm.conf itself takes no blank in a path; a link by a plain name stands for it.
    for hook, path in scripts.items():
        (site.root / f"etc/{hook}").symlink_to(path)
    site.configure(*(f"{hook}={site.root}/etc/{hook}" for hook in OURS))
    code, said = site.run("install", "--wrapper")
    assert code == 0
    lines = re.findall(r"(?m)^    ((?:Pro|Epi)log=.*)$", said)
    assert [line.partition("=")[2] for line in lines] == [
        f"{site.folder}/{name}-and-site" for name in OURS.values()
    ]
    prolog, epilog = (line.partition("=")[2] for line in lines)
    job = site.state / "n1/jobs/7.0"
    for hook, code in ((prolog, 3), (epilog, 4), (prolog, 0), (epilog, 0)):
        assert subprocess.run([hook], env={**ENV, "CODE": str(code)}, check=False).returncode == code
        assert job.exists() == (hook == prolog and code == 0)
    assert ran.read_text().split() == ["Prolog", "Epilog"] * 2
    site.configure(*lines)
    before = site.tree()
    code, said = site.run("install", "--wrapper")
    assert (code, "to do" in said, site.tree()) == (0, False, before)
    assert not (site.root / "etc/log").read_text()
    (site.folder / "slurm-pfi-prolog").chmod(0o644)
    (site.folder / "slurm-pfi-epilog").unlink()
    for path in (prolog, epilog):
        done = subprocess.run([path], env={**ENV, "CODE": "0"}, check=True, capture_output=True)
        assert done.stderr == b""
    logged = [f"<12>{site.folder}/{name}: cannot be run" for name in OURS.values()]
    assert (site.root / "etc/log").read_text().splitlines() == logged
    code, said = site.run("install")
    assert (code, said.count("replaced"), said.count("wrote"), said.count("is as it")) == (0, 1, 1, 2), said
    code, said = site.run("remove")
    assert (code, "is still needed" in said) == (1, True)
    site.configure(*(f"{hook}={site.root}/etc/{hook}" for hook in OURS))
    assert site.run("remove")[0] == 0
    assert list(site.folder.iterdir()) == []
