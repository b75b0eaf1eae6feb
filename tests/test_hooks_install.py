"""``slurm-pfi hooks install`` and ``remove`` on folders such as sites have, and what they refuse."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.cli.hooks.safe import RefusedError, check_folder, file_system
from slurm_pfi.cli.hooks.scripts import OURS, Settings, is_current, is_ours, rendered, settings_of
from slurm_pfi.cli.root import main

REPO = Path(__file__).parent.parent
US = pwd.getpwuid(os.getuid()).pw_name
ENV = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURMD_NODENAME": "n1", "SLURM_JOB_GPUS": "0"}


@dataclass
class Site:
    """A site's folders; ``run`` is the command on it."""

    root: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def folder(self) -> Path:
        return self.root / "libexec"

    @property
    def conf(self) -> Path:
        return self.root / "etc/slurm.conf"

    @property
    def state(self) -> Path:
        return self.root / "run it"

    def configure(self, *lines: str, running: tuple[str, ...] | None = None) -> None:
        """Write slurm.conf; slurmctld, for which a script answers, runs with ``running``, or with the same."""
        self.conf.write_text("\n".join([f"SlurmdUser={US}", *lines, ""]))
        shown = [line.replace("=", " = ") for line in (lines if running is None else running)]
        for key in ("Prolog", "Epilog"):
            if not any(line.startswith(key) for line in shown):
                shown.append(f"{key} = (null)")
        self.scontrol("\n".join([*shown, "SLURM_VERSION = 22.05.8"]))

    def scontrol(self, shown: str | None) -> None:
        text = "exit 1" if shown is None else f"cat <<'E'\n{shown}\nE"
        (self.root / "bin/scontrol").write_text(f"#!/bin/sh\n{text}\n")
        (self.root / "bin/scontrol").chmod(0o755)

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit code and all output of ``slurm-pfi hooks ...``."""
        command = ["--config", str(self.root / "site.toml"), "hooks", *arguments]
        if arguments[0] in ("install", "remove"):
            command += ["--folder", str(self.folder)]
        try:
            code = main(command)
        except SystemExit as end:
            assert isinstance(end.code, int)
            code = end.code
        said = self.capsys.readouterr()
        return code, said.out + said.err

    def hook(self, path: Path, body: str = "exit 0") -> Path:
        """A hook of the site's own."""
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def tree(self) -> dict[str, tuple[int, int, int]]:
        """Every file with inode, mode and time: what a dry run must not change."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            about = path.lstat()
            found[str(path.relative_to(self.root))] = (about.st_ino, about.st_mode, about.st_mtime_ns)
        return found


@pytest.fixture
def site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Site:
    made = Site(tmp_path, capsys)
    for name in ("etc", "bin", "libexec"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "site.toml").write_text(
        f'cluster = "lab"\n[node]\nstate_dir = "{made.state}"\nhook_log = "{tmp_path}/etc/log"\n'
        f'[slurm]\nconf = "{made.conf}"\nbin_dir = "{tmp_path}/bin"\n'
    )
    return made


@pytest.fixture
def globs(site: Site) -> Site:
    """A site whose slurm.conf has patterns, and hooks of its own in both folders."""
    site.configure("Prolog=prolog.d/*", f"Epilog={site.root}/etc/epilog.d/*")
    for hook in ("prolog", "epilog"):
        site.hook(site.root / f"etc/{hook}.d/10-site")
    return site


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
        time.sleep(0.3)
    finally:
        stop.set()
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


# ------------------------------------------------------------------------------------------------------- refused


def refused(site: Site, *words: str) -> None:
    before = site.tree()
    for extra in ((), ("--dry-run",)):
        code, said = site.run("install", *extra)
        assert code == 1, said
        for word in words:
            assert word in said
        assert said.startswith("slurm-pfi: ") and said.count("\n") == 1
    assert site.tree() == before


def test_a_folder_that_is_a_symlink(globs: Site) -> None:
    (globs.root / "etc/epilog.d").rename(globs.root / "etc/real")
    (globs.root / "etc/epilog.d").symlink_to(globs.root / "etc/real")
    refused(globs, "is a symbolic link", "name the folder itself")


def test_a_file_that_is_a_symlink(globs: Site) -> None:
    globs.hook(globs.root / "mine")
    (globs.root / "etc/prolog.d/zz-slurm-pfi-prolog").symlink_to(globs.root / "mine")
    refused(globs, "zz-slurm-pfi-prolog is a symbolic link")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
@pytest.mark.parametrize("where", ["etc/prolog.d", "etc"])
def test_a_folder_that_others_may_write(globs: Site, where: str, mode: int) -> None:
    (globs.root / where).chmod(mode)
    if (where, mode) == ("etc", 0o1777):
        check_folder(globs.root / "etc/prolog.d")  # in a sticky folder nobody renames root's
        return
    refused(globs, f"{where} may be written by others", f"(mode {mode:04o})")


def test_a_folder_of_somebody_else(site: Site) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(site.root / "etc", 20011, -1)
    with pytest.raises(RefusedError, match="belongs to uid 20011"):
        check_folder(site.root / "etc/prolog.d")


MOUNTS = r"""
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
31 22 0:28 / /etc/slurm rw,relatime shared:9 - nfs4 head:/slurm rw,vers=4.2
32 22 0:29 / /srv/my\040hooks rw - lustre mgs:/x rw
33 22 0:30 / /opt rw - tmpfs none rw
34 22 0:31 / /opt rw - fuse.sshfs x: rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/etc/slurm/prolog.d", "nfs4"),
        ("/etc/slurm2", "ext4"),
        ("/srv/my hooks/a", "lustre"),
        ("/opt/x", "fuse.sshfs"),
        ("/", "ext4"),
    ],
)
def test_which_file_system_a_folder_lies_on(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS.strip()) == kind


