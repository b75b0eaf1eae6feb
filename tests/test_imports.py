"""The walls: which room may import which, and what the root daemon must never load.

Imports are read from the syntax tree, so one inside a function counts like one at the top.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

PACKAGE: Final = "slurm_pfi"
SOURCE: Final = Path(__file__).parent.parent / "src" / PACKAGE

QUANTITIES: Final = frozenset({"units", "model", "flex"})
BASE: Final = QUANTITIES | {"files", "config"}
ADAPTERS: Final = frozenset({"gpu", "slurm", "signals", "meters", "store", "bus"})

# A room may import itself and the rooms named here, nothing else of ours.
MAY: Final[dict[str, frozenset[str]]] = {
    "units": frozenset(),
    "model": frozenset({"units"}),
    "flex": frozenset({"model"}),
    "files": frozenset(),
    "progress": frozenset(),
    "callbacks": frozenset({"progress"}),
    "config": QUANTITIES,
    "elasticity": frozenset({"units", "model"}),
    "allocation": frozenset({"units", "model", "elasticity"}),
    **dict.fromkeys(ADAPTERS, BASE),
    "node": BASE | (ADAPTERS - {"signals", "meters"}),
    "controller": BASE | (ADAPTERS - {"gpu"}) | {"elasticity", "allocation"},
    "sim": BASE | {"progress", "elasticity", "allocation"},
    # The command line starts the daemons. Only its study module may import the simulation.
    "cli": BASE | ADAPTERS | {"elasticity", "allocation", "node", "controller"},
    "__main__": frozenset({"cli", "node"}),
    "__init__": frozenset(),
}
# Parts of the controller: measuring stands below all else there, the other two above all but the shell.
LOWEST_PART: Final = "measuring"
PARTS_OF_THE_SHELL: Final = frozenset({"answers", "worker"})
NO_ROOM_OF_NODE: Final = ("numpy", "click", "rich", "ClusterShell")


def modules() -> list[Path]:
    return sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))


def room_of(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


def imported(tree: ast.Module, module: Path) -> Iterator[str]:
    """Full names of all that a module imports, relative ones resolved; ``from a import b`` gives ``a`` and ``a.b``."""
    package = [PACKAGE, *module.parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def rooms_imported(text: str, module: Path) -> set[str]:
    """Our rooms that a module with this text would import."""
    names = (name.split(".") for name in imported(ast.parse(text), module))
    rooms = {parts[1] for parts in names if parts[0] == PACKAGE and len(parts) > 1}
    return {
        room for room in rooms if (SOURCE / room).is_dir() or (SOURCE / f"{room}.py").is_file() or room in MAY
    }


def broken_walls(text: str, module: Path) -> set[str]:
    room = room_of(module)
    allowed = MAY[room] | {room}
    if module.parts[:1] == ("cli",) and module.with_suffix("").parts[1] == "study":
        allowed |= {"sim"}
    return rooms_imported(text, module) - allowed


@pytest.mark.parametrize("module", modules(), ids=str)
def test_a_room_imports_only_what_its_walls_allow(module: Path) -> None:
    assert room_of(module) in MAY, f"{module}: a new room needs its walls in MAY"
    broken = broken_walls((SOURCE / module).read_text(encoding="utf-8"), module)
    assert not broken, f"{module} imports {', '.join(sorted(broken))}"


def broken_parts(text: str, module: Path) -> set[str]:
    """Parts and single modules of the controller that one of its modules would import and may not."""
    names = (name.split(".") for name in imported(ast.parse(text), module))
    folder = SOURCE / "controller"
    parts = {
        name[2]
        for name in names
        if name[:2] == [PACKAGE, "controller"]
        and len(name) > 2
        and ((folder / name[2]).is_dir() or (folder / f"{name[2]}.py").is_file())
    }
    own = module.parts[1].removesuffix(".py")
    if own == LOWEST_PART:
        return parts - {own}
    return set() if own == "shell" else parts & PARTS_OF_THE_SHELL - {own}


@pytest.mark.parametrize("module", [path for path in modules() if path.parts[0] == "controller"], ids=str)
def test_the_parts_of_the_controller_have_walls_too(module: Path) -> None:
    broken = broken_parts((SOURCE / module).read_text(encoding="utf-8"), module)
    assert not broken, f"{module} imports {', '.join(sorted(broken))}"


@pytest.mark.parametrize(
    ("module", "text", "broken"),
    [
        ("controller/measuring/x.py", "from .record import Record\nfrom ...model import Run", set()),
        ("controller/measuring/x.py", "from ..state import State", {"state"}),
        ("controller/measuring/x.py", "from .. import ledger", {"ledger"}),
        ("controller/core.py", "from .measuring.measured import observe", set()),
        ("controller/core.py", "def f():\n    from .answers.privacy import Asker", {"answers"}),
        ("controller/worker/x.py", "from ..answers.fresh import Fresh\nfrom .pace import Pace", {"answers"}),
        ("controller/shell.py", "from .answers.orders import Orders", set()),
    ],
)
def test_the_check_of_parts_sees_what_it_should(module: str, text: str, broken: set[str]) -> None:
    assert broken_parts(text, Path(module)) == broken


@pytest.mark.parametrize(
    ("module", "text", "broken"),
    [
        ("bus/x.py", "from ..store import audit", {"store"}),
        ("bus/x.py", "from .. import store", {"store"}),
        ("bus/x.py", "import slurm_pfi.node.core", {"node"}),
        ("bus/x.py", "def f():\n    from slurm_pfi.gpu import device", {"gpu"}),
        ("bus/x.py", "from .codec import encode\nfrom ..model import Plan\nimport json", set()),
        ("node/x.py", "from ..controller.core import step", {"controller"}),
        ("controller/x.py", "from ..node import core", {"node"}),
        ("allocation/x.py", "from ..bus.codec import encode\nfrom ..elasticity.curve import C", {"bus"}),
        ("elasticity/x.py", "from ..allocation import problem", {"allocation"}),
        ("elasticity/deep/x.py", "from ...config import Config", {"config"}),
        ("progress.py", "from .model import Run", {"model"}),
        ("cli/jobs.py", "from ..sim import job", {"sim"}),
        ("cli/study.py", "from ..sim import job", set()),
        ("cli/study/x.py", "from ...sim import job", set()),
        ("cli/checks/study.py", "from ...sim import job", {"sim"}),
    ],
)
def test_the_check_sees_what_it_should(module: str, text: str, broken: set[str]) -> None:
    assert broken_walls(text, Path(module)) == broken


def test_the_progress_function_needs_the_standard_library_alone() -> None:
    path = SOURCE / "progress.py"
    names = {name.split(".")[0] for name in imported(ast.parse(path.read_text("utf-8")), Path("progress.py"))}
    assert names <= sys.stdlib_module_names | {"__future__"}


def test_what_users_import_loads_no_training_library() -> None:
    names = ", ".join(f"{PACKAGE}.callbacks.{name}" for name in ("huggingface", "lightning"))
    loaded = loaded_by(f"import {PACKAGE}, {PACKAGE}.progress, {names}")
    assert loaded <= sys.stdlib_module_names | {PACKAGE, "__main__"} | loaded_by("pass")


def modules_after(statement: str) -> set[str]:
    """Full names of all modules that a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def loaded_by(statement: str) -> set[str]:
    """Their top-level names."""
    return {name.split(".")[0] for name in modules_after(statement)}


