"""Other generations of Slurm: Debian releases beside the host's, each in a folder of its own under ``build/roots``.

    python -m testbed.roots trixie testing            # build what is missing, run the tests of generations on each
    python -m testbed.roots trixie --run COMMAND...   # run one command there

A command in a root sees the root's /usr in the place of the host's, in a mount namespace that ends with it: so nothing
stays mounted, whatever dies. All else (/etc, /tmp, this project) is the host's. The root's own Python has a virtual
environment beside it. Needs root's rights, debootstrap and the network for the first time; what is missing is an error
with a name, never a skip.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPO: Final = Path(__file__).resolve().parent.parent
ROOTS: Final = REPO / "build" / "roots"
PACKAGES: Final = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "munge",
    "slurmrestd",
    "libslurm-dev",
    "slurmdbd",
    "slurm-wlm-mysql-plugin",
    "mariadb-server",
    "gcc",
    "libc6-dev",
    "make",
    "python3",
    "python3-venv",
    "ca-certificates",
)
# What of a root lies over the host's own: programs and libraries, and where the loader looks for these.
_OVER: Final = ("usr", "etc/ld.so.cache", "etc/alternatives")
_ENTER: Final = (
    'root=$1; shift; for at in {over}; do mount --bind "$root/$at" "/$at" || exit 125; done; exec "$@"'
)
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BUILD_S: Final = 1200


class RootError(RuntimeError):
    """A root cannot be built or entered; the message says what happened, where, and what to do."""


@dataclass(frozen=True)
class SlurmRoot:
    """One Debian release by its suite's name (``trixie``, ``testing``)."""

    suite: str

    @property
    def folder(self) -> Path:
        """The release's files."""
        return ROOTS / self.suite

    @property
    def venv(self) -> Path:
        """The virtual environment of its own Python; usable inside alone."""
        return ROOTS / f"{self.suite}.venv"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` with this release's programs and libraries."""
        enter = _ENTER.format(over=" ".join(_OVER))
        return [
            *("unshare", "--mount", "--propagation", "private"),
            "sh",
            "-c",
            enter,
            "sh",
            str(self.folder),
            *command,
        ]

    def run(self, command: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run to the end and return what it wrote. Raises RootError when it fails and ``check``."""
        done = subprocess.run(
            self.inside(command), capture_output=True, text=True, check=False, env=environment(), cwd=REPO
        )
        if check and done.returncode != 0:
            said = (done.stdout + done.stderr).strip()[-2000:]
            raise RootError(f"Debian {self.suite}: {' '.join(command)} exited {done.returncode}: {said}")
        return done

    @property
    def version(self) -> str:
        """What runs there, in words."""
        words = (
            self.run(["slurmctld", "-V"]).stdout.split(),
            self.run([str(self.python), "-V"]).stdout.split(),
        )
        return ", ".join(f"{name} {number}" for name, number in words)


def environment() -> dict[str, str]:
    """Ours without what would lead to the host's own Python or Slurm."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PYTHON", "PYENV"))
    }
    return {**kept, "PATH": _PATH, "LC_ALL": "C.UTF-8"}


def ready_root(suite: str) -> SlurmRoot:
    """The root, built if it is not there or was built of other packages. Raises RootError."""
    root = SlurmRoot(suite)
    with _alone():
        _build(root)
        _install(root)
    return root


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    ROOTS.mkdir(parents=True, exist_ok=True)
    with (ROOTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(root: SlurmRoot) -> None:
    wanted = _digest(" ".join(PACKAGES))
    if _made(root.folder) == wanted:
        return
    if os.getuid() != 0:
        raise RootError(
            f"Debian {root.suite}: its folder {root.folder} is not built yet, and only root can build it"
        )
    program = shutil.which("debootstrap", path=_PATH)
    if program is None:
        raise RootError(
            f"Debian {root.suite}: debootstrap is not installed; run as root: apt-get install debootstrap"
        )
    print(f"Debian {root.suite}: building {root.folder}; this takes a minute or more", flush=True)
    begin = time.monotonic()
    for old in (root.folder, root.venv):
        shutil.rmtree(old, ignore_errors=True)
    log = ROOTS / f"{root.suite}.log"
    command = [program, "--variant=minbase", f"--include={','.join(PACKAGES)}", root.suite, str(root.folder)]
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": _PATH},
                check=False,
                timeout=BUILD_S,
            )
        except subprocess.TimeoutExpired:
            raise RootError(
                f"Debian {root.suite}: debootstrap did not end within {BUILD_S} s; see {log}"
            ) from None
    if done.returncode != 0:
        tail = " / ".join(log.read_text(errors="replace").split("\n")[-6:])
        raise RootError(f"Debian {root.suite}: debootstrap exited {done.returncode}, see {log}: {tail}")
    shutil.rmtree(root.folder / "var/cache/apt", ignore_errors=True)
    _mark(root.folder, wanted)
    print(f"Debian {root.suite}: built in {time.monotonic() - begin:.0f} s", flush=True)


def _install(root: SlurmRoot) -> None:
    """Our package and what its tests need, into the root's own Python."""
    wanted = _digest((REPO / "pyproject.toml").read_text(), str(REPO))
    if _made(root.venv) == wanted:
        return
    shutil.rmtree(root.venv, ignore_errors=True)
    root.run(["/usr/bin/python3", "-m", "venv", str(root.venv)])
    pip = [str(root.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    root.run([*pip, "--editable", f"{REPO}[testbed]"])
    _mark(root.venv, wanted)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _made(folder: Path) -> str | None:
    """Of what a folder was made; None if it is not there whole."""
    try:
        return (folder / ".made").read_text()
    except FileNotFoundError:
        return None


def _mark(folder: Path, made_of: str) -> None:
    (folder / ".made").write_text(made_of)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m testbed.roots", description="Other generations of Slurm."
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="Debian's name of the release")
    parser.add_argument(
        "--where-possible", nargs="*", default=[], metavar="SUITE", help="a build that fails is told"
    )
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="this command instead of the tests")
    given = parser.parse_args()
    if not given.suites and not given.where_possible:
        print("error: name a release, such as trixie", file=sys.stderr)
        return 2
    failed = []
    for suite in dict.fromkeys([*given.suites, *given.where_possible]):
        try:
            root = ready_root(suite)
            print(f"Debian {suite}: {root.version}", flush=True)
        except RootError as error:
            print(f"error: {error}", file=sys.stderr)
            if suite in given.where_possible:
                print(f"NOT TESTED: Debian {suite}, for it could not be built here", file=sys.stderr)
            else:
                failed.append(suite)
            continue
        # Most of their time is waiting; a module's tests share a cluster, so they stay together.
        tests = ["tests/cluster", "-m", "generations", "-n", "auto", "--dist", "loadfile"]
        command = given.run or [str(root.python), "-m", "pytest", *tests]
        if subprocess.run(root.inside(command), env=environment(), cwd=REPO, check=False).returncode != 0:
            failed.append(suite)
    if failed:
        print(f"failed on: {', '.join(f'Debian {suite}' for suite in failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
