"""What ``slurm-pfi hooks install`` and ``remove`` refuse, and leave as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_pfi.cli.hooks.safe import RefusedError, check_folder, file_system

from .hooks_site import US, Site, globs, site

__all__ = ["globs", "site"]


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


def test_a_folder_that_is_a_link_to_itself(globs: Site) -> None:
    (globs.root / "etc/loop").symlink_to("loop")
    globs.configure(f"Prolog={globs.root}/etc/loop/*")
    refused(globs, "is a symbolic link")


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
