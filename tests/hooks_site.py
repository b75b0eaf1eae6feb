"""A site's folders, without a Slurm, on which ``slurm-pfi hooks`` is run."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from slurm_pfi.cli.root import main

US: Final = pwd.getpwuid(os.getuid()).pw_name


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
