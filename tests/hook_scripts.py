"""Prolog and epilog as real processes in the bare environment of a Slurm hook."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.cluster_files import REPO, install_hook

SOURCES = {"prolog": REPO / "prolog/slurm-pfi-prolog", "epilog": REPO / "epilog/slurm-pfi-epilog"}
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


def group_of(pid: int) -> bool:
    """Whether a process of this group is left."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True