def test_the_node_agent_loads_nothing_heavy() -> None:
    assert not loaded_by(f"import {PACKAGE}.node.command") & set(NO_ROOM_OF_NODE)


def test_a_question_waits_for_nothing_that_it_does_not_need() -> None:
    names = ", ".join(f"{PACKAGE}.cli.{name}" for name in ("root", "status", "job", "jobs", "what_if"))
    loaded = modules_after(f"import {names}")
    assert "click" in loaded
    assert not loaded & {"asyncio", "numpy", "ssl", "sqlite3", "ClusterShell", "rich.console"}


def test_no_module_of_the_node_agent_loads_anything_heavy() -> None:
    names = [path.stem for path in (SOURCE / "node").glob("*.py") if not path.stem.startswith("__")]
    assert not loaded_by(f"import {', '.join(f'{PACKAGE}.node.{name}' for name in names)}") & set(
        NO_ROOM_OF_NODE
    )


def test_the_checker_imports_nothing_of_ours() -> None:
    paths = sorted((SOURCE.parent.parent / "testbed" / "checker").rglob("*.py"))
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert PACKAGE not in {name.split(".")[0] for name in names}, path


def test_the_check_of_loaded_modules_sees_numpy() -> None:
    assert "numpy" in loaded_by("import numpy.linalg")


def test_node_is_dispatched_before_click_is_imported() -> None:
    statement = (
        f"import contextlib, io\nfrom {PACKAGE}.__main__ import main\n"
        "sys.argv = ['slurm-pfi', 'node', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n    main()"
    )
    loaded = loaded_by(statement)
    assert PACKAGE in loaded
    assert not loaded & set(NO_ROOM_OF_NODE)


def test_modules_stay_of_a_size_that_one_can_read() -> None:
    long = {
        str(module): lines
        for module in modules()
        if (lines := len((SOURCE / module).read_text("utf-8").splitlines())) > 450
    }
    assert not long, "make a folder of it"