def test_nothing_is_removed_from_a_folder_that_nodes_share(
    globs: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    globs.run("install")
    before = globs.tree()
    monkeypatch.setattr("slurm_pfi.cli.hooks.plan.shared_kind", lambda _: "nfs4")
    code, said = globs.run("remove")
    assert (code, "that other nodes share (nfs4)" in said, globs.tree()) == (1, True, before)
    assert globs.run("install")[0] == 0, "to install it once for all of them is fine"


def test_a_file_that_is_not_ours(globs: Site) -> None:
    globs.hook(globs.root / "etc/prolog.d/zz-slurm-pfi-prolog", "exit 7")
    refused(globs, "is there and not ours")
    assert globs.run("remove") == (0, "nothing of ours is here\n"), "and it is not removed either"


def test_the_folder_of_a_pattern_as_ours(site: Site) -> None:
    """An epilog that lies there would be run as prolog."""
    site.configure(f"Prolog={site.folder}/*")
    refused(site, "would run whatever lies there as Prolog", "name another")


def test_part_of_slurm_conf_that_cannot_be_read(site: Site) -> None:
    site.configure("Include more.conf")
    refused(site, "more.conf", "may name hooks")


def test_no_slurm_conf(site: Site) -> None:
    refused(site, "slurm.conf cannot be read")


def test_another_user_than_slurmds(site: Site) -> None:
    site.conf.write_text("SlurmdUser=daemon\n")
    code, said = site.run("install")
    assert (code, "run this as daemon" in said) == (1, True)


def test_a_log_where_it_would_be_a_file_in_dev(site: Site) -> None:
    site.configure("ClusterName=lab")
    text = (site.root / "site.toml").read_text().replace(f"{site.root}/etc/log", "/dev/no-such-log")
    (site.root / "site.toml").write_text(text)
    refused(site, "/dev/no-such-log", "no device on this host")


def test_what_slurmd_fetches_by_itself(site: Site) -> None:
    cache = site.root / "conf-cache"
    cache.mkdir()
    text = (site.root / "site.toml").read_text().replace(str(site.conf), f"{cache}/slurm.conf")
    (site.root / "site.toml").write_text(text)
    (cache / "slurm.conf").write_text(f"SlurmdUser={US}\nProlog=prolog.sh\n")
    refused(site, "configless")


def test_a_full_disk_leaves_what_was_there(globs: Site) -> None:
    """A limit of the size of files fails the write as a full disk does."""
    globs.run("install")
    prolog = globs.root / "etc/prolog.d/zz-slurm-pfi-prolog"
    text = (globs.root / "site.toml").read_text().replace("run it", "run that")
    (globs.root / "site.toml").write_text(text)
    before = prolog.read_text()
    command = [
        sys.executable,
        "-m",
        "slurm_pfi",
        "--config",
        str(globs.root / "site.toml"),
        "hooks",
        "install",
    ]
    full = "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    full += "sys.argv = sys.argv[1:]; runpy.run_module('slurm_pfi', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-B", "-c", full, *command[2:], "--folder", str(globs.folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "File too large; what was told before is done, nothing else" in done.stderr
    assert prolog.read_text() == before
    assert sorted(path.name for path in prolog.parent.iterdir()) == ["10-site", "zz-slurm-pfi-prolog"]


# --------------------------------------------------------------------------------------------------------- texts


def test_what_is_installed_is_what_the_project_has() -> None:
    """The package's copies are links to prolog/ and epilog/, which a wheel holds as files."""
    for hook, name in OURS.items():
        text = (REPO / hook.lower() / name).read_text()
        assert settings_of(text) == Settings("/run/slurm-pfi", "/dev/kmsg")
        assert rendered(hook, Settings("/run/slurm-pfi", "/dev/kmsg")).decode() == text
    packaged = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "cli/hooks/scripts/*" in packaged["slurm_pfi"]


PATHS = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/"), min_size=1, max_size=12)


@given(PATHS | st.just("a b'$(x)`y`\"\\"), PATHS)
def test_any_path_is_set_as_it_is(state: str, log: str) -> None:
    settings = Settings(f"/{state}", f"/{log}")
    for hook in OURS:
        text = rendered(hook, settings).decode()
        assert settings_of(text) == settings
        assert is_ours(hook, text)
        assert is_current(hook, text)


def test_the_shell_reads_the_same_path(tmp_path: Path) -> None:
    odd = "a b'$(touch x)`touch y`\"\\ é"
    lines = rendered("Prolog", Settings(f"/{odd}", "/dev/null")).decode().splitlines()
    line = next(line for line in lines if line.startswith("state_dir="))
    shown = subprocess.run(
        ["/bin/sh", "-c", f'{line}\nprintf %s "$state_dir"'],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert shown.stdout == f"/{odd}"
    assert shlex.split(line.partition("=")[2]) == [f"/{odd}"]
    assert list(tmp_path.iterdir()) == []
