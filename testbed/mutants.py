"""Plant faults in copies of the sources and see the tests fail: a test that no fault can break proves nothing.

    python -m testbed.mutants [NAME...]

Each mutant is one replaced piece of text in one file and the tests that must notice. The working tree is not touched.
Exit 0 when every mutant was caught, 1 when one survived, 2 when a piece of text is no longer there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Final

from .board_mutants import BOARD_MUTANTS
from .chaos_mutants import CHAOS_MUTANTS
from .fault_mutants import FAULT_MUTANTS
from .hook_mutants import HOOK_MUTANTS
from .manner_mutants import MANNER_MUTANTS
from .mutant import Mutant
from .shape_mutants import SHAPE_MUTANTS
from .tag_mutants import TAG_MUTANTS
from .telemetry_mutants import TELEMETRY_MUTANTS
from .time_mutants import TIME_MUTANTS
from .user_mutants import USER_MUTANTS

REPO: Final = Path(__file__).resolve().parent.parent
COPIED: Final = ("src", "tests", "testbed", "pyproject.toml", "prolog", "epilog", "etc", "spank")
LIMIT_S: Final = 300

LOOP: Final = ("tests/test_closed_loop.py", "tests/test_checker_cores.py")
REBOUND: Final = ("tests/test_rebound.py", "tests/test_checker_cores.py")
GUARD: Final = ("tests/test_guard.py",)
LEARNER: Final = ("tests/test_elasticity_learner.py",)
NODE: Final = (
    "tests/test_node_core.py",
    "tests/test_node_sets.py",
    "tests/test_node_priors.py",
    "tests/test_node_machine.py",
)


MUTANTS: Final = (
    *FAULT_MUTANTS,
    *BOARD_MUTANTS,
    *HOOK_MUTANTS,
    *MANNER_MUTANTS,
    *CHAOS_MUTANTS,
    *TELEMETRY_MUTANTS,
    *SHAPE_MUTANTS,
    *TAG_MUTANTS,
    *TIME_MUTANTS,
    *USER_MUTANTS,
    Mutant(
        name="raise-before-lower",
        invariant="1",
        file="allocation/transition.py",
        old="    if room_mw < 0:\n        return tuple(caps)\n",
        new="    return tuple(part.target_mw for part in held)\n",
        tests=LOOP,
    ),
    Mutant(
        name="forget-an-unacknowledged-raise",
        invariant="1, 2",
        file="controller/ledger.py",
        old="    return tuple(sent for sent in node.outstanding if sent.plan.id >= held)",
        new="    return tuple(sent for sent in node.outstanding if sent.plan.id == held)",
        tests=LOOP,
    ),
    Mutant(
        name="a-rebound-without-its-limit",
        invariant="no new peak",
        file="controller/rebound.py",
        old="    return Hold(rebound, asking, max(least_mw, level_mw), before_mw, least_mw, floors_mw)",
        new="    return Hold(rebound, asking, uncapped_mw - MW_PER_W, before_mw, least_mw, floors_mw)",
        tests=REBOUND,
    ),
    Mutant(
        name="a-rebound-that-takes-what-the-window-left",
        invariant="no new peak",
        file="controller/rebound.py",
        old="    asking = tuple(_kept(one, rebound) for one in asking)\n",
        new="",
        tests=REBOUND,
    ),
    Mutant(
        name="a-release-told-as-the-floor-that-was-promised",
        invariant="5",
        file="controller/planning.py",
        old="floor_mw = demand.floor_mw if held is None else held.floors_mw.get(members, demand.floor_mw)",
        new="floor_mw = demand.floor_mw",
        tests=REBOUND,
    ),
    Mutant(
        name="a-silent-nodes-watts-given-to-others-in-a-rebound",
        invariant="no new peak",
        file="controller/rebound.py",
        old="for key, gpu in site.gpus.items() if gpu.commandable\n    )\n    return site.fixed_mw",
        new="for key, gpu in site.gpus.items()\n    )\n    return site.fixed_mw",
        tests=REBOUND,
    ),
    Mutant(
        name="all-nodes-give-back-in-one-instant",
        invariant="no new peak",
        file="controller/dispatch.py",
        old="config.times.response_s + share * quick_s(config)",
        new="config.times.response_s",
        tests=REBOUND,
    ),
    Mutant(
        name="a-node-gives-back-before-it-can-hear-of-the-rebound",
        invariant="no new peak",
        file="controller/dispatch.py",
        old="    return RESPONSES_LATE * config.times.response_s + share * quick_s(config)\n",
        new="    return share\n",
        tests=REBOUND,
    ),
    Mutant(
        name="restore-in-the-epilog-inside-a-window",
        invariant="3",
        file="node/limits.py",
        old='    return _within(gpu, step.park_cap_mw, f"park: {reason}", None)',
        new='    return Wanted(cap_mw=prior_mw, reason=f"restore: {reason}")',
        tests=(*NODE, *LOOP),
    ),
    Mutant(
        name="believe-another-commanders-plan-is-gone",
        invariant="2, 8",
        file="controller/ledger.py",
        old="    if not node.fenced or (node.report is not None and node.report.released):\n",
        new="    if node.report is not None and node.report.released:\n",
        tests=("tests/test_ledger.py",),
    ),
    Mutant(
        name="a-silent-node-counts-nothing",
        invariant="2",
        file="controller/ledger.py",
        old="        return node.gpus * node.gpu_max_mw\n    told_mw",
        new="        return 0\n    told_mw",
        tests=("tests/test_ledger.py",),
    ),
    Mutant(
        name="steps-that-may-have-begun-are-forgotten",
        invariant="2",
        file="controller/ledger.py",
        old="        if place == surely or steps[place].starts_in_s - early_s <= age_s:",
        new="        if place == surely:",
        tests=("tests/test_ledger.py",),
    ),
    Mutant(
        name="a-faulty-gpu-beside-sound-ones-is-not-counted",
        invariant="1, 2",
        file="controller/planning.py",
        old="        beside = {gpu.key: gpu for gpu in near if not gpu.commandable}",
        new="        beside: dict[GpuKey, Gpu] = {}",
        tests=("tests/test_controller_core.py",),
    ),
    Mutant(
        name="numbers-of-a-node-are-believed-unseen",
        invariant="2",
        file="controller/core.py",
        old="        report = sound(report, node)\n",
        new="",
        tests=("tests/test_controller_core.py",),
    ),
    Mutant(
        name="a-node-speaks-for-runs-that-slurm-has-elsewhere",
        invariant="2",
        file="controller/core.py",
        old="            elif view.job is not None and report.node not in view.gpus:",
        new="            elif False:",
        tests=("tests/test_controller_core.py",),
    ),
    Mutant(
        name="a-new-epoch-is-not-carried-to-the-nodes",
        invariant="8",
        file="controller/dispatch.py",
        old="    if (old.id.epoch, old.mode, old.priors, old.gone) != (new.id.epoch, new.mode, new.priors, new.gone):",
        new="    if (old.mode, old.priors, old.gone) != (new.mode, new.priors, new.gone):",
        tests=("tests/test_controller_core.py",),
    ),
    Mutant(
        name="a-set-whose-answer-was-lost-is-taken-for-undone",
        invariant="3",
        file="node/limits.py",
        old="        return Rest() if gpu.doubt_mw is None else restore",
        new="        return Rest()",
        tests=NODE,
    ),
    Mutant(
        name="a-set-that-was-never-made-counts-as-ours",
        invariant="4",
        file="node/core.py",
        old="        case SetFailed() if event.not_tried:",
        new="        case SetFailed() if not event.error:",
        tests=("tests/test_node_sets.py",),
    ),
    Mutant(
        name="a-late-node-of-a-run-is-raised-with-the-others",
        invariant="1",
        file="allocation/transition.py",
        old="        return sum(max(worst_mw, cap_mw) for worst_mw in self.worst_mw)",
        new="        return max(sum(self.worst_mw), cap_mw * len(self.worst_mw))",
        tests=("tests/test_transition.py",),
    ),
    Mutant(
        name="our-own-cap-recorded-as-the-prior-limit",
        invariant="4",
        file="node/limits.py",
        old="    if near(found_mw, gpu.prior_mw) or gpu.is_ours(found_mw):",
        new="    if near(found_mw, gpu.prior_mw):",
        tests=NODE,
    ),
    Mutant(
        name="raise-after-a-restart-without-a-plan",
        invariant="3",
        file="node/core.py",
        old='    return state.held.plan.mode == "observe" or state.held.start_ns(found) > state.started_ns',
        new="    return True",
        tests=NODE,
    ),
    Mutant(
        name="an-old-epoch-commands",
        invariant="8",
        file="node/plan.py",
        old="    if plan.id.epoch < state.highest_epoch:",
        new="    if plan.id.epoch < 0:",
        tests=NODE,
    ),
    Mutant(
        name="set-without-a-journal-entry",
        invariant="4",
        file="node/turn.py",
        old="            self.hold(gpu, ask.cap_mw, ask.run)\n        self.do(SetLimit(",
        new="            pass\n        self.do(SetLimit(",
        tests=NODE,
    ),
    Mutant(
        name="a-foreign-value-is-restored-over",
        invariant="7",
        file="node/limits.py",
        old="    if not gpu.is_ours(gpu.requested_mw):\n        return Rest(conflict_mw=gpu.requested_mw)\n",
        new="",
        tests=NODE,
    ),
    Mutant(
        name="floors-are-passed-by-an-economic-limit",
        invariant="5",
        file="controller/runs.py",
        old="    floor_mw = min(ceiling_mw, max(floor_mw, device_min_mw))",
        new="    floor_mw = min(ceiling_mw, device_min_mw)",
        tests=LOOP,
    ),
    Mutant(
        name="a-set-without-its-audit-record",
        invariant="9",
        file="node/turn.py",
        old='        self.audit(\n            "set",',
        new='        self.audit(\n            "planned",',
        tests=(*NODE, "tests/test_checker_cores.py"),
    ),
    Mutant(
        name="a-plan-taken-whole-without-a-certificate",
        invariant="6",
        file="allocation/guard.py",
        old="        if gain - SURE_SDS * sd > 0 and gain >= LEAST_GAIN * float(value.sum()):",
        new="        if step == 1.0:",
        tests=GUARD,
    ),
    Mutant(
        name="a-hull-beyond-what-a-run-may-be-given",
        invariant="6",
        file="allocation/guard.py",
        old="    points = np.maximum(end, 1.0 / steps)[:, None] *",
        new="    points = np.ones((end.size, 1)) *",
        tests=GUARD,
    ),
    Mutant(
        name="deeper-than-was-ever-measured",
        invariant="6",
        file="allocation/guard.py",
        old="    seen = np.maximum(even, deepest)",
        new="    seen = np.ones_like(even)",
        tests=GUARD,
    ),
    Mutant(
        name="baselines-without-an-error",
        invariant="6",
        file="elasticity/evidence.py",
        old="    error = np.where(real, tau * (1.0 - y), 0.0)",
        new="    error = np.zeros_like(y)",
        tests=LEARNER,
    ),
    Mutant(
        name="what-a-gpu-model-has-in-common-forgotten",
        invariant="6",
        file="elasticity/posterior.py",
        old="(kin**2).sum() + max(float(shared), 0.0)",
        new="(kin**2).sum()",
        tests=LEARNER,
    ),
    Mutant(
        name="a-run-outside-its-interval-believed",
        invariant="6",
        file="elasticity/learner.py",
        old="square > allowed",
        new="square < 0",
        tests=LEARNER,
    ),
    Mutant(
        name="floors-by-one-standard-deviation",
        invariant="5",
        file="elasticity/floors.py",
        old="FLOOR_SDS: Final = 2.25",
        new="FLOOR_SDS: Final = 1.0",
        tests=("tests/test_study_floors.py",),
    ),
)


class StaleMutantError(Exception):
    """The text that a mutant replaces is not there exactly once."""


def plant(mutant: Mutant, tree: Path) -> None:
    """Put the fault into a copy of the sources."""
    path = tree / "src/slurm_pfi" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise StaleMutantError(
            f"{mutant.name}: its text stands {text.count(mutant.old)} times in {mutant.file}"
        )
    path.write_text(text.replace(mutant.old, mutant.new))


def _python_of(tree: Path) -> Path:
    """An environment of its own for the copy: the NVML process is isolated and heeds no PYTHONPATH."""
    home = tree / "venv"
    packages = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (home / "bin").mkdir()
    base = Path(sys.executable).resolve()
    (home / "bin" / "python").symlink_to(base)
    (home / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    (packages / "copy.pth").write_text(f"{tree / 'src'}\n{sysconfig.get_path('purelib')}\n")
    return home / "bin" / "python"


def survives(mutant: Mutant, tree: Path) -> bool:
    """Whether the tests pass in the copy in spite of the fault."""
    command = [
        str(_python_of(tree)),
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=240",
        *mutant.tests,
    ]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    # A Python without pytest ends with 1 too, and would pass for one that caught everything.
    if done.returncode not in (0, 1) or not re.search(r"[0-9]+ (passed|failed|error)", done.stdout):
        raise StaleMutantError(f"{mutant.name}: pytest ended with {done.returncode}: {done.stdout[-500:]}")
    return done.returncode == 0


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    survivors = 0
    for mutant in chosen:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="pfi-mutant-") as folder:
            tree = Path(folder)
            for name in COPIED:
                source = REPO / name
                if source.is_dir():
                    shutil.copytree(
                        source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
                    )
                else:
                    shutil.copy(source, tree / name)
            (tree / "build").symlink_to(REPO / "build")
            try:
                plant(mutant, tree)
                survived = survives(mutant, tree)
            except StaleMutantError as error:
                print(error, file=sys.stderr)
                return 2
        survivors += survived
        verdict = "SURVIVED" if survived else "caught"
        print(
            f"{verdict:>8}  {mutant.name} (breaks {mutant.invariant}), {time.monotonic() - began_s:.0f} s",
            flush=True,
        )
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
