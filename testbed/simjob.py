"""Put the simulated training job where an ordinary user can run it.

A clone and its virtual environment may lie where only their owner gets (below /root, say). The job needs Python's
standard library alone, so a copy of three modules and the stand-in library in a public folder is enough. pynvml is
copied too, so that a user's job can try what NVML lets it do.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import slurm_pfi

from .gpus import library_path

LYING_JOB: Final = Path(__file__).with_name("lying_job.py")
_CANDIDATES: Final = (Path(sys.executable), Path("/usr/bin/python3"))


@dataclass(frozen=True)
class InstalledJob:
    """``python`` runs it: ``<python> -m slurm_pfi.sim.job --workload ...`` in an environment that has ``env``."""

    python: Path
    env: Mapping[str, str]

    @property
    def command(self) -> str:
        return f"{self.python} -m slurm_pfi.sim.job"

    def lying(self, factor: float) -> str:
        """The same with a counter that is ``factor`` times too fast while a cap slows the job."""
        return f"{self.python} {self.env['PYTHONPATH']}/{LYING_JOB.name} {factor:g}"

    @property
    def nvml_python(self) -> str:
        """Shell text that runs Python in a job with pynvml and this node's NVML at hand."""
        directory = '"$PFI_SIM_DIR/$SLURMD_NODENAME"'
        return f"env LD_LIBRARY_PATH={self.env['PYTHONPATH']} PFI_STANDIN_DIR={directory} {self.python}"


def install_job(folder: Path, sim_dir: Path) -> InstalledJob:
    """Copy what the job needs into ``folder``, which must be new, and say how to run it.

    Both folders must lie where every user can read. Raises RuntimeError when no interpreter does.
    """
    package = Path(slurm_pfi.__file__).parent
    target = folder / "slurm_pfi"
    target.mkdir(parents=True)
    for name in ("__init__.py", "progress.py"):
        shutil.copy(package / name, target / name)
    shutil.copytree(package / "sim", target / "sim", ignore=shutil.ignore_patterns("__pycache__"))
    pynvml = importlib.util.find_spec("pynvml")
    if pynvml is not None and pynvml.origin is not None:
        shutil.copy(pynvml.origin, folder / "pynvml.py")
    shutil.copy(LYING_JOB, folder / LYING_JOB.name)
    library = folder / library_path().name
    shutil.copy(library_path(), library)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    env = {"PYTHONPATH": str(folder), "PFI_STANDIN_LIB": str(library), "PFI_SIM_DIR": str(sim_dir)}
    return InstalledJob(_public_python(), env)


def _public_python() -> Path:
    for candidate in _CANDIDATES:
        if candidate.exists() and _everybody_may_run(candidate.resolve()):
            return candidate
    raise RuntimeError(
        f"no Python that every user may run: {', '.join(map(str, _CANDIDATES))}; install Debian's python3"
    )


def _everybody_may_run(path: Path) -> bool:
    """Whether the file and every folder above it have the execute bit for others."""
    if os.getuid() != 0:
        return True  # the job runs as we do
    return all(part.stat().st_mode & stat.S_IXOTH for part in (path, *path.parents))
