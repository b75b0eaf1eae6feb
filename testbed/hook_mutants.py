"""Faults of the hooks and of what installs them (field cases A1, A2): each would drain a node, or lose a run."""

from __future__ import annotations

from typing import Final

from .mutant import Mutant

PROLOG: Final = "../../prolog/slurm-pfi-prolog"
EPILOG: Final = "../../epilog/slurm-pfi-epilog"
HOOKS: Final = "tests/test_hooks.py"
BROKEN: Final = "tests/test_hooks_broken.py"
INSTALL: Final = "tests/test_hooks_install.py"
REFUSED: Final = "tests/test_hooks_refused.py"

HOOK_MUTANTS: Final = (
    Mutant(
        name="a-prolog-that-waits-for-what-hangs",
        invariant="A2",
        file=PROLOG,
        old='    if wait "$timer" 2>/dev/null; then\n',
        new='    if wait "$worker" && false; then\n',
        tests=(f"{BROKEN}::test_what_hangs_is_left_in_time",),
    ),
    Mutant(
        name="a-worker-that-holds-slurmds-pipe",
        invariant="A2",
        file=PROLOG,
        old='        "$@"\n    } </dev/null >/dev/null 2>&1 &\n',
        new='        "$@"\n    } &\n',
        tests=(f"{BROKEN}::test_what_hangs_is_left_in_time",),
    ),
    Mutant(
        name="a-timer-that-may-miss-its-end",
        invariant="A2",
        file=EPILOG,
        old='kill -KILL "$timer"\' EXIT',
        new=":' EXIT",
        tests=(f"{BROKEN}::test_a_hook_takes_no_longer_than_its_work",),
    ),
    Mutant(
        name="a-hook-that-ends-as-its-shell-ended",
        invariant="A1",
        file=PROLOG,
        old="trap 'ended \"$?\"' EXIT\n",
        new="",
        tests=(f"{BROKEN}::test_no_process_can_be_started",),
    ),
    Mutant(
        name="a-log-that-is-made-where-none-is",
        invariant="A1",
        file=EPILOG,
        old='    [ -c "$log_file" ] || [ -f "$log_file" ] || return 0\n',
        new="",
        tests=(f"{BROKEN}::test_no_log_to_write_to",),
    ),
    Mutant(
        name="no-list-of-gpus-means-all",
        invariant="A4",
        file=PROLOG,
        old='    [ -n "$gpus" ] || gpus=-\n',
        new='    [ -n "$gpus" ] || gpus=0-7\n',
        tests=(f"{HOOKS}::test_gpus",),
    ),
    Mutant(
        name="a-late-epilog-ends-another-run",
        invariant="A11",
        file=EPILOG,
        old='    elif [ "$restart" -gt 0 ]; then\n',
        new='    else\n        remove "$jobs/$job_id".*\n',
        tests=(f"{HOOKS}::test_epilog_takes_its_own_runs_file_only",),
    ),
    Mutant(
        name="a-setting-that-changes-what-we-assume-is-not-named",
        invariant="G2",
        file="cli/checks/everything.py",
        old="    slurm.slurm_files,\n    slurm.risks,\n",
        new="    slurm.slurm_files,\n",
        tests=("tests/test_cli_doctor.py::test_hooks_check_names_the_five_risks_and_changes_nothing",),
    ),
    Mutant(
        name="a-hook-goes-while-slurmd-is-about-to-run-it",
        invariant="A1",
        file="cli/hooks/quiet.py",
        old="                if not watch.drain():\n                    os.unlink(",
        new="                if True:\n                    os.unlink(",
        tests=(f"{INSTALL}::test_a_hook_that_is_looked_for_while_it_goes_is_there_again",),
    ),
    Mutant(
        name="a-pattern-left-without-a-file",
        invariant="A1",
        file="cli/hooks/plan.py",
        old="    if ours and len(ours) == len(found):\n",
        new="    if False:\n",
        tests=(f"{INSTALL}::test_a_pattern_is_never_left_without_a_file",),
    ),
    Mutant(
        name="what-slurmctld-runs-with-is-not-asked",
        invariant="A1",
        file="cli/hooks/plan.py",
        old="    if site.running is not None:\n        confs.append(",
        new="    if False:\n        confs.append(",
        tests=(f"{INSTALL}::test_without_hooks_the_lines_for_slurm_conf_are_said",),
    ),
    Mutant(
        name="a-hook-written-where-users-may-write",
        invariant="A1",
        file="cli/hooks/plan.py",
        old="    check_folder(folder)\n    check_runnable(folder)\n",
        new="    check_runnable(folder)\n",
        tests=(
            f"{REFUSED}::test_a_folder_that_others_may_write",
            f"{REFUSED}::test_a_folder_that_is_a_symlink",
        ),
    ),
)
